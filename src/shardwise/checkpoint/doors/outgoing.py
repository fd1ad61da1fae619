"""What leaves a checkpoint: its parameters and buffers by name, read in blocks, never the whole model at once.

Every export begins here; ``huggingface.py`` and ``torchfile.py`` are the simplest.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardwise.checkpoint.files import sync_folder
from shardwise.checkpoint.folder import (
    commit,
    find_checkpoints,
    folder_of_run,
    make_temporary,
    read_manifest,
)
from shardwise.checkpoint.load import resolve_tag
from shardwise.checkpoint.manifest import DTYPES, WHOLE_COPIES, Manifest, Stored
from shardwise.checkpoint.names import LATEST, MANIFEST
from shardwise.checkpoint.save import new_save_id
from shardwise.checkpoint.source import TensorSource
from shardwise.checkpoint.verify import verify_files
from shardwise.errors import CheckpointError

__all__ = [
    "Outgoing",
    "Weight",
    "fill",
    "find_checkpoint",
    "new_directory",
    "new_file",
    "open_checkpoint",
    "raw_bytes",
    "seen",
]

_BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter or a persistent buffer.

    Attributes:
        name: as the model calls it.
        aliases: its other names (tied weights).
        shape: of the whole tensor.
        dtype: in which it leaves.
        is_buffer: whether it is a buffer.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    stored: Stored
    compute: Stored | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes that leave."""
        return math.prod(self.shape) * self.dtype.itemsize


class Outgoing:
    """An open checkpoint whose weights leave, for use in a ``with`` statement.

    Args:
        path: directory of the checkpoint.
        dtype: of floating-point parameters; None: as the optimizer keeps them. In the dtype in which the model
            computes they are the very numbers it computed with. Buffers keep theirs.
        verify: check the hash of every tensor first.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype | None = None, verify: bool = True) -> None:
        self.manifest = open_checkpoint(path, verify=verify)
        self.source = TensorSource(path, self.manifest)
        self.weights = tuple(_weights(self.manifest, dtype))
        self.source.check((item, 0, item.numel) for item in self.manifest.stored)

    def __enter__(self) -> "Outgoing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all files."""
        self.source.__exit__(kind, error, trace)

    def blocks(self, weight: Weight) -> Iterator[Tensor]:
        """Yield the elements of a weight in row-major order, as flat tensors in the dtype in which it leaves.

        Raises:
            CheckpointError: a file cannot be read.
        """
        stored, kept = weight.stored, DTYPES[weight.stored.dtype]
        if weight.is_buffer:
            yield self.read_stored(stored).view(-1)
            return
        for start in range(0, stored.numel, _BLOCK_NUMEL):
            block = torch.empty(min(_BLOCK_NUMEL, stored.numel - start), dtype=kept)
            self.source.read(stored, start, block)
            block = block.to(weight.dtype)
            if weight.compute is not None:
                self.source.read(weight.compute, start, block)
            yield block

    def read(self, weight: Weight) -> Tensor:
        """Return one weight as a whole, in host memory."""
        out = torch.empty(weight.shape, dtype=weight.dtype)
        fill(out, self.blocks(weight))
        return out

    def read_stored(self, item: Stored) -> Tensor:
        """Return one tensor of the checkpoint as a whole, in host memory, in the dtype in which it is stored."""
        out = torch.empty(item.shape, dtype=DTYPES[item.dtype])
        if item.kind in WHOLE_COPIES:
            self.source.read_copy(item, 0, out.view(-1))
            return torch.view_as_complex(out) if item.is_complex else out
        self.source.read(item, 0, out.view(-1))
        return out


def seen(item: Stored) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor of the checkpoint as its owner knows it."""
    dtype = DTYPES[item.dtype]
    return (item.shape[:-1], dtype.to_complex()) if item.is_complex else (item.shape, dtype)


def fill(out: Tensor, blocks: Iterator[Tensor]) -> None:
    """Copy flat blocks, one after the other, into a contiguous tensor."""
    flat, position = out.view(-1), 0
    for block in blocks:
        flat[position : position + block.numel()] = block
        position += block.numel()
    assert position == flat.numel(), f"{position} of {flat.numel()} elements"


def raw_bytes(flat: Tensor) -> Tensor:
    """Return a flat contiguous tensor as uint8, without a copy."""
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def open_checkpoint(path: Path, *, verify: bool) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged; with ``verify``, also if a tensor is not what was written.
    """
    return verify_files(path) if verify else read_manifest(path)


def find_checkpoint(path: Path, tag: str | None = None) -> Path:
    """Return the directory of a checkpoint: ``path`` itself, or the one in it that ``tag`` or ``latest`` names.

    Raises:
        CheckpointError: there is none.
    """
    if tag is None and (path / MANIFEST).exists():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint")
    path = folder_of_run(path)
    if tag is None and not os.path.lexists(path / LATEST) and not find_checkpoints(path):
        read_manifest(path)  # tells what it is instead
    return path / resolve_tag(path, tag)


def _weights(manifest: Manifest, dtype: torch.dtype | None) -> Iterator[Weight]:
    for param in manifest.params:
        stored = manifest.by_key[f"param.{param.name}"]
        kept = DTYPES[stored.dtype]
        leaves = dtype if dtype is not None and kept.is_floating_point else kept
        computed = leaves != kept and leaves == DTYPES[param.dtype]
        yield Weight(
            name=param.name,
            aliases=param.aliases,
            shape=param.shape,
            dtype=leaves,
            is_buffer=False,
            stored=stored,
            compute=manifest.by_key.get(f"compute.{param.name}") if computed else None,
        )
    for stored in manifest.stored:
        if stored.kind == "buffer":
            shape, own = seen(stored)
            yield Weight(
                name=stored.name,
                aliases=stored.aliases,
                shape=shape,
                dtype=own,
                is_buffer=True,
                stored=stored,
            )


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give a private directory that gets its name when the block ends, and is removed if the block fails.

    Raises:
        CheckpointError: the name is taken, or the disk refuses.
    """
    _check_free(target)
    save_id = new_save_id()
    temporary = None
    try:
        temporary = make_temporary(target.parent, target.name, save_id)
        yield temporary
        commit(temporary, target, overwrite=False)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[tuple[Path, Path]]:
    """Give a path for a file and a private directory beside it; the file gets its name when the block ends.

    Raises:
        CheckpointError: the name is taken, or the disk refuses.
    """
    _check_free(target)
    temporary = None
    try:
        temporary = make_temporary(target.parent, target.name, new_save_id())
        path = temporary / "file"
        yield path, temporary
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
        _check_free(target)
        os.rename(path, target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _check_free(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists already; nothing was written. Choose another name")
