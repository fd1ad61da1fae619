"""What leaves a forward, or a forward that could not begin: weights as outputs, transforms, switched-off hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import StateError
from shardwise.comm.base import Mesh
from shardwise.testing.lanes import PoisonArena
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import all_stages, assert_all_close, assert_at_rest, clone_all, data, fill, make_net, net_loss, sgd

TOLERANCE = 1e-12


class Give(nn.Module):
    """Returns its weight, in some form."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
        self.way = way

    def forward(self, x: Tensor) -> Any:
        rows = len(x)
        ways: dict[str, Callable[[], Any]] = {
            "slice": lambda: self.table[:rows],
            "transposed twice": lambda: self.table.t().t()[:rows],
            "detached": lambda: self.table.detach()[:rows],
            "in a list": lambda: [self.table[:rows]],
            "itself": lambda: self.table,
        }
        return ways[self.way]()


class Positions(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.positions = Give(way)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        table = self.positions(x)
        table = table[0] if isinstance(table, list) else table
        for block in self.blocks:
            x = torch.tanh(block(x)) + table[: len(x)]
        return x


@all_stages
@pytest.mark.parametrize("way", ["slice", "transposed twice", "detached", "in a list", "itself"])
def test_view_of_a_weight_may_leave_its_unit(stage: int, way: str) -> None:
    plain = fill(Positions(way))
    for rank in range(2):
        (plain(data(3, 4, key=("x", rank))).square().mean() / 2).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert expected

    def body(mesh: Mesh) -> dict[str, Tensor]:
        units = ["positions", "blocks.0", "blocks.1"]
        model = shardwise.shard(
            fill(Positions(way)), mesh, stage=stage, units=units, arena=PoisonArena, keep_last_unit=False
        )
        model(data(3, 4, key=("x", flat_rank(mesh)))).square().mean().backward()
        found = clone_all(shardwise.full_gradients(model))
        model.zero_grad()
        assert_at_rest(model)
        return found

    for found in run_ranks(2, body):
        assert_all_close(found, expected, TOLERANCE)


def test_view_of_a_weight_may_not_leave_the_model() -> None:
    model = shardwise.shard(fill(Give("slice")), stage=3, force_collectives=True)
    with pytest.raises(StateError, match="view of a weight"):
        model(data(3, 4, key="x"))
    with shardwise.unsharded(model):
        assert model(data(3, 4, key="x")).shape == (3, 4)


@all_stages
@pytest.mark.parametrize("inside", [True, False])
def test_transforms_work_or_say_how(stage: int, inside: bool) -> None:
    x = data(3, 4, key="x")
    expected = torch.func.jacrev(make_net())(x)
    model = shard_alone(stage)
    if inside:
        with shardwise.unsharded(model, writes=False):
            assert torch.equal(torch.func.jacrev(model)(x), expected)
    else:
        with pytest.raises(StateError, match="unsharded"):
            torch.func.jacrev(model)(x)
    check_that_it_trains(model)


def test_forward_that_cannot_begin_leaves_everything_guarded() -> None:
    model = shard_alone(3)
    off = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with off, pytest.raises(StateError, match="saved-tensor hooks are switched off"):
        net_loss(model, 0, 0)
    with pytest.raises(StateError, match="sharded"):
        model.head.weight.sum()
    with shardwise.unsharded(model):
        pass
    check_that_it_trains(model)
    with pytest.raises(StateError, match="sharded"):
        model.head.weight.sum()


def test_inference_parameters_are_refused_before_anything_changes() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(shardwise.ConfigError, match="inference"):
        shardwise.shard(model, stage=3)


def shard_alone(stage: int) -> Any:
    return shardwise.shard(make_net(), stage=stage, force_collectives=True)


def check_that_it_trains(model: nn.Module) -> None:
    optim = shardwise.shard_optimizer(sgd(model), model)
    before = clone_all(shardwise.full_parameters(model))
    net_loss(model, 0, 0).backward()
    optim.step()
    optim.zero_grad()
    after = shardwise.full_parameters(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert_at_rest(model)
