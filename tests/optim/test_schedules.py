"""Learning-rate schedules: closed forms, DeepSpeed's values, names and options, resuming, sharded optimizers.

``rates(scheduler, n)[k]`` is the rate of the update made after k others.
"""

import importlib
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import shardwise
from shardwise import ConfigError, StateError
from shardwise.comm.base import Mesh
from shardwise.config.model import (
    OneCycleConfig,
    RangeTestConfig,
    WarmupConfig,
    WarmupCosineConfig,
    WarmupDecayConfig,
)
from shardwise.interop.deepspeed.keys import KEYS, SCHEDULERS
from shardwise.optim.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from shardwise.testing.ranks import run_ranks

BASE_LR = 1e-3
NUM_UPDATES = 60


def make_optimizer(
    *, lrs: tuple[float, ...] = (BASE_LR,), cls: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    return cls([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs])


def advance(scheduler: LRScheduler) -> None:
    scheduler.optimizer.step()  # torch warns about a scheduler that moves before its optimizer
    scheduler.step()


def rates(scheduler: LRScheduler, num_updates: int = NUM_UPDATES, group: int = 0) -> list[float]:
    found = []
    for _ in range(num_updates):
        found.append(float(scheduler.optimizer.param_groups[group]["lr"]))
        assert scheduler.get_last_lr()[group] == found[-1]
        advance(scheduler)
    return found


def momenta(scheduler: LRScheduler, num_updates: int = NUM_UPDATES, group: int = 0) -> list[float]:
    found = []
    for _ in range(num_updates):
        found.append(scheduler.optimizer.param_groups[group]["betas"][0])
        advance(scheduler)
    return found


def close(expected: list[float]) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-18)


# Closed forms


@pytest.mark.parametrize("steps", [2, 3, 10, 25])
def test_warmup_rises_with_the_logarithm_of_the_update(steps: int) -> None:
    scheduler = WarmupLR(make_optimizer(), min_lr=1e-4, max_lr=2e-3, num_warmup_steps=steps)
    expected = [1e-4 + 1.9e-3 * min(1.0, math.log(max(k, 1), steps)) for k in range(NUM_UPDATES)]
    assert rates(scheduler) == close(expected)
    assert max(expected) >= expected[2] > expected[1] == expected[0]


@pytest.mark.parametrize("steps", [2, 3, 10, 25])
def test_linear_warmup_rises_along_a_line_that_begins_at_the_second_update(steps: int) -> None:
    scheduler = WarmupLR(make_optimizer(), 1e-4, 2e-3, num_warmup_steps=steps, shape="linear")
    assert rates(scheduler) == close(np.interp(range(NUM_UPDATES), [1, steps + 1], [1e-4, 2e-3]).tolist())


def test_warmup_of_one_update_takes_two() -> None:
    one, two = (WarmupLR(make_optimizer(), num_warmup_steps=steps) for steps in (1, 2))
    assert rates(one) == rates(two) == [0.0, 0.0] + [BASE_LR] * (NUM_UPDATES - 2)


@pytest.mark.parametrize("cls", [WarmupLR, WarmupDecayLR])
def test_warmup_without_a_maximum_rises_to_the_rate_of_each_group(cls: type[WarmupLR]) -> None:
    options = {"total_steps": 50} if cls is WarmupDecayLR else {}
    scheduler = cls(make_optimizer(lrs=(1e-2, 3e-4)), num_warmup_steps=10, **options)
    for _ in range(10):
        advance(scheduler)
    assert scheduler.get_last_lr() == close([1e-2, 3e-4])


