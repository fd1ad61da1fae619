"""Norms slice by slice, against torch in fp64."""

import math

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.numerics.norm import ROW_NUMEL, check_norm_type, combine_norms, combine_rows, fast_norms, scaled_norm

PROPERTY = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
CPU = torch.device("cpu")
ORDERS = [1.0, 2.0, math.inf, 3.0]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-5, torch.float16: 1e-5}
LENGTHS = [1, 2, ROW_NUMEL - 1, ROW_NUMEL, ROW_NUMEL + 1, 3 * ROW_NUMEL + 5]


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact(flat: Tensor, order: float) -> float:
    """The norm in fp64, with a sum that does not round: ``math.fsum``."""
    wide = flat.double().abs()
    if order == math.inf:
        return float(wide.max())
    largest = float(wide.max())
    return largest * math.fsum((wide / largest).pow(order).tolist()) ** (1 / order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_norms_agree_with_fp64(order: float, dtype: torch.dtype) -> None:
    slices = [values(numel, dtype, seed) for seed, numel in enumerate(LENGTHS)]
    found = fast_norms(slices, order, CPU)
    assert found.dtype == torch.float64
    assert found.shape == (len(LENGTHS),)
    for flat, norm in zip(slices, found.tolist(), strict=True):
        assert norm == pytest.approx(exact(flat, order), rel=TOLERANCE[dtype])
        assert scaled_norm(flat, order) == pytest.approx(exact(flat, order), rel=1e-13)


@pytest.mark.parametrize("order", ORDERS)
def test_empty_slices_count_nothing(order: float) -> None:
    empty, one = torch.empty(0), torch.tensor([-3.0])
    assert fast_norms([empty, one, empty], order, CPU).tolist() == [0.0, 3.0, 0.0]
    assert fast_norms([], order, CPU).tolist() == []
    assert scaled_norm(empty, order) == 0.0
    assert combine_norms([], order) == 0.0
    assert combine_norms([0.0, 3.0, 0.0], order) == 3.0


@pytest.mark.parametrize("order", ORDERS)
def test_slice_of_zeros_has_norm_zero(order: float) -> None:
    flat = torch.zeros(ROW_NUMEL + 3)
    assert fast_norms([flat], order, CPU).tolist() == [0.0]
    assert scaled_norm(flat, order) == 0.0


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 1e25), (torch.float32, 3e38), (torch.float64, 1e200), (torch.float64, 1e305)]
)
@pytest.mark.parametrize("numel", [2, 5, ROW_NUMEL + 5])
def test_large_finite_elements_give_a_finite_l2_norm(dtype: torch.dtype, value: float, numel: int) -> None:
    flat = torch.full((numel,), value, dtype=dtype)
    assert math.isfinite(flat[0].item())
    assert fast_norms([flat], 2.0, CPU).item() == math.inf, "the squares must overflow, or this tests nothing"
    assert scaled_norm(flat, 2.0) == pytest.approx(flat[0].item() * math.sqrt(numel), rel=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_large_rows_do_not_hide_small_ones(order: float) -> None:
    flat = torch.full((2 * ROW_NUMEL,), 3.0)
    flat[ROW_NUMEL:] = 0.0
    flat[ROW_NUMEL + 7] = 1e25
    flat[ROW_NUMEL + 9] = -1e25
    assert scaled_norm(flat, order) == pytest.approx(exact(flat, order), rel=1e-13)
    assert scaled_norm(flat[:ROW_NUMEL], order) == pytest.approx(exact(flat[:ROW_NUMEL], order), rel=1e-13)


@pytest.mark.parametrize("position", [0, ROW_NUMEL - 1, ROW_NUMEL, ROW_NUMEL + 2])
@pytest.mark.parametrize("order", ORDERS)
def test_infinity_and_nan_come_through(order: float, position: int) -> None:
    flat = values(ROW_NUMEL + 3, torch.float32)
    flat[position] = -math.inf
    assert fast_norms([flat], order, CPU).item() == math.inf
    assert scaled_norm(flat, order) == math.inf
    flat[position] = math.nan
    assert math.isnan(fast_norms([flat], order, CPU).item())
    assert math.isnan(scaled_norm(flat, order))
    flat[(position + 1) % len(flat)] = math.inf  # NaN wins, wherever the infinity is
    assert math.isnan(fast_norms([flat], order, CPU).item())
    assert math.isnan(scaled_norm(flat, order))


def test_rows_of_65536_start_at_the_slice() -> None:
    flat = values(2 * ROW_NUMEL + 77, torch.float32) + 1.0
    rows = torch.stack([torch.linalg.vector_norm(row) for row in flat.split(65_536)]).double()
    by_rows = torch.linalg.vector_norm(rows)
    at_once = torch.linalg.vector_norm(flat).double()
    assert not torch.equal(by_rows, at_once), "rows must show in the last bits, or this tests nothing"
    assert torch.equal(fast_norms([flat], 2.0, CPU)[0], by_rows)


def test_norm_of_a_slice_does_not_depend_on_where_it_lies() -> None:
    flat = values(ROW_NUMEL + 300, torch.float32)
    buffer = torch.zeros(len(flat) + 64)
    buffer[64:] = flat
    assert torch.equal(fast_norms([flat], 2.0, CPU), fast_norms([buffer[64:]], 2.0, CPU))


@pytest.mark.parametrize("order", ORDERS)
def test_equal_elements_keep_their_digits(order: float) -> None:
    flat = torch.full((1 << 20,), 0.1)
    whole = exact(flat[:1], order) * len(flat) ** (1 / order)
    at_once = torch.linalg.vector_norm(flat, order).item()
    assert order == math.inf or abs(at_once / whole - 1) > 1e-4, "one sum must be worse, or this tests nothing"
    assert fast_norms([flat], order, CPU).item() == pytest.approx(whole, rel=TOLERANCE[torch.float32])


PARTS = st.lists(st.floats(0, 1e30), max_size=12)


@PROPERTY
@given(PARTS, st.sampled_from([0.5, *ORDERS]))
def test_combined_parts_give_the_norm_of_the_whole(parts: list[float], order: float) -> None:
    whole = exact(torch.tensor(parts, dtype=torch.float64), order) if any(parts) else 0.0
    assert combine_norms(parts, order) == pytest.approx(whole, rel=1e-12)


@PROPERTY
@given(PARTS, st.integers(0, 12), st.sampled_from(ORDERS))
def test_parts_can_be_combined_in_groups(parts: list[float], cut: int, order: float) -> None:
    grouped = combine_norms([combine_norms(parts[:cut], order), combine_norms(parts[cut:], order)], order)
    assert grouped == pytest.approx(combine_norms(parts, order), rel=1e-12)


def test_parts_are_added_in_the_order_given() -> None:
    parts = [abs(x) for x in values(64, torch.float64, seed=3).tolist()]
    largest, total = max(parts), 0.0
    for part in parts:
        total += (part / largest) ** 2.0
    assert combine_norms(parts) == largest * total**0.5
    assert len({combine_norms(parts[at:] + parts[:at]) for at in range(64)}) > 1, (
        "the order must show, or it is not tested"
    )


@pytest.mark.parametrize("parts", [[1e300] * 4, [1e-300] * 4, [1e200, 1e-200]])
def test_finite_parts_combine_without_overflow_or_underflow(parts: list[float]) -> None:
    scale = max(parts)
    assert combine_norms(parts) == pytest.approx(scale * math.sqrt(sum((p / scale) ** 2 for p in parts)), rel=1e-14)


@pytest.mark.parametrize("order", ORDERS)
def test_combination_passes_infinity_and_nan_on(order: float) -> None:
    assert combine_norms([1.0, math.inf, 2.0], order) == math.inf
    assert math.isnan(combine_norms([1.0, math.nan, math.inf], order))
    assert math.isnan(combine_norms([math.inf, math.nan], order))


@pytest.mark.parametrize("order", [1, 2, 2.0, 0.5, math.inf, "inf"])
def test_positive_order_is_accepted(order: float) -> None:
    assert check_norm_type(order) == float(order)


@pytest.mark.parametrize("order", [0, -1, -math.inf, math.nan])
def test_order_that_is_not_positive_is_refused(order: float) -> None:
    with pytest.raises(ConfigError, match="norm_type must be a positive number or inf, got"):
        check_norm_type(order)


def test_rows_combine_as_one_after_the_other() -> None:
    rows = [
        [0.0, 0.0, 0.0],
        [3.0, 0.0, 4.0],
        [1e200, 1e200, 2e-200],
        [1e-200, 3e-200, 5e-310],
        [math.inf, 1e200, 1.0],
        [1e200, math.nan, math.inf],
        [0.1, 0.7, 1 / 3],
    ]
    found = combine_rows(numpy.array(rows))
    for norm, row in zip(found, rows, strict=True):
        assert norm == combine_norms(row) or (math.isnan(norm) and math.isnan(combine_norms(row)))
    assert combine_rows(numpy.zeros((2, 0))) == [0.0, 0.0]
