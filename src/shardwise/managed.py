"""One sharded model: its runtime, its hooks, its parameters, and the checks that the user's model is still the same.

It hangs on the root module under the one reserved name, and refuses to be copied or pickled there, so that
``deepcopy(model)`` and ``pickle`` raise instead of producing a model of empty tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.binding import Binding
from shardwise.build import Member, Settings, plan_buckets
from shardwise.comm.base import Comm, Mesh, reserve
from shardwise.comm.council import Council
from shardwise.errors import ConfigError, StateError
from shardwise.hooks import ModelHooks, backward_is_running
from shardwise.modules import UnitModule, collect_params
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.loans import Loans
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.settle import Settler
from shardwise.runtime.site import Site

__all__ = ["RESERVED_NAME", "VOID", "Managed", "OptimizerHook", "make_bucket"]

RESERVED_NAME = "_shardwise"
VOID = "void"  # in its place, where the model's memory was given back


class OptimizerHook(Protocol):
    """What a sharded model asks of the optimizers that update it."""

    def owns(self, param: nn.Parameter) -> bool:
        """Whether the parameter is in one of its groups."""

    def adopt(self, param: nn.Parameter) -> None:
        """Start to update a parameter of one of its groups that became trainable."""

    def settings(self) -> str:
        """Return what decides about its updates, in words that are the same on all ranks."""

    def are_fragments_edited(self) -> bool:
        """Whether its fragments were edited outside its step."""


class Pending(Protocol):
    """A save that goes on beside training."""

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""

    def wait(self) -> Path:
        """Wait for its end on all ranks. Collective."""


@dataclass(frozen=True)
class _Node:
    """What one module held when it was sharded."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter | None, ...]
    children: tuple[nn.Module | None, ...]

    def unchanged(self) -> bool:
        """Whether the module still holds the same parameter and child objects."""
        module = self.module
        return self._ids == [*map(id, module._parameters.values()), *map(id, module._modules.values())]

    @cached_property
    def _ids(self) -> list[int]:
        return [*map(id, self.params), *map(id, self.children)]


