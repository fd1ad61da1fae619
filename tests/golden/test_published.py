"""Published numbers through the planner's functions: papers, lectures, documentation.

``published.json`` has one entry per line. An adapter (``adapters/``) turns an entry's inputs into arguments; the
planner does the arithmetic. An entry without an adapter, or with two, fails; so does an adapter without an entry.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from .adapters import activations, communication, compute, offload, states
from .adapters.registry import ADAPTERS, Entry, adapters_of, planned

FOLDER = Path(__file__).parent
ENTRIES = [Entry(**entry) for entry in json.loads((FOLDER / "published.json").read_text())]
COUNTED = [entry for entry in ENTRIES if entry.kind != "property"]
SUBJECTS = (activations, communication, compute, offload, states)

# A property is a test of the engine.
PROPERTIES = {"sim.bitexact": "test_ten_steps_are_bit_identical_at_all_stages"}


def name(entry: Entry) -> str:
    return entry.id


@pytest.mark.parametrize("entry", COUNTED, ids=name)
def test_planner_gives_the_published_number(entry: Entry) -> None:
    value = planned(entry)
    assert entry.agrees(value), f"{entry.source}: expected {entry.expected} {entry.unit}, planned {value}"


def test_every_entry_has_one_adapter() -> None:
    assert {entry.id: len(adapters_of(entry)) for entry in COUNTED if len(adapters_of(entry)) != 1} == {}


def test_every_adapter_has_an_entry() -> None:
    idle = [
        adapter.pattern.pattern for adapter in ADAPTERS if not any(map(adapter.pattern.fullmatch, map(name, COUNTED)))
    ]
    assert idle == []


def test_every_property_is_tested() -> None:
    engine = (FOLDER / "test_lecture.py").read_text()
    assert [entry.id for entry in ENTRIES if entry.kind == "property"] == list(PROPERTIES)
    assert all(f"def {test}(" in engine for test in PROPERTIES.values())


def test_no_entry_is_lost() -> None:
    counts = Counter(entry.kind for entry in ENTRIES)
    print(counts, Counter(entry.topic for entry in ENTRIES))
    assert counts == {"formula": 418, "config": 20, "property": 1}
    assert len({entry.id for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("factor", [1 + 1e-3, 1 - 1e-3])
def test_an_entry_does_not_agree_with_another_number(factor: float) -> None:
    for entry in COUNTED:
        if not isinstance(entry.expected, dict):
            beyond = (factor - 1) * (1 + 1e3 * entry.tolerance) * 1.01
            other = entry.expected * (1 + beyond) if entry.expected else beyond
            assert not entry.agrees(other * entry.one_unit), entry.id
