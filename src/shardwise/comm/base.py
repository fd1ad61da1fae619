"""What the runtime needs of a network: one ``Comm`` per mesh axis, and the rule by which gradients are summed.

Every collective works in place on equal consecutive parts of one flat buffer: part ``r`` belongs to rank ``r``. A call
posts its transfers and returns a ``Work`` to wait for, or None when the work was queued on the current device stream.
Read ``process_group.py`` for real networks, ``threads.py`` for ranks as threads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "BLOCK_NUMEL",
    "Comm",
    "Key",
    "Mesh",
    "Verb",
    "Work",
    "broadcast",
    "flat_rank",
    "is_same_memory",
    "num_ranks",
    "part",
    "rank_order_mean",
    "reserve",
]

BLOCK_NUMEL = 1 << 18  # of a sum on the CPU


class Verb(IntEnum):
    """Why a collective is made. Unlike verbs never meet."""

    UNSHARD = 0
    REFRESH = 1
    REDUCE = 2
    FINALIZE_SCATTER = 3
    FINALIZE_GATHER = 4
    RECORD = 5
    BROADCAST = 6
    ACCESS = 7


@dataclass(frozen=True)
class Key:
    """Identity of one collective on one axis: equal on all ranks, used once.

    ``index`` is the bucket's number in the model, ``sequence`` counts the calls of this verb on that bucket, ``label``
    is what an error message shows (unit and parameters).
    """

    index: int
    verb: Verb
    sequence: int
    label: str


class Work(Protocol):
    """Transfers in flight. ``wait`` returns when the result is in the buffer; it may do the local arithmetic."""

    def wait(self) -> None:
        """Block until the result is complete; a second call does nothing."""


class Comm(Protocol):
    """Collectives over one axis of the mesh, seen from one rank.

    Buffers are one-dimensional, contiguous, of ``size * n`` elements with the same ``n`` on every rank.
    """

    @property
    def rank(self) -> int:
        """This process's coordinate on the axis."""

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` bucket numbers that no key on this axis has used; equal on all ranks."""

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Fill part ``r`` of ``buffer`` with rank ``r``'s part ``r``; this rank's own part is the source."""

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Write into ``out`` the mean over the ranks of their part ``self.rank``.

        Each part is rounded to ``wire`` (this rank's too), the sum is made in rank order in ``sum``, divided by the
        number of ranks and rounded once to ``out.dtype``. ``out`` (n elements) may be this rank's part of ``buffer``;
        the other parts are left as they are.
        """

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        """Fill ``buffer`` (any length) with rank ``source``'s."""

    def announce(self, topic: str, text: str) -> None:
        """Leave a text that the other ranks may read. No collective: it waits for nobody, from any thread."""

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return what the ranks announced under a topic, by rank: at once if all did, else what is there in time."""

    def forget(self, topic: str) -> None:
        """Take this rank's text away, when all have read it."""


Mesh = Mapping[str, Comm]  # axis name -> communicator, outermost axis first


def reserve(mesh: Mesh, count: int) -> int:
    """Return the first of ``count`` bucket numbers that are free on every axis of the mesh."""
    starts = {axis: comm.reserve(count) for axis, comm in mesh.items()}
    first = max(starts.values(), default=0)
    for axis, start in starts.items():
        if start < first:  # another model used more numbers on another axis
            mesh[axis].reserve(first - start)
    return first


def flat_rank(mesh: Mesh) -> int:
    """Return this rank's number in the whole mesh, row by row."""
    rank = 0
    for comm in mesh.values():
        rank = rank * comm.size + comm.rank
    return rank


def num_ranks(mesh: Mesh) -> int:
    """Return the number of ranks of the whole mesh."""
    return math.prod(comm.size for comm in mesh.values())


def broadcast(mesh: Mesh, buffer: Tensor, index: int, sequence: int, label: str) -> None:
    """Give every rank of the mesh the flat buffer of its first one, axis by axis."""
    for axis, comm in reversed(list(mesh.items())):
        work = comm.broadcast(buffer, 0, Key(index, Verb.BROADCAST, sequence, f"{label} over {axis}"))
        if work is not None:
            work.wait()


def part(buffer: Tensor, index: int, num_parts: int) -> Tensor:
    """Return part ``index`` of ``num_parts`` equal consecutive parts of a flat buffer, as a view."""
    length = buffer.numel() // num_parts
    return buffer[index * length : (index + 1) * length]


def rank_order_mean(parts: list[Tensor], out: Tensor, *, sum: torch.dtype) -> None:
    """Add ``parts`` (of one dtype) one after the other in ``sum``, divide by their number, round once into ``out``.

    ``out`` may be one of the parts. On the CPU block by block: what is widened to ``sum`` there needs memory.
    """
    length = BLOCK_NUMEL if out.is_cpu else max(1, out.numel())
    for start in range(0, out.numel(), length):
        block = slice(start, start + length)
        _rank_order_mean([each[block] for each in parts], out[block], sum)


def _rank_order_mean(parts: list[Tensor], out: Tensor, sum: torch.dtype) -> None:
    # torch.sum over stacked parts would not keep the order (its result depends on the column), and a product with the
    # reciprocal would round twice for three ranks.
    first, *others = parts
    if others and first.dtype == others[0].dtype == sum:
        in_place = out.dtype == sum and not any(is_same_memory(out, other) for other in others[1:])
        total = torch.add(first, others.pop(0), out=out if in_place else None)
    elif out.dtype == sum:
        total = out.copy_(first)
    else:
        total = first.to(sum, copy=True)
    for other in others:
        total.add_(other.to(sum) if other.is_cpu else other)  # add_ would widen it too, where no dry run can see it
    if total is out:
        total.div_(len(parts))
    else:
        out.copy_(total.div_(len(parts)))


def is_same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two flat tensors begin at the same element of the same storage."""
    # Not by data_ptr: fake tensors have none.
    return (
        first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.storage_offset() == second.storage_offset()
    )
