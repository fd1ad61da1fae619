"""When a process fails, the others stop soon and say which rank, where and why."""

import os
import signal
import time

import pytest
import torch

from shardwise.comm.base import Key, Mesh, Verb, Work
from shardwise.comm.board import Board
from shardwise.errors import RankMismatchError
from shardwise.testing.ranks import run_processes

KEY = Key(3, Verb.UNSHARD, 0, "layers.3")


def finish(work: Work | None) -> None:
    assert work is not None
    work.wait()


def raise_on_rank_1(mesh: Mesh) -> str:
    comm = mesh["data"]
    buffer = torch.zeros(comm.size)
    later = Key(3, Verb.REDUCE, 0, "layers.3")
    if comm.rank == 1:
        finish(comm.all_gather(buffer, KEY))
        raise ZeroDivisionError("router")
    start = time.monotonic()
    # The peer may fail while the tail of the first call is on its way: then that call fails.
    with pytest.raises(RankMismatchError) as caught:  # noqa: PT012
        finish(comm.all_gather(buffer, KEY))
        finish(comm.reduce_scatter(buffer, buffer[:1], later, wire=torch.float32, sum=torch.float32))
    assert time.monotonic() - start < 10  # of 60
    with pytest.raises(RankMismatchError, match=r"cannot run, because this rank failed in .* earlier"):
        comm.all_gather(buffer, later)
    return str(caught.value)


def kill_rank_2(mesh: Mesh) -> str:
    comm = mesh["data"]
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankMismatchError) as caught:
        finish(comm.all_gather(torch.zeros(3), KEY))
    return str(caught.value)


def come_late(mesh: Mesh) -> str:
    comm = mesh["data"]
    if comm.rank == 1:
        time.sleep(2)  # twice the timeout
    with pytest.raises(RankMismatchError) as caught:
        finish(comm.all_gather(torch.zeros(2), KEY))
    return str(caught.value)


def sleep_on_rank_1(mesh: Mesh) -> int:
    time.sleep(600 * mesh["data"].rank)
    return os.getpid()


def return_what_cannot_be_sent(mesh: Mesh) -> object:
    return lambda: mesh


def test_error_of_a_peer_is_named_by_those_who_wait() -> None:
    first, error, third = run_processes(3, raise_on_rank_1, return_exceptions=True)
    assert isinstance(error, ZeroDivisionError)
    before = "all_gather of UNSHARD 'layers.3' (index 3, call 0)"
    for told in (first, third):
        assert "'layers.3' (index 3, call 0), waiting for rank" in str(told)
        assert f"rank 1 raised ZeroDivisionError after {before}: router" in str(told)


def test_first_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_processes(2, raise_on_rank_1)
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1 of 2")
    assert "in raise_on_rank_1" in note


def test_killed_peer_is_named_in_bounded_time() -> None:
    start = time.monotonic()
    first, second, killed = run_processes(3, kill_rank_2, return_exceptions=True)
    assert time.monotonic() - start < 15
    assert isinstance(killed, ChildProcessError)
    assert "rank 2 ended with exit code -9" in str(killed)
    for told in (first, second):
        assert "all_gather of UNSHARD 'layers.3'" in str(told)
        assert "waiting for rank 2" in str(told)
        assert "rank 2 did not answer" in str(told)


def test_silent_peer_is_named_at_the_timeout() -> None:
    first, second = run_processes(2, come_late, comm_timeout=1)
    assert "rank 0 of 2 failed in all_gather of UNSHARD 'layers.3' (index 3, call 0), waiting for rank 1" in first
    assert "Timed out" in first
    assert "rank 0 failed in all_gather" in second  # the late one reads why


def test_process_that_does_not_end_is_killed() -> None:
    pid, late = run_processes(2, sleep_on_rank_1, timeout=8, return_exceptions=True)
    assert isinstance(pid, int)
    assert isinstance(late, TimeoutError)
    assert "ranks [1] did not end in time" in str(late)


def test_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cannot be sent"):
        run_processes(1, return_what_cannot_be_sent)


def test_board_without_a_store_says_that_nobody_answered() -> None:
    class BrokenStore:
        timeout = None

        def set_timeout(self, timeout: object) -> None:
            raise RuntimeError("connection refused")

    board = Board(BrokenStore(), "data", 0, 2)  # type: ignore[arg-type]
    board.write("failed")
    assert "rank 1 did not answer" in board.read(0.1)
