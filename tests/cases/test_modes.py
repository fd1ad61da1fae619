"""Passes without gradient, failed passes, several models in one process, ranks that diverge (C28-C33)."""

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise import ConfigError, RankMismatchError, StateError
from shardwise.comm.base import Mesh
from shardwise.memory import Kind
from shardwise.testing.ranks import flat_rank, run_processes, run_ranks

from .harness import (
    FP64_TOLERANCE,
    Net,
    Weight,
    all_stages,
    assert_all_close,
    assert_all_equal,
    assert_at_rest,
    check_training,
    clone_all,
    data,
    fill,
    is_sharded,
    ledger_of,
    make_net,
    net_loss,
    net_window,
    raises,
    set_mean_gradients,
    sgd,
    shard,
)

# C28: no_grad, eval, inference


def passes_window(model: nn.Module, rank: int, step: int) -> None:
    """No-grad forwards in train mode, a forward without backward, an eval forward, then a backward in eval mode."""
    x = data(3, 4, key=(rank, step))
    with torch.no_grad():
        first, second = model(x), model(x)
        assert torch.equal(first, second)
        assert not first.requires_grad
    model(x)
    model.eval()
    with torch.inference_mode():
        for _ in range(1 + step % 3):  # the same number on all ranks
            assert torch.equal(model(x), first)
    net_loss(model, rank, step).backward()
    model.train()
    with torch.no_grad():
        model(x)
    net_loss(model, rank, step, 1).backward()


@all_stages
@pytest.mark.parametrize("keep_last_unit", [True, False], ids=["keep", "free"])
def test_passes_without_gradient_leave_no_trace_in_training(stage: int, keep_last_unit: bool) -> None:
    check_training(make_net, passes_window, stage=stage, steps=3, keep_last_unit=keep_last_unit)


@all_stages
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_repeated_passes_keep_memory_and_order_constant(stage: int, mode: Callable[[], Any]) -> None:
    """C28: twelve rounds with a different number of forwards each, as generation makes them."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        seen = set()
        for step in range(12):
            model.eval()
            with mode():
                for length in range(1 + step % 4):
                    model(data(1 + length, 4, key=step))
                    if mode is not torch.enable_grad:
                        assert ledger_of(model)[Kind.GATHERED] == 0
            model.train()
            net_window(model, flat_rank(mesh), step)
            optim.step()
            optim.zero_grad()
            runtime = model._shardwise.runtime
            ledger = runtime.means.arena.ledger
            seen.add((len(runtime.schedule.trace), len(runtime.last_walk.events), *ledger.now.values()))
            assert ledger.now[Kind.GATHERED] == 0
            if step == 4:
                peak = ledger.peak_total_bytes
        assert len(seen) == 1, "state grows"
        assert ledger.peak_total_bytes == peak

    run_ranks(2, body)


@all_stages
def test_released_memory_is_free_after_a_forward_that_is_dropped(stage: int) -> None:
    """The kept last unit of a forward without backward is freed by the next no_grad pass at the latest."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        net_window(model, flat_rank(mesh), 0)
        shardwise.full_gradients(model)
        model.zero_grad()
        for _ in range(3):
            model(data(2, 4, key=0))
        with torch.no_grad():
            model(data(2, 4, key=0))
        assert_at_rest(model)

    run_ranks(2, body)


# C29: several sharded models


class Generator(Net):
    """Four numbers to two."""


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 5, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh())


def play(
    make: Callable[[nn.Module], Any], average: Callable[[nn.Module], None], ranks: list[int], zeroes: bool
) -> dict[str, Tensor]:
    """Alternate critic and generator steps, then a combined step; return all parameters after it.

    ``average`` turns local sums into means, where a sharded model does that by itself.
    """
    g, d = fill(Generator(), "g"), fill(Critic(), "d")
    (g, g_optim), (d, d_optim) = make(g), make(d)
    for step in range(3):
        for rank in ranks:  # the critic learns from a detached sample
            d(g(data(3, 4, key=(rank, step))).detach()).square().mean().backward()
        average(d)
        d_optim.step()
        if zeroes:
            d_optim.zero_grad()
        for rank in ranks:  # the generator learns through the critic, which keeps what flowed into it
            (1 - d(g(data(3, 4, key=(rank, step, "g"))))).square().mean().backward()
        average(g)
        g_optim.step()
        g_optim.zero_grad()
        if zeroes:
            d_optim.zero_grad()
    d_optim.zero_grad()
    for rank in ranks:
        (d(g(data(3, 4, key=(rank, "both")))).square().mean() + g(data(2, 4, key=rank)).square().mean()).backward()
    for model, optim in ((g, g_optim), (d, d_optim)):
        average(model)
        optim.step()
        optim.zero_grad()
    get = shardwise.full_parameters if is_sharded(g) else lambda model: dict(model.named_parameters())
    return clone_all({f"g.{n}": p for n, p in get(g).items()} | {f"d.{n}": p for n, p in get(d).items()})


