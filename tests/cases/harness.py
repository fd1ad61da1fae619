"""One training script, run twice: in one plain process over the data of all ranks, and sharded over ranks as threads.

A *window* is the part of a step that makes gradients: ``window(model, rank, step)`` runs forwards and backwards on the
data of one rank. ``check_training`` makes sure first that the reference would notice a mistake (ranks' gradients
differ, parameters move, a clip clips), then compares the parameters of every rank after a few steps.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh
from shardwise.memory import Arena, Kind
from shardwise.testing.ranks import flat_rank, run_ranks

Window = Callable[[nn.Module, int, int], None]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

STAGES = tuple(range(4))
FP64_TOLERANCE = 1e-12  # relative to the largest element of a parameter
FP32_TOLERANCE = 1e-5

all_stages = pytest.mark.parametrize("stage", STAGES, ids=[f"stage{stage}" for stage in STAGES])


class PoisonedArena(Arena):
    """New memory holds NaN, so that whoever reads it before writing it, padding included, shows."""

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        super().resize(tensor, num_bytes)
        if num_bytes and tensor.is_floating_point():
            tensor.fill_(math.nan)


def generator(*key: object) -> torch.Generator:
    """A generator of its own for every key."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def fill(model: nn.Module, *key: object, scale: float = 0.3) -> nn.Module:
    """Give every parameter values that depend on its name and the key only."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.is_floating_point():
                value = torch.randn(param.shape, generator=generator(name, *key), dtype=torch.float64)
                param.copy_(value * scale)
    return model


def data(*shape: int, key: object, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that depend on the key only."""
    return torch.randn(shape, generator=generator("data", key), dtype=torch.float64).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The least forgiving optimizer: a wrong scale of the gradient shows at once."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def shard(model: nn.Module, mesh: Mesh, stage: int, **options: Any) -> nn.Module:
    """Shard with poisoned memory."""
    return shardwise.shard(model, mesh, stage=stage, **{"arena": PoisonedArena, **options})


def is_sharded(model: nn.Module) -> bool:
    return "_shardwise" in model.__dict__


def defer(model: nn.Module, **options: bool) -> AbstractContextManager[None]:
    """``no_sync`` where there is something to send."""
    return shardwise.no_sync(model, **options) if is_sharded(model) else contextlib.nullcontext()


def assert_at_rest(model: nn.Module) -> None:
    """Nothing gathered, no gradient slab left over, at the end of a step."""
    ledger = ledger_of(model)
    assert ledger[Kind.GATHERED] == 0
    assert ledger[Kind.STAGING] == 0


def ledger_of(model: nn.Module) -> Any:
    return model._shardwise.runtime.means.arena.ledger.now  # type: ignore[union-attr]


def clone_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def plain_gradients(model: nn.Module, window: Window, num_ranks: int, step: int) -> list[dict[str, Tensor]]:
    """Return the gradients that each rank's window makes on the same plain model."""
    gradients = []
    for rank in range(num_ranks):
        model.zero_grad(set_to_none=True)
        window(model, rank, step)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return gradients


def set_mean_gradients(model: nn.Module, gradients: list[dict[str, Tensor]]) -> None:
    """Set ``.grad`` to the mean over ranks; a parameter that no rank used gets None."""
    for name, param in model.named_parameters():
        found = [grads[name] for grads in gradients if name in grads]
        param.grad = functools.reduce(torch.add, found) / len(gradients) if found else None


def train_plain(
    make: Callable[[], nn.Module],
    window: Window,
    *,
    num_ranks: int = 2,
    steps: int = 2,
    optimizer: MakeOptimizer = sgd,
    clip: float | None = None,
    same_data: bool = False,
) -> dict[str, Tensor]:
    """Train one plain model on the data of all ranks; check that the run can tell right from wrong."""
    model = make()
    optim = optimizer(model)
    start = clone_all(dict(model.named_parameters()))
    for step in range(steps):
        gradients = plain_gradients(model, window, num_ranks, step)
        if num_ranks > 1 and not same_data:
            assert any(not torch.equal(g, gradients[1].get(n, g + 1)) for n, g in gradients[0].items()), (
                "vacuous: both ranks make the same gradients"
            )
        set_mean_gradients(model, gradients)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip, "vacuous: nothing to clip"
        optim.step()
        optim.zero_grad()
    result = clone_all(dict(model.named_parameters()))
    assert any(not torch.equal(start[name], result[name]) for name in result), "vacuous: no parameter moves"
    return result


