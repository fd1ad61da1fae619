"""Turns what a runtime, its ledger, its network and its optimizers do into the lines of a timeline.

It watches through ``Runtime.watch``, ``Ledger.on_change``, communicators around the model's own and the hooks of
optimizers, all of which are there only while it records. Read ``calls.py`` for who puts it there.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from shardwise.accounting.allocator import Counters, read_allocator
from shardwise.accounting.held import held_bytes, optimizer_bytes, planned_bytes
from shardwise.accounting.report import MEASURED_LEAVES_OUT, PLANNED_LEAVES_OUT
from shardwise.comm.base import flat_rank, num_ranks
from shardwise.comm.recording import Event
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.runtime.unit import Unit
from shardwise.runtime.watch import Moment
from shardwise.trace.comm import Ended
from shardwise.trace.lines import VERSION, Lines

__all__ = ["Recorder"]


class Recorder:
    """Writes the timeline of one rank's model.

    Attributes:
        phase: "forward", "backward", "step" or "between".
        operation: what runs, for the lines of memory: an operator of torch, where somebody looks at them.
        peak_bytes: most bytes of all kinds on the timeline so far.
        before_states: called before the optimizers' states are looked at.

    Args:
        managed: the model.
        lines: where to.
        counters: of the device's allocator; None: those of CUDA, on CUDA.
    """

    def __init__(self, managed: Managed, lines: Lines, counters: Counters | None = None) -> None:
        self.phase = "between"
        self.operation = ""
        self.peak_bytes = 0
        self.before_states: Callable[[], None] | None = None
        self._managed = managed
        self._lines = lines
        self._counters = counters
        self._changes: deque[tuple[str, str, int]] = deque()
        self._is_writing = False
        self._held: dict[tuple[str, str], int] = {}
        self._by_kind: dict[str, int] = {}
        self._peak: dict[str, Any] = {}
        self._num_slices = 0
        self._forwards: list[tuple[Unit, int]] = []  # with the numbers of their slices
        self._backwards: list[tuple[Unit, int]] = []
        self._backward: int | None = None
        self._step: int | None = None

    @property
    def units(self) -> list[str]:
        """Names of the units that compute now, outermost first."""
        return [_name(unit) for unit, _ in self._forwards or self._backwards]

    def begin(self) -> None:
        """Write the head: whose timeline it is, what was planned, what is held."""
        managed = self._managed
        self._held = {(kind.value, owner): count for (kind, owner), count in held_bytes(managed).items()}
        for (kind, _), count in self._held.items():
            self._by_kind[kind] = self._by_kind.get(kind, 0) + count
        self._lines.write(
            {
                "what": "head",
                "version": VERSION,
                "rank": flat_rank(managed.mesh),
                "num_ranks": num_ranks(managed.mesh),
                "device": str(managed.device),
                "units": [_name(unit) for unit in managed.runtime.units],
                "planned_bytes": planned_bytes(managed),
                "planned_leaves_out": PLANNED_LEAVES_OUT,
                "measured_bytes": dict(self._by_kind),
                "measured_owners": [[*key, count] for key, count in sorted(self._held.items())],
                "measured_leaves_out": MEASURED_LEAVES_OUT,
            }
        )
        self._look_for_peak()

    def end(self) -> None:
        """Write the foot: the moment with the most bytes."""
        self._close_forwards()
        self._close_backward()
        self._close_step()
        foot = {"planned_bytes": planned_bytes(self._managed), "measured_peak": self._peak}
        self._lines.write({"what": "foot", **foot})
        self._lines.close()

    def moment(self, moment: Moment, unit: Unit | None) -> None:
        """Take note of what the runtime does."""
        if moment is Moment.FORWARD_BEGINS and unit is not None:
            recomputes = self._managed.runtime.in_backward
            if not recomputes:
                self.phase = "forward"
            number = self._open("recompute" if recomputes else "forward", unit)
            self._forwards.append((unit, number))
        elif moment is Moment.FORWARD_ENDS and unit is not None:
            self._end_forward(unit)
        elif moment is Moment.ROOT_BEGINS:
            self._close_forwards()
            self._close_step()
        elif moment is Moment.BACKWARD_BEGINS:
            self.phase = "backward"
            self._backward = self._open("backward", None)
        elif moment is Moment.UNIT_REACHED and unit is not None:
            if all(each is not unit for each, _ in self._backwards):
                self._backwards.append((unit, self._open("backward", unit)))
        elif moment is Moment.UNIT_PASSED and unit is not None:
            self._end_backward_of(unit)
        elif moment in (Moment.BACKWARD_ENDS, Moment.RESET):
            self._close_backward()

    def step_begins(self) -> None:
        """An optimizer is about to move."""
        self._close_step()
        self.phase = "step"
        self._step = self._open("step", None)

    def step_ends(self) -> None:
        """It moved, and the parameters are on their way back."""
        if self.before_states is not None:
            self.before_states()
        found = optimizer_bytes(self._managed)
        for owner in found.keys() | {owner for kind, owner in self._held if kind == Kind.OPTIM}:
            grown = found.get(owner, 0) - self._held.get((Kind.OPTIM.value, owner), 0)
            if grown:
                self.memory(Kind.OPTIM.value, owner, grown)
        self._close_step()

    def memory(self, kind: str, owner: str, num_bytes: int) -> None:
        """Bytes came or, if negative, went."""
        self._changes.append((str(kind), owner, num_bytes))
        if not self._is_writing:
            self._write_changes()

    def _write_changes(self) -> None:
        """Write the changes that came, also while a line was written: garbage may be collected at any time."""
        self._is_writing = True
        try:
            while self._changes:
                self._change(*self._changes.popleft())
        finally:
            self._is_writing = False

    def _change(self, kind: str, owner: str, num_bytes: int) -> None:
        key = kind, owner
        self._held[key] = self._held.get(key, 0) + num_bytes
        self._by_kind[kind] = self._by_kind.get(kind, 0) + num_bytes
        line = {"kind": kind, "owner": owner, "measured_change_bytes": num_bytes}
        if self.operation:
            line["operation"] = self.operation
        held = {each: count for each, count in self._by_kind.items() if count}
        self._lines.write({"what": "memory", **self._where(), **line, "measured_bytes": held})
        if num_bytes > 0:
            self._look_for_peak()

    def collective(self, event: Event) -> Ended:
        """A collective begins; return what is called at its end."""
        number = self._number()
        self._write(
            what="begin",
            slice=number,
            operation="collective",
            verb=event.verb.name.lower(),
            collective=event.operation,
            axis=event.axis,
            label=event.label,
            sent_bytes=event.sent_bytes,
        )

        def ended(waited_seconds: float) -> None:
            self._write(what="end", slice=number, waited_seconds=round(waited_seconds, 7))

        return ended

    def _end_forward(self, unit: Unit) -> None:
        if any(each is unit for each, _ in self._forwards):
            last = None
            while last is not unit:  # those inside that failed to begin end with it
                last, number = self._forwards.pop()
                self._close(number)
        if not self._forwards and self.phase == "forward":
            self.phase = "between"

    def _end_backward_of(self, unit: Unit) -> None:
        for place, (each, number) in enumerate(self._backwards):
            if each is unit:
                del self._backwards[place]
                self._close(number)
                return

    def _close_forwards(self) -> None:
        while self._forwards:
            self._close(self._forwards.pop()[1])

    def _close_backward(self) -> None:
        self._close_forwards()
        while self._backwards:
            self._close(self._backwards.pop()[1])
        if self._backward is not None:
            self._close(self._backward)
            self._backward = None
            self.phase = "between"

    def _close_step(self) -> None:
        if self._step is not None:
            self._close(self._step)
            self._step = None
            self.phase = "between"

    def _ask_allocator(self) -> None:
        found = read_allocator(self._managed.device, self._counters)
        if found is not None:
            self._write(what="allocator", measured_by_allocator=asdict(found))

    def _open(self, operation: str, unit: Unit | None) -> int:
        number = self._number()
        owner = {} if unit is None else {"owner": _name(unit)}
        self._write(what="begin", slice=number, operation=operation, **owner)
        self._ask_allocator()
        return number

    def _close(self, number: int) -> None:
        self._ask_allocator()
        self._write(what="end", slice=number)

    def _number(self) -> int:
        self._num_slices += 1
        return self._num_slices

    def _write(self, **values: Any) -> None:
        self._is_writing = True
        self._lines.write({**values, **self._where()})
        self._write_changes()

    def _where(self) -> Mapping[str, Any]:
        return {"step": self._managed.runtime.num_steps + 1, "phase": self.phase, "units": self.units}

    def _look_for_peak(self) -> None:
        total = sum(self._by_kind.values())
        if total > self.peak_bytes:
            self.peak_bytes = total
            self._peak = {
                "bytes": total,
                "seconds": round(self._lines.seconds(), 7),
                **self._where(),
                "by_kind": dict(self._by_kind),
                "by_owner": [[*key, count] for key, count in sorted(self._held.items()) if count],
            }


def _name(unit: Unit) -> str:
    return unit.name or "root"
