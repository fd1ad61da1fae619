"""A communicator without peers that takes the memory of the real one: what gloo's paired transfers receive into."""

import torch
from torch import Tensor

from shardwise.comm.base import BLOCK_NUMEL, Key, Work, part, rank_order_mean
from shardwise.comm.fake import FakeComm

__all__ = ["MirrorComm"]


class MirrorComm(FakeComm):
    """Rank ``rank`` of ``size`` alike ranks: every peer holds what this one holds."""

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Start to repeat this rank's part."""
        return _Gathering(buffer, self) if self.size > 1 and buffer.numel() else None

    @torch.no_grad()
    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Start to receive the parts of the others."""
        if self.size == 1 or not buffer.numel():
            return super().reduce_scatter(buffer, out, key, wire=wire, sum=sum)
        return _Receiving(buffer.to(wire), self, out, sum)


class _Gathering:
    """An all-gather in flight."""

    def __init__(self, buffer: Tensor, comm: MirrorComm) -> None:
        self._buffer, self._comm = buffer, comm

    @torch.no_grad()
    def wait(self) -> None:
        """Fill the other parts."""
        rank, size = self._comm.rank, self._comm.size
        parts, own = self._buffer.view(size, -1), part(self._buffer, rank, size)
        parts[:rank].copy_(own)
        parts[rank + 1 :].copy_(own)


class _Receiving:
    """A reduction in flight."""

    def __init__(self, outgoing: Tensor, comm: MirrorComm, out: Tensor, sum: torch.dtype) -> None:
        self._own: Tensor | None = part(outgoing, comm.rank, comm.size)
        self._staging: Tensor | None = outgoing.new_empty((comm.size - 1) * out.numel())
        self._rank, self._size, self._out, self._sum = comm.rank, comm.size, out, sum

    @torch.no_grad()
    def wait(self) -> None:
        """Add the parts."""
        if self._own is not None and self._staging is not None:
            self._staging.view(self._size - 1, -1).copy_(self._own)
            # The other parts are alike: one block takes the memory of all, two parts before this one that of many.
            self._out.copy_(self._own)
            other = part(self._staging, 0, self._size - 1)
            parts = [*[other] * min(self._rank, 2), self._own, other]
            rank_order_mean([each[:BLOCK_NUMEL] for each in parts], self._out[:BLOCK_NUMEL], sum=self._sum)
            self._own = self._staging = None
