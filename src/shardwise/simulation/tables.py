"""What a simulation and a verification found, as tables for people and as plain values for JSON."""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from shardwise.simulation.calls import Simulation, Verification
from shardwise.simulation.differences import Difference
from shardwise.simulation.owner_view import OwnerRun
from shardwise.simulation.parity import Comparison, StageRun
from shardwise.simulation.sharded import Sent

__all__ = [
    "as_text",
    "simulation_facts",
    "simulation_tables",
    "verification_facts",
    "verification_tables",
]

KINDS = ("param", "master", "grad", "optim")
TEXT_WIDTH = 100


def as_text(parts: Iterable[RenderableType]) -> str:
    """Return tables as plain text, without a newline at the end."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None, highlight=False, legacy_windows=False)
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def simulation_tables(result: Simulation, *, rank: int = 0) -> list[RenderableType]:
    """Return what is shown of a simulation, in order; kept and sent are those of ``rank``."""
    comparison = result.comparison
    title = f"{result.num_params:,} parameters, {comparison.precision}, {result.ranks} ranks, {result.steps} steps"
    shown: list[RenderableType] = [
        f"Kept and sent by rank {rank}: {title}",
        _stage_table(comparison, rank),
        f"Collectives of rank {rank} in the last step",
        _sent_table(comparison.stages, rank),
    ]
    if result.owners:
        shown += ["Whole tensors owned by one rank, and slices: elements of one step", _owner_table(result.owners)]
    verdict = f"every stage equals plain training: {'yes' if result.equal else 'NO'}"
    return [*shown, *_lines(result.notes, result.problems), verdict]


def verification_tables(result: Verification, *, top: int = 3) -> list[RenderableType]:
    """Return what is shown of a verification, in order, with the ``top`` largest differences of each stage."""
    title = f"{result.num_params:,} parameters, {result.ranks} ranks, {result.steps} steps"
    table = Table()
    for column in ("precision", "stage", "tensor", "largest", "relative", "allowed", "bits of stages"):
        table.add_column(column, overflow="fold", justify="left" if column in ("precision", "tensor") else "right")
    for comparison in result.comparisons:
        for run in comparison.stages:
            _add_differences(table, comparison, run, top)
    moved = [f"{c.precision}: largest update {max(c.updates.values(), default=0.0):.2g}" for c in result.comparisons]
    verdict = f"every stage trains as one plain process: {'yes' if result.ok else 'NOT SHOWN'}"
    heading = f"Largest differences from plain training: {title}"
    return [heading, table, "; ".join(moved) + " of its tensor", *_lines(result.notes, result.problems), verdict]


def _add_differences(table: Table, comparison: Comparison, run: StageRun, top: int) -> None:
    table.add_section()
    bits = f"{len(run.unlike)} unlike" if run.unlike else "alike"
    shown = [difference for difference in run.differences if difference.relative > 0][:top]
    rows = [(found.name, f"{found.largest:.2g}", f"{found.relative:.2g}") for found in shown]
    num_alike = sum(difference.relative == 0 for difference in run.differences)
    if num_alike:
        rows.append((f"{num_alike} {'others' if shown else 'tensors'}", "0", "0"))
    for index, row in enumerate(rows):
        first = (comparison.precision, str(run.stage)) if index == 0 else ("", "")
        table.add_row(*first, *row, f"{comparison.tolerance.relative:g}", bits if index == 0 else "")


def _stage_table(comparison: Comparison, rank: int) -> Table:
    table = Table()
    table.add_column("")
    for run in comparison.stages:
        table.add_column(f"stage {run.stage}", justify="right")

    def add_row(name: str, cell: Callable[[StageRun], str]) -> None:
        table.add_row(name, *(cell(run) for run in comparison.stages))

    for kind in KINDS:
        add_row(f"{kind} bytes", lambda run, kind=kind: f"{run.kept_bytes[rank][kind]:,}")  # type: ignore[misc]
    add_row("as planned, all ranks", lambda run: "yes" if run.as_planned else "NO")
    table.add_section()
    add_row("sent bytes in a step", lambda run: f"{sum(sent.bytes for sent in run.sent[rank][-1]):,}")
    add_row("collectives in a step", lambda run: f"{sum(sent.count for sent in run.sent[rank][-1]):,}")
    table.add_section()
    add_row("last loss", lambda run: f"{run.losses[-1]:.6f}")
    add_row(f"  plain: {comparison.plain.trace.losses[-1]:.6f}, off by", lambda run: _worst(run.differences))
    add_row(f"bits of stage {comparison.stages[0].stage}", lambda run: "NO" if run.unlike else "yes")
    return table


def _sent_table(stages: Sequence[StageRun], rank: int) -> Table:
    table = Table()
    for column in ("stage", "verb", "collective"):
        table.add_column(column)
    for column in ("count", "elements sent", "bytes sent"):
        table.add_column(column, justify="right")
    for run in stages:
        table.add_section()
        for index, sent in enumerate(run.sent[rank][-1]):
            numbers = (f"{sent.count:,}", f"{sent.elements:,}", f"{sent.bytes:,}")
            table.add_row(str(run.stage) if index == 0 else "", sent.verb, sent.collective, *numbers)
    return table


def _owner_table(owners: Sequence[OwnerRun]) -> Table:
    table = Table()
    table.add_column("")
    for run in owners:
        table.add_column(f"stage {run.stage}, owners", justify="right")
        table.add_column("slices", justify="right")

    def add_row(name: str, cells: Callable[[OwnerRun], tuple[str, str]]) -> None:
        table.add_row(name, *(cell for run in owners for cell in cells(run)))

    add_row("sent, all ranks", lambda run: (f"{sum(run.sent_elements):,}", f"{sum(run.slice_sent_elements):,}"))
    add_row("sent, busiest rank", lambda run: (f"{max(run.sent_elements):,}", f"{max(run.slice_sent_elements):,}"))
    add_row("owned, largest part", lambda run: (f"{max(run.owned_elements):,}", f"{run.slice_elements:,.0f}"))
    add_row("owned, smallest part", lambda run: (f"{min(run.owned_elements):,}", f"{run.slice_elements:,.0f}"))
    add_row("collectives", lambda run: (f"{run.num_collectives:,}", f"{run.slice_num_collectives:,}"))
    add_row("parameters, off by", lambda run: (_worst(run.differences), ""))
    return table


def _worst(differences: Sequence[Difference]) -> str:
    return f"{differences[0].relative:.2g}"


def _lines(notes: Sequence[str], problems: Sequence[str]) -> list[str]:
    return [*(f"note: {note}" for note in notes), *(f"problem: {problem}" for problem in problems)]


# For JSON


def simulation_facts(result: Simulation) -> dict[str, Any]:
    """Return everything that a simulation found, as values that JSON has; numbers that are not finite become None."""
    comparison = result.comparison
    return {
        "ranks": result.ranks,
        "steps": result.steps,
        "params": result.num_params,
        "precision": comparison.precision,
        "plain_losses": [_number(loss) for loss in comparison.plain.trace.losses],
        "stages": [_stage_facts(run) for run in comparison.stages],
        "owners": [_owner_facts(run) for run in result.owners],
        "notes": list(result.notes),
        "problems": list(result.problems),
        "equal": result.equal,
    }


def verification_facts(result: Verification) -> dict[str, Any]:
    """Return everything that a verification found, as values that JSON has; numbers that are not finite become None."""
    return {
        "ranks": result.ranks,
        "steps": result.steps,
        "params": result.num_params,
        "precisions": [
            {
                "precision": comparison.precision,
                "allowed": comparison.tolerance.relative,
                "plain_losses": [_number(loss) for loss in comparison.plain.trace.losses],
                "updates": {name: _number(update) for name, update in comparison.updates.items()},
                "stages": [
                    {
                        "stage": run.stage,
                        "losses": [_number(loss) for loss in run.losses],
                        "unlike_bits": list(run.unlike),
                        "differences": [_difference_facts(difference) for difference in run.differences],
                    }
                    for run in comparison.stages
                ],
            }
            for comparison in result.comparisons
        ],
        "notes": list(result.notes),
        "problems": list(result.problems),
        "ok": result.ok,
    }


def _stage_facts(run: StageRun) -> dict[str, Any]:
    return {
        "stage": run.stage,
        "losses": [_number(loss) for loss in run.losses],
        "largest_difference": _difference_facts(run.differences[0]),
        "unlike_bits": list(run.unlike),
        "kept_bytes": [dict(kinds) for kinds in run.kept_bytes],
        "planned_bytes": None if run.planned_bytes is None else [dict(kinds) for kinds in run.planned_bytes],
        "sent": [[[_sent_facts(sent) for sent in step] for step in steps] for steps in run.sent],
    }


def _sent_facts(sent: Sent) -> dict[str, Any]:
    return {
        "verb": sent.verb,
        "collective": sent.collective,
        "count": sent.count,
        "elements": sent.elements,
        "bytes": sent.bytes,
    }


def _owner_facts(run: OwnerRun) -> dict[str, Any]:
    return {
        "stage": run.stage,
        "owners": dict(run.owners),
        "owned_elements": list(run.owned_elements),
        "slice_elements": run.slice_elements,
        "sent_elements": list(run.sent_elements),
        "slice_sent_elements": list(run.slice_sent_elements),
        "collectives": run.num_collectives,
        "slice_collectives": run.slice_num_collectives,
        "largest_difference": _difference_facts(run.differences[0]),
    }


def _difference_facts(difference: Difference) -> dict[str, Any]:
    return {
        "name": difference.name,
        "largest": _number(difference.largest),
        "relative": _number(difference.relative),
        "allowed": difference.allowed,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
