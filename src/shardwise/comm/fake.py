"""Communicators without a network: ``FakeComm`` moves nothing, ``LocalComm`` is the whole axis of one device.

Owns ``reduce_alone``, what a reduction means where there is one rank. Imports ``base`` only and works under
``FakeTensorMode``. Read ``threads.py`` next for ranks that do exchange data.
"""

import torch
from torch import Tensor

from shardwise.comm.base import Key, Work, is_same_memory, part, rank_order_mean
from shardwise.errors import ConfigError

__all__ = ["FakeComm", "LocalComm", "reduce_alone"]


class FakeComm:
    """Rank ``rank`` of ``size`` for planning and dry runs: right shapes and dtypes, no transfers.

    ``all_gather`` and ``broadcast`` leave the parts of other ranks as they are; ``reduce_scatter`` treats this rank's
    part as the mean, with the roundings of the real one.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"a rank lies in [0, size), got rank {rank} of size {size}")
        self._rank = rank
        self._size = size
        self._num_reserved = 0
        self._texts: dict[str, str] = {}

    @property
    def rank(self) -> int:
        """This process's coordinate on the axis."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self._size

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` free bucket numbers."""
        self._num_reserved += count
        return self._num_reserved - count

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Leave ``buffer`` as it is."""
        return None

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Write this rank's own part, rounded as in a real reduction, into ``out``."""
        reduce_alone(part(buffer, self._rank, self._size), out, wire=wire, sum=sum)
        return None

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        """Leave ``buffer`` as it is."""
        return None

    def announce(self, topic: str, text: str) -> None:
        """Keep a text."""
        self._texts[topic] = text

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return this rank's text for every rank: fake ranks agree."""
        return dict.fromkeys(range(self._size), self._texts[topic]) if topic in self._texts else {}

    def forget(self, topic: str) -> None:
        """Take a text away."""
        self._texts.pop(topic, None)


class LocalComm(FakeComm):
    """The only rank of an axis: nothing to move, so every result is right."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)


@torch.no_grad()
def reduce_alone(own: Tensor, out: Tensor, *, wire: torch.dtype, sum: torch.dtype) -> None:
    """Write the mean of one part into ``out``: no arithmetic, but the roundings to ``wire``, ``sum``, ``out.dtype``.

    ``out`` may be ``own``; nothing is read or written then if no rounding can change a value.
    """
    if own.dtype == out.dtype == wire == sum:
        if not is_same_memory(own, out):
            out.copy_(own)
        return
    rank_order_mean([own.to(wire)], out, sum=sum)
