"""One safetensors file: written in a stream with a hash per entry, read by ranges after its header was checked.

The files are ordinary safetensors files. Their writer is not the library's, because each entry is hashed on its way
and goes to the disk in blocks (``blocks.py``); their reader is not either, because it must not trust the header.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwise.checkpoint.blocks import BLOCK_BYTES, BlockReader, BlockWriter, Held, ReadBlocks
from shardwise.checkpoint.manifest import DTYPES, MAX_COUNT, MAX_DIMS, FileFacts
from shardwise.checkpoint.names import open_inside
from shardwise.errors import CheckpointError

__all__ = ["NAMES_OF_DTYPES", "Entry", "TensorFile", "Written", "each_once", "file_bytes", "write_file"]

NAMES_OF_DTYPES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_MAX_HEADER_BYTES = 1 << 28
_ALIGN_BYTES = 4096  # where the data begins


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one entry will hold.

    Attributes:
        key: its name.
        shape: as the file tells it.
        flat: [numel] contiguous, any device.
        held: what its bytes are read from; None: ``flat``.
    """

    key: str
    shape: tuple[int, ...]
    flat: Tensor
    held: Held | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a file: its facts, and the hash of each entry by its name."""

    facts: FileFacts
    hashes: Mapping[str, str]


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the 8 bytes of the length and the padded header."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for entry in entries:
        stop = position + entry.flat.nbytes
        table[entry.key] = {
            "dtype": NAMES_OF_DTYPES[entry.flat.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(len(text) + 8) // _ALIGN_BYTES) * _ALIGN_BYTES - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Widest elements first, so that every entry is aligned to its elements."""
    return sorted(entries, key=lambda entry: -entry.flat.dtype.itemsize)


