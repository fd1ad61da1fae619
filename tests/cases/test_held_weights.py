"""Somebody holds a weight, or a view of it, beyond its unit's forward: nobody ever reads memory that was freed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import shardwise
from shardwise import StateError
from shardwise.comm.base import Mesh
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.testing.ranks import run_ranks

WIDTH = 8
all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.scale


class Transposed(torch.autograd.Function):
    """Keeps a view of the weight in its context, out of reach of saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.view, ctx.x = weight.t(), x
        return x @ ctx.view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.view.t(), grad.t() @ ctx.x


class InContext(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Transposed.apply(x, self.linear.weight).tanh() * self.scale  # type: ignore[no-any-return]


class Stashed(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.view = self.linear.weight.t()
        return out + x @ self.view


class OwnHooks(Block):
    hooks: Callable[[], Any] = staticmethod(lambda: saved_tensors_hooks(lambda t: t.clone() * 1, lambda t: t))

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            return super().forward(x)


class Identity(OwnHooks):
    hooks = staticmethod(lambda: saved_tensors_hooks(lambda t: t, lambda t: t))


class Closed(Identity):
    """Its result is in a closure, so nothing says when a backward reaches it."""

    def forward(self, x: Any) -> Any:
        out = super().forward(x() if callable(x) else x)
        return lambda: out


class Opened(nn.Sequential):
    """Opens the closure at the end."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)()
        return out


class OnCpu(OwnHooks):
    hooks = staticmethod(save_on_cpu)


class Energy(Block):
    """Its output is a gradient: it needs a graph also where the caller switched grad mode off."""

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (force,) = torch.autograd.grad(super().forward(x).sum(), x)
        return force


class Forces(nn.Module):
    """Takes gradients through blocks that are over, while the caller has grad mode off."""

    def __init__(self, closed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithGraph(closed) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = y = x.detach().requires_grad_(True)
        for block in self.blocks:
            out = block(y)
            y = out() if callable(out) else out
        (force,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return force


class WithGraph(nn.Module):
    """Autograd saves its parameter itself, and no view of it."""

    def __init__(self, closed: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.closed = closed

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Any:
        out = x.sin() * self.scale
        return (lambda: out) if self.closed else out


def make(block: Callable[[], nn.Module]) -> nn.Sequential:
    model = (Opened if block is Closed else nn.Sequential)(*(block() for _ in range(3))).double()
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
    return model


def rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def train(model: nn.Module, optimizer: Any, x: Callable[[int], list[Tensor]]) -> None:
    for step in range(3):
        parts = x(step)
        for part in parts:
            (model(part).pow(2).mean() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


@all_stages
@pytest.mark.parametrize("block", [InContext, Stashed, OwnHooks, Identity, Closed, OnCpu])
def test_views_held_outside_a_forward_stay_readable(block: type[nn.Module], stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make(block), mesh, stage=stage, units=block, keep_last_unit=False)
        optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        train(model, optimizer, lambda step: [rows(mesh["data"].rank, step)])
        return shardwise.full_parameters(model)

    plain = make(block)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), lambda step: [rows(0, step), rows(1, step)])
    for params in run_ranks(2, body):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(params[name], param.detach())


@all_stages
def test_unit_that_switches_grad_mode_on_runs_without_it(stage: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        model = shardwise.shard(make(Energy), mesh, stage=stage, units=Energy, keep_last_unit=False)
        with torch.no_grad():
            out: Tensor = model(rows(0))
        return out.detach()

    expected = make(Energy)(rows(0)).detach()
    for out in run_ranks(2, body):
        torch.testing.assert_close(out, expected)


@all_stages
@pytest.mark.parametrize("block", [Forces, partial(Forces, closed=True)], ids=["open", "closed"])
def test_gradients_through_units_that_are_over_are_right_without_grad_mode(
    stage: int, block: Callable[[], nn.Module]
) -> None:
    def body(mesh: Mesh) -> Tensor:
        model = shardwise.shard(make(block), mesh, stage=stage, units=WithGraph, keep_last_unit=False)
        with torch.no_grad():
            out: Tensor = model(rows(0))
        return out

    with torch.no_grad():
        expected = make(block)(rows(0))
    for out in run_ranks(2, body):
        torch.testing.assert_close(out, expected)


def test_memory_is_given_back_when_the_view_is_gone() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make(Stashed), mesh, stage=3, units=Stashed, keep_last_unit=False)
        now = Managed.of(model).runtime.means.arena.ledger.now
        with torch.no_grad():
            model(rows(0))
            assert now[Kind.GATHERED] > 0
            for block in model:
                block.forward = super(Stashed, block).forward  # type: ignore[method-assign]
                del block.view
            model(rows(0))
        assert now[Kind.GATHERED] == 0

    run_ranks(2, body)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("where", ["forward", "function"])
def test_backward_after_unsharded_is_right_or_an_error(where: str, writes: bool) -> None:
    def body(mesh: Mesh) -> tuple[str, dict[str, Tensor]]:
        model = shardwise.shard(make(Block), mesh, stage=3, units=Block)
        with shardwise.unsharded(model, writes=writes):
            if where == "forward":
                loss = model(rows(0)).pow(2).mean()
            else:
                loss = sum(param.pow(2).sum() for param in model.parameters())
        try:
            loss.backward()
        except RuntimeError as error:
            model.zero_grad()
            return str(error), {}
        return "", shardwise.full_gradients(model)

    plain = make(Block)
    plain(rows(0)).pow(2).mean().backward()
    for error, grads in run_ranks(2, body):
        if where == "forward" and not writes:
            assert not error
            for name, param in plain.named_parameters():
                torch.testing.assert_close(grads[name], param.grad)
        else:
            assert "changed between forward and backward" in error or "modified by an inplace operation" in error


@all_stages
def test_regularizer_with_its_backward_inside_unsharded_is_right(stage: int) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean() + sum(0.1 * param.pow(2).sum() for param in model.parameters())
        return loss

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make(Block), mesh, stage=stage, units=Block)
        with shardwise.unsharded(model):
            loss_of(model, rows(0)).backward()
        return shardwise.full_gradients(model)

    plain = make(Block)
    loss_of(plain, rows(0)).backward()
    for grads in run_ranks(2, body):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad)


def test_edit_through_data_inside_a_forward_is_an_error_where_it_would_be_lost() -> None:
    class Clamped(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.linear.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make(Clamped), mesh, stage=3, units=Clamped)
        with pytest.raises(StateError, match="changed in place during its forward"):
            model(rows(0))

    run_ranks(2, body)


def test_forward_that_a_keyboard_interrupt_ended_leaves_nothing_behind() -> None:
    class Interrupted(Block):
        interrupts = True

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupts:
                raise KeyboardInterrupt
            return super().forward(x)

    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make(Interrupted), mesh, stage=3, units=Interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(rows(0))
        model.zero_grad()
        optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        optimizer.zero_grad()
        assert torch.func.grad(lambda x: x.sin())(torch.zeros(())) == 1  # no saved-tensor hooks are left
        with pytest.raises(StateError, match="needs the whole parameter outside a forward"):
            model[0].scale.sum()
        model[1] = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(StateError, match="changed after shard"):
            model(rows(0))

    run_ranks(2, body)
