"""A rank is killed in the middle of a save or a load; the run begins again and ends as if nothing had happened."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import shardwise
from shardwise.checkpoint.folder import find_checkpoints
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.base import Comm
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.faults import POINTS
from shardwise.testing.ranks import run_processes

from .case import build, train
from .resume_case import run_ranks_of, start

ONLY_RANK_0 = {
    "save.tmp_made",
    "save.before_manifest",
    "save.before_rename",
    "save.after_rename",
    "save.before_latest",
    "save.after_latest",
}
FAST = [("save.after_first_file", 1), ("load.after_place", 1)]
ALL = [(point, rank) for point in sorted(POINTS) for rank in (0, 1) if rank == 0 or point not in ONLY_RANK_0]
BOUND = {"SHARDWISE_ROLL_CALL_SECONDS": "4"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each rank ends with in a run that nobody kills."""
    return [answer["digest"] for answer in start(tmp_path_factory.mktemp("whole"), "whole", "fp32", 3)]


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Verify every checkpoint as soon as it is visible, for the length of a block; collect what is wrong."""
    problems: list[str] = []
    known: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for path in sorted(folder.iterdir()) if folder.is_dir() else []:
                if path.is_dir() and not path.name.startswith(".") and path.name not in known:
                    known.add(path.name)
                    try:
                        verify_files(path)
                    except CheckpointError as error:
                        problems.append(str(error))
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield problems
    finally:
        over.set()
        thread.join()


def check(point: str, rank: int, tmp_path: Path, undisturbed: list[str]) -> None:
    folder = tmp_path / "saved"
    kill = {"SHARDWISE_FAULT": f"{point}:{rank}:{1 if point.startswith('load') else 2}:kill"}
    with watched(folder) as problems:
        if point.startswith("load"):
            start(tmp_path, "first", "fp32", 3)
            before = sorted(path.name for path in folder.iterdir())
            statuses, output = run_ranks_of(tmp_path, "second", "fp32", 3, variables={**BOUND, **kill})
            assert sorted(path.name for path in folder.iterdir()) == before
        else:
            statuses, output = run_ranks_of(tmp_path, "often", "fp32", 3, variables={**BOUND, **kill})
        assert statuses[rank] == -9
        assert statuses[1 - rank] == 1, output
        assert "RankMismatchError" in output or "CheckpointError" in output
        again = start(tmp_path, "often", "fp32", 3, variables=BOUND)
    assert not problems
    assert [answer["digest"] for answer in again] == undisturbed
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if name.startswith(".")]
    assert not [found for found in find_checkpoints(folder) if found.problem]


@pytest.mark.parametrize(("point", "rank"), FAST)
def test_a_killed_rank_costs_the_updates_since_the_last_save(
    point: str, rank: int, tmp_path: Path, undisturbed: list[str]
) -> None:
    check(point, rank, tmp_path, undisturbed)


@pytest.mark.matrix
@pytest.mark.parametrize(("point", "rank"), ALL)
def test_a_killed_rank_at_every_point(point: str, rank: int, tmp_path: Path, undisturbed: list[str]) -> None:
    check(point, rank, tmp_path, undisturbed)


def wait_for_a_save_of_a_killed_rank(mesh: Mapping[str, Comm]) -> None:
    (comm,) = mesh.values()
    net, optimizer = build(mesh, 3)
    train(net, optimizer, mesh, range(1))
    with tempfile.TemporaryDirectory() as made:
        comm.announce("folder", made)
        folder = comm.announced("folder", 20)[0]
        os.environ["SHARDWISE_ROLL_CALL_SECONDS"] = "5"
        os.environ["SHARDWISE_FAULT"] = "save.after_first_file:1:1:kill"
        shardwise.save_checkpoint(net, folder, background=True)
        shardwise.wait_for_save(net)


def test_a_rank_killed_in_a_save_in_the_background_is_noticed_by_those_who_wait() -> None:
    begin = time.monotonic()
    survivor, killed = run_processes(
        2, wait_for_a_save_of_a_killed_rank, timeout=60, comm_timeout=10, return_exceptions=True
    )
    assert time.monotonic() - begin < 40
    assert isinstance(killed, ChildProcessError)
    assert isinstance(survivor, ShardwiseError), survivor
    assert "rank 1" in str(survivor)
