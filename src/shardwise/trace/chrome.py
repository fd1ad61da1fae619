"""A timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing: counters of bytes, slices of work."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.trace.lines import read_lines

__all__ = ["chrome_trace", "write_chrome_trace"]

_COMPUTE, _NETWORK = "compute", "collectives"


@dataclass(kw_only=True)
class _Slice:
    """Work between two lines; ``end`` is None while it goes on. In microseconds."""

    name: str
    category: str
    begin: float
    args: dict[str, Any]
    end: float | None = None


def write_chrome_trace(timeline: str | Path, path: str | Path) -> None:
    """Write the Chrome trace of a file of lines; the file may be that of a process that died.

    Raises:
        ConfigError: ``timeline`` is no timeline.
    """
    Path(path).write_text(json.dumps(chrome_trace(read_lines(timeline))) + "\n", encoding="utf-8")


def chrome_trace(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the trace of the lines of one rank: a process, with tracks whose slices nest.

    Slices that overlap without one being inside the other (two collectives in flight) go on further tracks.
    """
    counters: list[dict[str, Any]] = []
    slices: dict[int, _Slice] = {}
    kinds: dict[str, int] = {}
    rank, now = 0, 0.0
    for line in lines:
        now, what = round(line["seconds"] * 1e6, 1), line["what"]
        if what == "head":
            rank = line["rank"]
        if what in ("head", "memory"):
            kinds |= dict.fromkeys(line["measured_bytes"], 0)
            counters.append(_counter(rank, now, "measured bytes", kinds | line["measured_bytes"]))
        elif what == "allocator":
            found = {key: value for key, value in line["measured_by_allocator"].items() if key.endswith("_bytes")}
            counters.append(_counter(rank, now, "measured by the allocator", found))
        elif what == "begin":
            slices[line["slice"]] = _begun(now, line)
        elif what == "end" and line["slice"] in slices:
            slices[line["slice"]].end = now
            slices[line["slice"]].args |= {key: line[key] for key in line if key == "waited_seconds"}
    head = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    return {"traceEvents": [head, *counters, *_on_tracks(rank, list(slices.values()), now)], "displayTimeUnit": "ms"}


def _counter(rank: int, when: float, name: str, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": rank, "ts": when, "args": dict(values)}


def _begun(now: float, line: dict[str, Any]) -> _Slice:
    is_collective = line["operation"] == "collective"
    words = (line["verb"], line["label"]) if is_collective else (line["operation"], line.get("owner", ""))
    kept = ("step", "phase", "owner", "verb", "collective", "label", "axis", "sent_bytes")
    return _Slice(
        name=" ".join(word for word in words if word),
        category=_NETWORK if is_collective else _COMPUTE,
        begin=now,
        args={key: line[key] for key in kept if key in line},
    )


def _on_tracks(rank: int, slices: list[_Slice], last: float) -> list[dict[str, Any]]:
    """Give every slice the first track of its category on which it nests, and the tracks names."""
    tracks: dict[tuple[str, int], list[float]] = {}  # ends of the slices that are open, outermost first
    events = []
    for each in slices:  # in the order in which they began
        end = last if each.end is None else each.end  # of a process that died
        number = 0
        while not _fits(tracks.setdefault((each.category, number), []), each.begin, end):
            number += 1
        tracks[each.category, number].append(end)
        events.append(
            {
                "ph": "X",
                "name": each.name,
                "cat": each.category,
                "pid": rank,
                "tid": _track(each.category, number),
                "ts": each.begin,
                "dur": round(end - each.begin, 1),
                "args": each.args,
            }
        )
    names = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": rank,
            "tid": _track(category, number),
            "args": {"name": category if number == 0 else f"{category} {number + 1}"},
        }
        for category, number in tracks
    ]
    return [*names, *events]


def _fits(ends: list[float], begin: float, end: float) -> bool:
    """Whether a slice lies inside the innermost open one of a track, once those that are over are gone."""
    while ends and ends[-1] <= begin:
        ends.pop()
    return not ends or end <= ends[-1]


def _track(category: str, number: int) -> int:
    return (1 if category == _COMPUTE else 101) + number