@pytest.mark.parametrize(("steps", "total"), [(2, 3), (10, 40), (25, 25)])
def test_decay_ends_at_zero_one_update_after_the_total(steps: int, total: int) -> None:
    scheduler = WarmupDecayLR(make_optimizer(), total, 0.0, 2e-3, steps, "linear")
    corners = [1, steps + 1, max(total, steps + 1) + 1]
    expected = np.interp(range(NUM_UPDATES), corners, [0.0, 2e-3, 0.0])
    if total == steps:  # nothing is left to decay over
        expected = [2e-3 * (k - 1) / steps if 0 < k <= steps else 0.0 for k in range(NUM_UPDATES)]
    assert rates(scheduler) == close(list(expected))


@pytest.mark.parametrize(("steps", "total"), [(2, 3), (10, 40), (25, 25)])
@pytest.mark.parametrize(("low", "end"), [(0.0, 1e-4), (0.25, 0.5)])
def test_cosine_falls_to_its_end_and_stays_there(steps: int, total: int, low: float, end: float) -> None:
    scheduler = WarmupCosineLR(make_optimizer(), total, low, steps, end, "linear")
    expected = [0.0]  # DeepSpeed's first update, whatever the lowest ratio is
    for k in range(1, NUM_UPDATES):
        angle = math.pi * min(1.0, (k - steps) / max(1, total - steps))
        cosine = end + (1 - end) * math.cos(angle / 2) ** 2
        expected.append(BASE_LR * (low + (1 - low) * (k - 1) / steps if k <= steps else cosine))
    assert rates(scheduler) == close(expected)
    assert expected[-1] == close(BASE_LR * end)