class Managed:
    """A sharded model and everything that serves it."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitModule],
        runtime: Runtime,
        settler: Settler,
        settings: Settings,
        mesh: dict[str, Comm],
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.runtime = runtime
        self.settler = settler
        self.settings = settings
        self.mesh = mesh
        self.optimizers: list[OptimizerHook] = []
        self.loans = Loans()
        self.is_released = False
        self.council = Council(mesh, f"model-{settler.agreement.index}")
        self.pending_save: Pending | None = None
        self.before_step: list[Callable[[], None]] = []  # collective, called by every optimizer before it moves
        settler.describe = lambda: [optimizer.settings() for optimizer in self.optimizers]
        self.hooks = ModelHooks(runtime, [unit.module for unit in units], self.check_tree)
        self._bindings: dict[int, Binding] = {}  # by id of the parameter
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self._nodes: tuple[_Node, ...] = ()
        self._next_index = 0

    @staticmethod
    def of(model: nn.Module) -> "Managed":
        """Return what manages a model.

        Raises:
            ConfigError: the module is not a sharded root.
        """
        managed = getattr(model, "__dict__", {}).get(RESERVED_NAME)
        if not isinstance(managed, Managed):
            raise ConfigError(f"{type(model).__name__} is not a sharded model: pass what shardwise.shard() returned")
        return managed

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: a copy of shards and hooks is no model."""
        raise StateError(
            "a sharded model cannot be deep-copied: build a second model and load shardwise.full_state_dict(model) "
            "into it; for an average of weights, average shardwise.local_parameters(model) on every rank"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: shards and hooks are no model."""
        raise StateError("a sharded model cannot be pickled: save shardwise.full_state_dict(model) instead")

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        return self.runtime.means.arena.device

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` bucket numbers that no bucket of this model has or had."""
        first = max(reserve(self.mesh, count), self._next_index)
        self._next_index = first + count
        return first

    def wrap_comms(self, wrap: Callable[[str, Comm], Comm]) -> Callable[[], None]:
        """Put a communicator around each one of this model, by axis; return what takes them away again."""
        before = dict(self.mesh)
        self.mesh.update({axis: wrap(axis, comm) for axis, comm in before.items()})
        return lambda: self.mesh.update(before)

    def bind(self, members: Sequence[Member], buckets: Sequence[Bucket]) -> None:
        """Tie parameters to the buckets that were made for them."""
        for member, bucket in zip(members, buckets, strict=True):
            unit = self.runtime.units[member.plan.unit]
            binding = Binding(
                self.runtime, unit, unit.buckets.index(bucket), member.params, self.hooks.inside, self.hooks.arm
            )
            self.hooks.bind(binding)
            for p in member.params:
                self._bindings[id(p.param)] = binding

    def seal(self) -> None:
        """Remember the tree as it is now and guard every parameter."""
        self._nodes = tuple(
            _Node(name, module, tuple(module._parameters.values()), tuple(module._modules.values()))
            for name, module in self.model.named_modules()
        )
        self._flags = [(p.param, p.param.requires_grad) for p in collect_params(self.model)]
        for binding in self._all_bindings():
            binding.set_guard(on=True)
            binding.bucket.params.full.note_aliases()

    def _all_bindings(self) -> Iterable[Binding]:
        return self.hooks.all_bindings()

    def binding_of(self, param: Tensor) -> Binding:
        """Return the binding of one of the model's parameters."""
        return self._bindings[id(param)]

    def name_of(self, param: Tensor) -> str:
        """Return a parameter's fully qualified name."""
        return self._bindings[id(param)].name(param)

    def check_tree(self) -> None:
        """Check, at the start of a root forward, that the model still is what was sharded; follow changed flags.

        Raises:
            StateError: a module was added, removed or replaced, or a parameter's memory was swapped.
        """
        for node in self._nodes:
            if not node.unchanged():
                raise StateError(self._explain(node))
        with torch._C.DisableTorchFunctionSubclass():
            for binding in self._all_bindings():
                storage = binding.bucket.params.full.tensor.untyped_storage()._cdata
                for member in binding.members:
                    if member.param.untyped_storage()._cdata != storage:
                        raise StateError(
                            f"the memory of parameter {member.name} was replaced after shard() (by .data, to() or "
                            "load_state_dict(assign=True)): it would never be trained. Do this before shard()"
                        )
            changed = [(param, param.requires_grad) for param, flag in self._flags if param.requires_grad is not flag]
        self.check_edits()
        if changed:
            with torch.inference_mode(False), torch.no_grad():
                self._follow_flags([param for param, _ in changed])

    def check_edits(self) -> None:
        """Check that no parameter was edited through a view made outside ``unsharded``.

        Raises:
            StateError: names the unit; the edit would be lost on this rank or differ from the other ranks.
        """
        if self.loans.take_edits() or any(optimizer.are_fragments_edited() for optimizer in self.optimizers):
            raise StateError(
                "parameters were edited between steps through the optimizer's fragments or local_parameters(): other "
                "ranks, or the parameters themselves, do not know. Edit inside `with shardwise.unsharded(model):`"
            )
        for binding in self._all_bindings():
            if binding.is_edited() and not binding.unit.pins:
                raise StateError(
                    f"a parameter of {binding.bucket.label} was edited in place through a view of it (such as "
                    "detach()): the optimizer's master does not know. Edit inside `with shardwise.unsharded(model):`"
                )

    def _explain(self, node: _Node) -> str:
        where = node.name or "the root module"
        managed = {id(param) for param, _ in self._flags}
        new = [name for name, param in self.model.named_parameters() if id(param) not in managed]
        if new:
            return (
                f"{where} changed after shard(): parameters {new[:8]} are not managed and would train alone on each "
                "rank. Change the model before shard(), or build and shard it anew"
            )
        return f"a module or parameter was removed from {where} or replaced after shard(): shard the new model instead"

    def _follow_flags(self, changed: list[nn.Parameter]) -> None:
        """Freeze or unfreeze parameters while training; masters and moments of frozen ones stay."""
        frozen_before = [p for p in changed if p.requires_grad and self._bindings[id(p)].bucket.grads is None]
        if frozen_before:
            for binding in {id(b): b for b in (self._bindings[id(p)] for p in frozen_before)}.values():
                self._rebuild(binding)
            homeless = [self.name_of(p) for p in frozen_before if self.optimizers and not self._adopted(p)]
            if homeless:
                raise ConfigError(
                    f"parameters {homeless[:5]} became trainable but are in no group of the optimizer: put them into a "
                    "group when it is built, or call optimizer.add_param_group after this error"
                )
        self._flags = [(param, param.requires_grad) for param, _ in self._flags]
        for unit in self.runtime.units:
            unit.await_slots(
                frozenset(
                    (binding.number, binding.slot(param).index)
                    for binding in self.hooks.bindings[unit.index]
                    for param in binding.params
                    if not param.requires_grad
                )
            )

    def _adopted(self, param: nn.Parameter) -> bool:
        owners = [optimizer for optimizer in self.optimizers if optimizer.owns(param)]
        for optimizer in owners:
            optimizer.adopt(param)
        return bool(owners)

    def _rebuild(self, old: Binding) -> None:
        """Split a frozen bucket into what stays frozen and what trains now."""
        unit, bucket = old.unit, old.bucket
        old.demand()
        self.runtime.grads_version += 1
        sizes = {axis: comm.size for axis, comm in self.mesh.items()}
        planned = plan_buckets(self.model, old.members, self.units, sizes, self.settings)
        first = self.reserve(len(planned))
        made = [make_bucket(self.runtime, m, first + i, self.mesh) for i, m in enumerate(planned)]
        kept = tuple(b for b in unit.buckets if b is not bucket)
        others = [b for b in self.hooks.bindings[unit.index] if b is not old]
        unit.set_buckets((*kept, *made))
        for other in others:
            other.renumber()
        old.release(keep=True)
        self.hooks.unbind(old)
        bucket.drop()
        self.bind(planned, made)
        for new in made:
            new.params.adopt_full()
            new.params.full.note_aliases()
            new.reshard()
        for binding in self.hooks.bindings[unit.index]:
            binding.set_guard(on=True)

    def check_owned(self, params: Iterable[Tensor], where: str) -> None:
        """Check that tensors are parameters of this model.

        Raises:
            ConfigError: names where the foreign tensor is.
        """
        for number, param in enumerate(params):
            if id(param) not in self._bindings:
                raise ConfigError(
                    f"{where}: entry {number}, shape {tuple(param.shape)}, is no parameter of the sharded model (a "
                    "copy of it, or of another model?): build the optimizer from model.parameters()"
                )

    def check_covered(self, params: Iterable[Tensor], *, partial: bool) -> None:
        """Check that every trainable parameter is in some group.

        Raises:
            ConfigError: names those that are not, unless ``partial``.
        """
        given = {id(param) for param in params}
        missing = [self.name_of(p) for p, trains in self._flags if trains and id(p) not in given]
        if missing and not partial:
            raise ConfigError(
                f"{len(missing)} trainable parameters are in no group of the optimizer and would never change: "
                f"{missing[:8]}. Add them, freeze them, or pass partial=True"
            )

    def clear_failed_forward(self) -> None:
        """Forget forwards that a KeyboardInterrupt ended."""
        if not backward_is_running():
            self.hooks.abandon_calls()

    def clear_failed_backward(self) -> None:
        """Forget what a failed forward or backward left behind."""
        self.clear_failed_forward()
        if self.runtime.in_backward and not backward_is_running():
            self.runtime.reset(warn=False)

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        """Masters of ``buckets`` changed: refresh the parameters and let autograd notice graphs that are stale now."""
        self.runtime.end_step(buckets)
        self.note_update(buckets)

    def note_update(self, buckets: Sequence[Bucket]) -> None:
        """Parameters of ``buckets`` changed by our own hand: graphs of before are stale, nobody edited anything."""
        resident = [
            param
            for binding in self._all_bindings()
            if binding.bucket in buckets and not binding.bucket.params.sharded_axes
            for param in binding.params
        ]
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(resident)
        for binding in self._all_bindings():
            binding.note_versions()

    def announce_step(self) -> None:
        """Tell those who care that an optimizer is about to move. Collective."""
        for call in tuple(self.before_step):
            call()

    def release(self, *, keep: bool) -> None:
        """Undo the sharding: hooks gone, memory gone; ``keep`` leaves full parameters in the plain model."""
        self.runtime.announce_change()
        self.hooks.remove()
        self.is_released = True
        if keep:
            for unit in self.runtime.units:
                unit.unshard()
                unit.wait()
        for binding in list(self._all_bindings()):
            binding.release(keep=keep)
            binding.bucket.drop()
        self.model.__dict__.pop(RESERVED_NAME, None)
        if not keep:
            self.model.__dict__[RESERVED_NAME] = VOID


def make_bucket(runtime: Runtime, member: Member, index: int, mesh: Mesh) -> Bucket:
    """Allocate a planned bucket."""
    plan = member.plan
    site = Site(
        index=index,
        label=plan.label,
        layout=plan.layout,
        placement=plan.placement,
        dtypes=plan.dtypes,
        trainable=plan.trainable,
        mesh=mesh,
        arena=runtime.means.arena,
        lanes=runtime.means.lanes,
        journal=runtime.means.journal,
    )
    return Bucket(site)
