"""Large tensors in files without a name, so that a conversion needs disk where it would need memory."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["scratch_tensor"]

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
