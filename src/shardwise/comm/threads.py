"""Ranks as threads of one process: ``ThreadComm`` and the ``Exchange`` where peers leave copies for each other.

Exact, without ports or processes, for tests of any world size; ``process_group.py`` agrees with it bit for bit. Start
the threads with ``shardwise.testing.ranks.run_ranks``. May import ``base``, ``fake`` and errors.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shardwise.comm.base import Key, Work, part, rank_order_mean
from shardwise.comm.fake import reduce_alone
from shardwise.errors import ConfigError, RankMismatchError

__all__ = ["Exchange", "Match", "ThreadComm"]

Match = Literal["key", "order"]  # "order" pairs the n-th calls of all ranks, whatever they are for, as NCCL does


@dataclass(frozen=True, kw_only=True)
class _Post:
    key: Key
    operation: str  # name of the ``Comm`` method, with what must be equal on all ranks
    data: Tensor | None  # snapshot for the peers; None if this rank has nothing to give
    numel: int  # of the whole buffer
    dtype: torch.dtype  # on the wire

    def __str__(self) -> str:
        return f"{self.operation} of {_describe(self.key)} with {self.numel} elements of {self.dtype}"


@dataclass(kw_only=True)
class _Meeting:
    """One collective: who posted, who has read."""

    posts: dict[int, _Post] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)


class Exchange:
    """Where the ranks of one group leave snapshots and pick up those of their peers.

    Args:
        axis: name of the mesh axis, for messages.
        size: number of ranks.
        match: ``"key"`` pairs calls of equal ``(index, verb, sequence)``; ``"order"`` pairs the n-th calls of all
            ranks, so that programs that diverge exchange unlike buffers of equal length without an error.
        timeout: seconds that a wait may last.
    """

    def __init__(self, axis: str, size: int, *, match: Match = "key", timeout: float = 60.0) -> None:
        if match not in ("key", "order"):
            raise ConfigError(f'match is "key" or "order", got {match!r}')
        self.axis = axis
        self.size = size
        self._match = match
        self._timeout = timeout
        self._changed = threading.Condition()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._num_posts = [0] * size
        self._last: list[Key | None] = [None] * size
        self._failures: dict[int, BaseException | None] = {}  # None: left without an error
        self._texts: dict[str, dict[int, str]] = {}  # by topic and rank

    @property
    def num_open(self) -> int:
        """Number of collectives that some rank has posted and not every rank has waited for."""
        with self._changed:
            return len(self._meetings)

    def post(self, rank: int, post: _Post) -> tuple[int, ...]:
        """Leave a snapshot; return the token to wait with."""
        with self._changed:
            key = post.key
            token = (key.index, int(key.verb), key.sequence) if self._match == "key" else (self._num_posts[rank],)
            meeting = self._meetings.setdefault(token, _Meeting())
            if rank in meeting.posts:
                raise RankMismatchError(f"{self._name(rank)} used the key of {_describe(key)} twice: a key serves once")
            meeting.posts[rank] = post
            self._num_posts[rank] += 1
            self._last[rank] = key
            self._changed.notify_all()
            return token

    def wait(self, rank: int, token: tuple[int, ...], read: Callable[[list[Tensor | None]], None]) -> None:
        """Block until every rank has posted, then call ``read`` with the snapshots in rank order."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            meeting = self._meetings[token]
            while len(meeting.posts) < self.size:
                self._raise_if_hopeless(rank, meeting)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RankMismatchError(self._timeout_message(rank, meeting))
                self._changed.wait(remaining)
        self._check_alike(meeting)
        read([meeting.posts[peer].data for peer in range(self.size)])
        with self._changed:
            meeting.readers.add(rank)
            if len(meeting.readers) == self.size:
                del self._meetings[token]

    def announce(self, rank: int, topic: str, text: str) -> None:
        """Leave a text under a topic."""
        with self._changed:
            self._texts.setdefault(topic, {})[rank] = text
            self._changed.notify_all()

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return the texts of a topic: at once if all ranks that are still there left one, else what came in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while set(range(self.size)) - set(self._texts.get(topic, {})) - set(self._failures):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            return dict(self._texts.get(topic, {}))

    def forget(self, rank: int, topic: str) -> None:
        """Take a rank's text away."""
        with self._changed:
            self._texts.get(topic, {}).pop(rank, None)
            if not self._texts.get(topic, True):
                del self._texts[topic]

    def abort(self, rank: int, error: BaseException) -> None:
        """Say that ``rank`` failed: peers that wait for it raise at once."""
        with self._changed:
            self._failures.setdefault(rank, error)
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """Say that ``rank`` has ended and posts nothing more: peers that wait for it raise at once."""
        with self._changed:
            self._failures.setdefault(rank, None)
            self._changed.notify_all()

    def _raise_if_hopeless(self, rank: int, meeting: _Meeting) -> None:
        for peer in range(self.size):
            if peer in meeting.posts or peer not in self._failures:
                continue
            error = self._failures[peer]
            reason = "has ended without it" if error is None else f"failed with {type(error).__name__}: {error}"
            raise RankMismatchError(
                f"{self._name(rank)} waits in {meeting.posts[rank]}, but rank {peer} {reason}. "
                f"{self._last_words([peer])}"
            ) from error

    def _check_alike(self, meeting: _Meeting) -> None:
        first = meeting.posts[0]
        for peer, other in meeting.posts.items():
            if (other.operation, other.numel, other.dtype) != (first.operation, first.numel, first.dtype):
                raise RankMismatchError(
                    f"axis {self.axis!r}: unlike calls meet: rank 0 made {first}, rank {peer} made {other}. "
                    "Every rank must hold the same layout and make the same calls"
                )

    def _timeout_message(self, rank: int, meeting: _Meeting) -> str:
        missing = [peer for peer in range(self.size) if peer not in meeting.posts]
        return (
            f"{self._name(rank)} waited {self._timeout:g} s in {meeting.posts[rank]}; ranks {missing} did not come. "
            f"{self._last_words(missing)}"
        )

    def _last_words(self, ranks: list[int]) -> str:
        words = []
        for peer in ranks:
            key = self._last[peer]
            words.append(f"rank {peer} last posted {_describe(key)}" if key else f"rank {peer} never posted anything")
        return "; ".join(words)

    def _name(self, rank: int) -> str:
        return f"axis {self.axis!r}: rank {rank} of {self.size}"


