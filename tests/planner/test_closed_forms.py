"""The planner's formulas against the engine, against each other, and at their borders. Published numbers: golden."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ConfigError, Precision, Sharding, hybrid
from shardwise.comm.base import Mesh, Verb
from shardwise.comm.recording import record
from shardwise.models.gpt import GPT
from shardwise.models.sizes import GPT_SIZES
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
from shardwise.planner.compute import accumulated_scale, compute_seconds, megatron_flops, train_flops, utilization
from shardwise.planner.crosshost import cross_host_elements, hybrid_cross_host_elements
from shardwise.planner.finetune import finetune_bytes, lora_params, trainable_share
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
from shardwise.planner.optimizers import factored_state_words, quantized_state_bytes, state_words
from shardwise.planner.parallel import bubble_share, partitioned_activation_elements, tensor_parallel_elements
from shardwise.planner.recompute import Recompute, best_interval, live_blocks
from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import Shape, block_params, count_params, megatron_params
from shardwise.planner.states import (
    ACCOUNTINGS,
    BOTH_GRADIENTS,
    FLOAT_GRADIENTS,
    HALF_GRADIENTS,
    Accounting,
    fewest_ranks,
    largest_model,
    state_bytes,
    weight_bytes,
)
from shardwise.planner.ways import Ways
from shardwise.sharding import resolve, stage_sharding
from shardwise.testing.ranks import run_ranks

MESH = {"host": 2, "device": 2}
SETS = [(), ("device",), ("host",), ("host", "device")]
NESTED = [
    Sharding(param=param, grad=grad, optim=optim)
    for param, grad, optim in itertools.product(SETS, repeat=3)
    if {*param} <= {*grad} <= {*optim}
]
FULL = Ways.over(stage_sharding(3), 64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


NUM_PARAMS = sum(param.numel() for param in mlp().parameters())


# Slices


@pytest.mark.parametrize("sharding", NESTED, ids=str)
def test_elements_are_those_the_engine_sends(sharding: Sharding) -> None:
    start = mlp()

    def body(mesh: Mesh) -> int:
        recorded, log = record(mesh)
        model = shardwise.shard(
            copy.deepcopy(start), recorded, sharding=sharding, units=nn.Linear, align=1, keep_last_unit=False
        )
        optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(2):
            log.clear()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(count for verb, count in log.elements_by_verb().items() if verb is not Verb.RECORD)

    planned = step_elements(NUM_PARAMS, Ways.of(resolve(sharding, MESH)))
    assert set(run_ranks(MESH, body)) == {planned}


@pytest.mark.parametrize(
    ("accounting", "accumulate"), [(HALF_GRADIENTS, torch.bfloat16), (FLOAT_GRADIENTS, torch.float32)], ids=["16", "18"]
)
@pytest.mark.parametrize("sharding", NESTED, ids=str)
def test_states_are_those_of_the_plan(sharding: Sharding, accounting: Accounting, accumulate: torch.dtype) -> None:
    precision = Precision(param=torch.bfloat16, accumulate=accumulate, master=torch.float32)
    plan = shardwise.plan(mlp(), MESH, sharding=sharding, units=nn.Linear, align=1, precision=precision)
    states = state_bytes(NUM_PARAMS, accounting, Ways.of(resolve(sharding, MESH)))
    planned = {"param": states.param, "grad": states.grad, "master": states.master, "optim": states.optim}
    assert plan.bytes_per_rank == planned
    assert states.total == sum(planned.values())


def test_slices_that_do_not_nest_are_refused() -> None:
    with pytest.raises(ConfigError, match="need 1 <= param <= grad <= optim <= data"):
        Ways(param=8, grad=4, optim=8, data=8)


def test_slices_over_named_axes_need_their_mesh() -> None:
    with pytest.raises(ConfigError, match=r"use Ways\.of"):
        Ways.over(hybrid("device"), 8)
    assert Ways.of(resolve(hybrid("device"), {"host": 4, "device": 8})) == Ways(param=8, grad=8, optim=8, data=32)


# States


def test_accountings_take_what_they_are_called() -> None:
    assert {name: accounting.total for name, accounting in ACCOUNTINGS.items()} == {
        "half-gradients": 16,
        "float-gradients": 18,
        "both-gradients": 20,
        "single-precision": 16,
    }


def test_accounting_with_another_optimizer() -> None:
    assert HALF_GRADIENTS.with_optimizer(state_words("SGD")).total == 8
    assert HALF_GRADIENTS.with_optimizer(state_words("Lion")).total == 12


@pytest.mark.parametrize("accounting", ACCOUNTINGS.values(), ids=ACCOUNTINGS)
@pytest.mark.parametrize("stage", range(4))
def test_largest_model_fills_the_memory(stage: int, accounting: Accounting) -> None:
    ways = Ways.over(stage_sharding(stage), 8)
    largest = largest_model(80e9, accounting, ways)
    assert state_bytes(largest, accounting, ways).total == pytest.approx(80e9)


@pytest.mark.parametrize("stage", range(4))
def test_fewest_ranks_fit_and_one_less_does_not(stage: int) -> None:
    def total(num_ranks: int) -> float:
        return state_bytes(7e9, HALF_GRADIENTS, Ways.over(stage_sharding(stage), num_ranks)).total

    fewest = fewest_ranks(7e9, 40e9, HALF_GRADIENTS, stage_sharding(stage))
    if stage == 0:
        assert fewest is None
        assert fewest_ranks(2e9, 40e9, HALF_GRADIENTS, stage_sharding(stage)) == 1
    else:
        assert fewest is not None
        assert total(fewest) <= 40e9 < total(fewest - 1)


def test_second_copy_of_parameters_lies_over_one_host() -> None:
    ways = Ways.over(stage_sharding(3), 1024)
    assert state_bytes(1, HALF_GRADIENTS, ways, copy_ways=16).total == 16 / 1024 + 2 / 16


def test_model_parallel_ranks_share_every_state() -> None:
    whole, shared = (state_bytes(8e9, BOTH_GRADIENTS, FULL, num_model_ranks=ranks).total for ranks in (1, 4))
    assert whole == 4 * shared


def test_scales_of_quantized_weights_are_counted() -> None:
    assert weight_bytes(640, bits=4, group=64) == 320 + 10 * 4
    assert weight_bytes(641, bits=8, group=64) == 641 + 11 * 4
    with pytest.raises(ConfigError, match="group must be 0"):
        weight_bytes(1, group=-1)


def test_optimizer_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown optimizer state of Mine"):
        state_words("Mine")


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (state_words("Muon"), lambda param: torch.optim.Muon([param], lr=0.1)),
        (factored_state_words(6, 4), lambda param: torch.optim.Adafactor([param])),
        (state_words("SparseAdam"), lambda param: torch.optim.SparseAdam([param])),
    ],
    ids=["muon", "adafactor", "sparse-adam"],
)
def test_words_of_other_optimizers_are_those_of_torch(words: float, make: type[torch.optim.Optimizer]) -> None:
    param = nn.Parameter(torch.ones(6, 4))
    optimizer = make(param)
    param.grad = torch.ones(6, 4)
    if isinstance(optimizer, torch.optim.SparseAdam):
        param.grad = param.grad.to_sparse()
    optimizer.step()
    state = [value.numel() for value in optimizer.state[param].values() if torch.is_tensor(value) and value.dim()]
    assert sum(state) == pytest.approx(words * param.numel())


def test_eight_bit_state_takes_a_quarter_and_its_scales() -> None:
    assert quantized_state_bytes(2) == 2 * (1 + 4 / 256)


# Shapes


@pytest.mark.parametrize("name", GPT_SIZES)
def test_parameters_are_those_of_the_built_in_model(name: str) -> None:
    config = GPT_SIZES[name].config(vocab=50257)
    with torch.device("meta"):
        built = sum(param.numel() for param in GPT(config).parameters())
    shape = Shape(
        num_layers=config.depth,
        hidden=config.width,
        num_heads=config.heads,
        vocab=config.vocab,
        positions=config.context,
        tied=config.tied,
    )
    assert count_params(shape).total == built
    assert name not in SHAPES or SHAPES[name] == shape


def test_counts_agree_where_they_mean_the_same() -> None:
    shape = SHAPES["gpt2-xl"]
    counts = count_params(shape)
    assert counts.attention + counts.mlp == block_params(shape)
    assert counts.total - megatron_params(shape) == pytest.approx(2 * shape.hidden)


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_layers": 0, "hidden": 8},
        {"num_layers": 1, "hidden": 8, "num_heads": 3},
        {"num_layers": 1, "hidden": 8, "num_heads": 4, "num_kv_heads": 3},
        {"num_layers": 1, "hidden": 8, "num_kv_heads": 2},
        {"num_layers": 1, "hidden": 8, "num_heads": -2},
        {"num_layers": 1, "hidden": 8, "num_heads": 4, "num_kv_heads": -2},
    ],
)
def test_shape_that_cannot_be_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="shape: "):
        Shape(**numbers)


def test_adapters_of_grouped_keys_are_narrower() -> None:
    grouped = SHAPES["llama-3-8b"]
    assert lora_params(grouped, rank=8) == 32 * 8 * (4096 + 4096 + 4096 + 1024)
    with pytest.raises(ConfigError, match=r"no matrix is called \['keys'\]"):
        lora_params(grouped, rank=8, targets=["keys"])
    with pytest.raises(ConfigError, match=r"no matrix is called \['gate'\]"):
        lora_params(SHAPES["gpt2"], rank=8, targets=["gate"])


def test_adapters_of_every_matrix() -> None:
    every = ["query", "key", "value", "output", "gate", "up", "down"]
    assert lora_params(SHAPES["llama-2-7b"], rank=8, targets=every) == 19_988_480  # as peft prints it
    assert trainable_share(1, 4) == 0.25


def test_frozen_base_has_neither_gradients_nor_optimizer_state() -> None:
    assert finetune_bytes(7e9, 0, HALF_GRADIENTS, Ways()) == 14e9
    assert finetune_bytes(7e9, 0, HALF_GRADIENTS, FULL, base_bits=4) == 7e9 / 2 / 64


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
    assert checkpoint_intensity(shape) == 24 * 1600
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
