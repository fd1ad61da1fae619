"""Pure decisions: which unit to gather ahead, which to keep, in which order to reduce.

A ``Schedule`` is made from the order in which all ranks were seen to use the units. It knows unit numbers only; the
runtime asks it at each event and does what it says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from shardwise.errors import ConfigError

__all__ = ["Begin", "End", "Schedule", "TraceEvent", "Walk"]


@dataclass(frozen=True)
class Begin:
    """A unit's forward begins."""

    unit: int


@dataclass(frozen=True)
class End:
    """A unit's forward ends."""

    unit: int


TraceEvent = Begin | End


@dataclass(frozen=True)
class Walk:
    """What one root forward did with the units, in order."""

    events: tuple[TraceEvent, ...] = ()

    @cached_property
    def first_begin(self) -> Mapping[int, int]:
        """Position at which each used unit began first."""
        return {event.unit: i for i, event in reversed(list(enumerate(self.events))) if isinstance(event, Begin)}

    @cached_property
    def last_end(self) -> Mapping[int, int]:
        """Position at which each used unit ended last."""
        return {event.unit: i for i, event in enumerate(self.events) if isinstance(event, End)}

    @cached_property
    def code(self) -> int:
        """A number for the order, the same in every process, that fits 62 bits."""
        return hash(tuple((isinstance(event, End), event.unit) for event in self.events)) & ((1 << 62) - 1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What to do around each unit, from one root forward that all ranks made alike.

    Attributes:
        num_units: number of units of the model, in definition order.
        trace: begins and ends of one root forward; empty while no order is agreed.
        late: units whose gradients were seen to come after their turn (an earlier unit uses their weights too): they
            are reduced at the end of a backward.
        prefetch: number of units to gather ahead.
        reductions_in_flight: buckets whose gradients may travel while the backward goes on; each holds its slab.
        keep_last: keep the units that no other unit follows from forward to backward.
        not_read_backward: units whose parameters no backward reads, such as embeddings: not gathered there.
    """

    num_units: int
    trace: tuple[TraceEvent, ...] = ()
    late: frozenset[int] = frozenset()
    prefetch: int = 1
    reductions_in_flight: int = 2
    keep_last: bool = True
    not_read_backward: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.prefetch < 0 or self.reductions_in_flight < 0:
            raise ConfigError(
                f"prefetch and reductions_in_flight are numbers >= 0, got {self.prefetch} and "
                f"{self.reductions_in_flight}"
            )

    def agreed(self, trace: tuple[TraceEvent, ...]) -> "Schedule":
        """Return the schedule with another agreed order."""
        return replace(self, trace=trace)

    def without_backward_reads(self, units: frozenset[int]) -> "Schedule":
        """Return the schedule in which backward leaves exactly these units ungathered."""
        return replace(self, not_read_backward=units)

    def with_late(self, units: frozenset[int]) -> "Schedule":
        """Return the schedule with more units that are reduced at the end of a backward."""
        return replace(self, late=self.late | units)

    @cached_property
    def forward_order(self) -> tuple[int, ...]:
        """Units in the order of their first use; empty while no order is agreed."""
        return tuple(dict.fromkeys(event.unit for event in self.trace if isinstance(event, Begin)))

    @cached_property
    def reduction_order(self) -> tuple[int, ...]:
        """Every unit, last used first: the order in which gradients are reduced on all ranks.

        Units without an agreed use come where their definition puts them, after the used ones; late ones at the end.
        """
        unused = tuple(unit for unit in range(self.num_units) if unit not in self.forward_order)
        last_used_first = (unused + self.forward_order)[::-1]
        return tuple(sorted(last_used_first, key=self.late.__contains__))

    @cached_property
    def kept(self) -> frozenset[int]:
        """Units that stay gathered from forward to backward: after their end no other unit begins."""
        if not self.keep_last:
            return frozenset()
        kept: set[int] = set()
        for event in reversed(self.trace):
            if isinstance(event, Begin):
                break
            kept.add(event.unit)
        return frozenset(kept)

    def ahead(self, unit: int, *, backward: bool = False) -> Sequence[int]:
        """Return the units to gather while ``unit`` computes, nearest first."""
        position = self._position.get(unit)
        if position is None:
            return ()
        if backward:
            before = (self.forward_order[i] for i in range(position - 1, -1, -1))
            return tuple(islice((u for u in before if u not in self.not_read_backward), self.prefetch))
        return self.forward_order[position + 1 : position + 1 + self.prefetch]

    @cached_property
    def _position(self) -> Mapping[int, int]:
        return {unit: position for position, unit in enumerate(self.forward_order)}