class ThreadComm:
    """One rank's view of an ``Exchange``; a ``Comm``.

    A call takes a snapshot of what the peers need; ``wait`` of the returned work receives and adds. On CUDA both wait
    for the whole device, which is right for tests and slow.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self._rank = rank
        self._num_reserved = 0

    @property
    def rank(self) -> int:
        """This thread's coordinate on the axis."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.exchange.size

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` free bucket numbers."""
        self._num_reserved += count
        return self._num_reserved - count

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Fill part ``r`` of ``buffer`` with rank ``r``'s part ``r``."""
        _check_buffer(buffer, self.size)
        if self.size == 1:
            return None

        def read(snapshots: list[Tensor | None]) -> None:
            for peer, snapshot in enumerate(snapshots):
                if peer != self._rank and snapshot is not None:
                    part(buffer, peer, self.size).copy_(snapshot)

        own = part(buffer, self._rank, self.size)
        return self._post(key, "all_gather", buffer.numel(), own.detach().clone(), own.dtype, read)

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Write into ``out`` the mean over the ranks of their part ``self.rank``."""
        _check_buffer(buffer, self.size)
        assert out.numel() * self.size == buffer.numel(), f"out holds {out.numel()} elements, a part does not"
        if self.size == 1:
            reduce_alone(buffer, out, wire=wire, sum=sum)
            return None

        def read(snapshots: list[Tensor | None]) -> None:
            parts = [part(snapshot, self._rank, self.size) for snapshot in snapshots if snapshot is not None]
            rank_order_mean(parts, out, sum=sum)

        return self._post(key, "reduce_scatter", buffer.numel(), buffer.detach().to(wire, copy=True), wire, read)

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        """Fill ``buffer`` with rank ``source``'s."""
        _check_buffer(buffer, 1)
        if self.size == 1:
            return None

        def read(snapshots: list[Tensor | None]) -> None:
            snapshot = snapshots[source]
            if self._rank != source and snapshot is not None:
                buffer.copy_(snapshot)

        data = buffer.detach().clone() if self._rank == source else None
        return self._post(key, f"broadcast from rank {source}", buffer.numel(), data, buffer.dtype, read)

    def announce(self, topic: str, text: str) -> None:
        """Leave a text that the other ranks may read."""
        self.exchange.announce(self._rank, topic, text)

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return what the ranks announced under a topic."""
        return self.exchange.announced(topic, seconds)

    def forget(self, topic: str) -> None:
        """Take this rank's text away."""
        self.exchange.forget(self._rank, topic)

    def abort(self, error: BaseException) -> None:
        """Tell the peers that this rank failed with ``error``, and wake those that wait for it."""
        self.exchange.abort(self._rank, error)

    def _post(
        self,
        key: Key,
        operation: str,
        numel: int,
        data: Tensor | None,
        dtype: torch.dtype,
        read: Callable[[list[Tensor | None]], None],
    ) -> Work:
        if data is not None:
            _settle(data)
        post = _Post(key=key, operation=operation, data=data, numel=numel, dtype=dtype)
        token = self.exchange.post(self._rank, post)

        @torch.no_grad()
        def read_and_settle(snapshots: list[Tensor | None]) -> None:
            read(snapshots)
            for snapshot in snapshots:
                if snapshot is not None:
                    _settle(snapshot)  # the snapshot may be freed, on its own stream, once all have read it
                    break

        return _ThreadWork(lambda: self.exchange.wait(self._rank, token, read_and_settle))


class _ThreadWork:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Receive and add; a second call does nothing."""
        if self._finish is not None:
            self._finish()
            self._finish = None


def _settle(tensor: Tensor) -> None:
    # Peers use other streams: without this a snapshot would be read before it is written.
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _check_buffer(buffer: Tensor, num_parts: int) -> None:
    assert buffer.dim() == 1, f"a flat buffer is needed, got {tuple(buffer.shape)}"
    assert buffer.is_contiguous(), "a contiguous buffer is needed"
    assert buffer.numel() % num_parts == 0, f"{buffer.numel()} elements do not make {num_parts} equal parts"


def _describe(key: Key) -> str:
    return f"{key.verb.name} {key.label!r} (index {key.index}, call {key.sequence})"
