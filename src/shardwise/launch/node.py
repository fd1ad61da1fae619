"""Runs the ranks of one node under torch's elastic agent, with a log per rank and a report of the first failure.

Owns the agent and signals. Nothing here outlives ``run_node``: the ranks are ended by their own process ids, whatever
happens. Read ``rendezvous.py`` for how nodes meet, ``streams.py`` for what ranks print.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousError

from shardwise.environment import set_default
from shardwise.errors import ConfigError
from shardwise.launch.failure import RankEnd, describe_failure, exit_status
from shardwise.launch.options import LaunchOptions
from shardwise.launch.rendezvous import make_rendezvous, stay_on_loopback
from shardwise.launch.streams import RankStreams

__all__ = ["run_node"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_node(options: LaunchOptions) -> int:
    """Run this node's ranks to their end; return 0, or the exit status of the rank that failed first.

    Call it from the main thread. A first SIGINT, SIGTERM or SIGHUP is passed on to the ranks, which have 30 seconds; a
    second one kills them. The status is then 128 plus the signal's number.

    Raises:
        ConfigError: the port is taken, the rendezvous cannot be made, or the program cannot be started.
    """
    _silence_agent()
    if options.num_local_ranks > 1:
        set_default("OMP_NUM_THREADS", "1")  # as torchrun does: ranks would overload the cores otherwise
    if options.alone:
        stay_on_loopback()
    ranks = _Ranks()
    with ranks.signals(), contextlib.closing(RankStreams(options, _new_folder(options.log_dir))) as streams:
        sys.stderr.write(f"logs of the ranks: {streams.folder}\n")
        if options.local_ranks_shown is not None and min(options.local_ranks_shown) >= options.num_local_ranks:
            sys.stderr.write("--local-ranks-filter: none of these ranks is on this node, so nothing of it is shown\n")
        sys.stderr.flush()
        try:
            failed = _run_agent(options, streams, ranks)
        except SignalException as error:
            return 128 + int(error.sigval)
        finally:
            ranks.kill()
        if not failed:
            return 0
        streams.finish()
        ends = [
            RankEnd(
                rank=rank,
                exit_code=code,
                seconds=ranks.exit_seconds(rank),
                lines=streams.lines(rank),
                log=streams.log_of(rank, ranks.restart),
            )
            for rank, code in failed.items()
        ]
    sys.stderr.write(describe_failure(ends) + "\n")
    return exit_status(ends)


def _run_agent(options: LaunchOptions, streams: RankStreams, ranks: "_Ranks") -> Mapping[int, int]:
    """Return the exit codes of the ranks that failed, by rank."""
    handler, address, port = make_rendezvous(options)
    try:
        spec = WorkerSpec(
            role=options.role,
            local_world_size=options.num_local_ranks,
            entrypoint=options.command[0],
            args=options.command[1:],
            rdzv_handler=handler,
            max_restarts=options.max_restarts,
            monitor_interval=options.monitor_interval,
            master_addr=address,
            master_port=port,
            local_addr=options.local_addr,
        )
        agent = _Agent(spec, _Logs(streams, ranks), ranks)
        try:
            result = agent.run()
        finally:
            agent.close_streams()
    except RendezvousError as error:
        raise ConfigError(f"the nodes did not meet: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot start {options.command[0]}: {error}") from error
    finally:
        handler.shutdown()
    return {rank: failure.exitcode for rank, failure in result.failures.items()} if result.is_failed() else {}


class _Ranks:
    """The processes of the ranks: when each ended, and how to end them."""

    def __init__(self) -> None:
        self.restart = 0
        self._pids: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._watchers: list[threading.Thread] = []
        self._interrupted = False

    def watch(self, pids: Mapping[int, int]) -> None:
        """Note when each process of a new start ends; by rank."""
        self._pids, self._ended = dict(pids), {}
        self._watchers = [threading.Thread(target=self._wait, args=item, daemon=True) for item in pids.items()]
        for watcher in self._watchers:
            watcher.start()

    def exit_seconds(self, rank: int) -> float:
        """Return when a rank's process ended, on the monotonic clock."""
        for watcher in self._watchers:
            watcher.join(timeout=1.0)
        return self._ended.get(rank, time.monotonic())

    def _wait(self, rank: int, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):  # the agent was faster to ask
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._ended[rank] = time.monotonic()

    def kill(self) -> None:
        """Kill those that are still there, with what they started."""
        for pid in self._pids.values():
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                    os.killpg(pid, signal.SIGKILL)  # each rank leads a session of its own

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn the signals that end a program into the agent's exception, for the length of a block."""
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        self.take_signals()
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def take_signals(self) -> None:
        """Handle signals here; the agent takes them for itself when it starts processes."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            self.kill()  # the agent is waiting for them already
            return
        self._interrupted = True
        raise SignalException(f"signal {number}", signal.Signals(number))


class _Agent(LocalElasticAgent):
    """Torch's agent, which also tells whose process is whose."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, ranks: _Ranks) -> None:
        super().__init__(spec, logs)
        self._ranks = ranks

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self.close_streams()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._ranks.take_signals()
        self._ranks.watch({worker_group.workers[local].global_rank: pid for local, pid in pids.items()})
        return pids

    def close_streams(self) -> None:
        """Close this process's ends of the ranks' streams; torch 2.13 leaves those of ranks that ended open."""
        context = self._pcontext
        for handler in context.subprocess_handlers.values() if isinstance(context, SubprocessContext) else ():
            for stream in (getattr(handler, "_stdout", None), getattr(handler, "_stderr", None)):
                if stream is not None:
                    stream.close()


class _Logs(LogsSpecs):
    """Tells the agent to open our pipes as the streams of the ranks."""

    def __init__(self, streams: RankStreams, ranks: _Ranks) -> None:
        super().__init__(str(streams.folder))
        self._streams = streams
        self._ranks = ranks

    @property
    def root_log_dir(self) -> str:
        """Return the folder of the logs."""
        return str(self._streams.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each local rank's streams go."""
        found = LogsDest()
        for local_rank, variables in envs.items():
            rank, restart = int(variables["RANK"]), int(variables["TORCHELASTIC_RESTART_COUNT"])
            self._ranks.restart = restart
            out, err = self._streams.open(local_rank, rank, restart)
            found.stdouts[local_rank], found.stderrs[local_rank] = str(out), str(err)
            found.error_files[local_rank] = str(self._streams.error_file(rank, restart))
            variables["TORCHELASTIC_ERROR_FILE"] = found.error_files[local_rank]
        return found


def _silence_agent() -> None:
    """Leave out the agent's own lines about failures and signals: our report says the same."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _new_folder(base: Path) -> Path:
    """Make a fresh folder for the logs of one run."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            folder = base / (stamp if number == 1 else f"{stamp}_{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(f"--log-dir {base}: {error.strerror}") from error
    raise ConfigError(f"--log-dir {base}: holds a thousand runs of this second")
