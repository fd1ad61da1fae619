"""Large tensors in files without a name, so that a conversion needs disk where it would need memory."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.folder import make_temporary
from shardwise.checkpoint.save import new_save_id
from shardwise.errors import CheckpointError

__all__ = ["scratch_tensor", "staging_folder"]

_IN_MEMORY_BYTES = 1 << 20


def scratch_tensor(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without values whose memory the kernel may write to a file in ``folder`` and take back.

    The file has no name from the start and goes with the tensor. Small tensors are in memory.

    Raises:
        OSError: the disk is full.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _IN_MEMORY_BYTES:
        return torch.empty(shape, dtype=dtype)
    path = folder / f"scratch-{os.urandom(8).hex()}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)  # a full disk is an error here; in a mapping it would be a signal
        return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    finally:
        path.unlink()
        os.close(file)


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Give a private directory in the folder, on whose disk the checkpoint will be.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        path = make_temporary(folder, "import", new_save_id())
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