@pytest.mark.parametrize("interval", [1, 7, 20])
def test_range_test_rises_along_a_line_or_by_stairs(interval: int) -> None:
    line = LRRangeTest(make_optimizer(), 1e-4, interval, 0.5)
    stairs = LRRangeTest(make_optimizer(), 1e-4, interval, 0.5, staircase=True)
    assert rates(line) == close([1e-4 + 1e-4 * 0.5 * k / interval for k in range(NUM_UPDATES)])
    assert rates(stairs) == close([1e-4 + 1e-4 * 0.5 * (k // interval) for k in range(NUM_UPDATES)])


@pytest.mark.parametrize(("first", "second"), [(10, 20), (1, 1), (13, 4), (7, 0)])
def test_cycle_goes_up_and_down_along_two_lines(first: int, second: int) -> None:
    scheduler = OneCycle(make_optimizer(), 1e-4, 1e-3, first, second)
    xs, ys = [0, first, first + second], [1e-4, 1e-3, 1e-4]
    if second == 0:
        xs, ys = [0, first - 1, first], [1e-4, 1e-4 + 9e-4 * (first - 1) / first, 1e-4]
    assert rates(scheduler) == close(np.interp(range(NUM_UPDATES), xs, ys).tolist())


def test_cycle_by_stairs_stands_still_between_them() -> None:
    scheduler = OneCycle(make_optimizer(), 0.0, 1.0, 9, 20, rise_stairs=3, fall_stairs=4)
    up = [math.floor(k / 3) / 3 for k in range(10)]
    down = [math.floor((29 - k) / 5) / 4 for k in range(10, 30)]
    assert rates(scheduler, 30) == close(up + down)


def test_cycle_momentum_moves_against_the_rate_and_decays() -> None:
    scheduler = OneCycle(
        make_optimizer(), 1e-4, 1e-3, 10, 20, decay_interval=5, decay_rate=0.5, momentum_decay_rate=-0.1
    )
    found = momenta(scheduler)
    assert found[0] == 0.8  # DeepSpeed's first update
    assert found[1:31] == close(np.interp(range(1, 31), [0, 10, 30], [0.9, 0.8, 0.9]).tolist())
    assert found[31:] == close([0.9 * (1 - 0.1 * (k - 30) / 5) for k in range(31, NUM_UPDATES)])
    assert scheduler.optimizer.param_groups[0]["betas"][1] == 0.99


def test_cycle_rate_decays_hyperbolically() -> None:
    scheduler = OneCycle(make_optimizer(), 1e-4, 1e-3, 10, 10, decay_interval=5, decay_rate=0.5)
    assert rates(scheduler)[20:] == close([1e-4 / (1 + 0.1 * (k - 20)) for k in range(20, NUM_UPDATES)])


def test_cycle_leaves_the_momentum_alone_when_told_to() -> None:
    scheduler = OneCycle(make_optimizer(), 1e-4, 1e-3, 5, cycle_momentum=False)
    assert set(momenta(scheduler)) == {0.9}


def test_cycle_momentum_warns_about_an_optimizer_without_betas() -> None:
    with pytest.warns(UserWarning, match="cycle_momentum has no effect, because SGD has no betas"):
        scheduler = OneCycle(make_optimizer(cls=torch.optim.SGD), 1e-4, 1e-3, 5)
    assert rates(scheduler)[5] == close(1e-3)


def test_every_group_has_its_own_bounds() -> None:
    scheduler = OneCycle(
        make_optimizer(lrs=(1.0, 2.0)),
        [0.1, 0.2],
        [1.0, 4.0],
        10,
        min_momentum=[0.5, 0.6],
        max_momentum=0.9,
    )
    for _ in range(5):
        advance(scheduler)
    groups = scheduler.optimizer.param_groups
    assert [group["lr"] for group in groups] == close([0.55, 2.1])
    assert [group["betas"][0] for group in groups] == close([0.7, 0.75])


@pytest.mark.parametrize("name", ["warmup", "warmup_cosine"])
def test_rate_held_in_a_tensor_is_changed_in_place(name: str) -> None:
    lr = torch.tensor(BASE_LR, dtype=torch.float64)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)
    total = {"total_steps": 20} if name == "warmup_cosine" else {}
    scheduler = build_scheduler(name, {"num_warmup_steps": 10, **total}, optimizer)
    plain = build_scheduler(name, {"num_warmup_steps": 10, **total}, make_optimizer())
    assert optimizer.param_groups[0]["lr"] is lr
    assert rates(scheduler, 15) == pytest.approx(rates(plain, 15), rel=1e-12)


# Values of DeepSpeed

# Recorded from deepspeed.runtime.lr_schedules of DeepSpeed 0.19.8 with torch 2.13.0: AdamW(lr=1e-3), the rate of the
# update made after k others (for OneCycle also betas[0]).
GOLDEN: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "WarmupLR": (
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 10},
        {0: 1e-05, 1: 1e-05, 2: 0.0006090496913713225, 5: 0.001400950308628677, 9: 0.0019089425937842564}
        | {10: 0.0019999999999999996, 11: 0.002, 45: 0.002},
    ),
    "WarmupDecayLR": (
        {"total_num_steps": 40, "warmup_max_lr": 2e-3, "warmup_num_steps": 10, "warmup_type": "linear"},
        {0: 0.0, 1: 0.0, 2: 0.0002, 5: 0.0008, 10: 0.0018000000000000002, 11: 0.002, 12: 0.0019333333333333333}
        | {25: 0.0010666666666666667, 39: 0.00013333333333333334, 40: 6.666666666666667e-05, 41: 0.0, 45: 0.0},
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_min_ratio": 0.1},
        {0: 0.0, 1: 0.0001, 2: 0.00037092699609758304, 5: 0.0007290730039024168, 10: 0.0009999999999999998}
        | {11: 0.0009972612215893683, 25: 0.00050005, 39: 2.838778410631769e-06, 40: 1.0000000000000001e-07}
        | {45: 1.0000000000000001e-07},
    ),
    "LRRangeTest": (
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 8,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
        {0: 0.0001, 5: 0.0001, 9: 0.00030000000000000003, 25: 0.0007, 39: 0.0009000000000000001, 40: 0.0011},
    ),
    "OneCycle": (
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 10,
            "cycle_second_step_size": 20,
            "decay_step_size": 5,
            "decay_lr_rate": 0.5,
        },
        {0: 0.0001, 1: 0.00019000000000000028, 2: 0.00028, 9: 0.0009100000000000001, 10: 0.0009999999999999998}
        | {11: 0.0009549999999999999, 25: 0.00032499999999999977, 30: 0.0001, 31: 9.09090909090909e-05}
        | {45: 4e-05},
    ),
}
GOLDEN_MOMENTA = {0: 0.8, 1: 0.89, 2: 0.88, 9: 0.81, 10: 0.8, 11: 0.805, 25: 0.875, 30: 0.9, 31: 0.9, 45: 0.9}


