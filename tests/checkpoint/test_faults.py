"""Something goes wrong on one rank at every point of a save and a load: all ranks tell it, nothing is lost."""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint.folder import find_checkpoints, read_latest
from shardwise.checkpoint.source import TensorSource
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.base import Comm
from shardwise.errors import CheckpointError, ConfigError
from shardwise.faults import POINTS, fault_point, visits
from shardwise.testing.ranks import run_ranks

from .case import assert_same, build, state_of, train

BEFORE = ("save.begin", "save.tmp_made", "save.after_first_file", "save.before_manifest", "save.before_rename")
AFTER = ("save.after_rename", "save.before_latest", "save.after_latest")
BY_ALL = ("save.begin", "save.after_first_file")  # the others are rank 0's work
LOADS = ("load.begin", "load.after_manifest", "load.after_verify", "load.after_place")
SAVES = [
    (point, rank, action)
    for point in BEFORE + AFTER
    for rank in ((0, 1) if point in BY_ALL else (0,))
    for action in ("raise", "enospc")
]


@pytest.fixture(autouse=True)
def _count_anew() -> Iterator[None]:
    visits.forget()
    yield
    visits.forget()


def told(call: Any) -> str:
    """Return what a call that must fail says, without what names the save."""
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize(("point", "rank", "action"), SAVES)
def test_a_save_that_fails(
    point: str, rank: int, action: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_FAULT", f"{point}:{rank}:2:{action}")

    def body(mesh: Mapping[str, Comm]) -> tuple[str, Any]:
        net, optimizer = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path, tag="first", step=0)
        train(net, optimizer, mesh, range(1))

        def save() -> None:
            shardwise.save_checkpoint(net, tmp_path, tag="second", background=background)
            shardwise.wait_for_save(net)

        text = told(save)
        council = mesh["data"]  # all ranks look at the folder before anybody goes on
        council.announce("seen", json.dumps([sorted(path.name for path in tmp_path.iterdir()), read_latest(tmp_path)]))
        seen = council.announced("seen", 10)[0]
        council.announce("looked", "")
        council.announced("looked", 10)
        train(net, optimizer, mesh, range(1, 2))
        expected = state_of(net, buffers=False)
        shardwise.save_checkpoint(net, tmp_path, tag="second", overwrite=True)
        shardwise.load_checkpoint(net, tmp_path, rng=False)
        assert_same(state_of(net, buffers=False), expected)
        return text, json.loads(seen)

    (first, seen), (second, _) = run_ranks(2, body)
    assert first == second
    assert f"rank {rank}: " in first
    assert ("a fault was asked for" if action == "raise" else "No space left") in first
    names, latest = seen
    if point in BEFORE:
        assert "nothing was saved" in first or "was not saved" in first
        assert (names, latest) == (["first", "latest"], "first")
    else:
        assert "was saved, but `latest` does not name it" in first
        assert names == ["first", "latest", "second"]
        assert latest == ("second" if point == "save.after_latest" else "first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second"]
    assert not [each for each in find_checkpoints(tmp_path) if each.problem]


@pytest.mark.parametrize("action", ["raise", "enospc"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", LOADS)
def test_a_load_that_fails(point: str, rank: int, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_FAULT", f"{point}:{rank}:1:{action}")

    def body(mesh: Mapping[str, Comm]) -> str:
        net, optimizer = build(mesh, 2)
        train(net, optimizer, mesh, range(1))
        shardwise.save_checkpoint(net, tmp_path)
        saved = state_of(net, buffers=False)
        train(net, optimizer, mesh, range(1, 2))
        before = state_of(net, buffers=False)
        text = told(lambda: shardwise.load_checkpoint(net, tmp_path, rng=False))
        assert_same(state_of(net, buffers=False), saved if point == "load.after_place" else before)
        shardwise.load_checkpoint(net, tmp_path, rng=False)
        assert_same(state_of(net, buffers=False), saved)
        return text

    first, second = run_ranks(2, body)
    assert first == second
    assert f"rank {rank}: " in first


def test_a_file_that_cannot_be_read_any_more_wakes_the_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TensorSource.read

    def broken(self: TensorSource, item: Any, start: int, out: torch.Tensor) -> None:
        if threading.current_thread().name == "rank 1" and item.kind == "optim":
            raise CheckpointError("input/output error")
        read(self, item, start, out)

    monkeypatch.setattr(TensorSource, "read", broken)

    def body(mesh: Mapping[str, Comm]) -> None:
        net, optimizer = build(mesh, 0)
        train(net, optimizer, mesh, range(1))
        shardwise.save_checkpoint(net, tmp_path)
        shardwise.load_checkpoint(net, tmp_path)

    answers = run_ranks(2, body, timeout=20, return_exceptions=True)
    assert all(isinstance(answer, shardwise.ShardwiseError) for answer in answers), answers
    assert any("holds parts of it" in str(answer) for answer in answers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_byte_that_changes_on_the_disk_is_found_by_the_load(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_FAULT", f"save.after_first_file:{rank}:1:flip")

    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 3)
        path = shardwise.save_checkpoint(net, tmp_path)
        before = state_of(net)
        text = told(lambda: shardwise.load_checkpoint(net, tmp_path))
        assert_same(state_of(net), before)
        assert told(lambda: verify_files(path))
        return text

    first, second = run_ranks(2, body)
    assert first == second
    assert "is damaged" in first


def test_a_manifest_that_changes_on_the_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_FAULT", "save.before_rename:0:1:flip")

    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path)
        return told(lambda: shardwise.load_checkpoint(net, tmp_path))

    first, second = run_ranks(2, body)
    assert first == second
    assert "manifest.json" in first


@pytest.mark.parametrize("text", ["x", "save.begin:0:1", "nowhere:0:1:kill", "save.begin:a:1:kill", "load.begin:0:1:x"])
def test_a_fault_that_nobody_understands_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_FAULT", text)
    with pytest.raises(ConfigError, match=r"point:rank:occurrence:action"):
        fault_point("save.begin", 0)


def test_every_point_is_tried() -> None:
    assert set(BEFORE + AFTER + LOADS) == POINTS
