"""The text of a run as micro-batches: windows cut out of all text in a row, or one document after the other.

Micro-batches are pure functions of the seed and their number, so that every stage, and every run, sees the same ones.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.config.model import DataConfig
from shardwise.data import LINES_SUFFIX, batch, find_files, load_stdlib, read_documents
from shardwise.errors import ConfigError
from shardwise.train.tokens import Tokenizer

__all__ = ["NOT_A_TARGET", "DocumentText", "PackedText", "Source", "Text", "is_packed", "read_text"]

NOT_A_TARGET = -100  # what cross_entropy leaves out
WINDOWS_PER_BLOCK = 16


class Source(Protocol):
    """Where micro-batches come from."""

    def micro_batch(self, *, number: int, rank: int, num_ranks: int, size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each [size, length], int64; a target is the token after its input.

        Args:
            number: of the micro-batch on its rank, from 0 on.
            rank: data-parallel rank.
            num_ranks: data-parallel ranks.
            size: number of sequences.
        """

    def spread(self, *, number: int, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Return micro-batch ``number`` of ``count`` that lie evenly over the whole text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedText:
    """Windows of equal length out of tokens in a row.

    Attributes:
        tokens: [num_tokens], any integer dtype.
        length: of a window, in tokens; one more token is its last target.
        seed: of the run.
    """

    tokens: Tensor
    length: int
    seed: int

    def micro_batch(self, *, number: int, rank: int, num_ranks: int, size: int) -> tuple[Tensor, Tensor]:
        """Return random windows, other ones on every rank."""
        return batch(self.tokens, seed=self.seed, step=number, rank=rank, batch_size=size, length=self.length)

    def spread(self, *, number: int, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Return windows at equal distances."""
        last = self.tokens.numel() - self.length - 1
        every = [last * index // max(1, count * size - 1) for index in range(number * size, (number + 1) * size)]
        windows = self.tokens[torch.tensor(every).unsqueeze(1) + torch.arange(self.length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class DocumentText:
    """One document per sequence, shorter ones padded at the end; those that are too long are cut into several.

    Args:
        tokens: [num_tokens], any integer dtype: all documents in a row.
        ranges: start and end of each sequence in ``tokens``, at least two tokens apart.
        seed: of the run.
    """

    def __init__(self, *, tokens: Tensor, ranges: Sequence[tuple[int, int]], seed: int) -> None:
        self.tokens = tokens
        self.ranges = tuple(ranges)
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def micro_batch(self, *, number: int, rank: int, num_ranks: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the next documents of an order that is another one in every epoch, dealt out to the ranks."""
        chosen = []
        for index in range(size):
            epoch, place = divmod((number * num_ranks + rank) * size + index, len(self.ranges))
            chosen.append(self._order_of(epoch)[place])
        return self._padded(chosen)

    def spread(self, *, number: int, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Return documents at equal distances; where there are fewer than asked for, some come several times."""
        total = count * size
        return self._padded([len(self.ranges) * index // total for index in range(number * size, (number + 1) * size)])

    def _order_of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            mixed = hashlib.sha256(f"documents/{self.seed}/{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))
            self._epoch, self._order = epoch, torch.randperm(len(self.ranges), generator=generator).tolist()
        return self._order

    def _padded(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        pieces = [self.tokens[start:stop].long() for start, stop in (self.ranges[index] for index in chosen)]
        length = max(piece.numel() for piece in pieces) - 1
        inputs = torch.zeros(len(pieces), length, dtype=torch.int64)
        targets = torch.full((len(pieces), length), NOT_A_TARGET, dtype=torch.int64)
        for row, piece in enumerate(pieces):
            inputs[row, : piece.numel() - 1] = piece[:-1]
            targets[row, : piece.numel() - 1] = piece[1:]
        return inputs, targets


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """What a run trains and evaluates on.

    Attributes:
        training: most of the text.
        held_out: the rest; None if nothing is held out.
        packed: whether all sequences are equally long.
        num_files: files read.
        num_bytes: bytes of text.
        num_tokens: tokens in it, those that end documents included.
        sha256: of the text, in hexadecimal.
        not_text: files that were left out.
    """

    training: Source
    held_out: Source | None
    packed: bool
    num_files: int
    num_bytes: int
    num_tokens: int
    sha256: str
    not_text: tuple[str, ...] = ()


def is_packed(data: DataConfig) -> bool:
    """Whether windows are cut out of text in a row: unless it is said otherwise, if not everything is JSONL.

    Raises:
        ConfigError: a path does not exist.
    """
    if data.pack is not None:
        return data.pack
    return data.path is None or any(file.suffix.lower() != LINES_SUFFIX for file in find_files(_paths(data)))


def read_text(data: DataConfig, tokenizer: Tokenizer, *, length: int, seed: int) -> Text:
    """Read, tokenize and split.

    Args:
        data: what to read.
        tokenizer: makes tokens.
        length: longest sequence, in tokens.
        seed: of the order.

    Raises:
        ConfigError: see ``read_documents``; or a part of the text is too short.
    """
    packed = is_packed(data)
    if data.path is None:
        corpus = load_stdlib()
        facts = (corpus.num_files, corpus.num_bytes, corpus.sha256)
        not_text: tuple[str, ...] = ()
        documents = [tokenizer.encode(corpus.tokens.numpy().tobytes(), "the library")]
    else:
        found = read_documents(_paths(data), data.field)
        facts = (found.num_files, found.num_bytes, found.sha256)
        not_text = found.not_text
        documents = [
            _ended(tokenizer.encode(text, name), tokenizer.end)
            for text, name in zip(found.texts, found.names, strict=True)
        ]
    tokens = torch.cat(documents)
    split = _split_packed if packed else _split_documents
    training, held_out = split(tokens, [document.numel() for document in documents], data.held_out, length, seed)
    return Text(
        training=training,
        held_out=held_out,
        packed=packed,
        num_files=facts[0],
        num_bytes=facts[1],
        num_tokens=tokens.numel(),
        sha256=facts[2],
        not_text=not_text,
    )


def _paths(data: DataConfig) -> list[str]:
    return [data.path] if isinstance(data.path, str) else list(data.path or ())


def _ended(tokens: Tensor, end: int | None) -> Tensor:
    return tokens if end is None else torch.cat([tokens, tokens.new_tensor([end])])


def _split_packed(
    tokens: Tensor, lengths: Sequence[int], fraction: float, length: int, seed: int
) -> tuple[Source, Source | None]:
    """Hold out blocks of several windows at equal distances, so that they are like the rest."""
    num_held_out = max(int(tokens.numel() * fraction), length + 1) if fraction else 0
    num_training = tokens.numel() - num_held_out
    if num_training <= length:
        raise ConfigError(
            f"data: {max(0, num_training)} of {tokens.numel()} tokens are left for training, too few for one window of "
            f"{length} and the token after it: bring more text, a smaller model.context or a smaller data.held_out"
        )
    if not fraction:
        return PackedText(tokens=tokens, length=length, seed=seed), None
    num_blocks = max(1, num_held_out // (WINDOWS_PER_BLOCK * (length + 1)))
    numel = num_held_out // num_blocks
    starts = [(2 * index + 1) * num_training // (2 * num_blocks) + index * numel for index in range(num_blocks)]
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    end = 0
    for start in starts:
        parts[0].append(tokens[end:start])
        end = start + numel
        parts[1].append(tokens[start:end])
    parts[0].append(tokens[end:])
    training, held_out = (PackedText(tokens=torch.cat(part), length=length, seed=seed) for part in parts)
    return training, held_out


def _split_documents(
    tokens: Tensor, lengths: Sequence[int], fraction: float, length: int, seed: int
) -> tuple[Source, Source | None]:
    """Hold out documents at equal distances."""
    training: list[tuple[int, int]] = []
    held_out: list[tuple[int, int]] = []
    start = 0
    for index, numel in enumerate(lengths):
        is_held_out = int((index + 1) * fraction) > int(index * fraction)
        for first in range(start, start + numel - 1, length):
            piece = (first, min(first + length + 1, start + numel))
            (held_out if is_held_out else training).append(piece)
        start += numel
    for name, pieces in (("training", training), ("held-out", held_out)):
        if not pieces and (fraction > 0 or name == "training"):
            raise ConfigError(
                f"data: no document of two tokens is left in the {name} part of {len(lengths)} documents: bring more, "
                f"or another data.held_out ({fraction})"
            )
    made = DocumentText(tokens=tokens, ranges=training, seed=seed)
    return made, DocumentText(tokens=tokens, ranges=held_out, seed=seed) if fraction else None