@pytest.mark.parametrize("name", GOLDEN)
def test_values_are_those_recorded_from_deepspeed(name: str) -> None:
    options, golden = GOLDEN[name]
    found = rates(build_scheduler(name, options, make_optimizer()))
    assert {k: found[k] for k in golden} == golden  # to the last bit


def test_momenta_are_those_recorded_from_deepspeed() -> None:
    found = momenta(build_scheduler("OneCycle", GOLDEN["OneCycle"][0], make_optimizer()))
    assert {k: found[k] for k in GOLDEN_MOMENTA} == GOLDEN_MOMENTA


def test_decay_by_its_deepspeed_name_has_the_default_maximum_of_deepspeed() -> None:
    theirs = {"total_num_steps": 40, "warmup_num_steps": 10}
    ours = {"total_steps": 40, "num_warmup_steps": 10}
    assert max(rates(build_scheduler("WarmupDecayLR", theirs, make_optimizer(lrs=(0.5,))))) == close(1e-3)
    assert max(rates(build_scheduler("warmup_decay", ours, make_optimizer(lrs=(0.5,))))) == close(0.5)


def options_near(name: str) -> list[dict[str, Any]]:
    """Options with odd sizes, by DeepSpeed's names."""
    warmup = [
        {"warmup_num_steps": steps, "warmup_type": shape} for steps in (1, 2, 3, 17) for shape in ("log", "linear")
    ]
    if name == "WarmupCosineLR":
        ends = [{"warmup_min_ratio": low, "cos_min_ratio": end} for low in (0.0, 0.3) for end in (1e-4, 0.2)]
        return [
            {**w, **e, "total_num_steps": w["warmup_num_steps"] + n} for w in warmup for e in ends for n in (0, 1, 30)
        ]
    if name.startswith("Warmup"):
        bounds = [{"warmup_min_lr": [1e-5, 0.0], "warmup_max_lr": high} for high in (None, 2e-3, [2e-3, 1e-3])]
        totals = [{"total_num_steps": 50}] if name == "WarmupDecayLR" else [{}]
        return [{**w, **b, **t} for w in warmup for b in bounds for t in totals]
    if name == "LRRangeTest":
        return [
            {"lr_range_test_min_lr": [1e-4, 3e-4], "lr_range_test_step_size": size, "lr_range_test_staircase": stairs}
            for size in (1, 7, 13)
            for stairs in (True, False)
        ]
    return [
        {
            "cycle_min_lr": [1e-4, 2e-4],
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": first,
            "cycle_second_step_size": second,
            "cycle_first_stair_count": stairs[0],
            "cycle_second_stair_count": stairs[1],
            "decay_step_size": decay,
            "decay_lr_rate": 0.3,
            "decay_mom_rate": -0.01,
        }
        for first in (1, 3, 13)
        for second in (None, 0, 7, 29)
        for stairs in ((0, None), (3, None), (4, 0), (0, 5))
        for decay in (0, 4)
    ]


