"""Global norms, clipping, and gradients that are not finite: the same verdict on every rank, at every stage."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, LossScale, NonFiniteError, Precision, StateError, hybrid
from shardwise.comm.base import Mesh
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import Weight, all_stages, assert_all_equal, clone_all, raises, shard

MESH = {"node": 2, "local": 2}


def unit_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Norms(nn.Module):
    """Gradients 3 and 4 on two one-element parameters; the second is tied under another name; one is never used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.unused = nn.Parameter(torch.full((3,), 7.0, dtype=dtype))
        self.frozen = nn.Parameter(torch.full((2,), math.inf, dtype=dtype), requires_grad=False)
        self.tied = nn.Module()
        self.tied.b = self.b

    def forward(self, scale: float) -> Tensor:
        return (self.a * 3.0 * scale).sum() + (self.b * scale).sum() + (self.tied.b * 3.0 * scale).sum()


def rank_scale(mesh: Mesh) -> float:
    """Scales whose mean is 1, different on every rank."""
    ranks = math.prod(comm.size for comm in mesh.values())
    return 1.0 + (flat_rank(mesh) - (ranks - 1) / 2) / 2


NORMS = {1.0: 7.0, 2.0: 5.0, 3.0: 91 ** (1 / 3), 0.5: (3**0.5 + 2) ** 2, math.inf: 4.0}


@all_stages
@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_norm_of_any_order_is_that_of_the_unsharded_gradient(stage: int, align: int, num_ranks: int) -> None:
    """C08: with align 1 the two elements lie on different ranks; tied counts once, unused and frozen never."""

    def body(mesh: Mesh) -> list[float]:
        model = shard(Norms(), mesh, stage, align=align)
        shardwise.shard_optimizer(unit_sgd(model), model)
        model(rank_scale(mesh)).backward()
        found = [shardwise.clip_grad_norm_(model, math.inf, order) for order in NORMS]
        assert all(norm.dtype == torch.float64 and norm.shape == () for norm in found)
        return [norm.item() for norm in found]

    ranks = run_ranks(num_ranks, body)
    assert ranks[0] == pytest.approx(list(NORMS.values()), rel=1e-6)
    assert all(found == ranks[0] for found in ranks)


@pytest.mark.parametrize("policy", ["stage0", "stage1", "stage2", "stage3", "hybrid", "inside node", "params inside"])
def test_replication_does_not_change_the_norm(policy: str) -> None:
    """C08: replicas on a 2x2 mesh are not counted twice."""
    sharding = {
        "hybrid": hybrid("local"),
        "inside node": shardwise.Sharding(optim="local"),
        "params inside": shardwise.Sharding(param="local", grad="*", optim="*"),
    }.get(policy)
    options: dict[str, Any] = {"sharding": sharding} if sharding else {"stage": int(policy[-1])}

    def body(mesh: Mesh) -> tuple[list[float], float]:
        model = shardwise.shard(Norms(), mesh, align=1, **options)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        model(rank_scale(mesh)).backward()
        norms = [shardwise.clip_grad_norm_(model, math.inf, order).item() for order in NORMS]
        shardwise.clip_grad_norm_(model, 1.0)
        optim.step()
        return norms, shardwise.full_parameters(model)["a"].item()

    ranks = run_ranks(MESH, body)
    assert ranks[0][0] == pytest.approx(list(NORMS.values()), rel=1e-6)
    assert ranks[0][1] == pytest.approx(-0.6, rel=1e-6)
    assert all(found == ranks[0] for found in ranks)


@all_stages
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_updates_as_torch_does_on_one_process(stage: int, order: float, dtype: torch.dtype) -> None:
    """C08: within one unit in the last place; a norm below the limit changes nothing."""
    plain = Norms(dtype)
    plain(1.0).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, order)
    assert norm > 1.0
    unit_sgd(plain).step()

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(Norms(dtype), mesh, stage, align=1)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        model(rank_scale(mesh)).backward()
        before = shardwise.full_gradients(model)
        assert shardwise.clip_grad_norm_(model, 100.0, order).item() == pytest.approx(norm.item(), rel=1e-6)
        assert_all_equal(shardwise.full_gradients(model), before)
        shardwise.clip_grad_norm_(model, 1.0, order)
        optim.step()
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        for name, expected in plain.named_parameters():
            value = found[name]
            assert (
                ((value - expected).abs() <= expected.abs() * torch.finfo(dtype).eps)
                .logical_or(value == expected)
                .all()
            ), name


