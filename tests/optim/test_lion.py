"""Lion against its formula in float64, on fragments at stages 0 to 3, and its options."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, Precision
from shardwise.comm.base import Mesh
from shardwise.optim.families import state_words
from shardwise.optim.lion import Lion
from shardwise.testing.models import make_odd_net, odd_batch, odd_loss
from shardwise.testing.ranks import flat_rank, run_ranks

ODDITIES = ("uneven", "tied", "frozen", "unused", "reused")
OPTIONS: dict[str, Any] = {"lr": 2**-7, "betas": (0.75, 0.9), "weight_decay": 0.25}
NUM_STEPS = 5


def by_formula(
    start: Tensor, grads: list[Tensor], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Tensor:
    p, m = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for g in grads:
        direction = torch.sign(betas[0] * m + (1 - betas[0]) * g.double())
        p = p - lr * (direction + weight_decay * p)
        m = betas[1] * m + (1 - betas[1]) * g.double()
    return p


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-2)]
)
def test_update_follows_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    shapes = [(7, 5), (), (300,), (0,)]
    starts = [normal(shape, seed).to(dtype) for seed, shape in enumerate(shapes)]
    params = [nn.Parameter(start.clone()) for start in starts]
    # whole numbers and powers of two, so that no sign hangs on a rounding; moves far more than ten roundings of bf16
    options = {"lr": 2**-3, "betas": (0.75, 0.5), "weight_decay": 0.25}
    optimizer = Lion(params, **options)
    grads: list[list[Tensor]] = [[] for _ in params]
    for step in range(NUM_STEPS):
        for number, param in enumerate(params):
            grads[number].append(normal(shapes[number], 100 + 10 * step + number).mul(2).round().to(dtype))
            param.grad = grads[number][-1].clone()
        optimizer.step()
    for start, param, each in zip(starts, params, grads, strict=True):
        torch.testing.assert_close(param.detach().double(), by_formula(start, each, **options), rtol=0, atol=tolerance)
        assert optimizer.state[param]["exp_avg"].dtype == dtype
    assert float((params[0].detach().double() - starts[0].double()).abs().max()) > 0.3


def test_zero_gradient_and_no_gradient_differ() -> None:
    still, decayed = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Lion([still, decayed], **OPTIONS)
    decayed.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(still, torch.ones(3))
    assert torch.equal(decayed, torch.full((3,), 1 - 2**-9))  # decay only: the sign of 0 is 0


def test_group_options_and_a_rate_in_a_tensor_count() -> None:
    fast, slow = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = Lion([{"params": [fast], "lr": torch.tensor(0.5)}, {"params": [slow]}], lr=0.125)
    for param in (fast, slow):
        param.grad = torch.tensor([3.0, -3.0])
    optimizer.step()
    assert fast.tolist() == [-0.5, 0.5]
    assert slow.tolist() == [-0.125, 0.125]


def test_closure_is_run_once_with_gradients_enabled() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = Lion([param], lr=0.5)

    def closure() -> Tensor:
        loss = (param * torch.tensor([1.0, -1.0])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 0.0
    assert param.tolist() == [0.5, 1.5]


def test_resumed_optimizer_goes_on_as_if_never_stopped() -> None:
    def run(stop_at: int | None) -> Tensor:
        param = nn.Parameter(normal((9,), 0))
        optimizer = Lion([param], **OPTIONS)
        for step in range(NUM_STEPS):
            if step == stop_at:
                state = optimizer.state_dict()
                optimizer = Lion([param], lr=1.0)
                optimizer.load_state_dict(state)
            param.grad = normal((9,), 50 + step)
            optimizer.step()
        return param.detach()

    assert torch.equal(run(3), run(None))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lr": -1.0}, "Lion: lr must be a finite number and at least 0, got -1"),
        ({"lr": float("nan")}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "betas must be a finite number and at least 0 and below 1, got 1"),
        ({"betas": 0.9}, "betas must be two numbers, got 0.9"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"weight_decay": "0.1"}, "weight_decay must be"),
    ],
)
def test_wrong_option_is_refused_also_in_a_group(options: dict[str, Any], complaint: str) -> None:
    param = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=complaint):
        Lion([param], **options)
    with pytest.raises(ConfigError, match=complaint):
        Lion([{"params": [param], **options}])


def test_sparse_gradient_is_refused() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(ConfigError, match="sparse"):
        Lion([param]).step()


def test_memory_plan_knows_its_state() -> None:
    assert state_words(Lion) == 1


# On fragments

Trained = tuple[dict[str, Tensor], dict[str, Tensor]]


def train(mesh: Mesh | None, stage: int, *, num_ranks: int, precision: Precision | None = None) -> Trained:
    """Return final parameters and momenta of a net with odd sizes, with one gradient per step from all rows."""
    model: nn.Module = make_odd_net(*ODDITIES, dtype=torch.float32)
    if mesh is not None:
        model = shardwise.shard(model, mesh, stage=stage, precision=precision)
    optimizer: torch.optim.Optimizer = Lion(model.parameters(), **OPTIONS)
    if mesh is not None:
        optimizer = shardwise.shard_optimizer(optimizer, model)
    for step in range(NUM_STEPS):
        x, y = odd_batch(step, dtype=torch.float32 if precision is None else torch.bfloat16)
        if mesh is not None:
            x, y = x.chunk(num_ranks)[flat_rank(mesh)], y.chunk(num_ranks)[flat_rank(mesh)]
        odd_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh is not None:
        state = shardwise.full_optimizer_state(model)
        return shardwise.full_parameters(model), {name: found["exp_avg"] for name, found in state.items()}
    named = dict(model.named_parameters())
    momenta = {name: optimizer.state[p]["exp_avg"] for name, p in named.items() if optimizer.state.get(p) and p.numel()}
    return {name: param.detach() for name, param in named.items()}, momenta


def assert_same(found: Trained, expected: Trained) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("precision", [None, Precision(param=torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stages_agree_to_the_last_bit(num_ranks: int, precision: Precision | None) -> None:
    stages = [
        run_ranks(num_ranks, lambda mesh, stage=stage: train(mesh, stage, num_ranks=num_ranks, precision=precision))
        for stage in range(4)
    ]
    for ranks in stages:
        for found in ranks:
            assert_same(found, stages[0][0])
    start = dict(make_odd_net(*ODDITIES, dtype=torch.float32).named_parameters())
    trained = [name for name, param in start.items() if param.requires_grad and param.numel()]
    moved = [name for name in trained if not torch.equal(stages[0][0][0][name], start[name].bfloat16().float())]
    assert len(moved) > 10


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_equals_a_plain_process_to_the_last_bit(stage: int) -> None:
    (found,) = run_ranks(1, lambda mesh: train(mesh, stage, num_ranks=1))
    assert_same(found, train(None, 0, num_ranks=1))


def test_fragments_equal_the_whole_to_the_last_bit() -> None:
    """Cut at multiples of 64 elements, as layouts cut."""
    whole = nn.Parameter(normal((64 * 5 + 17,), 0))
    cuts = [nn.Parameter(part.clone()) for part in whole.detach().split([64, 128, 128, 17])]
    one, several = Lion([whole], **OPTIONS), Lion(cuts, **OPTIONS)
    for step in range(20):
        grad = normal(tuple(whole.shape), 7 + step)
        whole.grad = grad
        for cut, part in zip(cuts, grad.split([64, 128, 128, 17]), strict=True):
            cut.grad = part
        one.step()
        several.step()
    assert torch.equal(torch.cat([cut.detach() for cut in cuts]), whole.detach())
