"""The one small exchange before the optimizer moves: do all ranks agree, and what is the gradient's norm?

Every rank contributes the step number, the digest of its collectives, the hash of its forward order, the norm of its
own finest slice of each bucket, one bit per parameter ("a gradient arrived"), one per bucket ("gradients wait here that
no reduction took") and one per unit ("its gradients came late"). Everything every rank then decides (skip, clip, which
buckets to reduce, which parameters stay untouched) is a function of all records, so all ranks decide alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
import xxhash
from torch import Tensor

from shardwise.comm.base import Key, Mesh, Verb, reserve
from shardwise.errors import RankMismatchError
from shardwise.numerics.norm import combine_norms, combine_rows
from shardwise.runtime.journal import Journal

__all__ = ["Agreement", "Record", "Records"]

_HEADER = 5
_TEXT_BYTES = 16_384
_MASK = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank says before a step; ``count`` is that of its samples or tokens, less than 0 if nobody counts."""

    step: int
    digest: int
    order: int
    count: float
    settings: int
    arrived: Sequence[bool]
    waiting: Sequence[bool]
    late: Sequence[bool]

    def pack(self, norms: Tensor) -> Tensor:
        """Return the record as int64 words, ``norms`` (fp64, on the device) at their end."""
        flags = numpy.packbits(numpy.array([*self.arrived, *self.waiting, *self.late], dtype=bool), bitorder="little")
        padded = numpy.zeros(-(-flags.size // 8) * 8, dtype=numpy.uint8)
        padded[: flags.size] = flags
        count = int(numpy.float64(self.count).view(numpy.int64))
        head = numpy.array([self.step, self.digest, self.order, count, self.settings], dtype=numpy.int64)
        words = torch.from_numpy(numpy.concatenate([head, padded.view(numpy.int64)]))
        return torch.cat([words.to(norms.device, non_blocking=True), norms.view(torch.int64)])


class Records:
    """The records of all ranks, [num_ranks, words]; read as a table, so that many ranks cost no more than few.

    Attributes:
        steps: step number of each rank.
        counts: of each rank's samples or tokens.
        norm: global norm of the gradients.
        arrived: for each trainable parameter, whether any rank has its gradient.
        waiting: for each trainable bucket, whether gradients wait on any rank.
        late: for each unit, whether it was late on any rank.
    """

    def __init__(self, rows: Tensor, own: Record) -> None:
        table = rows.numpy()
        lengths = len(own.arrived), len(own.waiting), len(own.late)
        num_words = -(-sum(lengths) // 64)
        self.steps = table[:, 0].tolist()
        self._digests, self._orders, self._settings = table[:, 1], table[:, 2], table[:, 4]
        self.counts = table[:, 3].copy().view(numpy.float64).tolist()
        any_rank = numpy.bitwise_or.reduce(table[:, _HEADER : _HEADER + num_words], axis=0)
        flags = numpy.unpackbits(any_rank.view(numpy.uint8), bitorder="little").view(bool)[: sum(lengths)]
        self.arrived = flags[: lengths[0]].tolist()
        self.waiting = flags[lengths[0] : lengths[0] + lengths[1]].tolist()
        self.late = flags[lengths[0] + lengths[1] :].tolist()
        norms = numpy.ascontiguousarray(table[:, _HEADER + num_words :]).view(numpy.float64)
        self.norm = combine_norms(combine_rows(norms))

    @property
    def have_one_order(self) -> bool:
        """Whether all ranks used the units in one order."""
        return _is_uniform(self._orders)

    @property
    def have_one_digest(self) -> bool:
        """Whether all ranks made the same collectives."""
        return _is_uniform(self._digests)

    @property
    def have_one_setting(self) -> bool:
        """Whether all ranks hold the same settings."""
        return _is_uniform(self._settings)


def _is_uniform(column: "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]") -> bool:
    return bool((column == column[0]).all())


class Agreement:
    """Small exchanges between all ranks of a mesh: records, texts, verdicts.

    Attributes:
        index: the bucket number of its exchanges; no other one on this mesh has it.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self.index = reserve(mesh, 1)
        self._sequence = 0

    def words(self, words: Tensor, label: str) -> Tensor:
        """Return every rank's int64 words, [num_ranks, len(words)], ranks in the mesh's row-major order."""
        gathered = words.reshape(-1).to(self._device)
        for comm in reversed(list(self._mesh.values())):
            buffer = gathered.repeat(comm.size, 1)  # fake ranks leave it so: they agree
            work = comm.all_gather(buffer.view(-1), Key(self.index, Verb.RECORD, self._next(), label))
            if work is not None:
                work.wait()
            gathered = buffer.view(-1)
        return gathered.view(-1, words.numel())

    def texts(self, text: str, label: str) -> list[str]:
        """Return every rank's text; each is cut at 16 KiB."""
        raw = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        rows = self.words(torch.frombuffer(bytearray(raw), dtype=torch.int64), label).cpu()
        return [bytes(row.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]

    def check_lines(self, lines: Sequence[str], what: str) -> None:
        """Raise on every rank if the ranks hold unlike lists of lines.

        Raises:
            RankMismatchError: names the first line in which they differ, and who holds what.
        """
        codes = [xxhash.xxh64_intdigest(line.encode()) & _MASK for line in lines]
        whole = xxhash.xxh64_intdigest(repr(codes).encode()) & _MASK
        heads = self.words(torch.tensor([whole, len(lines)], dtype=torch.int64), what).tolist()
        if len({tuple(head) for head in heads}) == 1:
            return
        length = max(count for _, count in heads)
        padded = torch.tensor([*codes, *(0 for _ in range(length - len(codes)))], dtype=torch.int64)
        table = self.words(padded, what)
        unlike = [i for i in range(length) if len(set(table[:, i].tolist())) > 1]
        position = unlike[0] if unlike else 0
        said = self.texts(lines[position] if position < len(lines) else "nothing", what)
        listed = "; ".join(f"rank {_ranks(ranks)}: {line}" for line, ranks in _by_event(said).items())
        raise RankMismatchError(f"ranks disagree on {what}, nothing was changed. First difference: {listed}")

    def check_records(self, records: Records, journal: Journal, settings: Sequence[str]) -> None:
        """Raise on every rank if the ranks did unlike things since the start.

        Raises:
            RankMismatchError: names the step, the ranks and the first collective in which they differ.
        """
        steps = records.steps
        if len(set(steps)) > 1:
            at = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
            raise RankMismatchError(f"ranks are at different steps ({at}); no rank was updated")
        if not records.have_one_digest:
            answers = self.texts(f"{journal.num_events}\n" + "\n".join(journal.recent), "last events")
            raise RankMismatchError(f"step {steps[0]}: {_first_difference([_history(a) for a in answers])}")
        if not records.have_one_setting:
            self.check_lines(settings, f"the settings of step {steps[0]}")

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence


def _history(answer: str) -> dict[int, str]:
    """Return a rank's last events by their number."""
    count, *events = answer.split("\n")
    return dict(enumerate(events, start=int(count) - len(events)))


def _first_difference(histories: Sequence[Mapping[int, str]]) -> str:
    start = max(min(history, default=0) for history in histories)
    stop = max(max(history, default=0) for history in histories)
    for position in range(start, stop + 1):
        events = [history.get(position, "nothing") for history in histories]
        if len(set(events)) > 1:
            said = "; ".join(f"rank {_ranks(ranks)} {event}" for event, ranks in _by_event(events).items())
            return (
                f"ranks took different ways through the model, no rank was updated. First difference, collective "
                f"{position}: {said}. Every rank must use the same units in the same order."
            )
    return "ranks took different ways through the model, longer ago than is remembered; no rank was updated"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _by_event(events: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, event in enumerate(events):
        ranks.setdefault(event, []).append(rank)
    return ranks
