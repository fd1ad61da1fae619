"""``torch.autocast`` around forward and loss: the same as one plain process under autocast, at every stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.base import Mesh
from shardwise.memory import Kind
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import (
    FP32_TOLERANCE,
    Net,
    all_stages,
    assert_all_close,
    assert_at_rest,
    check_training,
    clone_all,
    data,
    defer,
    is_sharded,
    ledger_of,
    make_net,
    net_loss,
    sgd,
    shard,
    train_plain,
)

FP32 = torch.float32


def region(model: Any, dtype: torch.dtype = torch.bfloat16, **options: bool) -> Any:
    """An autocast region; a plain model may say how it differs from ours."""
    if not is_sharded(model):
        options = options | getattr(model, "plain_options", {})
    return torch.autocast("cpu", dtype=dtype, **options)


def with_plain_options(make: Callable[[], nn.Module], **options: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make()
        model.plain_options = options  # type: ignore[assignment]
        return model

    return build


def make() -> nn.Module:
    return make_net(FP32)


def make_reused() -> nn.Module:
    """Every block twice."""

    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.entry(x)
            for block in self.blocks:
                x = block(block(x))
            return self.head(x)

    net = Twice(dtype=FP32)
    net.load_state_dict(make().state_dict())
    return net


def make_checkpointed(reentrant: bool) -> nn.Module:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.entry(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    net = Checkpointed(dtype=FP32)
    net.load_state_dict(make().state_dict())
    return net


def make_external() -> nn.Module:
    """The head's product is written out in the root, with an external and a transposed weight."""

    class External(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.entry(x)
            for block in self.blocks:
                x = block(x) + x @ self.blocks[0].inner.weight.t()[:, :6]
            return x @ self.head.weight.t() + self.head.bias

    net = External(dtype=FP32)
    net.load_state_dict(make().state_dict())
    return net


def make_tied() -> nn.Module:
    net = make()
    net.blocks[2].inner.weight = net.blocks[0].inner.weight
    return net


def make_equal_values() -> nn.Module:
    """Weights that are equal, zero, and symmetric: a cast weight must be recognised by more than its values."""
    net = make()
    with torch.no_grad():
        net.blocks[1].load_state_dict(net.blocks[0].state_dict())
        net.blocks[2].outer.weight.zero_()
        net.blocks[2].outer.bias.zero_()
        net.blocks[2].inner.bias.zero_()
    return net


def forward_window(model: nn.Module, rank: int, step: int) -> None:
    with region(model):
        loss = net_loss(model, rank, step, dtype=FP32)
    assert loss.dtype == FP32
    loss.backward()


def whole_window(model: nn.Module, rank: int, step: int) -> None:
    """Backward inside the region too, and two micro-batches in one region: the cache spans both."""
    with region(model):
        net_loss(model, rank, step, 0, dtype=FP32).backward()
        net_loss(model, rank, step, 1, dtype=FP32).backward()


def no_cache_window(model: nn.Module, rank: int, step: int) -> None:
    with region(model, cache_enabled=False):
        net_loss(model, rank, step, dtype=FP32).backward()


def two_forwards_window(model: nn.Module, rank: int, step: int) -> None:
    with region(model):
        losses = [net_loss(model, rank, step, micro, dtype=FP32) for micro in range(2)]
    for loss in reversed(losses):
        loss.backward()


def evaluating_window(model: nn.Module, rank: int, step: int) -> None:
    """A no_grad pass inside the region, which must not leave copies without gradient behind."""
    with region(model):
        with torch.no_grad():
            model(data(2, 4, key="evaluation", dtype=FP32))
        net_loss(model, rank, step, dtype=FP32).backward()


def partial_window(model: nn.Module, rank: int, step: int) -> None:
    """Units called by themselves, one of them in a region that is off, and a pass outside of any."""
    net_loss(model, rank, step, 0, dtype=FP32).backward()
    with region(model):
        x = model.blocks[0](data(3, 6, key=(rank, step), dtype=FP32))
        with region(model, enabled=False):
            y = model.blocks[1](x.float())
        model.blocks[2](y).square().mean().backward()


def half_window(model: nn.Module, rank: int, step: int) -> None:
    with region(model, torch.float16):
        net_loss(model, rank, step, dtype=FP32).backward()


def deferred_window(model: nn.Module, rank: int, step: int) -> None:
    with region(model), defer(model):
        net_loss(model, rank, step, 0, dtype=FP32).backward()
    forward_window(model, rank, step)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": make,
    "reused": make_reused,
    "plain checkpoints": lambda: make_checkpointed(False),
    "reentrant checkpoints": lambda: make_checkpointed(True),
    "external": make_external,
    "tied": make_tied,
    "equal values": make_equal_values,
}
WINDOWS = [
    forward_window,
    whole_window,
    no_cache_window,
    two_forwards_window,
    evaluating_window,
    partial_window,
    half_window,
    deferred_window,
]


