"""What ``launch`` is asked to do, checked before anything is started. The names are those of torchrun.

Pure but for counting devices and cores. Read ``node.py`` for how one machine's ranks are run.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import ConfigError

__all__ = ["LaunchOptions", "Streams", "count_processes", "parse_ranks", "parse_streams"]

OUT, ERR = "stdout", "stderr"
Streams = frozenset[str]
_STREAMS = (frozenset[str](), frozenset({OUT}), frozenset({ERR}), frozenset({OUT, ERR}))


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One node's part of a job.

    Attributes:
        command: program and arguments of every rank.
        num_local_ranks: ranks to start here.
        min_nodes: least number of nodes.
        max_nodes: largest number of nodes; with the static rendezvous both are the same.
        node_rank: this node's number; for the static rendezvous only.
        master_addr: host of node 0, for the static rendezvous only.
        master_port: port on it; None takes a free one on one node, 29500 on several.
        rendezvous_backend: "static", "c10d", or another that torch knows.
        rendezvous_endpoint: host and port for backends other than static.
        rendezvous_options: further settings of the backend.
        run_id: name of the job, equal on all nodes; None draws one.
        local_addr: this node's address as the others see it; None looks it up.
        max_restarts: how often all ranks are started again after a failure.
        monitor_interval: seconds between looks at the ranks.
        role: a name for the ranks.
        log_dir: where the folder with the logs of this run is made.
        redirects: by local rank, streams that go to the log only; the key None is for all other ranks.
        tee: by local rank, streams that go to log and console, with the rank before each line.
        local_ranks_shown: local ranks whose output the console shows; None shows all.
    """

    command: tuple[str, ...]
    num_local_ranks: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    rendezvous_backend: str = "static"
    rendezvous_endpoint: str = ""
    rendezvous_options: tuple[tuple[str, str], ...] = ()
    run_id: str | None = None
    local_addr: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    role: str = "default"
    log_dir: Path = Path("logs")
    redirects: tuple[tuple[int | None, Streams], ...] = ()
    tee: tuple[tuple[int | None, Streams], ...] = ()
    local_ranks_shown: frozenset[int] | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ConfigError: says which options do not fit.
        """
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"--nnodes: expected N, or MIN:MAX with 1 <= MIN <= MAX, got {self.min_nodes}:{self.max_nodes}"
            )
        static = self.rendezvous_backend == "static"
        if static and self.min_nodes != self.max_nodes:
            raise ConfigError("--nnodes MIN:MAX needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT")
        if static and not 0 <= self.node_rank < self.max_nodes:
            raise ConfigError(f"--node-rank must be from 0 to {self.max_nodes - 1} (--nnodes), got {self.node_rank}")
        if not static and self.max_nodes > 1 and not self.rendezvous_endpoint:
            raise ConfigError(f"--rdzv-backend {self.rendezvous_backend} needs --rdzv-endpoint HOST:PORT")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise ConfigError(f"--master-port must be from 1 to 65535, got {self.master_port}")
        unknown = sorted(rank for rank in self.local_ranks_shown or () if rank >= self.num_local_ranks)
        if unknown and self.max_nodes == 1:  # other nodes may have more ranks
            last = self.num_local_ranks - 1
            there = f"local ranks 0 to {last}" if last else "local rank 0 only"
            raise ConfigError(f"--local-ranks-filter: this node has {there}, not {', '.join(map(str, unknown))}")
        for name, value in (("--max-restarts", self.max_restarts), ("--monitor-interval", self.monitor_interval)):
            if not value >= 0:
                raise ConfigError(f"{name} must be at least 0, got {value}")

    @property
    def alone(self) -> bool:
        """Whether the job is this node's only, so that nothing needs to listen to other hosts."""
        loopback = self.master_addr in ("127.0.0.1", "localhost")
        return self.max_nodes == 1 and self.rendezvous_backend == "static" and loopback and not self.rendezvous_endpoint

    def streams_shown(self, local_rank: int) -> Streams:
        """Return the streams of a rank that the console shows: those not redirected, and those teed."""
        if self.local_ranks_shown is not None and local_rank not in self.local_ranks_shown:
            return frozenset()
        return (_STREAMS[3] - _of_rank(self.redirects, local_rank)) | self.streams_teed(local_rank)

    def streams_teed(self, local_rank: int) -> Streams:
        """Return the streams of a rank whose lines are shown with the rank before them."""
        return _of_rank(self.tee, local_rank)


def count_processes(text: str) -> int:
    """Return how many ranks to start here: a number, "cpu" (cores), "gpu", or "auto" (accelerators, else cores).

    Raises:
        ConfigError: none of these, or there is no GPU.
    """
    num_cores = len(os.sched_getaffinity(0))
    if text == "cpu":
        return num_cores
    if text == "auto":
        return torch.accelerator.device_count() if torch.accelerator.is_available() else num_cores
    if text == "gpu":
        if not torch.cuda.is_available():
            raise ConfigError("--nproc-per-node gpu: torch sees no GPU here; give a number, or cpu")
        return torch.cuda.device_count()
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ConfigError(f"--nproc-per-node must be a number from 1 on, auto, cpu or gpu, got {text!r}")
    return int(text)


def parse_streams(text: str, option: str) -> tuple[tuple[int | None, Streams], ...]:
    """Read torchrun's notation: 0 none, 1 stdout, 2 stderr, 3 both; or ``RANK:NUMBER,...`` for single local ranks.

    Raises:
        ConfigError: another notation.
    """
    if re.fullmatch(r"[0-3]", text):
        return ((None, _STREAMS[int(text)]),)
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise ConfigError(f"{option} must be 0, 1, 2, 3 or a list like 0:3,1:2 of local ranks, got {text!r}")
    pairs = (each.split(":") for each in text.split(","))
    return tuple((int(rank), _STREAMS[int(number)]) for rank, number in pairs)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read ``0,1,2``; nothing means all ranks.

    Raises:
        ConfigError: another notation.
    """
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ConfigError(f"--local-ranks-filter must be a list of local ranks like 0,1, got {text!r}")
    return frozenset(map(int, text.split(",")))


def _of_rank(table: tuple[tuple[int | None, Streams], ...], local_rank: int) -> Streams:
    by_rank = dict(table)
    return by_rank.get(local_rank, by_rank.get(None, frozenset()))
