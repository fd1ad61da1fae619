"""The lane of the CPU: transfers that the waiting thread takes in the order of their posting."""

from collections.abc import Callable

import pytest
import torch

from shardwise.lanes import HostLane, Lanes, Steps, make_lanes


class Transfer:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        log.append(f"post {name}")

    def wait(self) -> None:
        self._log.append(f"end {self._name}")


def job(log: list[str], *names: str | None) -> Callable[[], Steps]:
    """A job with a transfer per name; None is one that ended at once."""

    def steps() -> Steps:
        for name in names:
            yield None if name is None else Transfer(log, name)
        log.append("done")

    return steps


def test_first_transfer_is_posted_at_once_and_the_rest_in_the_wait() -> None:
    log: list[str] = []
    handle = HostLane().run(job(log, "a", "b"))
    assert log == ["post a"]
    handle.wait()
    assert log == ["post a", "end a", "post b", "end b", "done"]
    handle.wait()
    handle.host_wait()
    assert log.count("done") == 1


def test_job_without_transfers_ends_at_once() -> None:
    log: list[str] = []
    HostLane().run(job(log, None, None))
    assert log == ["done"]


def test_waiting_ends_all_jobs_before_and_none_after() -> None:
    log: list[str] = []
    lane = HostLane()
    lane.run(job(log, "a"))
    second = lane.run(job(log, "b"))
    third = lane.run(job(log, "c"))
    second.wait()
    assert log == ["post a", "post b", "post c", "end a", "done", "end b", "done"]
    third.wait()
    assert log[-2:] == ["end c", "done"]


def test_job_that_ended_keeps_its_place_in_the_queue() -> None:
    log: list[str] = []
    lane = HostLane()
    lane.run(job(log, "a"))
    lane.run(job(log, None))
    last = lane.run(job(log, "b"))
    last.wait()
    assert log == ["post a", "done", "post b", "end a", "done", "end b", "done"]


def test_flush_ends_every_job() -> None:
    log: list[str] = []
    lane = HostLane()
    lane.run(job(log, "a", "b"))
    lane.run(job(log, "c"))
    lane.flush()
    assert log == ["post a", "post c", "end a", "post b", "end c", "done", "end b", "done"]


def test_second_transfer_is_posted_while_the_first_of_the_next_job_travels() -> None:
    log: list[str] = []
    lane = HostLane()
    first = lane.run(job(log, "a", "b"))
    second = lane.run(job(log, "c", "d"))
    first.wait()
    assert log == ["post a", "post c", "end a", "post b", "end c", "post d", "end b", "done"]
    second.wait()
    assert log[-2:] == ["end d", "done"]


def test_job_that_failed_fails_again_for_whoever_waits_later() -> None:
    def broken() -> Steps:
        yield Broken()

    lane = HostLane()
    handle = lane.run(broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection lost"):
            handle.wait()


class Broken:
    def wait(self) -> None:
        raise RuntimeError("connection lost")


def test_lanes_do_not_wait_for_each_other() -> None:
    log: list[str] = []
    lanes: Lanes = make_lanes(torch.device("cpu"))
    lanes.gather.run(job(log, "a"))
    lanes.reduce.run(job(log, "b")).wait()
    assert log == ["post a", "post b", "end b", "done"]


def test_compute_accesses_are_free_of_charge() -> None:
    make_lanes(torch.device("cpu")).on_compute(reads=[torch.zeros(1)], writes=[torch.zeros(1)])
