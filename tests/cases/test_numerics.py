"""Gradients and updates whose value is known exactly: integer gradients, small sums, norms of 3 and 4."""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import LossScale, Precision
from shardwise.comm.base import Mesh
from shardwise.comm.recording import record
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import Weight, all_stages, assert_all_equal, assert_at_rest, clone_all, defer, shard

NO_SCALE = Precision(loss_scale=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Context = Callable[[nn.Module, bool], AbstractContextManager[Any]]  # of one micro-batch: (model, is it the last)

WAYS: dict[str, Context] = {
    "reduce each": lambda model, last: contextlib.nullcontext(),
    "defer": lambda model, last: contextlib.nullcontext() if last else defer(model),
    "defer all": lambda model, last: defer(model),  # the step ends the window
    "sum over G": lambda model, last: contextlib.nullcontext() if last else defer(model, reduce=True),
    "sum over G all": lambda model, last: defer(model, reduce=True),
}


def short(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "_")


all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=short)
all_ways = pytest.mark.parametrize("way", WAYS, ids=short)


def unit_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """One step subtracts the gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Shared(nn.Module):
    """An encoder that is used twice per forward, and a head that is used once."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder = Weight(5, dtype)
        self.head = Weight(3, dtype)

    def forward(self, first: float, second: float) -> Tensor:
        return self.encoder(first) + self.head(first) + self.encoder(second)


