"""Damaged and hostile checkpoints: one clean error on all ranks and an untouched model, or a load that succeeds."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.checkpoint.folder import read_latest
from shardwise.checkpoint.manifest import MAX_MANIFEST_BYTES
from shardwise.checkpoint.names import LATEST, MANIFEST, open_inside, rank_file
from shardwise.comm.base import Comm, flat_rank
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError, ConfigError
from shardwise.testing.ranks import run_ranks

from .damage import (
    Files,
    Rank,
    Tree,
    header_of,
    mutations,
    read_files,
    seal,
    unseal,
    with_data,
    with_header,
    write_files,
)

pytestmark = pytest.mark.filterwarnings("ignore:load_checkpoint")  # optimizer state that is fresh, or dropped

FIRST = rank_file(0)
FEW, MANY = 300, 10_000
MANY_TOGETHER = 600


@dataclass(frozen=True)
class Saved:
    """Two checkpoints of one run, as files."""

    good: Files
    other: Files


@pytest.fixture(scope="module")
def alone() -> Rank:
    return Rank({"data": LocalComm()})


@pytest.fixture(scope="module")
def saved(alone: Rank, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    alone.save(folder, "good")
    alone.step(2)
    alone.save(folder, "other")
    return Saved(read_files(folder / "good"), read_files(folder / "other"))


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved_by_two")

    def save(mesh: Mapping[str, Comm]) -> None:
        rank = Rank(mesh, own_generators=False)
        rank.save(folder, "good")
        rank.step(2)
        rank.save(folder, "other")

    run_ranks(2, save)
    return Saved(read_files(folder / "good"), read_files(folder / "other"))


def refused(rank: Rank, folder: Path, files: Files, **options: Any) -> str:
    """Load damaged files, which must be refused."""
    write_files(folder / "bad", files)
    said = rank.attempt(folder, "bad", **options)
    assert said
    return said


def edited(files: Files, edit: Callable[[Tree], None]) -> Files:
    """Edit the manifest; its hash is right."""
    fields = unseal(files[MANIFEST])
    edit(fields)
    return {**files, MANIFEST: seal(fields)}


def stored(fields: Tree, kind: str, name: str, state: str = "") -> Tree:
    """Return the entry of a tensor."""
    return next(i for i in fields["stored"] if (i["kind"], i["name"], i["state"]) == (kind, name, state))


def flipped(raw: bytes, at: int) -> bytes:
    at %= len(raw)
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda s: {**s.good, FIRST: s.good[FIRST][:-1]}, "cut off"),
        (lambda s: {**s.good, FIRST: s.good[FIRST] + b"\0"}, "or grew"),
        (lambda s: {**s.good, FIRST: b""}, "cut off"),
        (lambda s: {MANIFEST: s.good[MANIFEST]}, "No such file"),
        (lambda s: {FIRST: s.good[FIRST]}, "has no manifest.json"),
        (lambda s: {}, "has no manifest.json"),
        (lambda s: {**s.good, FIRST: s.other[FIRST]}, "header is damaged|another save"),
        (lambda s: {**s.other, MANIFEST: s.good[MANIFEST]}, "header is damaged|another save"),
        (lambda s: {**s.good, FIRST: flipped(s.good[FIRST], 0)}, "header is damaged"),
        (lambda s: {**s.good, FIRST: flipped(s.good[FIRST], 7)}, "its header claims"),
        (lambda s: {**s.good, FIRST: flipped(s.good[FIRST], 100)}, "header is damaged"),
        (lambda s: {**s.good, FIRST: s.good[FIRST][:8].ljust(len(s.good[FIRST]), b"\xff")}, "header"),
        (
            lambda s: {**s.good, FIRST: (1 << 60).to_bytes(8, "little") + s.good[FIRST][8:]},
            "claims 1152921504606846976",
        ),
        (lambda s: {**s.good, MANIFEST: s.good[MANIFEST][:-3]}, "cut off"),
        (lambda s: {**s.good, MANIFEST: b""}, "is no manifest"),
        (lambda s: {**s.good, MANIFEST: s.good[FIRST]}, "is no manifest"),
        (lambda s: {**s.good, MANIFEST: flipped(s.good[MANIFEST], 20)}, "its hash does not fit"),
        (lambda s: {**s.good, MANIFEST: flipped(s.good[MANIFEST], 4000)}, "its hash does not fit"),
    ],
)
def test_damaged_files_are_refused(
    damage: Callable[[Saved], Files], told: str, verify: bool, alone: Rank, saved: Saved, tmp_path: Path
) -> None:
    assert re.search(told, refused(alone, tmp_path, damage(saved), verify=verify))


def test_every_byte_of_the_payload_counts(alone: Rank, saved: Saved, tmp_path: Path) -> None:
    raw = saved.good[FIRST]
    header, data = header_of(raw)
    base = len(raw) - len(data)
    for key, fields in header.items():
        if key != "__metadata__" and fields["data_offsets"][0] < fields["data_offsets"][1]:
            at = base + random.Random(key).randrange(*fields["data_offsets"])
            assert f"{key} is damaged" in refused(alone, tmp_path, {**saved.good, FIRST: flipped(raw, at)})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *(
            (text, "no tag")
            for text in ("", "\n", "..", "../good", ".", "/etc", "good\0", "a" * 129, "a b", "good\n\n")
        ),
        *((text, "no tag") for text in ("latest", ".tmp-good", "..\\good", "good/", "\udce9")),
        ("x" * 300, "has 300 bytes"),
        ("absent", "there is no checkpoint"),
    ],
)
def test_latest_leads_nowhere_else(text: str, told: str, alone: Rank, saved: Saved, tmp_path: Path) -> None:
    write_files(tmp_path / "in" / "good", saved.good)
    write_files(tmp_path / "good", saved.good)
    (tmp_path / "in" / LATEST).write_bytes(text.encode(errors="surrogateescape"))
    assert told in alone.attempt(tmp_path / "in")
    (tmp_path / "in" / LATEST).write_text("good")
    assert alone.attempt(tmp_path / "in") == ""


@pytest.mark.parametrize("tag", ["..", "../good", "/etc", "a/b", "a\0", ".", "", "a" * 200, "\udce9"])
def test_tags_lead_nowhere_else(tag: str, alone: Rank, saved: Saved, tmp_path: Path) -> None:
    write_files(tmp_path / "good", saved.good)
    (tmp_path / "in").mkdir()
    assert "tag" in alone.attempt(tmp_path / "in", tag)


def _link(path: Path) -> None:
    moved = path.with_name(f"real-{path.name}")
    path.rename(moved)
    path.symlink_to(moved)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("place", [LATEST, f"good/{MANIFEST}", f"good/{FIRST}", "good"])
@pytest.mark.parametrize("change", [_link, _fifo, _folder, _device, _loop])
def test_only_regular_files_in_a_real_folder(
    change: Callable[[Path], None], place: str, alone: Rank, saved: Saved, tmp_path: Path
) -> None:
    write_files(tmp_path / "good", saved.good)
    (tmp_path / LATEST).write_text("good\n")
    if place == "good" and change is not _link:
        shutil.rmtree(tmp_path / "good")
        (tmp_path / "good").touch()
    change(tmp_path / place)
    assert alone.attempt(tmp_path)
    assert alone.attempt(tmp_path, verify=False)


def test_folder_that_is_a_file_or_absent(alone: Rank, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "absent", "file/in", "a" * 300, "nul\0"):
        assert alone.attempt(tmp_path / name)
        assert alone.attempt(tmp_path / name, "tag")


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/etc/passwd", "a/b", "a\0b", "a\\b", "a" * 300])
def test_names_of_files_lead_nowhere_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_inside(tmp_path, name)


def test_saves_do_not_follow_links(alone: Rank, saved: Saved, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write_files(outside, saved.good)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good").symlink_to(outside)
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="left alone"):
            alone.save(folder, "good", overwrite=overwrite)
    (folder / LATEST).symlink_to(outside / "victim")
    alone.save(folder, "new")
    assert read_files(outside) == saved.good
    assert read_latest(folder) == "new"
    with pytest.raises(ConfigError):
        alone.save(folder, "../outside", overwrite=True)


def test_manifest_over_its_cap(alone: Rank, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "good", saved.good)
    os.truncate(tmp_path / "good" / MANIFEST, MAX_MANIFEST_BYTES + 1)  # a hole: nothing is written, nothing may be read
    assert f"more than the {MAX_MANIFEST_BYTES}" in alone.attempt(tmp_path, "good")


TEXTS = {
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"3",
    "no text": b"",
    "not UTF-8": b'{"version":1,"tag":"\xff"}',
    "deep lists": b"[" * 200_000 + b"]" * 200_000,
    "deep objects": b'{"version":1,"a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "a huge number": b'{"version":1,"step":' + b"9" * 100_000 + b"}",
    "another version": b'{"version":2}',
    "no version": b"{}",
    "a version that is a list": b'{"version":[1]}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_texts_of_manifests_with_a_right_hash(text: bytes, alone: Rank, saved: Saved, tmp_path: Path) -> None:
    refused(alone, tmp_path, {**saved.good, MANIFEST: seal(text)})


def test_deep_user_state(alone: Rank, saved: Saved, tmp_path: Path) -> None:
    body = saved.good[MANIFEST].split(b"\n")[1]
    user = json.dumps(unseal(saved.good[MANIFEST])["values"]["user"], separators=(",", ":")).encode()
    assert user in body
    for deep in (b"[" * 5000 + b"]" * 5000, b'{"$tuple":[' * 5000 + b"]}" * 5000):
        refused(alone, tmp_path, {**saved.good, MANIFEST: seal(body.replace(user, deep))})


def test_duplicate_keys_mean_the_last(alone: Rank, saved: Saved, tmp_path: Path) -> None:
    body = saved.good[MANIFEST].split(b"\n")[1]
    twice = b'{"version":9,"tag":"..",' + body[1:]
    write_files(tmp_path / "a", {**saved.good, MANIFEST: seal(twice)})
    assert alone.attempt(tmp_path, "a") == ""
    assert "version 9" in refused(alone, tmp_path, {**saved.good, MANIFEST: seal(body[:-1] + b',"version":9}')})


def at(*path: Any, value: Any) -> Callable[[Tree], None]:
    """Return what puts a value at a place in the manifest."""

    def edit(fields: Tree) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return edit


def of(kind: str, name: str, state: str = "", /, **values: Any) -> Callable[[Tree], None]:
    """Return what puts values into the entry of a tensor."""
    return lambda fields: stored(fields, kind, name, state).update(values)


def boxes(kind: str, name: str, *given: Any, state: str = "") -> Callable[[Tree], None]:
    """Return what gives the one piece of a tensor other boxes."""
    return lambda fields: stored(fields, kind, name, state)["pieces"][0].update(boxes=list(given))


def group(index: int, **options: Any) -> Callable[[Tree], None]:
    """Return what puts options into a group."""
    return lambda fields: fields["values"]["optimizers"][0]["groups"][index]["options"].update(options)


def scalars(**values: Any) -> Callable[[Tree], None]:
    """Return what puts values into the state of one parameter."""
    return lambda fields: fields["values"]["optimizers"][0]["scalars"]["cube"].update(values)


def twice(kind: str, name: str) -> Callable[[Tree], None]:
    """Return what lists the one piece of a tensor twice."""

    def edit(fields: Tree) -> None:
        item = stored(fields, kind, name)
        item["pieces"] = item["pieces"] * 2

    return edit


def loss_scale(**values: Any) -> Callable[[Tree], None]:
    """Return what puts values into the state of the loss scale."""
    return lambda fields: fields["values"]["loss_scale"].update(values)


WHOLE = [[0, 0, 0], [3, 5, 6]]
EDITS: dict[str, Callable[[Tree], None]] = {
    "format": at("format", value="other"),
    "version": at("version", value="1"),
    "unknown field": at("more", value=1),
    "save id": at("save_id", value="0" * 32),
    "save id of another kind": at("save_id", value=["x"]),
    "tag that leads elsewhere": at("tag", value="../x"),
    "negative step": at("step", value=-1),
    "step that is too large": at("step", value=2**63),
    "step that is a fraction": at("step", value=1.5),
    "step that is a truth": at("step", value=True),
    "step that is no number": at("step", value=float("nan")),
    "no files": at("files", value=[]),
    "files with a negative length": at("files", 0, "bytes", value=-1),
    "files with a huge length": at("files", 0, "bytes", value=2**61),
    "many files": lambda fields: fields.update(files=fields["files"] * 100_001),
    "files that are absent": lambda fields: fields.update(files=fields["files"] * 2, rank_values=[{}, {}]),
    "too many values of ranks": at("rank_values", value=[{}, {}]),
    "no values of ranks": at("rank_values", value=[]),
    "values of ranks of another kind": at("rank_values", value=[{"user": {}}]),
    "values of ranks that are lists": at("rank_values", value=[{"generators": []}]),
    "parameter twice": lambda fields: fields["params"].append(fields["params"][0]),
    "alias that is another parameter": at("params", 0, "aliases", value=["cube"]),
    "parameter of another shape": at("params", 0, "shape", value=[2**60]),
    "parameter without a tensor": at("params", 0, "name", value="absent"),
    "tensor twice": lambda fields: fields["stored"].append(fields["stored"][0]),
    "unknown kind": of("param", "cube", kind="code"),
    "unknown dtype": of("param", "cube", dtype="F31"),
    "dtype of torch": of("param", "cube", dtype="torch.load"),
    "dtype of another length": of("param", "cube", dtype="F64"),
    "dtype of another kind": of("param", "cube", dtype="I32"),
    "shape of 2^60": of("param", "cube", shape=[2**60]),
    "shape whose product is huge": of("param", "cube", shape=[2**61] * 32),
    "shape of many dimensions": of("param", "cube", shape=[1] * 100_000),
    "shape that is negative": of("param", "cube", shape=[-3, -5, 6]),
    "state without a parameter": of("optim", "cube", "exp_avg", name="absent"),
    "state of another shape": of("optim", "cube", "exp_avg", shape=[90]),
    "state that is shorter": lambda fields: stored(fields, "optim", "cube", "exp_avg").update(
        shape=[1, 5, 6], pieces=[{"file": 0, "boxes": [[[0, 0, 0], [1, 5, 6]]], "hash": "0" * 32}]
    ),
    "state of no numbers": of("optim", "cube", "exp_avg", dtype="I32"),
    "state of another optimizer": of("optim", "cube", "exp_avg", optimizer=1),
    "state of another name": of("optim", "cube", "exp_avg", state="exp"),
    "state that is empty": of("optim", "cube", "exp_avg", pieces=[]),
    "boxes outside": boxes("param", "cube", [[0, 0, 1], [3, 5, 6]]),
    "boxes far outside": boxes("param", "cube", [[2**61, 0, 0], [3, 5, 6]]),
    "boxes with a gap": boxes("param", "cube", [[0, 0, 0], [1, 5, 6]], [[2, 0, 0], [1, 5, 6]]),
    "boxes that end early": boxes("param", "cube", [[0, 0, 0], [2, 5, 6]]),
    "boxes that overlap": boxes("param", "cube", WHOLE, [[0, 0, 0], [1, 5, 6]]),
    "boxes of other dimensions": boxes("param", "cube", [[0], [90]]),
    "boxes without dimensions": boxes("param", "cube", [[], []]),
    "boxes that are negative": boxes("param", "cube", [[-1, 0, 0], [4, 5, 6]]),
    "boxes that are empty": boxes("param", "cube", [[0, 0, 0], [0, 5, 6]]),
    "no boxes": boxes("param", "cube"),
    "many boxes": boxes("param", "cube", *[WHOLE] * 50_000),
    "state with a gap": boxes("optim", "cube", [[0, 0, 0], [2, 5, 6]], state="exp_avg"),
    "copy that is not whole": boxes("buffer", "table", [[0], [5]]),
    "piece twice": twice("param", "cube"),
    "copy twice": twice("buffer", "table"),
    "no pieces": of("param", "cube", pieces=[]),
    "no copies": of("buffer", "table", pieces=[]),
    "file that is absent": of("param", "cube", pieces=[{"file": 5, "boxes": [WHOLE], "hash": "0" * 32}]),
    "file that is negative": of("param", "cube", pieces=[{"file": -1, "boxes": [WHOLE], "hash": "0" * 32}]),
    "hash of another length": of("param", "cube", pieces=[{"file": 0, "boxes": [WHOLE], "hash": "0"}]),
    "buffer of another shape": of("buffer", "table", shape=[3, 2]),
    "empty buffer of another name": of("buffer", "nothing", name="nothings"),
    "empty buffer in a file without it": of("buffer", "nothing", pieces=[{"file": 0, "boxes": [], "hash": "0" * 32}]),
    "optimizer twice": lambda fields: fields["values"]["optimizers"].append(fields["values"]["optimizers"][0]),
    "no optimizer": at("values", "optimizers", value=[]),
    "class of an optimizer": at("values", "optimizers", 0, "class_name", value="os.system"),
    "learning rate that is a text": group(0, lr="0.1"),
    "learning rate that is a list": group(0, lr=[0.1]),
    "learning rate that is huge": group(0, lr=10**400),
    "learning rate that is nothing": group(0, lr=None),
    "too few betas": group(0, betas={"$tuple": [0.9]}),
    "betas that are texts": group(0, betas={"$tuple": ["0.9", "0.9"]}),
    "truth that is a number": group(0, maximize=7),
    "option that is malformed": group(0, eps={"$scalar": ["float32", "x"]}),
    "option in a tuple that is none": group(0, betas={"$tuple": 5}),
    "option of no dtype": group(0, eps={"$scalar": ["load", 1.0]}),
    "option of a quantized dtype": group(0, eps={"$scalar": ["quint8", 1.0]}),
    "option that is complex": group(0, eps={"$scalar": ["complex64", 1.0]}),
    "option that overflows": group(0, eps={"$scalar": ["int8", 10**30]}),
    "unknown option that is malformed": group(0, mine={"$pairs": [[[1], 2]]}),
    "step of a parameter that is a text": scalars(step="2"),
    "step of a parameter that is a list": scalars(step=[0] * 100_000),
    "step of a parameter that is negative": scalars(step={"$scalar": ["float32", -1.0]}),
    "step of a parameter that is no number": scalars(step={"$scalar": ["float32", {"$float": "nan"}]}),
    "step of a parameter that is huge": scalars(step={"$scalar": ["float64", 1e300]}),
    "step of a parameter that is nothing": scalars(step=None),
    "state of a parameter that is malformed": scalars(step={"$float": "1"}),
    "state of a parameter that is unknown and malformed": scalars(mine={"$dict": 1}),
    "state of a parameter that is new": scalars(mine=1),
    "no state that is a number": lambda fields: fields["values"]["optimizers"][0]["scalars"].pop("cube"),
    "user state that is malformed": at("values", "user", value={"$tuple": 1}),
    "user state with a malformed key": at("values", "user", value={"$pairs": [[{"$dict": {}}, 1]]}),
    "number of steps": at("values", "num_steps", value=-1),
    "loss scale without keys": at("values", "loss_scale", value={}),
    "no loss scale": at("values", "loss_scale", value=None),
    "loss scale that is a text": at("values", "loss_scale", value="x"),
    "loss scale of 0": loss_scale(scale=0.0),
    "loss scale that is infinite": loss_scale(scale=float("inf")),
    "loss scale that is no number": loss_scale(scale=float("nan")),
    "clean steps that are no number": loss_scale(clean_steps=float("nan")),
    "clean steps that are infinite": loss_scale(clean_steps=float("inf")),
    "tolerance that is infinite": loss_scale(tolerance=float("-inf")),
    "object that is a number": at("values", "objects", "scheduler", value=5),
    "object that is a text": at("values", "objects", "scheduler", value="text"),
    "object that is malformed": at("values", "objects", "scheduler", "gamma", value={"$float": "x"}),
    "object whose method is a number": at("values", "objects", "scheduler", "step", value=5),
    **{
        f"object with {key} {value!r:.20}": at("values", "objects", "scheduler", key, value=value)
        for key, value in [
            ("last_epoch", "2"),
            ("last_epoch", True),
            ("last_epoch", None),
            ("last_epoch", {"$float": "nan"}),
            ("last_epoch", {"$float": "inf"}),
            ("last_epoch", {"$tuple": [2]}),
            ("last_epoch", 10**400),
            ("_step_count", [2]),
            ("gamma", "0.1"),
            ("gamma", {"$float": "nan"}),
            ("step_size", 0),
            ("step_size", -3),
            ("step_size", {"x": 3}),
            ("base_lrs", 0.1),
            ("base_lrs", ["0.1"]),
            ("_last_lr", [None]),
            ("_is_initial", 2),
        ]
    },
    "object without its position": lambda fields: fields["values"]["objects"]["scheduler"].pop("last_epoch"),
    "object with another optimizer": at("values", "objects", "scheduler", "optimizer", value=None),
    "no object": at("values", "objects", value={}),
    "state of a module that is malformed": at("values", "extra_state", "", value={"a": {"$tuple": 0}}),
    "state of a module that is refused": at("values", "extra_state", "", value={"b": 0}),
    "state of a module that takes none": at("values", "extra_state", "norm", value={"a": 0}),
    "no generators": at("values", "generators", value={}),
    "Python's generator of another version": at("values", "generators", "python", value=[9, None]),
    "Python's generator with a text": at("values", "generators", "python", value=[3, "text"]),
    "Python's generator that is short": at("values", "generators", "python", value=[3]),
    "Python's generator that is a number": at("values", "generators", "python", value=3),
    "numpy's generator outside": at("values", "generators", "numpy", value=[625, 0, 0.0]),
    "numpy's generator before": at("values", "generators", "numpy", value=[-1, 0, 0.0]),
    "numpy's generator with a text": at("values", "generators", "numpy", value=["0", 0, 0.0]),
    "numpy's generator with a list": at("values", "generators", "numpy", value=[0, 0, [1]]),
    "state of a generator that is short": of("rng", "torch", shape=[16]),
    "state of a generator of another dtype": of("rng", "torch", dtype="I8"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_hostile_manifests_with_a_right_hash(
    edit: Callable[[Tree], None], alone: Rank, saved: Saved, tmp_path: Path
) -> None:
    damaged = edited(saved.good, edit)
    refused(alone, tmp_path, damaged)
    alone.attempt(tmp_path, "bad", verify=False)  # refused as well, or loaded
    write_files(tmp_path / "good", saved.good)
    assert alone.attempt(tmp_path, "good") == ""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch", lambda raw: raw.__setitem__(slice(None), bytes(len(raw)))),
        ("torch", lambda raw: raw.__setitem__(slice(None), b"\xff" * len(raw))),
        ("torch", lambda raw: raw.__setitem__(slice(8, 16), b"\xff" * 8)),
        ("python", lambda raw: raw.__setitem__(slice(0, 8), b"\xff" * 8)),
        ("python", lambda raw: raw.__setitem__(slice(-8, None), (625).to_bytes(8, "little"))),
        ("python", lambda raw: raw.__setitem__(slice(-8, None), b"\xff" * 8)),
    ],
)
def test_states_of_generators_with_a_right_hash(
    name: str, change: Callable[[bytearray], None], alone: Rank, saved: Saved, tmp_path: Path
) -> None:
    assert "generator" in refused(alone, tmp_path, with_data(saved.good, "rng", name, change))


def entry(key: str, **values: Any) -> Callable[[Tree], None]:
    """Return what puts values into an entry of a header."""
    return lambda header: header[key].update(values)


HEADERS: dict[str, Callable[[Tree], None]] = {
    "no entry": lambda header: header.pop("param.cube"),
    "no entry of a buffer": lambda header: header.pop("buffer.table"),
    "no entry of a state": lambda header: header.pop("optim.0.exp_avg.cube"),
    "no entry of a generator": lambda header: header.pop("rng.torch"),
    "entry that is a list": lambda header: header.update({"param.cube": []}),
    "unknown dtype": entry("param.cube", dtype="F31"),
    "dtype that is a list": entry("param.cube", dtype=["F32"]),
    "shape that is a text": entry("param.cube", shape="90"),
    "shape of 2^60": entry("param.cube", shape=[2**60]),
    "shape that is long": entry("param.cube", shape=[2**61] * 100_000),
    "shape of long numbers": entry("param.cube", shape=[10**4000] * 300),
    "shape that is negative": entry("param.cube", shape=[-90]),
    "offsets that are negative": entry("param.cube", data_offsets=[-360, 0]),
    "offsets outside": entry("param.cube", data_offsets=[2**60, 2**60 + 360]),
    "offsets that are fractions": entry("param.cube", data_offsets=[0.0, 360.0]),
    "offsets that are turned": entry("param.cube", data_offsets=[360, 0]),
    "one offset": entry("param.cube", data_offsets=[0]),
    "no offsets": lambda header: header["param.cube"].pop("data_offsets"),
    "another save": lambda header: header["__metadata__"].update(save_id="0" * 32),
    "another save with half a letter": lambda header: header["__metadata__"].update(save_id="\ud800"),
    "no metadata": lambda header: header.pop("__metadata__"),
    "metadata that is a list": lambda header: header.update(__metadata__=[]),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("edit", HEADERS.values(), ids=HEADERS.keys())
def test_hostile_headers_with_a_right_hash(
    edit: Callable[[Tree], None], verify: bool, alone: Rank, saved: Saved, tmp_path: Path
) -> None:
    header, _ = header_of(saved.good[FIRST])
    edit(header)
    refused(alone, tmp_path, with_header(saved.good, 0, header), verify=verify)


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000])
def test_texts_of_headers_with_a_right_hash(text: bytes, alone: Rank, saved: Saved, tmp_path: Path) -> None:
    refused(alone, tmp_path, with_header(saved.good, 0, text))


def loads(seed: int, count: int, rank: Rank, saved: Saved, folder: Path) -> int:
    """Load mutations one after the other; return how many were refused. The whole one always loads."""
    write_files(folder / "good", saved.good)
    count_refused = 0
    for number, (what, files) in enumerate(mutations(seed, count, saved.good, saved.other)):
        write_files(folder / "bad", files)
        try:
            said = rank.attempt(folder, "bad", verify=number % 8 != 0)
            assert said or not rank.attempt(folder, "good", moves=False), "the whole checkpoint is refused"
        except Exception as error:
            raise AssertionError(f"mutation {what}: {type(error).__name__}: {error}") from error
        count_refused += bool(said)
    return count_refused


def loads_together(seed: int, count: int, saved: Saved, folder: Path) -> None:
    """Load mutations on two ranks, which must say the same each time."""
    made = []
    for number, (what, files) in enumerate(mutations(seed, count, saved.good, saved.other)):
        write_files(folder / f"bad{number}", files)
        made.append(what)

    def body(mesh: Mapping[str, Comm]) -> list[str]:
        rank = Rank(mesh, stage=3, own_generators=False)
        told = []
        for number, what in enumerate(made):
            try:
                told.append(rank.attempt(folder, f"bad{number}"))
            except Exception as error:
                raise AssertionError(f"mutation {what} on rank {flat_rank(mesh)}: {error!r}") from error
        return told

    first, second = run_ranks(2, body, timeout=300)
    for what, one, other in zip(made, first, second, strict=True):
        assert one == other, what
    assert count // 2 < sum(map(bool, first)) < count


def test_some_mutations(alone: Rank, saved: Saved, tmp_path: Path) -> None:
    assert FEW // 2 < loads(0, FEW, alone, saved, tmp_path) < FEW


def test_some_mutations_on_two_ranks(saved_by_two: Saved, tmp_path: Path) -> None:
    loads_together(0, 100, saved_by_two, tmp_path)


def test_what_one_rank_alone_sees_is_told_by_both(saved_by_two: Saved, tmp_path: Path) -> None:
    def only(what: str, value: Any) -> Callable[[Tree], None]:
        return at("rank_values", 1, value={what: value})

    values = unseal(saved_by_two.good[MANIFEST])["values"]
    damaged = {
        "objects": {"scheduler": 5},
        "extra_state": {"": {"b": 0}},
        "generators": {**values["generators"], "python": [3, "text"]},
    }
    for what, value in damaged.items():
        write_files(tmp_path / what, edited(saved_by_two.good, only(what, value)))
    write_files(tmp_path / "good", saved_by_two.good)

    def body(mesh: Mapping[str, Comm]) -> list[str]:
        rank = Rank(mesh, own_generators=False)
        return [rank.attempt(tmp_path, tag) for tag in (*damaged, "good")]

    first, second = run_ranks(2, body)
    assert first == second
    assert [bool(each) for each in first] == [True, True, True, False]
    assert all("rank 1" in each for each in first[:-1])


def test_no_code_no_path_and_little_memory(tmp_path: Path) -> None:
    root = Path(shardwise.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.checkpoint.damage", str(tmp_path), "256", "7000", "100"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["refused"] > 50
    allowed = {MANIFEST, *(rank_file(n) for n in range(8))}
    for event in told["touched"]:
        name, _, rest = event.partition(" ")
        path, _, flags = rest.rpartition(" ")
        assert name == "open", event
        assert path in allowed or path == str(tmp_path / "bad") or path.isdecimal(), event  # a number: is open already
        assert not int(flags, 16) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), event


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_many_mutations(part: int, alone: Rank, saved: Saved, tmp_path: Path) -> None:
    loads(10_000 + part * MANY // 4, MANY // 4, alone, saved, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_many_mutations_on_two_ranks(saved_by_two: Saved, tmp_path: Path) -> None:
    loads_together(50_000, MANY_TOGETHER, saved_by_two, tmp_path)