def file_bytes(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Return how long the file will be."""
    return len(_header(entries, metadata)) + sum(entry.flat.nbytes for entry in entries)


@torch.no_grad()
def write_file(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Written:
    """Write a new file and bring it to the disk.

    Raises:
        OSError: the disk is full, the file exists, or cannot be written.
    """
    ordered = _ordered(entries)
    head = _header(ordered, metadata)
    hashes: dict[str, str] = {}
    with BlockWriter(path) as writer:
        for _ in writer.write(torch.frombuffer(bytearray(head), dtype=torch.uint8)):
            pass
        for entry in ordered:
            digest, held = xxhash.xxh3_128(), entry.held or Held(entry.flat)
            for block in writer.write(held):
                digest.update(block)
            held.let_go()
            hashes[entry.key] = digest.hexdigest()
    facts = FileFacts(bytes=writer.num_bytes, header=xxhash.xxh3_128_hexdigest(head))
    return Written(facts=facts, hashes=hashes)


@dataclass(frozen=True, kw_only=True)
class _Place:
    dtype: torch.dtype
    numel: int
    offset: int  # of its first byte in the file

    @property
    def num_bytes(self) -> int:
        """Length."""
        return self.numel * self.dtype.itemsize


class TensorFile:
    """An open file whose header was checked against the manifest.

    Args:
        folder: of the checkpoint.
        name: of the file.
        facts: from the manifest.
        save_id: of the checkpoint, which the file must repeat.
        shared: memory and threads for reading; None: of its own.

    Raises:
        CheckpointError: the file is missing, of another length, damaged in its header, or of another save.
    """

    def __init__(
        self, folder: Path, name: str, facts: FileFacts, save_id: str, *, shared: ReadBlocks | None = None
    ) -> None:
        self.path = folder / name
        self._file = open_inside(folder, name)
        self._reader = BlockReader(self._file, shared)
        try:
            self.metadata, self._places = self._read_header(facts)
            if self.metadata.get("save_id") != save_id:
                raise CheckpointError(
                    f"{self.path}: belongs to another save: it says {ascii(self.metadata.get('save_id'))[:40]}, "
                    f"the manifest {save_id}"
                )
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()
        os.close(self._file)

    def check_entry(self, key: str, dtype: torch.dtype, numel: int) -> None:
        """Check that an entry is there as the manifest says.

        Raises:
            CheckpointError: it is not.
        """
        place = self._places.get(key)
        if place is None or place.dtype != dtype or place.numel != numel:
            raise CheckpointError(f"{self.path}: has no entry {key} of {numel} elements of {dtype}")

    def hash(self, key: str) -> str:
        """Return the hash of the bytes of one entry.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return self.hashes([key])[key]

    def hashes(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the hashes of the bytes of entries, read in the order of the file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        ordered = sorted(keys, key=lambda key: self._places[key].offset)
        digests = [xxhash.xxh3_128() for _ in ordered]
        places = [self._places[key] for key in ordered]
        try:
            for number, block in self._reader.read([(place.offset, place.num_bytes) for place in places]):
                digests[number].update(block.numpy().data)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return {key: digest.hexdigest() for key, digest in zip(ordered, digests, strict=True)}

    @torch.no_grad()
    def read(self, key: str, start: int, out: Tensor) -> None:
        """Fill ``out`` [n] (any device and dtype) with the entry's elements from ``start`` on.

        Raises:
            CheckpointError: it cannot be read.
        """
        place = self._places[key]
        assert 0 <= start <= start + out.numel() <= place.numel, f"{key} has {place.numel} elements"
        position, size = 0, place.dtype.itemsize
        try:
            for _, block in self._reader.read([(place.offset + start * size, out.numel() * size)]):
                values = block.view(place.dtype)
                out[position : position + values.numel()].copy_(values)
                position += values.numel()
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: {key}: {error}") from None

    def _read_header(self, facts: FileFacts) -> tuple[dict[str, str], dict[str, _Place]]:
        num_bytes = os.fstat(self._file).st_size
        if num_bytes != facts.bytes:
            raise CheckpointError(
                f"{self.path}: has {num_bytes} bytes, expected {facts.bytes}: it was cut off, or grew"
            )
        length_raw = os.pread(self._file, 8, 0)
        length = int.from_bytes(length_raw, "little")
        if length > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise CheckpointError(f"{self.path}: its header claims {length} bytes, the file has {num_bytes}")
        raw = os.pread(self._file, length, 8)
        if xxhash.xxh3_128_hexdigest(length_raw + raw) != facts.header:
            raise CheckpointError(f"{self.path}: its header is damaged")
        try:
            table = json.loads(raw)
            metadata = {str(key): str(text) for key, text in table.pop("__metadata__", {}).items()}
            places = {key: _place(fields, 8 + length, num_bytes) for key, fields in table.items()}
            _check_apart(places.values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header is malformed: {str(error)[:200]}") from None
        return metadata, places


def _check_apart(places: Iterable[_Place]) -> None:
    """Check that no byte belongs to two entries: a small file would else hold any number of large tensors."""
    position = 0
    for place in sorted(places, key=lambda place: (place.offset, place.num_bytes)):
        if place.offset < position and place.num_bytes:
            raise ValueError(f"entries overlap at byte {place.offset}")
        position = max(position, place.offset + place.num_bytes)


def _place(fields: Mapping[str, Any], base: int, num_bytes: int) -> _Place:
    dtype = DTYPES[str(fields["dtype"])]
    begin, end = fields["data_offsets"]
    shape = fields["shape"]
    sizes = [*shape, begin, end]
    if len(sizes) > MAX_DIMS + 2 or not all(type(n) is int and 0 <= n < MAX_COUNT for n in sizes):
        raise ValueError(f"entry {str(fields)[:100]}")
    numel = math.prod(shape)
    if end - begin != numel * dtype.itemsize or base + end > num_bytes:
        raise ValueError(f"entry {str(fields)[:100]} in a file of {num_bytes} bytes")
    return _Place(dtype=dtype, numel=numel, offset=base + begin)


assert BLOCK_BYTES % 16 == 0, "no element may be cut by a block"


def each_once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict as a plain safetensors file holds it: on the CPU, of names that share a tensor the first."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.detach().cpu().contiguous()
    return tensors