@all_stages
@pytest.mark.parametrize("zeroes", [True, False], ids=["zero_grad", "accumulating"])
def test_two_models_in_one_graph_train_like_plain_ones(stage: int, zeroes: bool) -> None:
    """C29: gradient that flowed into the critic while the generator stepped stays there until zero_grad."""

    def plain(scaled: bool) -> dict[str, Tensor]:
        # Backwards of both ranks add up, so each loss counts half: scale the model's gradient when it is complete.
        def make(model: nn.Module) -> Any:
            if scaled:
                for param in model.parameters():
                    param.register_hook(lambda grad: grad / 2)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        return play(make, lambda model: None, [0, 1], zeroes)

    expected = plain(True)
    assert not torch.equal(expected["d.layers.0.weight"], plain(False)["d.layers.0.weight"])

    def body(mesh: Mesh) -> dict[str, Tensor]:
        def make(model: nn.Module) -> Any:
            sharded = shard(model, mesh, stage)
            return sharded, shardwise.shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded)

        return play(make, lambda model: None, [flat_rank(mesh)], zeroes)

    for found in run_ranks(2, body):
        assert_all_close(found, expected, 10 * FP64_TOLERANCE)


@all_stages
def test_a_frozen_reference_model_beside_a_trained_one(stage: int) -> None:
    """C29: an actor trains towards its own frozen copy; the copy does not move and holds no gradient."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        reference = shard(make_net().requires_grad_(False), mesh, 3)
        before = shardwise.full_parameters(reference)
        actor = shard(fill(Net(), "actor"), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(actor), actor)
        for step in range(3):
            x = data(3, 4, key=(flat_rank(mesh), step))
            with torch.no_grad():
                target = reference(x)
            ((actor(x) - target).square().mean() + (actor(x) - reference(x)).abs().mean()).backward()
            optim.step()
            optim.zero_grad()
        assert_all_equal(shardwise.full_parameters(reference), before)
        assert shardwise.measured_bytes(reference)["grad"] == 0
        assert_at_rest(reference)
        assert_at_rest(actor)
        return shardwise.full_parameters(actor)

    plain_reference, plain = make_net(), fill(Net(), "actor")
    optim = sgd(plain)
    for step in range(3):
        for rank in range(2):
            x = data(3, 4, key=(rank, step))
            target = plain_reference(x).detach()
            diff = plain(x) - target
            ((diff.square().mean() + diff.abs().mean()) / 2).backward()
        optim.step()
        optim.zero_grad()
    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


@all_stages
def test_unsharding_one_model_leaves_it_plain_and_the_other_working(stage: int) -> None:
    """C29: hooks and guards of the first are gone."""

    def body(mesh: Mesh) -> None:
        first, second = shard(make_net(), mesh, stage), shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(second), second)
        net_window(first, flat_rank(mesh), 0)
        values = shardwise.full_parameters(first)
        assert shardwise.unshard_model(first) is first
        assert not is_sharded(first)
        assert {type(p) for p in first.parameters()} == {nn.Parameter}
        assert_all_equal(clone_all(dict(first.named_parameters())), values)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in first.modules())
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in first.parameters())
        net_window(first, flat_rank(mesh), 0)
        plain = make_net()
        net_window(plain, flat_rank(mesh), 0)
        for (name, param), other in zip(first.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad, other.grad), name
        copy.deepcopy(first)
        net_window(second, flat_rank(mesh), 0)
        optim.step()
        assert not torch.equal(shardwise.full_parameters(second)["head.bias"], values["head.bias"])
        first.zero_grad()
        again = shard(first, mesh, 3 - stage)
        assert_all_equal(shardwise.full_parameters(again), values)

    run_ranks(2, body)


# C31: ranks take different ways


class Experts(nn.Module):
    """Two experts of one shape; the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 6, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.entry(x).tanh()
        for number in chosen:
            x = self.experts[number](x).tanh()
        return x


