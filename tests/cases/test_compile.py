"""``torch.compile`` of blocks and of whole models: the same numbers as eager, and no recompilation per step."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Precision
from shardwise.comm.base import Mesh
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import (
    FP32_TOLERANCE,
    Net,
    all_stages,
    assert_all_close,
    assert_all_equal,
    assert_at_rest,
    make_net,
    net_loss,
    sgd,
    shard,
)

FP32 = torch.float32

# The compiler looks at .grad of every tensor it meets and hides the warning, which "warnings are errors" forestalls.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def compile_blocks(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_whole(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def wrap_blocks(model: Any, backend: str) -> Any:
    """The other form: a module around each block, which adds a prefix to the names."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def freeze_middle(model: Any) -> Any:
    model.blocks[1].requires_grad_(False)
    return model


def checkpoint_blocks(model: Any) -> Any:
    other = Checkpointed(dtype=FP32)
    other.load_state_dict(model.state_dict())
    return other


def train(
    mesh: Mesh, stage: int, arrange: Callable[[nn.Module], nn.Module], after: Callable[[Any], Any], **options: Any
) -> tuple[dict[str, Tensor], list[int]]:
    """Train four steps; return the parameters and the number of compiled frames after each step."""
    model = after(shard(arrange(make_net(FP32)), mesh, stage, force_collectives=True, **options))
    optim = shardwise.shard_optimizer(sgd(model), model)
    dtype = model.head.weight.dtype
    frames = []
    for step in range(4):
        net_loss(model, flat_rank(mesh), step, dtype=dtype).backward()
        optim.step()
        optim.zero_grad()
        frames.append(
            torch._dynamo.utils.counters["frames"]["ok"] + sum(torch._dynamo.utils.counters["stats"].values())
        )
    assert_at_rest(model)
    names = {name.replace("_orig_mod.", ""): value for name, value in shardwise.full_parameters(model).items()}
    return names, frames


def check(stage: int, way: Callable[[Any, str], Any], backend: str, when: str, arrange: Any, **options: Any) -> None:
    def same(model: Any) -> Any:
        return model

    [(expected, _)] = run_ranks(1, lambda mesh: train(mesh, stage, arrange, same, **options))
    before = (lambda m: way(arrange(m), backend)) if when == "before" else arrange
    after = (lambda m: way(m, backend)) if when == "after" else same
    [(found, frames)] = run_ranks(1, lambda mesh: train(mesh, stage, before, after, **options), timeout=100)
    assert frames[0] > 0, "vacuous: nothing was compiled"
    assert frames[3] == frames[1], "recompiled because parameters changed their memory"
    if backend in ("eager", "aot_eager"):
        assert_all_equal(found, expected)
    else:
        assert_all_close(found, expected, FP32_TOLERANCE)


def test_compiled_blocks_train_like_eager_ones() -> None:
    check(3, compile_blocks, "eager", "after", lambda model: model)


ARRANGEMENTS = {"plain": lambda model: model, "frozen": freeze_middle, "checkpointed": checkpoint_blocks}
WAYS = {"blocks": compile_blocks, "whole": compile_whole, "wrapped blocks": wrap_blocks}


@pytest.mark.matrix
@all_stages
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_compile_trains_like_eager(
    stage: int, backend: str, way: str, arrangement: str, when: str, dtype: torch.dtype
) -> None:
    if way == "wrapped blocks" and when == "after":
        return  # the tree would change: an error, see test_structure.py
    precision = Precision(param=dtype)
    check(stage, WAYS[way], backend, when, ARRANGEMENTS[arrangement], precision=precision)
