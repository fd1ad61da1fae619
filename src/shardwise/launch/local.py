"""Ranks as processes of this machine, for commands that start their own: their messages, failures and ends.

Owns ``run_local``, and what a rank's process does around its work: joins a gloo group on the loopback, ends with its
parent, turns SIGTERM into an exception. ``node.py`` is the launcher of other people's scripts; it shares nothing.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.environment import set_default
from shardwise.errors import ConfigError

__all__ = ["Body", "Interrupted", "LocalJob", "RanksFailedError", "Tell", "catch_signals", "run_local"]

GRACE_SECONDS = 2.0  # once one rank has failed, for the others to tell why they fail too
_STOP_SECONDS = 15.0  # a rank that waits for another comes to a signal once that one is gone

Tell = Callable[[Any], None]
Body = Callable[[Any, int, Tell], Any]


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What the processes of one group do.

    Attributes:
        body: a function of a module, called on every rank with ``task``, the rank and ``tell``, which sends a message
            to the parent; what it returns is sent as the last message.
        task: what every rank is given; crosses to another process.
        num_ranks: number of processes.
        rendezvous: path of a file that does not exist, in a private folder.
        timeout_seconds: how long a collective may wait.
        name: what the ranks belong to, such as "stage 3"; "" leaves it out of messages.
        device_type: "cuda" takes NCCL and one device per rank, everything else gloo.
    """

    body: Body
    task: Any
    num_ranks: int
    rendezvous: str
    timeout_seconds: float = 120.0
    name: str = ""
    device_type: str = "cpu"


class RanksFailedError(Exception):
    """At least one rank failed; the text ends with what the first of them raised.

    Attributes:
        config_error: what is wrong with the settings, if that is how the first one failed: no traceback is needed then.
    """

    def __init__(self, text: str, config_error: str | None = None) -> None:
        super().__init__(text)
        self.config_error = config_error


class Interrupted(BaseException):
    """SIGINT or SIGTERM came.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_status(self) -> int:
        """What a shell says of a program that a signal ended."""
        return 128 + self.number


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """How one rank failed, and when."""

    seconds: float  # since the epoch; 0 for a rank that was killed, which is rarely the fault of another
    text: str
    config_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Done:
    """What one rank returned."""

    result: Any


@contextlib.contextmanager
def catch_signals(*numbers: int) -> Iterator[None]:
    """Raise ``Interrupted`` in the main thread when one of the signals comes, for the length of a block.

    A second signal of the same kind does what it did before. Outside the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous[number])
        raise Interrupted(number)

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_local(job: LocalJob) -> Generator[tuple[int, Any], None, None]:
    """Start the ranks and yield (rank, message), their results last, until all have ended. Close it to stop them.

    Raises:
        RanksFailedError: a rank raised or died; the others are stopped.
    """
    processes: list[SpawnProcess] = []
    pipes: dict[Connection, int] = {}
    failures: dict[int, _Failure] = {}
    reported: set[int] = set()
    deadline = math.inf
    try:
        for rank in range(job.num_ranks):
            pipes[_start(job, rank, processes)] = rank
        while pipes and (patience := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), timeout=None if math.isinf(patience) else patience):
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                message = _receive(pipe)
                if message is None:
                    del pipes[pipe]
                    if rank not in reported:
                        processes[rank].join()
                        failures[rank] = _Failure(seconds=0.0, text=f"died, exit code {processes[rank].exitcode}\n")
                elif isinstance(message, _Failure):
                    failures[rank] = message
                else:
                    yield rank, message.result if isinstance(message, _Done) else message
                if isinstance(message, _Done | _Failure):
                    reported.add(rank)
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    finally:
        _stop(processes)
    if failures:
        ordered = sorted(failures.items(), key=lambda item: item[1].seconds, reverse=True)
        raise RanksFailedError(_describe(job.name, ordered), ordered[-1][1].config_error)


def _start(job: LocalJob, rank: int, processes: list[SpawnProcess]) -> Connection:
    """Start one rank, add it to ``processes`` and return where its messages arrive."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(job, rank, theirs), daemon=True)
    with _ignored(signal.SIGINT):  # inherited: on Ctrl-C it is this process that ends them
        process.start()
        processes.append(process)
    theirs.close()  # the child's copy is then the only one, and the pipe ends with the child
    return ours


@contextlib.contextmanager
def _ignored(number: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        pipe.close()
        return None


def _stop(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _describe(name: str, ordered: Sequence[tuple[int, _Failure]]) -> str:
    of = f" of {name}" if name else ""
    texts = [f"rank {rank}{of}: {failure.text}" for rank, failure in ordered]
    return "\n".join([*texts[:-1], f"The first to fail, {texts[-1]}"])


# In the process of a rank


def _rank_main(job: LocalJob, rank: int, pipe: Connection) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    lock = threading.Lock()

    def tell(message: Any) -> None:
        with lock:
            pipe.send(message)

    try:
        with catch_signals(signal.SIGTERM):
            torch.set_num_threads(max(1, num_cores() // job.num_ranks))
            use_loopback()
            if job.device_type == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                "nccl" if job.device_type == "cuda" else "gloo",
                init_method=f"file://{job.rendezvous}",
                rank=rank,
                world_size=job.num_ranks,
                timeout=timedelta(seconds=job.timeout_seconds),
            )
            tell(_Done(result=job.body(job.task, rank, tell)))
            dist.destroy_process_group()
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_status)
    except BaseException as error:
        wrong = str(error) if isinstance(error, ConfigError) else None
        tell(_Failure(seconds=time.time(), text=traceback.format_exc(), config_error=wrong))
        sys.exit(1)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def num_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def use_loopback() -> None:
    """Keep gloo off the network; it also spares looking up the name of this machine, which may have no address."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            set_default("GLOO_SOCKET_IFNAME", name)