@pytest.mark.needs_peer("deepspeed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOLDEN)
def test_every_value_is_that_of_deepspeed_beside_it(name: str) -> None:
    theirs = importlib.import_module("deepspeed.runtime.lr_schedules")
    for options in options_near(name):
        peer = getattr(theirs, name)(make_optimizer(lrs=(1e-3, 3e-4)), **options)
        ours = build_scheduler(name, options, make_optimizer(lrs=(1e-3, 3e-4)))
        for k in range(NUM_UPDATES):
            found, expected = (
                [(group["lr"], group["betas"]) for group in scheduler.optimizer.param_groups]
                for scheduler in (ours, peer)
            )
            assert found == expected, (options, k)
            peer.step()
            ours.step()


# Names and options


def sample(name: str) -> dict[str, Any]:
    """Our names of the options, with the values of the golden run."""
    entry = SCHEDULES[name]
    back = {theirs: ours for ours, theirs in entry.options.items()}
    return {back[option]: value for option, value in GOLDEN[entry.deepspeed_name][0].items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_namings_build_the_same_schedule(name: str) -> None:
    entry = SCHEDULES[name]
    ours = build_scheduler(name, sample(name), make_optimizer())
    theirs = build_scheduler(entry.deepspeed_name, GOLDEN[entry.deepspeed_name][0], make_optimizer())
    assert type(ours) is type(theirs) is entry.make
    assert rates(ours) == rates(theirs)


def test_names_and_options_of_deepspeed_are_all_in_the_table() -> None:
    assert sorted(entry.deepspeed_name for entry in SCHEDULES.values()) == sorted(GOLDEN)
    for entry in SCHEDULES.values():
        assert set(entry.required) | set(entry.deepspeed_defaults) <= set(entry.options)
        assert len(set(entry.options.values())) == len(entry.options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_missing_option_is_named_as_the_user_writes_it(name: str) -> None:
    entry = SCHEDULES[name]
    for ours in entry.required:
        left = {option: value for option, value in sample(name).items() if option != ours}
        with pytest.raises(ConfigError, match=f"scheduler {name}: needs {ours}"):
            build_scheduler(name, left, make_optimizer())


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("warmup_cosin", {}, "unknown name 'warmup_cosin' .nearest: 'warmup_cosine'"),
        ("os.system", {}, "unknown name 'os.system'"),
        ("StepLR", {"step_size": 3}, "unknown name 'StepLR'"),
        ("warmup", {"num_warmup_step": 3}, "warmup: unknown option 'num_warmup_step' .nearest: 'num_warmup_steps'"),
        ("lr_range_test", {"lr_range_test_min_lr": 1}, "unknown option 'lr_range_test_min_lr' .nearest: 'min_lr'"),
        ("LRRangeTest", {"min_lr": 1}, "LRRangeTest: unknown option 'min_lr' .nearest: 'lr_range_test_min_lr'"),
        ("warmup", {"num_warmup_steps": 0}, "warmup: num_warmup_steps must be a whole number, at least 1, got 0"),
        ("warmup", {"num_warmup_steps": -3}, "num_warmup_steps must be"),
        ("warmup", {"num_warmup_steps": 2.5}, "num_warmup_steps must be"),
        ("warmup", {"num_warmup_steps": True}, "num_warmup_steps must be"),
        ("warmup", {"num_warmup_steps": "auto"}, "num_warmup_steps must be a whole number, at least 1, got 'auto'"),
        ("warmup", {"min_lr": -1.0}, "min_lr must be a finite number and at least 0, got -1"),
        ("warmup", {"max_lr": math.nan}, "max_lr must be"),
        ("warmup", {"max_lr": [1e-3, 1e-3]}, "one for each of 1 parameter groups, got"),
        ("warmup", {"shape": "cubic"}, "shape must be 'log' or 'linear', got 'cubic'"),
        ("warmup_decay", {"total_steps": 9, "num_warmup_steps": 10}, "warmup_decay: total_steps is 9, but"),
        ("warmup_decay", {"total_steps": 9}, "the warm-up alone takes 1000"),
        ("warmup_cosine", {"total_steps": 9, "num_warmup_steps": 10}, "total_steps is 9, but"),
        ("warmup_cosine", {"total_steps": 0, "num_warmup_steps": 10}, "total_steps must be"),
        ("warmup_cosine", {"total_steps": 2000, "min_ratio": 1.5}, "at least 0 and at most 1, got 1.5"),
        ("warmup_cosine", {"total_steps": 2000, "end_ratio": -0.1}, "end_ratio must be"),
        ("lr_range_test", {"interval": 0}, "interval must be"),
        ("lr_range_test", {"growth": -1}, "growth must be"),
        ("lr_range_test", {"staircase": "yes"}, "staircase must be true or false, got 'yes'"),
        ("one_cycle", {"min_lr": 1, "max_lr": "1"}, "max_lr must be a finite number"),
        ("one_cycle", {"min_lr": 0, "max_lr": 1, "num_rise_steps": 0}, "num_rise_steps"),
        ("one_cycle", {"min_lr": 0, "max_lr": 1, "num_fall_steps": -1}, "num_fall_steps"),
        ("one_cycle", {"min_lr": 0, "max_lr": 1, "rise_stairs": -1}, "rise_stairs"),
        ("one_cycle", {"min_lr": 0, "max_lr": 1, "decay_interval": -1}, "decay_interval"),
        ("one_cycle", {"min_lr": 0, "max_lr": 1, "max_momentum": 1.0}, "at least 0 and below 1, got"),
    ],
)
def test_wrong_value_is_refused_before_the_optimizer_is_touched(
    name: str, options: dict[str, Any], complaint: str
) -> None:
    optimizer = make_optimizer()
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ConfigError, match=complaint):
        build_scheduler(name, options, optimizer)
    assert optimizer.param_groups[0] == before


