"""What differs between two checkpoints: names, shapes, values of tensors, and what is no tensor."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.doors.outgoing import raw_bytes
from shardwise.checkpoint.manifest import DTYPES, WHOLE_COPIES, Manifest, Stored
from shardwise.checkpoint.source import TensorSource
from shardwise.checkpoint.verify import verify_files

__all__ = ["Comparison", "compare"]

_BLOCK_NUMEL = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two checkpoints.

    Attributes:
        only_first: names of tensors that only the first has.
        only_second: names of tensors that only the second has.
        unlike: tensors of other shapes or dtypes -> both of each.
        changed: tensors with other values -> largest absolute difference (NaN where one is NaN).
        num_identical: number of tensors that are the same, bit by bit.
        values: what else differs.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    unlike: dict[str, str]
    changed: dict[str, float]
    num_identical: int
    values: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_first or self.only_second or self.unlike or self.changed or self.values)


@torch.no_grad()
def compare(first: Path, second: Path) -> Comparison:
    """Compare two checkpoints, saved by any number of ranks.

    What ranks have each is compared rank by rank; where the numbers of ranks differ, that of rank 0.

    Raises:
        CheckpointError: one is missing or damaged: every hash is checked first.
    """
    ours, theirs = verify_files(first), verify_files(second)  # two copies with one damage are not the same checkpoint
    unlike: dict[str, str] = {}
    changed: dict[str, float] = {}
    num_identical = 0
    ranks = range(ours.num_ranks if ours.num_ranks == theirs.num_ranks else 1)
    with TensorSource(first, ours) as left, TensorSource(second, theirs) as right:
        for source in (left, right):
            source.check((item, 0, item.numel) for item in source.manifest.stored)
        for key, item in ours.by_key.items():
            other = theirs.by_key.get(key)
            if other is None:
                continue
            if (item.shape, item.dtype) != (other.shape, other.dtype):
                unlike[key] = f"{item.dtype} {list(item.shape)} and {other.dtype} {list(other.shape)}"
                continue
            largest = _largest(left, item, right, other, ranks)
            if largest is None:
                num_identical += 1
            else:
                changed[key] = largest
    return Comparison(
        only_first=tuple(key for key in ours.by_key if key not in theirs.by_key),
        only_second=tuple(key for key in theirs.by_key if key not in ours.by_key),
        unlike=unlike,
        changed=changed,
        num_identical=num_identical,
        values=tuple(_values(ours, theirs, ranks)),
    )


def _largest(
    left: TensorSource, item: Stored, right: TensorSource, other: Stored, ranks: Sequence[int]
) -> float | None:
    """Return the largest difference of two tensors of one shape and dtype; None if they are the same."""
    largest = None
    for ours, theirs in zip(_blocks(left, item, ranks), _blocks(right, other, ranks), strict=True):
        if torch.equal(raw_bytes(ours), raw_bytes(theirs)):
            continue
        one, two = ours.double(), theirs.double()
        difference = (one - two).abs()
        difference[one == two] = 0.0  # infinite ones, too
        found = difference.max().item()
        if math.isnan(found):
            return found
        largest = max(largest or 0.0, found)
    return largest


def _blocks(source: TensorSource, item: Stored, ranks: Sequence[int]) -> Iterator[Tensor]:
    dtype = DTYPES[item.dtype]
    if item.kind in WHOLE_COPIES:
        for rank in ranks:
            whole = torch.zeros(item.numel, dtype=dtype)
            source.read_copy(item, rank, whole)
            yield whole
        return
    for start in range(0, item.numel, _BLOCK_NUMEL):
        block = torch.zeros(min(_BLOCK_NUMEL, item.numel - start), dtype=dtype)
        source.read(item, start, block)
        yield block


def _values(ours: Manifest, theirs: Manifest, ranks: Sequence[int]) -> Iterator[str]:
    """Yield what differs beside the tensors."""
    if ours.step != theirs.step:
        yield f"step: {ours.step} and {theirs.step}"
    for name in ("num_steps", "loss_scale", "user"):
        if _text(getattr(ours.values, name)) != _text(getattr(theirs.values, name)):
            yield name
    for name in ("extra_state", "objects", "generators"):
        pairs = ((r, getattr(ours.values_of(r), name), getattr(theirs.values_of(r), name)) for r in ranks)
        unlike = [rank for rank, one, other in pairs if _text(one) != _text(other)]
        if unlike:
            yield name if unlike == [0] else f"{name} of rank {', '.join(map(str, unlike))}"
    if len(ours.values.optimizers) != len(theirs.values.optimizers):
        yield f"optimizers: {len(ours.values.optimizers)} and {len(theirs.values.optimizers)}"
    for number, (left, right) in enumerate(zip(ours.values.optimizers, theirs.values.optimizers, strict=False)):
        if left.class_name != right.class_name:
            yield f"optimizer {number}: {left.class_name} and {right.class_name}"
        for name, what in (("groups", "groups"), ("scalars", "counters"), ("other", "other state")):
            if _text(left.model_dump()[name]) != _text(right.model_dump()[name]):
                yield f"optimizer {number}: {what}"
    facts = {param.name: param for param in theirs.params}
    for one in ours.params:
        other = facts.get(one.name, one)
        if (one.dtype, one.aliases, one.trainable) != (other.dtype, other.aliases, other.trainable):
            yield f"parameter {one.name}: dtype, other names, or whether it trains"
    for item in ours.stored:
        if item.aliases != theirs.by_key.get(item.key, item).aliases:
            yield f"{item.key}: other names"


def _text(value: object) -> str:
    """Return a value as a file holds it, but for the order of keys: 1, 1.0 and True are three values there."""
    return json.dumps(value, sort_keys=True)