@all_stages
@all_dtypes
@pytest.mark.parametrize("keep_last_unit", [True, False], ids=["keep", "free"])
def test_gradient_is_the_sum_over_uses_of_a_module_applied_twice(
    stage: int, dtype: torch.dtype, keep_last_unit: bool
) -> None:
    """C01."""

    def body(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = shard(Shared(dtype), mesh, stage, units=Weight, precision=NO_SCALE, keep_last_unit=keep_last_unit)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        for _ in range(2):  # the second step knows the order
            (model(1.0, 2.0) if flat_rank(mesh) == 0 else model(3.0, 4.0)).backward()
            grads = shardwise.full_gradients(model)
            optim.step()
            optim.zero_grad()
            assert_at_rest(model)
        return grads, shardwise.full_parameters(model)

    for grads, params in run_ranks(2, body):
        assert grads["encoder.w"].tolist() == [5.0] * 5
        assert grads["head.w"].tolist() == [2.0] * 3
        assert params["encoder.w"].tolist() == [-10.0] * 5
        assert params["head.w"].tolist() == [-4.0] * 3


@all_stages
def test_a_module_applied_twice_is_reduced_once_per_backward(stage: int) -> None:
    """C01: one reduction per parameter, after the last use."""

    def body(mesh: Mesh) -> list[list[str]]:
        recorded, log = record(mesh)
        model = shard(Shared(torch.float32), recorded, stage, units=Weight)
        found = []
        for _ in range(2):
            log.clear()
            model(1.0, 2.0).backward()
            shardwise.full_gradients(model)
            found.append(sorted(event.label for event in log if event.operation == "reduce_scatter"))
        return found

    assert run_ranks(2, body) == [[["encoder", "head"]] * 2] * 2


class Pair(nn.Module):
    """Two units whose gradient is the constant."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = Weight(5, dtype)
        self.second = Weight(67, dtype)

    def forward(self, constant: float) -> Tensor:
        return self.first(constant) + self.second(constant)


@all_stages
@all_ways
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [
        (torch.bfloat16, None),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.matrix),
        (torch.bfloat16, torch.float64),
        (torch.float32, None),
        pytest.param(torch.float32, torch.float64, marks=pytest.mark.matrix),
    ],
    ids=short,
)
def test_every_micro_batch_of_a_window_counts_once_on_every_rank(
    stage: int, way: str, dtype: torch.dtype, accumulate: torch.dtype | None
) -> None:
    """C02: rank 0 uses 1, 2, ..., rank 1 uses 3, 4, ...; windows of several lengths follow each other."""
    windows = (2, 1, 3, 5, 2)
    sums = [[sum(1 + 2 * rank + micro for micro in range(length)) for length in windows] for rank in range(2)]
    assert all(a != b for a, b in zip(*sums, strict=True))
    expected = [-(a + b) / 2 for a, b in zip(*sums, strict=True)]

    def body(mesh: Mesh) -> list[tuple[set[float], set[float]]]:
        model = shard(Pair(dtype), mesh, stage, units=Weight, precision=Precision(accumulate=accumulate))
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        updates = []
        for length in windows:
            with torch.no_grad(), shardwise.unsharded(model):
                for param in model.parameters():
                    param.zero_()
            for micro in range(length):
                with WAYS[way](model, micro == length - 1):
                    model(1.0 + 2.0 * flat_rank(mesh) + micro).backward()
            optim.step()
            optim.zero_grad()
            params = shardwise.full_parameters(model)
            updates.append((set(params["first.w"].tolist()), set(params["second.w"].tolist())))
        return updates

    for updates in run_ranks(2, body):
        assert updates == [({value}, {value}) for value in expected]


@all_stages
def test_windows_that_end_twice_before_a_step_add_up(stage: int) -> None:
    """C02 sibling: deferred, ended, deferred, ended, and one window left open for the step."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(Pair(torch.bfloat16), mesh, stage, units=Weight)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        scale = 1.0 + flat_rank(mesh)  # mean over ranks 1.5
        for constant, context in (
            (1.0, defer(model)),
            (2.0, contextlib.nullcontext()),
            (4.0, defer(model, reduce=True)),
            (8.0, contextlib.nullcontext()),
            (16.0, defer(model)),
        ):
            with context:
                model(constant * scale).backward()
        optim.step()
        return shardwise.full_parameters(model)

    for params in run_ranks(2, body):
        assert set(params["first.w"].tolist()) == set(params["second.w"].tolist()) == {-31 * 1.5}


@all_stages
@pytest.mark.parametrize(("divides", "update"), [(True, -4.0), (False, -16.0)], ids=["mean", "sum"])
def test_backwards_add_up_and_only_the_caller_divides(stage: int, divides: bool, update: float) -> None:
    """C04: torch's rule; nothing divides by the number of micro-batches a second time."""
    plain = Weight()
    optim = unit_sgd(plain)
    for _ in range(4):
        (plain(4.0) / (4 if divides else 1)).backward()
    optim.step()
    assert set(plain.w.tolist()) == {update}

    def body(mesh: Mesh) -> tuple[list[float], float]:
        model = shard(Weight(), mesh, stage)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        for _ in range(4):
            loss = model(4.0) + 1.0
            (loss / (4 if divides else 1)).backward()
        optim.step()
        return shardwise.full_parameters(model)["w"].tolist(), loss.item()

    assert run_ranks(1, body) == run_ranks(2, body)[:1] == [([update] * 5, 1.0)]


@all_stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=short)
def test_scale_loss_is_the_identity_without_fp16(stage: int, dtype: torch.dtype) -> None:
    """C04, C13: one loop for every precision."""

    def body(mesh: Mesh) -> None:
        model = shard(Weight(5, dtype), mesh, stage)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        loss = model(4.0)
        assert shardwise.scale_loss(model, loss) is loss
        shardwise.scale_loss(model, loss).backward()
        optim.step()
        assert shardwise.full_parameters(model)["w"].tolist() == [-4.0] * 5

    run_ranks(2, body)


@all_stages
@all_dtypes
def test_norm_is_that_of_the_unscaled_gradient_on_every_step(stage: int, dtype: torch.dtype) -> None:
    """C13: unscaling undoes scaling for every precision, and never happens where nothing was scaled."""

    def body(mesh: Mesh) -> list[float]:
        precision = Precision(loss_scale=LossScale(initial=256.0))
        model = shard(Weight(16, dtype), mesh, stage, precision=precision)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        norms = []
        for step in range(3):
            shardwise.scale_loss(model, model(1.0)).backward()
            norms.append(shardwise.clip_grad_norm_(model, math.inf).item())
            optim.step()
            optim.zero_grad()
            assert shardwise.full_parameters(model)["w"].tolist() == [-1.0 - step] * 16
        return norms

    assert run_ranks(2, body) == [[4.0] * 3] * 2