@all_stages
def test_norm_after_clipping_is_the_limit(stage: int) -> None:
    """C08 sibling: clipping twice measures the clipped gradient; a second limit is taken from there."""

    def body(mesh: Mesh) -> list[float]:
        model = shard(Norms(), mesh, stage)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        model(rank_scale(mesh)).backward()
        norms = [shardwise.clip_grad_norm_(model, limit).item() for limit in (2.0, 1.0, math.inf)]
        norms.append(shardwise.clip_grad_norm_(model, math.inf, 1.0).item())
        optim.step()
        optim.zero_grad()
        model(rank_scale(mesh)).backward()  # the next step's norm is not a remembered one
        return [*norms, shardwise.clip_grad_norm_(model, math.inf).item()]

    for found in run_ranks(2, body):
        assert found == pytest.approx([5.0, 2.0, 1.0, 1.4, 5.0], rel=1e-5)


@all_stages
def test_clip_grad_value_clamps_the_mean_gradient(stage: int) -> None:
    """Clamping each rank's own gradient would give another mean."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(Norms(), mesh, stage, align=1)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        model(rank_scale(mesh)).backward()
        shardwise.clip_grad_value_(model, 3.5)
        assert shardwise.clip_grad_norm_(model, math.inf, math.inf).item() == 3.5
        optim.step()
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        assert (found["a"].item(), found["b"].item()) == (-3.0, -3.5)
        assert found["unused"].tolist() == [7.0] * 3


@all_stages
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_finite_gradients_have_a_finite_norm_though_their_powers_overflow(stage: int, order: float) -> None:
    """C07: 3e25 squared is no fp32 number."""
    assert not (torch.tensor(3e25) ** 2).isfinite()

    def body(mesh: Mesh) -> tuple[float, dict[str, Tensor]]:
        model = shard(Norms(), mesh, stage, align=1)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        model(rank_scale(mesh) * 1e25).backward()
        norm = shardwise.clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True).item()
        optim.step()
        assert optim.step_was_applied
        return norm, shardwise.full_parameters(model)

    for norm, params in run_ranks(2, body):
        assert norm == pytest.approx(NORMS[order] * 1e25, rel=1e-5)
        assert params["a"].item() == pytest.approx(-3 / NORMS[order], rel=1e-5)
        assert params["b"].item() == pytest.approx(-4 / NORMS[order], rel=1e-5)


@all_stages
def test_largest_finite_gradients_still_have_a_norm(stage: int) -> None:
    """C07 sibling: fp64 powers would overflow too."""

    def body(mesh: Mesh) -> float:
        model = shard(Norms(torch.float64), mesh, stage, align=1)
        model(rank_scale(mesh) * 1e300).backward()
        return shardwise.clip_grad_norm_(model, math.inf, error_if_nonfinite=True).item()

    assert run_ranks(2, body) == pytest.approx([5e300] * 2, rel=1e-12)


@all_stages
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nonfinite_gradient_is_named_and_left_alone_by_clipping(stage: int, bad: float, dtype: torch.dtype) -> None:
    """C07: never multiply by NaN; ``error_if_nonfinite`` raises on every rank before anything changes."""

    def body(mesh: Mesh) -> None:
        model = shard(Pair(dtype), mesh, stage, units=Weight)
        optim = shardwise.shard_optimizer(unit_sgd(model), model, on_nonfinite="skip")
        last_is_bad = torch.ones(67)
        last_is_bad[66] = bad_on(mesh, 1, bad)
        (model.first(1.0) + model.second(last_is_bad)).backward()
        before = shardwise.full_gradients(model)
        assert not before["second.w"].isfinite().all()
        assert before["first.w"].tolist() == [1.0] * 5
        with raises(NonFiniteError, match=r"second\.w"):
            shardwise.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert not math.isfinite(shardwise.clip_grad_norm_(model, 1.0).item())
        after = shardwise.full_gradients(model)
        assert all(torch.equal(after[n].nan_to_num(5.0), before[n].nan_to_num(5.0)) for n in before)
        optim.step()
        assert not optim.step_was_applied
        assert optim.first_nonfinite == "second.w"

    run_ranks(2, body)


class Pair(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = Weight(5, dtype)
        self.second = Weight(67, dtype)

    def forward(self, constant: float) -> Tensor:
        return self.first(constant) + self.second(constant)


def bad_on(mesh: Mesh, rank: int, bad: float) -> float:
    """``bad`` on one rank, 1 on the others."""
    return bad if flat_rank(mesh) == rank else 1.0


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and optimizer state, flat, as one dictionary."""
    found = dict(shardwise.full_parameters(model))
    for name, states in shardwise.full_optimizer_state(model).items():
        found |= {f"{name}/{key}": value for key, value in states.items()}
    return clone_all(found)


