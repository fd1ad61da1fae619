"""Published claims that do not hold, each with the number that does, through the planner.

Errata without a number, or about measured curves alone, have no test.
"""

import math
from dataclasses import replace

import pytest

from shardwise.planner.activations import checkpoint_bytes
from shardwise.planner.communication import (
    relative_elements,
    step_collectives,
    step_elements,
    step_elements_with_all_reduce,
)
from shardwise.planner.compute import train_flops_with_attention, utilization
from shardwise.planner.hardware import DEVICES
from shardwise.planner.infinity import working_bytes
from shardwise.planner.offload import PARTITIONS, Tier, link_bytes, tier_bytes
from shardwise.planner.rates import rate_ratio, speedup
from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import block_params, count_params
from shardwise.planner.states import (
    BOTH_GRADIENTS,
    HALF_GRADIENTS,
    largest_model,
    memory_reduction,
    state_bytes,
    weight_bytes,
)
from shardwise.planner.ways import Ways
from shardwise.sharding import stage_sharding

GB, GIB = 1e9, 2**30
BILLION = 1e9


def ways(stage: int, num_ranks: float = math.inf) -> Ways:
    return Ways.over(stage_sharding(stage), num_ranks)


def states_gb(num_params: float, stage: int, num_ranks: float) -> float:
    return state_bytes(num_params, HALF_GRADIENTS, ways(stage, num_ranks)).total / GB


# ZeRO, arXiv:1910.02054


@pytest.mark.parametrize(
    ("stage", "num_params", "num_ranks", "gigabytes", "printed"),
    [
        (1, 1e12, 64, 4187.5, 4187),
        (2, 1e12, 64, 2218.75, 2218),
        (1, 1e12, 256, 4046.875, 4046),
        (2, 1e12, 256, 2054.6875, 2054),
        (1, 1e12, 1024, 4011.71875, 4011),
        (2, 1e12, 1024, 2013.671875, 2013),
        (1, 128e9, 1024, 513.5, 513),
        (2, 128e9, 1024, 257.75, 257),
    ],
)
def test_large_columns_of_table_1_are_truncated(
    stage: int, num_params: float, num_ranks: int, gigabytes: float, printed: int
) -> None:
    planned = states_gb(num_params, stage, num_ranks)
    assert planned == gigabytes
    assert math.trunc(planned) == printed


@pytest.mark.parametrize(
    ("stage", "num_model_ranks", "billions", "printed"),
    [
        (1, 2, 15.28, 15.2),
        (1, 4, 30.57, 30.4),
        (1, 8, 61.13, 60.8),
        (1, 16, 122.27, 121.6),
        (2, 4, 57.69, 57.6),
        (2, 8, 115.38, 115.2),
        (2, 16, 230.76, 230.4),
    ],
)
def test_rows_of_table_2_are_its_rounded_first_row_doubled(
    stage: int, num_model_ranks: int, billions: float, printed: float
) -> None:
    def planned(model_ranks: int) -> float:
        return largest_model(32 * GB, HALF_GRADIENTS, ways(stage, 64), num_model_ranks=model_ranks) / BILLION

    assert planned(num_model_ranks) == pytest.approx(billions, abs=0.005)
    assert round(planned(1), 1) * num_model_ranks == pytest.approx(printed)


@pytest.mark.parametrize(
    ("name", "billions", "with_hidden_4096"), [("zero-40b-88x6144", 39.9, 17.7), ("zero-60b-132x6144", 59.8, 26.6)]
)
def test_hidden_size_of_table_4_is_that_of_table_5(name: str, billions: float, with_hidden_4096: float) -> None:
    shape = SHAPES[name]
    assert round(block_params(shape) / BILLION, 1) == billions
    assert round(block_params(replace(shape, hidden=4096)) / BILLION, 1) == with_hidden_4096


