"""The only place that allocates memory that outlives a call: resting tensors, reusable slabs, and their ledger.

A slab keeps its storage object for ever and only resizes it, so that views made once stay valid: parameters, views
saved by autograd, cached slot views. See docs/design/0002-flat-buffers.md.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType

import torch
from torch import Tensor

from shardwise.environment import read_variables
from shardwise.errors import ShardwiseError

__all__ = ["Arena", "Kind", "Ledger", "OutOfMemoryError", "Slab", "is_out_of_memory"]

# What a user may have said about glibc's allocator; it is left alone then.
_ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_MIN_MAPPED_BYTES, _MAX_MAPPED_BYTES = 1 << 17, 1 << 25  # glibc's DEFAULT_MMAP_THRESHOLD and its largest
_PAGE_BYTES = 4096
_CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc")
_MAX_INT = (1 << 31) - 1


class OutOfMemoryError(ShardwiseError, torch.OutOfMemoryError):
    """Memory could not be had, on any device; says who holds how much, and what to change.

    It is torch's own error of CUDA too, and so a RuntimeError, as torch raises on the CPU.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: torch's on any device, or Python's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch 2.11-2.13 have no class for the CPU
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


class Kind(StrEnum):
    """What a piece of memory is for; the first four are the model states of the ZeRO papers."""

    PARAM = "param"
    MASTER = "master"
    GRAD = "grad"
    OPTIM = "optim"
    GATHERED = "gathered"
    STAGING = "staging"


class Ledger:
    """Bytes held by kind, now and at most.

    Attributes:
        on_change: told of every change, after it: the kind, whose it is, bytes more (or, if negative, fewer).
    """

    def __init__(self) -> None:
        self.on_change: Callable[[Kind, str, int], None] | None = None
        self._now = dict.fromkeys(Kind, 0)
        self._peak = dict.fromkeys(Kind, 0)
        self.peak_total_bytes = 0

    @property
    def now(self) -> Mapping[Kind, int]:
        """Bytes held now."""
        return MappingProxyType(self._now)

    @property
    def peak(self) -> Mapping[Kind, int]:
        """Largest number of bytes each kind held; the kinds need not have peaked together."""
        return MappingProxyType(self._peak)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds held now."""
        return sum(self._now.values())

    def add(self, kind: Kind, num_bytes: int, owner: str = "") -> None:
        """Count ``num_bytes`` more (or, if negative, fewer) of ``kind``; ``owner`` is told to ``on_change`` only."""
        self._now[kind] += num_bytes
        self._peak[kind] = max(self._peak[kind], self._now[kind])
        self.peak_total_bytes = max(self.peak_total_bytes, self.total_bytes)
        if self.on_change is not None:
            self.on_change(kind, owner, num_bytes)

    def reset_peak(self) -> None:
        """Forget the peaks: they start again from what is held now."""
        self._peak = dict(self._now)
        self.peak_total_bytes = self.total_bytes


class Slab:
    """A flat buffer whose memory comes and goes while its storage object, and so every view of it, stays.

    ``tensor`` has ``numel`` elements always; touching it while the slab is empty is an error of ours.
    """

    def __init__(self, arena: "Arena", kind: Kind, numel: int, dtype: torch.dtype, owner: str) -> None:
        self._arena = arena
        self.kind = kind
        self.num_bytes = numel * dtype.itemsize
        self._owner = owner
        with arena.explained(kind, owner, self.num_bytes):
            self.tensor = torch.empty(numel, dtype=dtype, device=arena.device)
        self.tensor.untyped_storage().resize_(0)
        self.filled = False
        self._own_aliases = 0

    def note_aliases(self) -> None:
        """Take the views that exist now for our own: others than these are somebody's who still looks at the memory."""
        self._own_aliases = self._num_aliases()

    @property
    def has_foreign_aliases(self) -> bool:
        """Whether somebody else holds a view; False while ``note_aliases`` was not called."""
        return 0 < self._own_aliases < self._num_aliases()

    def _num_aliases(self) -> int:
        # torch 2.11-2.13 have no public count of the tensors that share a storage
        return int(torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata))

    def fill(self) -> Tensor:
        """Give the slab memory (contents undefined) if it has none; return the flat tensor.

        Raises:
            OutOfMemoryError: there is not so much memory; the slab stays empty.
        """
        if not self.filled:
            try:
                self._arena.resize(self.tensor, self.num_bytes)
            except (RuntimeError, MemoryError) as error:
                self._arena.explain_failure(error, self.kind, self._owner, self.num_bytes)
                raise
            self.filled = True
            self._arena.ledger.add(self.kind, self.num_bytes, self._owner)
        return self.tensor

    def release(self) -> None:
        """Give the memory back. Every lane that touches it must have been waited for.

        Memory that somebody looks at through numpy stays, with a warning: torch can never free it behind the view.
        """
        if self.filled and not self.tensor.untyped_storage().resizable():
            self._arena.warn_of_views(self, self._owner)
        elif self.filled:
            self.filled = False
            self._arena.resize(self.tensor, 0)
            self._arena.ledger.add(self.kind, -self.num_bytes, self._owner)

    def abandon(self) -> None:
        """Leave the memory to whoever still refers to it (a graph of autograd) and count it no more."""
        if self.filled:
            self.filled = False
            self._arena.ledger.add(self.kind, -self.num_bytes, self._owner)


