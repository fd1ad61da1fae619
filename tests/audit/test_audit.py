"""The audit counts what the allocator did, and tells when a plan is not kept."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.audit.cases import AuditCase, audit_cases, resident_cases
from shardwise.audit.heap import heap_bytes
from shardwise.audit.planning import Planned, plan_cases
from shardwise.audit.trace import Measured, replay
from shardwise.audit.verdict import Row, audit_facts, worst

CASE = AuditCase(model="mlp", stage=3, precision="fp32", checkpointing=False, ranks=2)
PLANNED = Planned(
    states={"param": 100, "master": 0, "grad": 100, "optim": 200},
    peak=1000,
    by_kind={"param": 100, "optim": 200, "gathered": 50, "activation": 400, "temporary": 250},
    moment="backward",
)
MEASURED = Measured(rest=PLANNED.states, peak=1000, by_kind={"param": 100, "optim": 200, "gathered": 50, "other": 650})


def memory(at: float, address: int, num_bytes: int) -> dict[str, Any]:
    return {"name": "[memory]", "ts": at, "args": {"Addr": address, "Bytes": num_bytes}}


def mark(at: float, words: str) -> dict[str, Any]:
    return {"name": f"audit {words}", "cat": "user_annotation", "ts": at}


def test_replay_counts_what_lives_between_the_marks() -> None:
    found = replay(
        [
            memory(0, 1, 900),  # before the step: gone when it begins
            memory(1, 1, -900),
            memory(2, 2, 100),
            mark(3, "param 2"),
            mark(4, "begin"),
            memory(5, 3, 70),
            memory(6, 3, -70),
            memory(7, 3, 50),  # the same address again
            mark(8, "grad 3"),
            memory(9, 4, 20),
            mark(10, "rest"),
            memory(11, 4, -20),
            mark(12, "end"),
            memory(13, 5, 5000),
        ]
    )
    assert found == Measured(
        rest={"param": 100, "grad": 50, "other": 20}, peak=170, by_kind={"param": 100, "grad": 50, "other": 20}
    )


def test_replay_sorts_by_time_and_forgets_frees_that_it_did_not_see() -> None:
    events = [mark(1, "begin"), memory(2, 7, -10), memory(3, 8, 10), mark(4, "rest"), mark(5, "end")]
    assert replay(reversed(events)).peak == 10


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks"):
        replay([memory(0, 1, 900), mark(1, "begin")])


def test_errors_are_relative_to_the_plan() -> None:
    assert Row(case=CASE, planned=PLANNED, measured=MEASURED, resident=1100).errors() == {
        "states": 0.0,
        "rest of the peak": 0.0,
        "peak": 0.0,
        "resident": pytest.approx(0.1),
    }


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"rest": {**PLANNED.states, "optim": 204}}, "states"),
        ({"rest": {"param": 100, "grad": 100, "optim": 200, "master": 1}}, "states"),
        ({"by_kind": {**MEASURED.by_kind, "other": 670}}, "rest of the peak"),
        ({"peak": 1025}, "peak"),
    ],
)
def test_a_plan_that_is_not_kept_is_told(change: dict[str, Any], column: str) -> None:
    row = Row(case=CASE, planned=PLANNED, measured=replace(MEASURED, **change))
    facts = audit_facts([row, Row(case=CASE, planned=PLANNED, measured=MEASURED)], 1.0)
    assert not facts["kept"]
    assert worst([row])[column] > 0
    assert audit_facts([Row(case=CASE, planned=PLANNED, measured=MEASURED)], 1.0)["kept"]
    json.dumps(facts)


def test_the_list_has_every_combination() -> None:
    cases = [case for case in audit_cases() if case.model == "gpt"]
    assert len(cases) == 4 * 2 * 2 * 2 == len(set(cases))
    assert {case.model for case in audit_cases(quick=True)} >= {"gpt", "mlp"}
    large = [case for case in resident_cases() if case.precision == "fp32"]
    assert all(plan.peak > 300 * 10**6 for plan in plan_cases(large[:1]))


@pytest.mark.timeout(300)
def test_short_form_keeps_its_plans(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    command = [sys.executable, "-m", "shardwise.audit", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(path.read_text())
    assert facts["kept"]
    assert len(facts["rows"]) >= 8
    assert facts["worst"]["states"] == 0
    assert all(row["measured"]["peak"] > 20 * 2**20 for row in facts["rows"])
    assert "worst error of peak" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_holes_between_blocks_that_live_count_in_the_heap() -> None:
    large, small, num_blocks = 1 << 20, 1 << 18, 32
    changes = [(-3, 1 << 25), (-1, 1 << 30)]  # everything comes from the heap, and the heap keeps it
    for number in range(num_blocks):
        changes += [(2 * number + 1, large), (2 * number + 2, small)]
    live = num_blocks * (large + small)
    assert heap_bytes(changes) == pytest.approx(live, rel=0.02)
    changes += [(2 * number + 1, 0) for number in range(num_blocks)]
    changes += [(2 * number + 1, 2 * large) for number in range(num_blocks // 2)]  # in none of the holes
    assert heap_bytes(changes) == pytest.approx(live + num_blocks * large, rel=0.02)


def test_the_resident_size_is_compared_with_the_heap() -> None:
    row = Row(case=CASE, planned=replace(PLANNED, heap=1100), resident=1155)
    assert row.errors() == {"resident": pytest.approx(0.05)}
