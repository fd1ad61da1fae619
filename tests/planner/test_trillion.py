"""A trillion parameters on 1,024 ranks are planned in less than a second, and the numbers are those done by hand.

The model is Narayanan et al., arXiv:2104.04473, table 1, last row: 128 layers of 25,600, 160 heads, 1008.0 billion.
"""

import time
from dataclasses import dataclass

import pytest
import torch

import shardwise
from shardwise import Precision
from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.planner.activations import checkpoint_bytes, checkpointed_peak_bytes, total_bytes
from shardwise.planner.budget import Budget, bucket_bytes
from shardwise.planner.communication import step_collectives, step_elements, step_messages, step_seconds
from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import block_params, count_params
from shardwise.planner.states import HALF_GRADIENTS, state_bytes
from shardwise.planner.ways import Ways
from shardwise.sharding import stage_sharding

NUM_RANKS = 1024
LAYERS, WIDTH, HEADS, SEQ = 128, 25_600, 160, 2048
NUM_PARAMS = 1_008_038_758_400
SHAPE = SHAPES["megatron-1008.0b-128x25600"]


@dataclass(frozen=True, kw_only=True)
class Closed:
    """One rank: bytes, elements, messages and seconds."""

    num_params: int
    states: float
    activations: float
    checkpoints: float
    checkpointed: float
    budget: Budget
    sent_elements: float
    messages: float
    seconds: float


def closed_form(stage: int) -> Closed:
    num_params = count_params(SHAPE).total
    ways = Ways.over(stage_sharding(stage), NUM_RANKS)
    states = state_bytes(num_params, HALF_GRADIENTS, ways).total
    checkpointed = checkpointed_peak_bytes(SHAPE, seq=SEQ, batch=1)
    collectives = step_collectives(num_params, ways)
    return Closed(
        num_params=num_params,
        states=states,
        activations=total_bytes(SHAPE, seq=SEQ, batch=1),
        checkpoints=checkpoint_bytes(SHAPE, seq=SEQ, batch=1),
        checkpointed=checkpointed,
        budget=Budget(states=states, activations=checkpointed, buffers=bucket_bytes(block_params(SHAPE) / LAYERS)),
        sent_elements=step_elements(num_params, ways),
        messages=step_messages(collectives, num_units=LAYERS),
        seconds=step_seconds(
            collectives, num_units=LAYERS, bytes_per_element=2, latency_seconds=1e-5, bytes_per_second=25e9
        ),
    )


def test_closed_form_takes_less_than_a_second() -> None:
    start = time.process_time()
    found = [closed_form(stage) for stage in range(4)]
    seconds = time.process_time() - start
    assert len(found) == 4
    assert seconds < 1


# Bytes of states over the parameters, times 1,024.
@pytest.mark.parametrize(
    ("stage", "states", "gathers"),
    [(0, 16 * 1024, 2), (1, 4 * 1024 + 12, 2), (2, 2 * 1024 + 14, 2), (3, 16, 3)],
)
def test_numbers_are_those_done_by_hand(stage: int, states: int, gathers: int) -> None:
    found = closed_form(stage)
    matrices = 12 * LAYERS * WIDTH**2
    vectors = 13 * LAYERS * WIDTH + 2 * WIDTH  # biases, norms and the last norm
    assert found.num_params == matrices + vectors + (51_200 + 2048) * WIDTH == NUM_PARAMS
    assert found.states == NUM_PARAMS * states / 1024
    token = SEQ * WIDTH
    assert found.checkpoints == 2 * token * LAYERS == 13_421_772_800
    layer = 34 * token + 5 * HEADS * SEQ * SEQ
    assert found.activations == LAYERS * layer == 657_666_867_200
    assert found.checkpointed == found.checkpoints + layer
    assert found.sent_elements == pytest.approx(gathers * NUM_PARAMS * 1023 / 1024, rel=1e-12)
    assert found.messages == gathers * 1023 * LAYERS
    assert found.seconds == pytest.approx(found.messages * 1e-5 + found.sent_elements * 2 / 25e9, rel=1e-12)
    two_layers = 2 * 12 * WIDTH**2 * 2
    assert found.budget.peak == found.states + found.checkpointed + two_layers
    assert found.budget.fits(80e9) == (stage == 3)


def test_states_of_a_rank_in_round_numbers() -> None:
    found = [round(closed_form(stage).states / 1e9, 1) for stage in range(4)]
    assert found == [16128.6, 4044.0, 2029.9, 15.8]


def test_plan_of_the_model_itself_takes_less_than_a_second() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=51_200, context=SEQ, width=WIDTH, heads=HEADS, depth=LAYERS, tied=True))
    start = time.process_time()
    plan = shardwise.plan(
        model, NUM_RANKS, stage=3, units=Block, precision=Precision(param=torch.bfloat16, accumulate=torch.bfloat16)
    )
    ranks = [plan.of_rank(rank) for rank in (0, 1, NUM_RANKS - 1)]
    seconds = time.process_time() - start
    assert plan.num_params == NUM_PARAMS
    assert seconds < 1
    numel = plan.num_params + plan.padding_numel
    for rank in ranks:
        assert rank["param"] == rank["grad"] == 2 * numel // NUM_RANKS
        assert rank["master"] == 2 * rank["param"]
        assert sum(rank.values()) == pytest.approx(closed_form(3).states, rel=0.005)
    assert plan.padding_numel < NUM_PARAMS / 100_000
    assert plan.largest_unit_bytes == 2 * (12 * WIDTH**2 + 13 * WIDTH) + 2 * plan.buckets[1].layout.padding_numel