def train_sharded(
    make: Callable[[], nn.Module],
    window: Window,
    mesh: Mesh,
    *,
    stage: int,
    steps: int = 2,
    optimizer: MakeOptimizer = sgd,
    clip: float | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on one rank of a mesh; return the full parameters."""
    model = shard(make(), mesh, stage, **options)
    optim = shardwise.shard_optimizer(optimizer(model), model)
    for step in range(steps):
        window(model, flat_rank(mesh), step)
        if clip is not None:
            shardwise.clip_grad_norm_(model, clip)
        optim.step()
        assert optim.step_was_applied
        optim.zero_grad()
        assert_at_rest(model)
    return shardwise.full_parameters(model)


def check_training(
    make: Callable[[], nn.Module],
    window: Window,
    *,
    stage: int,
    num_ranks: int | dict[str, int] = 2,
    steps: int = 2,
    optimizer: MakeOptimizer = sgd,
    clip: float | None = None,
    same_data: bool = False,
    tolerance: float = FP64_TOLERANCE,
    **options: Any,
) -> dict[str, Tensor]:
    """Check that sharded training ends where one plain process ends, on every rank alike; return the parameters."""
    count = num_ranks if isinstance(num_ranks, int) else math.prod(num_ranks.values())
    common: dict[str, Any] = {"steps": steps, "optimizer": optimizer, "clip": clip}
    expected = train_plain(make, window, num_ranks=count, same_data=same_data, **common)
    ranks = run_ranks(
        num_ranks,
        lambda mesh: train_sharded(make, window, mesh, stage=stage, **common, **options),
        timeout=20,
    )
    for found in ranks:
        assert_all_close(found, expected, tolerance)
        assert_all_equal(found, ranks[0])
    return ranks[0]


def assert_all_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    unlike = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not unlike, f"differ: {unlike}, first {found[unlike[0]]} expected {expected[unlike[0]]}"


def assert_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare with an absolute tolerance relative to each tensor's largest element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        if value.numel():
            scale = max(float(value.double().abs().max()), 1e-3)
            error = float((found[name].double() - value.double()).abs().max())
            assert error <= tolerance * scale, f"{name}: off by {error}, largest element {scale}"


@contextlib.contextmanager
def raises(kind: type[Exception], match: str) -> Iterator[None]:
    """``pytest.raises``, usable on the threads of ranks: catches, checks, never leaks into the peers."""
    with pytest.raises(kind, match=match):
        yield


class Weight(nn.Module):
    """The gradient is the constant it is called with, exactly: loss ``(w * c).sum()``, ``w`` starts at zero."""

    def __init__(self, numel: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, constant: float) -> Tensor:
        return (self.w * constant).sum()


class Block(nn.Module):
    """A residual pair of linears; the usual unit of these tests."""

    def __init__(self, width: int = 6, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width + 1, dtype=dtype)
        self.outer = nn.Linear(width + 1, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Entry, blocks (one unit each), head."""

    def __init__(self, width: int = 6, num_blocks: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.entry = nn.Linear(4, width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(num_blocks))
        self.head = nn.Linear(width, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(dtype: torch.dtype = torch.float64, **options: int) -> nn.Module:
    return fill(Net(dtype=dtype, **options))


def net_loss(model: nn.Module, rank: int, step: int, micro: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The loss of one micro-batch of one rank."""
    x = data(3, 4, key=("x", rank, step, micro), dtype=dtype)
    y = data(3, 2, key=("y", rank, step, micro), dtype=dtype)
    return (model(x) - y).pow(2).mean()


def net_window(model: nn.Module, rank: int, step: int) -> None:
    """One forward and backward."""
    net_loss(model, rank, step).backward()
