"""Checkpoints made to exhaust a machine or to confuse what lies below: refused soon, with little memory, or loaded."""

import json
import math
import mmap
import os
import struct
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from shardwise.checkpoint import blocks
from shardwise.checkpoint.blocks import BlockReader
from shardwise.checkpoint.folder import read_manifest
from shardwise.checkpoint.manifest import DTYPES
from shardwise.checkpoint.names import MANIFEST, rank_file
from shardwise.checkpoint.source import TensorSource
from shardwise.comm.base import Comm
from shardwise.comm.fake import LocalComm
from shardwise.testing.ranks import run_processes, run_ranks

from .damage import Files, Rank, header_of, read_files, seal, unseal, with_data, with_header, write_files

pytestmark = pytest.mark.filterwarnings("ignore:load_checkpoint")  # optimizer state that is fresh, or dropped

FIRST = rank_file(0)
PRIME = (1 << 61) - 1  # Python hashes whole numbers modulo this one
RETYPED = [("optim", "cube", "exp_avg"), ("param", "cube", ""), ("compute", "cube", "")]
RETYPED += [("buffer", "table", ""), ("buffer", "count", ""), ("buffer", "phase", ""), ("rng", "torch", "")]


@pytest.fixture(scope="module")
def alone() -> Rank:
    return Rank({"data": LocalComm()})


@pytest.fixture(scope="module")
def good(alone: Rank, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("saved")
    alone.save(folder, "good")
    return read_files(folder / "good")


def attempt(rank: Rank, folder: Path, files: Files, **options: Any) -> str:
    """Load; return the refusal. The whole one loads afterwards."""
    write_files(folder / "bad", files)
    return rank.attempt(folder, "bad", **options)


def with_user(files: Files, user: Any) -> Files:
    fields = unseal(files[MANIFEST])
    fields["values"]["user"] = user
    return {**files, MANIFEST: seal(fields)}


@pytest.mark.parametrize("following", [2, 624, 625, 1 << 32, (1 << 64) - 1])
def test_a_generator_that_would_read_beyond_its_state(following: int, alone: Rank, good: Files, tmp_path: Path) -> None:
    def change(raw: bytearray) -> None:
        struct.pack_into("=i", raw, 8, 624)
        struct.pack_into("=Q", raw, 16, following)

    assert "generator" in attempt(alone, tmp_path, with_data(good, "rng", "torch", change))


KEYS: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: n * PRIME,
    "tuples": lambda n: {"$tuple": [-1 - (n >> bit & 1) for bit in range(17)]},  # -1 and -2 have one hash
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_keys_chosen_for_their_hash(key: Callable[[int], Any], alone: Rank, good: Files, tmp_path: Path) -> None:
    pairs = [[key(n), 0] for n in range(50_000)]
    begin = time.monotonic()
    assert "malformed" in attempt(alone, tmp_path, with_user(good, {"$pairs": pairs}))
    assert time.monotonic() - begin < 10


def test_long_lists_and_large_dictionaries_load(alone: Rank, good: Files, tmp_path: Path) -> None:
    for user in ([0] * 1_000_000, {"$pairs": [[n, n] for n in range(100_000)]}, {str(n): n for n in range(100_000)}):
        begin = time.monotonic()
        assert attempt(alone, tmp_path, with_user(good, user)) == ""
        assert time.monotonic() - begin < 20


TEXTS: dict[str, tuple[tuple[Any, ...], Callable[[str], Any]]] = {
    **{
        "/".join(map(str, path)): (path, str)
        for path in (
            *(("params", 0, "name"), ("params", 0, "dtype"), ("stored", 0, "name"), ("stored", 0, "dtype"), ("time",)),
            *(("sharding",), ("library", "torch"), ("tag",), ("save_id",), ("format",)),
            *(("values", "optimizers", 0, "class_name"), ("values", "optimizers", 0, "groups", 0, "options", "lr")),
        )
    },
    "aliases": (("params", 0, "aliases"), lambda text: [text]),
    "mesh": (("mesh",), lambda text: [[text, 1]]),
    "object": (("values", "objects", "scheduler"), lambda text: {"$float": text}),
}


@pytest.mark.parametrize("text", ["\x1b[2J", "fine\nrank 0: fine", "\x9b2J", "\r", "\x7f"])
@pytest.mark.parametrize(("path", "value"), TEXTS.values(), ids=TEXTS.keys())
def test_no_text_of_a_checkpoint_drives_a_terminal(
    path: tuple[Any, ...], value: Callable[[str], Any], text: str, alone: Rank, good: Files, tmp_path: Path
) -> None:
    fields = unseal(good[MANIFEST])
    place = fields
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value(text)
    said = attempt(alone, tmp_path, {**good, MANIFEST: seal(fields)}, moves=False)
    assert said
    assert said.isprintable()


def test_entries_that_share_bytes(alone: Rank, good: Files, tmp_path: Path) -> None:
    header, _ = header_of(good[FIRST])
    header["optim.0.more.cube"] = header["optim.0.exp_avg.cube"]
    files = with_header(good, 0, header)
    for verify in (True, False):
        assert "overlap" in attempt(alone, tmp_path, files, verify=verify)


def test_a_generator_that_claims_a_file_of_holes(alone: Rank, good: Files, tmp_path: Path) -> None:
    header, data = header_of(good[FIRST])
    length = 1 << 41
    header["rng.more"] = {"dtype": "U8", "shape": [length], "data_offsets": [len(data), len(data) + length]}
    fields = unseal(good[MANIFEST])
    piece = {"file": 0, "boxes": [[[0], [length]]], "hash": "0" * 32}
    fields["stored"].append({"kind": "rng", "name": "more", "shape": [length], "dtype": "U8", "pieces": [piece]})
    files = with_header({**good, MANIFEST: seal(fields)}, 0, header)
    fields = unseal(files[MANIFEST])
    fields["files"][0]["bytes"] += length
    write_files(tmp_path / "bad", {**files, MANIFEST: seal(fields)})
    os.truncate(tmp_path / "bad" / FIRST, fields["files"][0]["bytes"])
    begin = time.monotonic()
    assert "rng.more has" in alone.attempt(tmp_path, "bad")
    assert time.monotonic() - begin < 5


def test_a_long_range_is_not_planned_ahead(tmp_path: Path) -> None:
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 1 << 43)
    opened = os.open(tmp_path / "holes", os.O_RDONLY)
    reader = BlockReader(opened)
    tracemalloc.start()
    try:
        number, block = next(reader.read([(0, 1 << 43)]))
        assert number == 0
        assert not block.any()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        reader.close()
        os.close(opened)


