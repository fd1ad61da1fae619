"""Formulas of what a step costs, against each other and at their borders; published numbers are in tests/golden."""

import math

import pytest

from shardwise import ConfigError, hybrid
from shardwise.planner.activations import (
    attention_core_ratio,
    block_bytes,
    checkpoint_bytes,
    checkpointed_peak_bytes,
    layer_bytes,
    selective_saving,
    total_bytes,
)
from shardwise.planner.budget import Budget, bucket_bytes
from shardwise.planner.communication import (
    step_collectives,
    step_elements,
    step_elements_with_all_reduce,
    step_messages,
    step_seconds,
)
from shardwise.planner.compute import (
    accumulated_scale,
    compute_seconds,
    global_batch,
    megatron_flops,
    train_flops,
    utilization,
)
from shardwise.planner.crosshost import cross_host_elements, hybrid_cross_host_elements
from shardwise.planner.infinity import (
    checkpoint_intensity,
    efficiency,
    needed_bandwidth,
    optimizer_intensity,
    param_intensity,
    working_bytes,
)
from shardwise.planner.offload import (
    PARTITIONS,
    Tier,
    Tiers,
    link_bytes,
    optimizer_disk_seconds,
    tier_bytes,
    tokens_to_hide,
)
from shardwise.planner.parallel import bubble_share, partitioned_activation_elements, tensor_parallel_elements
from shardwise.planner.recompute import Recompute, best_interval, live_blocks
from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import Shape, block_params
from shardwise.planner.states import (
    BOTH_GRADIENTS,
)
from shardwise.planner.ways import Ways
from shardwise.sharding import resolve, stage_sharding

FULL = Ways.over(stage_sharding(3), 64)


# Activations and FLOPs


def test_tensor_parallelism_of_one_rank_changes_nothing() -> None:
    shape = SHAPES["gpt3-175b"]
    for recompute in Recompute:
        plain, cut = (
            layer_bytes(shape, seq=2048, batch=1, recompute=recompute, sequence_parallel=parallel)
            for parallel in (False, True)
        )
        assert plain == cut


def test_selective_saving_is_what_is_not_kept() -> None:
    shape = SHAPES["gpt3-175b"]
    kept, every = (
        layer_bytes(shape, seq=2048, batch=1, recompute=recompute)
        for recompute in (Recompute.SELECTIVE, Recompute.NONE)
    )
    assert selective_saving(shape, seq=2048) == pytest.approx(1 - kept / every)


def test_inputs_of_recomputed_layers_are_cut_only_with_sequence_parallelism() -> None:
    shape = SHAPES["gpt3-175b"]
    whole, cut = (
        layer_bytes(
            shape, seq=2048, batch=1, recompute=Recompute.FULL, tensor_ranks=8, sequence_parallel=sequence_parallel
        )
        for sequence_parallel in (False, True)
    )
    assert whole == 8 * cut == 2 * 2048 * 12288


def test_activations_need_the_number_of_heads() -> None:
    with pytest.raises(ConfigError, match="number of attention heads is needed"):
        attention_core_ratio(SHAPES["zero-10b-50x4096"], seq=1024)


def test_interval_of_checkpoints_is_the_best() -> None:
    best = best_interval(64)
    assert live_blocks(64, best) == 16
    assert all(live_blocks(64, interval) >= 16 for interval in range(1, 65))


def test_fewer_checkpoints_take_less() -> None:
    shape = SHAPES["gpt2-xl"]
    every, fourth = (checkpoint_bytes(shape, seq=1024, batch=1, interval=interval) for interval in (1, 4))
    assert every == 4 * fourth


def test_peak_with_checkpoints_is_least_near_the_root_of_the_ratio() -> None:
    shape = SHAPES["gpt2-xl"]
    peaks = {k: checkpointed_peak_bytes(shape, seq=1024, batch=1, interval=k) for k in (1, 2, 4, 8, 48)}
    assert min(peaks, key=peaks.__getitem__) == 1  # a layer is 57 checkpoints here, more than there are layers
    assert peaks[48] > total_bytes(shape, seq=1024, batch=1)
    assert peaks[1] < peaks[48] / 20


def test_utilization_is_of_one_rank_by_default() -> None:
    assert utilization(6e12, 2) == 3e12
    assert compute_seconds(6e12, peak_flops=3e12) == 2


def test_batch_without_accumulation_is_that_of_the_ranks() -> None:
    assert global_batch(4, 2) == 8


def test_gradient_is_scaled_once_unless_divided_by_hand() -> None:
    assert accumulated_scale(4) == 1
    assert accumulated_scale(4, divided_by_hand=True) == 1 / 4


def test_recomputation_adds_a_third_and_the_scores() -> None:
    shape = SHAPES["korthikanti-175b-96x12288"]
    none, selective, full = (megatron_flops(shape, batch=1, seq=2048, recompute=recompute) for recompute in Recompute)
    params = block_params(shape)
    assert full - none == pytest.approx(2 * 2048 * params * (1 + 2048 / (6 * 12288)))
    assert selective - none == pytest.approx(72 * 2048 * 96 * 12288**2 * 2048 / (6 * 12288))
    assert none > train_flops(params, 2048)


# Communication


def test_gathers_repeat_with_every_micro_step() -> None:
    assert step_elements(1, Ways.over(stage_sharding(3)), micro_steps=4) == 12
    assert step_elements(1, Ways.over(stage_sharding(1)), micro_steps=4) == 2


