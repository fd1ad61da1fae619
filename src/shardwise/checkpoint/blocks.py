"""Bytes to and from files in large blocks, past the page cache where the file system can: copy, hash and disk overlap.

Writes go through aligned buffers with O_DIRECT, so that a save runs at the speed of the disk and does not push other
data out of memory. Reads use the page cache: what a check has read, the load that follows finds there.
"""

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "BlockReader", "BlockWriter", "Held", "ReadBlocks", "as_bytes"]

BLOCK_BYTES = 8 << 20
_NUM_BLOCKS = 3
_ALIGN_BYTES = 4096  # of offsets, lengths and memory, for O_DIRECT


class Held:
    """The bytes of one tensor that are written later: the live ones, until they are about to change.

    Args:
        flat: contiguous, any device.
    """

    def __init__(self, flat: Tensor) -> None:
        self._raw = as_bytes(flat)
        self._is_copy = False
        self._lock = threading.Lock()
        self.num_bytes = self._raw.numel()

    def copy_to(self, start: int, target: Tensor) -> None:
        """Copy bytes from ``start`` on into flat uint8 memory."""
        with self._lock:
            target.copy_(self._raw[start : start + target.numel()])

    def secure(self) -> None:
        """Keep the bytes as they are now, in host memory; what was let go is not copied."""
        with self._lock:
            if not self._is_copy and self._raw.numel():
                self._raw, self._is_copy = self._raw.to("cpu", copy=True), True

    def let_go(self) -> None:
        """Forget the bytes: they were written."""
        with self._lock:
            self._raw = self._raw[:0].clone()


def as_bytes(flat: Tensor) -> Tensor:
    """Return a flat contiguous tensor as uint8, without a copy."""
    return flat.detach().view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


class BlockWriter:
    """A new file that grows at its end; on the disk when the ``with`` block ends without an error.

    Args:
        path: must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _create(path)
        self._blocks = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(_NUM_BLOCKS)]
        self._views = [torch.frombuffer(block, dtype=torch.uint8) for block in self._blocks]
        self._in_flight: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._current = self._filled = 0
        self.num_bytes = 0

    def __enter__(self) -> "BlockWriter":
        return self

    def write(self, given: Held | Tensor) -> Iterator[memoryview]:
        """Append the bytes of a flat tensor; yield each part as it lies in the block, before it leaves."""
        source = given if isinstance(given, Held) else Held(given)
        position = 0
        while position < source.num_bytes:
            length = min(BLOCK_BYTES - self._filled, source.num_bytes - position)
            source.copy_to(position, self._views[self._current][self._filled : self._filled + length])
            yield memoryview(self._blocks[self._current])[self._filled : self._filled + length]
            position += length
            self._filled += length
            if self._filled == BLOCK_BYTES:
                self._send()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Bring the rest to the disk, or give up; close the file."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
            os.close(self._file)

    def _send(self) -> None:
        """Hand the current block to the disk and take the next one."""
        length = self._filled
        padded = -(-length // _ALIGN_BYTES) * _ALIGN_BYTES
        self._in_flight.append(self._thread.submit(self._put, self._current, padded, self.num_bytes))
        self.num_bytes += length
        self._current, self._filled = (self._current + 1) % _NUM_BLOCKS, 0
        if len(self._in_flight) == _NUM_BLOCKS:
            self._in_flight.popleft().result()

    def _put(self, block: int, length: int, offset: int) -> None:
        view = memoryview(self._blocks[block])[:length]
        while view:
            written = os.pwrite(self._file, view, offset)
            offset += written
            view = view[written:]

    def _finish(self) -> None:
        if self._filled:
            self._send()
        while self._in_flight:
            self._in_flight.popleft().result()
        os.ftruncate(self._file, self.num_bytes)
        os.fsync(self._file)


class ReadBlocks:
    """Memory and threads for reading, made when they are needed; readers may share them, one after the other."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._threads: ThreadPoolExecutor | None = None

    @property
    def blocks(self) -> list[mmap.mmap]:
        """Some blocks of ``BLOCK_BYTES``."""
        if not self._blocks:
            self._blocks = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(_NUM_BLOCKS)]
        return self._blocks

    @property
    def threads(self) -> ThreadPoolExecutor:
        """One thread for each block but the one that is being used."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_BLOCKS - 1)
        return self._threads

    def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None


class BlockReader:
    """Reads ranges of one file, some blocks ahead and several at once.

    Args:
        file: descriptor, open for reading; stays the caller's.
        shared: with the readers of other files, and closed by their owner; None: of this reader alone.
    """

    def __init__(self, file: int, shared: ReadBlocks | None = None) -> None:
        self._file = file
        self._is_owner = shared is None
        self._shared = shared or ReadBlocks()

    def close(self) -> None:
        """Let the threads end, unless they are shared."""
        if self._is_owner:
            self._shared.close()

    def read(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield ranges ``(offset, num_bytes)``, in parts: number of the range, and its next bytes as flat uint8.

        A tensor is valid until the next one.

        Raises:
            EOFError: the file is shorter.
            OSError: it cannot be read.
        """
        parts = (  # one by one: a file with holes may claim any length
            (number, offset + start, min(BLOCK_BYTES, num_bytes - start))
            for number, (offset, num_bytes) in enumerate(ranges)
            for start in range(0, num_bytes, BLOCK_BYTES)
        )
        first = list(itertools.islice(parts, 2))
        if not first:
            return
        if len(first) == 1:
            yield first[0][0], self._fetch(0, *first[0][1:])
            return
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        threads = self._shared.threads
        coming: deque[tuple[int, Future[Tensor]]] = deque()
        try:
            for index, (number, offset, length) in enumerate(itertools.chain(first, parts)):
                coming.append((number, threads.submit(self._fetch, index % _NUM_BLOCKS, offset, length)))
                if len(coming) == _NUM_BLOCKS:
                    oldest, block = coming.popleft()
                    yield oldest, block.result()
            while coming:
                oldest, block = coming.popleft()
                yield oldest, block.result()
        finally:
            wait([block for _, block in coming])  # nobody writes into a block that the next reader uses

    def _fetch(self, block: int, offset: int, length: int) -> Tensor:
        view = memoryview(self._shared.blocks[block])[:length]
        done = 0
        while done < length:
            count = os.preadv(self._file, [view[done:]], offset + done)
            if count == 0:
                raise EOFError("the file ends early")
            done += count
        return torch.frombuffer(view, dtype=torch.uint8)


def _create(path: Path) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system has no O_DIRECT
            raise
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # some create it all the same
    return os.open(path, flags, 0o600)