class Arena:
    """Allocates on one device and keeps the ledger.

    Attributes:
        explain: says more about a shortage of memory than the arena knows; None until a model is sharded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.explain: Callable[[], str] | None = None
        self.ledger = Ledger()
        self._largest_slab_bytes = self._slab_bytes = 0
        self._viewed: set[Slab] = set()

    def slab(self, kind: Kind, numel: int, dtype: torch.dtype, owner: str = "") -> Slab:
        """Return an empty slab of ``numel`` elements that belongs to ``owner``."""
        slab = Slab(self, kind, numel, dtype, owner)
        self._largest_slab_bytes = max(self._largest_slab_bytes, slab.num_bytes)
        self._slab_bytes += slab.num_bytes
        return slab

    def persistent(self, kind: Kind, numel: int, dtype: torch.dtype, owner: str = "") -> Tensor:
        """Return a zeroed flat tensor that rests until ``drop``.

        Raises:
            OutOfMemoryError: there is not so much memory.
        """
        with self.explained(kind, owner, numel * dtype.itemsize):
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        self.ledger.add(kind, tensor.nbytes, owner)
        return tensor

    def drop(self, kind: Kind, tensor: Tensor, owner: str = "") -> None:
        """Give back what ``persistent`` returned; a view through numpy keeps its memory."""
        self.ledger.add(kind, -tensor.nbytes, owner)
        if tensor.untyped_storage().resizable():
            self.resize(tensor, 0)

    def warn_of_views(self, slab: Slab, owner: str) -> None:
        """Warn, once for each slab, that its memory cannot be freed."""
        if slab not in self._viewed:
            self._viewed.add(slab)
            warnings.warn(
                f"{slab.num_bytes:,} bytes ({slab.kind} of {owner or 'nobody'}) stay in memory for ever: something "
                "looks at them through numpy, behind which torch frees nothing. Copy first: "
                "tensor.detach().clone().numpy(), or take shardwise.full_parameters(model)",
                stacklevel=2,
            )

    @contextmanager
    def explained(self, kind: Kind, owner: str, num_bytes: int) -> Iterator[None]:
        """Raise an error of ours where memory for ``owner`` cannot be had inside."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.explain_failure(error, kind, owner, num_bytes)
            raise

    def explain_failure(self, error: Exception, kind: Kind, owner: str, num_bytes: int) -> None:
        """Raise an error of ours if ``error`` says that memory could not be had; return if it is about another thing.

        Raises:
            OutOfMemoryError: with what is held and, if there is somebody to ask, what to change.
        """
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            return
        held = ", ".join(f"{each} {count:,}" for each, count in self.ledger.now.items())
        more = f"bytes held (measured): {held}" if self.explain is None else self.explain()
        raise OutOfMemoryError(
            f"{num_bytes:,} bytes ({kind} of {owner or 'nobody'}) cannot be had on {self.device}\n{more}"
        ) from error

    def keep_freed_pages(self) -> bool:
        """Let glibc keep as much freed memory as the slabs have, for the next step; return whether it was asked to.

        Gradients and gathered parameters come and go in every step. glibc gives the free end of its heap back when it
        is twice as long as the largest block it has mapped and freed, and each step faults the pages in again, zeroed:
        40,000 faults with 53 million parameters, a tenth of the step. Here that limit becomes the size of all slabs,
        in this process; the other one becomes what the largest slab would have made of it (at most 32 MiB).
        Source: measured, docs/log.md.
        """
        if self.device.type != "cpu" or read_variables(_ALLOCATOR_VARIABLES):
            return False
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (AttributeError, OSError, TypeError):  # not glibc
            return False
        return all(mallopt(parameter, num_bytes) for parameter, num_bytes in self.heap_limits().items())

    def heap_limits(self) -> dict[int, int]:
        """Return what ``keep_freed_pages`` asks of mallopt, by parameter."""
        mapped_bytes = min(max(self._largest_slab_bytes + _PAGE_BYTES, _MIN_MAPPED_BYTES), _MAX_MAPPED_BYTES)
        kept_bytes = min(max(self._slab_bytes, 2 * mapped_bytes), _MAX_INT)
        return {_M_MMAP_THRESHOLD: mapped_bytes, _M_TRIM_THRESHOLD: kept_bytes}

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        """Change the memory behind a flat tensor; its storage object stays."""
        tensor.untyped_storage().resize_(num_bytes)
