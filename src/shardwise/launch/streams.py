"""What the ranks print: one log per rank, the console, and when each line came.

Every stream of a rank is a named pipe in a private folder. One thread reads all of them, so lines of a rank's two
streams keep their order of arrival in its log, and a traceback has a time. Read ``failure.py`` for what that is for.
"""

import contextlib
import os
import selectors
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from shardwise.launch.options import ERR, OUT, LaunchOptions

__all__ = ["Line", "RankStreams"]

_KEPT_LINES = 2000  # of each rank, for the report of a failure
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Line:
    """One line that a rank printed, without its end."""

    seconds: float  # monotonic
    stream: str
    text: str


@dataclass(kw_only=True)
class _Pipe:
    """One stream of one rank."""

    rank: int
    stream: str
    reader: int
    writer: int  # held open, so that the pipe does not end between two writers
    log: BinaryIO
    console: BinaryIO | None
    prefix: bytes
    pending: bytes = field(default=b"")


class RankStreams:
    """Reads what the ranks of one node print, until ``close``.

    Args:
        options: what is shown on the console.
        folder: where logs are written, ``rank-0.log`` and so on.
    """

    def __init__(self, options: LaunchOptions, folder: Path) -> None:
        self.folder = folder
        self._options = options
        self._private = Path(tempfile.mkdtemp(prefix="shardwise-launch-"))
        self._pipes: list[_Pipe] = []
        self._logs: list[BinaryIO] = []
        self._lines: dict[int, deque[Line]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read_all, name="rank streams", daemon=True)
        self._thread.start()

    def log_of(self, rank: int, restart: int = 0) -> Path:
        """Return where a rank's log is."""
        return self.folder / (f"rank-{rank}.log" if restart == 0 else f"rank-{rank}.restart-{restart}.log")

    def error_file(self, rank: int, restart: int) -> Path:
        """Return where a rank that uses torch's error handlers may write its error."""
        return self._private / f"error-{rank}-{restart}.json"

    def open(self, local_rank: int, rank: int, restart: int) -> tuple[Path, Path]:
        """Return the two paths that a rank's stdout and stderr are to be opened at for writing."""
        log = self.log_of(rank, restart).open("xb", buffering=0)
        self._logs.append(log)
        self._lines[rank] = deque(maxlen=_KEPT_LINES)
        paths = {}
        for stream, console in ((OUT, sys.stdout), (ERR, sys.stderr)):
            path = self._private / f"{stream}-{rank}-{restart}"
            os.mkfifo(path, 0o600)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            pipe = _Pipe(
                rank=rank,
                stream=stream,
                reader=reader,
                writer=os.open(path, os.O_WRONLY),
                log=log,
                console=console.buffer if stream in self._options.streams_shown(local_rank) else None,
                prefix=f"[rank {rank}] ".encode() if stream in self._options.streams_teed(local_rank) else b"",
            )
            self._pipes.append(pipe)
            self._selector.register(reader, selectors.EVENT_READ, pipe)
            paths[stream] = path
        return paths[OUT], paths[ERR]

    def lines(self, rank: int) -> list[Line]:
        """Return the last lines of a rank's newest start; complete after ``finish``."""
        return list(self._lines.get(rank, ()))

    def finish(self) -> None:
        """Read what is left, once the ranks have ended."""
        if self._thread.is_alive():
            os.close(self._wake_writer)
            self._thread.join()

    def close(self) -> None:
        """Read what is left, once the ranks have ended, and close everything."""
        self.finish()
        os.close(self._wake_reader)
        for pipe in self._pipes:
            os.close(pipe.reader)
            os.close(pipe.writer)
        for log in self._logs:
            log.close()
        self._selector.close()
        shutil.rmtree(self._private)

    def _read_all(self) -> None:
        closing = False
        while not closing:
            ready = self._selector.select()
            closing = any(key.data is None for key, _ in ready)
            for key, _ in ready:
                if key.data is not None:
                    self._read(key.data)
        for pipe in self._pipes:
            while self._read(pipe):
                pass
            self._take(pipe, pipe.pending)

    def _read(self, pipe: _Pipe) -> bool:
        try:
            data = os.read(pipe.reader, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        data = pipe.pending + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # progress bars end their lines with a carriage return
        pipe.pending = data[end:]
        self._take(pipe, data[:end])
        return True

    def _take(self, pipe: _Pipe, data: bytes) -> None:
        """Write whole lines to the log and to the console, and remember them."""
        if not data:
            return
        now = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk must not stop the ranks
            pipe.log.write(data)
        lines = data.splitlines(keepends=True)
        self._lines[pipe.rank].extend(
            Line(now, pipe.stream, line.decode(errors="replace").rstrip("\r\n")) for line in lines
        )
        if pipe.console is not None:
            try:
                pipe.console.write(b"".join(pipe.prefix + line for line in lines))
                pipe.console.flush()
            except OSError:  # nobody listens any more
                pipe.console = None
