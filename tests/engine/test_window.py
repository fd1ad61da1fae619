"""The accumulation window: every entry point has one meaning, the same at all stages."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, RankMismatchError, StateError
from shardwise.comm.base import Mesh
from shardwise.engine import Engine
from shardwise.testing.ranks import run_ranks

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Gadget(nn.Module):
    """The gradient of each weight is the mean of the inputs, exactly."""

    def __init__(self, numel: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def build(mesh: Mesh, stage: int, model: nn.Module | None = None, **config: Any) -> Engine:
    """An engine of plain SGD with a learning rate of 1."""
    settings = {"stage": stage, "optimizer": {"name": "sgd", "lr": 1.0}, **config}
    engine, *_ = shardwise.initialize(model=model or Gadget(), config=settings, mesh=mesh)
    return engine


def weights(engine: Engine) -> Tensor:
    return shardwise.full_parameters(engine.module)["weight"]


def value(x: float) -> Tensor:
    return torch.tensor(float(x))


def agreed(results: list[Tensor]) -> Tensor:
    """The weights, which all ranks must hold alike."""
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


Entry = Callable[[Engine, Tensor, int], None]
ENTRIES: Mapping[str, Entry] = {
    "the engine divides": lambda engine, loss, window: engine.backward(loss),
    "plain backward": lambda engine, loss, window: loss.backward(),
    "the caller divides": lambda engine, loss, window: engine.backward(loss / window, scale_wrt_gas=False),
    "scaled by the engine": lambda engine, loss, window: engine.scale(loss).backward(),
}


@all_stages
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_constant_micro_batches_update_by_their_value_at_every_entry(stage: int, entry: str, window: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, batch={"micro": 1, "accumulation": window})
        for _ in range(window):
            ENTRIES[entry](engine, engine(value(4)), window)
            engine.step()
        assert engine.global_steps == 1
        return weights(engine)

    assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), -4.0))


@all_stages
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
def test_last_micro_batch_of_a_window_is_reduced_too(stage: int, window: int, accumulate: str) -> None:
    def body(mesh: Mesh) -> Tensor:
        precision = {"param": "bf16", "accumulate": accumulate}
        engine = build(mesh, stage, precision=precision, batch={"micro": 1, "accumulation": window})
        for micro in range(window):
            engine.backward(engine(value(window * (1 + mesh["data"].rank * 2 + micro))))
            engine.step()
        return weights(engine).float()

    mean = sum(window * (1 + 2 * rank + micro) for rank in range(2) for micro in range(window)) / window / 2
    assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), -float(mean)))


@all_stages
def test_bf16_has_no_loss_scale(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, stage, Gadget(4), precision={"param": "bf16"}, batch={"micro": 1})
        for step in range(1, 4):
            engine.backward(engine(value(1)))
            engine.step()
            assert engine.get_global_grad_norm() == 2.0
            assert torch.equal(weights(engine).float(), torch.full((4,), -float(step)))
            assert engine.loss_scale == 1

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("order", ["ffbb", "fbfb"])
def test_two_forwards_then_two_backwards_count_twice(stage: int, order: str, by_hand: bool) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, batch={"micro": 1, "accumulation": 2})
        inputs = [value(1 + mesh["data"].rank), value(5)]
        losses: list[Tensor] = []
        for letter, index in zip(order, (0, 1, 0, 1) if order == "ffbb" else (0, 0, 1, 1), strict=True):
            if letter == "f":
                losses.append(engine(inputs[index]))
                continue
            if by_hand:
                engine.set_gradient_accumulation_boundary(index == 1)
            engine.backward(losses[index])
            if not by_hand or index == 1:
                engine.step()
        assert engine.global_steps == 1
        return weights(engine)

    assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), -(1.5 + 5) / 2))


@all_stages
@pytest.mark.parametrize("cleared", [False, True])
def test_two_losses_of_one_forward_add_up(stage: int, cleared: bool) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, batch={"micro": 1})
        out = engine(value(1 + mesh["data"].rank))
        engine.backward(out * 2, retain_graph=True)
        if cleared:
            engine.zero_grad()
        engine.backward(out * 4)
        engine.step()
        return weights(engine)

    expected = torch.full((6,), -1.5 * (4 if cleared else 6))
    with pytest.warns(UserWarning, match="zero_grad: inside an acc") if cleared else nullcontext():
        assert torch.equal(agreed(run_ranks(2, body)), expected)


@all_stages
def test_zero_grad_inside_a_window_forgets_what_came_before(stage: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, batch={"micro": 1, "accumulation": 2})
        engine.zero_grad()  # at its start it says nothing
        engine.backward(engine(value(100)))
        engine.step()
        engine.zero_grad()
        engine.backward(engine(value(2 + 2 * mesh["data"].rank)))
        engine.step()
        assert engine.global_steps == 1
        return weights(engine)

    with pytest.warns(UserWarning, match=r"1 of 2 micro-batches done"):
        assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), -1.5))


@all_stages
def test_no_sync_keeps_gradients_local_and_loses_none(stage: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, batch={"micro": 1, "accumulation": 2})
        with engine.no_sync():
            engine.backward(engine(value(2)))
            with pytest.raises(StateError, match="inside no_sync"):
                engine.step()
            with pytest.raises(StateError, match="active already"), engine.no_sync():
                pass
        engine.step()
        engine.backward(engine(value(4 + mesh["data"].rank * 2)))
        engine.step()
        return weights(engine)

    assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), -3.5))


@all_stages
def test_unequal_token_counts_give_the_gradient_of_one_large_batch(stage: int) -> None:
    tokens = ((3, 5), (1, 0), (2, 7))  # by micro-batch and rank
    total = sum(map(sum, tokens))

    def rows(rank: int, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * rank + micro)
        return torch.randn(tokens[micro][rank], 8, generator=generator)

    def net() -> nn.Module:
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        with torch.no_grad():
            for seed, param in enumerate(layers.parameters()):
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
        return layers

    def loss(out: Tensor) -> Tensor:
        return (out - 1).pow(2).sum()

    def body(mesh: Mesh) -> tuple[Mapping[str, Tensor], float | None]:
        batch = {"micro": 1, "accumulation": 3}
        engine = build(mesh, stage, net(), loss_reduction="sum", batch=batch)
        for _ in range(2):
            for micro in range(3):
                x = rows(mesh["data"].rank, micro)
                engine.backward(loss(engine(x)), count=torch.tensor(len(x)))
                engine.step()
        return shardwise.full_parameters(engine.module), engine.get_global_grad_norm()

    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    whole = torch.cat([rows(rank, micro) for micro in range(3) for rank in range(2)])
    for _ in range(2):
        optimizer.zero_grad()
        (loss(plain(whole)) / total).backward()
        optimizer.step()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    for params, measured in run_ranks(2, body):
        assert measured == pytest.approx(float(norm), rel=1e-5)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(params[name], param.detach(), rtol=2e-5, atol=2e-6)


def test_count_is_asked_for_where_losses_are_sums_and_refused_elsewhere() -> None:
    def body(mesh: Mesh) -> None:
        summed = build(mesh, 2, loss_reduction="sum")
        with pytest.raises(ConfigError, match="needs its count"):
            summed.backward(summed(value(1)))
        with pytest.raises(ConfigError, match="count must be a number >= 0"):
            summed.backward(summed(value(1)), count=-1)
        mean = build(mesh, 2)
        with pytest.raises(ConfigError, match="has a meaning with loss_reduction"):
            mean.backward(mean(value(1)), count=3)

    run_ranks(1, body)


def test_loss_that_is_divided_twice_is_warned_about() -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, 2, batch={"micro": 1, "accumulation": 4})
        for divided in (lambda loss: loss / 4, lambda loss: loss * 0.25):
            with pytest.warns(UserWarning, match=r"divided by the window \(4\) already"):
                engine.backward(divided(engine(value(1))))
            engine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.backward(engine(value(1)) / 3)
            engine.step()
            engine.backward(engine(value(1)) / 4, scale_wrt_gas=False)
            engine.step()

    run_ranks(1, body)


def test_several_backwards_before_a_step_inside_a_window_are_warned_about_once() -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, 2, batch={"micro": 1, "accumulation": 2})
        for first in (True, False):
            engine.backward(engine(value(1)))
            engine.backward(engine(value(1)))
            if first:
                with pytest.warns(UserWarning, match="The window counts calls of step"):
                    engine.step()
            else:
                engine.step()

    run_ranks(1, body)


def test_step_without_a_gradient_is_warned_about() -> None:
    def body(mesh: Mesh) -> None:
        build(mesh, 1).step()

    with pytest.warns(UserWarning, match="no gradient came"):
        run_ranks(2, body)


@pytest.mark.parametrize("loss", [torch.ones(2), 3.0, None])
def test_loss_that_is_no_scalar_is_an_error(loss: Any) -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, 1)
        with pytest.raises(StateError, match="tensor of one element"):
            engine.backward(loss)

    run_ranks(1, body)


@all_stages
def test_batch_sizes_change_between_updates_only(stage: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, batch={"micro": 2, "accumulation": 1})
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4, 2)
        with pytest.raises(ConfigError, match="multiple of micro-batch x ranks = 2 x 2 = 4"):
            engine.set_train_batch_size(6)
        engine.set_train_batch_size(8)
        assert engine.gradient_accumulation_steps() == 2
        engine.backward(engine(value(1)))
        engine.step()
        for change in (engine.set_train_batch_size, engine.set_gradient_accumulation_steps):
            with pytest.raises(StateError, match="between updates only"):
                change(4)
        engine.backward(engine(value(3)))
        engine.step()
        assert (engine.global_steps, engine.global_samples) == (1, 8)
        engine.set_train_micro_batch_size(3)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (12, 2)
        with pytest.raises(ConfigError, match="positive whole number"):
            engine.set_train_micro_batch_size(0)
        return weights(engine)

    assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), -2.0))


class Fails(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


@all_stages
@pytest.mark.parametrize("kind", ["before", "within"])
def test_backward_that_fails_leaves_no_count_behind(kind: str, stage: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        engine = build(mesh, stage, loss_reduction="sum", batch={"micro": 1, "accumulation": 2})
        engine.backward(engine(value(12)), count=6)
        engine.step()
        if kind == "before":
            with pytest.raises(RuntimeError, match="does not require grad"):
                engine.backward(torch.ones(()), count=60)
        else:
            with pytest.raises(ArithmeticError, match="on purpose"):
                engine.backward(engine(Fails.apply(value(1).requires_grad_())), count=60)
        engine.backward(engine(value(6)), count=6)
        engine.step()
        assert engine.global_steps == 1
        return weights(engine)

    expected = -(12 + 6) / 12 if kind == "before" else -6 / 6  # what failed takes its window's gradients along
    with nullcontext() if kind == "before" else pytest.warns(UserWarning, match="are discarded"):
        assert torch.equal(agreed(run_ranks(2, body)), torch.full((6,), expected))


@all_stages
def test_backward_without_a_count_among_counted_ones_is_an_error(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, stage, loss_reduction="sum", batch={"micro": 1, "accumulation": 2})
        engine.backward(engine(value(1)), count=1)
        engine.step()
        engine(value(1)).backward()
        with pytest.raises(StateError, match="every backward needs a count"):
            engine.step()

    run_ranks(2, body)


@pytest.mark.parametrize("count", ["3", True, torch.ones(2), float("nan"), float("inf")])
def test_count_that_is_no_number_is_an_error(count: Any) -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, 1, loss_reduction="sum")
        with pytest.raises(ConfigError, match="count must be a number"):
            engine.backward(engine(value(1)), count=count)

    run_ranks(1, body)


@all_stages
def test_windows_that_differ_between_ranks_are_named(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        engine = build(mesh, stage)
        engine.set_gradient_accumulation_steps(1 + mesh["data"].rank)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(value(1)))
        engine.step()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, RankMismatchError)
        assert "rank 0: windows of 1 micro-batches; rank 1: windows of 2 micro-batches" in str(error)
