"""Instruments in place of a model's lanes and arena: side work at its earliest or latest, memory that is never free.

One ``Instruments`` per rank: ``shard(model, mesh, lanes=probe.lanes, arena=probe.arena)``. A missing wait shows as NaN
(what a job will write is poisoned until it ran, what was freed is poisoned instead), or as an ``AssertionError`` of the
``OrderChecker`` that names both accesses. ``skip`` takes one wait away, to show that the instruments would notice.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from shardwise.comm.base import Work
from shardwise.lanes import Job, Lanes, Steps, Tensors
from shardwise.memory import Arena

__all__ = ["Instruments", "OrderChecker", "PoisonArena", "Policy"]

# "posted": the first transfers are posted at once, the rest of each in its wait. "now": a job
# runs to its end at once. "late": nothing of it runs before the wait. "seeded": one of the three, drawn for each job.
Policy = Literal["posted", "now", "late", "seeded"]
_PACKAGE = str(Path(__file__).parents[1])


class Instruments:
    """The observed lanes and arena of one rank.

    Ranks that wait for their jobs in unlike orders may wait for each other for ever, unless the policy is "posted" and
    the jobs have one transfer, or "now". The engine waits alike on all ranks.

    Args:
        policy: when jobs run; see ``Policy``.
        seed: of the drawn choices, the same on all ranks, else ranks would wait for each other.
        skip: number of the effective wait that does nothing, on all ranks the same; None keeps all. A wait is
            effective if the compute stream is not ordered after the job yet.
        check: raise at unordered accesses. Without, only poison tells.

    Attributes:
        waits: where each effective wait was called, in order.
    """

    def __init__(
        self, policy: Policy = "posted", *, seed: int = 0, skip: int | None = None, check: bool = True
    ) -> None:
        self.policy = policy
        self.skip = skip
        self.check = check
        self.checker = OrderChecker()
        self.waits: list[str] = []
        self._random = random.Random(seed)

    def lanes(self, device: torch.device) -> Lanes:
        """Make the lanes: pass this method as ``lanes=``."""
        return _ObservedLanes(gather=_Lane("gather", self), reduce=_Lane("reduce", self), on_access=self.on_access)

    def arena(self, device: torch.device) -> Arena:
        """Make the arena: pass this method as ``arena=``."""
        return PoisonArena(device, lambda tensor: self.on_access((), [tensor]))

    def on_access(self, reads: Tensors, writes: Tensors) -> None:
        """The compute stream touches tensors now."""
        if self.check:
            self.checker.access(_Accesses(_caller(), reads, writes))

    def draw(self) -> Policy:
        """Return what the next job does."""
        return self._random.choice(("posted", "now", "late")) if self.policy == "seeded" else self.policy

    def skips_next_wait(self) -> bool:
        """Count an effective wait; return whether it is the one to skip."""
        self.waits.append(_caller())
        return len(self.waits) - 1 == self.skip


@dataclass(frozen=True, kw_only=True)
class _ObservedLanes(Lanes):
    """Lanes whose note of compute accesses goes to the instruments."""

    on_access: Callable[[Tensors, Tensors], None]

    def on_compute(self, *, reads: Tensors = (), writes: Tensors = ()) -> None:
        """Pass the note on."""
        self.on_access(reads, writes)


class _Lane:
    """An in-order queue whose jobs run when the policy says."""

    def __init__(self, name: str, instruments: Instruments) -> None:
        self._name = name
        self._instruments = instruments
        self._queue: deque[_Handle] = deque()

    def run(self, job: Job, *, reads: Tensors = (), writes: Tensors = (), updates: Tensors = ()) -> "_Handle":
        """Poison what the job will write, then do as much of it as was drawn."""
        probe, checker = self._instruments, self._instruments.checker
        known = _Accesses(f"the {self._name} job of {_caller()}", reads, (*writes, *updates))
        if probe.check:
            checker.access(known)
        checker.follow(self._name, known)
        handle = _Handle(self, known, job())
        self._queue.append(handle)
        for tensor in writes:
            _poison(tensor)
        drawn = probe.draw()
        if drawn == "posted":
            for earlier in self._queue:
                earlier.start()
        elif drawn == "now":
            self._finish_until(handle)
        return handle

    def wait(self, handle: "_Handle") -> None:
        """Finish the lane's jobs up to this one, unless this is the wait to skip."""
        probe = self._instruments
        if probe.checker.is_in_flight(self._name, handle.known):
            if probe.skips_next_wait():
                return
            probe.checker.waited(self._name, handle.known)
            self._finish_until(handle)

    def flush(self) -> None:
        """Finish the jobs that have posted something; nothing is ordered after them by that."""
        while self._queue and self._queue[0].started:
            self._queue[0].finish()
            self._queue.popleft()

    def _finish_until(self, handle: "_Handle") -> None:
        while not handle.done and self._queue:
            self._queue[0].finish()
            self._queue.popleft()


