"""Released parameters: nearly a hundred operations in a process of its own raise our error, and none ends it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .operations import OPERATIONS

STATES = ("new", "with gradients", "after a step", "after an evaluation")


@pytest.fixture(scope="module")
def report() -> dict[tuple[str, str], str]:
    """What each operation did in each state."""
    script = Path(__file__).with_name("operations.py")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, f"exit code {ended.returncode} in {lines[-1:]}\n{ended.stderr[-2000:]}"
    assert lines[-1] == ["end", "training", "unharmed"]
    return {(state, name): outcome for state, name, outcome in lines if outcome != "started"}


def test_no_operation_ends_the_process(report: dict[tuple[str, str], str]) -> None:
    assert len(OPERATIONS) >= 34
    assert report.keys() == {(state, name) for state in STATES for name in OPERATIONS} | {("end", "training")}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_a_released_parameter_raises_our_error_with_its_name(
    report: dict[tuple[str, str], str], name: str
) -> None:
    assert {state: report[state, name] for state in STATES} == dict.fromkeys(STATES, "refused")