@all_stages
@all_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_sixteen_bit_gradients_of_micro_batches_add_up_in_fp32(stage: int, way: str, dtype: torch.dtype) -> None:
    """C11: 256 and 1 make 257; bf16 has 256 and 258 only (fp16: 2048 and 1)."""
    large = 256.0 if dtype is torch.bfloat16 else 2048.0
    assert (torch.tensor(large, dtype=dtype) + torch.tensor(1.0, dtype=dtype)).item() == large

    def body(mesh: Mesh) -> Tensor:
        precision = Precision(wire=torch.float32, loss_scale=None)
        model = shard(Pair(dtype), mesh, stage, units=Weight, precision=precision)
        optim = shardwise.shard_optimizer(unit_sgd(model), model)
        for micro, constant in enumerate((large, 1.0)):
            with WAYS[way](model, micro == 1):
                model(constant).backward()
        grads = shardwise.full_gradients(model)
        optim.step()
        master = shardwise.full_parameters(model)
        return torch.cat([grads["first.w"], grads["second.w"], -master["first.w"], -master["second.w"]])

    for num_ranks in (1, 2):
        for found in run_ranks(num_ranks, body):
            assert found.dtype == torch.float32
            assert set(found.tolist()) == {large + 1.0}


@all_stages
@pytest.mark.parametrize("wire", [None, torch.float32], ids=["wire_bf16", "wire_fp32"])
def test_bf16_gradients_of_ranks_are_added_in_fp32(stage: int, wire: torch.dtype | None) -> None:
    """C11: ranks bring 256 and 1, each exact in bf16; their mean 128.5 is not."""
    assert torch.tensor(128.5).to(torch.bfloat16).item() != 128.5

    def body(mesh: Mesh) -> list[float]:
        model = shard(Pair(torch.bfloat16), mesh, stage, units=Weight, precision=Precision(wire=wire))
        model(256.0 if flat_rank(mesh) == 0 else 1.0).backward()
        grads = shardwise.full_gradients(model)
        return [*grads["first.w"].tolist(), *grads["second.w"].tolist()]

    for found in run_ranks(2, body):
        assert set(found) == {128.5}


@all_stages
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_unfreezing_after_frozen_forwards_trains_as_if_never_frozen(
    stage: int, dtype: torch.dtype, forwards: int
) -> None:
    """C12: the dtype of gradients and masters is not decided by the first forward."""

    def body(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        results = []
        for frozen_first in (False, True):
            model = Pair(dtype)
            if frozen_first:
                model.requires_grad_(False)
            model = shard(model, mesh, stage, units=Weight, precision=Precision(wire=torch.float32))
            optim = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.25), model)
            if frozen_first:
                for _ in range(forwards):
                    assert not model(1.0).requires_grad
                model.requires_grad_(True)
            for step in range(3):
                model(1.0 + step + flat_rank(mesh)).backward()
                grads = shardwise.full_gradients(model)
                assert {grad.dtype for grad in grads.values()} == {torch.float32}
                assert grads["first.w"].tolist() == [1.5 + step] * 5
                optim.step()
                optim.zero_grad()
            results.append(shardwise.full_parameters(model))
        return results[0], results[1]

    for always, unfrozen in run_ranks(2, body):
        assert all((value != 0).all() for value in always.values())
        assert_all_equal(unfrozen, always)


