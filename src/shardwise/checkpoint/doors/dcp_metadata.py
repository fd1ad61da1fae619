"""The file ``.metadata`` of torch.distributed.checkpoint, which is a pickle: read without its classes, then checked.

The unpickler knows a dozen names. Each stands for an inert class made for this one reading, so that nothing of torch is
called or changed, whatever the file says. Read ``dcp_in.py`` next.
"""

import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.manifest import DTYPES
from shardwise.checkpoint.names import read_small
from shardwise.errors import CheckpointError

__all__ = ["METADATA", "Chunk", "DcpFacts", "DcpTensor", "Place", "read_dcp_metadata"]

METADATA = ".metadata"
_MAX_BYTES = 1 << 30
_MAX_DIMS = 32
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an item lies: a range of bytes of a file in the checkpoint's directory."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    place: Place


@dataclass(frozen=True, kw_only=True)
class DcpTensor:
    """A tensor: its chunks cover it, each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class DcpFacts:
    """What a checkpoint of torch.distributed.checkpoint holds.

    Attributes:
        tensors: by key.
        values: all else, by key.
        paths: the way to a key's value in the nested state dict that was saved.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]]


def read_dcp_metadata(path: Path) -> DcpFacts:
    """Read and check the metadata of the checkpoint in ``path``.

    Raises:
        CheckpointError: it is missing, malformed, asks for anything to run, leads outside, or contradicts itself.
    """
    where = str(path / METADATA)
    raw = read_small(path, METADATA, _MAX_BYTES)
    try:
        top = _Reader(raw, where).load()
        if type(top).__name__ != "Metadata":
            raise CheckpointError(f"{where}: holds a {type(top).__name__}, no metadata")
        return _checked(top, where)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a malformed pickle makes of itself
        raise CheckpointError(f"{where}: is malformed: {type(error).__name__}: {str(error)[:200]}") from None


# The C unpickler reserves as much memory as a crafted file asks for; the one in Python does not.
class _Reader(pickle._Unpickler):
    """An unpickler that makes inert objects only."""

    def __init__(self, raw: bytes, where: str) -> None:
        super().__init__(io.BytesIO(raw))
        self._where = where
        self._known = _stand_ins()

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what stands for a class.

        Raises:
            CheckpointError: metadata needs no such thing.
        """
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in self._known:
            raise CheckpointError(f"{self._where}: asks for {module}.{name}, which no metadata needs; nothing was run")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{self._where}: refers to something outside itself")


def _stand_ins() -> dict[tuple[str, str], Callable[..., Any]]:
    def keep_state(self: Any, state: Any) -> None:
        self.state = state

    classes: dict[str, type] = {name: type(name, (), {}) for name in _METADATA_CLASSES}
    classes["TensorProperties"] = type("TensorProperties", (), {"__setstate__": keep_state})
    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch.distributed.checkpoint.metadata", name): each for name, each in classes.items()
    }
    return known | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (), {}),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda value: value,
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): lambda name: name,
        ("collections", "OrderedDict"): dict,
        **{
            (module, name): lambda *parts: parts
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath")
        },
    }


def _checked(top: Any, where: str) -> DcpFacts:
    if not isinstance(top.state_dict_metadata, dict) or not isinstance(top.storage_data, dict):
        raise CheckpointError(f"{where}: has no tables of items and places")
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in top.storage_data.items():
        offset = getattr(index, "offset", None)
        places[index.fqn, None if offset is None else _dims(offset, where)] = _place(info, index.fqn, where)
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, Place] = {}
    for key, item in top.state_dict_metadata.items():
        if not isinstance(key, str) or len(key) > 4096:
            raise CheckpointError(f"{where}: {str(key)[:200]!r} is no key")
        if type(item).__name__ == "BytesStorageMetadata":
            if (key, None) not in places:
                raise CheckpointError(f"{where}: {key} has no place in a file")
            values[key] = places[key, None]
        else:
            tensors[key] = _tensor(key, item, places, where)
    return DcpFacts(tensors=tensors, values=values, paths=_paths(getattr(top, "planner_data", None), where))


def _tensor(key: str, item: Any, places: Mapping[Any, Place], where: str) -> DcpTensor:
    shape, dtype = _dims(item.size, where), item.properties.state[0]
    if dtype not in (*DTYPES.values(), torch.complex64, torch.complex128):
        raise CheckpointError(f"{where}: {key} is of dtype {dtype}, which a checkpoint does not hold")
    chunks = []
    for chunk in item.chunks:
        offset, size = _dims(chunk.offsets, where), _dims(chunk.sizes, where)
        inside = len(offset) == len(size) == len(shape) and all(
            first + length <= whole for first, length, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{where}: {key} has a chunk {size} at {offset}, outside its shape {shape}")
        if math.prod(size) == 0:
            continue
        if (key, offset) not in places:
            raise CheckpointError(f"{where}: the chunk of {key} at {offset} has no place in a file")
        place = places[key, offset]
        if place.num_bytes < math.prod(size) * dtype.itemsize:
            raise CheckpointError(f"{where}: the chunk of {key} at {offset} has {place.num_bytes} bytes, too few")
        chunks.append(Chunk(offset=offset, size=size, place=place))
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(shape) or _overlap(chunks):
        raise CheckpointError(f"{where}: the chunks of {key} do not cover it once: elements are missing or twice there")
    return DcpTensor(shape=shape, dtype=dtype, chunks=tuple(chunks))


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether two boxes have an element in common."""
    if len(chunks) < 2:
        return False
    starts = np.array([chunk.offset for chunk in chunks], dtype=np.int64)
    stops = starts + np.array([chunk.size for chunk in chunks], dtype=np.int64)
    return any(
        np.count_nonzero(((starts < stop) & (start < stops)).all(axis=1)) > 1
        for start, stop in zip(starts, stops, strict=True)
    )


def _place(info: Any, key: Any, where: str) -> Place:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{where}: {key} was transformed by an extension ({info.transform_descriptors}) on save")
    file, offset, num_bytes = info.relative_path, info.offset, info.length
    if not isinstance(file, str) or type(offset) is not int or type(num_bytes) is not int or min(offset, num_bytes) < 0:
        raise CheckpointError(f"{where}: {key} lies at {str((file, offset, num_bytes))[:200]}, which is no place")
    return Place(file=file, offset=offset, num_bytes=num_bytes)


def _dims(numbers: Any, where: str) -> tuple[int, ...]:
    valid = isinstance(numbers, tuple) and len(numbers) <= _MAX_DIMS
    if not valid or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise CheckpointError(f"{where}: {str(numbers)[:200]} is no shape")
    return tuple(numbers)


def _paths(found: Any, where: str) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(found, dict):
        return {}
    for key, path in found.items():
        if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
            raise CheckpointError(f"{where}: {str(path)[:200]} is no way to {str(key)[:200]}")
    return dict(found)
