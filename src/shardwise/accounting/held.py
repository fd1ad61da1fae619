"""Who holds how much: bytes by kind and unit, measured from the buffers and planned from the layouts.

The measured side asks every buffer whether it has memory now; the arena's ledger must have the same sums. The planned
side is the closed form of ``planner/memory.py`` over the layouts of the buckets that exist. Read ``report.py`` next.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.managed import RESERVED_NAME, Managed
from shardwise.memory import Kind
from shardwise.optim.families import state_words
from shardwise.optim.shard import OptimizerLink
from shardwise.planner.memory import BucketPlan
from shardwise.runtime.bucket import Bucket
from shardwise.sharding import Sharding, resolve

__all__ = ["STATES", "Held", "held_bytes", "links_of", "managed_of", "optimizer_bytes", "planned_bytes", "sums_by_kind"]

STATES = (Kind.PARAM, Kind.MASTER, Kind.GRAD, Kind.OPTIM)
Held = dict[tuple[Kind, str], int]  # bytes by kind and unit


def managed_of(model: nn.Module) -> Managed:
    """Return what manages a sharded model, or the one inside an engine.

    Raises:
        ConfigError: it is neither.
    """
    inner = getattr(model, "module", None)
    if RESERVED_NAME not in getattr(model, "__dict__", {}) and isinstance(inner, nn.Module):
        return Managed.of(inner)
    return Managed.of(model)


def held_bytes(managed: Managed) -> Held:
    """Return the bytes that buffers and optimizer states hold now; kinds and units without any are missing."""
    held: Held = {}

    def add(kind: Kind, owner: str, num_bytes: int) -> None:
        if num_bytes:
            held[kind, owner] = held.get((kind, owner), 0) + num_bytes

    for bucket in _buckets(managed):
        owner, params = bucket.site.owner, bucket.params
        slabs = [params.full, *(bucket.grads.slabs() if bucket.grads is not None else ())]
        slabs += [slab for link in links_of(managed) for slab in link.slabs_of(bucket)]
        for slab in slabs:
            add(slab.kind, owner, slab.num_bytes if slab.filled else 0)
        if params.sharded_axes:
            add(Kind.PARAM, owner, params.shard.nbytes)
        if params.separate_master:
            add(Kind.MASTER, owner, params.master.nbytes)
    for owner, num_bytes in optimizer_bytes(managed).items():
        add(Kind.OPTIM, owner, num_bytes)
    return held


def optimizer_bytes(managed: Managed) -> dict[str, int]:
    """Return the bytes of optimizer state by unit; scalar counters are left out."""
    found: dict[str, int] = {}
    for link in links_of(managed):
        for fragments in link.fragments():
            owner = fragments.bucket.site.owner
            states = [(param, link.optimizer.state.get(param, {})) for param in fragments.params.values()]
            found[owner] = found.get(owner, 0) + sum(
                value.nbytes
                for param, state in states
                for value in state.values()
                if isinstance(value, Tensor) and value.shape == param.shape
            )
    return found


def planned_bytes(managed: Managed, sharding: Sharding | None = None) -> dict[str, int | None]:
    """Return what this rank is planned to hold at rest, by kind: "param", "master", "grad", "optim".

    Args:
        managed: the sharded model, with its optimizers.
        sharding: lay all states out over other axes than they are; None: as they are.

    Returns:
        Bytes; None for the state of an optimizer whose size is not known.
    """
    sizes = {axis: comm.size for axis, comm in managed.mesh.items()}
    coordinates = {axis: comm.rank for axis, comm in managed.mesh.items()}
    words = _words(managed)
    totals: dict[str, int | None] = {kind.value: 0 for kind in STATES}
    for unit in managed.runtime.units:
        for bucket in unit.buckets:
            site = bucket.site
            placement = site.placement if sharding is None else resolve(sharding, sizes)
            plan = BucketPlan(
                unit=unit.index,
                label=site.label,
                layout=site.layout,
                placement=placement,
                dtypes=site.dtypes,
                trainable=site.trainable,
            )
            found: dict[str, int | None] = {**plan.bytes_at_rest(coordinates, 0)}
            owned = placement.slice_range(placement.num_optim, site.layout.numel, coordinates)
            found["optim"] = None
            if words is not None:
                parts = site.layout.fragments(*owned)
                elements = sum(part.numel * words.get((site.index, part.slot.index), 0) for part in parts)
                found["optim"] = elements * site.dtypes.master.itemsize
            totals = {kind: _sum(totals[kind], found[kind]) for kind in totals}
    return totals


def sums_by_kind(held: Mapping[tuple[Kind, str], int]) -> dict[Kind, int]:
    """Add the units up; kinds without bytes are 0."""
    return {kind: sum(count for (each, _), count in held.items() if each is kind) for kind in Kind}


def _words(managed: Managed) -> dict[tuple[int, int], int] | None:
    """Return state elements per element, by bucket and slot; None if an optimizer is not in the table."""
    words: dict[tuple[int, int], int] = {}
    try:
        for link in links_of(managed):
            kind = link.original_class
            for group, params in zip(link.optimizer.param_groups, link.groups, strict=True):
                options = {**link.optimizer.defaults, **{key: value for key, value in group.items() if key != "params"}}
                for param in params:
                    binding = managed.binding_of(param)
                    words[binding.bucket.site.index, binding.slot(param).index] = state_words(kind, options)
    except ConfigError:
        return None
    return words


def _sum(one: int | None, two: int | None) -> int | None:
    return None if one is None or two is None else one + two


def links_of(managed: Managed) -> list[OptimizerLink]:
    """Return what ties optimizers to a model."""
    return [link for link in managed.optimizers if isinstance(link, OptimizerLink)]


def _buckets(managed: Managed) -> Iterator[Bucket]:
    return (bucket for unit in managed.runtime.units for bucket in unit.buckets)