def test_whole_number_written_as_a_float_counts_as_one() -> None:
    scheduler = build_scheduler("WarmupDecayLR", {"total_num_steps": 1e2, "warmup_num_steps": 1e1}, make_optimizer())
    assert rates(scheduler)[10] == close(1e-3)


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup: expected a torch.optim.Optimizer, got Linear"):
        build_scheduler("warmup", {}, nn.Linear(1, 1))  # type: ignore[arg-type]


# Resuming


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_resumed_schedule_goes_on_as_if_never_stopped(name: str, taken: int) -> None:
    straight, stopped = (build_scheduler(name, sample(name), make_optimizer()) for _ in range(2))
    for _ in range(taken):
        advance(straight)
        advance(stopped)
    state = json.loads(json.dumps(stopped.state_dict()))  # plain data
    fresh = make_optimizer()
    resumed = build_scheduler(name, sample(name), fresh)
    fresh.load_state_dict(stopped.optimizer.state_dict())
    resumed.load_state_dict(state)
    found, expected = rates(resumed, 30), rates(straight, 30)
    assert found == expected
    assert len(set(expected)) > 2
    assert [group["betas"] for group in fresh.param_groups] == [g["betas"] for g in straight.optimizer.param_groups]


def test_resumed_schedule_keeps_the_options_it_was_built_with() -> None:
    short, long = (WarmupDecayLR(make_optimizer(), total, num_warmup_steps=5) for total in (10, 100))
    for _ in range(9):
        advance(short)
    long.load_state_dict(short.state_dict())
    advance(long)
    assert long.get_last_lr() == close([BASE_LR * (100 - 9) / 95])