WAYS = {
    "one skips": [[0, 1], [0]],
    "other expert": [[0], [1]],
    "other order": [[0, 1], [1, 0]],
    "none": [[], [1]],
}


def diverge(mesh: Mesh, stage: int, way: str) -> tuple[Exception | None, dict[str, Tensor] | None]:
    """Train one step on unlike ways; return the error and, where ranks can still talk, the parameters."""
    model = shard(fill(Experts()), mesh, stage)
    optim = shardwise.shard_optimizer(sgd(model), model)
    rank = flat_rank(mesh)
    masters = [bucket.params.master for unit in model._shardwise.runtime.units for bucket in unit.buckets]
    before = [master.clone() for master in masters]
    try:
        model(data(3, 4, key=rank), WAYS[way][rank]).square().mean().backward()
        optim.step()
    except Exception as error:
        assert all(torch.equal(a, b) for a, b in zip(masters, before, strict=True)), "an update was applied"
        return error, None
    return None, shardwise.full_parameters(model)


def expected_of(way: str) -> dict[str, Tensor]:
    """One step of a plain model; a rank that did not use a parameter brings zeros, as in DDP."""
    plain = fill(Experts())
    grads = []
    for rank, chosen in enumerate(WAYS[way]):
        plain.zero_grad()
        plain(data(3, 4, key=rank), chosen).square().mean().backward()
        grads.append({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})
    for gradients in grads:
        for name, param in plain.named_parameters():
            if any(name in other for other in grads):
                gradients.setdefault(name, torch.zeros_like(param))
    set_mean_gradients(plain, grads)
    sgd(plain).step()
    return clone_all(dict(plain.named_parameters()))


@all_stages
def test_ranks_that_use_unlike_units_agree_with_torch_or_name_the_difference(stage: int) -> None:
    """C31: stages 0 to 2 move nothing in forward, so the mean with zeros is right; stage 3 names rank and unit."""

    def attempt(way: str) -> list[Any]:
        return run_ranks(2, lambda mesh: diverge(mesh, stage, way), timeout=2, return_exceptions=True)

    with ThreadPoolExecutor(len(WAYS)) as pool:  # each waits for its timeout: all at once
        attempts = dict(zip(WAYS, pool.map(attempt, WAYS), strict=True))
    for way, ranks in attempts.items():
        for result in ranks:
            if isinstance(result, BaseException):
                raise result
            error, params = result
            if stage < 3:
                assert error is None, way
                assert_all_close(params, expected_of(way), FP64_TOLERANCE)
            else:
                assert isinstance(error, RankMismatchError), way
                assert "experts." in str(error)
                assert "rank 0" in str(error) or "rank 1" in str(error)


def diverge_on_gloo(mesh: Mesh) -> list[str]:
    error, _ = diverge(mesh, 3, "other expert")
    assert isinstance(error, RankMismatchError), repr(error)
    return [str(error)]


def test_experts_of_one_shape_never_mix_between_processes() -> None:
    """C31b on gloo, where sizes and numbers of transfers agree: no weight is glued from two experts."""
    for (message,) in run_processes(2, diverge_on_gloo, timeout=60, comm_timeout=4):
        assert "experts.0" in message
        assert "experts.1" in message


# C33. A model is copied


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy of a unit": lambda model: copy.deepcopy(model.blocks[0]),
    "copy of a parameter": lambda model: copy.deepcopy(model.head.weight),
    "copy of the parameters": lambda model: copy.deepcopy(list(model.parameters())),
    "pickle": pickle.dumps,
    "pickle of a unit": lambda model: pickle.dumps(model.blocks[0]),
    "pickle of a parameter": lambda model: pickle.dumps(model.head.weight),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "torch.save of parameters": lambda model: torch.save(list(model.parameters()), io.BytesIO()),
    "AveragedModel": AveragedModel,
    "exponential average": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
}


