"""``shard_optimizer``: the user's own ``torch.optim`` object, working on the fragments this rank owns.

Its class becomes a subclass of the user's with the few methods that must know about flat gradients; schedulers,
groups, ``foreach`` and ``fused`` work as before. The step's pre-hook settles the gradients on all ranks and decides
alike everywhere; the post-hook brings the parameters back. State is created by torch in its first real step.
"""

import math
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Literal, cast

import torch
from torch import nn

from shardwise.errors import ConfigError, NonFiniteError, StateError
from shardwise.managed import Managed
from shardwise.memory import Slab
from shardwise.optim.families import check_elementwise, state_at_start, supports_fused
from shardwise.optim.fragments import BucketFragments
from shardwise.runtime.bucket import Bucket

__all__ = ["OnNonFinite", "ShardedOptimizer", "link_of", "shard_optimizer"]

OnNonFinite = Literal["skip", "raise", "ignore"]
_STAMP = "shardwise"


class ShardedOptimizer(torch.optim.Optimizer):
    """What ``shard_optimizer`` adds to an optimizer's class.

    Attributes:
        step_was_applied: whether the last ``step`` changed the parameters; False before the first.
        first_nonfinite: name of the first parameter whose gradient was not finite in the last step, or None.
    """

    _shardwise: "OptimizerLink"

    @property
    def step_was_applied(self) -> bool:
        """Whether the last ``step`` changed the parameters."""
        return self._shardwise.applied

    @property
    def first_nonfinite(self) -> str | None:
        """First parameter with a non-finite gradient in the last step, None if all were finite."""
        return self._shardwise.first_nonfinite

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: a copy would update the same masters, or nothing."""
        raise StateError("a sharded optimizer cannot be copied: build and shard a new one for a new model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: fragments are no state."""
        raise StateError("a sharded optimizer cannot be pickled: save optimizer.state_dict() of every rank")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters, reduced or not."""
        self._shardwise.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; their fragments take their places."""
        link = self.__dict__.get("_shardwise")
        super().add_param_group(param_group if link is None else link.translate_new_group(param_group))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, stamped with the layout it belongs to."""
        state = super().state_dict()
        state[_STAMP] = self._shardwise.stamp()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on the same rank of the same layout.

        Raises:
            StateError: the state belongs to another rank or layout, or carries no stamp.
        """
        state = dict(state_dict)
        stamp = state.pop(_STAMP, None)
        if stamp != self._shardwise.stamp():
            raise StateError(
                f"optimizer.load_state_dict: the state was saved as {stamp}, this optimizer is "
                f"{self._shardwise.stamp()}; a state dict holds one rank's fragments and fits that layout only"
            )
        super().load_state_dict(state)


