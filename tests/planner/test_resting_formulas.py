"""Formulas of what rests on a rank, and traffic against the engine; published numbers are in tests/golden."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ConfigError, Precision, Sharding, hybrid
from shardwise.comm.base import Mesh, Verb
from shardwise.comm.recording import record
from shardwise.models.sizes import SIZES
from shardwise.planner.communication import (
    step_elements,
)
from shardwise.planner.finetune import finetune_bytes, lora_params, trainable_share
from shardwise.planner.optimizers import factored_state_words, quantized_state_bytes, state_words
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
    peak_param_bytes,
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


def test_peak_of_parameters_is_shards_and_one_unit() -> None:
    assert peak_param_bytes(7e9, FULL, largest_unit=2e8) == 4 * 7e9 / 64 + 2 * 2e8


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


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_built_in_model(name: str) -> None:
    size = SIZES[name]
    shape = replace(size.shape, vocab=size.vocab, positions=0 if size.shape.gated else size.context)
    with torch.device("meta"):
        model = size.build(vocab=size.vocab)
    assert count_params(shape).total == sum(param.numel() for param in model.parameters())


def test_counts_agree_where_they_mean_the_same() -> None:
    shape = SHAPES["gpt2-xl"]
    counts = count_params(shape)
    assert counts.attention + counts.mlp == block_params(shape)
    assert counts.total - megatron_params(shape) == pytest.approx(2 * shape.hidden)


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_layers": 0, "hidden": 8},
        {"num_layers": 1, "hidden": 0},
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
