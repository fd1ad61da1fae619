"""Plain ``dcp.load`` of our checkpoints: ``dcp.load(state, storage_reader=ShardwiseStorageReader(path))``."""

import io
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.checkpoint.doors.dcp_names import WRITTEN, Leaf, leaves_of
from shardwise.checkpoint.doors.outgoing import find_checkpoint
from shardwise.checkpoint.folder import read_manifest
from shardwise.checkpoint.manifest import DTYPES, WHOLE_COPIES, Manifest, Stored
from shardwise.checkpoint.source import TensorSource
from shardwise.checkpoint.tensorfile import TensorFile
from shardwise.errors import CheckpointError

__all__ = ["ShardwiseStorageReader"]

_BLOCK_NUMEL = 1 << 22


class ShardwiseStorageReader(StorageReader):
    """Reads a checkpoint of this library into any state dict that ``dcp.load`` takes, however its tensors are sharded.

    Keys are those of ``{"model": ..., "optim": ...}`` with what torch's ``get_state_dict`` returns; parameters come as
    the optimizer keeps them. What ``ShardwiseStorageWriter`` wrote has the keys that it was given. Torch's own exchange
    between ranks is at work, which pickles; nothing of the checkpoint is unpickled but what this reader packs itself.

    Args:
        path: directory of the checkpoint, or a folder whose ``latest`` names it.
        flat: keys are the names of parameters and buffers alone, as in ``model.state_dict()``.
        verify: check the hash of each piece that this rank reads from.
    """

    def __init__(self, path: str | os.PathLike[str], *, flat: bool = False, verify: bool = True) -> None:
        super().__init__()
        self._path = Path(path)
        self._flat = flat
        self._verify = verify
        self._found: tuple[Path, Manifest, dict[str, Leaf]] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another checkpoint if one is given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
        self._found = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:  # of other names, torch would call it twice
        """Describe everything that can be read.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """
        _, _, leaves = self._open()
        return Metadata(
            state_dict_metadata={key: _described(leaf) for key, leaf in leaves.items()},
            planner_data={key: leaf.path if not self._flat else (key,) for key, leaf in leaves.items()},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: each rank reads the manifest itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what the plan asks for.

        Raises:
            CheckpointError: a file is damaged.
        """
        path, manifest, leaves = self._open()
        wanted = [(item, leaves[item.storage_index.fqn]) for item in plan.items]
        ranges = [(leaf.stored, *_rows(leaf.stored, item)) for item, leaf in wanted if leaf.stored is not None]
        with TensorSource(path, manifest) as source:
            source.check(ranges)
            if self._verify:
                _verify(path, manifest, ranges)
            for item, leaf in wanted:
                if item.type == LoadItemType.BYTE_IO:
                    packed = io.BytesIO()
                    torch.save(leaf.value, packed)
                    packed.seek(0)
                    planner.load_bytes(item, packed)
                    continue
                target = planner.resolve_tensor(item).detach()
                if leaf.stored is None:
                    target.copy_(leaf.value)
                else:
                    _read_box(source, leaf.stored, tuple(item.storage_offsets), target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be the path of a checkpoint."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _open(self) -> tuple[Path, Manifest, dict[str, Leaf]]:
        if self._found is None:
            path = find_checkpoint(self._path)
            manifest = read_manifest(path)
            leaves = leaves_of(manifest, str(path))
            if self._flat and WRITTEN not in manifest.values.objects:
                leaves = {str(leaf.path[1]): leaf for leaf in leaves.values() if leaf.path[0] == "model"}
            self._found = path, manifest, leaves
        return self._found


def _described(leaf: Leaf) -> TensorStorageMetadata | BytesStorageMetadata:
    if leaf.stored is not None:
        shape, dtype = torch.Size(leaf.stored.shape), DTYPES[leaf.stored.dtype]
    elif isinstance(leaf.value, Tensor):
        shape, dtype = leaf.value.size(), leaf.value.dtype
    else:
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=shape, chunks=[whole])


def _rows(stored: Stored, item: ReadItem) -> tuple[int, int]:
    """Return the row-major range of the rows, along the first dimension, in which a box lies."""
    if not stored.shape:
        return 0, 1
    inner = math.prod(stored.shape[1:])
    return item.storage_offsets[0] * inner, (item.storage_offsets[0] + item.lengths[0]) * inner


def _read_box(source: TensorSource, stored: Stored, offset: tuple[int, ...], target: Tensor) -> None:
    """Fill ``target`` with the box of its shape at ``offset``; reads whole rows, a block of them at a time."""
    dtype, shape = DTYPES[stored.dtype], stored.shape
    if not target.numel():
        return
    if stored.kind in WHOLE_COPIES or not shape:
        whole = torch.empty(shape, dtype=dtype)
        source.read_copy(stored, 0, whole.view(-1))
        target.copy_(whole[tuple(slice(first, first + n) for first, n in zip(offset, target.shape, strict=True))])
        return
    inner = math.prod(shape[1:])
    step = max(1, _BLOCK_NUMEL // inner)
    columns = tuple(slice(first, first + n) for first, n in zip(offset[1:], target.shape[1:], strict=True))
    for row in range(0, target.shape[0], step):
        count = min(step, target.shape[0] - row)
        block = torch.empty((count, *shape[1:]), dtype=dtype)
        source.read(stored, (offset[0] + row) * inner, block.view(-1))
        target[row : row + count].copy_(block[(slice(None), *columns)])


def _verify(path: Path, manifest: Manifest, ranges: Iterable[tuple[Stored, int, int]]) -> None:
    """Check the hash of each piece that has elements in one of the ranges.

    Raises:
        CheckpointError: a piece is damaged.
    """
    by_file: dict[int, dict[str, str]] = {}
    for stored, index, digest in _touched(ranges):
        by_file.setdefault(index, {})[stored.key] = digest
    for index, digests in by_file.items():
        file = TensorFile(path, manifest.file_name(index), manifest.files[index], manifest.save_id)
        try:
            for key, digest in digests.items():
                if file.hash(key) != digest:
                    raise CheckpointError(f"{file.path}: {key} is damaged: its hash is not the manifest's")
        finally:
            file.close()


def _touched(ranges: Iterable[tuple[Stored, int, int]]) -> Iterator[tuple[Stored, int, str]]:
    for stored, start, stop in ranges:
        for piece in stored.pieces:
            begin, end = stored.range_of(piece)
            if max(begin, start) < min(end, stop):
                yield stored, piece.file, piece.hash
