"""Planned beside measured: errors by column, limits, a table. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from shardwise.audit.cases import AuditCase
from shardwise.audit.planning import STATES, Planned
from shardwise.audit.trace import Measured
from shardwise.memory import Kind

__all__ = ["LIMITS", "Row", "audit_facts", "audit_table", "worst"]

# Largest relative errors: states to the byte, what comes and goes, all that lives at the peak, the resident size.
LIMITS = (("states", 0.0), ("rest of the peak", 0.02), ("peak", 0.02), ("resident", 0.10))
_KINDS = frozenset(kind.value for kind in Kind)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case.

    Attributes:
        case: what was planned and trained.
        planned: before.
        measured: by the allocator's events; None: not traced.
        resident: bytes by which the resident size grew at most; None: not looked at.
    """

    case: AuditCase
    planned: Planned
    measured: Measured | None = None
    resident: int | None = None

    def errors(self) -> dict[str, float]:
        """Return (measured - planned) / planned by column; of the states the largest of the four kinds."""
        errors = {}
        if self.measured is not None:
            kinds = [_error(self.planned.states[kind], self.measured.rest.get(kind, 0)) for kind in STATES]
            errors["states"] = max(kinds, key=abs)
            errors["rest of the peak"] = _error(_passing(self.planned.by_kind), _passing(self.measured.by_kind))
            errors["peak"] = _error(self.planned.peak, self.measured.peak)
        if self.resident is not None:
            errors["resident"] = _error(self.planned_resident, self.resident)
        return errors

    @property
    def planned_resident(self) -> int:
        """What the resident size should grow by: what lives, and the holes that the C library leaves between."""
        return self.planned.peak if self.planned.heap is None else self.planned.heap


def _passing(by_kind: Mapping[str, int]) -> int:
    """Return what is neither a state nor the engine's: activations, temporaries, batch and buffers."""
    return sum(num_bytes for kind, num_bytes in by_kind.items() if kind not in _KINDS)


def _error(planned: int, measured: int) -> float:
    return 0.0 if planned == measured else (measured - planned) / planned if planned else float(measured)


def worst(rows: Sequence[Row]) -> dict[str, float]:
    """Return the error of each column that is furthest from 0."""
    found: dict[str, float] = {}
    for row in rows:
        for column, error in row.errors().items():
            found[column] = max(found.get(column, 0.0), error, key=abs)
    return found


def audit_table(rows: Sequence[Row]) -> Table:
    """Return the errors of each case; sizes in MiB, of rank 0."""
    table = Table()
    for column in (
        "model",
        "ranks",
        "stage",
        "dtype",
        "recompute",
        "planned peak",
        "measured",
        *(n for n, _ in LIMITS),
    ):
        table.add_column(column, justify="left" if column in ("model", "dtype", "recompute") else "right")
    for row in rows:
        case, errors = row.case, row.errors()
        planned, measured = row.planned_resident, row.resident or 0
        if row.measured is not None:
            planned, measured = row.planned.peak, row.measured.peak
        table.add_row(
            case.model,
            str(case.ranks),
            str(case.stage),
            case.precision,
            "blocks" if case.checkpointing else "no",
            f"{planned / 2**20:.2f}",
            f"{measured / 2**20:.2f}",
            *(f"{errors[name]:+.3%}" if name in errors else "" for name, _ in LIMITS),
        )
    return table


def audit_facts(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Return the same as plain values."""
    found = worst(rows)
    return {
        "seconds": seconds,
        "worst": found,
        "limits": dict(LIMITS),
        "kept": all(abs(found.get(name, 0.0)) <= limit for name, limit in LIMITS),
        "rows": [{**asdict(row), "errors": row.errors()} for row in rows],
    }
