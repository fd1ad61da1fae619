"""The lines of a timeline: JSON objects, one a line, in the order of time.

Owns the words of the format, which docs/timeline.md describes. A line is written when its moment passes, so that a
process that is killed leaves all but its last lines. Read ``recorder.py`` for who writes them.
"""

import fcntl
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import ConfigError

__all__ = ["VERSION", "Lines", "read_lines"]

VERSION = 1


class Lines:
    """A file of lines that grows; after ``close`` nothing is written any more.

    Raises:
        ConfigError: it cannot be opened, or another timeline is written to it.
    """

    def __init__(self, path: Path) -> None:
        try:
            stream = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"timeline: {path}: {error.strerror}") from None
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise ConfigError(f"timeline: another one is written to {path}: take another folder") from None
        stream.truncate(0)
        self._stream: TextIO | None = stream
        self._start = time.perf_counter()
        self._turn = threading.RLock()

    def seconds(self) -> float:
        """Return the seconds since the timeline began."""
        return time.perf_counter() - self._start

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line; its first field is when, in seconds."""
        text = json.dumps({"seconds": round(self.seconds(), 7), **values}) + "\n"
        with self._turn:  # the last reference to a tensor may go in another thread
            if self._stream is not None:
                self._stream.write(text)

    def close(self) -> None:
        """Let go of the file."""
        with self._turn:
            if self._stream is not None:
                self._stream.close()
                self._stream = None


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a timeline; one that was cut off at the end of the file is left out.

    Raises:
        ConfigError: the file is none, or of a later version.
    """
    number = 0
    with Path(path).open(encoding="utf-8") as stream:
        for number, text in enumerate(stream, start=1):
            try:
                values = json.loads(text)
            except ValueError:
                if not text.endswith("\n"):
                    return
                values = None
            if not isinstance(values, dict) or (number == 1 and values.get("version") != VERSION):
                raise ConfigError(f"{path}, line {number}: not a timeline of version {VERSION}")
            yield values
    if number == 0:
        raise ConfigError(f"{path}: not a timeline of version {VERSION}")
