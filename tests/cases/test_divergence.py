"""What one rank alone does, or what is done behind the optimizer's back, is an error before the next update."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import LossScale, Precision, RankMismatchError, StateError
from shardwise.comm.base import Mesh
from shardwise.managed import Managed
from shardwise.testing.ranks import run_ranks

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
    return model.to(dtype)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(x.to(next(iter(model.parameters())).dtype)).pow(2).mean()
    shardwise.scale_loss(model, loss).backward()


def build(mesh: Mesh, stage: int, *, lr: float = 0.1, **options: Any) -> tuple[nn.Module, Any]:
    model = shardwise.shard(make(), mesh, stage=stage, **options)
    return model, shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=lr), model)


def rate(mesh: Mesh, stage: int) -> None:
    rank = mesh["data"].rank
    model, optimizer = build(mesh, stage, lr=0.1 * (1 + rank))
    backward(model, rank)
    optimizer.step()


def limit(mesh: Mesh, stage: int) -> None:
    rank = mesh["data"].rank
    model, _ = build(mesh, stage)
    backward(model, rank)
    shardwise.clip_grad_norm_(model, 0.1 * (1 + rank))


def clearing(mesh: Mesh, stage: int) -> None:
    rank = mesh["data"].rank
    model, optimizer = build(mesh, stage)
    backward(model, rank)
    if rank == 0:
        optimizer.zero_grad()
    optimizer.step()


def one_gradient(mesh: Mesh, stage: int) -> None:
    rank = mesh["data"].rank
    model, optimizer = build(mesh, stage)
    backward(model, rank)
    if rank == 0:
        model[0].weight.grad = None
    optimizer.step()


@all_stages
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (rate, "'lr': 0.1,.*'lr': 0.2,"),
        (limit, "rank 0: clip_grad_norm_ with max_norm=0.1, .*rank 1: clip_grad_norm_ with max_norm=0.2,"),
        (clearing, "cleared"),
        (one_gradient, "cleared 0.weight"),
    ],
)
def test_what_one_rank_does_otherwise_is_named_on_all(act: Callable[..., None], message: str, stage: int) -> None:
    for error in run_ranks(2, lambda mesh: act(mesh, stage), return_exceptions=True):
        assert isinstance(error, RankMismatchError)
        with pytest.raises(RankMismatchError, match=message):
            raise error


def clamp_fragments(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for fragment in group["params"]:
                fragment.clamp_(-0.01, 0.01)


def clamp_data_of_fragments(model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for fragment in group["params"]:
            fragment.data.clamp_(-0.01, 0.01)


def zero_local_parameters(model: nn.Module, optimizer: Any) -> None:
    for part in shardwise.local_parameters(model).values():
        part.zero_()


@all_stages
@pytest.mark.parametrize("edit", [clamp_fragments, clamp_data_of_fragments, zero_local_parameters])
@pytest.mark.parametrize("then", ["forward", "step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_edited_behind_the_model_are_an_error(
    edit: Callable[..., None], then: str, stage: int, dtype: torch.dtype
) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make(dtype), mesh, stage=stage)
        optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(2):
            backward(model, mesh["data"].rank, step)
            optimizer.step()
            optimizer.zero_grad()
        assert shardwise.local_parameters(model) or mesh["data"].rank  # looking is no edit
        backward(model, mesh["data"].rank, 3)
        edit(model, optimizer)
        act = optimizer.step if then == "step" else partial(model, torch.ones(1, 8, dtype=dtype))
        with pytest.raises(StateError, match="edited between steps"):
            act()

    run_ranks(1, body)


@all_stages
def test_gradient_of_a_fragment_can_be_taken_away_but_not_replaced(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model, optimizer = build(mesh, stage)
        before = shardwise.full_parameters(model)
        backward(model, mesh["data"].rank)
        for group in optimizer.param_groups:
            for fragment in group["params"]:
                with pytest.raises(StateError, match=r"assigning \.grad"):
                    fragment.grad = torch.zeros_like(fragment)
                with pytest.raises(StateError, match=r"assigning \.data"):
                    fragment.data = torch.zeros(())
                fragment.grad = None
        optimizer.step()
        after = shardwise.full_parameters(model)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(1, body)


@all_stages
def test_norm_follows_edits_of_local_gradients(stage: int) -> None:
    def body(mesh: Mesh) -> tuple[float, float]:
        model, _ = build(mesh, stage)
        backward(model, mesh["data"].rank)
        norm = float(shardwise.clip_grad_norm_(model, 1e9))
        for part in shardwise.local_gradients(model).values():
            part.mul_(10)
        return norm, float(shardwise.clip_grad_norm_(model, 1e9))

    for before, after in run_ranks(2, body):
        assert after == pytest.approx(10 * before, rel=1e-6)


class Twice(torch.optim.SGD):
    """A subclass whose step calls that of its parent: torch runs the step hooks for both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@all_stages
