"""The engine under the instruments: same bits whenever side work runs, and no wait that could be left out.

Every run is watched by the order checker and lives in memory that turns to NaN when it is freed. The skipped waits at
the end show that both notice: each wait is taken away in turn.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import shardwise
from shardwise import Precision, Sharding
from shardwise.comm.base import Mesh
from shardwise.errors import ShardwiseError
from shardwise.testing.lanes import Instruments, Policy
from shardwise.testing.ranks import flat_rank, run_ranks

NUM_STEPS = 3
MAX_NORM = 0.05
ROWS = 4  # per rank and micro-batch


def checkpoint(function: Callable[..., Tensor], *args: Tensor, use_reentrant: bool) -> Tensor:
    """Without a copy of the random state, which all threads share: torch takes its lock while it collects garbage."""
    out: Tensor = torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, preserve_rng_state=False)
    return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width + 3)
        self.outer = nn.Linear(width + 3, width)
        self.adapter = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.inner(x))
        return x + self.outer(hidden) + x @ self.adapter


class Net(nn.Module):
    """Three blocks between two layers of the root; every slot leaves a gap behind it."""

    def __init__(self, *, uses: int, recompute: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.last = nn.Linear(7, 2)
        self.uses = uses
        self.recompute = recompute  # None: keep activations; else: use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            for _ in range(self.uses):
                x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        out: Tensor = self.last(x)
        return out


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a training run does."""

    uses: int = 1
    recompute: bool | None = None
    frozen: Callable[[str], bool] = lambda name: False
    micro_batches: int = 1
    window: str = "final"  # "windows": each backward is one; "defer", "reduce": no_sync for all but the last
    precision: Precision | None = None
    unsharded_edit: bool = False

    def model(self) -> Net:
        net = Net(uses=self.uses, recompute=self.recompute)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, param in net.named_parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
                param.requires_grad_(not self.frozen(name))
        return net


SCENARIOS: Mapping[str, Scenario] = {
    "plain": Scenario(),
    "reuse": Scenario(uses=2),
    "frozen": Scenario(frozen=lambda name: "blocks" in name and "adapter" not in name),
    "two windows": Scenario(micro_batches=2, window="windows"),
    "no_sync": Scenario(micro_batches=3, window="defer"),
    "no_sync reducing": Scenario(micro_batches=3, window="reduce"),
    "recompute": Scenario(recompute=False),
    "reentrant recompute": Scenario(recompute=True),
    "bf16": Scenario(precision=Precision(param=torch.bfloat16)),
    "edits": Scenario(unsharded_edit=True),
}
STAGES: Mapping[str, Sharding] = {
    "stage 0": Sharding(),
    "stage 1": Sharding(optim="*"),
    "stage 2": Sharding(grad="*", optim="*"),
    "stage 3": Sharding(param="*", grad="*", optim="*"),
}
NESTED = Sharding(param="local", grad="local", optim="*")
MESHES: Mapping[Sharding, int | Mapping[str, int]] = {
    **dict.fromkeys(STAGES.values(), 2),
    NESTED: {"node": 2, "local": 2},
}
Result = dict[str, Tensor]