class _Handle:
    """One job of a ``_Lane``."""

    def __init__(self, lane: _Lane, known: "_Accesses", steps: Steps) -> None:
        self.known = known
        self.done = False
        self._lane = lane
        self._steps = steps
        self.started = False
        self._work: Work | None = None

    def start(self) -> None:
        """Run to the first transfer that must be waited for."""
        if not self.started:
            self.started = True
            self._advance()

    def finish(self) -> None:
        """Run to the end."""
        self.start()
        while not self.done:
            if self._work is not None:
                self._work.wait()
            self._advance()

    def wait(self) -> None:
        """Order the compute stream after the job."""
        self._lane.wait(self)

    host_wait = wait

    def _advance(self) -> None:
        try:
            self._work = next(self._steps)
            while self._work is None:
                self._work = next(self._steps)
        except StopIteration:
            self.done = True


class PoisonArena(Arena):
    """Keeps all memory and fills it with NaN where a real arena frees or provides it; the ledger counts as ever.

    Args:
        device: where to allocate.
        on_resize: told of every tensor whose memory comes or goes.
    """

    def __init__(self, device: torch.device, on_resize: Callable[[Tensor], None] | None = None) -> None:
        super().__init__(device)
        self._on_resize = on_resize

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        """Poison the memory behind a flat tensor; only ever enlarge it."""
        if self._on_resize is not None:
            self._on_resize(tensor)
        if tensor.untyped_storage().nbytes() < num_bytes:
            super().resize(tensor, num_bytes)
        _poison(tensor)


class OrderChecker:
    """Tells whether two accesses to the same bytes are ordered, on any device and whatever really happened.

    Jobs start after all that the compute stream did before they were issued, and end in the order of their lane. So
    the compute stream's vector clock, one entry per lane, is the number of jobs of that lane it waited for, and a
    later access of a job or of the compute stream conflicts exactly with the jobs in flight: issued and not waited
    for. That a lane also *starts* its jobs in order is not relied upon: a ``HostLane`` begins a job while earlier ones
    wait for their transfers.
    """

    def __init__(self) -> None:
        self._in_flight: dict[str, deque[_Accesses]] = {}

    def follow(self, lane: str, job: "_Accesses") -> None:
        """A lane got a job: it is in flight from now on."""
        self._in_flight.setdefault(lane, deque()).append(job)

    def waited(self, lane: str, job: "_Accesses") -> None:
        """The compute stream is ordered after a job, and so after all jobs before it on its lane."""
        queue = self._in_flight[lane]
        while self.is_in_flight(lane, job):
            queue.popleft()

    def is_in_flight(self, lane: str, job: "_Accesses") -> bool:
        """Return whether nothing orders the compute stream after the job yet."""
        return any(other is job for other in self._in_flight.get(lane, ()))

    def access(self, new: "_Accesses") -> None:
        """Check an access against every job in flight.

        Raises:
            AssertionError: names the two and the bytes.
        """
        for queue in self._in_flight.values():
            for job in queue:
                for place in new.conflicts(job):
                    raise AssertionError(f"unordered: {new.label} {place} {job.label}, and no wait is between them")


@dataclass(frozen=True)
class _Accesses:
    """Who reads and writes which tensors; all flat and contiguous."""

    label: str
    reads: Tensors
    writes: Tensors

    def conflicts(self, other: "_Accesses") -> Iterator[str]:
        """Yield what both touch and one of them writes."""
        for mine, theirs, verb, other_verb in (
            (self.reads, other.writes, "reads", "writes"),
            (self.writes, other.writes, "writes", "writes"),
            (self.writes, other.reads, "writes", "reads"),
        ):
            for one in mine:
                for two in theirs:
                    start, stop = _shared_bytes(one, two)
                    if start < stop:
                        yield f"{verb} bytes {start} to {stop} of a tensor that are the ones {other_verb} of"


def _shared_bytes(one: Tensor, two: Tensor) -> tuple[int, int]:
    if one.untyped_storage()._cdata != two.untyped_storage()._cdata:
        return 0, 0
    (start, stop), (other_start, other_stop) = _byte_range(one), _byte_range(two)
    return max(start, other_start), min(stop, other_stop)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + tensor.numel() * tensor.itemsize


def _poison(tensor: Tensor) -> None:
    """Fill with what no result survives: NaN, or the largest number of an integer type."""
    floating = tensor.dtype.is_floating_point
    with torch.no_grad():
        tensor.fill_(torch.nan if floating else True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _caller() -> str:
    """Return the functions of the library that led here, the innermost first; those of this file are left out."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(names) < 4:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and file != __file__:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return " < ".join(names) or "the test"