@all_stages
def test_copies_raise_and_name_what_works(stage: int) -> None:
    """C33: at every stage alike, of a new and of a trained model; never a model of empty tensors."""

    def window(model: Any, rank: int, step: int) -> None:
        if is_sharded(model):
            for way in COPIES.values():
                with raises(StateError, match=r"full_state_dict\(model\)"):
                    way(model)
        net_window(model, rank, step)  # the attempts broke nothing

    check_training(make_net, window, stage=stage, steps=3)


@all_stages
def test_optimizers_cannot_be_copied_or_pickled_silently(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        net_window(model, flat_rank(mesh), 0)
        optim.step()
        for way in (copy.deepcopy, pickle.dumps):
            with raises(StateError, match="sharded optimizer"):
                way(optim)

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_of_local_parameters_is_the_average_of_the_model(stage: int, dtype: torch.dtype) -> None:
    """C33: an exponential average kept shard by shard, gathered at the end, is that of the reference, bit by bit."""

    def gradient(step: int, rank: int) -> float:
        return float(1 + step * (1 + 2 * rank))

    def plain() -> dict[str, Tensor]:
        model = nn.Sequential(Weight(5), Weight(70))
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        average = {n: p.detach().clone() for n, p in model.named_parameters()}
        for step in range(5):
            constant = (gradient(step, 0) + gradient(step, 1)) / 2
            (model[0](constant) + model[1](2 * constant)).backward()
            optim.step()
            optim.zero_grad()
            for name, param in model.named_parameters():
                average[name].lerp_(param.detach(), 0.25)
        return average

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = nn.Sequential(Weight(5, dtype), Weight(70, dtype))
        model.forward = lambda c: model[0](c) + model[1](2 * c)  # type: ignore[method-assign]
        model = shard(model, mesh, stage)
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        average = {name: value.clone() for name, value in shardwise.local_parameters(model).items()}
        for step in range(5):
            model(gradient(step, flat_rank(mesh))).backward()
            optim.step()
            optim.zero_grad()
            for name, value in shardwise.local_parameters(model).items():
                average[name].lerp_(value, 0.25)
        live = shardwise.local_parameters(model)
        trained = shardwise.full_parameters(model)
        kept = {name: value.clone() for name, value in live.items()}
        for name, value in live.items():  # the views are live: swap the average in, gather, swap back
            value.copy_(average[name])
        gathered = shardwise.full_parameters(model)
        for name, value in live.items():
            value.copy_(kept[name])
        assert_all_equal(shardwise.full_parameters(model), trained)
        return gathered

    expected = plain()
    for found in run_ranks(2, body):
        assert_all_equal(found, expected)


# Failures and retries


class Fragile(nn.Module):
    """A block that fails on demand, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layer(x).tanh()
        if self.fails == "forward":
            raise RuntimeError("failed on purpose")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        return Failing.apply(y) if self.fails == "backward" else y


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("failed on purpose")


class FragileNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fragile() for _ in range(3))


def make_fragile() -> nn.Module:
    return fill(FragileNet())


def failing(kind: str, index: int, *, first: Callable[..., Any] | None = None, zeroes: bool = True) -> Any:
    """A window whose first attempt fails on a sharded model, and whose second counts."""

    def window(model: Any, rank: int, step: int) -> None:
        if is_sharded(model):
            if first is not None:
                first(model, rank, step)
            model.blocks[index].fails = kind
            with pytest.raises(KeyboardInterrupt if kind == "interrupt" else RuntimeError):
                net_loss(model, rank, step, 7).backward()
            model.blocks[index].fails = None
            if zeroes:
                model.zero_grad()
        net_window(model, rank, step)

    return window


@all_stages
@pytest.mark.parametrize("kind", ["forward", "interrupt", "backward"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_failed_pass_can_be_retried_after_zero_grad(stage: int, kind: str, index: int) -> None:
    check_training(make_fragile, failing(kind, index), stage=stage, steps=2)


@all_stages
def test_gradients_from_before_a_failed_forward_are_kept(stage: int) -> None:
    """Only a failed backward leaves gradients in an unknown state."""

    def before(model: nn.Module, rank: int, step: int) -> None:
        net_loss(model, rank, step, 1).backward()

    def window(model: nn.Module, rank: int, step: int) -> None:
        if is_sharded(model):
            failing("forward", 1, first=before, zeroes=False)(model, rank, step)
        else:
            before(model, rank, step)
            net_window(model, rank, step)

    check_training(make_fragile, window, stage=stage)


@all_stages
@pytest.mark.parametrize("index", [0, 2])
def test_a_failed_backward_blocks_the_step_until_it_is_cleared(stage: int, index: int) -> None:
    """Its gradients are incomplete: step and norm raise, the next forward warns and discards, zero_grad is silent."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_fragile(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        rank = flat_rank(mesh)
        before = shardwise.full_parameters(model)
        net_loss(model, rank, 0, 3).backward()
        model.blocks[index].fails = "backward"
        with raises(RuntimeError, match="on purpose"):
            net_loss(model, rank, 0, 4).backward()
        model.blocks[index].fails = None
        for call in (
            optim.step,
            lambda: shardwise.clip_grad_norm_(model, 1.0),
            lambda: shardwise.full_gradients(model),
        ):
            with raises(StateError, match="ended with an error"):
                call()
        assert_all_equal(shardwise.full_parameters(model), before)
        if rank == 0:
            with warnings.catch_warnings(record=True) as caught:  # the filters are global, the ranks threads
                warnings.simplefilter("always")
                loss = net_loss(model, rank, 0)
            del caught
        else:
            loss = net_loss(model, rank, 0)
        loss.backward()
        optim.step()
        optim.zero_grad()
        assert_at_rest(model)
        return shardwise.full_parameters(model)

    plain = make_fragile()
    for rank in range(2):
        (net_loss(plain, rank, 0) / 2).backward()
    sgd(plain).step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = run_ranks(2, body)
    for found in ranks:
        assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


def test_discarding_gradients_of_a_failed_backward_warns() -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_fragile(), mesh, 3)
        model.blocks[1].fails = "backward"
        with raises(RuntimeError, match="on purpose"):
            net_loss(model, 0, 0).backward()
        model.blocks[1].fails = None
        with pytest.warns(UserWarning, match="discarded"):
            net_window(model, 0, 0)

    run_ranks(1, body)


