"""Loss scales as DeepSpeed has them: fixed ones, and hysteresis that every clean step restores."""

import math

import pytest

from shardwise.errors import ConfigError, NonFiniteError
from shardwise.numerics.scaler import LossScaler
from shardwise.precision import LossScale


def scales(rule: LossScale, steps: str) -> list[float]:
    """Return the scale after each step: "." is clean, "x" overflows."""
    scaler, found = LossScaler(rule), []
    for step in steps:
        scaler.after_step() if step == "." else scaler.after_overflow("layers.0.weight")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize("steps", ["." * 9, "x" * 9, ".x" * 5])
def test_fixed_scale_never_changes_and_never_raises(steps: str) -> None:
    rule = LossScale(fixed=3.0, growth_interval=1, hysteresis=1, minimum=3.0)
    assert scales(rule, steps) == [3.0] * len(steps)
    with pytest.raises(NonFiniteError):  # the dynamic one does at its minimum
        scales(LossScale(initial=3.0, minimum=3.0, hysteresis=1), "x" * 2)


def test_clean_step_restores_the_hysteresis_when_it_is_consecutive() -> None:
    rule = {"initial": 16.0, "growth_interval": 100, "hysteresis": 2}
    assert scales(LossScale(**rule, consecutive_hysteresis=True), "x.x.xx.x") == [16, 16, 16, 16, 16, 8, 8, 8]
    assert scales(LossScale(**rule), "x.x.xx.x") == [16, 16, 8, 8, 4, 2, 2, 1]


def test_halving_does_not_restore_the_hysteresis() -> None:
    rule = LossScale(initial=16.0, hysteresis=2, consecutive_hysteresis=True)
    assert scales(rule, "xxxx") == [16, 8, 4, 2]


@pytest.mark.parametrize("fixed", [0.0, -1.0, math.inf, math.nan])
def test_fixed_scale_has_to_be_a_positive_number(fixed: float) -> None:
    with pytest.raises(ConfigError, match="fixed must be a finite number above 0"):
        LossScale(fixed=fixed)
