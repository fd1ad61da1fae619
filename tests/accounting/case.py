"""A small model whose units' forwards, backwards and steps can be told to fail for want of memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh
from shardwise.memory import Arena

CPU_WORDS = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried for"
BF16 = shardwise.Precision(param=torch.bfloat16)
WIDTH = 24


class Switch:
    """What fails next: "forward", "backward", "step" or an index of a unit's."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.at = ""

    def check(self, at: str) -> None:
        if self.at == at and self.error is not None:
            self.at = ""
            raise self.error


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, switch: Switch, name: str) -> Tensor:
        ctx.check = lambda: switch.check(f"backward {name}")
        switch.check(f"forward {name}")
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.check()
        return grad, None, None


class Unit(nn.Module):
    def __init__(self, switch: Switch, name: str) -> None:
        super().__init__()
        self.switch, self.name = switch, name
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return _Passes.apply(self.linear(rows), self.switch, self.name).tanh()


class Model(nn.Module):
    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.inner = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Unit(switch, f"blocks.{number}") for number in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.inner(rows.to(self.inner.weight.dtype))
        for block in self.blocks:
            rows = block(rows)
        return rows


class FailingAdamW(torch.optim.AdamW):
    switch: Switch

    def step(self, closure: Any = None) -> Any:
        self.switch.check("step")
        return super().step(closure)


def values(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.2)


class Worker:
    """One rank's model and optimizer."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = FailingAdamW,
        arena: Callable[[torch.device], Arena] = Arena,
        **options: Any,
    ) -> None:
        self.switch = Switch()
        self.model = Model(self.switch)
        values(self.model)
        shardwise.shard(self.model, mesh, units=Unit, arena=arena, **options)
        made = optimizer(self.model.parameters(), lr=0.01)
        made.__dict__["switch"] = self.switch
        self.optimizer = shardwise.shard_optimizer(made, self.model)

    def backward(self, seed: int = 0) -> float:
        rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        loss = self.model(rows).float().square().mean()
        loss.backward()
        return float(loss.detach())

    def step(self, seed: int = 0) -> float:
        loss = self.backward(seed)
        shardwise.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