@pytest.mark.parametrize("optimizers", ["plain", "nested", "two"])
def test_loss_scale_counts_each_update_once(optimizers: str, stage: int) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # so that torch has wrapped the parent's step

    def body(mesh: Mesh) -> list[float]:
        precision = Precision(param=torch.float16, loss_scale=LossScale(initial=256.0, growth_interval=2, hysteresis=2))
        model = shardwise.shard(make(), mesh, stage=stage, precision=precision)
        params = list(model.parameters())
        cls = Twice if optimizers == "nested" else torch.optim.SGD
        parts = [params[:2], params[2:]] if optimizers == "two" else [params]
        made = [shardwise.shard_optimizer(cls(part, lr=0.01), model, partial=True) for part in parts]
        scales = []
        for step in range(5):
            backward(model, mesh["data"].rank, step)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
            assert Managed.of(model).runtime.num_steps == (step + 1) * len(made)
            scaler = shardwise.scale_loss(model, torch.ones(()))
            scales.append(float(scaler))
        return scales

    for scales in run_ranks(2, body):
        assert scales == [256.0, 512.0, 512.0, 1024.0, 1024.0]


def test_optimizer_of_a_model_that_is_sharded_no_more_refuses_to_step() -> None:
    def body(mesh: Mesh) -> None:
        model, optimizer = build(mesh, 3)
        shardwise.unshard_model(model)
        with pytest.raises(StateError, match="sharded no more"):
            optimizer.step()

    run_ranks(2, body)


def test_settings_of_a_step_are_compared_every_time() -> None:
    def body(mesh: Mesh) -> Tensor:
        rank = mesh["data"].rank
        model, optimizer = build(mesh, 2)
        for step in range(3):
            backward(model, rank, step)
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank * (step == 2))
            optimizer.step()
            optimizer.zero_grad()
        return torch.zeros(())

    errors = run_ranks(2, body, return_exceptions=True)
    assert all(isinstance(error, RankMismatchError) and "settings of step 2" in str(error) for error in errors)


class Sometimes(nn.Module):
    """Uses its weight for positive data only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) if bool(x[0, 0] > 0) else x
        return out


@all_stages
def test_backward_that_reaches_no_parameter_on_one_rank_is_named_on_all(stage: int) -> None:
    """A unit called by itself; in a call of the root some parameter learns on every rank."""

    def body(mesh: Mesh) -> None:
        model = nn.Sequential(Sometimes(), nn.Linear(8, 8))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        model = shardwise.shard(model, mesh, stage=stage, units=Sometimes)
        optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        x = torch.full((4, 8), 1.0 - 2.0 * mesh["data"].rank, requires_grad=True)
        model[0](x).square().sum().backward()
        optimizer.step()

    errors = run_ranks(2, body, timeout=1, return_exceptions=True)
    assert all(isinstance(error, RankMismatchError) for error in errors), errors
    assert any("did not come" in str(error) for error in errors)
