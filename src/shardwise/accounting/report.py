"""Planned beside measured, kind by kind: ``memory_report``."""

from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shardwise.accounting.allocator import Allocator, Counters, read_allocator
from shardwise.accounting.held import held_bytes, managed_of, planned_bytes, sums_by_kind
from shardwise.comm.base import flat_rank, num_ranks
from shardwise.managed import Managed
from shardwise.memory import Kind

__all__ = ["MemoryReport", "memory_report", "report_of"]

PLANNED_LEAVES_OUT = (
    "gathered parameters, staging, activations and temporaries, step counters of the optimizer, the allocator's "
    "rounding, the process"
)
MEASURED_LEAVES_OUT = (
    "activations and temporaries, what collectives receive into, step counters of the optimizer, the allocator's "
    "rounding, the process"
)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank by kind; ``print`` shows a table.

    Attributes:
        rank: whose bytes they are.
        num_ranks: number of data-parallel ranks over which anything is split or replicated.
        device: where they are.
        planned_bytes: at rest, while gradients are there; None for an optimizer whose state is not known.
        measured_bytes: held now; there are no gradients after ``zero_grad``.
        measured_peak_bytes: most that each kind held since the model was sharded; kinds need not have peaked together.
            Of "optim", which torch holds, what there is now.
        measured_peak_together_bytes: most of all kinds but "optim" at one moment.
        measured_by_allocator: on CUDA, of the whole process; None elsewhere.
        planned_leaves_out: what no planned figure contains.
        measured_leaves_out: what no measured figure but the allocator's contains.
    """

    rank: int
    num_ranks: int
    device: str
    planned_bytes: dict[str, int | None]
    measured_bytes: dict[str, int]
    measured_peak_bytes: dict[str, int]
    measured_peak_together_bytes: int
    measured_by_allocator: Allocator | None = None
    planned_leaves_out: str = field(default=PLANNED_LEAVES_OUT)
    measured_leaves_out: str = field(default=MEASURED_LEAVES_OUT)

    def __str__(self) -> str:
        """Return a table, and what its figures leave out."""
        line = partial("{:<22s}{:>18s}{:>18s}{:>18s}".format)
        lines = [
            line(f"bytes of rank {self.rank} of {self.num_ranks}", "planned at rest", "measured now", "measured peak")
        ]
        for kind, now in self.measured_bytes.items():
            planned = self.planned_bytes.get(kind)
            lines.append(line(kind, _number(planned), _number(now), _number(self.measured_peak_bytes[kind])))
        together = sum(count for kind, count in self.measured_bytes.items() if kind != Kind.OPTIM)
        lines.append(line("together, not optim", "-", _number(together), _number(self.measured_peak_together_bytes)))
        lines.append(f"planned leaves out: {self.planned_leaves_out}")
        lines.append(f"measured leaves out: {self.measured_leaves_out}")
        found = self.measured_by_allocator
        if found is not None:
            lines.append(
                f"measured by the allocator of {self.device}: allocated {found.allocated_bytes:,}, requested "
                f"{found.requested_bytes:,}, reserved {found.reserved_bytes:,}, fragmented {found.fragmented_bytes:,}, "
                f"outside of it {found.outside_bytes:,}; {found.num_retries} retries, {found.num_device_allocations} "
                f"requests to the device, {found.num_shortages} failed"
            )
        return "\n".join(lines)


def memory_report(model: nn.Module) -> MemoryReport:
    """Return what this rank holds beside what was planned, by kind. Moves nothing.

    Args:
        model: a sharded model, or an engine.

    Raises:
        ConfigError: it is neither.
    """
    return report_of(managed_of(model))


def report_of(managed: Managed, counters: Counters | None = None) -> MemoryReport:
    """Return the report of a managed model; ``counters`` are those of ``read_allocator``."""
    ledger = managed.runtime.means.arena.ledger
    now = sums_by_kind(held_bytes(managed))
    peak = {kind: now[kind] if kind is Kind.OPTIM else ledger.peak[kind] for kind in now}
    return MemoryReport(
        rank=flat_rank(managed.mesh),
        num_ranks=num_ranks(managed.mesh),
        device=str(managed.device),
        planned_bytes=planned_bytes(managed),
        measured_bytes={kind.value: count for kind, count in now.items()},
        measured_peak_bytes={kind.value: count for kind, count in peak.items()},
        measured_peak_together_bytes=ledger.peak_total_bytes,
        measured_by_allocator=read_allocator(managed.device, counters),
    )


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
