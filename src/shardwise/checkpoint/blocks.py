"""Bytes to and from files in large blocks, past the page cache where the file system can: copy, hash and disk overlap.

Writes go through aligned buffers with O_DIRECT, so that a save runs at the speed of the disk and does not push other
data out of memory. Reads use the page cache: what a check has read, the load that follows finds there.
"""

import contextlib
import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "BlockWriter", "read_blocks"]

BLOCK_BYTES = 8 << 20
_NUM_BLOCKS = 3
_ALIGN_BYTES = 4096  # of offsets, lengths and memory, for O_DIRECT


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

    def write(self, raw: Tensor) -> Iterator[memoryview]:
        """Append a flat uint8 tensor on any device; yield each part as it lies in the block, before it leaves."""
        position = 0
        while position < raw.numel():
            length = min(BLOCK_BYTES - self._filled, raw.numel() - position)
            self._views[self._current][self._filled : self._filled + length].copy_(raw[position : position + length])
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


def read_blocks(file: int, offset: int, num_bytes: int) -> Iterator[Tensor]:
    """Yield a range of a file as flat uint8 tensors, which are valid until the next one; read ahead by one.

    Raises:
        EOFError: the file is shorter.
        OSError: it cannot be read.
    """
    if not num_bytes:
        return
    blocks = [mmap.mmap(-1, min(BLOCK_BYTES, num_bytes)) for _ in range(2)]

    def fetch(number: int) -> Tensor:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, num_bytes - start)
        view = memoryview(blocks[number % 2])[:length]
        done = 0
        while done < length:
            count = os.preadv(file, [view[done:]], offset + start + done)
            if count == 0:
                raise EOFError("the file ends early")
            done += count
        return torch.frombuffer(view, dtype=torch.uint8)

    num_blocks = -(-num_bytes // BLOCK_BYTES)
    if num_blocks == 1:
        yield fetch(0)
        return
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, offset, num_bytes, os.POSIX_FADV_SEQUENTIAL)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch, 0)
        for number in range(num_blocks):
            block = coming.result()
            if number + 1 < num_blocks:
                coming = thread.submit(fetch, number + 1)
            yield block


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