class Sides(nn.Module):
    """Parameters of given numbers of elements; each gradient is its own constant."""

    def __init__(self, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sides = nn.ParameterList(torch.arange(1.0, size + 1, dtype=dtype) + 10 * size for size in sizes)

    def forward(self, constants: list[float]) -> Tensor:
        return sum(((p * c).sum() for p, c in zip(self.sides, constants, strict=True)), torch.zeros(()))


@all_stages
@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, [3, 5]), (4, [1, 2, 7]), (3, [1, 65, 64])], ids=short)
def test_padding_never_leaks_through_any_way_to_fetch(stage: int, align: int, num_ranks: int, sizes: list[int]) -> None:
    """C10: all memory, padding included, starts as NaN (the harness's arena), and the shards' padding stays so."""
    original = {f"sides.{i}": p.detach().clone() for i, p in enumerate(Sides(sizes).sides)}

    def body(mesh: Mesh) -> int:
        model = shard(Sides(sizes), mesh, stage, align=align)
        for unit in model._shardwise.runtime.units:
            for bucket in unit.buckets:
                start, stop = bucket.site.bounds(bucket.site.placement.num_param)
                for first, last in bucket.site.layout.gaps:
                    first, last = max(first, start), min(last, stop)
                    if first < last:
                        bucket.params.shard[first - start : last - start] = math.nan
        assert_all_equal(shardwise.full_parameters(model), original)
        assert_all_equal(shardwise.full_state_dict(model), original)
        with shardwise.unsharded(model):
            assert_all_equal(clone_all(dict(model.named_parameters())), original)
        optim = shardwise.shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.5), model)
        expected = {name: value.clone() for name, value in original.items()}
        for _ in range(2):
            constants = [flat_rank(mesh) + 1.0 + i for i in range(len(sizes))]
            loss = model(constants)
            plain = sum((expected[f"sides.{i}"] * c).sum() for i, c in enumerate(constants))
            assert loss.item() == plain.item()
            loss.backward()
            means = [(num_ranks + 1) / 2 + i for i in range(len(sizes))]
            norm = math.sqrt(sum(size * mean**2 for size, mean in zip(sizes, means, strict=True)))
            assert shardwise.clip_grad_norm_(model, math.inf).item() == pytest.approx(norm, rel=1e-6)
            optim.step()
            optim.zero_grad()
            expected = shardwise.full_parameters(model)
            assert all(value.isfinite().all() for value in expected.values())
        for states in shardwise.full_optimizer_state(model).values():
            assert all(value.isfinite().all() for value in states.values())
        return shardwise.measured_bytes(model)["optim"]

    held = run_ranks(num_ranks, body)
    replicas = num_ranks if stage == 0 else 1
    assert sum(held) == replicas * 2 * 4 * sum(sizes), "moments exist for real elements only"


@all_stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_learning_rates_and_decay_of_interleaved_groups_match_torch(stage: int, dtype: torch.dtype) -> None:
    """C41: groups in interleaved order, own lr and decay, one lr changed between steps, a group that becomes empty."""

    def run(model: Any, optim: Any, scale: float) -> None:
        for step in range(4):
            if step == 2:
                optim.param_groups[1]["lr"] *= 0.5
            if step == 3:
                model.sides[0].requires_grad_(False)
                model.sides[2].requires_grad_(False)
            model([scale * (1.0 + step) * (1 + i) for i in range(5)]).backward()
            optim.step()
            optim.zero_grad()

    def groups(model: Any) -> torch.optim.Optimizer:
        params = list(model.sides)
        return torch.optim.SGD(
            [
                {"params": [params[0], params[2]], "lr": 0.5, "weight_decay": 0.25},
                {"params": [params[1], params[3], params[4]], "lr": 0.125},
            ],
            momentum=0.5,
        )

    sizes = [3, 70, 1, 5, 64]
    plain = Sides(sizes, torch.float32)
    run(plain, groups(plain), 1.5)
    expected = clone_all(dict(plain.named_parameters()))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(Sides(sizes, torch.float32), mesh, stage, precision=Precision(param=dtype))
        optim = shardwise.shard_optimizer(groups(model), model)
        run(model, optim, 1.0 + flat_rank(mesh))
        assert [group["lr"] for group in optim.param_groups] == [0.5, 0.0625]
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        assert_all_equal(found, expected)


@all_stages
def test_a_group_added_later_trains_from_then_on(stage: int) -> None:
    """C41: ``add_param_group`` for what was frozen at first."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = Pair()
        model.second.requires_grad_(False)
        model = shard(model, mesh, stage, units=Weight)
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.first.parameters(), lr=1.0), model)
        for step in range(3):
            if step == 1:
                model.second.requires_grad_(True)
                optim.add_param_group({"params": model.second.parameters(), "lr": 0.5})
            model(2.0 + 2 * flat_rank(mesh)).backward()
            optim.step()
            optim.zero_grad()
        return shardwise.full_parameters(model)

    for params in run_ranks(2, body):
        assert params["first.w"].tolist() == [-9.0] * 5
        assert params["second.w"].tolist() == [-3.0] * 67
