"""Side work: transfers that run beside the compute stream. The only file with streams and events.

A job is a generator that posts transfers, yields the ``Work`` to wait for, and does the local arithmetic in between.
On CUDA a lane is one side stream and the whole job is queued on it at once. On the CPU a lane is a queue:
``run`` advances the job to its first wait (the transfers are posted), ``Handle.wait`` goes through the transfers in the
order of posting until the job is done, on the calling thread, so that they overlap without a worker thread.

A job's ``reads``, ``writes`` and ``updates`` are what it touches; the CUDA handle keeps them alive, and the instruments
in ``testing/lanes.py`` use them to find a missing wait.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm.base import Work

__all__ = ["Handle", "Job", "Lane", "Lanes", "make_lanes"]

Tensors = Sequence[Tensor]
Steps = Generator[Work | None, None, None]
Job = Callable[[], Steps]


class Handle(Protocol):
    """Work in flight on a lane."""

    def wait(self) -> None:
        """Order the compute stream after the work (on the CPU: block until it is done). Idempotent."""

    def host_wait(self) -> None:
        """Block the calling thread until the work is done: needed before the CPU reads the result."""


class Lane(Protocol):
    """One sequence of side work."""

    def run(self, job: Job, *, reads: Tensors = (), writes: Tensors = (), updates: Tensors = ()) -> Handle:
        """Start a job after what the compute stream has done so far.

        Args:
            job: generator function; see the head of this file.
            reads: tensors the job reads.
            writes: tensors of which the job writes every element before it reads any.
            updates: tensors the job reads and writes in place.
        """

    def flush(self) -> None:
        """Finish what was started, if it needs this thread to go on: later phases are posted by whoever waits."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The lanes of one runtime, and the note that the compute stream touches memory shared with them."""

    gather: Lane
    reduce: Lane

    def on_compute(self, *, reads: Tensors = (), writes: Tensors = ()) -> None:
        """Say that the compute stream touches these tensors now. Does nothing here; instruments override it."""


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes for a device: side streams on CUDA, in-order queues elsewhere."""
    if device.type == "cuda":
        return Lanes(gather=StreamLane(device), reduce=StreamLane(device))
    return Lanes(gather=HostLane(), reduce=HostLane())


class HostHandle:
    """A job of a ``HostLane``, advanced by whoever waits for it."""

    def __init__(self, lane: "HostLane", steps: Steps) -> None:
        self._lane = lane
        self._steps = steps
        self._work: Work | None = None
        self.done = False

    def advance(self) -> None:
        """Run the job up to its next unfinished transfer."""
        try:
            self._work = next(self._steps)
            while self._work is None:
                self._work = next(self._steps)
        except StopIteration:
            self.done = True

    def go_on(self) -> None:
        """Wait for the job's transfer in flight, then advance."""
        if self._work is not None:
            self._work.wait()
        self.advance()

    def wait(self) -> None:
        """Finish the job, and on the way what was posted before its last transfer."""
        self._lane.finish(self)

    host_wait = wait


class HostLane:
    """Jobs on the calling thread, each with one transfer in flight; whoever waits takes them in the order of posting.

    So the second transfer of a job is posted while the first of the next one is on the wire.
    """

    def __init__(self) -> None:
        self._queue: deque[HostHandle] = deque()  # by when their transfer was posted

    def run(self, job: Job, *, reads: Tensors = (), writes: Tensors = (), updates: Tensors = ()) -> Handle:
        """Post the job's first transfers."""
        handle = HostHandle(self, job())
        handle.advance()
        if not handle.done:
            self._queue.append(handle)
        return handle

    def flush(self) -> None:
        """Finish every job."""
        while self._queue:
            self._go_on()

    def finish(self, handle: HostHandle) -> None:
        """Wait for transfers, oldest first, until the job is done."""
        while not handle.done and self._queue:
            self._go_on()

    def _go_on(self) -> None:
        oldest = self._queue[0]  # it stays there if it raises, so that a later wait raises too
        oldest.go_on()
        self._queue.popleft()
        if not oldest.done:
            self._queue.append(oldest)


class StreamHandle:
    """An event on a side stream, and what must stay alive until the compute stream has waited for it."""

    def __init__(self, event: torch.cuda.Event, keep: tuple[Tensor, ...]) -> None:
        self._event: torch.cuda.Event | None = event
        self._keep = keep

    def wait(self) -> None:
        """Make the current stream wait for the event; the host goes on."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event, self._keep = None, ()

    def host_wait(self) -> None:
        """Block the host until the event has happened."""
        if self._event is not None:
            self._event.synchronize()
            self.wait()


class StreamLane:
    """One side stream; made once per runtime and device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def run(self, job: Job, *, reads: Tensors = (), writes: Tensors = (), updates: Tensors = ()) -> Handle:
        """Queue the whole job behind what the compute stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for work in job():
                if work is not None:
                    work.wait()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return StreamHandle(event, (*reads, *writes, *updates))

    def flush(self) -> None:
        """Do nothing: a stream goes on by itself."""
