"""Which rank failed first, and what it said. Pure.

All ranks of a job fail when one does: the others lose their peer, or the launcher ends them. The first is the one whose
traceback began first; a rank that leaves without one counts from its end.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.streams import Line

__all__ = ["RankEnd", "describe_failure", "exit_status", "first_to_fail"]

_HEADER = re.compile(r"Traceback \(most recent call last\):$")
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch puts it before the lines of its ranks' tracebacks
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_TEARDOWN_SECONDS = 30.0  # between a traceback and the end of its process, at most
_DOUBT_SECONDS = 2.0  # a rank that the launcher ended while it was going down by itself
_SHOWN_LINES = 20


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: its number in the job.
        exit_code: negative for a signal.
        seconds: when, monotonic.
        lines: the last lines it printed.
        log: where the rest is.
    """

    rank: int
    exit_code: int
    seconds: float
    lines: Sequence[Line]
    log: Path

    def traceback(self) -> list[Line]:
        """Return its last traceback, with those that led to it, to the end of what it printed to stderr."""
        lines = [line for line in self.lines if line.stream == "stderr"]
        headers = [number for number, line in enumerate(lines) if _HEADER.search(line.text)]
        while len(headers) > 1 and any(
            _PREFIX.sub("", line.text).startswith(_LINKS) for line in lines[headers[-2] : headers[-1]]
        ):
            headers.pop()
        return lines[headers[-1] :] if headers else []

    @property
    def ended_by_launcher(self) -> bool:
        """Whether it ended by the signal that the launcher sends to the ranks left over."""
        return self.exit_code == -signal.SIGTERM

    def began(self) -> float:
        """Return when its failure began."""
        traceback = self.traceback()
        if traceback and self.exit_code > 0 and self.seconds - traceback[0].seconds < _TEARDOWN_SECONDS:
            return min(traceback[0].seconds, self.seconds)
        return self.seconds


def first_to_fail(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the rank that failed first, out of at least one."""
    others = [end for end in ends if not end.ended_by_launcher]
    if not others:
        return min(ends, key=lambda end: end.seconds)
    first = min(others, key=RankEnd.began)
    for end in ends:
        traceback = end.traceback()
        in_teardown = end.ended_by_launcher and traceback
        if in_teardown and first.began() - _DOUBT_SECONDS < traceback[0].seconds < first.began():
            first = end
    return first


def exit_status(end: RankEnd) -> int:
    """Return what a shell would say of this end."""
    return end.exit_code if end.exit_code > 0 else 128 - end.exit_code


def describe_failure(ends: Sequence[RankEnd]) -> str:
    """Return a report that ends with the traceback of the rank that failed first, or with its last lines."""
    first = first_to_fail(ends)
    report = [
        f"rank {end.rank} ended after that: {_reason(end)}, log {end.log}"
        for end in sorted(ends, key=lambda end: end.rank)
        if end is not first
    ]
    report.append(f"The first to fail, rank {first.rank}: {_reason(first)}, log {first.log}")
    shown = first.traceback() or list(first.lines)[-_SHOWN_LINES:]
    report += [_PREFIX.sub("", line.text) for line in shown]
    return "\n".join(report)


def _reason(end: RankEnd) -> str:
    if end.exit_code >= 0:
        return f"exit code {end.exit_code}"
    try:
        name = signal.Signals(-end.exit_code).name
    except ValueError:
        name = str(-end.exit_code)
    return f"killed by {name}"