def batch(step: int, number: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(ROWS, 5, generator=generator).to(dtype), torch.randn(ROWS, 2, generator=generator).to(dtype)


def window_of(scenario: Scenario, model: nn.Module, number: int) -> Any:
    if scenario.window in ("final", "windows") or number == scenario.micro_batches - 1:
        return nullcontext()
    return shardwise.no_sync(model, reduce=scenario.window == "reduce")


def train(scenario: Scenario, mesh: Mesh, sharding: Sharding, probe: Instruments | None) -> Result:
    """Train for three steps and return everything that training changed, and the losses and norms on the way."""
    instruments = {} if probe is None else {"lanes": probe.lanes, "arena": probe.arena}
    model = shardwise.shard(
        scenario.model(), mesh, sharding=sharding, units=Block, precision=scenario.precision, **instruments
    )
    optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
    result: Result = {}
    for step in range(NUM_STEPS):
        for number in range(scenario.micro_batches):
            dtype = torch.float32 if scenario.precision is None else torch.bfloat16
            x, y = batch(step, number, flat_rank(mesh), dtype)
            with window_of(scenario, model, number):
                loss = (model(x) - y).float().pow(2).mean()
                loss.backward()
            result[f"loss {step}.{number}"] = loss.detach()
        result[f"norm {step}"] = shardwise.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if scenario.unsharded_edit:
            with shardwise.unsharded(model), torch.no_grad():
                model.last.weight.mul_(0.5)
    result |= {
        f"state {k}.{name}": v for name, s in shardwise.full_optimizer_state(model).items() for k, v in s.items()
    }
    result |= {f"param {name}": value for name, value in shardwise.full_parameters(model).items()}
    return result | {f"saved {name}": value for name, value in shardwise.full_state_dict(model).items()}


def run(
    scenario: Scenario, sharding: Sharding, shape: int | Mapping[str, int] = 2, **options: Any
) -> tuple[list[Result], list[str]]:
    """Return the results of all ranks, and where the waits of rank 0 were called; without options: no instruments."""
    probes = []

    def body(mesh: Mesh) -> Result:
        if not options:
            return train(scenario, mesh, sharding, None)
        probe = Instruments(**options)
        if flat_rank(mesh) == 0:
            probes.append(probe)
        return train(scenario, mesh, sharding, probe)

    results = run_ranks(shape, body, timeout=10)
    return results, probes[0].waits if probes else []


def differences(one: list[Result], two: list[Result]) -> list[str]:
    assert [result.keys() for result in one] == [result.keys() for result in two]
    return [
        f"rank {rank}: {key}"
        for rank, (mine, other) in enumerate(zip(one, two, strict=True))
        for key in mine
        if not torch.equal(mine[key], other[key])
    ]


@cache
def undisturbed(scenario: str, sharding: Sharding) -> list[Result]:
    """The results with the lanes and the arena that users get."""
    results, _ = run(SCENARIOS[scenario], sharding, MESHES[sharding])
    assert not torch.equal(results[0]["loss 0.0"], results[1]["loss 0.0"])  # or ranks could ignore each other
    assert min(results[0][f"norm {step}"] for step in range(NUM_STEPS)) > MAX_NORM  # or nothing would be clipped
    start = SCENARIOS[scenario].model()
    for name, param in start.named_parameters():
        assert torch.equal(results[0][f"saved {name}"], param) != param.requires_grad, name
    assert not [key for key in results[0] if not bool(results[0][key].isfinite().all())]
    return results


POLICIES: tuple[Policy, ...] = ("posted", "now", "late", "seeded")
# The latest moment finds most; every scenario meets every policy at the stage with the most side work.
SAMPLE = {(scenario, "stage 3", policy) for scenario in SCENARIOS for policy in POLICIES}
SAMPLE |= {(scenario, stage, "late") for scenario in ("plain", "two windows", "no_sync", "bf16") for stage in STAGES}


def all_runs() -> list[Any]:
    return [
        pytest.param(*key, marks=() if key in SAMPLE else pytest.mark.matrix)
        for key in itertools.product(SCENARIOS, STAGES, POLICIES)
    ]


@pytest.mark.parametrize(("scenario", "stage", "policy"), all_runs())
def test_results_are_the_same_bits_whenever_side_work_runs(scenario: str, stage: str, policy: Policy) -> None:
    results, waits = run(SCENARIOS[scenario], STAGES[stage], policy=policy, seed=len(scenario))
    assert waits
    assert not differences(results, undisturbed(scenario, STAGES[stage]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "scenario", ["two windows", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("plain", "reuse", "bf16"))]
)
def test_results_are_the_same_bits_on_nested_axes_whenever_side_work_runs(scenario: str, policy: Policy) -> None:
    results, waits = run(SCENARIOS[scenario], NESTED, MESHES[NESTED], policy=policy, seed=1)
    assert waits
    assert not differences(results, undisturbed(scenario, NESTED))


# Waits that could be left out, how many of each, and why. Found by the function that waits, so that other waits may
# come and go. That they are redundant is shown, not believed: without them the checker finds every access ordered, and
# the results are the same bits even if jobs run as late as they can.
#
# GradBuffers.wait where G is empty: a reduction works in the resting gradients themselves, its wait frees nothing, and
# nobody reads before the last wait of the backward, which orders everything that its lane did before.
#
# ParamBuffers.settle after training: ``full_*`` reads the masters, which a refresh reads too and never writes. Where
# masters are separate, ``full_state_dict`` reads what the refresh wrote, after the last of these waits, which counts.
REDUNDANT: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("plain", "stage 0"): {"GradBuffers.wait": 9},
    ("plain", "stage 1"): {"GradBuffers.wait": 9, "ParamBuffers.settle": 4},
    ("plain", "stage 2"): {"ParamBuffers.settle": 4},
    ("plain", "stage 3"): {},
    ("bf16", "stage 0"): {"GradBuffers.wait": 9, "ParamBuffers.settle": 3},
    ("bf16", "stage 1"): {"GradBuffers.wait": 9, "ParamBuffers.settle": 3},
    ("bf16", "stage 2"): {"ParamBuffers.settle": 3},
    ("bf16", "stage 3"): {"ParamBuffers.settle": 3},
}


