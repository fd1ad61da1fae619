"""The largest micro-batch that really runs: short runs in new processes whose memory is limited.

On CUDA the limit is the device's. On the host it is what a rank may allocate beyond what it had when it began.
"""

import contextlib
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.resolve import Resolved
from shardwise.errors import ConfigError
from shardwise.launch.local import LocalJob, RanksFailedError, run_local
from shardwise.train.loop import RunTask, Tell, run_process

__all__ = ["PROBE_SETTINGS", "runs_within"]

# What a run is shortened to; the rest is as the user wants it.
PROBE_SETTINGS = (
    "train.steps=3",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.sample_tokens=0",
    "train.checkpoint_every=0",
)
_TOO_MUCH = ("OutOfMemory", "out of memory", "can't allocate memory", "MemoryError", "bad_alloc", "SIGKILL")


@dataclass(frozen=True, kw_only=True)
class LimitedTask:
    """A run, and what each of its ranks may allocate on the host, in bytes; None: no limit."""

    run: RunTask
    limit_bytes: int | None


def runs_within(
    settings: Callable[[str], Resolved],
    *,
    device_type: str,
    limit_bytes: int | None,
    timeout_seconds: float,
) -> bool:
    """Train some steps on local processes; return whether memory was enough on every rank.

    Args:
        settings: of the run, given the folder it writes to.
        device_type: "cpu" or "cuda".
        limit_bytes: of each rank on the host; None: no limit of ours.
        timeout_seconds: how long a collective may wait.

    Raises:
        ConfigError: the run failed for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-probe-") as folder:
        chosen = settings(f"{folder}/run")
        task = LimitedTask(run=RunTask(settings=chosen, device_type=device_type), limit_bytes=limit_bytes)
        task.run.folder.mkdir()
        job = LocalJob(
            body=run_limited,
            task=task,
            num_ranks=chosen.num_ranks,
            rendezvous=f"{folder}/rendezvous",
            timeout_seconds=timeout_seconds,
            device_type=device_type,
        )
        with contextlib.closing(run_local(job)) as messages:
            try:
                for _ in messages:
                    pass
            except RanksFailedError as error:
                if any(words in str(error) for words in _TOO_MUCH):
                    return False
                raise ConfigError(f"the run failed, but not for want of memory: {error}") from None
    return True


def run_limited(task: LimitedTask, rank: int, tell: Tell) -> None:
    """Be one rank of a run that may not allocate more than its limit."""
    if task.limit_bytes is not None:
        most = _data_bytes() + task.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    run_process(task.run, rank, tell)


def _data_bytes() -> int:
    """Return what counts against ``RLIMIT_DATA`` now: the heap, anonymous mappings, stacks of threads."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("--memory: this system does not tell what a process has allocated (no VmData)")