def test_checkpoints_of_100b_take_two_bytes_an_element() -> None:
    shape = SHAPES["zero-100b-125x8192"]
    whole = checkpoint_bytes(shape, seq=1024, batch=32)
    cut = checkpoint_bytes(shape, seq=1024, batch=32, partition_ranks=16)
    assert (round(whole / GB, 1), whole / GIB) == (67.1, 62.5)
    assert (round(cut / GB, 2), cut / GIB) == (4.19, 3.90625)
    assert (round(whole / GB / 2, 1), round(cut / GB / 2, 1)) == (33.6, 2.1)  # printed: 33 and 2


def test_shape_at_the_limit_of_data_parallelism_has_less_than_its_label() -> None:
    shape = SHAPES["zero-1.38b-40x1536"]
    assert round(block_params(shape) / BILLION, 2) == 1.13
    assert round(count_params(replace(shape, vocab=50257)).total / BILLION, 2) == 1.21


# ZeRO-Offload, arXiv:2101.06840


def test_chosen_partition_leaves_two_bytes_on_the_device() -> None:
    held = tier_bytes(1, HALF_GRADIENTS, Ways(), PARTITIONS["gradients-and-update"])
    assert (held[Tier.DEVICE], held[Tier.HOST]) == (2, 14)
    assert link_bytes(1, PARTITIONS["gradients-and-update"]) == 4


def test_states_of_turing_nlg() -> None:
    assert states_gb(17.2e9, 0, 1) == pytest.approx(275.2)


def test_adam_on_the_host_is_not_over_five_times_faster_everywhere() -> None:
    seconds = {1: (1.39, 0.22), 2: (2.75, 0.51), 4: (5.71, 1.03), 8: (11.93, 2.41), 10: (14.76, 2.57)}
    gains = {size: speedup(torch_adam, cpu_adam) for size, (torch_adam, cpu_adam) in seconds.items()}
    assert round(gains[1], 2) == 6.32 == round(max(gains.values()), 2)
    assert round(gains[8], 2) == 4.95 == round(min(gains.values()), 2)


def test_delayed_update_gains_at_most_a_quarter_in_the_chart() -> None:
    gains = [rate_ratio(39, 34.8), rate_ratio(31.4, 27), rate_ratio(36.5, 29.5), rate_ratio(37.9, 34.5)]
    assert (round(min(gains), 2), round(max(gains), 2)) == (1.10, 1.24)  # printed: 1.12 to 1.59


# ZeRO-Infinity, arXiv:2104.07857


def test_shape_of_70b_has_100b() -> None:
    assert round(block_params(SHAPES["zero-infinity-70b-125x8192"]) / BILLION, 1) == 100.7


def test_units_of_figure_2a_are_binary() -> None:
    shape = SHAPES["zero-infinity-memory-0.1t-80x10240"]
    states = state_bytes(block_params(shape), BOTH_GRADIENTS, Ways()).total
    assert round(states / 2**40, 2) == 1.83  # printed as TB
    assert round(states / 1e12, 2) == 2.01


def test_working_memory_of_the_first_row() -> None:
    shape = SHAPES["zero-infinity-memory-0.1t-80x10240"]
    assert working_bytes(shape) / GIB == 1.5625
    assert round(working_bytes(shape, bytes_per_param=5) / GIB, 2) == 1.95  # printed


# DeepSpeed's and torchtitan's documentation


def test_sample_of_the_memory_documentation_is_less_with_cut_gradients() -> None:
    sample = state_bytes(2851e6, BOTH_GRADIENTS, ways(2, 8)).total
    assert round(sample / GIB, 2) == 11.28
    assert round(state_bytes(2851e6, BOTH_GRADIENTS, ways(1, 8)).total / GIB, 2) == 15.93  # printed, as GB