@all_stages
def test_contexts_are_left_clean_by_exceptions(stage: int) -> None:
    """no_sync and unsharded end where an exception leaves them."""

    def body(mesh: Mesh) -> None:
        model = shard(nn.Sequential(Weight(5), Weight(70)), mesh, stage)
        model.forward = lambda c: model[0](c) + model[1](c)  # type: ignore[method-assign]
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        with contextlib.suppress(ZeroDivisionError), shardwise.no_sync(model):
            model(1.0).backward()
            raise ZeroDivisionError
        model(2.0).backward()
        with contextlib.suppress(ZeroDivisionError), shardwise.unsharded(model):
            raise ZeroDivisionError
        assert ledger_of(model)[Kind.GATHERED] == 0
        optim.step()
        assert shardwise.full_parameters(model)["0.w"].tolist() == [-3.0] * 5

    run_ranks(2, body)


# Second derivatives, autograd.grad, backward(inputs=...)


@all_stages
@pytest.mark.parametrize("call", ["backward", "grad of input", "grad of parameters"])
def test_create_graph_raises_and_works_inside_unsharded(stage: int, call: str) -> None:
    def penalised(model: nn.Module, rank: int) -> Tensor:
        """A loss with the norm of a gradient in it."""
        x = data(3, 4, key=rank).requires_grad_()
        loss = model(x).square().mean()
        if call == "backward":
            loss.backward(create_graph=True)
            return loss * 0
        inputs = [x] if call == "grad of input" else list(model.parameters())
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + sum(grad.square().sum() for grad in grads)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        with raises(StateError, match="create_graph"):
            penalised(model, flat_rank(mesh)).backward()
        model.zero_grad()
        if call == "backward":
            return {}
        with shardwise.unsharded(model, writes=False):
            penalised(model, flat_rank(mesh)).backward()
        optim.step()
        return shardwise.full_parameters(model)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
        ranks = run_ranks(2, body)
    if call == "backward":
        return
    plain = make_net()
    for rank in range(2):
        (penalised(plain, rank) / 2).backward()
    sgd(plain).step()
    for found in ranks:
        assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


