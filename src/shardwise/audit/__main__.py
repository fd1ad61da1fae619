"""``python -m shardwise.audit``: how far what is measured lies from what was planned.

Exit status 1: an error is above its limit.
"""

import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwise.audit.cases import AuditCase, audit_cases, resident_cases
from shardwise.audit.planning import NUM_HEAPS, Planned, plan_cases
from shardwise.audit.training import ResidentTask, TracedTask, train_resident, train_traced
from shardwise.audit.verdict import LIMITS, Row, audit_facts, audit_table, worst
from shardwise.launch.local import Body, LocalJob, run_local

TEXT_WIDTH = 120


def audit(
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures to this file too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few configurations of each kind.")] = False,
) -> None:
    """Plan configurations in one process, train them in others, and compare; about ten minutes on two cores.

    Planned is a dry run. Measured are the allocations and frees that torch's profiler records, and the resident size.
    """
    start = time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else TEXT_WIDTH)
    traced = audit_cases(quick=quick)
    sized = () if quick or not Path("/proc/self/clear_refs").exists() else resident_cases()
    plans = _planned((*traced, *sized))
    rows = [*_traced(traced, plans), *_sized(sized, plans)]
    console.print(audit_table(rows))
    console.print(f"{len(rows)} configurations; MiB of rank 0; errors are (measured - planned) / planned")
    if not any(case.model == "hugging-face" for case in traced):
        console.print("not run: a Hugging Face model (transformers is not installed)")
    found = worst(rows)
    for name, limit in LIMITS:
        if name in found:
            console.print(f"worst error of {name}: {found[name]:+.4%} (limit {limit:.0%})")
    facts = audit_facts(rows, time.perf_counter() - start)
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if not facts["kept"]:
        raise typer.Exit(1)


def _planned(cases: Sequence[AuditCase]) -> dict[AuditCase, Planned]:
    """Plan in a process of its own, which ends before anything is trained."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return dict(zip(cases, pool.apply(plan_cases, (cases,)), strict=True))


def _traced(cases: Sequence[AuditCase], plans: dict[AuditCase, Planned]) -> list[Row]:
    rows = []
    for num_ranks in sorted({case.ranks for case in cases}):
        group = tuple(case for case in cases if case.ranks == num_ranks)
        told = _run(train_traced, TracedTask(cases=group), num_ranks)
        rows += [Row(case=case, planned=plans[case], measured=found) for case, found in zip(group, told, strict=True)]
    return rows


def _sized(cases: Sequence[AuditCase], plans: dict[AuditCase, Planned]) -> list[Row]:
    return [Row(case=case, planned=plans[case], resident=_resident(case)) for case in cases]


def _resident(case: AuditCase) -> int:
    """Return the median of some runs: where the heap has holes is chance."""
    task = ResidentTask(case=case)
    return int(statistics.median(_run(train_resident, task, case.ranks)[0] for _ in range(NUM_HEAPS)))


def _run(body: Body, task: Any, num_ranks: int) -> list[Any]:
    """Return what rank 0 tells."""
    with tempfile.TemporaryDirectory(prefix="shardwise-audit-") as folder:
        job = LocalJob(body=body, task=task, num_ranks=num_ranks, rendezvous=f"{folder}/rendezvous")
        with contextlib.closing(run_local(job)) as messages:
            return [message for rank, message in messages if rank == 0 and message is not None]


if __name__ == "__main__":
    typer.run(audit)
