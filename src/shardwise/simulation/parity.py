"""One precision: the plain run, the run at every stage, and what is wrong between them.

Owns ``Comparison`` and ``compare_stages``. Read ``calls.py`` next: ``simulate`` and ``verify``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.base import Mesh
from shardwise.simulation.differences import Difference, compare_traces, unlike_tensors, updates
from shardwise.simulation.dtypes import NamedPrecision
from shardwise.simulation.plain import PlainRun, train_plain
from shardwise.simulation.sharded import RankRun, Sent, train_stage
from shardwise.simulation.work import Work, some_of
from shardwise.testing.compare import Tolerance, Trace

__all__ = ["Comparison", "StageRun", "compare_stages"]


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """What one stage did.

    Attributes:
        stage: 0, 1, 2 or 3.
        losses: by step, the mean over the ranks.
        differences: from the plain run, by tensor, the worst first.
        unlike: tensors that are not the bits of the first stage that ran.
        kept_bytes: by rank and kind (param, master, grad, optim), after the last update.
        planned_bytes: the same as planned; None where the plan does not know the optimizer.
        may_keep_less: a tensor that no gradient reached has no optimizer state, which the plan does not know.
        sent: by rank and step.
    """

    stage: int
    losses: tuple[float, ...]
    differences: tuple[Difference, ...]
    unlike: tuple[str, ...]
    kept_bytes: tuple[Mapping[str, int], ...]
    planned_bytes: tuple[Mapping[str, int], ...] | None
    may_keep_less: bool
    sent: tuple[tuple[tuple[Sent, ...], ...], ...]

    @property
    def as_planned(self) -> bool:
        """Whether every rank keeps exactly the planned bytes, or may keep less and does, or nothing was planned."""
        pairs = zip(self.kept_bytes, self.planned_bytes or self.kept_bytes, strict=True)
        return all(
            kept == planned or (self.may_keep_less and all(kept[kind] <= planned[kind] for kind in planned))
            for kept, planned in pairs
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """All stages in one precision.

    Attributes:
        precision: its name.
        tolerance: against the plain run; stages among each other agree to the bit.
        plain: the plain run.
        clip_norms: by step, what both sides clipped by; empty where nothing is clipped.
        updates: by trainable parameter, how far the plain run moved it, relative to its largest element.
        stages: in the order in which they ran.
        problems: what is not as it must be, in words; empty if all is well.
    """

    precision: str
    tolerance: Tolerance
    plain: PlainRun
    clip_norms: tuple[float, ...]
    updates: Mapping[str, float]
    stages: tuple[StageRun, ...]
    problems: tuple[str, ...]


def compare_stages(
    work: Work,
    precision: NamedPrecision,
    stages: Sequence[int],
    *,
    instrument: Callable[[Mesh], Mesh] | None = None,
) -> Comparison:
    """Train at every stage and plainly, and compare; ``instrument`` wraps the communicators of a rank."""
    first: list[Trace] = []
    plain: PlainRun | None = None
    runs = []
    for stage in stages:
        ranks = train_stage(work, precision.dtypes, stage, instrument=instrument)
        traces = [rank.trace for rank in ranks]
        first = first or traces
        plain = plain or train_plain(work, precision.dtypes, traces[0].norms)
        runs.append(_stage_run(stage, ranks, first, plain, precision.tolerance))
    assert plain is not None
    return Comparison(
        precision=precision.name,
        tolerance=precision.tolerance,
        plain=plain,
        clip_norms=first[0].norms,
        updates=updates(plain),
        stages=tuple(runs),
        problems=tuple(problem for run in runs for problem in _problems(run, runs[0].stage, precision, work)),
    )


def _stage_run(
    stage: int, ranks: Sequence[RankRun], first: Sequence[Trace], plain: PlainRun, tolerance: Tolerance
) -> StageRun:
    traces = [rank.trace for rank in ranks]
    planned = [rank.planned_bytes for rank in ranks if rank.planned_bytes is not None]
    return StageRun(
        stage=stage,
        losses=tuple(sum(each) / len(ranks) for each in zip(*(trace.losses for trace in traces), strict=True)),
        differences=compare_traces(traces, plain.trace, tolerance),
        unlike=unlike_tensors(traces, first),
        kept_bytes=tuple(rank.kept_bytes for rank in ranks),
        planned_bytes=tuple(planned) if planned else None,
        may_keep_less=bool(plain.no_gradient),
        sent=tuple(rank.sent for rank in ranks),
    )


def _problems(run: StageRun, first_stage: int, precision: NamedPrecision, work: Work) -> Iterator[str]:
    where = f"{precision.name}, stage {run.stage}"
    wrong = [difference for difference in run.differences if not difference.ok]
    if wrong:
        names = [f"{difference.name} ({difference.relative:.2g})" for difference in wrong]
        yield (
            f"{where} is not plain training: {precision.tolerance.name} allows {precision.tolerance.relative:g} of the "
            f"largest element, off are {some_of(names)}"
        )
    if run.unlike and work.keeps_bits:
        yield f"{where} and stage {first_stage} must agree to the bit, unlike are {some_of(run.unlike)}"
    if not run.as_planned:
        yield f"{where} keeps {_by_rank(run.kept_bytes)} bytes, planned {_by_rank(run.planned_bytes or ())}"
    if not torch.tensor(run.losses).isfinite().all():
        yield f"{where}: losses are not finite: {list(run.losses)}"


def _by_rank(kept: Sequence[Mapping[str, int]]) -> str:
    return "; ".join(f"rank {rank}: {dict(kinds)}" for rank, kinds in enumerate(kept))
