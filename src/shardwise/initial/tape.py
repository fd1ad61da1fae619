"""The tape: which operation wrote which memory, in the order in which they ran.

Memory is named by number: a *storage* of the recording. A tensor is a ``Ref``, a strided view of one. Views, ``.data``
and parameters need no operation of their own, because they all share a storage. Read ``replay.py`` next.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.numerics.fingerprint import fingerprint

__all__ = [
    "Constant",
    "Node",
    "Op",
    "Ref",
    "Tape",
    "each",
    "is_same_place",
    "is_whole",
    "map_leaves",
    "name_of",
]


@dataclass(frozen=True, slots=True)
class Ref:
    """A strided view of a storage; offset, size and stride in elements."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that was made outside of the recording, and what it held then."""

    tensor: Tensor
    hash: int

    def value(self) -> Tensor:
        """Return the tensor.

        Raises:
            ConfigError: it has changed since.
        """
        if fingerprint(self.tensor) != self.hash:
            raise ConfigError(
                f"a tensor of shape {tuple(self.tensor.shape)} from outside deferred_init() was read by the "
                "constructor and changed afterwards: leave it as it is until shard() is over, or give the constructor "
                "a copy"
            )
        return self.tensor

    def __repr__(self) -> str:
        return f"Constant({tuple(self.tensor.shape)}, {self.tensor.dtype}, {self.hash:x})"


@dataclass(frozen=True, eq=False)
class Node:
    """A state of a generator: known (``state``), or the one after operation ``op``, which began in ``parent``."""

    parent: "Node | None" = None
    op: int = -1
    state: Tensor | None = field(default=None, repr=False)

    @property
    def root(self) -> "Node":
        """The known state this one follows from."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation, with ``Ref`` and ``Constant`` in the place of tensors.

    Attributes:
        func: the aten overload.
        args: positional arguments; generators are left out.
        reads: tensors whose contents it needs, those it changes in part included.
        writes: tensors it changes.
        makes: its tensor results in order, those that alias an argument included.
        new: storages that begin with it.
        blind: the numbers it draws do not depend on what its tensors hold.
        default_dtype: torch's default dtype at the time.
        draws: the state its random numbers begin from; None: it draws none.
        after: the state they end in.
    """

    index: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    makes: tuple[Ref, ...]
    new: tuple[int, ...]
    blind: bool
    default_dtype: torch.dtype
    draws: Node | None
    after: Node | None


class Tape:
    """Operations in order, and for each storage its size, its device and who wrote it."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.num_bytes: list[int] = []
        self.devices: list[torch.device] = []
        self._writers: list[list[int]] = []  # by storage: numbers of operations, ascending
        self._kills: list[set[int]] = []  # by storage: those after which nothing older can be seen

    def add_storage(self, num_bytes: int, device: torch.device) -> int:
        """Return the number of a new storage."""
        self.num_bytes.append(num_bytes)
        self.devices.append(device)
        self._writers.append([])
        self._kills.append(set())
        return len(self.num_bytes) - 1

    def add(self, op: Op, *, overwrites: Iterable[int]) -> None:
        """Append an operation; ``overwrites`` are the storages of which it replaces every byte."""
        self.ops.append(op)
        for storage in {*op.new, *(ref.storage for ref in op.writes)}:
            self._writers[storage].append(op.index)
        for storage in {*op.new, *overwrites}:
            self._kills[storage].add(op.index)

    def covers(self, ref: Ref) -> bool:
        """Whether a tensor holds every byte of its storage."""
        return is_whole(ref) and ref.offset == 0 and _bytes(ref) == self.num_bytes[ref.storage]

    def kills(self, storage: int, index: int) -> bool:
        """Whether operation ``index`` leaves nothing of what the storage held before."""
        return index in self._kills[storage]

    def slice(self, wanted: Iterable[int], *, before: int) -> list[int]:
        """Return the operations, ascending, that decide what the storages hold just before operation ``before``."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        work = [(storage, before) for storage in wanted]
        while work:
            storage, stop = work.pop()
            writers = self._writers[storage]
            for position in range(bisect_left(writers, stop) - 1, -1, -1):
                index = writers[position]
                if (storage, index) in seen:
                    break
                seen.add((storage, index))
                if index not in found:
                    found.add(index)
                    work += [(ref.storage, index) for ref in self.ops[index].reads if ref.storage != storage]
                if self.kills(storage, index):
                    break
        return sorted(found)

    def lines(self) -> list[str]:
        """Return one line per operation, random states left out: equal on ranks whose constructors did the same."""
        return [
            f"{op.func} {op.args} {op.kwargs} makes {op.makes}, draws {op.draws is not None}, {op.default_dtype}, "
            f"on {[str(self.devices[storage]) for storage in op.new]}"
            for op in self.ops
        ]


def is_whole(ref: Ref) -> bool:
    """Whether the elements lie side by side, in any order of dimensions, each once."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(ref.stride, ref.size, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_same_place(first: Ref, second: Ref) -> bool:
    """Whether two views hold the same elements at the same places; strides over one element say nothing."""
    if (first.size, first.offset, first.dtype) != (second.size, second.offset, second.dtype):
        return False
    strides = zip(first.size, first.stride, second.stride, strict=True)
    return 0 in first.size or all(size == 1 or own == other for size, own, other in strides)


def _bytes(ref: Ref) -> int:
    return math.prod(ref.size) * ref.dtype.itemsize


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply ``leaf`` to everything inside nested lists, tuples and dicts."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map_leaves(item, leaf) for item in value)
    if type(value) is dict:
        return {key: map_leaves(item, leaf) for key, item in value.items()}
    return leaf(value)


def each(value: Any, kind: type) -> Iterator[Any]:
    """Yield the instances of ``kind`` inside nested lists, tuples and dicts, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from each(item, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from each(item, kind)


def name_of(func: Any) -> str:
    """What error messages call an operation."""
    return str(func)