def test_state_of_another_schedule_is_refused() -> None:
    state = WarmupLR(make_optimizer()).state_dict()
    with pytest.raises(StateError, match="the state is of WarmupLR, this scheduler is WarmupCosineLR"):
        WarmupCosineLR(make_optimizer(), 2000).load_state_dict(state)
    with pytest.raises(StateError, match="the state has 1 parameter groups, the optimizer has 2"):
        WarmupLR(make_optimizer(lrs=(0.1, 0.2))).load_state_dict(state)
    with pytest.raises(StateError, match="the state is of None"):
        WarmupLR(make_optimizer()).load_state_dict({"last_batch_iteration": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("last_epoch", value) for value in ("3", True, None, -100, 10**20, 2.5)),
        ("step_count", [4]),
        ("last_lr", 0.1),
        ("last_lr", ["0.1"]),
        ("last_lr", [10**400]),
        ("last_lr", None),
    ],
)
def test_state_that_is_no_position_is_refused_and_changes_nothing(key: str, value: object) -> None:
    schedule = WarmupLR(make_optimizer())
    advance(schedule)
    before = schedule.state_dict()
    with pytest.raises(StateError, match=key):
        schedule.load_state_dict({**before, key: value})
    assert schedule.state_dict() == before


def test_rates_of_a_schedule_that_has_not_begun_are_the_first() -> None:
    schedule = WarmupLR(make_optimizer(), num_warmup_steps=4)
    first = schedule.get_last_lr()
    schedule.last_epoch = -1  # as torch's SequentialLR leaves it
    schedule.set_rates()
    assert schedule.get_last_lr() == first


# With sharded optimizers


def make_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def train(
    model: nn.Module, build: Callable[[torch.optim.Optimizer], LRScheduler], mesh: Mesh | None, stage: int
) -> Any:
    """Return final parameters and the rates and betas of each of six updates; mesh None trains a plain model."""
    if mesh is not None:
        shardwise.shard(model, mesh, stage=stage)
    biases = [param for param in model.parameters() if param.ndim == 1]
    weights = [param for param in model.parameters() if param.ndim == 2]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}], fused=True
    )
    if mesh is not None:
        optimizer = shardwise.shard_optimizer(optimizer, model)
    scheduler = build(optimizer)
    history = []
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(6):
        model(x).square().mean().backward()
        history.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    params: dict[str, Tensor] = dict(model.named_parameters()) if mesh is None else shardwise.full_parameters(model)
    return {name: param.detach().clone() for name, param in params.items()}, history


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["warmup_cosine", "one_cycle"])
def test_sharded_optimizer_follows_the_schedule_like_a_plain_one(name: str, stage: int) -> None:
    options: dict[str, Any] = {"total_steps": 6, "num_warmup_steps": 3, "shape": "linear"}
    if name == "one_cycle":
        options = {"min_lr": [0.01, 0.002], "max_lr": [0.1, 0.02], "num_rise_steps": 2}
    plain, history = train(make_model(), lambda optimizer: build_scheduler(name, options, optimizer), None, stage)
    moved = {key: not torch.equal(value, make_model().state_dict()[key]) for key, value in plain.items()}
    assert all(moved.values())
    assert len({str(step) for step in history}) >= 4
    for params, own_history in run_ranks(
        2, lambda mesh: train(make_model(), lambda optimizer: build_scheduler(name, options, optimizer), mesh, stage)
    ):
        assert own_history == history
        for key, value in plain.items():
            torch.testing.assert_close(params[key], value, rtol=1e-5, atol=1e-6)


def test_options_are_the_fields_of_the_native_configuration() -> None:
    fields = {
        section.model_fields["name"].annotation.__args__[0]: set(section.model_fields) - {"name"}  # type: ignore[union-attr]
        for section in (WarmupConfig, WarmupDecayConfig, WarmupCosineConfig, RangeTestConfig, OneCycleConfig)
    }
    assert fields == {name: set(entry.options) for name, entry in SCHEDULES.items()}


def test_translation_of_deepspeed_files_names_the_same_options() -> None:
    for name, entry in SCHEDULES.items():
        native, allowed = SCHEDULERS[entry.deepspeed_name]
        assert native == name
        assert sorted(allowed) == sorted(entry.options.values())
        for ours, theirs in entry.options.items():
            assert KEYS[f"scheduler.params.{theirs}"].to == f"scheduler.{ours}"
