"""Local ranks: what the commands that start them see. Whole runs are in tests/cli and tests/train."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from shardwise.launch.local import Interrupted, LocalJob, RanksFailedError, catch_signals, run_local
from shardwise.train.measure import parameter_digest


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)


def interrupt_twice(number: int) -> None:
    try:
        interrupt(number)
    finally:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_becomes_an_exception_and_handlers_come_back(number: signal.Signals, status: int) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with (
        pytest.raises(Interrupted, match=f"ended by {number.name}") as caught,
        catch_signals(signal.SIGINT, signal.SIGTERM),
    ):
        interrupt(number)
    assert caught.value.exit_status == status
    assert not isinstance(caught.value, Exception)  # nobody takes it for a failure
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_second_signal_does_what_it_did_before() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(Interrupted), catch_signals(signal.SIGTERM):
            interrupt_twice(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    during = []

    def body() -> None:
        with catch_signals(signal.SIGTERM):
            during.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert during == [before]


def test_exception_that_is_no_wrong_setting_has_a_traceback(tmp_path: Path) -> None:
    job = LocalJob(body=parameter_digest, task=None, num_ranks=1, rendezvous=str(tmp_path / "meet"), name="a trial")
    with pytest.raises(
        RanksFailedError, match=r"(?s)The first to fail, rank 0 of a trial: Traceback.*TypeError"
    ) as error:
        list(run_local(job))
    assert error.value.config_error is None