def survives(scenario: str, stage: str, skip: int, **options: Any) -> bool:
    """Whether a run without one wait gives the same bits on every rank and no error."""
    try:
        results, _ = run(SCENARIOS[scenario], STAGES[stage], skip=skip, **options)
    except (AssertionError, ShardwiseError):
        return False
    return not differences(results, undisturbed(scenario, STAGES[stage]))


def waiter(site: str) -> str:
    """The function that waits, as ``REDUNDANT`` names it."""
    return site.removeprefix("ParamBuffers._wait_pending < ").partition(" < ")[0]


@pytest.mark.parametrize(
    ("scenario", "stage"),
    [pytest.param(*key, marks=pytest.mark.matrix if key[0] == "bf16" else ()) for key in REDUNDANT],
)
def test_every_skipped_wait_is_noticed_or_listed_with_its_reason(scenario: str, stage: str) -> None:
    _, waits = run(SCENARIOS[scenario], STAGES[stage], policy="posted")
    assert len(waits) >= NUM_STEPS * 4  # a reduction per unit and step at least
    unnoticed = [
        waiter(site)
        for number, site in enumerate(waits)
        if survives(scenario, stage, number, policy="posted")
        and survives(scenario, stage, number, policy="late", check=False)
    ]
    assert Counter(unnoticed) == REDUNDANT[scenario, stage]


# Poison alone does not see a gather that reads a shard while a refresh may write it: late jobs run in order too.
@pytest.mark.matrix
@pytest.mark.parametrize(("scenario", "stage"), list(REDUNDANT))
def test_poison_alone_shows_skipped_waits(scenario: str, stage: str) -> None:
    _, waits = run(SCENARIOS[scenario], STAGES[stage], policy="late", check=False)
    unnoticed = [
        waiter(site)
        for number, site in enumerate(waits)
        if survives(scenario, stage, number, policy="late", check=False)
    ]
    unseen = {"ParamBuffers.unshard": NUM_STEPS - 1} if (scenario, stage) == ("bf16", "stage 3") else {}
    assert Counter(unnoticed) == {**REDUNDANT[scenario, stage], **unseen}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scenario", ["two windows", "no_sync reducing", "reentrant recompute", "edits"])
def test_a_skipped_wait_is_harmless_only_if_the_checker_calls_everything_ordered(scenario: str, stage: str) -> None:
    _, waits = run(SCENARIOS[scenario], STAGES[stage], policy="posted")
    for number, site in enumerate(waits):
        if survives(scenario, stage, number, policy="posted"):
            assert survives(scenario, stage, number, policy="late"), site