def test_all_reduce_is_dearer_the_more_is_cut() -> None:
    elements = [step_elements_with_all_reduce(1, Ways.over(stage_sharding(stage))) for stage in range(4)]
    assert elements == [2, 3, 3, 4]


def test_kept_unit_is_gathered_once() -> None:
    assert step_elements(100, FULL, kept_numel=10) == pytest.approx(290 * 63 / 64)


def test_one_rank_sends_nothing() -> None:
    assert step_collectives(1, Ways()) == ()


def test_step_time_is_latency_and_bandwidth() -> None:
    collectives = step_collectives(1e9, FULL)
    assert step_messages(collectives, num_units=10) == 10 * 3 * 63
    replicated = step_collectives(1e9, Ways(data=64))
    assert step_messages(replicated) == 2 * 63
    seconds = step_seconds(collectives, num_units=10, bytes_per_element=2, latency_seconds=1e-5, bytes_per_second=25e9)
    assert seconds == pytest.approx(10 * 3 * 63 * 1e-5 + 3 * 1e9 * 63 / 64 * 2 / 25e9)


def test_hybrid_sharding_crosses_hosts_once() -> None:
    ways = Ways.of(resolve(hybrid("device"), {"host": 64, "device": 8}))
    exact = cross_host_elements(step_collectives(1, ways), ranks_per_host=8)
    assert exact == pytest.approx(2 * (512 - 8) / (8 * 512))
    paper = hybrid_cross_host_elements(1, num_ranks=512, ranks_per_host=8)
    assert exact < paper < exact * (1 + 1 / 63)


def test_partitioned_activations_gather_what_other_ranks_hold() -> None:
    shape = Shape(num_layers=1, hidden=64)
    assert partitioned_activation_elements(shape, seq=32, batch=2, num_ranks=4) == 32 * 2 * 64 * 3 / 4
    plain = tensor_parallel_elements(shape, seq=32, batch=2, num_ranks=4)
    assert plain == 8 * 32 * 2 * 64 * 3 / 4
    assert tensor_parallel_elements(shape, seq=32, batch=2, num_ranks=4, recompute=True) == 1.5 * plain


def test_bubble_of_wall_time_is_less() -> None:
    assert bubble_share(8, 64, of_wall_time=True) == 7 / 71 < bubble_share(8, 64)


# Offload


@pytest.mark.parametrize("tiers", PARTITIONS.values(), ids=PARTITIONS)
def test_tiers_hold_every_byte_once(tiers: Tiers) -> None:
    held = tier_bytes(1e9, BOTH_GRADIENTS, FULL, tiers)
    assert sum(held.values()) == pytest.approx(20e9 / 64)


@pytest.mark.parametrize(
    ("partition", "num_bytes"),
    [("none", 0), ("gradients", 4), ("update", 4), ("gradients-and-update", 4), ("all-host", 6), ("all-disk", 6)],
)
def test_link_carries_each_state_that_rests_elsewhere(partition: str, num_bytes: int) -> None:
    tiers = PARTITIONS[partition]
    assert link_bytes(1, tiers) == num_bytes
    away = 2 if tiers.param is not Tier.DEVICE else 0
    assert link_bytes(1, tiers, recompute=True) == num_bytes + away


def test_compute_of_the_tokens_hides_transfer_and_optimizer() -> None:
    tokens = tokens_to_hide(
        PARTITIONS["gradients-and-update"],
        bytes_per_second=25e9,
        params_per_second=1.5e9,
        peak_flops=312e12,
        utilization=0.4,
    )
    assert round(tokens) == 17195


def test_optimizer_state_on_disk_is_read_and_written() -> None:
    seconds = optimizer_disk_seconds(1e9, BOTH_GRADIENTS, read_bytes_per_second=4e9, write_bytes_per_second=2e9)
    assert seconds == 16 / 4 + 16 / 2


def test_intensity_and_working_memory_are_of_one_block_by_default() -> None:
    shape = SHAPES["gpt2-xl"]
    assert checkpoint_intensity(shape) == 24 * 1600 == checkpoint_intensity(shape, interval=4) / 4
    assert block_bytes(shape, seq=1024, batch=1) == 2 * 1024 * (16 * 1600 + 2 * 25 * 1024)


def test_optimizer_moves_four_times_the_bytes_of_parameters() -> None:
    assert param_intensity(seq=1024, batch=2) == 4 * optimizer_intensity(seq=1024, batch=2) == 2048


def test_tiles_cut_the_working_memory() -> None:
    shape = SHAPES["zero-infinity-memory-1t-128x25600"]
    assert working_bytes(shape) == 4 * working_bytes(shape, num_tiles=4)


def test_needed_bandwidth_gives_the_efficiency() -> None:
    bandwidth = needed_bandwidth(1024, efficiency=0.9, peak_flops=70e12)
    assert efficiency(1024, bytes_per_second=bandwidth, peak_flops=70e12) == pytest.approx(0.9)


# Budget


def test_budget_fits_what_fragmentation_leaves() -> None:
    budget = Budget(states=16e9, activations=6e9, buffers=bucket_bytes(5e8), fragmentation=0.25)
    assert budget.peak == 24e9
    assert budget.fits(32e9)
    assert not budget.fits(31.9e9)
    assert budget.free(40e9) == 6e9
    assert math.isclose(budget.free(28e9), -3e9)
    assert Budget(states=1).peak == 1
    assert Budget(states=1).fits(1)