class OptimizerLink:
    """Between one optimizer and one model: fragments by parameter, and the verdict of the last step."""

    def __init__(self, optimizer: torch.optim.Optimizer, managed: Managed, on_nonfinite: OnNonFinite) -> None:
        self.optimizer = optimizer
        self.original_class = type(optimizer)
        self.managed = managed
        self.on_nonfinite = on_nonfinite
        self.applied = False
        self.first_nonfinite: str | None = None
        self.groups: list[list[nn.Parameter]] = []  # the user's parameters, frozen ones included
        self._fragments: dict[int, BucketFragments] = {}  # by bucket index
        self._slots: dict[int, set[int]] = {}  # by bucket index: slots that belong to this optimizer

    def translate(self, group: Mapping[str, Any], params: list[nn.Parameter]) -> list[nn.Parameter]:
        """Note a group's parameters and return the fragments that stand for them on this rank."""
        self.groups.append(list(params))
        return [fragment for param in params for fragment in self._fragment(group, param)]

    def translate_new_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a new parameter group with fragments in place of parameters."""
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(isinstance(entry, tuple) for entry in params):
            params = [param for _, param in params]
        self.managed.check_owned(params, f"add_param_group(group {len(self.groups)})")
        known = {id(param) for old in self.groups for param in old}
        twice = [self.managed.name_of(param) for param in params if id(param) in known]
        if twice:
            raise ConfigError(f"add_param_group: {twice[:5]} belong to a parameter group already")
        return {**group, "params": self.translate({**self.optimizer.defaults, **group}, params)}

    def _fragment(self, group: Mapping[str, Any], param: nn.Parameter) -> list[nn.Parameter]:
        binding = self.managed.binding_of(param)
        bucket = binding.bucket
        if bucket.grads is None:
            return []
        index, slot = bucket.site.index, binding.slot(param).index
        if index not in self._fragments:
            self._fragments[index] = BucketFragments(bucket, self.managed.loans)
        self._slots.setdefault(index, set()).add(slot)
        fragment = self._fragments[index].params.get(slot)
        if fragment is None:
            return []
        state = state_at_start(type(self.optimizer), group, fragment)
        if state is not None:
            self.optimizer.state[fragment] = state
        return [fragment]

    def adopt(self, param: nn.Parameter) -> None:
        """A parameter of one of the groups became trainable: give it fragments there."""
        for group, params in zip(self.optimizer.param_groups, self.groups, strict=True):
            if any(param is known for known in params):
                group["params"].extend(self._fragment(group, param))

    def owns(self, param: nn.Parameter) -> bool:
        """Whether the parameter is in one of the groups."""
        return any(param is known for group in self.groups for known in group)

    def settings(self) -> str:
        """Return the class and the groups' numbers, which must be the same on all ranks."""
        groups = [
            {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in sorted(group.items())}
            for group in self.optimizer.param_groups
        ]
        own = {"params", "fused", "foreach", "capturable", "differentiable"}  # may depend on what a rank owns
        plain = [{key: v for key, v in group.items() if key not in own and _is_plain(v)} for group in groups]
        return f"{type(self.optimizer).__name__} {plain}"

    def are_fragments_edited(self) -> bool:
        """Whether fragments were edited outside the step; asks once."""
        edited = [fragments for fragments in self.fragments() if fragments.are_edited]
        for fragments in edited:
            fragments.note_versions()
        return bool(edited)

    def fragments(self) -> list[BucketFragments]:
        """Return the fragments of every bucket this optimizer touches, in bucket order."""
        return [self._fragments[index] for index in sorted(self._fragments)]

    def slabs_of(self, bucket: Bucket) -> list[Slab]:
        """Return what may hold memory beside a bucket's own."""
        fragments = self._fragments.get(bucket.site.index)
        return [] if fragments is None else fragments.slabs()

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Settle the gradients, decide with all ranks, hand the fragments their gradients."""
        managed, runtime = self.managed, self.managed.runtime
        if managed.is_released:
            raise StateError("step: the optimizer's model is sharded no more: build an optimizer for the plain one")
        if _is_nested_step(optimizer):
            return args, kwargs
        if {"grad_scale", "found_inf"} & optimizer.__dict__.keys():
            for name in ("grad_scale", "found_inf"):  # a GradScaler sets them for the length of one step
                optimizer.__dict__.pop(name, None)
            raise StateError(
                "torch.amp.GradScaler does not see sharded gradients: use shardwise.scale_loss(model, loss).backward() "
                "for fp16, and no scaler for bf16 and fp32"
            )
        args, kwargs = _run_closure(args, kwargs)
        self.applied = False
        managed.announce_step()
        managed.clear_failed_forward()
        managed.check_edits()
        settlement = managed.settler.settle()
        self.first_nonfinite = settlement.first_nonfinite
        bad = not math.isfinite(settlement.norm) or settlement.first_nonfinite is not None
        where = f"{settlement.first_nonfinite or 'the norm itself'} (norm {settlement.norm})"
        runtime.num_steps += 1
        if runtime.scaler is not None:
            runtime.scaler.judge(runtime.num_backwards, where if bad else None)
        elif bad and self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"step {runtime.num_steps - 1}: gradients are not finite, first in {where}; no rank was updated. Pass "
                'on_nonfinite="skip" to shard_optimizer to skip such steps, "ignore" to apply them'
            )
        runtime.announce_change()
        skip = bad and (runtime.scaler is not None or self.on_nonfinite == "skip")
        for fragments in self.fragments():
            bucket = fragments.bucket
            bucket.params.settle()
            slots = settlement.arrived[bucket.site.index] & self._slots[bucket.site.index]
            bucket.site.lanes.on_compute(writes=[bucket.params.master])
            fragments.set_grads(() if skip else slots)
        self.applied = not skip
        return args, kwargs

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bring the updated parameters back to every rank."""
        if _is_nested_step(optimizer):
            return
        for fragments in self.fragments():
            fragments.drop_grads()
            fragments.note_versions()
        self.managed.after_step([fragments.bucket for fragments in self.fragments()] if self.applied else [])

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget or zero the gradients of this optimizer's parameters."""
        self.managed.clear_failed_backward()
        for fragments in self.fragments():
            fragments.drop_grads()
            bucket = fragments.bucket
            grads, mine = bucket.trainable_grads, self._slots[bucket.site.index]
            if set_to_none and len(mine) == len(bucket.site.layout.slots):
                grads.empty()
            else:
                for slot in mine:
                    grads.discard(bucket.site.layout.slots[slot], keep_arrived=not set_to_none)
        self.managed.runtime.grads_version += 1

    def stamp(self) -> dict[str, Any]:
        """Describe the layout and the rank that a state dict fits."""
        digests = [fragments.bucket.site.layout.digest for fragments in self.fragments()]
        ranges = [list(f.bucket.site.bounds(f.bucket.site.placement.num_optim)) for f in self.fragments()]
        return {"layouts": digests, "ranges": ranges}


