"""A communicator that tells when its collectives begin and end, beside what ``RecordingComm`` writes down."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.comm.base import Comm, Key, Work
from shardwise.comm.recording import Event, Log, RecordingComm

__all__ = ["Ended", "TimedComm"]

Ended = Callable[[float], None]  # told how many seconds this thread waited


class _TimedWork:
    """Transfers in flight that tell, once, when they are through."""

    def __init__(self, work: Work, ended: Ended) -> None:
        self._work = work
        self._ended: Ended | None = ended

    def wait(self) -> None:
        """Block until the result is complete."""
        start = time.perf_counter()
        self._work.wait()
        if self._ended is not None:
            self._ended(time.perf_counter() - start)
            self._ended = None


class TimedComm(RecordingComm):
    """Does what ``comm`` does and tells of every collective when it begins and when it ends.

    Where a collective is queued on a device stream (CUDA), it ends here when it is queued.

    Args:
        comm: does the work.
        axis: name for the events.
        begun: told of every collective before it begins; returns what is called at its end.
    """

    def __init__(self, comm: Comm, axis: str, begun: Callable[[Event], Ended]) -> None:
        super().__init__(comm, Log(), axis)
        self._begun = begun
        self._ended: Ended | None = None

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Gather."""
        return self._timed(super().all_gather(buffer, key))

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Reduce."""
        return self._timed(super().reduce_scatter(buffer, out, key, wire=wire, sum=sum))

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        """Broadcast."""
        return self._timed(super().broadcast(buffer, source, key))

    def _append(self, operation: str, key: Key, sent_elements: int, dtype: torch.dtype) -> None:
        super()._append(operation, key, sent_elements, dtype)  # before the transfer is posted
        self._ended = self._begun(self.log.events[-1])
        self.log.clear()

    def _timed(self, work: Work | None) -> Work | None:
        assert self._ended is not None
        if work is None:
            self._ended(0.0)
            return None
        return _TimedWork(work, self._ended)
