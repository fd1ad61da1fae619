"""Is every byte of a checkpoint what was written? The work is dealt out to ranks; each entry is hashed once."""

from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.folder import read_manifest
from shardwise.checkpoint.manifest import DTYPES, Manifest, Piece, Stored
from shardwise.checkpoint.tensorfile import TensorFile
from shardwise.errors import CheckpointError

__all__ = ["verify_files", "verify_share"]

_SHOWN = 8


def verify_files(path: Path, rank: int = 0, num_ranks: int = 1) -> Manifest:
    """Check this rank's share of the checkpoint in ``path``; return its manifest.

    Raises:
        CheckpointError: lists what is damaged or missing.
    """
    manifest = read_manifest(path)
    verify_share(path, manifest, rank, num_ranks)
    return manifest


def verify_share(path: Path, manifest: Manifest, rank: int, num_ranks: int) -> None:
    """Check this rank's share: lengths, headers, the place of each entry, and its hash.

    Raises:
        CheckpointError: lists what is damaged or missing.
    """
    problems: list[str] = []
    by_file: dict[int, list[tuple[Stored, Piece]]] = {}
    for item, piece in _share(manifest, rank, num_ranks):
        by_file.setdefault(piece.file, []).append((item, piece))
    for index in range(rank, manifest.num_ranks, num_ranks):  # a file without entries is looked at, too
        by_file.setdefault(index, [])
    for index, pieces in sorted(by_file.items()):
        try:
            file = TensorFile(path, manifest.file_name(index), manifest.files[index], manifest.save_id)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        try:
            problems += _damaged(file, pieces)
        finally:
            file.close()
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError("; ".join(problems[:_SHOWN]) + more)


def _damaged(file: TensorFile, pieces: list[tuple[Stored, Piece]]) -> Iterator[str]:
    expected: dict[str, str] = {}
    for item, piece in pieces:
        start, stop = item.range_of(piece)
        try:
            file.check_entry(item.key, DTYPES[item.dtype], stop - start)
        except CheckpointError as error:
            yield str(error)
        else:
            expected[item.key] = piece.hash
    try:
        found = file.hashes(list(expected))
    except CheckpointError as error:
        yield str(error)
        return
    for key, value in expected.items():
        if found[key] != value:
            yield f"{file.path}: {key} is damaged: its hash is not the manifest's"


def _share(manifest: Manifest, rank: int, num_ranks: int) -> Iterator[tuple[Stored, Piece]]:
    """Yield the entries whose first byte lies in this rank's part of all bytes, file by file."""
    entries = [
        (piece.file, number, item, piece) for number, item in enumerate(manifest.stored) for piece in item.pieces
    ]
    entries.sort(key=lambda entry: entry[:2])
    sizes = [_num_bytes(item, piece) for _, _, item, piece in entries]
    total, position = sum(sizes), 0
    for (_, _, item, piece), num_bytes in zip(entries, sizes, strict=True):
        if min(position * num_ranks // max(total, 1), num_ranks - 1) == rank:  # empty ones at the end are the last's
            yield item, piece
        position += num_bytes


def _num_bytes(item: Stored, piece: Piece) -> int:
    start, stop = item.range_of(piece)
    return (stop - start) * DTYPES[item.dtype].itemsize
