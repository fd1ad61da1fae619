"""The loss scale: growth, hysteresis, minimum."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import NonFiniteError
from shardwise.numerics.scaler import LossScaler
from shardwise.precision import LossScale

PROPERTY = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """Return the scale after each step: "." is clean, "x" overflows."""
    found = []
    for step in steps:
        if step == ".":
            scaler.after_step()
        else:
            scaler.after_overflow("layers.0.weight")
        found.append(scaler.scale)
    return found


def scaler(**rule: float) -> LossScaler:
    return LossScaler(LossScale(**{"initial": 16.0, "growth_interval": 3, "hysteresis": 1} | rule))


def test_scale_starts_at_the_initial_value() -> None:
    assert scaler(initial=64.0).scale == 64.0


def test_scale_doubles_after_every_interval_of_clean_steps() -> None:
    assert scales(scaler(), "." * 7) == [16, 16, 32, 32, 32, 64, 64]


def test_overflow_halves_the_scale_and_restarts_the_interval() -> None:
    assert scales(scaler(), "..x...x") == [16, 16, 8, 8, 8, 16, 8]


def test_hysteresis_bears_overflows_before_the_first_halving() -> None:
    assert scales(scaler(hysteresis=3), "xxxx") == [16, 16, 8, 4]


def test_borne_overflow_restarts_the_interval() -> None:
    assert scales(scaler(hysteresis=2), "..x.....") == [16, 16, 16, 16, 16, 32, 32, 32]


def test_clean_steps_short_of_an_interval_do_not_restore_the_tolerance() -> None:
    assert scales(scaler(hysteresis=2), "x..x..x") == [16, 16, 16, 8, 8, 8, 4]


def test_growth_restores_the_tolerance() -> None:
    assert scales(scaler(hysteresis=2), "xx...xx") == [16, 8, 8, 8, 16, 16, 8]


def test_scale_stops_at_the_minimum() -> None:
    assert scales(scaler(minimum=6.0), "xx") == [8, 6]


def test_overflow_at_the_minimum_raises_and_names_the_place() -> None:
    at_minimum = scaler(minimum=8.0)
    assert scales(at_minimum, "x") == [8]
    with pytest.raises(NonFiniteError, match=r"smallest loss scale 8; first non-finite: layers\.0\.weight"):
        at_minimum.after_overflow("layers.0.weight")
    assert at_minimum.scale == 8.0


def test_scale_can_grow_again_from_the_minimum() -> None:
    assert scales(scaler(minimum=8.0), "x...x") == [8, 8, 8, 16, 8]


@PROPERTY
@given(
    st.text(alphabet=".x", max_size=60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([2.0**-10, 1.0]),
)
def test_scale_changes_by_factors_of_two_and_only_when_the_rule_says(
    steps: str, growth_interval: int, hysteresis: int, minimum: float
) -> None:
    rule = LossScale(initial=2.0**100, minimum=minimum, growth_interval=growth_interval, hysteresis=hysteresis)
    found = [rule.initial, *scales(LossScaler(rule), steps)]
    clean, borne = 0, 0
    for step, before, after in zip(steps, found, found[1:], strict=False):
        clean = clean + 1 if step == "." else 0
        if clean == growth_interval:
            clean, borne = 0, 0
            assert after == 2 * before
        elif step == "x":
            borne += 1
            assert after == (before / 2 if borne >= hysteresis else before)
        else:
            assert after == before
    assert all(math.frexp(scale)[0] == 0.5 for scale in found)  # powers of two: scaling is exact
