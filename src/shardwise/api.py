"""What users call: ``shard``, ``shard_optimizer`` and the few functions of a training loop.

Each is a thin composition of the layers below; read ``managed.py`` for what a sharded model holds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from shardwise.accounting.shortage import explainer
from shardwise.binding import Binding
from shardwise.build import Settings, ShardingRule, agree_on_plan, agree_on_values, plan_buckets
from shardwise.comm.base import Mesh
from shardwise.comm.process_group import mesh_from
from shardwise.errors import ConfigError, NonFiniteError, StateError
from shardwise.guard import ShardedParameter
from shardwise.initial.delivery import Job, Source, fill
from shardwise.initial.recipe import Recipe, RecipeWithWeights
from shardwise.initial.weights import Weights
from shardwise.lanes import Lanes, make_lanes
from shardwise.layout import DEFAULT_ALIGN
from shardwise.managed import RESERVED_NAME, VOID, Managed, make_bucket
from shardwise.memory import Arena
from shardwise.modules import NamedParam, Units, check_params, collect_params, find_units
from shardwise.numerics.norm import check_norm_type
from shardwise.numerics.scaler import LossScaler
from shardwise.optim.families import state_words
from shardwise.planner.memory import MemoryPlan
from shardwise.precision import Precision
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.journal import Journal
from shardwise.runtime.record import Agreement
from shardwise.runtime.runtime import Means, Runtime, Window
from shardwise.runtime.settle import Settler
from shardwise.runtime.unit import Unit
from shardwise.sharding import Sharding, stage_sharding

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "no_sync",
    "plan",
    "scale_loss",
    "shard",
    "unshard_model",
    "unsharded",
]

M = TypeVar("M", bound=nn.Module)
InitialValues = Literal["broadcast", "verify"] | Source


@torch.inference_mode(False)
@torch.no_grad()
def shard(
    model: M,
    mesh: Any = None,
    *,
    stage: int | None = None,
    sharding: ShardingRule | None = None,
    units: Units = None,
    precision: Precision | None = None,
    align: int = DEFAULT_ALIGN,
    initial_values: InitialValues = "broadcast",
    prefetch: int = 1,
    reductions_in_flight: int = 2,
    keep_last_unit: bool = True,
    force_collectives: bool = False,
    lanes: Callable[[torch.device], Lanes] = make_lanes,
    arena: Callable[[torch.device], Arena] = Arena,
) -> M:
    """Shard the training state of a model over the ranks, in place; return the same module.

    Collective. Parameters become views of flat buffers; the module, its parameters and their names stay.

    Args:
        model: on one device, with its initial values, without gradients; or on the meta device, see
            ``initial_values``.
        mesh: a ``torch`` DeviceMesh of data-parallel axes, a mapping from axis name to ``Comm``, or None: one axis
            over the default process group (one rank if there is none).
        stage: 0, 1, 2 or 3 (the default), as in the ZeRO papers.
        sharding: instead of ``stage``: axis sets, or a function of a parameter's name and the parameter that returns
            axis sets, or None for those of ``stage``.
        units: what is gathered together: a class or classes, a predicate, a list of module names, or None for the
            repeated blocks of the model and its large single layers.
        precision: dtypes of each state; None leaves parameters as they are, with fp32 masters for 16-bit ones.
        align: start of parameters and slices in the flat buffers, in elements.
        initial_values: "broadcast" takes rank 0's values where ranks differ and warns, "verify" raises. Or where the
            values come from: the recipe of ``deferred_init``, or ``from_weights``. Then one parameter at a time is in
            memory, of which this rank keeps its part, and the model may be on the meta device. Parameters stay the
            same objects.
        prefetch: number of units gathered ahead of their use; each costs its gathered bytes.
        reductions_in_flight: buckets whose gradients travel while the backward goes on; each holds its gradients whole.
        keep_last_unit: do not free the unit that is used last between forward and backward.
        force_collectives: run collectives also over axes of one rank.
        lanes: makes the side lanes for a device (tests put instruments here).
        arena: makes the allocator for a device (tests put instruments here).

    Raises:
        ConfigError: a setting is wrong, or a parameter cannot be managed.
        RankMismatchError: ranks hold different models or settings.
        StateError: the model, or a part of it, is sharded already.
    """
    source = None if isinstance(initial_values, str) else _source(initial_values)
    settings = replace(
        _settings(stage, sharding, precision, align, force_collectives),
        initial_values=source.label if source else _one_of("initial_values", initial_values, ("broadcast", "verify")),
        prefetch=prefetch,
        reductions_in_flight=reductions_in_flight,
        keep_last_unit=keep_last_unit,
    )
    if not callable(getattr(model, "named_modules", None)):
        raise ConfigError(f"shard() takes a module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if module.__dict__.get(RESERVED_NAME) == VOID:
            raise StateError(f"{name or 'the model'} was destroyed and has no parameters any more: build a new one")
        if RESERVED_NAME in module.__dict__:
            raise StateError(f"{name or 'the model'} is sharded already: a module can be sharded once")
    params = collect_params(model)
    taken = [p.name for p in params if isinstance(p.param, ShardedParameter)]
    if taken:
        raise StateError(f"parameters {taken[:5]} belong to another sharded model: shard the module around both")
    device = check_params(params, source.device_of if source else None)
    found = find_units(model, units)
    schedule = settings.schedule(len(found))
    whole: Mesh = mesh_from(mesh)
    sizes = {axis: comm.size for axis, comm in whole.items()}
    members = plan_buckets(model, params, found, sizes, settings)
    moving = {axis: whole[axis] for axis in settings.axes(sizes)}
    agreement = Agreement(moving, device)
    agree_on_plan(agreement, members, settings)
    job = Job(model=model, params=params, agreement=agreement, mesh=moving, device=device)
    delivery = source.begin(job) if source else None
    if delivery is None:
        agree_on_values(moving, agreement, params, settings)
    means = Means(mesh=moving, arena=arena(device), lanes=lanes(device), journal=Journal())
    runtime = Runtime(
        [Unit(index, unit.name, ()) for index, unit in enumerate(found)],
        means,
        schedule,
        scaler=_scaler(settings.precision, members),
    )
    managed = Managed(model, found, runtime, Settler(runtime, agreement), settings, moving)
    means.arena.explain = explainer(managed)
    first = managed.reserve(len(members))
    buckets: list[tuple[Bucket, Sequence[NamedParam]]] = []
    for number, member in enumerate(members):  # one at a time: no more than one bucket is whole twice
        originals = [p.param.data for p in member.params]
        bucket = make_bucket(runtime, member, first + number, moving)
        unit = runtime.units[member.plan.unit]
        unit.set_buckets((*unit.buckets, bucket))
        managed.bind([member], [bucket])
        if delivery is None:
            bucket.params.adopt_full()
            bucket.params.adopt_masters(originals)
        bucket.reshard()
        buckets.append((bucket, member.params))
    if delivery is not None:
        try:
            fill(delivery, job, buckets)
        except BaseException:
            managed.release(keep=False)  # nobody must read parameters without memory
            raise
    managed.seal()
    managed.hooks.attach()
    means.arena.keep_freed_pages()
    model.__dict__[RESERVED_NAME] = managed
    return model


def _settings(
    stage: int | None,
    sharding: ShardingRule | None,
    precision: Precision | None,
    align: int,
    force_collectives: bool,
) -> Settings:
    if stage is not None and isinstance(sharding, Sharding):
        raise ConfigError("give stage= or sharding=, not both")
    default = sharding if isinstance(sharding, Sharding) else stage_sharding(3 if stage is None else stage)
    return Settings(
        sharding=default if sharding is None else sharding,
        default=default,
        precision=precision or Precision(),
        align=align,
        force_collectives=force_collectives,
    )


def _source(given: Any) -> Source:
    if not isinstance(given, Recipe | RecipeWithWeights | Weights):
        raise ConfigError(
            'initial_values must be "broadcast", "verify", the recipe of shardwise.deferred_init() or '
            f"shardwise.from_weights(...), got {type(given).__name__}"
        )
    return given


def _one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _scaler(precision: Precision, members: Any) -> LossScaler | None:
    uses_fp16 = any(m.plan.trainable and m.plan.dtypes.param == torch.float16 for m in members)
    return LossScaler(precision.loss_scale) if uses_fp16 and precision.loss_scale is not None else None


def plan(
    model: nn.Module,
    num_ranks: int | Mapping[str, int] = 1,
    *,
    stage: int | None = None,
    sharding: ShardingRule | None = None,
    units: Units = None,
    precision: Precision | None = None,
    align: int = DEFAULT_ALIGN,
    force_collectives: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_options: Mapping[str, Any] | None = None,
    optim_words: int | None = None,
) -> MemoryPlan:
    """Return the bytes that ``shard`` with the same arguments will hold at rest, without allocating anything.

    Args:
        model: usually built under ``torch.device("meta")``.
        num_ranks: number of ranks, or axes with sizes, outermost first.
        stage: as in ``shard``.
        sharding: as in ``shard``.
        units: as in ``shard``.
        precision: as in ``shard``.
        align: as in ``shard``.
        force_collectives: as in ``shard``.
        optimizer: class that will be used.
        optimizer_options: its options that decide about state, such as ``{"momentum": 0.9}``.
        optim_words: state elements per parameter element, for classes the table does not know.
    """
    settings = _settings(stage, sharding, precision, align, force_collectives)
    sizes = dict(num_ranks) if isinstance(num_ranks, Mapping) else {"data": num_ranks}
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise ConfigError(f"num_ranks must be a positive number or a mapping of axes to such, got {num_ranks!r}")
    members = plan_buckets(model, collect_params(model), find_units(model, units), sizes, settings)
    words = state_words(optimizer, optimizer_options) if optim_words is None else optim_words
    return MemoryPlan(buckets=tuple(member.plan for member in members), optim_words=words, mesh=sizes)


@contextmanager
def unsharded(module: nn.Module, *, writes: bool = True) -> Iterator[nn.Module]:
    """Hold full parameters of a sharded model, to read and edit them in place; a unit's module or the root.

    Collective. On exit edits go into shards and masters; where ranks edited differently, the rank that owns an element
    wins. Masters of elements that were not edited keep their bits.

    Args:
        module: a sharded model, or any module inside one: the units that hold its parameters are gathered.
        writes: False promises not to edit, and saves the exchange at the end.

    Raises:
        ConfigError: the module has no parameters of a sharded model.
        StateError: a forward or backward is running.
    """
    runtime, units = _units_of(module)
    if runtime.in_backward or any(unit.active for unit in runtime.units):
        raise StateError("unsharded() cannot begin inside a forward or backward")
    if writes:
        runtime.announce_change()
    for unit in units:
        unit.pins += 1
        unit.unshard()
        unit.wait()
    try:
        yield module
    finally:
        for unit in units:
            unit.unpin(adopt_edits=writes)


def _units_of(module: nn.Module) -> tuple[Runtime, list[Unit]]:
    """Return the runtime and the units that hold the parameters of a module."""
    managed = module.__dict__.get(RESERVED_NAME)
    if isinstance(managed, Managed):
        return managed.runtime, list(managed.runtime.units)
    bindings = [getattr(type(param), "_access", None) for param in module.parameters()]
    if not bindings or not all(isinstance(binding, Binding) for binding in bindings):
        raise ConfigError(f"{type(module).__name__} is not part of a sharded model, or its forward is running")
    units = {binding.unit.index: binding.unit for binding in cast(list[Binding], bindings)}
    return cast(Binding, bindings[0]).runtime, [units[index] for index in sorted(units)]


@contextmanager
def no_sync(model: nn.Module, *, reduce: bool = False) -> Iterator[None]:
    """Do not end the window in backwards inside this context: gradients accumulate over micro-batches.

    Without ``reduce`` nothing is sent, and every rank keeps full local gradients, as in DDP. With it each backward
    still sums over the axes at which gradients are sharded (ZeRO-2's accumulation): more communication, less memory.
    The next backward outside, or the step, ends the window.
    """
    runtime = Managed.of(model).runtime
    before, runtime.window = runtime.window, Window.REDUCE if reduce else Window.DEFER
    try:
        yield
    finally:
        runtime.window = before


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the global norm of the mean gradients; return the norm before, 0-dim fp64, the same on every rank.

    Collective. Tied weights count once, padding never; finite gradients give a finite norm. A non-finite norm leaves
    the gradients as they are: the step then does what ``on_nonfinite`` says.

    Args:
        model: a sharded model.
        max_norm: largest norm, in the same units as the (unscaled) gradients; ``inf`` only measures.
        norm_type: order of the norm, ``inf`` for the largest absolute value.
        error_if_nonfinite: raise instead, before anything changes.

    Raises:
        NonFiniteError: the norm is not finite and ``error_if_nonfinite``.
    """
    managed = Managed.of(model)
    order = check_norm_type(norm_type)
    if not float(max_norm) >= 0:
        raise ConfigError(f"max_norm must be a number >= 0, got {max_norm!r}")
    norm = managed.settler.norm(order, float(max_norm))
    if not math.isfinite(norm):
        if error_if_nonfinite:
            raise NonFiniteError(
                f"the gradient norm is {norm}, first non-finite: {managed.settler.settle().first_nonfinite}; "
                "gradients were not changed"
            )
    else:
        factor = float(max_norm) / (norm + 1e-6)
        if factor < 1.0:
            managed.settler.clip(factor)
    return torch.tensor(norm, dtype=torch.float64)


def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Clamp every element of the mean gradients to ``[-clip_value, clip_value]``. Collective."""
    managed = Managed.of(model)
    if not float(clip_value) >= 0:
        raise ConfigError(f"clip_value must be a number >= 0, got {clip_value!r}")
    managed.settler.settle()
    for bucket in managed.runtime.trainable_buckets():
        if bucket.trainable_grads.has_result:
            owned = bucket.trainable_grads.owned
            bucket.site.lanes.on_compute(writes=[owned])
            owned.clamp_(-float(clip_value), float(clip_value))
    managed.runtime.grads_version += 1


def scale_loss(model: nn.Module, loss: Tensor) -> Tensor:
    """Multiply a loss by the model's loss scale before its backward; 1 unless a trainable parameter is fp16."""
    scaler = Managed.of(model).runtime.scaler
    return loss if scaler is None else scaler.scale_loss(loss)


def unshard_model(model: M) -> M:
    """Undo ``shard``: a plain module with full parameters on every rank; its optimizers are void. Collective."""
    Managed.of(model).release(keep=True)
    return model
