"""One small model with everything that a checkpoint must bring back, and what to compare of it."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Comm, flat_rank
from shardwise.precision import LossScale, Precision

State = dict[str, Tensor]
_building = threading.Lock()


class Odd(nn.Module):
    """Tied, frozen, empty, uneven and 0-dim parameters, buffers of several kinds, dropout."""

    def __init__(self, *, renamed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6)) for _ in range(2))
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.drop = nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.cube = nn.Parameter(torch.randn(3, 5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        if renamed:
            self.other = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.embed(tokens) * self.scale + self.frozen.sum(0) + self.cube.mean((0, 1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        self.count += 1
        return self.head(self.drop(self.norm(hidden.float()).to(hidden.dtype)))


def build(
    mesh: Mapping[str, Comm],
    sharding: Any,
    *,
    seed: int = 0,
    lr: float = 0.05,
    dtype: torch.dtype | None = None,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    model: Callable[[], nn.Module] = Odd,
    align: int = 64,
) -> tuple[nn.Module, Any]:
    """Return a sharded model and optimizer; two groups, of which one decays."""
    with _building, torch.random.fork_rng():  # threads share one generator
        torch.manual_seed(seed)
        net = model()
    stage = {"stage": sharding} if isinstance(sharding, int) else {"sharding": sharding}
    precision = Precision(param=dtype, loss_scale=LossScale(initial=1024.0) if dtype is torch.float16 else None)
    net = shardwise.shard(net, dict(mesh), units=nn.Linear, precision=precision, align=align, **stage)
    return net, shardwise.shard_optimizer(make(net) if make else adamw(net, lr), net, on_nonfinite="skip")


def adamw(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    decayed = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    rest = [p for p in net.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2 * lr}]
    return torch.optim.AdamW(groups, lr=lr)


def train(net: nn.Module, optimizer: Any, mesh: Mapping[str, Comm], steps: range) -> None:
    """Do some updates, each rank with samples of its own; dropout is off, for threads share its generator."""
    net.drop.eval()
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + flat_rank(mesh))
        tokens = torch.randint(11, (4,), generator=generator)
        loss = nn.functional.cross_entropy(net(tokens).float(), tokens)
        shardwise.scale_loss(net, loss).backward()
        shardwise.clip_grad_norm_(net, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def state_of(net: nn.Module, *, buffers: bool = True) -> State:
    """Return masters, compute copies, buffers, moments and counters, whole."""
    found = {f"master {name}": tensor for name, tensor in shardwise.full_parameters(net).items()}
    kept = shardwise.full_state_dict(net)
    names = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    found |= {f"copy {name}": tensor for name, tensor in kept.items() if buffers or name in names}
    for name, states in shardwise.full_optimizer_state(net).items():
        found |= {f"{key} of {name}": tensor for key, tensor in states.items()}
    return found


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare bit by bit."""
    assert found.keys() == expected.keys()
    unlike = [name for name, tensor in expected.items() if not same_bits(found[name], tensor)]
    assert not unlike


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))


def tree(folder: Path) -> set[str]:
    """Return every path below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
