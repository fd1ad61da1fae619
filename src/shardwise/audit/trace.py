"""What the allocator did, replayed from the trace that torch's profiler exports: every allocation and every free.

The trace has an event with address and bytes for each, and the marks that the trained rank left: which address is for
what, and when a step begins and ends. Pure; ``training.py`` makes the trace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MARK", "OTHER", "Measured", "replay"]

MARK = "audit"  # of a mark: "audit kind address", "audit begin", "audit rest", "audit end"
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes that the allocator had given out.

    Attributes:
        rest: at the mark "rest", by kind; ``OTHER`` is what no mark named.
        peak: at the moment with the most between "begin" and "end".
        by_kind: the peak by kind.
    """

    rest: Mapping[str, int]
    peak: int
    by_kind: Mapping[str, int]


def replay(events: Iterable[Mapping[str, Any]]) -> Measured:
    """Count what lives, event by event.

    Args:
        events: "traceEvents" of a trace, of one process.

    Raises:
        ValueError: the marks are missing.
    """
    chosen = [event for event in events if event.get("name") == "[memory]" or _words(event)]
    live: dict[int, tuple[int, str]] = {}
    rest: dict[str, int] | None = None
    peak, by_kind, total = 0, {}, 0
    watches = ended = False
    for event in sorted(chosen, key=lambda event: float(event["ts"])):
        words = _words(event)
        if words:
            watches = words[0] == "begin" or (watches and words[0] != "end")
            ended = ended or words[0] == "end"
            if words[0] == "rest":
                rest = _sums(live)
            elif len(words) == 2 and int(words[1]) in live:
                live[int(words[1])] = (live[int(words[1])][0], words[0])
        else:
            address, num_bytes = int(event["args"]["Addr"]), int(event["args"]["Bytes"])
            total -= live.pop(address, (0, ""))[0]
            if num_bytes > 0:
                live[address] = (num_bytes, OTHER)
                total += num_bytes
        if watches and total > peak:
            peak, by_kind = total, _sums(live)
        elif watches and total == peak:
            by_kind = _sums(live)  # a mark may have named what made the peak
    if rest is None or not ended:
        raise ValueError("the trace has no marks of a step")
    return Measured(rest=rest, peak=peak, by_kind=by_kind)


def _words(event: Mapping[str, Any]) -> list[str]:
    name = str(event.get("name", ""))
    return name.split()[1:] if name.startswith(f"{MARK} ") and event.get("cat") == "user_annotation" else []


def _sums(live: Mapping[int, tuple[int, str]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for num_bytes, kind in live.values():
        sums[kind] = sums.get(kind, 0) + num_bytes
    return sums
