"""Which storages live, how large they are and what for; and what lived when there was most of it."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.memory import Arena, Kind, Slab

__all__ = ["Event", "Live", "LiveArena", "Peak", "has_storage"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Where in a step something happened.

    Attributes:
        phase: "forward", "backward" or "step".
        units: whose forward or backward was running.
        operator: of torch, such as ``aten.mm.default``.
    """

    phase: str = ""
    units: tuple[str, ...] = ()
    operator: str = ""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with the most bytes.

    Attributes:
        bytes: of all kinds.
        by_kind: the same, by kind.
        by_owner: the same, by kind and the unit it belongs to.
        event: when it was.
    """

    bytes: int
    by_kind: Mapping[str, int]
    by_owner: Mapping[tuple[str, str], int]
    event: Event


@dataclass
class _Storage:
    num_bytes: int
    kind: str
    owner: str
    hollow: bool


class Live:
    """The storages that live now, on the CPU.

    Attributes:
        kind: of storages that come now.
        where: says which units run now.
        changes: every storage that came, changed or went, in order: its address and the bytes that it has from then on.
            A negative address is a parameter of mallopt, with its value.
    """

    def __init__(self) -> None:
        self.kind = self.phase = ""
        self.where: Callable[[], tuple[str, ...]] = tuple
        self.changes: list[tuple[int, int]] = []
        self._storages: dict[int, _Storage] = {}
        self._operator = ""
        self._total = self._most = self._num_events = self._most_at = 0
        self._look_at = -1
        self._peak: Peak | None = None

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind now."""
        return _sums((each.kind, each.num_bytes) for each in self._storages.values())

    def begin(self) -> None:
        """Start to look for the peak of a step that goes like the one before, if there was one."""
        self._look_at = self._most_at if self._num_events else -1
        self._most = self._num_events = self._most_at = 0
        self._peak = None
        self._look()

    @property
    def peak(self) -> Peak:
        """What lived at the peak since ``begin``."""
        assert self._peak is not None
        return self._peak

    def runs(self, operator: Any) -> None:
        """Note which operator runs."""
        self._operator = str(operator)

    def add(self, tensor: Tensor, *, hollow: bool = False) -> None:
        """Count a storage if it is new."""
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages and not tensor.is_meta:
            owner = "" if self.kind not in ("activation", "temporary") else "+".join(self.where())
            self._storages[key] = _Storage(0, self.kind, owner, hollow)
            weakref.finalize(storage, self._gone, key).atexit = False
            self._change(key, storage.nbytes())

    def adopt(self, tensor: Tensor, *, kind: str = "", owner: str = "", hollow: bool | None = None) -> None:
        """Say what a storage is for, and whose it is."""
        self.add(tensor)
        found = self._storages[tensor.untyped_storage()._cdata]
        found.kind, found.owner = kind or found.kind, owner or found.owner
        found.hollow = found.hollow if hollow is None else hollow

    def resized(self, tensor: Tensor) -> None:
        """Count a storage whose memory came or went."""
        storage = tensor.untyped_storage()
        self._change(storage._cdata, storage.nbytes())

    def is_hollow(self, tensor: Tensor) -> bool:
        """Whether a tensor has no contents."""
        found = self._storages.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
        return found is not None and found.hollow

    def _gone(self, key: int) -> None:
        self._change(key, 0)
        del self._storages[key]

    def _change(self, key: int, num_bytes: int) -> None:
        found = self._storages[key]
        grown = num_bytes - found.num_bytes
        found.num_bytes = num_bytes
        self._total += grown
        if grown:
            self.changes.append((key, num_bytes))
        if grown > 0:
            self._look()

    def _look(self) -> None:
        if self._total > self._most:
            self._most, self._most_at = self._total, self._num_events
        if self._num_events == self._look_at:
            self._peak = Peak(
                bytes=self._total,
                by_kind=self.by_kind,
                by_owner=_sums(((each.kind, each.owner), each.num_bytes) for each in self._storages.values()),
                event=Event(phase=self.phase, units=self.where(), operator=self._operator),
            )
        self._num_events += 1


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own to be counted: sparse, nested and opaque ones have not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _sums(pairs: Any) -> dict[Any, int]:
    sums: dict[Any, int] = {}
    for key, num_bytes in pairs:
        if num_bytes:
            sums[key] = sums.get(key, 0) + num_bytes
    return sums


class LiveArena(Arena):
    """An arena whose memory is counted and, if asked for, hollow."""

    def __init__(self, device: torch.device, live: Live, *, hollow: bool) -> None:
        super().__init__(device)
        self._live = live
        self._hollow = hollow

    def slab(self, kind: Kind, numel: int, dtype: torch.dtype, owner: str = "") -> Slab:
        """Return an empty slab of ``numel`` elements."""
        slab = super().slab(kind, numel, dtype, owner)
        self._live.adopt(slab.tensor, kind=kind.value, hollow=self._hollow)
        self._live.resized(slab.tensor)
        return slab

    def persistent(self, kind: Kind, numel: int, dtype: torch.dtype, owner: str = "") -> Tensor:
        """Return a flat tensor that rests until ``drop``."""
        tensor = super().persistent(kind, numel, dtype, owner)
        self._live.adopt(tensor, kind=kind.value, hollow=self._hollow)
        return tensor

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        """Change the memory behind a flat tensor."""
        super().resize(tensor, num_bytes)
        self._live.resized(tensor)

    def keep_freed_pages(self) -> bool:
        """Leave the allocator of this process alone, but note what would be asked of it."""
        self._live.changes.extend(self.heap_limits().items())
        return False
