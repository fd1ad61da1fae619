"""Saves beside training: isolated from later updates, their errors reach every rank at one step, none is lost."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.checkpoint.folder import find_checkpoints, read_latest
from shardwise.checkpoint.save import SaveJob
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.base import Comm, flat_rank
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError, RankMismatchError, StateError
from shardwise.managed import Managed
from shardwise.testing.ranks import run_ranks

from .case import assert_same, build, state_of, train, tree


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let saves stand still before they write, until the event is set."""
    go = threading.Event()
    write = SaveJob._write

    def waiting(self: SaveJob, temporary: Path) -> str:
        assert go.wait(30)
        return write(self, temporary)

    monkeypatch.setattr(SaveJob, "_write", waiting)
    yield go
    go.set()


@pytest.mark.parametrize("stage", range(4))
def test_later_updates_do_not_reach_the_snapshot(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(monkeypatch) as go:

        def body(mesh: Mapping[str, Comm]) -> tuple[Any, Any]:
            net, optimizer = build(mesh, stage)
            train(net, optimizer, mesh, range(2))
            expected = state_of(net, buffers=False)
            path = shardwise.save_checkpoint(net, tmp_path, background=True)
            assert path == tmp_path / "step-2"
            train(net, optimizer, mesh, range(2, 4))
            assert not path.exists()
            go.set()
            assert shardwise.wait_for_save(net) == path
            assert shardwise.wait_for_save(net) is None
            assert path.exists()
            shardwise.load_checkpoint(net, tmp_path, rng=False)
            return state_of(net, buffers=False), expected

        for found, expected in run_ranks(2, body):
            assert_same(found, expected)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-2"}


def test_training_goes_on_and_the_end_is_noticed_at_a_step(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, optimizer = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path, background=True)
        managed = Managed.of(net)
        for step in range(200):
            train(net, optimizer, mesh, range(step, step + 1))
            if managed.pending_save is None:
                break
        assert managed.pending_save is None
        assert not managed.before_step
        assert not managed.runtime.before_change

    run_ranks(3, body)
    assert read_latest(tmp_path) == "step-0"


@pytest.mark.parametrize("where", ["step", "wait", "save", "load"])
def test_an_error_reaches_the_same_call_on_every_rank(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SaveJob._write
    failures = [True]

    def failing(self: SaveJob, temporary: Path) -> str:
        if self.rank == 1 and self.options.tag == "bad" and failures.pop():
            failures.append(False)
            raise OSError(28, "No space left on device", str(temporary))
        return write(self, temporary)

    monkeypatch.setattr(SaveJob, "_write", failing)

    def body(mesh: Mapping[str, Comm]) -> str:
        net, optimizer = build(mesh, 2)
        shardwise.save_checkpoint(net, tmp_path, tag="good")
        shardwise.save_checkpoint(net, tmp_path, tag="bad", background=True)
        calls: dict[str, Callable[[], object]] = {
            "wait": lambda: shardwise.wait_for_save(net),
            "save": lambda: shardwise.save_checkpoint(net, tmp_path, tag="next"),
            "load": lambda: shardwise.load_checkpoint(net, tmp_path),
            "step": lambda: train(net, optimizer, mesh, range(200)),
        }
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left") as caught:
            calls[where]()
        step = Managed.of(net).runtime.num_steps
        optimizer.zero_grad()
        train(net, optimizer, mesh, range(1))
        shardwise.save_checkpoint(net, tmp_path, tag="bad")
        return f"{step} {caught.value}"

    first, second = run_ranks(2, body)
    assert first == second
    assert {each.tag for each in find_checkpoints(tmp_path)} == {"good", "bad"}
    assert not [path for path in tree(tmp_path) if path.startswith(".")]


def test_a_second_save_waits_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(monkeypatch) as go:

        def body(mesh: Mapping[str, Comm]) -> str:
            net, _ = build(mesh, 1)
            shardwise.save_checkpoint(net, tmp_path, tag="a", background=True)
            with pytest.raises(StateError, match="goes on") as caught:
                shardwise.save_checkpoint(net, tmp_path, tag="b", when_pending="refuse")
            go.set()
            shardwise.save_checkpoint(net, tmp_path, tag="b", background=True, when_pending="wait")
            shardwise.wait_for_save(net)
            return str(caught.value)

        first, second = run_ranks(2, body)
    assert first == second
    assert {each.tag for each in find_checkpoints(tmp_path)} == {"a", "b"}


def test_two_models_save_at_once(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        first, _ = build(mesh, 3)
        second, _ = build(mesh, 1, seed=2)
        shardwise.save_checkpoint(first, tmp_path / "first", background=True)
        shardwise.save_checkpoint(second, tmp_path / "second", background=True)
        for net in (second, first):
            shardwise.wait_for_save(net)

    run_ranks(2, body)
    assert read_latest(tmp_path / "first") == read_latest(tmp_path / "second") == "step-0"


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with held(monkeypatch) as go:
        net, _ = build({"data": LocalComm()}, 1)
        shardwise.save_checkpoint(net, "saved", tag="one", background=True)
        monkeypatch.chdir(tmp_path)
        go.set()
        assert shardwise.wait_for_save(net) == tmp_path / "a" / "saved" / "one"
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "wait_for_save"])
def test_a_call_by_one_rank_while_a_save_is_pending_names_the_other(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_ROLL_CALL_SECONDS", "0.5")

    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 2)
        shardwise.save_checkpoint(net, tmp_path, tag="a", background=True)
        if flat_rank(mesh) == 0:
            with pytest.raises(RankMismatchError, match=f"{call} is collective.* rank 1 did not"):
                getattr(shardwise, call)(net, *([] if call == "wait_for_save" else [tmp_path]))
            mesh["data"].announce("told", "")
        else:
            mesh["data"].announce("told", "")
            mesh["data"].announced("told", 20)
            with pytest.raises(RankMismatchError):
                Managed.of(net).council.round("another")  # rank 0 has made this round
        assert shardwise.wait_for_save(net) == tmp_path / "a"

    run_ranks(2, body)


def test_ranks_that_differ_about_a_pending_save_are_told(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 2)
        shardwise.save_checkpoint(net, tmp_path, tag="a", background=True)
        with pytest.raises(RankMismatchError, match="unlike arguments") as caught:
            shardwise.save_checkpoint(net, tmp_path, tag="b", when_pending="refuse" if flat_rank(mesh) else "wait")
        shardwise.wait_for_save(net)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second


SCRIPT = """
import sys, time, torch, shardwise
from torch import nn
from shardwise.checkpoint.save import SaveJob
from shardwise.comm.fake import LocalComm

net = shardwise.shard(nn.Linear(2048, 2048), {"data": LocalComm()}, stage=1)
write = SaveJob._write

def slow(self, temporary):
    time.sleep(0.5)
    return write(self, temporary)

SaveJob._write = slow
shardwise.save_checkpoint(net, sys.argv[1], tag="one", background=True)
"""


def end_with(last_line: str, folder: Path, fault: str = "") -> tuple[int, str]:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT + last_line, folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SHARDWISE_FAULT": fault},
    )
    return told.returncode, told.stdout + told.stderr


@pytest.mark.parametrize("last_line", ["", "sys.exit(0)"])
def test_a_script_that_ends_finishes_its_save(last_line: str, tmp_path: Path) -> None:
    status, told = end_with(last_line, tmp_path)
    assert (status, told) == (0, "")
    verify_files(tmp_path / "one")
    assert read_latest(tmp_path) == "one"


def test_a_save_that_fails_after_the_end_is_told_and_changes_the_exit_status(tmp_path: Path) -> None:
    status, told = end_with("print('last words', end='')", tmp_path, "save.before_manifest:0:1:enospc")
    assert status == 1
    assert "last words" in told
    assert f"the save in the background to {tmp_path / 'one'} was not finished" in told
    assert "No space left" in told
