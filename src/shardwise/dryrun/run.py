"""``dry_run``: steps of training with the real runtime, model and optimizer, as one rank of any number, without memory.

Read ``hollow.py`` for how nothing is computed, ``live.py`` for how everything is counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api import clip_grad_norm_, no_sync, scale_loss, shard
from shardwise.comm.base import Comm, Mesh
from shardwise.comm.recording import Event as Collective
from shardwise.comm.recording import record
from shardwise.dryrun.comm import MirrorComm
from shardwise.dryrun.hollow import Hollow
from shardwise.dryrun.live import Live, LiveArena, Peak
from shardwise.errors import ConfigError
from shardwise.initial.recipe import deferred_init
from shardwise.managed import Managed
from shardwise.memory import Kind, is_out_of_memory
from shardwise.optim.shard import ShardedOptimizer, shard_optimizer
from shardwise.runtime.runtime import Runtime

__all__ = ["DryRun", "dry_run", "mirrors", "rehearse"]

_NUM_STEPS = 3  # the first makes the optimizer's states, the second finds the peak, the third looks at it


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What one step of one rank needs: planned, without what kernels allocate inside, the allocator and the process.

    Attributes:
        at_rest: bytes by kind after the optimizer step, gradients included: "param", "master", "grad", "optim",
            "buffer", "batch".
        between: the same once gradients are cleared.
        peak: the moment with the most bytes.
        collectives: of one step, in order.
        flops: floating-point operations by phase, a multiply-add counted as two.
        changes: of the memory of storages from the start to the end, for a replay: see ``Live``.
    """

    at_rest: Mapping[str, int]
    between: Mapping[str, int]
    peak: Peak
    collectives: tuple[Collective, ...]
    flops: Mapping[str, int]
    changes: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sends in one step."""
        return sum(event.sent_bytes for event in self.collectives)


def dry_run(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    num_ranks: int | Mapping[str, int] = 1,
    *,
    rank: int = 0,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    max_norm: float | None = None,
    accumulation: int = 1,
    **options: Any,
) -> DryRun:
    """Run three steps of one rank without memory and without peers; return what the third needs.

    Args:
        make_model: builds the model, with its initial values.
        make_batch: makes this rank's share of a batch.
        loss: of the model and a batch, a scalar.
        num_ranks: number of ranks, or axes with their sizes, outermost first.
        rank: which of them, in row-major order.
        optimizer: makes the optimizer from the parameters.
        max_norm: clip gradients to this norm; None: do not.
        accumulation: micro-batches per step, reduced as the engine does.
        options: for ``shard``: stage, units, precision, ...

    Raises:
        ConfigError: a setting is wrong, or a shape depends on data.
    """
    mesh = mirrors(num_ranks, rank)
    options |= {"optimizer": optimizer, "max_norm": max_norm, "accumulation": accumulation}
    try:
        return rehearse(make_model, make_batch, loss, mesh, **options)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "this host gives no address space for one of the tensors, although nothing would touch it "
            f"({str(error.__cause__ or error).splitlines()[0]}): let the kernel promise more, "
            "sysctl vm.overcommit_memory=1, or take smaller parameters or units"
        ) from error


def rehearse(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    mesh: Mesh,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    max_norm: float | None = None,
    accumulation: int = 1,
    compute: bool = False,
    **options: Any,
) -> DryRun:
    """Run three steps on a mesh; return what the third needs. See ``dry_run``.

    Args:
        mesh: real or not.
        compute: really allocate and compute, and count with the same eyes.
    """
    if type(accumulation) is not int or accumulation < 1:
        raise ConfigError(f"accumulation must be a positive whole number, got {accumulation!r}")
    live = Live()
    mesh, log = record(mesh)
    with deferred_init() as recipe:
        model = make_model()
    with Hollow(live, compute=compute) as hollow:
        live.kind = "buffer"
        shard(
            model,
            mesh,
            initial_values=recipe,
            arena=lambda device: LiveArena(device, live, hollow=not compute),
            **options,
        )
        stepper = shard_optimizer(optimizer(model.parameters()), model, on_nonfinite="ignore")
        live.kind = "batch"
        batch = make_batch()
        runtime = Managed.of(model).runtime
        live.where = lambda: _running(runtime)
        at_rest: dict[str, int] = {}
        for _ in range(_NUM_STEPS):
            log.clear()
            hollow.flops.clear()
            live.begin()
            with no_sync(model, reduce=True):
                for _ in range(accumulation - 1):
                    _forward_backward(model, batch, loss, live)
            _forward_backward(model, batch, loss, live)
            live.phase = "step"
            if max_norm is not None:
                clip_grad_norm_(model, max_norm)
            stepper.step()
            _own(runtime, stepper, live)
            at_rest = live.by_kind
            stepper.zero_grad()
    return DryRun(
        at_rest=at_rest,
        between=live.by_kind,
        peak=live.peak,
        collectives=tuple(log),
        flops=dict(hollow.flops),
        changes=tuple(live.changes),
    )


def _forward_backward(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], live: Live) -> None:
    live.phase, live.kind = "forward", "activation"
    value = loss(model, batch)
    live.phase, live.kind = "backward", "temporary"
    scale_loss(model, value).backward()  # type: ignore[no-untyped-call]


def mirrors(num_ranks: int | Mapping[str, int], rank: int) -> dict[str, Comm]:
    """Return the mesh of one rank without peers.

    Raises:
        ConfigError: there is no such rank.
    """
    sizes = dict(num_ranks) if isinstance(num_ranks, Mapping) else {"data": num_ranks}
    if not sizes:
        raise ConfigError("num_ranks must be a positive number or axes with such, got no axis")
    for axis, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"num_ranks must be a positive number or axes with such, got {size!r} for {axis!r}")
    mesh: dict[str, Comm] = {}
    left = rank
    for axis, size in reversed(sizes.items()):
        left, coordinate = divmod(left, size)
        mesh[axis] = MirrorComm(coordinate, size)
    if left or rank < 0:
        raise ConfigError(f"there is no rank {rank} in {sizes}")
    return {axis: mesh[axis] for axis in sizes}


def _running(runtime: Runtime) -> tuple[str, ...]:
    """Return the units that compute now."""
    if runtime.in_backward:
        return tuple(unit.name for unit in runtime.units if any(use.reached for use in unit.uses))
    return tuple(unit.name for unit in runtime.units if unit.active)


def _own(runtime: Runtime, stepper: ShardedOptimizer, live: Live) -> None:
    """Say what the optimizer's states are, and which unit owns what rests."""
    for states in stepper.state.values():
        for item in states.values():
            if isinstance(item, Tensor):
                live.adopt(item, kind=Kind.OPTIM.value)
    for unit in runtime.units:
        for bucket in unit.buckets:
            for tensor in (bucket.params.full.tensor, bucket.params.shard, bucket.params.master):
                live.adopt(tensor, owner=unit.name)
            if bucket.grads is not None:
                live.adopt(bucket.grads.resting.tensor, owner=unit.name)
