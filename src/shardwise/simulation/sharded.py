"""The sharded side: ranks as threads, each with its share; what they keep and send is measured.

Read ``differences.py`` next, for how the two sides are compared.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.access import full_gradients, full_optimizer_state, full_parameters, measured_bytes
from shardwise.api import clip_grad_norm_, plan, scale_loss, shard
from shardwise.comm.base import Mesh, flat_rank
from shardwise.comm.recording import Event, Log, record
from shardwise.errors import ConfigError
from shardwise.optim.shard import shard_optimizer
from shardwise.precision import Precision
from shardwise.simulation.work import Work
from shardwise.testing.compare import Trace
from shardwise.testing.ranks import run_ranks

__all__ = ["RankRun", "Sent", "train_stage"]

TIMEOUT_SECONDS = 600.0  # of one wait: a rank may compute for long


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The collectives of one kind that one rank took part in during one step.

    Attributes:
        verb: why: ``unshard``, ``refresh``, ``reduce``, ``finalize_scatter``, ``finalize_gather``, ``record``.
        collective: what moved: ``all_gather``, ``reduce_scatter``, ``broadcast``.
        count: number of collectives.
        elements: sent by this rank, each counted once per rank that it goes to.
        bytes: the same in bytes.
    """

    verb: str
    collective: str
    count: int
    elements: int
    bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRun:
    """What one rank reports.

    Attributes:
        trace: everything that is compared.
        kept_bytes: by kind, after the last update, gradients included.
        planned_bytes: what ``plan`` says of this rank; None where it does not know the optimizer.
        sent: by step.
    """

    trace: Trace
    kept_bytes: Mapping[str, int]
    planned_bytes: Mapping[str, int] | None
    sent: tuple[tuple[Sent, ...], ...]


def train_stage(
    work: Work, precision: Precision, stage: int, *, instrument: Callable[[Mesh], Mesh] | None = None
) -> list[RankRun]:
    """Train at a stage and return what each rank reports.

    Args:
        work: what to train.
        precision: dtypes.
        stage: 0, 1, 2 or 3.
        instrument: wraps the communicators of a rank (tests put faults here).
    """
    models = [work.new_model() for _ in range(work.num_ranks)]  # here: copies are made by one thread
    planned = _planned_bytes(work, precision, stage)

    def body(mesh: Mesh) -> RankRun:
        rank = flat_rank(mesh)
        recorded, log = record(mesh if instrument is None else instrument(mesh))
        model = shard(
            models[rank],
            recorded,
            stage=stage,
            units=work.units,
            precision=precision,
            align=work.align,
            initial_values="verify",
        )
        trace, kept, sent = _train(work, model, rank, precision, log)
        planned_here = None if planned is None else planned[rank]
        return RankRun(trace=trace, kept_bytes=kept, planned_bytes=planned_here, sent=sent)

    return run_ranks(work.num_ranks, body, timeout=TIMEOUT_SECONDS)


def _train(
    work: Work, model: nn.Module, rank: int, precision: Precision, log: Log
) -> tuple[Trace, dict[str, int], tuple[tuple[Sent, ...], ...]]:
    optimizer = shard_optimizer(work.make_optimizer(model), model, on_nonfinite="ignore")
    losses, norms, sent = [], [], []
    kept: dict[str, int] = {}
    for step in range(work.num_steps):
        log.clear()
        losses.append(_backward(work, model, step, rank, precision))
        if work.max_norm is not None:
            norms.append(float(clip_grad_norm_(model, work.max_norm)))
        optimizer.step()
        kept = measured_bytes(model)  # gradients still exist
        optimizer.zero_grad()
        sent.append(_sums(log))
    # Once more without a step: what the trained values give, and gradients that no update has used up.
    output = _backward(work, model, 0, rank, precision)
    trace = Trace(
        losses=tuple(losses),
        norms=tuple(norms),
        gradients=full_gradients(model),
        parameters=full_parameters(model),
        optimizer_state=_optimizer_state(model),
        outputs=torch.tensor([output], dtype=torch.float64),
    )
    return trace, kept, tuple(sent)


def _backward(work: Work, model: nn.Module, step: int, rank: int, precision: Precision) -> float:
    """Do the forward and the backward of a share; return the loss."""
    loss = work.loss(model, work.share(step, rank, precision.param))
    scale_loss(model, loss).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _optimizer_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state by "parameter/state", without that of parameters that have no elements."""
    return {
        f"{name}/{key}": value
        for name, found in full_optimizer_state(model).items()
        for key, value in found.items()
        if value.numel()
    }


def _planned_bytes(work: Work, precision: Precision, stage: int) -> list[dict[str, int]] | None:
    """Return the plan of each rank, or None for an optimizer that ``plan`` does not know."""
    model = work.new_model()
    optimizer = work.make_optimizer(model)
    try:
        memory = plan(
            model,
            work.num_ranks,
            stage=stage,
            units=work.units,
            precision=precision,
            align=work.align,
            optimizer=type(optimizer),
            optimizer_options=optimizer.defaults,
        )
    except ConfigError:
        return None
    return [memory.of_rank(rank) for rank in range(work.num_ranks)]


def _sums(events: Iterable[Event]) -> tuple[Sent, ...]:
    """Add up the events of one step by verb and collective, in the order in which the kinds first occurred."""
    counts: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for event in events:
        kind = (event.verb.name.lower(), event.operation)
        counts[kind] += 1
        elements[kind] += event.sent_elements
        sizes[kind] += event.sent_bytes
    return tuple(
        Sent(verb=verb, collective=collective, count=count, elements=elements[kind], bytes=sizes[kind])
        for kind, count in counts.items()
        for verb, collective in [kind]
    )
