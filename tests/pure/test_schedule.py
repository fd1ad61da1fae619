"""Prefetch, release and reduction order, from traces."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.schedule import Begin, End, Schedule, TraceEvent

PROPERTY = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
NUM_UNITS = 6


def calls(*units: int) -> tuple[TraceEvent, ...]:
    """A root, unit 0, that calls units one after the other."""
    inner = [event for unit in units for event in (Begin(unit), End(unit))]
    return (Begin(0), *inner, End(0))


# A tree of calls: (unit, calls inside it).
TREES = st.recursive(
    st.tuples(st.integers(0, NUM_UNITS - 1), st.just([])),
    lambda trees: st.tuples(st.integers(0, NUM_UNITS - 1), st.lists(trees, max_size=4)),
    max_leaves=12,
)


def trace_of(tree: tuple[int, list]) -> list[TraceEvent]:
    unit, inner = tree
    return [Begin(unit), *(event for call in inner for event in trace_of(call)), End(unit)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    return Schedule(
        num_units=NUM_UNITS,
        trace=tuple(trace_of(draw(TREES))) if draw(st.booleans()) else (),
        prefetch=draw(st.integers(0, 3)),
        keep_last=draw(st.booleans()),
    )


@PROPERTY
@given(schedules())
def test_forward_order_is_that_of_first_uses(schedule: Schedule) -> None:
    begins = [event.unit for event in schedule.trace if isinstance(event, Begin)]
    order = schedule.forward_order
    assert sorted(order) == sorted(set(begins))
    assert [begins.index(unit) for unit in order] == sorted(begins.index(unit) for unit in order)


@PROPERTY
@given(schedules())
def test_reduction_order_holds_every_unit_once_and_the_used_ones_first(schedule: Schedule) -> None:
    order = schedule.reduction_order
    num_used = len(schedule.forward_order)
    assert sorted(order) == list(range(NUM_UNITS))
    assert order[:num_used] == schedule.forward_order[::-1]
    assert list(order[num_used:]) == sorted(order[num_used:], reverse=True)


@PROPERTY
@given(schedules())
def test_units_that_nothing_follows_are_kept(schedule: Schedule) -> None:
    if not schedule.keep_last or not schedule.trace:
        assert not schedule.kept
        return
    last_begin = max(place for place, event in enumerate(schedule.trace) if isinstance(event, Begin))
    for unit in range(NUM_UNITS):
        ends = [place for place, event in enumerate(schedule.trace) if event == End(unit)]
        assert (unit in schedule.kept) == bool(ends and max(ends) > last_begin)


@PROPERTY
@given(schedules(), st.booleans(), st.integers(0, NUM_UNITS - 1))
def test_units_ahead_are_the_next_of_the_order(schedule: Schedule, backward: bool, unit: int) -> None:
    order = schedule.forward_order[::-1] if backward else schedule.forward_order
    ahead = list(schedule.ahead(unit, backward=backward))
    assert unit not in ahead
    assert len(ahead) <= schedule.prefetch
    if unit not in order:
        assert not ahead
    else:
        rest = order[order.index(unit) + 1 :]
        assert ahead == list(rest)[: schedule.prefetch]


def test_without_a_trace_nothing_is_gathered_ahead_or_kept() -> None:
    schedule = Schedule(num_units=3)
    assert (schedule.forward_order, schedule.kept, schedule.ahead(1)) == ((), frozenset(), ())
    assert schedule.reduction_order == (2, 1, 0)


def test_plain_stack_keeps_the_last_layer_and_the_root_around_it() -> None:
    schedule = Schedule(num_units=4, trace=calls(1, 2, 3))
    assert schedule.forward_order == (0, 1, 2, 3)
    assert schedule.kept == {0, 3}
    assert (schedule.ahead(1), schedule.ahead(3)) == ((2,), ())
    assert (schedule.ahead(3, backward=True), schedule.ahead(0, backward=True)) == ((2,), ())


def test_unit_used_again_later_keeps_its_first_place() -> None:
    schedule = Schedule(num_units=4, trace=calls(1, 2, 1))
    assert schedule.forward_order == (0, 1, 2)
    assert schedule.reduction_order == (2, 1, 0, 3)
    assert schedule.kept == {0, 1}


def test_two_units_ahead_are_gathered_nearest_first() -> None:
    schedule = Schedule(num_units=5, trace=calls(4, 2, 3, 1), prefetch=2)
    assert schedule.ahead(4) == (2, 3)
    assert schedule.ahead(1, backward=True) == (3, 2)


@pytest.mark.parametrize("field", ["prefetch", "reductions_in_flight"])
def test_negative_overlap_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*>= 0"):
        Schedule(num_units=1, **{field: -1})


def test_late_units_are_reduced_after_all_others() -> None:
    schedule = Schedule(num_units=4, trace=calls(1, 2, 3)).with_late(frozenset({3})).with_late(frozenset({1}))
    assert schedule.reduction_order == (2, 0, 3, 1)
    assert schedule.agreed(calls(2, 1)).late == {1, 3}
