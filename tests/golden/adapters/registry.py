"""What an entry of ``published.json`` is, and which adapter answers for it.

An adapter reads an entry's inputs, calls the planner with them and returns the result in bytes, elements, seconds,
FLOPs or a plain ratio. It does none of the arithmetic under test.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import Shape
from shardwise.planner.states import HALF_GRADIENTS, Accounting
from shardwise.planner.ways import Ways
from shardwise.sharding import Sharding, stage_sharding

SPLIT = r"(?P<split>dp|os|os_g|os_g_p)"  # the ZeRO paper's names of stages 0 to 3

UNITS: Mapping[str, float] = {
    "GB": 1e9,
    "MiB": 2**20,
    "GiB": 2**30,
    "GiB/GPU": 2**30,
    "TiB": 2**40,
    "TiB/node": 2**40,
    "GB/s": 1e9,
    "Gbit/s per node": 1e9,
    "TB/s aggregate slow memory": 1e12,
    "TFLOP/s/GPU": 1e12,
    "PFLOP/s": 1e15,
    "billion parameters": 1e9,
    "trillion parameters": 1e12,
    "days": 86400,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One published number."""

    id: str
    topic: str
    kind: str
    inputs: Mapping[str, Any]
    expected: Any
    unit: str
    tolerance: float
    source: str

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    @property
    def one_unit(self) -> float:
        """The entry's unit in bytes, elements, seconds, FLOPs, or as a ratio."""
        return 0.01 if self.unit.startswith("%") else UNITS.get(self.unit, 1)

    def agrees(self, value: Any) -> bool:
        """Whether a planner's result is the published one within the tolerance."""
        if isinstance(self.expected, dict):
            return bool(value == self.expected)
        return abs(value / self.one_unit - self.expected) <= self.tolerance * (abs(self.expected) or 1)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    pattern: re.Pattern[str]
    call: Callable[..., Any]


ADAPTERS: list[Adapter] = []


def covers(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function answer for the entries whose whole id matches; named groups become its arguments."""

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        ADAPTERS.append(Adapter(pattern=re.compile(pattern), call=call))
        return call

    return register


def adapters_of(entry: Entry) -> list[Adapter]:
    return [adapter for adapter in ADAPTERS if adapter.pattern.fullmatch(entry.id)]


def planned(entry: Entry) -> Any:
    """Return what the planner says of an entry."""
    (adapter,) = adapters_of(entry)
    match = adapter.pattern.fullmatch(entry.id)
    assert match is not None
    return adapter.call(entry, **match.groupdict())


def sharding(split: str) -> Sharding:
    return stage_sharding(["dp", "os", "os_g", "os_g_p"].index(split))


def ways(split: str, num_ranks: float = math.inf) -> Ways:
    return Ways.over(sharding(split), num_ranks)


def accounting(k: float) -> Accounting:
    """The paper's accounting with K optimizer bytes, which is 12 wherever it is given."""
    assert HALF_GRADIENTS.optimizer == k
    return HALF_GRADIENTS


def shape(name: str, entry: Entry) -> Shape:
    """The shape of this name, which must be the one of the entry's inputs."""
    found = SHAPES[name]
    facts = (
        (found.num_layers, ("L", "l", "nl", "layers")),
        (found.hidden, ("h", "hd", "d", "hidden")),
        (found.num_heads, ("a", "heads")),
        (found.ffn_hidden, ("f",)),
        (found.kv_hidden, ("kv",)),
        (found.vocab, ("V", "v")),
    )
    for fact, names in facts:
        assert all(entry[name] == fact for name in names if name in entry.inputs), (name, names)
    return found
