"""What one rank holds of a sharded model: parts of tensors in global coordinates, and values that JSON can say.

A pure function of the layout: each element is stored by the rank whose finest slice holds it, at every stage, so every
rank writes as much as any other. Reading changes nothing: no state is made, no generator moves.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.checkpoint.blocks import Held, as_bytes
from shardwise.checkpoint.generators import generator_states
from shardwise.checkpoint.manifest import Group, Kind, OptimizerFacts, Param, Stored, Values
from shardwise.checkpoint.plain import Plain, to_plain
from shardwise.checkpoint.tensorfile import NAMES_OF_DTYPES
from shardwise.errors import ConfigError
from shardwise.layout import Slot
from shardwise.managed import Managed
from shardwise.modules import collect_params
from shardwise.optim.fragments import BucketFragments
from shardwise.optim.shard import OptimizerLink
from shardwise.runtime.bucket import Bucket

__all__ = [
    "NOT_KEPT",
    "Contents",
    "Part",
    "Stateful",
    "all_buckets",
    "buffer_aliases",
    "collect_contents",
    "links_of",
    "modules_with_state",
    "persistent_buffers",
    "real_view",
]

# Of a group: the parameters themselves, and choices of an implementation that may differ from run to run.
NOT_KEPT = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})


class Stateful(Protocol):
    """Anything that tells its state as a dictionary and takes it back: a scheduler, a loader, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take a state over."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of one tensor, held by this rank.

    Attributes:
        stored: which tensor, without pieces.
        start: of the first element, in row-major order.
        flat: [n], live.
        held: what is written later, where that is not at once.
    """

    stored: Stored
    start: int
    flat: Tensor
    held: Held | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything one rank would save.

    Attributes:
        params: the model's parameters, the same on all ranks.
        parts: this rank's parts of tensors.
        values: of this rank.
    """

    params: tuple[Param, ...]
    parts: tuple[Part, ...]
    values: Values

    def without_frozen(self) -> "Contents":
        """Return the contents without parameters that do not train."""
        frozen = {param.name for param in self.params if not param.trainable}
        parts = [p for p in self.parts if p.stored.kind in ("buffer", "rng") or p.stored.name not in frozen]
        optimizers = [
            facts.model_copy(update={"scalars": {k: v for k, v in facts.scalars.items() if k not in frozen}})
            for facts in self.values.optimizers
        ]
        values = self.values.model_copy(update={"optimizers": tuple(optimizers)})
        trainable = tuple(p for p in self.params if p.trainable)
        return replace(self, params=trainable, parts=tuple(parts), values=values)


def collect_contents(managed: Managed, objects: Mapping[str, Stateful], user: Any = None) -> Contents:
    """Look at everything that a later run needs.

    Args:
        managed: the sharded model with its optimizers.
        objects: what else has a state, by name.
        user: what JSON can say.

    Raises:
        ConfigError: something cannot be kept; names it.
    """
    parts = [part for bucket in all_buckets(managed) for part in _param_parts(bucket)]
    optimizers = []
    for number, link in enumerate(links_of(managed)):
        scalars: dict[str, dict[str, Plain]] = {}
        for fragments in link.fragments():
            parts += _state_parts(number, link, fragments, scalars)
        groups = tuple(_groups(number, link, managed))
        facts = OptimizerFacts(
            class_name=optimizer_class(link), groups=groups, scalars=scalars, other=_other_state(number, link)
        )
        optimizers.append(facts)
    aliases = buffer_aliases(managed.model)
    parts += [
        _whole("buffer", name, real_view(buffer, name), aliases[name], is_complex=buffer.is_complex())
        for name, buffer in persistent_buffers(managed.model).items()
    ]
    generators, generator_values = generator_states(managed.device)
    parts += [_whole("rng", name, state) for name, state in generators.items()]
    scaler = managed.runtime.scaler
    values = Values(
        num_steps=managed.runtime.num_steps,
        loss_scale=None if scaler is None else scaler.state(),
        optimizers=tuple(optimizers),
        extra_state={
            name: to_plain(module.get_extra_state(), f"extra state of {name}")
            for name, module in modules_with_state(managed.model).items()
        },
        objects={name: _object_state(name, item) for name, item in objects.items()},
        generators=generator_values,
        user=to_plain(user, "user_state"),
    )
    return Contents(params=tuple(_param_table(managed)), parts=tuple(parts), values=values)


def all_buckets(managed: Managed) -> list[Bucket]:
    """Return every bucket, in the order of the units."""
    return [bucket for unit in managed.runtime.units for bucket in unit.buckets]


def links_of(managed: Managed) -> list[OptimizerLink]:
    """Return the sharded optimizers of a model, in the order in which they were sharded."""
    return [link for link in managed.optimizers if isinstance(link, OptimizerLink)]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return each buffer object that a state dict holds, under its first name."""
    return {names[0]: buffer for names, buffer in _named_buffers(model)}


def buffer_aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the other names of each buffer object that a state dict holds, by its first name."""
    return {names[0]: tuple(names[1:]) for names, _ in _named_buffers(model)}


def _named_buffers(model: nn.Module) -> Iterable[tuple[list[str], Tensor]]:
    found: dict[int, tuple[list[str], Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), ([], buffer))[0].append(f"{prefix}.{name}" if prefix else name)
    return found.values()