def shard_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, on_nonfinite: OnNonFinite = "raise", partial: bool = False
) -> ShardedOptimizer:
    """Let an element-wise torch optimizer update the shards of a sharded model.

    The same object comes back; its groups hold, instead of each parameter, the flat fragment that this rank owns.
    Where torch has a fused kernel and the optimizer leaves the choice open, it is used.

    Args:
        optimizer: built over ``model.parameters()`` (or groups of them) before or after ``shard``, without state.
        model: what ``shard`` returned.
        on_nonfinite: what all ranks do when a gradient is infinite or NaN: "raise" (nothing is changed), "skip" the
            step, or "ignore" it. fp16 with a loss scale always skips.
        partial: allow trainable parameters that are in no group.

    Raises:
        ConfigError: the optimizer needs whole matrices, has state already, misses trainable parameters, or holds
            tensors that are not the model's.
    """
    managed = Managed.of(model)
    if on_nonfinite not in ("skip", "raise", "ignore"):
        raise ConfigError(f'on_nonfinite must be "skip", "raise" or "ignore", got {on_nonfinite!r}')
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError("the optimizer is sharded already")
    check_elementwise(type(optimizer))
    if any(not isinstance(state, Mapping) or float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has state, of earlier steps or of its own, which belongs to whole parameters or to none: "
            "shard it before its first step"
        )
    for number, group in enumerate(optimizer.param_groups):
        managed.check_owned(group["params"], f"the optimizer's group {number}")
    managed.check_covered([p for group in optimizer.param_groups for p in group["params"]], partial=partial)
    link = OptimizerLink(optimizer, managed, on_nonfinite)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = link.translate(group, group["params"])
        group.pop("param_names", None)
        _prefer_fused(optimizer, group, managed.device)
    original = type(optimizer)
    optimizer.__dict__["_shardwise"] = link
    optimizer.__dict__["_step_supports_amp_scaling"] = True  # so that a GradScaler reaches our pre-hook, which explains
    optimizer.__class__ = type(
        f"Sharded{original.__name__}", (ShardedOptimizer, original), {"__doc__": original.__doc__}
    )
    optimizer.register_step_pre_hook(link.before_step)
    optimizer.register_step_post_hook(link.after_step)
    managed.optimizers.append(link)
    return cast(ShardedOptimizer, optimizer)


def link_of(optimizer: torch.optim.Optimizer) -> OptimizerLink:
    """Return the link of a sharded optimizer."""
    return cast(OptimizerLink, optimizer.__dict__["_shardwise"])


def _prefer_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> None:
    # torch's fused SGD cannot start the momentum of one parameter later than that of another
    undecided = not group.get("momentum") and all(
        group.get(key) in (None, False) for key in ("differentiable", "capturable")
    )
    open_choice = "fused" in group and group["fused"] is None and group.get("foreach") is None
    if undecided and open_choice and supports_fused(type(optimizer), device):
        group["fused"] = optimizer.defaults["fused"] = True


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the ``super().step()`` of a subclass: torch runs the hooks for each of the two.

    Reads the stack, because a count of entered steps would go wrong after one that failed.
    """
    frame, num_steps = sys._getframe(1), 0
    while frame.f_back is not None and num_steps < 2:
        frame = frame.f_back
        if frame.f_code is _STEP_WRAPPER and frame.f_locals["args"][0] is optimizer:
            num_steps += 1
    return num_steps > 1


def _wrapper_code() -> CodeType:
    """Return the code of what torch wraps around every optimizer's ``step``."""
    return torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


_STEP_WRAPPER = _wrapper_code()


def _run_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Evaluate a closure before the gradients are settled; the step then only reads its loss.

    ``args[0]`` is the optimizer itself, as torch's step hooks pass it.
    """
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, dict(kwargs)
    with torch.enable_grad():
        loss = closure()
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return (args[0], lambda: loss, *args[2:]), rest
