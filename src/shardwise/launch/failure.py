"""Which rank failed first, and what it said. Pure.

All ranks of a job fail when one does: the others lose their peer, or the launcher ends them. The first is the one whose
traceback began first; a rank that leaves without one counts from its end. A rank that the launcher ended counts only
if another one missed it: a traceback may have been handled.
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
_DOUBT_SECONDS = 2.0  # for a rank that the launcher ended while it was going down by itself
_MISSED_PEER = re.compile(
    r"connection|peer|socket|broken pipe|EOFError|remote process|Dist(Network|Backend)Error|RankMismatchError",
    re.IGNORECASE,
)
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

    def exceptions(self) -> list[Line]:
        """Return the lines that end its last traceback, each the name of an exception and what it says."""
        found, in_frames = [], False
        for line in self.traceback():
            text = _PREFIX.sub("", line.text)
            if _HEADER.search(text):
                in_frames = True
            elif in_frames and text[:1].strip():
                found.append(line)
                in_frames = False
        return found

    def lived_on(self) -> bool:
        """Whether it printed something after its last traceback, other than torch's words about its end."""
        exceptions = self.exceptions()
        if not exceptions:
            return False
        lines = list(self.lines)
        end = max(number for number, line in enumerate(lines) if line is exceptions[-1])
        return any(line.text.strip() and not line.text.startswith("[rank") for line in lines[end + 1 :])

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
    if not any(_MISSED_PEER.search(line.text) for line in first.exceptions()):
        return first
    since, until = first.began() - _DOUBT_SECONDS, first.began()
    on_their_way = [
        end
        for end in ends
        if end.ended_by_launcher and end.exceptions() and not end.lived_on() and since < _raised(end) < until
    ]
    return min(on_their_way, key=_raised, default=first)


def exit_status(ends: Sequence[RankEnd]) -> int:
    """Return what a shell would say of the rank that failed first; 1 if the launcher ended it after its traceback."""
    first = first_to_fail(ends)
    if _on_its_way_out(first, ends):
        return 1
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def describe_failure(ends: Sequence[RankEnd]) -> str:
    """Return a report that ends with the traceback of the rank that failed first, or with its last lines."""
    first = first_to_fail(ends)
    report = [
        f"rank {end.rank} ended after that: {_reason(end)}, log {end.log}"
        for end in sorted(ends, key=lambda end: end.rank)
        if end is not first
    ]
    ended = "the traceback below, ended by the launcher on its way out"
    reason = ended if _on_its_way_out(first, ends) else _reason(first)
    report.append(f"The first to fail, rank {first.rank}: {reason}, log {first.log}")
    shown = first.traceback() or list(first.lines)[-_SHOWN_LINES:]
    report += [_PREFIX.sub("", line.text) for line in shown]
    return "\n".join(report)


def _raised(end: RankEnd) -> float:
    return end.traceback()[0].seconds


def _on_its_way_out(first: RankEnd, ends: Sequence[RankEnd]) -> bool:
    """Whether the launcher ended the first to fail, because of those that missed it."""
    return first.ended_by_launcher and not all(end.ended_by_launcher for end in ends)


def _reason(end: RankEnd) -> str:
    if end.exit_code >= 0:
        return f"exit code {end.exit_code}"
    try:
        name = signal.Signals(-end.exit_code).name
    except ValueError:
        name = str(-end.exit_code)
    return f"killed by {name}"
