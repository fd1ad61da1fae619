"""Faults on purpose, for tests of what happens when a save or a load goes wrong in the middle.

``SHARDWISE_FAULT="save.before_rename:1:2:kill"`` kills rank 1 the second time it comes to that point. Several are
separated by commas. Without the variable a point costs one look at the environment, a few times per save.
"""

import errno
import os
import signal
import time
from collections import Counter
from pathlib import Path

from shardwise.environment import read_variables
from shardwise.errors import ConfigError

__all__ = ["POINTS", "fault_point", "visits"]

VARIABLE = "SHARDWISE_FAULT"
POINTS = frozenset(
    {
        "save.begin",
        "save.tmp_made",
        "save.after_first_file",
        "save.before_manifest",
        "save.before_rename",
        "save.after_rename",
        "save.before_latest",
        "save.after_latest",
        "load.begin",
        "load.after_manifest",
        "load.after_verify",
        "load.after_place",
    }
)
ACTIONS = ("kill", "raise", "sleep", "enospc", "flip")
_SLEEP_SECONDS = 3600.0


class _Visits:
    """How often each rank of this process came to each point."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def count(self, point: str, rank: int) -> int:
        """Count one more visit; return their number."""
        self._counts[point, rank] += 1
        return self._counts[point, rank]

    def forget(self) -> None:
        """Begin to count anew."""
        self._counts.clear()


visits = _Visits()


def fault_point(point: str, rank: int, path: Path | None = None) -> None:
    """Do what the environment asks for at this point, if anything.

    Args:
        point: one of ``POINTS``.
        rank: of the caller.
        path: a file that "flip" damages: the last byte is inverted.

    Raises:
        ConfigError: the variable is malformed.
        OSError: "enospc": no space left.
        RuntimeError: "raise".
    """
    assert point in POINTS, point
    text = read_variables((VARIABLE,)).get(VARIABLE)
    if not text:
        return
    number = visits.count(point, rank)
    for entry in text.split(","):
        where, who, occurrence, action = _parsed(entry)
        if (where, who, occurrence) == (point, rank, number):
            _act(action, point, rank, path)


def _parsed(entry: str) -> tuple[str, int, int, str]:
    parts = entry.strip().split(":")
    if (
        len(parts) != 4
        or parts[0] not in POINTS
        or parts[3] not in ACTIONS
        or not all(p.isdecimal() for p in parts[1:3])
    ):
        raise ConfigError(
            f"{VARIABLE}: expected point:rank:occurrence:action, got {entry!r}; points: {sorted(POINTS)}; actions: "
            f"{list(ACTIONS)}"
        )
    return parts[0], int(parts[1]), int(parts[2]), parts[3]


def _act(action: str, point: str, rank: int, path: Path | None) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "sleep":
        time.sleep(_SLEEP_SECONDS)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path) if path else None)
    elif action == "flip":
        if path is None:
            raise ConfigError(f"{VARIABLE}: there is no file to damage at {point}")
        with path.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            byte = stream.read(1)[0]
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([byte ^ 0xFF]))
    else:
        raise RuntimeError(f"a fault was asked for at {point} on rank {rank}")