def test_reading_many_files_takes_the_memory_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(8, lambda mesh: Rank(mesh, 3, own_generators=False).save(tmp_path, "good"), timeout=60)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)  # so that there are several
    manifest = read_manifest(tmp_path / "good")
    made, mapped, before = 0, mmap.mmap, threading.active_count()

    def count(*args: Any) -> mmap.mmap:
        nonlocal made
        made += 1
        return mapped(*args)

    monkeypatch.setattr(mmap, "mmap", count)
    with TensorSource(tmp_path / "good", manifest) as source:
        for item in manifest.stored:
            source.read(item, 0, torch.zeros(item.numel, dtype=DTYPES[item.dtype]))
        assert made == 3
        assert threading.active_count() <= before + 2
    assert threading.active_count() <= before


def retyped(files: Files, kind: str, name: str, state: str, dtype: str) -> Files:
    """Give a tensor another dtype, with zeros of the right length and right hashes everywhere."""
    files, fields = dict(files), unseal(files[MANIFEST])
    for item in fields["stored"]:
        if (item["kind"], item["name"], item["state"]) != (kind, name, state):
            continue
        item["dtype"] = dtype
        key = f"optim.0.{state}.{name}" if kind == "optim" else f"{kind}.{name}"
        for piece in item["pieces"]:
            path = rank_file(piece["file"])
            header, data = header_of(files[path])
            new = bytes(math.prod(header[key]["shape"]) * DTYPES[dtype].itemsize)
            header[key] |= {"dtype": dtype, "data_offsets": [len(data), len(data) + len(new)]}
            text = json.dumps(header).encode()
            head = struct.pack("<Q", len(text)) + text
            files[path] = head + data + new
            piece["hash"] = xxhash.xxh3_128_hexdigest(new)
            fields["files"][piece["file"]] = {"bytes": len(files[path]), "header": xxhash.xxh3_128_hexdigest(head)}
    return {**files, MANIFEST: seal(fields)}


def make_retyped(folder: Path) -> None:
    """Save on two ranks; write a copy for every dtype of some tensors."""

    def save(mesh: Mapping[str, Comm]) -> None:
        Rank(mesh, own_generators=False).save(folder, "good")

    run_ranks(2, save)
    files = read_files(folder / "good")
    for kind, name, state in RETYPED:
        for dtype in DTYPES:
            write_files(folder / f"{kind}-{name}-{dtype}", retyped(files, kind, name, state, dtype))


def load_each(mesh: Mapping[str, Comm], folder: Path, stage: int) -> dict[str, str]:
    """Load every checkpoint of a folder; after each the whole one must load."""
    rank = Rank(mesh, stage, own_generators=False)
    told = {}
    for tag in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        told[tag] = rank.attempt(folder, tag, moves=False)
        assert rank.attempt(folder, "good", moves=False) == "", tag
    return told


def load_in_process(mesh: Mapping[str, Comm]) -> list[dict[str, str]]:
    (comm,) = mesh.values()
    with tempfile.TemporaryDirectory() as made:
        if comm.rank == 0:
            make_retyped(Path(made))
        comm.announce("folder", made if comm.rank == 0 else "")
        folder = Path(comm.announced("folder", 60)[0])
        told = [load_each(mesh, folder, stage) for stage in (0, 3)]
        comm.announce("done", "")
        comm.announced("done", 60)
    return [{tag: said.replace(str(folder), "") for tag, said in each.items()} for each in told]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.matrix)])
def test_tensors_of_every_dtype_load_or_are_refused(stage: int, tmp_path: Path) -> None:
    make_retyped(tmp_path)
    first, second = run_ranks(2, lambda mesh: load_each(mesh, tmp_path, stage), timeout=60)
    assert first == second
    refused = {tag for tag, said in first.items() if said}
    assert {"param-cube-I32", "optim-cube-BOOL", "rng-torch-I8"} <= refused
    assert not refused & {"param-cube-BF16", "param-cube-F64", "good", "buffer-count-I32"}


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_tensors_of_every_dtype_on_gloo(tmp_path: Path) -> None:
    first, second = run_processes(2, load_in_process, timeout=250)
    assert first == second
    make_retyped(tmp_path)
    for stage, told in zip((0, 3), first, strict=True):
        expected, _ = run_ranks(2, lambda mesh, stage=stage: load_each(mesh, tmp_path, stage), timeout=100)
        assert told == {tag: said.replace(str(tmp_path), "") for tag, said in expected.items()}
