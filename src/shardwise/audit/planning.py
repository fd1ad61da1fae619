"""The plan of a case: what a dry run says, in a process that never trains."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.audit.cases import AuditCase, is_sized, material
from shardwise.audit.heap import heap_bytes
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.precision import Precision

__all__ = ["NUM_HEAPS", "STATES", "Planned", "options_of", "plan_cases"]

STATES = ("param", "master", "grad", "optim")
MAX_NORM = 1.0
NUM_HEAPS = 3  # of which the median counts: runs, and replays, differ by 5 % from one to the next


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Planned bytes of rank 0.

    Attributes:
        states: at rest after the step, by kind.
        peak: at the moment with the most.
        by_kind: the peak by kind.
        moment: when it is.
        heap: what the heap of the C library grows to, the median of some replays; None: not asked.
    """

    states: Mapping[str, int]
    peak: int
    by_kind: Mapping[str, int]
    moment: str
    heap: int | None = None


def plan_cases(cases: Sequence[AuditCase]) -> list[Planned]:
    """Plan cases, one after the other."""
    return [_plan(case) for case in cases]


def options_of(case: AuditCase) -> dict[str, Any]:
    """Return the options of ``shard`` for a case."""
    precision = Precision(param=torch.bfloat16) if case.precision == "bf16" else None
    return {"stage": case.stage, "units": material(case).units, "precision": precision}


def _plan(case: AuditCase) -> Planned:
    used = material(case)
    found = dry_run(used.make_model, used.make_batch, used.loss, case.ranks, max_norm=MAX_NORM, **options_of(case))
    event = found.peak.event
    return Planned(
        states={kind: found.at_rest.get(kind, 0) for kind in STATES},
        peak=found.peak.bytes,
        by_kind=dict(found.peak.by_kind),
        moment=" ".join((event.phase, *(unit for unit in event.units if unit), event.operator)),
        heap=_heap(found) if is_sized(case) else None,
    )


def _heap(found: DryRun) -> int:
    return int(statistics.median(heap_bytes(found.changes) for _ in range(NUM_HEAPS)))