@all_stages
def test_autograd_grad_of_parameters_returns_this_ranks_gradient(stage: int) -> None:
    """It fills no ``.grad`` in torch and none here; a step after it has nothing to do."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        plain = make_net()
        before = shardwise.full_parameters(model)
        for step in range(2):
            found = torch.autograd.grad(net_loss(model, flat_rank(mesh), step), list(model.parameters()))
            expected = torch.autograd.grad(net_loss(plain, flat_rank(mesh), step), list(plain.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert all(p.grad is None for p in model.parameters())
            assert shardwise.full_gradients(model) == {}
            assert_at_rest(model)
        optim.step()
        assert_all_equal(shardwise.full_parameters(model), before)

    run_ranks(2, body)


def head_inputs_window(model: nn.Module, rank: int, step: int) -> None:
    net_loss(model, rank, step).backward(inputs=list(model.head.parameters()))


def block_inputs_window(model: nn.Module, rank: int, step: int) -> None:
    net_loss(model, rank, step).backward(inputs=[model.blocks[1].inner.weight, model.entry.bias])
    net_loss(model, rank, step, 1).backward()


def input_only_window(model: nn.Module, rank: int, step: int) -> None:
    x = data(3, 4, key=(rank, step)).requires_grad_()
    model(x).square().mean().backward(inputs=[x])
    assert x.grad is not None
    model(x.detach() + x.grad).square().mean().backward()


@all_stages
@pytest.mark.parametrize("window", [head_inputs_window, block_inputs_window, input_only_window])
def test_backward_into_chosen_inputs_matches_torch(stage: int, window: Any) -> None:
    check_training(make_net, window, stage=stage)


# C30: optimizers that point at the wrong tensors


@all_stages
def test_optimizer_over_a_copy_or_another_model_is_named(stage: int) -> None:
    """C30c: built from a copy made before sharding; from another sharded model; from loose tensors."""

    def body(mesh: Mesh) -> None:
        model = make_net()
        twin = copy.deepcopy(model)
        model = shard(model, mesh, stage)
        other = shard(make_net(), mesh, stage)
        mixed = [*list(model.parameters())[:3], nn.Parameter(torch.zeros(3))]
        for params in (twin.parameters(), other.parameters(), mixed):
            with raises(ConfigError, match="group 0.*no parameter of the sharded model"):
                shardwise.shard_optimizer(torch.optim.SGD(params, lr=0.1), model)

    run_ranks(2, body)


@all_stages
def test_optimizer_that_misses_trainable_parameters_names_them(stage: int) -> None:
    """C30d; ``partial`` allows it and trains exactly the part."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        part = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        with raises(ConfigError, match=r"entry\.weight.*partial=True"):
            shardwise.shard_optimizer(part, model)
        optim = shardwise.shard_optimizer(part, model, partial=True)
        before = shardwise.full_parameters(model)
        for step in range(2):
            net_window(model, flat_rank(mesh), step)
            optim.step()
            model.zero_grad()
        after = shardwise.full_parameters(model)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name in after if name.startswith("blocks.")}

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("when", ["before shard", "after shard", "after a forward", "after a backward"])
def test_optimizer_trains_every_parameter_whenever_it_was_built(stage: int, when: str) -> None:
    """C30a, b: the objects of the parameters stay the same."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = make_net()
        if when == "before shard":
            optim = sgd(model)
        model = shard(model, mesh, stage)
        if when == "after shard":
            optim = sgd(model)
        if when == "after a forward":
            net_loss(model, flat_rank(mesh), 9)
            optim = sgd(model)
        net_window(model, flat_rank(mesh), 0)
        if when == "after a backward":
            optim = sgd(model)
        optim = shardwise.shard_optimizer(optim, model)
        optim.step()
        return shardwise.full_parameters(model)

    plain = make_net()
    for rank in range(2):
        (net_loss(plain, rank, 0) / 2).backward()
    sgd(plain).step()
    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)
