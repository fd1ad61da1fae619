"""Bytes at rest planned on the meta device equal those of a real run on threads, rank by rank, to the byte."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import LossScale, Precision, Sharding, hybrid
from shardwise.comm.base import Mesh
from shardwise.errors import ConfigError
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.testing.ranks import flat_rank, run_ranks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
OptimizerMaker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Odd(nn.Module):
    """Sizes that divide by nothing; optionally tied, frozen, empty, 0-dim and wide parameters.

    Every trainable parameter gets a gradient: the plan counts the optimizer's state of all of them.
    """

    def __init__(
        self, *, tied: bool = False, frozen: bool = False, empty: bool = False, wide: bool = False, scalar: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.last = nn.Linear(13, 5, bias=False)
        if tied:
            self.blocks[2].weight = self.blocks[0].weight
        if frozen:
            self.first.weight.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
        self.none = nn.Parameter(torch.zeros(0, 3)) if empty else None
        self.scale = nn.Parameter(torch.ones((), dtype=F64 if wide else F32)) if scalar or wide else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.last(x)
        if self.none is not None:
            x = x + self.none.sum()
        return x if self.scale is None else x * self.scale


def measure(
    make: Callable[[], nn.Module], mesh: Mesh, optimizer: OptimizerMaker | None, **options: Any
) -> dict[str, int]:
    """One step; the bytes at rest after it, before the gradients go."""
    generator = torch.Generator().manual_seed(7)
    model = make()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    model = shardwise.shard(model, mesh, **options)
    made = (optimizer or torch.optim.AdamW)([param for param in model.parameters() if param.requires_grad])
    sharded = shardwise.shard_optimizer(made, model)
    precision: Precision = options.get("precision") or Precision()
    batch = torch.randn(4, 7, generator=generator).to(precision.param or F32)
    shardwise.scale_loss(model, model(batch).float().pow(2).mean()).backward()
    sharded.step()
    assert sharded.step_was_applied
    ledger = Managed.of(model).runtime.means.arena.ledger.now
    measured = shardwise.measured_bytes(model)
    assert all(ledger[kind] == 0 for kind in (Kind.GATHERED, Kind.STAGING, Kind.OPTIM))
    return measured


def check(
    make: Callable[[], nn.Module],
    num_ranks: int | Mapping[str, int],
    *,
    optimizer: OptimizerMaker | None = None,
    plan_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, int]]:
    """Compare plan and run on every rank; return the plan of each."""
    with torch.device("meta"):
        shapes = make()
    assert all(param.is_meta for param in shapes.parameters())
    planned = shardwise.plan(shapes, num_ranks, **options, **(plan_options or {}))

    def body(mesh: Mesh) -> tuple[int, dict[str, int]]:
        return flat_rank(mesh), measure(make, mesh, optimizer, **options)

    measured = dict(run_ranks(num_ranks, body))
    plans = [planned.of_rank(rank) for rank in range(len(measured))]
    assert plans == [measured[rank] for rank in range(len(measured))]
    assert planned.bytes_per_rank == plans[0]
    return plans


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plan_equals_the_run_with_uneven_sizes(stage: int, num_ranks: int) -> None:
    check(Odd, num_ranks, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plan_without_padding_is_the_papers_formula(stage: int) -> None:
    numel = sum(param.numel() for param in Odd().parameters())
    assert numel % 3, "the ranks' shares must differ"
    plans = check(Odd, 3, stage=stage, align=1, units=[])
    padded = -(-numel // 3)
    assert [plan["param"] for plan in plans] == [4 * (padded if stage == 3 else 3 * padded)] * 3
    assert [plan["grad"] for plan in plans] == [4 * (padded if stage >= 2 else 3 * padded)] * 3
    assert [plan["master"] for plan in plans] == [0] * 3
    owned = [numel] * 3 if stage == 0 else [padded, padded, numel - 2 * padded]
    assert [plan["optim"] for plan in plans] == [8 * count for count in owned]


PRECISIONS = {
    "bf16": Precision(param=BF16),
    "bf16-gradients": Precision(param=BF16, accumulate=BF16),
    "bf16-everything": Precision(param=BF16, accumulate=BF16, master=BF16),
    "fp16": Precision(param=F16, loss_scale=LossScale(initial=8.0)),
    "fp64-masters": Precision(master=F64),
    "fp64": Precision(param=F64),
}


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plan_equals_the_run_in_every_precision(stage: int, precision: Precision) -> None:
    plans = check(Odd, 2, stage=stage, precision=precision)
    separate = precision not in (PRECISIONS["bf16-everything"], PRECISIONS["fp64"])
    assert all((plan["master"] > 0) == separate for plan in plans)


MODELS: dict[str, dict[str, bool]] = {
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "empty": {"empty": True},
    "scalar": {"scalar": True},
    "mixed-dtypes": {"wide": True},
    "all": {"tied": True, "frozen": True, "empty": True, "wide": True},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plan_equals_the_run_of_odd_models(stage: int, model: dict[str, bool]) -> None:
    plans = check(lambda: Odd(**model), 3, stage=stage)
    if model.get("frozen"):
        trained = shardwise.plan(Odd(**(model | {"frozen": False})), 3, stage=stage)
        assert sum(plan["grad"] for plan in plans) < sum(trained.of_rank(rank)["grad"] for rank in range(3))
    if model.get("tied"):
        untied = shardwise.plan(Odd(**(model | {"tied": False})), 3, stage=stage)
        assert sum(plan["param"] for plan in plans) < sum(untied.of_rank(rank)["param"] for rank in range(3))


def test_frozen_model_rests_without_gradients_masters_and_states() -> None:
    model = nn.Linear(7, 13)
    model.requires_grad_(False)
    for stage in range(4):
        planned = shardwise.plan(model, 3, stage=stage, precision=Precision(param=BF16))
        assert planned.of_rank(1) == {
            "param": 2 * (64 if stage == 3 else 3 * 64),
            "master": 0,
            "grad": 0,
            "optim": 0,
        }


SHARDINGS = {
    "hybrid-local": hybrid("local"),
    "hybrid-node": hybrid("node"),
    "params-local": Sharding(param="local", grad="*", optim="*"),
    "stage-1-local": Sharding(optim="local"),
    "three-levels": Sharding(grad="local", optim="*"),
    "stage-3": Sharding(param="*", grad="*", optim="*"),
}


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("precision", [Precision(), Precision(param=BF16)], ids=["fp32", "bf16"])
def test_plan_equals_the_run_on_a_mesh(sharding: Sharding, precision: Precision) -> None:
    check(Odd, {"node": 2, "local": 2}, sharding=sharding, precision=precision, align=4)


def test_ranks_of_an_uneven_mesh_plan_unlike_shares() -> None:
    plans = check(Odd, {"node": 2, "local": 3}, sharding=SHARDINGS["stage-3"], align=1)
    assert len({plan["optim"] for plan in plans}) > 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plan_equals_the_run_with_a_sharding_per_parameter(stage: int) -> None:
    def rule(name: str, param: nn.Parameter) -> Sharding | None:
        if name.endswith("bias"):
            return shardwise.stage_sharding(2)
        return shardwise.stage_sharding(stage) if name != "last.weight" else None

    with torch.device("meta"):
        shapes = Odd()
    other = shardwise.plan(shapes, 4, stage=stage)
    assert check(Odd, 4, sharding=rule) != [other.of_rank(rank) for rank in range(4)]


@pytest.mark.parametrize("units", [None, nn.Linear, [], ["blocks.1", "last"]], ids=["auto", "class", "root", "names"])
@pytest.mark.parametrize("align", [1, 64])
def test_plan_equals_the_run_for_any_choice_of_units(units: Any, align: int) -> None:
    check(lambda: Odd(tied=True, frozen=True), 3, stage=3, units=units, align=align)


@pytest.mark.parametrize("stage", [0, 3])
def test_forced_collectives_on_one_rank_plan_the_same_bytes(stage: int) -> None:
    assert check(Odd, 1, stage=stage, force_collectives=True) == check(Odd, 1, stage=stage)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, 0),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
    "adam": (torch.optim.Adam, {}, 2),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}, 3),
    "adamw": (torch.optim.AdamW, {}, 2),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True}, 3),
    "nadam": (torch.optim.NAdam, {}, 2),
    "radam": (torch.optim.RAdam, {}, 2),
    "adamax": (torch.optim.Adamax, {}, 2),
    "adadelta": (torch.optim.Adadelta, {}, 2),
    "adagrad": (torch.optim.Adagrad, {}, 1),
    "asgd": (torch.optim.ASGD, {}, 1),
    "rprop": (torch.optim.Rprop, {}, 2),
    "rmsprop": (torch.optim.RMSprop, {}, 1),
    "rmsprop-centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, 3),
}


@pytest.mark.parametrize(("kind", "options", "words"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_plan_equals_the_run_with_each_optimizer(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], words: int
) -> None:
    numel = sum(param.numel() for param in Odd().parameters())
    plans = check(
        Odd,
        2,
        stage=2,
        optimizer=lambda params: kind(params, **options),
        plan_options={"optimizer": kind, "optimizer_options": options},
    )
    assert sum(plan["optim"] for plan in plans) == numel * words * 4


def test_optimizer_unknown_to_the_table_needs_its_words() -> None:
    class Mine(torch.optim.Optimizer):
        pass

    with pytest.raises(ConfigError, match=r"unknown optimizer state of Mine: pass optim_words="):
        shardwise.plan(Odd(), 2, optimizer=Mine)
    assert shardwise.plan(Odd(), 2, optimizer=Mine, optim_words=1).of_rank(0)["optim"] > 0


def test_plan_of_a_huge_model_allocates_nothing() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 15, 1 << 15, bias=False) for _ in range(64)))
    planned = shardwise.plan(model, 1024, stage=3, precision=Precision(param=BF16))
    assert planned.num_params == 1 << 36
    assert planned.padding_numel == 0
    assert planned.of_rank(1023) == {"param": 1 << 27, "master": 1 << 28, "grad": 1 << 28, "optim": 1 << 29}
    assert planned.largest_unit_bytes == 1 << 31


@pytest.mark.parametrize("num_ranks", [0, -1, True, 1.5, {"node": 0}, "4"])
def test_impossible_number_of_ranks_is_refused(num_ranks: Any) -> None:
    with pytest.raises(ConfigError, match="num_ranks must be a positive number"):
        shardwise.plan(Odd(), num_ranks)