@pytest.mark.parametrize(("tokens_per_second", "percent"), [(5762, 33.7), (6667, 39.0)], ids=["eager", "compiled"])
def test_compiled_run_has_the_higher_utilization(tokens_per_second: int, percent: float) -> None:
    shape = SHAPES["llama-3-8b"]
    params = count_params(shape).without_embedding
    flops = train_flops_with_attention(params, shape, seq=8192, tokens=tokens_per_second)
    found = utilization(flops, 1, peak_flops=DEVICES["h100-80gb"].peak_flops)
    assert round(100 * found, 1) == percent


# Articles and notes about ZeRO


def test_states_of_5b_fit_80_gb() -> None:
    assert largest_model(80 * GB, HALF_GRADIENTS, Ways()) == 5e9
    assert count_params(SHAPES["bert-large"]).total == pytest.approx(0.336e9, rel=0.01)


def test_optimizer_state_is_six_times_the_half_precision_parameters() -> None:
    assert HALF_GRADIENTS.optimizer == 6 * HALF_GRADIENTS.param
    assert HALF_GRADIENTS.total == 8 * HALF_GRADIENTS.param


def test_states_of_175b_on_128_ranks() -> None:
    before, after = states_gb(175e9, 0, 128), states_gb(175e9, 3, 128)
    assert (before, after) == (2800, 21.875)
    assert round(100 * (1 - after / before), 1) == 99.2


def test_13b_does_not_fit_four_devices_of_24_gb() -> None:
    assert states_gb(13e9, 0, 4) == 208
    assert states_gb(13e9, 3, 4) == 52 > 24


def test_parameters_of_7b_alone_do_not_fit_8_gb() -> None:
    held = tier_bytes(7e9, HALF_GRADIENTS, Ways(), PARTITIONS["gradients-and-update"])
    assert held[Tier.DEVICE] / GB == weight_bytes(7e9) / GB == 14
    assert tier_bytes(7e9, HALF_GRADIENTS, Ways(), PARTITIONS["all-host"])[Tier.DEVICE] == 0


def test_13b_fits_32_gb_only_without_gradients_on_the_device() -> None:
    def device_gb(partition: str) -> float:
        return tier_bytes(13e9, HALF_GRADIENTS, Ways(), PARTITIONS[partition])[Tier.DEVICE] / GB

    assert device_gb("gradients-and-update") == 26 < 32 < device_gb("update") == 52


def test_parameters_that_are_cut_are_gathered_twice_and_gradients_scattered_once() -> None:
    collectives = step_collectives(1, ways(3, 64))
    assert [(c.verb, c.kind, c.times) for c in collectives] == [
        ("unshard", "all-gather", 1),
        ("unshard", "all-gather", 1),
        ("reduce_grads", "reduce-scatter", 1),
    ]


def test_step_with_everything_cut_is_local() -> None:
    verbs = {collective.verb for collective in step_collectives(1, ways(3, 64))}
    assert not verbs & {"finalize_grads", "refresh_params"}


def test_cut_parameters_cost_half_as_much_again_not_more() -> None:
    assert relative_elements(ways(3)) == 1.5
    assert relative_elements(ways(3, 64)) == 1.5


def test_saving_of_four_times_is_a_limit() -> None:
    assert memory_reduction(HALF_GRADIENTS, ways(1)) == 4
    assert round(memory_reduction(HALF_GRADIENTS, ways(1, 4)), 2) == 2.29


def test_half_precision_parameters_are_gathered_after_the_step() -> None:
    (refresh,) = (c for c in step_collectives(1, ways(1)) if c.verb == "refresh_params")
    assert refresh.elements * HALF_GRADIENTS.param == 2


def test_all_reduced_gradients_would_make_a_step_of_cut_gradients_dearer() -> None:
    assert step_elements(1, ways(2)) == 2
    assert step_elements_with_all_reduce(1, ways(2)) == 3


def test_replicated_states_do_not_depend_on_the_number_of_ranks() -> None:
    assert states_gb(1e9, 0, 2) == states_gb(1e9, 0, 1024) == 16
