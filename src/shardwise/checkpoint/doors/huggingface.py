"""Hugging Face's safetensors: one file, or several with ``model.safetensors.index.json``; out and in.

The export is what ``from_pretrained`` reads beside the user's ``config.json``. A tied weight is stored under its first
name; its other names are in the metadata of the file, as ``safetensors.torch.save_model`` writes them.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import torch
from torch import Tensor

from shardwise.checkpoint.doors.incoming import Incoming, shown
from shardwise.checkpoint.doors.outgoing import Outgoing, Weight, new_directory, raw_bytes
from shardwise.checkpoint.files import write_whole
from shardwise.checkpoint.tensorfile import NAMES_OF_DTYPES
from shardwise.errors import CheckpointError

__all__ = ["export_huggingface", "import_huggingface"]

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS = "shardwise.buffers"  # in a file's metadata: which of its tensors are buffers
_MAX_INDEX_BYTES = 1 << 28
_DTYPES: Mapping[torch.dtype, str] = MappingProxyType({**NAMES_OF_DTYPES, torch.complex64: "C64"})


@torch.no_grad()
def export_huggingface(
    path: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    verify: bool = True,
) -> Path:
    """Write the weights of a checkpoint as Hugging Face's libraries read them. Holds one block of a tensor at a time.

    Args:
        path: directory of the checkpoint.
        target: new directory; it appears whole or not at all.
        dtype: of floating-point parameters; None: as the optimizer keeps them. Buffers keep theirs.
        max_shard_bytes: no file is larger, unless one tensor is.
        verify: check the hash of every tensor first.

    Raises:
        CheckpointError: the checkpoint is damaged, ``target`` exists, or cannot be written.
    """
    with Outgoing(path, dtype=dtype, verify=verify) as outgoing, new_directory(target) as folder:
        if odd := [weight.name for weight in outgoing.weights if weight.dtype not in _DTYPES]:
            raise CheckpointError(f"{path}: {shown(odd)}: safetensors has no such complex dtype, but complex64")
        shards = _shards(outgoing.weights, max_shard_bytes)
        names = [_FILE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            _write(folder / name, shard, outgoing)
        if len(shards) > 1:
            places = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
            index = {
                "metadata": {"total_size": sum(weight.num_bytes for weight in outgoing.weights)},
                "weight_map": dict(sorted(places.items())),
            }
            write_whole(folder / _INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return target


def import_huggingface(
    source: Path, folder: Path, tag: str | None = None, *, buffers: Collection[str] = (), step: int = 0
) -> Path:
    """Make a checkpoint of weights from safetensors files. Files are mapped, each byte is read once.

    Args:
        source: a safetensors file, or a folder with ``model.safetensors`` or its index.
        folder: of checkpoints; the new one is ``folder/tag``.
        tag: name of the checkpoint; None: ``step-<step>``.
        buffers: names that are buffers; names that an export of this library marks, whole numbers and those of a batch
            norm are taken for buffers anyway.
        step: updates so far.

    Raises:
        CheckpointError: a file is missing, malformed, holds what a checkpoint does not, or not what the index says.
        ConfigError: ``buffers`` has a name that is not there.
    """
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        marked = set(buffers)
        for path, expected in _files(source):
            found, metadata = _read(path, stack)
            if expected is not None:
                _check_index(path, expected, found, metadata)
            tensors |= found
            aliases |= {other: name for other, name in metadata.items() if name in found and other not in found}
            marked |= _marked(path, metadata)
        incoming = Incoming(source, buffers=marked)
        for name, tensor in tensors.items():
            others = [other for other, known in aliases.items() if known == name and other not in tensors]
            incoming.add_weight(name, tensor, others)
        incoming.check_buffers(buffers)
        return incoming.write(folder, tag, step=step)


def _shards(weights: Sequence[Weight], max_bytes: int) -> list[list[Weight]]:
    """Deal the weights out to files, in their order."""
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.num_bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write(path: Path, weights: Sequence[Weight], outgoing: Outgoing) -> None:
    metadata = {other: weight.name for weight in weights for other in weight.aliases}
    buffers = [weight.name for weight in weights if weight.is_buffer]
    if buffers:
        metadata[_BUFFERS] = json.dumps(buffers)
    table: dict[str, object] = {"__metadata__": metadata | {"format": "pt"}}
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)  # so that every tensor is aligned
    position = 0
    for weight in ordered:
        stop = position + weight.num_bytes
        table[weight.name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with open(path, "xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for weight in ordered:
            stream.writelines(raw_bytes(block).numpy().data for block in outgoing.blocks(weight))
        stream.flush()
        os.fsync(stream.fileno())


def _files(source: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield the files of a source, each with the names that the index places there, if there is one.

    They may be links, as they are in Hugging Face's cache.
    """
    if not source.is_dir():
        yield source, None
        return
    if (source / _FILE).is_file():
        yield source / _FILE, None
        return
    if not (source / _INDEX).is_file():
        raise CheckpointError(f"{source}: has neither {_FILE} nor {_INDEX}")
    if (source / _INDEX).stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{source / _INDEX}: is too large for an index")
    try:
        index: Any = json.loads((source / _INDEX).read_bytes())
        names: dict[str, set[str]] = {}
        for tensor, name in index["weight_map"].items():
            if not isinstance(name, str):
                raise TypeError(f"the file of {tensor[:100]!r} is no name")
            names.setdefault(name, set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{source / _INDEX}: has no weight_map: {str(error)[:200]}") from None
    for name in names:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name or "\\" in name:
            raise CheckpointError(f"{source / _INDEX}: names {name!r}, which is no file of this folder")
    yield from ((source / name, names[name]) for name in sorted(names))


def _check_index(path: Path, expected: set[str], found: Collection[str], metadata: Mapping[str, str]) -> None:
    """Check that a file holds what the index says, no less and no more; another name of a tied weight counts."""
    missing = sorted(name for name in expected - set(found) if metadata.get(name) not in found)
    if missing:
        raise CheckpointError(f"{path.with_name(_INDEX)}: {shown(missing)} is not in {path.name}, as it says")
    if unnamed := sorted(set(found) - expected):
        raise CheckpointError(f"{path.with_name(_INDEX)}: does not say that {shown(unnamed)} is in {path.name}")


def _read(path: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return mapped tensors and the metadata of a file."""
    try:
        file = stack.enter_context(safetensors.safe_open(path, framework="pt", device="cpu"))
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except Exception as error:  # the library's own errors, of the system, and of dtypes that torch does not have
        raise CheckpointError(f"{path}: cannot be read: {str(error)[:500]}") from None


def _marked(path: Path, metadata: Mapping[str, str]) -> set[str]:
    try:
        names = json.loads(metadata.get(_BUFFERS, "[]"))
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return set(names)
    except (ValueError, RecursionError):
        pass
    raise CheckpointError(f"{path}: its list of buffers is malformed")