@all_stages
@pytest.mark.parametrize(("bad_rank", "bad"), [(0, math.nan), (1, math.inf)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_with_a_nonfinite_gradient_does_what_was_chosen_on_all_ranks(
    stage: int, bad_rank: int, bad: float, dtype: torch.dtype
) -> None:
    """skip and raise change not a bit anywhere; ignore goes on; the next clean step works after each."""

    def body(mesh: Mesh) -> None:
        for policy in ("skip", "raise", "ignore"):
            model = shard(Pair(dtype), mesh, stage, units=Weight)
            optim = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5), model, on_nonfinite=policy)
            model(1.0 + flat_rank(mesh)).backward()
            optim.step()
            optim.zero_grad()
            assert optim.step_was_applied
            assert optim.first_nonfinite is None
            before = snapshot(model)
            model(bad_on(mesh, bad_rank, bad)).backward()
            if policy == "raise":
                with raises(NonFiniteError, match=r"first\.w"):
                    optim.step()
            else:
                optim.step()
            assert optim.first_nonfinite == "first.w"
            assert optim.step_was_applied is (policy == "ignore")
            after = snapshot(model)
            if policy == "ignore":
                assert after["first.w"].isnan().all()
                continue
            assert_all_equal(after, before)
            optim.zero_grad()
            model(1.0 + flat_rank(mesh)).backward()
            optim.step()
            assert optim.step_was_applied
            assert (shardwise.full_parameters(model)["first.w"] < before["first.w"]).all()

    run_ranks(2, body)


def test_raise_is_the_default_policy_and_unknown_ones_are_refused() -> None:
    def body(mesh: Mesh) -> None:
        model = shard(Pair(), mesh, 3, units=Weight)
        with raises(ConfigError, match="on_nonfinite"):
            shardwise.shard_optimizer(unit_sgd(model), model, on_nonfinite="warn")  # type: ignore[arg-type]
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        model(bad_on(mesh, 1, math.inf)).backward()
        with raises(NonFiniteError, match="no rank was updated"):
            optim.step()

    run_ranks(2, body)


def scale_of(model: nn.Module) -> float:
    """The loss scale in use; asking is a call of ``scale_loss``, as a logging line would make it."""
    return shardwise.scale_loss(model, torch.ones(())).item()


@all_stages
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_fp16_overflow_on_one_rank_skips_the_step_everywhere(stage: int, bad_rank: int) -> None:
    """C06: not a bit changes, the scale halves once on all ranks, the schedule waits, the next step works."""

    def body(mesh: Mesh) -> tuple[list[float], list[float], dict[str, Tensor]]:
        rule = LossScale(initial=1024.0, hysteresis=1)
        model = shard(Pair(torch.float16), mesh, stage, units=Weight, precision=Precision(loss_scale=rule))
        optim = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5), model)
        schedule = torch.optim.lr_scheduler.StepLR(optim, step_size=1, gamma=0.5)
        scales, rates = [], []
        for step in range(4):
            before = snapshot(model)
            # 100 * 1024 is no fp16 number, 1 * 1024 is.
            constant = 100.0 if step == 1 and flat_rank(mesh) == bad_rank else 1.0
            shardwise.scale_loss(model, model(constant)).backward()
            optim.step()
            assert optim.step_was_applied is (step != 1)
            if optim.step_was_applied:
                schedule.step()
                assert optim.first_nonfinite is None
            else:
                assert optim.first_nonfinite == "first.w"
                assert_all_equal(snapshot(model), before)
            optim.zero_grad()
            scales.append(scale_of(model))
            rates.append(optim.param_groups[0]["lr"])
        return scales, rates, shardwise.full_parameters(model)

    ranks = run_ranks(2, body, timeout=20)
    for scales, rates, params in ranks:
        assert scales == [1024.0, 512.0, 512.0, 512.0]
        assert rates == [0.25, 0.25, 0.125, 0.0625]
        assert_all_equal(params, ranks[0][2])


@all_stages
def test_fp16_scale_follows_its_rule_on_all_ranks(stage: int) -> None:
    """Hysteresis 2: the second overflow halves; two clean steps double; at the minimum an overflow raises."""

    def body(mesh: Mesh) -> list[float]:
        rule = LossScale(initial=4.0, minimum=2.0, growth_interval=2, hysteresis=2)
        model = shard(Weight(5, torch.float16), mesh, stage, precision=Precision(loss_scale=rule))
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        scales = []
        for bad in (True, True, False, False, False, False, True, True, True):
            shardwise.scale_loss(model, model(bad_on(mesh, 1, math.inf if bad else 1.0))).backward()
            optim.step()
            optim.zero_grad()
            scales.append(scale_of(model))
        shardwise.scale_loss(model, model(bad_on(mesh, 0, math.inf))).backward()
        while scale_of(model) > 2.0:
            optim.step()
            scales.append(scale_of(model))
        with raises(NonFiniteError, match="smallest loss scale"):
            optim.step()
        return scales

    ranks = run_ranks(2, body)
    assert ranks[0][:9] == [4.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0]
    assert ranks[1] == ranks[0]


