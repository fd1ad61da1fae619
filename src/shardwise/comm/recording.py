"""A communicator that wraps another and writes down what each call sends, for plans, tests and golden traces.

Owns ``Event``, ``Log``, ``RecordingComm`` and ``record``. Counts are what this rank must send when every part travels
once to every peer that needs it; retries and protocol bytes are not in it. May import ``base`` and ``board``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.base import Comm, Key, Mesh, Verb, Work
from shardwise.comm.board import Abortable

__all__ = ["Event", "Log", "RecordingComm", "record"]


@dataclass(frozen=True)
class Event:
    """One collective, seen from one rank.

    ``sent_elements`` is ``(size - 1) * part`` for ``all_gather`` and ``reduce_scatter``, ``(size - 1) * numel`` for
    ``broadcast`` on the source and 0 on the others. ``sent_bytes`` counts them in the dtype of the wire.
    """

    axis: str
    verb: Verb
    label: str
    operation: str  # the method of ``Comm``
    sent_bytes: int
    sent_elements: int


class Log:
    """The events of one rank over all axes, in the order of the calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def append(self, event: Event) -> None:
        """Add one event."""
        self.events.append(event)

    def clear(self) -> None:
        """Forget everything, for counts per step."""
        self.events.clear()

    def sent_bytes(self, verb: Verb | None = None, *, axis: str | None = None) -> int:
        """Bytes sent by this rank, in all or for one verb or axis."""
        return sum(event.sent_bytes for event in self._select(verb, axis))

    def sent_elements(self, verb: Verb | None = None, *, axis: str | None = None) -> int:
        """Elements sent by this rank, in all or for one verb or axis."""
        return sum(event.sent_elements for event in self._select(verb, axis))

    def num_calls(self, verb: Verb | None = None, *, axis: str | None = None) -> int:
        """Number of collectives, in all or for one verb or axis; those of one rank count too."""
        return len(self._select(verb, axis))

    def bytes_by_verb(self) -> dict[Verb, int]:
        """Bytes sent per verb that occurred."""
        return {verb: self.sent_bytes(verb) for verb in Verb if self.num_calls(verb)}

    def elements_by_verb(self) -> dict[Verb, int]:
        """Elements sent per verb that occurred."""
        return {verb: self.sent_elements(verb) for verb in Verb if self.num_calls(verb)}

    def _select(self, verb: Verb | None, axis: str | None) -> list[Event]:
        return [event for event in self.events if verb in (None, event.verb) and axis in (None, event.axis)]


class RecordingComm:
    """Does what ``comm`` does and logs it.

    Args:
        comm: does the work.
        log: shared by the axes of one rank.
        axis: name for the events.
    """

    def __init__(self, comm: Comm, log: Log, axis: str = "data") -> None:
        self.comm = comm
        self.log = log
        self.axis = axis

    @property
    def rank(self) -> int:
        """This process's coordinate on the axis."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.comm.size

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` free bucket numbers."""
        return self.comm.reserve(count)

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Log ``(size - 1)`` times this rank's part."""
        self._append("all_gather", key, (self.size - 1) * (buffer.numel() // self.size), buffer.dtype)
        return self.comm.all_gather(buffer, key)

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Log ``(size - 1)`` parts in ``wire``."""
        self._append("reduce_scatter", key, (self.size - 1) * (buffer.numel() // self.size), wire)
        return self.comm.reduce_scatter(buffer, out, key, wire=wire, sum=sum)

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        """Log ``(size - 1)`` buffers on the source, nothing sent on the others."""
        sent_elements = (self.size - 1) * buffer.numel() if self.rank == source else 0
        self._append("broadcast", key, sent_elements, buffer.dtype)
        return self.comm.broadcast(buffer, source, key)

    def announce(self, topic: str, text: str) -> None:
        """Leave a text; not logged, since it does not go over the axis."""
        self.comm.announce(topic, text)

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return what the ranks announced."""
        return self.comm.announced(topic, seconds)

    def forget(self, topic: str) -> None:
        """Take this rank's text away."""
        self.comm.forget(topic)

    def abort(self, error: BaseException) -> None:
        """Wake the peers, where ``comm`` can."""
        if isinstance(self.comm, Abortable):
            self.comm.abort(error)

    def _append(self, operation: str, key: Key, sent_elements: int, dtype: torch.dtype) -> None:
        sent_bytes = sent_elements * dtype.itemsize
        self.log.append(Event(self.axis, key.verb, key.label, operation, sent_bytes, sent_elements))


def record(mesh: Mesh) -> tuple[dict[str, Comm], Log]:
    """Wrap every axis of a mesh; return the wrapped mesh and its one log."""
    log = Log()
    return {axis: RecordingComm(comm, log, axis) for axis, comm in mesh.items()}, log