def real_view(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor that a file can hold: complex numbers as pairs, [..., 2].

    Raises:
        ConfigError: no file can.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(f"buffer {name} is no dense tensor with values: a checkpoint does not hold it")
    plain = tensor.detach().resolve_conj().resolve_neg()
    seen = torch.view_as_real(plain) if plain.is_complex() else plain
    if seen.dtype not in NAMES_OF_DTYPES:
        raise ConfigError(f"buffer {name} is of dtype {tensor.dtype}, which a checkpoint does not hold")
    return seen


def _param_table(managed: Managed) -> Iterator[Param]:
    dtypes = {
        slot.param.name: bucket.site.dtypes.param
        for bucket in all_buckets(managed)
        for slot in bucket.site.layout.slots
    }
    for p in collect_params(managed.model):
        yield Param(
            name=p.name,
            shape=tuple(p.param.shape),
            dtype=NAMES_OF_DTYPES[dtypes[p.name]],
            aliases=p.aliases,
            trainable=p.param.requires_grad,
        )


def _param_parts(bucket: Bucket) -> Iterator[Part]:
    site, params = bucket.site, bucket.params
    params.settle()
    site.lanes.on_compute(reads=[params.master, params.owned()])
    begin = site.bounds(site.placement.num_optim)[0]
    start, stop = site.bounds(len(site.placement.axes))
    for slot in site.layout.slots:  # empty ones lie in no rank's slice
        if slot.param.numel == 0:
            yield Part(stored=_stored("param", slot, params.master.dtype), start=0, flat=params.master[:0])
    for piece in site.layout.fragments(start, stop):
        first = piece.flat_start - begin
        own = params.master[first : first + piece.numel]
        yield Part(stored=_stored("param", piece.slot, own.dtype), start=piece.param_start, flat=own)
        if params.separate_master:
            copy = params.owned()[first : first + piece.numel]
            if not torch.equal(as_bytes(own.to(copy.dtype)), as_bytes(copy)):
                yield Part(stored=_stored("compute", piece.slot, copy.dtype), start=piece.param_start, flat=copy)


def _state_parts(
    number: int, link: OptimizerLink, fragments: BucketFragments, scalars: dict[str, dict[str, Plain]]
) -> Iterator[Part]:
    """Yield the element-wise state; note what is one value in ``scalars``."""
    site = fragments.bucket.site
    start, stop = site.bounds(len(site.placement.axes))
    for index, param in fragments.params.items():
        piece, slot = fragments.parts[index], site.layout.slots[index]
        for key, value in link.optimizer.state.get(param, {}).items():
            where = f"state {key!r} of {slot.param.name}"
            if not isinstance(value, Tensor) or value.dim() == 0:
                scalars.setdefault(slot.param.name, {})[str(key)] = to_plain(value, where)
                continue
            if value.shape != param.shape or value.dtype not in NAMES_OF_DTYPES:
                raise ConfigError(
                    f"{where} is {value.dtype} {tuple(value.shape)} for a fragment of {param.numel()} elements: a "
                    "checkpoint holds one element per element of the parameter, or one value"
                )
            first, last = max(piece.flat_start, start), min(piece.flat_start + piece.numel, stop)
            if first < last:
                stored = _stored("optim", slot, value.dtype, state=str(key), optimizer=number)
                flat = value.detach()[first - piece.flat_start : last - piece.flat_start]
                yield Part(stored=stored, start=piece.param_start + first - piece.flat_start, flat=flat)


def _other_state(number: int, link: OptimizerLink) -> dict[str, Plain]:
    """Return what an optimizer keeps under keys that are no parameters."""
    state: dict[Any, Any] = link.optimizer.state  # torch's says that keys are tensors, and lets them be anything
    found = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    where = f"state of optimizer {number}"
    odd = [key for key in found if type(key) is not str]
    if odd:
        raise ConfigError(f"{where} has keys that are neither parameters nor texts: {odd[:5]}")
    return {key: to_plain(value, f"{where}[{key!r}]") for key, value in found.items()}


def _stored(kind: Kind, slot: Slot, dtype: torch.dtype, *, state: str = "", optimizer: int = 0) -> Stored:
    return Stored(
        kind=kind,
        name=slot.param.name,
        state=state,
        optimizer=optimizer,
        shape=slot.param.shape,
        dtype=NAMES_OF_DTYPES[dtype],
        pieces=(),
    )


def _whole(kind: Kind, name: str, tensor: Tensor, aliases: tuple[str, ...] = (), *, is_complex: bool = False) -> Part:
    shape, dtype = tuple(tensor.shape), NAMES_OF_DTYPES[tensor.dtype]
    stored = Stored(kind=kind, name=name, aliases=aliases, is_complex=is_complex, shape=shape, dtype=dtype, pieces=())
    return Part(stored=stored, start=0, flat=tensor.contiguous().reshape(-1))


def _groups(number: int, link: OptimizerLink, managed: Managed) -> Iterator[Group]:
    for index, (group, params) in enumerate(zip(link.optimizer.param_groups, link.groups, strict=True)):
        options = {
            key: to_plain(value, f"option {key!r} of group {index} of optimizer {number}")
            for key, value in group.items()
            if key not in NOT_KEPT
        }
        yield Group(params=tuple(managed.name_of(param) for param in params), options=options)


def optimizer_class(link: OptimizerLink) -> str:
    """Return the name of the user's class."""
    return type(link.optimizer).__name__.removeprefix("Sharded")


def _object_state(name: str, item: Stateful) -> Plain:
    if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
        raise ConfigError(f"{name} is a {type(item).__name__} without state_dict and load_state_dict")
    state = item.state_dict()
    if not isinstance(state, dict):
        raise ConfigError(f"state_dict() of {name} returned a {type(state).__name__}, not a dictionary")
    return to_plain(state, f"state of {name}")


def modules_with_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that say an extra state, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