@all_stages
def test_fp16_step_without_scaled_loss_raises(stage: int) -> None:
    """A forgotten ``scale_loss`` would divide the gradient by the scale; every step needs its own."""

    def body(mesh: Mesh) -> None:
        model = shard(Weight(5, torch.float16), mesh, stage, precision=Precision(loss_scale=LossScale(initial=8.0)))
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        for _ in range(2):
            model(1.0).backward()
            with raises(StateError, match="scale_loss"):
                optim.step()
            optim.zero_grad()
            shardwise.scale_loss(model, model(1.0)).backward()
            optim.step()
            optim.zero_grad()
        assert shardwise.full_parameters(model)["w"].tolist() == [-2.0] * 5

    run_ranks(2, body)


@all_stages
def test_fp16_clip_without_scaled_loss_raises(stage: int) -> None:
    """The norm is wrong by the scale as well."""

    def body(mesh: Mesh) -> None:
        model = shard(Weight(4, torch.float16), mesh, stage, precision=Precision(loss_scale=LossScale(initial=8.0)))
        shardwise.shard_optimizer(unit_sgd(model), model)
        model(1.0).backward()
        with raises(StateError, match="scale_loss"):
            shardwise.clip_grad_norm_(model, 1.0)

    run_ranks(2, body)


@all_stages
def test_fp16_gradients_are_unscaled_wherever_they_are_seen(stage: int) -> None:
    """Norm, clip and accessors speak of the unscaled gradient, also over several micro-batches."""

    def body(mesh: Mesh) -> None:
        model = shard(Weight(4, torch.float16), mesh, stage, precision=Precision(loss_scale=LossScale(initial=64.0)))
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        for constant in (1.0, 2.0):
            shardwise.scale_loss(model, model(constant)).backward()
        assert shardwise.full_gradients(model)["w"].tolist() == [3.0] * 4
        assert all((grad == 3.0).all() for grad in shardwise.local_gradients(model).values())
        assert shardwise.clip_grad_norm_(model, 3.0).item() == 6.0
        assert shardwise.full_gradients(model)["w"].tolist() == pytest.approx([1.5] * 4, rel=1e-5)
        optim.step()
        assert shardwise.full_parameters(model)["w"].tolist() == pytest.approx([-1.5] * 4, rel=1e-5)

    run_ranks(2, body)


@all_stages
def test_fp16_deferred_window_across_a_scale_change_is_unscaled_right(stage: int) -> None:
    """A window left open with ``no_sync`` is unscaled by the scale its losses were multiplied with."""

    def body(mesh: Mesh) -> None:
        rule = LossScale(initial=64.0, growth_interval=1)  # the scale doubles after every step
        model = shard(Weight(4, torch.float16), mesh, stage, precision=Precision(loss_scale=rule))
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        for step in range(3):
            with shardwise.no_sync(model):
                shardwise.scale_loss(model, model(1.0)).backward()
                shardwise.scale_loss(model, model(2.0)).backward()
            optim.step()
            optim.zero_grad()
            assert scale_of(model) == 64.0 * 2 ** (step + 1)
            assert shardwise.full_parameters(model)["w"].tolist() == [-3.0 * (step + 1)] * 4

    run_ranks(2, body)


@pytest.mark.parametrize("bad", [0.0, -2.0, math.nan])
def test_norm_orders_and_limits_that_make_no_sense_are_refused(bad: float) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(Norms(), mesh, 3)
        model(1.0).backward()
        with raises(ConfigError, match="norm_type"):
            shardwise.clip_grad_norm_(model, 1.0, bad)
        if bad != 0.0:
            with raises(ConfigError, match="max_norm"):
                shardwise.clip_grad_norm_(model, bad)
        with raises(ConfigError, match="sharded model"):
            shardwise.clip_grad_norm_(nn.Linear(2, 2), 1.0)

    run_ranks(2, body)


def test_schedulers_do_not_warn_about_the_order_of_steps() -> None:
    def body(mesh: Mesh) -> None:
        model = shard(Pair(), mesh, 3, units=Weight)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0 / (1 + step))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                model(1.0).backward()
                optim.step()
                schedule.step()

    run_ranks(1, body)
