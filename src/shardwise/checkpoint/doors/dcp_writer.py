"""Plain ``dcp.save`` into our format: ``dcp.save(state, storage_writer=ShardwiseStorageWriter(path))``."""

import datetime
import io
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.doors.dcp_names import WRITTEN
from shardwise.checkpoint.doors.incoming import plain_or_refuse
from shardwise.checkpoint.doors.torchfile import load_values
from shardwise.checkpoint.files import write_whole
from shardwise.checkpoint.folder import clear_leftovers, commit, make_temporary
from shardwise.checkpoint.manifest import FORMAT_VERSION, FileFacts, Manifest, Param, Piece, Stored, Values, merge
from shardwise.checkpoint.names import MANIFEST, check_tag, rank_file
from shardwise.checkpoint.plain import Plain
from shardwise.checkpoint.save import new_save_id
from shardwise.checkpoint.tensorfile import NAMES_OF_DTYPES, Entry, write_file
from shardwise.errors import CheckpointError
from shardwise.layout import range_to_boxes

__all__ = ["ShardwiseStorageWriter"]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the coordinator tells each rank; ``number``: of the rank's file, None: it writes none."""

    temporary: str
    save_id: str
    number: int | None


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a rank tells the coordinator of one item."""

    stored: str = ""
    facts: str = ""
    number: int = 0
    value: Plain = None


class ShardwiseStorageWriter(StorageWriter):
    """Writes what ``dcp.save`` saves as one of our checkpoints: hashed, whole or invisible; keys become parameters.

    ``ShardwiseStorageReader`` reads it back into any sharding; ``load_checkpoint`` reads it where keys are the names of
    a model's parameters, and buffers there are none. Each rank's part of a tensor must be consecutive in row-major
    order (whole tensors, or shards of the first dimension, as FSDP2 makes them), and other values must be plain.
    Torch's own exchange between ranks is at work, which pickles.

    Args:
        path: directory of the checkpoint, on a disk that all ranks share; must not exist. It appears when all ranks
            have written; ``latest`` is left alone.
        step: updates so far.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int = 0) -> None:
        super().__init__()
        self._path = Path(path)
        self._step = step
        self._temporary: Path | None = None
        self._save_id = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, under another path if one is given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
        self._forget()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the path.

        Raises:
            CheckpointError: there is something, or torch shall not let ranks talk.
            ConfigError: its last part is no tag.
        """
        check_tag(self._path.name)
        if kwargs.get("use_collectives") is False:
            raise CheckpointError("ShardwiseStorageWriter needs use_collectives=True: one manifest tells of all ranks")

    def storage_meta(self) -> StorageMeta | None:
        """Tell where the checkpoint will be."""
        return StorageMeta(checkpoint_id=self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that this rank's items can be written.

        Raises:
            CheckpointError: names one that cannot.
        """
        if os.path.lexists(self._path):
            raise CheckpointError(f"{self._path}: exists already; nothing was written. Choose another name")
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                _located(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the private directory, and number the files.

        Raises:
            CheckpointError: there are no tensors, or two parts of a tensor on one rank.
        """
        filled = [[item.index.fqn for item in plan.items if _has_elements(item)] for plan in plans]
        for rank, keys in enumerate(filled):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            if twice:
                raise CheckpointError(f"rank {rank} has two parts of {twice[0]}: such a tensor cannot be written")
        if not any(filled):
            raise CheckpointError(f"{self._path}: there are no tensors to save")
        clear_leftovers(self._path.parent)
        self._save_id = new_save_id()
        self._temporary = make_temporary(self._path.parent, self._path.name, self._save_id)
        result, number = [], 0
        for plan, keys in zip(plans, filled, strict=True):
            job = _Job(temporary=str(self._temporary), save_id=self._save_id, number=number if keys else None)
            result.append(replace(plan, storage_data=job))
            number += bool(keys)
        return result

    @torch.no_grad()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's file.

        Raises:
            CheckpointError: a value is not plain.
            OSError: the disk is full.
        """
        job: _Job = plan.storage_data
        entries, filled, results = [], [], []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(self._value(item, planner))
            elif _has_elements(item):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                flat = tensor.detach().contiguous().reshape(-1)
                entries.append(Entry(key=f"param.{item.index.fqn}", shape=tuple(tensor.shape), flat=flat))
                filled.append(item)
            else:
                stored = _located(item)[0]
                results.append(_result(item, 0, _Told(stored=stored.model_dump_json())))
        if job.number is not None:
            path = Path(job.temporary) / rank_file(job.number)
            metadata = {"format": "pt", "writer": "shardwise", "save_id": job.save_id, "rank": str(job.number)}
            written = write_file(path, entries, metadata)
            for item, entry in zip(filled, entries, strict=True):
                stored, boxes = _located(item)
                piece = Piece(file=job.number, boxes=tuple(boxes), hash=written.hashes[entry.key])
                told = _Told(
                    stored=stored.model_copy(update={"pieces": (piece,)}).model_dump_json(),
                    facts=written.facts.model_dump_json(),
                    number=job.number,
                )
                results.append(_result(item, entry.flat.nbytes, told))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and make the checkpoint visible.

        Raises:
            CheckpointError: the parts do not make a whole, or the name was taken meanwhile.
        """
        assert self._temporary is not None
        try:
            told = [(result.index.fqn, result.storage_data) for each in results for result in each]
            raw = self._manifest(told, metadata.planner_data or {}).encode()
            Manifest.decode(raw, MANIFEST)
            write_whole(self._temporary / MANIFEST, raw)
            commit(self._temporary, self._path, overwrite=False)
        finally:
            self._forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be the path of a checkpoint."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _forget(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None

    def _value(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        raw = planner.resolve_data(item)
        assert isinstance(raw, io.BytesIO)
        raw.seek(0)
        where = item.index.fqn
        return _result(item, raw.getbuffer().nbytes, _Told(value=[plain_or_refuse(load_values(raw, where), where)]))

    def _manifest(self, told: Sequence[tuple[str, _Told]], paths: dict[str, tuple[str | int, ...]]) -> Manifest:
        stored = merge([[Stored.model_validate_json(each.stored)] for _, each in told if each.stored])
        files = {each.number: FileFacts.model_validate_json(each.facts) for _, each in told if each.facts}
        kept = {
            "values": {key: each.value[0] for key, each in told if each.value is not None},
            "paths": {key: list(path) for key, path in paths.items()},
        }
        return Manifest(
            version=FORMAT_VERSION,
            save_id=self._save_id,
            tag=self._path.name,
            step=self._step,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
            library={"torch": str(torch.__version__)},
            mesh=(),
            sharding=WRITTEN,
            params=tuple(Param(name=item.name, shape=item.shape, dtype=item.dtype) for item in stored),
            stored=stored,
            files=tuple(files[number] for number in range(len(files))),
            values=Values(
                num_steps=self._step,
                loss_scale=None,
                optimizers=(),
                extra_state={},
                objects={WRITTEN: kept},
                generators={},
            ),
            rank_values=tuple({} for _ in files),
        )


def _has_elements(item: WriteItem) -> bool:
    return item.tensor_data is not None and math.prod(item.tensor_data.chunk.sizes) > 0


def _located(item: WriteItem) -> tuple[Stored, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return a tensor without pieces, and the boxes of the part that an item is.

    Raises:
        CheckpointError: our format does not hold it.
    """
    data = item.tensor_data
    assert data is not None
    shape, offset, size = tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    if data.properties.dtype not in NAMES_OF_DTYPES:
        raise CheckpointError(f"{item.index.fqn} is of dtype {data.properties.dtype}, which a checkpoint does not hold")
    stored = Stored(
        kind="param", name=item.index.fqn, shape=shape, dtype=NAMES_OF_DTYPES[data.properties.dtype], pieces=()
    )
    if not _has_elements(item):
        return stored, []
    start = 0
    for first, length in zip(offset, shape, strict=True):
        start = start * length + first
    boxes = range_to_boxes(shape, start, start + math.prod(size))
    if boxes != [(offset, size)]:
        raise CheckpointError(
            f"{item.index.fqn}: the part {size} at {offset} of {shape} is not consecutive: only whole tensors and "
            "shards of the first dimension can be written. Save with torch's own writer, then convert"
        )
    return stored, boxes


def _result(item: WriteItem, num_bytes: int, told: _Told) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=num_bytes, storage_data=told)