# One copy of a weight that two units use sums their gradients in bf16; a copy per unit, which ours is, in fp32.
SHARING = ("reused", "tied")


def check(name: str, window: Any, stage: int, **options: Any) -> None:
    """Compare with a plain run under autocast; a run without it would be found out."""
    build = with_plain_options(MODELS[name], **({"cache_enabled": False} if name in SHARING else {}))
    found = check_training(build, window, stage=stage, tolerance=FP32_TOLERANCE, **options)
    exact = train_plain(with_plain_options(MODELS[name], enabled=False), window, num_ranks=options.get("num_ranks", 2))
    difference = max(float((found[n] - exact[n]).abs().max()) for n in exact)
    assert difference > 10 * FP32_TOLERANCE, "vacuous: autocast changes nothing"


@all_stages
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_under_autocast_match_one_process(stage: int, window: Any) -> None:
    check("net", window, stage)


@all_stages
@pytest.mark.parametrize("name", MODELS)
def test_models_under_autocast_match_one_process(stage: int, name: str) -> None:
    check(name, whole_window, stage)


@pytest.mark.matrix
@all_stages
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("keep_last_unit", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a no_grad pass through checkpoints
def test_all_models_in_all_windows_match_one_process(
    stage: int, window: Any, name: str, num_ranks: int, keep_last_unit: bool
) -> None:
    check(name, window, stage, num_ranks=num_ranks, keep_last_unit=keep_last_unit, force_collectives=True)


def train_in_one_region(model: Any, optim: Any, window: Callable[[Any, int], None]) -> None:
    """Steps inside one region: a casted weight of the step before would be stale."""
    with region(model):
        for step in range(3):
            window(model, step)
            optim.step()
            optim.zero_grad()


@all_stages
def test_weights_are_cast_anew_after_a_step_inside_one_region(stage: int) -> None:
    """Plain torch keeps its cache until the region ends, so the reference opens a region for every pass."""
    plain = make()
    optim = sgd(plain)
    for step in range(3):
        for rank in range(2):
            with region(plain):
                loss = net_loss(plain, rank, step, dtype=FP32) / 2
            loss.backward()
        optim.step()
        optim.zero_grad()
    expected = clone_all(dict(plain.named_parameters()))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        train_in_one_region(model, optim, lambda m, step: net_loss(m, flat_rank(mesh), step, dtype=FP32).backward())
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        assert_all_close(found, expected, FP32_TOLERANCE)


@all_stages
def test_casted_copies_do_not_outlive_their_unit(stage: int) -> None:
    """At stage 3 nothing gathered stays, and no casted weight is saved for backward as a tensor."""

    def body(mesh: Mesh) -> None:
        model = shard(make(), mesh, stage, keep_last_unit=False)
        saved = []

        def note(tensor: Tensor) -> Tensor:
            saved.append(tuple(tensor.shape))
            return tensor

        with region(model):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = net_loss(model, flat_rank(mesh), 0, dtype=FP32)
            assert saved
            weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
            weights |= {shape[::-1] for shape in weights}
            if stage == 3:
                assert ledger_of(model)[Kind.GATHERED] == 0
                assert not weights & set(saved)
            loss.backward()
        assert_at_rest(model)

    run_ranks(2, body)
