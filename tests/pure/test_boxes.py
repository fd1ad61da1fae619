"""A flat range of a tensor as boxes: exhaustively for small shapes, sampled for larger ones."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.layout import range_to_boxes

PROPERTY = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
SIZES = {0: (), 1: range(8), 2: range(6), 3: range(4), 4: range(1, 4)}
WORST = {0: 1, 1: 1, 2: 3, 3: 5, 4: 7}


def covered(flat: np.ndarray, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """Return the flat indices of the boxes, box after box."""
    found: list[int] = []
    for offset, size in boxes:
        assert len(offset) == len(size) == flat.ndim
        assert all(count > 0 for count in size)
        window = tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))
        found += flat[window].ravel().tolist()
    return found


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, stop) for start in range(numel + 1) for stop in range(start, numel + 1))


@pytest.mark.parametrize("ndim", SIZES)
def test_boxes_cover_exactly_the_range_in_flat_order_exhaustively(ndim: int) -> None:
    worst = 0
    for shape in itertools.product(SIZES[ndim], repeat=ndim):
        numel = math.prod(shape)
        flat = np.arange(numel).reshape(shape)
        for start, stop in ranges(numel):
            boxes = range_to_boxes(shape, start, stop)
            assert covered(flat, boxes) == list(range(start, stop)), (shape, start, stop)
            worst = max(worst, len(boxes))
    assert worst == WORST[ndim]


@PROPERTY
@given(st.lists(st.integers(1, 12), max_size=6), st.data())
def test_boxes_cover_exactly_the_range_for_larger_shapes(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    if numel > 20_000:
        shape, numel = shape[:4], math.prod(shape[:4])
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = range_to_boxes(tuple(shape), start, stop)
    assert covered(np.arange(numel).reshape(shape), boxes) == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_whole_tensor_is_one_box() -> None:
    assert range_to_boxes((3, 4, 5), 0, 60) == [((0, 0, 0), (3, 4, 5))]


def test_whole_rows_are_one_box() -> None:
    assert range_to_boxes((3, 4, 5), 20, 60) == [((1, 0, 0), (2, 4, 5))]


def test_scalar_is_one_box_without_dimensions() -> None:
    assert range_to_boxes((), 0, 1) == [((), ())]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (2, 3)])
def test_empty_range_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert range_to_boxes(shape, 0, 0) == []
