"""The whole core in seconds: one test per verb, rule and refusal, on ranks as threads.

Together with ``tests/lanes`` this is the fast thread subset that ``tests/mutations`` breaks on purpose: whatever it
lets through is a missing test here.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint as torch_checkpoint

import shardwise
from shardwise import ConfigError, LossScale, NonFiniteError, Precision, RankMismatchError, Sharding, StateError
from shardwise.comm.base import BLOCK_NUMEL, Mesh, Verb, rank_order_mean
from shardwise.comm.recording import Log, record
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.schedule import Begin, End, Walk
from shardwise.testing.compare import (
    Case,
    MicroBatches,
    assert_equals_plain,
    assert_same_bits,
    train_plain,
    train_sharded,
)
from shardwise.testing.lanes import Instruments
from shardwise.testing.models import ODDITIES
from shardwise.testing.ranks import run_ranks

STAGES = (0, 1, 2, 3)
WIDTH = 6
all_stages = pytest.mark.parametrize("stage", STAGES)


def checkpoint(function: Callable[..., Tensor], *args: Tensor, use_reentrant: bool) -> Tensor:
    """Without a copy of the random state, which all threads share: torch takes its lock while it collects garbage."""
    out: Tensor = torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, preserve_rng_state=False)
    return out


def run2(body: Callable[[Mesh], Any], **options: Any) -> list[Any]:
    return run_ranks(2, body, timeout=5, **options)


def make_model(*, dtype: torch.dtype = torch.float32, layers: int = 3, scale: float = 0.4) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * scale)
    return model.to(dtype)


def rows(rank: int, step: int = 0, *, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out - 1).float().pow(2).mean()


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    return shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=lr), model, **options)


def plain_sgd(num_steps: int = 1, lr: float = 0.1, **options: Any) -> dict[str, Tensor]:
    """The reference: two ranks' mean loss in one process."""
    model = make_model(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(num_steps):
        (sum(loss_of(model, rows(rank, step)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


NAMES = {Verb.UNSHARD: "gather", Verb.REFRESH: "refresh", Verb.REDUCE: "reduce"}
NAMES |= {Verb.FINALIZE_SCATTER: "scatter", Verb.FINALIZE_GATHER: "regather"}


def sent(log: Log) -> list[str]:
    """The collectives of the five verbs, as "verb unit"; notes of the test between them stay."""
    return [
        event if isinstance(event, str) else f"{NAMES[event.verb]} {event.label}"
        for event in log
        if isinstance(event, str) or event.verb in NAMES
    ]


def ledger(model: nn.Module) -> Any:
    return Managed.of(model).runtime.means.arena.ledger


# Training equals plain training


@all_stages
def test_small_model_trains_as_in_one_process(stage: int) -> None:
    def train(model: nn.Module, optimizer: Any, clip: Callable[[], Any], ranks: Sequence[int]) -> None:
        for step in range(2):
            for number in range(2):
                for rank in ranks:
                    (loss_of(model, rows(rank, 10 * step + number)) / len(ranks)).backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    plain = make_model()
    train(plain, adam(plain), lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.1), range(2))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = shardwise.shard_optimizer(adam(model), model)
        train(model, optimizer, lambda: shardwise.clip_grad_norm_(model, 0.1), [mesh["data"].rank])
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


def case_of(micro_batches: MicroBatches, dtype: torch.dtype = torch.float64) -> Case:
    return Case(oddities=ODDITIES, dtype=dtype, max_norm=0.5, micro_batches=micro_batches, num_rows=24)


@pytest.mark.parametrize("micro_batches", list(MicroBatches), ids=lambda kind: kind.name)
def test_odd_models_train_as_in_one_process_at_every_stage(micro_batches: MicroBatches) -> None:
    case = case_of(micro_batches)
    plain = train_plain(case)
    assert min(plain.norms) > 0.5
    for stage in STAGES:
        sharding = shardwise.stage_sharding(stage)
        ranks = run_ranks(3, lambda mesh, sharding=sharding: train_sharded(case, mesh, sharding), timeout=5)
        assert_equals_plain(ranks, plain, case.tolerance, f"stage {stage}")


def test_stages_agree_bit_for_bit() -> None:
    case = case_of(MicroBatches.REDUCED, torch.float32)
    found = [
        run_ranks(3, lambda mesh, stage=stage: train_sharded(case, mesh, shardwise.stage_sharding(stage)), timeout=5)
        for stage in STAGES
    ]
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(optim="local"),
        Sharding(grad="node", optim=["node", "local"]),
        Sharding(param="local", grad="local", optim=["node", "local"]),
        shardwise.hybrid("local"),
    ],
    ids=str,
)
def test_nested_axes_train_as_in_one_process(sharding: Sharding) -> None:
    case = case_of(MicroBatches.REDUCED)
    plain = train_plain(case)
    ranks = run_ranks({"node": 2, "local": 2}, lambda mesh: train_sharded(case, mesh, sharding), timeout=5)
    assert_equals_plain(ranks, plain, case.tolerance)


@all_stages
def test_bf16_parameters_follow_fp32_masters(stage: int) -> None:
    # Exact: SGD without momentum, gradients of two ranks summed in fp32 and halved.
    wide = {name: param.detach().clone() for name, param in make_model().named_parameters()}
    model = make_model().bfloat16()
    for step in range(3):
        sums = {name: torch.zeros_like(value) for name, value in wide.items()}
        for rank in range(2):
            loss_of(model, rows(rank, step, dtype=torch.bfloat16)).backward()
            for name, param in model.named_parameters():
                sums[name] += param.grad.float()
                param.grad = None
        for name, param in model.named_parameters():
            wide[name].add_(sums[name] / 2, alpha=-0.01)
            with torch.no_grad():
                param.copy_(wide[name])

    def body(mesh: Mesh) -> Any:
        # Packed without gaps, slices end inside a weight.
        model = shardwise.shard(make_model(), mesh, stage=stage, align=1, precision=Precision(param=torch.bfloat16))
        optimizer = sgd(model, lr=0.01)
        for step in range(3):
            loss_of(model, rows(mesh["data"].rank, step, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        masters, saved = shardwise.full_parameters(model), shardwise.full_state_dict(model)
        with shardwise.unsharded(model, writes=False):
            seen = {name: param.detach().clone() for name, param in model.named_parameters()}
        return masters, saved, seen

    for masters, saved, seen in run2(body):
        for name, value in wide.items():
            assert torch.equal(masters[name], value)
            assert torch.equal(saved[name], value.bfloat16())
            assert torch.equal(seen[name], value.bfloat16())
    assert not torch.equal(wide["0.weight"].bfloat16(), make_model().bfloat16()[0].weight)


# What is sent, when, and what is held

FORWARD = ["use 0", "use 1", "use 2"]
REFRESH = ["refresh 0", "refresh 1", "refresh 2"]
# A scatter is posted when a unit's gradients are in, what follows it when its turn to be waited for has come.
REPLICATED = ["scatter 2", "scatter 1", "regather 2", "regather 1", "scatter 0", "regather 0"]
SENT: Mapping[int, list[str]] = {
    0: [*FORWARD, *REPLICATED],
    1: [*FORWARD, "scatter 2", "scatter 1", "scatter 0", *REFRESH],
    2: [*FORWARD, "reduce 2", "reduce 1", "reduce 0", *REFRESH],
    3: [
        *("gather 0", "gather 1", "use 0", "gather 2", "use 1", "use 2"),
        *("gather 1", "gather 0", "reduce 2", "reduce 1", "reduce 0"),  # 2 is kept from its forward
    ],
}


@all_stages
def test_collectives_of_a_step_come_in_the_planned_order(stage: int) -> None:
    def body(mesh: Mesh) -> list[str]:
        recorded, log = record(mesh)
        model = shardwise.shard(make_model(), recorded, stage=stage)
        optimizer = sgd(model)
        for index, layer in enumerate(model):
            layer.register_forward_pre_hook(lambda *_, index=index: log.events.append(f"use {index}"))
        for step in range(2):  # the first step agrees on the order
            log.clear()
            loss_of(model, rows(mesh["data"].rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sent(log)

    assert run2(body) == [SENT[stage]] * 2


def test_first_step_gathers_each_unit_twice() -> None:
    def body(mesh: Mesh) -> list[str]:
        recorded, log = record(mesh)
        model = shardwise.shard(make_model(), recorded, stage=3)
        loss_of(model, rows(mesh["data"].rank)).backward()
        return sent(log)

    forward = ["gather 0", "gather 1", "gather 2"]
    backward = ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"]
    assert run2(body)[0] == forward + backward


class Lookups(nn.Module):
    """Two embeddings, the second in the middle; ``reads`` computes with a weight, so that a backward reads it.

    That may depend on the data: "on rank 0" does it for long inputs alone.
    """

    def __init__(self, reads: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Embedding(5, WIDTH), nn.Embedding(7, WIDTH)
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
        if reads:

            def read(module: nn.Module, _: Any, output: Tensor) -> Tensor:
                return output @ module.weight.T @ module.weight if reads == "read" or output.shape[1] == 2 else output

            self.first.register_forward_hook(read)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.inner(self.first(tokens))) + self.second(tokens))
        return out


@pytest.mark.parametrize("reads", ["", "read", "on rank 0"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_embeddings_are_gathered_in_backward_only_if_it_may_read_them(prefetch: int, reads: str) -> None:
    def tokens(rank: int, step: int) -> Tensor:
        return torch.tensor([[0, 1, 4], [2, 2, 3]])[:, : 2 + rank]

    plain = Lookups(reads)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        (sum(loss_of(plain, tokens(rank, step)) for rank in range(2)) / 2).backward()
        reference.step()
        reference.zero_grad()

    def body(mesh: Mesh) -> Any:
        recorded, log = record(mesh)
        units = lambda module: isinstance(module, nn.Embedding | nn.Linear)  # noqa: E731
        model = shardwise.shard(Lookups(reads), recorded, stage=3, units=units, prefetch=prefetch)
        optimizer = sgd(model)
        for step in range(3):
            log.clear()
            loss = loss_of(model, tokens(mesh["data"].rank, step))
            log.events.append("backward")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        backward = sent(log)[sent(log).index("backward") :]
        return shardwise.full_parameters(model), [event for event in backward if event.startswith("gather")]

    found, gathered = run2(body)[0]
    assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})
    assert gathered == ["gather inner", *(["gather first"] if reads else [])]  # the last unit was kept


@all_stages
def test_memory_is_given_back(stage: int) -> None:
    slot = 2 * 64 * 4  # weight and bias, each on 64 elements of 4 bytes

    def body(mesh: Mesh) -> Any:
        model = shardwise.shard(make_model(layers=5), mesh, stage=stage, keep_last_unit=False)
        optimizer = sgd(model)
        held = ledger(model)
        assert held.now[Kind.GATHERED] == 0
        for step in range(3):
            held.reset_peak()
            loss = loss_of(model, rows(mesh["data"].rank, step))
            assert held.now[Kind.GATHERED] == 0
            loss.backward()
            assert held.now[Kind.GATHERED] == held.now[Kind.STAGING] == 0
            if step == 2:  # a second window has buffers of its own for a while
                peak = held.peak[Kind.GATHERED], held.peak[Kind.STAGING]
                loss_of(model, rows(mesh["data"].rank)).backward()
                assert held.now[Kind.STAGING] == 0
                assert held.peak[Kind.STAGING] > peak[1]
            optimizer.step()
            optimizer.zero_grad()
            assert held.now[Kind.GRAD] == 0
        return peak

    gathered, staging = run2(body)[0]
    assert gathered == (3 * slot if stage == 3 else 0)  # the unit whose backward ends, the next, the one ahead
    assert staging == (3 * slot if stage >= 2 else 0)  # the unit in progress and two reductions in flight


def test_last_used_unit_is_kept_for_backward_only() -> None:
    def body(mesh: Mesh) -> list[int]:
        model = shardwise.shard(make_model(), mesh, stage=3)
        held = []
        for training in (True, True, False):
            with torch.set_grad_enabled(training):
                loss = loss_of(model, rows(mesh["data"].rank))
            held.append(ledger(model).now[Kind.GATHERED])
            if training:
                loss.backward()
                sgd_free(model)
        return held

    def sgd_free(model: nn.Module) -> None:
        shardwise.clip_grad_norm_(model, math.inf)  # agrees on the order
        model.zero_grad()

    assert run2(body)[0] == [0, 512, 0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("uses", [1, 2])
def test_recomputed_units_gather_and_reduce_no_more_than_needed(reentrant: bool, uses: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model(layers=3)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                for _ in range(uses):
                    x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def body(mesh: Mesh) -> tuple[list[str], dict[str, Tensor]]:
        recorded, log = record(mesh)
        model = shardwise.shard(Net(), recorded, stage=3, keep_last_unit=False, units=nn.Linear)
        x = rows(mesh["data"].rank).requires_grad_()
        loss_of(model, x).backward()
        events = sent(log)
        return events, shardwise.full_gradients(model)

    plain = Net()
    for rank in range(2):
        (loss_of(plain, rows(rank).requires_grad_()) / 2).backward()
    for events, grads in run2(body):
        for name in ("layers.0", "layers.1", "layers.2"):
            assert events.count(f"reduce {name}") == 1
            assert events.count(f"gather {name}") == uses + 1  # kept from the first recomputation to the last
        if reentrant:
            assert events[-3:] == ["gather layers.0", "reduce layers.1", "reduce layers.0"]
            assert "reduce layers.2" in events[:-3]  # it did not wait for the end
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_number_of_reductions_in_flight_bounds_their_memory(in_flight: int) -> None:
    def body(mesh: Mesh) -> int:
        model = shardwise.shard(make_model(layers=5), mesh, stage=3, reductions_in_flight=in_flight)
        loss_of(model, rows(mesh["data"].rank)).backward()
        return ledger(model).peak[Kind.STAGING]

    assert run2(body)[0] == (1 + in_flight) * 512


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_number_of_units_gathered_ahead_is_as_told(prefetch: int) -> None:
    def body(mesh: Mesh) -> list[str]:
        recorded, log = record(mesh)
        model = shardwise.shard(make_model(), recorded, stage=3, prefetch=prefetch)
        model[0].register_forward_pre_hook(lambda *_: log.events.append("use 0"))
        loss_of(model, rows(mesh["data"].rank)).backward()
        shardwise.clip_grad_norm_(model, math.inf)
        log.clear()
        model(rows(0))
        return sent(log)

    assert run2(body)[0][: prefetch + 2] == [*(f"gather {index}" for index in range(prefetch + 1)), "use 0"]


def test_unit_stays_gathered_between_the_backwards_of_its_uses() -> None:
    def body(mesh: Mesh) -> list[str]:
        model = make_model(layers=2)
        model.append(model[0])
        recorded, log = record(mesh)
        shardwise.shard(model, recorded, stage=3, keep_last_unit=False, units=nn.Linear)
        loss_of(model, rows(mesh["data"].rank)).backward()
        return sent(log)

    events = run2(body)[0]
    assert events.count("reduce 0") == 1
    assert events.count("gather 0") == 3  # two uses, one backward


def test_unit_gathered_ahead_and_not_used_is_freed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor, num_layers: int) -> Tensor:
            for layer in self.layers[:num_layers]:
                x = layer(x)
            return x

    def body(mesh: Mesh) -> list[int]:
        model = shardwise.shard(Net(), mesh, stage=3)
        model(rows(mesh["data"].rank), 3).sum().backward()
        shardwise.clip_grad_norm_(model, math.inf)  # agrees on the order
        held = []
        for training in (False, True):
            with torch.set_grad_enabled(training):
                model(rows(0), 2)
            held.append(ledger(model).now[Kind.GATHERED])
        return held

    assert run2(body)[0] == [0, 512]  # where a backward may follow, the last unit stays


def test_unit_gathered_ahead_of_a_backward_that_does_not_come_is_freed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x).detach()))

    def body(mesh: Mesh) -> tuple[list[str], int]:
        recorded, log = record(mesh)
        model = shardwise.shard(Net(), recorded, stage=3)
        for _ in range(2):
            log.clear()
            model(rows(mesh["data"].rank)).sum().backward()
            held = ledger(model).now[Kind.GATHERED]
            shardwise.clip_grad_norm_(model, math.inf)
        return sent(log), held

    events, held = run2(body)[0]
    assert events.count("gather layers.0") == 2  # for its forward, and in vain
    assert held == 0


@all_stages
def test_unit_kept_for_a_backward_is_not_stale_after_a_step(stage: int) -> None:
    def body(mesh: Mesh) -> Tensor:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        for step in range(2):
            loss_of(model, rows(mesh["data"].rank, step)).backward()
            loss_of(model, rows(9))  # for a log, without a backward: the last unit stays gathered
            optimizer.step()
            optimizer.zero_grad()
        return model(rows(9)).detach()

    plain = make_model()
    plain.load_state_dict(plain_sgd(2))
    for out in run2(body):
        torch.testing.assert_close(out, plain(rows(9)).detach())


@pytest.mark.parametrize("skips", [False, True])
def test_step_frees_units_that_it_does_not_update(skips: bool) -> None:
    def body(mesh: Mesh) -> None:
        model = make_model()
        model[2].requires_grad_(False)
        shardwise.shard(model, mesh, stage=3)
        optimizer = sgd(model, on_nonfinite="skip")
        for step in range(2):
            x = rows(mesh["data"].rank, step)
            loss_of(model, x * math.inf if skips and step else x).backward()
            loss_of(model, rows(9))  # without a backward: the last unit stays gathered
            assert ledger(model).now[Kind.GATHERED] == (512 if step else 0)
            optimizer.step()
            assert optimizer.step_was_applied != (skips and step == 1)
            assert ledger(model).now[Kind.GATHERED] == 0
            optimizer.zero_grad()

    run2(body)


@all_stages
def test_weight_used_by_an_earlier_unit_gets_its_late_gradient(stage: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x + x @ self.layers[2].weight)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        probe = Instruments("late")
        model = shardwise.shard(Net(), mesh, stage=stage, lanes=probe.lanes, arena=probe.arena)
        for step in range(2):
            loss_of(model, rows(mesh["data"].rank, step)).backward()
            waits = ledger(model).now[Kind.STAGING]
            assert (waits > 0) is (step == 0)  # from the first step on it is known to be late, and reduced in backward
            shardwise.clip_grad_norm_(model, math.inf)
            assert ledger(model).now[Kind.STAGING] == 0
        return shardwise.full_gradients(model)

    plain = Net()
    for rank in range(2):
        for step in range(2):
            (loss_of(plain, rows(rank, step)) / 2).backward()
    for grads in run2(body):
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("window", ["final", "defer", "reduce"])
@pytest.mark.parametrize("stage", [0, 1, 2])  # at stage 3 all ranks must gather the same units
def test_late_gradient_of_one_rank_reaches_all(stage: int, window: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor, early: bool) -> Tensor:
            return self.layers(x + x @ self.layers[2].weight if early else x)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        rank = mesh["data"].rank
        model = shardwise.shard(Net(), mesh, stage=stage)
        for step in range(2):
            with nullcontext() if window == "final" else shardwise.no_sync(model, reduce=window == "reduce"):
                loss_of_early(model, rows(rank, step), rank == step).backward()
        return shardwise.full_gradients(model)

    def loss_of_early(model: nn.Module, x: Tensor, early: bool) -> Tensor:
        out: Tensor = (model(x, early) - 1).pow(2).mean()
        return out

    plain = Net()
    for step in range(2):
        for rank in range(2):
            (loss_of_early(plain, rows(rank, step), rank == step) / 2).backward()
    for grads in run2(body):
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_unit_that_was_late_on_one_rank_is_late_on_all_from_then_on(stage: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor, early: bool) -> Tensor:
            return self.layers(x + x @ self.layers[1].weight if early else x)

    def body(mesh: Mesh) -> list[list[str]]:
        model = shardwise.shard(Net(), mesh, stage=stage, units=nn.Linear)
        journal = Managed.of(model).runtime.means.journal
        orders = []
        for step in range(3):
            journal.recent.clear()
            model(rows(mesh["data"].rank, step), mesh["data"].rank == 0).pow(2).mean().backward()
            orders.append([event for event in journal.recent if event.startswith("finalized")])
            shardwise.clip_grad_norm_(model, math.inf)
        assert Managed.of(model).runtime.schedule.late == {2}
        return orders

    for orders in run2(body):
        last_names = [[event.split()[1] for event in order] for order in orders]
        assert [names[-1] for names in last_names] == ["layers.0", "layers.1", "layers.1"]
        assert [names[0] for names in last_names] == ["layers.2"] * 3  # the others do not wait for it


def test_window_ends_only_for_buckets_in_which_gradients_wait() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=2, units=nn.Linear)
        with shardwise.no_sync(model):
            model[1](rows(mesh["data"].rank)).pow(2).mean().backward()
        shardwise.clip_grad_norm_(model, 1.0)
        held = [bucket.trainable_grads.has_result for bucket in Managed.of(model).runtime.trainable_buckets()]
        assert held == [False, True, False]

    run2(body)


@pytest.mark.parametrize("keep_last_unit", [True, False])
def test_root_parameter_that_one_rank_uses_is_gathered_alike_on_all(keep_last_unit: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()
            self.extra = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, uses: bool) -> Tensor:
            x = self.layers(x)
            return x + self.extra if uses else x

    def backward(model: nn.Module, rank: int, step: int) -> None:
        (model(rows(rank, step), rank == 1).pow(2).mean()).backward()

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(Net(), mesh, stage=3, units=nn.Linear, keep_last_unit=keep_last_unit)
        for step in range(3):
            backward(model, mesh["data"].rank, step)
            shardwise.clip_grad_norm_(model, math.inf)
        return shardwise.full_gradients(model)

    plain = Net()
    for step in range(3):
        for rank in range(2):
            backward(plain, rank, step)
    for grads in run2(body):
        for name, param in plain.named_parameters():
            assert param.grad is not None
            torch.testing.assert_close(grads[name], param.grad / 2)


@pytest.mark.parametrize("stage", [0, 1, 2])  # at stage 3 all ranks must gather the same units
def test_rank_without_a_micro_batch_in_an_open_window_takes_part_in_the_step(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        rank = mesh["data"].rank
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        for step in range(3):
            with shardwise.no_sync(model):
                for _ in range(step % 2 == rank):
                    loss_of(model, rows(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return shardwise.full_parameters(model)

    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        (loss_of(plain, rows(step % 2, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in run2(body):
        assert_close(params, dict(plain.named_parameters()))


@all_stages
def test_gradient_memory_is_given_back_when_two_optimizers_cleared_theirs(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage, units=[])
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        optimizers = [
            shardwise.shard_optimizer(torch.optim.SGD(params, lr=0.1), model, partial=True)
            for params in (weights, biases)
        ]
        for _ in range(2):
            loss_of(model, rows(mesh["data"].rank)).backward()
            assert ledger(model).now[Kind.GRAD] > 0
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            assert ledger(model).now[Kind.GRAD] == 0

    run2(body)


@all_stages
def test_gradients_are_multiplied_by_the_factor_of_their_backward(stage: int) -> None:
    factors = (0.5, 0.25, 2.0)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        runtime = Managed.of(model).runtime
        for step, factor in enumerate(factors):
            runtime.factor = factor
            with shardwise.no_sync(model) if step < 2 else nullcontext():
                loss_of(model, rows(mesh["data"].rank, step)).backward()
        return shardwise.full_gradients(model)

    plain = make_model()
    for rank in range(2):
        for step, factor in enumerate(factors):
            (loss_of(plain, rows(rank, step)) * factor / 2).backward()
    for grads in run2(body):
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


@all_stages
@pytest.mark.parametrize("window", ["final", "defer", "reduce"])
def test_summed_gradients_are_divided_by_the_counts_of_all_ranks(stage: int, window: str) -> None:
    counts = ((3, 5), (1, 0))  # by micro-batch and rank

    def body(mesh: Mesh) -> tuple[dict[str, Tensor], float]:
        rank = mesh["data"].rank
        model = shardwise.shard(make_model(), mesh, stage=stage)
        settler = Managed.of(model).settler
        for _ in range(2):  # the second window starts afresh
            settler.start_count()
            model.zero_grad()
            for step, count in enumerate(counts):
                with nullcontext() if window == "final" else shardwise.no_sync(model, reduce=window == "reduce"):
                    (loss_of(model, rows(rank, step)) * count[rank]).backward()
                settler.add_count(count[rank])
            norm = float(shardwise.clip_grad_norm_(model, math.inf))
            shardwise.local_gradients(model)
            again = float(shardwise.clip_grad_norm_(model, math.inf))
            assert again == pytest.approx(norm, rel=1e-6)  # a second look divides no more
        grads = shardwise.full_gradients(model)
        loss_of(model, rows(rank)).backward()
        with pytest.raises(StateError, match="divided by their count already"):
            settler.settle()
        return grads, norm

    plain = make_model()
    for step, count in enumerate(counts):
        for rank in range(2):
            (loss_of(plain, rows(rank, step)) * count[rank] / 9).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for grads, norm in run2(body):
        assert_close(grads, expected)
        assert norm == pytest.approx(math.sqrt(sum(float(g.pow(2).sum()) for g in expected.values() if g is not None)))


def test_window_whose_count_is_0_is_an_error_on_all_ranks() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=1)
        Managed.of(model).settler.start_count()
        loss_of(model, rows(0)).backward()
        with pytest.raises(StateError, match="count of the whole window is 0"):
            shardwise.clip_grad_norm_(model, 1.0)

    run2(body)


@all_stages
def test_verbs_of_a_bucket_wait_for_each_other(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        probe = Instruments("late")
        model = shardwise.shard(make_model(layers=1), mesh, stage=stage, lanes=probe.lanes, arena=probe.arena)
        bucket = Managed.of(model).runtime.units[-1].buckets[0]
        grads, slot = bucket.trainable_grads, bucket.site.layout.slots[0]
        for factor in (1.0, 10.0):
            grads.accumulate(slot, torch.full((WIDTH, WIDTH), factor * (mesh["data"].rank + 1)))
            bucket.reduce_grads()
            bucket.finalize_grads()
        grads.wait()
        held = grads.owned.clone()
        assert set(held.unique().tolist()) <= {0.0, 16.5}
        grads.accumulate(slot, torch.ones(WIDTH, WIDTH))
        bucket.finalize_grads()
        grads.empty()
        assert ledger(model).now[Kind.GRAD] == ledger(model).now[Kind.STAGING] == 0
        bucket.unshard()
        bucket.refresh_params()
        bucket.unshard()
        bucket.reshard()

    run2(body)


@pytest.mark.parametrize("stage", [0, 1, 2])  # at stage 3 all ranks must gather the same units
def test_ranks_that_use_unlike_units_still_reduce_in_one_order(stage: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model(layers=3)

        def forward(self, x: Tensor, skip: int) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x) if index != skip else x
            return x

    def body(mesh: Mesh) -> Any:
        rank = mesh["data"].rank
        model = shardwise.shard(Net(), mesh, stage=stage)
        optimizer = sgd(model)
        for step in range(3):
            (model(rows(rank, step), (rank + step) % 3) - 1).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return shardwise.full_parameters(model)

    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            ((plain(rows(rank, step), (rank + step) % 3) - 1).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run2(body, match="order"):
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


@all_stages
def test_weight_that_only_one_rank_uses_leaves_all_ranks_in_step(stage: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = make_model(layers=2)

        def forward(self, x: Tensor, use_all: bool) -> Tensor:
            out = torch.tanh(self.always(x))
            return out + self.sometimes(x) if use_all else out

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Odd() for _ in range(3))

        def forward(self, x: Tensor, use_all: bool) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x, use_all))
            return x

    def train(model: nn.Module, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(3):
            for rank in ranks:
                (model(rows(rank, step), (rank + step) % 2 == 0).pow(2).mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = Net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(2))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(Net(), mesh, stage=stage, units=Odd)
        train(model, sgd(model), [mesh["data"].rank])
        return shardwise.full_parameters(model)

    for found in run2(body, match="order"):  # paired as NCCL pairs: by position, whatever the calls are for
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


@all_stages
def test_edit_before_a_forward_inside_unsharded_is_kept(stage: int) -> None:
    def body(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        with shardwise.unsharded(model), torch.no_grad():
            model[0].weight.mul_(2)
            out = model(rows(7))
        return out, shardwise.full_parameters(model)

    plain = make_model()
    with torch.no_grad():
        plain[0].weight.mul_(2)
    for out, found in run2(body):
        torch.testing.assert_close(out, plain(rows(7)).detach())
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


@all_stages
def test_gradient_of_an_input_alone_reduces_nothing(stage: int) -> None:
    def body(mesh: Mesh) -> list[str]:
        recorded, log = record(mesh)
        model = shardwise.shard(make_model(), recorded, stage=stage)
        x = rows(mesh["data"].rank).requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model, x), x)
        plain_x = rows(mesh["data"].rank).requires_grad_()
        (wanted,) = torch.autograd.grad(loss_of(make_model(), plain_x), plain_x)
        torch.testing.assert_close(grad, wanted)
        return sent(log)

    events = run2(body)[0]
    assert not [event for event in events if not event.startswith("gather")]
    assert len(events) == (6 if stage == 3 else 0)


def test_unit_of_several_layers_is_gathered_once_per_backward() -> None:
    def body(mesh: Mesh) -> list[list[str]]:
        recorded, log = record(mesh)
        model = shardwise.shard(make_model(layers=4), recorded, stage=3, units=[], keep_last_unit=False)
        steps = []
        for step in range(3):
            log.clear()
            loss_of(model, rows(mesh["data"].rank, step)).backward()
            steps.append(sent(log))
            model.zero_grad()
        return steps

    assert run2(body)[0] == [["gather root", "gather root", "reduce root"]] * 3


@pytest.mark.parametrize("uses", [1, 2])
def test_units_that_a_reentrant_checkpoint_recomputes_are_freed_in_time(uses: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(make_model(layers=3) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                for _ in range(uses):
                    x = checkpoint(block, x, use_reentrant=True)
            return x

    def body(mesh: Mesh) -> Any:
        probe = Instruments("late")
        recorded, log = record(mesh)
        model = shardwise.shard(
            Net(),
            recorded,
            stage=3,
            units=nn.Sequential,
            keep_last_unit=False,
            prefetch=0,
            lanes=probe.lanes,
            arena=probe.arena,
        )
        peaks = []
        for step in range(2):
            log.clear()
            loss = loss_of(model, rows(mesh["data"].rank, step).requires_grad_())
            ledger(model).reset_peak()
            loss.backward()
            peaks.append(ledger(model).peak[Kind.GATHERED])
        return peaks, sent(log), shardwise.full_gradients(model)

    plain = Net()
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, rows(rank, step).requires_grad_()) / 2).backward()
    for peaks, events, grads in run2(body):
        assert max(peaks) <= 2 * 3 * 512
        assert events.count("gather blocks.2") == uses + 1
        assert events.count("reduce blocks.2") == 1
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


def test_recomputed_uses_whose_inputs_need_no_gradient_keep_their_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = make_model(layers=3)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            def scaled(x: Tensor, scale: Tensor) -> Tensor:
                return self.block(x) * scale

            return sum(checkpoint(scaled, x + shift, self.scale, use_reentrant=True) for shift in (0, 1))

    def body(mesh: Mesh) -> tuple[list[str], dict[str, Tensor]]:
        probe = Instruments("late")
        recorded, log = record(mesh)
        model = shardwise.shard(
            Net(), recorded, stage=3, units=["block"], keep_last_unit=False, lanes=probe.lanes, arena=probe.arena
        )
        loss_of(model, rows(mesh["data"].rank)).backward()
        events = sent(log)
        return events, shardwise.full_gradients(model)

    plain = Net()
    for rank in range(2):
        (loss_of(plain, rows(rank)) / 2).backward()
    for events, grads in run2(body):
        assert events.count("gather block") == 3  # two uses, one backward
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


@all_stages
def test_step_inside_unsharded_shows_the_new_parameters(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        loss_of(model, rows(mesh["data"].rank)).backward()
        with shardwise.unsharded(model):
            optimizer.step()
            inside = loss_of(model, rows(7)).detach()
        return {**shardwise.full_parameters(model), "loss": inside}

    plain = make_model()
    plain.load_state_dict(plain_sgd())
    wanted = {**plain_sgd(), "loss": loss_of(plain, rows(7)).detach()}
    for found in run2(body):
        assert_close(found, wanted)


# Ranks agree or fail together


def both_raise(body: Callable[[Mesh], Any], kind: type[Exception], match: str, num_ranks: int = 2) -> None:
    errors = run_ranks(num_ranks, body, timeout=5, return_exceptions=True)
    for error in errors:
        with pytest.raises(kind, match=match):
            raise error if isinstance(error, BaseException) else AssertionError(f"a rank returned {error}")


def test_no_rank_updates_when_ranks_gathered_unlike_units() -> None:
    untouched: dict[int, bool] = {}

    def body(mesh: Mesh) -> None:
        rank = mesh["data"].rank
        model = shardwise.shard(make_model(), mesh, stage=3, keep_last_unit=False)
        optimizer = sgd(model)
        before = {name: value.clone() for name, value in shardwise.local_parameters(model).items()}
        x = rows(rank)
        for layer in (model[0], model[1]) if rank else (model[1], model[0]):
            x = layer(x)
        try:
            x.sum().backward()
            optimizer.step()
        finally:
            after = shardwise.local_parameters(model)
            untouched[rank] = all(torch.equal(before[name], value) for name, value in after.items())

    errors = run_ranks(2, body, match="order", timeout=5, return_exceptions=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    for error in errors:
        assert "step 0" in str(error)
        assert "rank 0 gathered 1" in str(error)
    assert untouched == {0: True, 1: True}


def test_no_rank_updates_when_ranks_reduced_unlike_windows() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(layers=1), mesh, stage=2)
        optimizer = sgd(model)
        for number in range(2):
            with shardwise.no_sync(model, reduce=bool(mesh["data"].rank) and not number):
                loss_of(model, rows(number)).backward()
        optimizer.step()

    errors = run_ranks(2, body, match="order", timeout=5, return_exceptions=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2


def test_no_rank_updates_when_ranks_reduced_in_unlike_orders() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=0)
        optimizer = sgd(model)
        runtime = Managed.of(model).runtime
        order = [0, 1, 2] if mesh["data"].rank else [1, 0, 2]
        runtime.schedule = runtime.schedule.agreed(tuple(Begin(index + 1) for index in order))
        loss_of(model, rows(0)).backward()
        optimizer.step()

    errors = run_ranks(2, body, match="order", timeout=5, return_exceptions=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    assert "rank 0 finalized 0; rank 1 finalized 1" in str(errors[0])


def test_ranks_at_unlike_steps_are_named() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=0)
        loss_of(model, rows(0)).backward()
        Managed.of(model).runtime.num_steps += mesh["data"].rank
        shardwise.clip_grad_norm_(model, 1.0)

    both_raise(body, RankMismatchError, r"different steps \(rank 0: 0, rank 1: 1\)")


def test_unlike_models_are_refused_before_anything_is_sent() -> None:
    def body(mesh: Mesh) -> None:
        model = make_model()
        if mesh["data"].rank:
            model[1].bias.requires_grad_(False)
        shardwise.shard(model, mesh, stage=0)

    both_raise(body, RankMismatchError, "disagree on the model.*1.bias")


@all_stages
def test_ranks_start_from_the_values_of_rank_zero(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = make_model()
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())  # not contiguous
        with torch.no_grad():
            model[1].weight.add_(mesh["data"].rank)
            model[2].weight.add_(mesh["data"].rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            shardwise.shard(model, mesh, stage=stage)
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, dict(make_model().named_parameters()))


def test_unlike_initial_values_are_refused_when_told_so() -> None:
    def body(mesh: Mesh) -> None:
        model = make_model(scale=1.0 + mesh["data"].rank)
        shardwise.shard(model, mesh, initial_values="verify")

    both_raise(body, RankMismatchError, "start from different values: 6 of 6 parameters, first 0.weight")


# Autograd


@all_stages
def test_backward_after_a_step_is_refused(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        late = loss_of(model, rows(0))
        loss_of(model, rows(0)).backward()
        optimizer.step()
        late.backward()

    both_raise(body, RuntimeError, "changed between forward and backward|modified by an inplace operation")


@pytest.mark.parametrize("stage", [0, 3])
def test_backward_after_an_edit_is_refused(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        late = loss_of(model, rows(0))
        with shardwise.unsharded(model), torch.no_grad():
            model[2].weight.mul_(2)
        late.backward()

    both_raise(body, RuntimeError, "changed between forward and backward|modified by an inplace operation")


@all_stages
def test_saved_activation_modified_in_place_is_refused(stage: int) -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.exp(self.layer(x))
            out = hidden.sin()
            hidden.add_(1)
            return out

    def body(mesh: Mesh) -> None:
        model = shardwise.shard(Bad(), mesh, stage=stage, initial_values="broadcast")
        model(rows(0)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # unlike initial values
        both_raise(body, RuntimeError, "modified by an inplace operation")


def test_saved_weights_survive_the_release_of_their_unit() -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=3, keep_last_unit=False)
        losses = [loss_of(model, rows(mesh["data"].rank)), loss_of(model, rows(5))]
        for loss in losses[::-1]:
            (loss / 2).backward()
        return shardwise.full_gradients(model)

    plain = make_model()
    for rank in range(2):
        ((loss_of(plain, rows(rank)) + loss_of(plain, rows(5))) / 4).backward()
    for grads in run2(body):
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


def test_loss_that_bypasses_the_outputs_of_a_unit_gathers_its_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(SideLoss() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return layer_losses(self)

    class SideLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(layers=2)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept[:] = [loss_of(self.inner, x)]
            return x * 2

    def layer_losses(net: Net) -> Tensor:
        return torch.stack([layer.kept[0] for layer in net.layers]).sum()

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(Net(), mesh, stage=3, units=SideLoss, keep_last_unit=False)
        model(rows(mesh["data"].rank)).backward()
        return shardwise.full_gradients(model)

    plain = Net()
    for rank in range(2):
        (plain(rows(rank)) / 2).backward()
    for grads in run2(body):
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


def test_saved_tensor_hooks_of_others_see_activations_and_no_weights() -> None:
    def body(mesh: Mesh) -> tuple[int, dict[str, Tensor]]:
        model = shardwise.shard(make_model(), mesh, stage=3)
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, rows(mesh["data"].rank))
        loss.backward()
        return len([t for t in packed if t.shape == (WIDTH, WIDTH)]), shardwise.full_gradients(model)

    plain = make_model()
    for rank in range(2):
        (loss_of(plain, rows(rank)) / 2).backward()
    for num_weights, grads in run2(body):
        assert num_weights == 0
        assert_close(grads, {name: param.grad for name, param in plain.named_parameters()})


def test_double_backward_is_refused_outside_unsharded() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=3)
        loss_of(model, rows(0)).backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, about reference cycles
        both_raise(body, StateError, "create_graph=True")


def test_sparse_gradients_are_refused() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(nn.Sequential(nn.Embedding(4, WIDTH, sparse=True)), {}, stage=0)
        model(torch.tensor([1])).sum().backward()

    both_raise(body, StateError, "sparse", num_ranks=1)


def test_autocast_copies_follow_refilled_weights() -> None:
    def body(mesh: Mesh) -> list[Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=3, keep_last_unit=False)
        optimizer = sgd(model)
        x = rows(mesh["data"].rank)
        outputs = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                out = model(x)
                outputs.append(out.detach())
                out.float().pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return outputs

    for first, second in run2(body):
        assert not torch.equal(first, second)


@all_stages
def test_failed_backward_is_forgotten_and_training_goes_on(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)

        def fail(grad: Tensor) -> None:
            raise ArithmeticError("on purpose")

        hidden = model[0](rows(0))
        hidden.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss_of(model[1:], hidden).backward()
        with pytest.raises(StateError, match="ended with an error"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rows(mesh["data"].rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = ledger(model).now
        assert held[Kind.GRAD] == held[Kind.STAGING] == 0
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, plain_sgd())


@all_stages
def test_failed_backward_without_zero_grad_warns_and_discards(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)

        def fail(grad: Tensor) -> None:
            raise ArithmeticError("on purpose")

        hidden = model[0](rows(0))
        hidden.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss_of(model[1:], hidden).backward()
        assert Managed.of(model).runtime.in_backward
        loss_of(model, rows(mesh["data"].rank)).backward()
        optimizer.step()
        return shardwise.full_parameters(model)

    with pytest.warns(UserWarning, match="the last backward ended with an error"):
        found = run2(body)
    for params in found:
        assert_close(params, plain_sgd())


# The model and its parameters between steps


def test_released_parameters_cannot_be_misread() -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=3)
        model(rows(0))
        for read in (lambda p: p + 1, lambda p: p.sum(), repr, lambda p: p.numpy(), lambda p: p.detach().clone()):
            with pytest.raises(StateError, match=r"0\.weight"):
                read(model[0].weight)
        assert model[0].weight.shape == (WIDTH, WIDTH)
        with shardwise.unsharded(model):
            model(rows(0))  # what is pinned is not freed after use
            assert torch.equal(model[0].weight, make_model()[0].weight)
        with pytest.raises(StateError, match=r"0\.weight"):
            model[0].weight.sum()

    run2(body)


@all_stages
def test_writes_outside_unsharded_are_refused(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        with torch.no_grad(), pytest.raises(StateError, match="master copy"):
            model[0].weight.mul_(2)
        with pytest.raises(StateError, match=r"\.data"):
            model[0].weight.data = torch.zeros(WIDTH, WIDTH)

    run2(body)


@all_stages
def test_pending_gradients_do_not_read_as_none(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        loss_of(model, rows(0)).backward()
        with pytest.raises(StateError, match="clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(StateError, match="full_gradients"):
            model[0].weight.grad.clone()
        model.zero_grad()
        assert model[0].weight.grad is None
        assert ledger(model).now[Kind.STAGING] == 0
        assert not any(bool(grad.any()) for grad in shardwise.full_gradients(model).values())
        optimizer = sgd(model)
        loss_of(model, rows(0)).backward()
        assert model[0].weight.grad is not None
        optimizer.zero_grad()
        assert model[0].weight.grad is None

    run2(body)


@all_stages
def test_edits_of_any_rank_reach_every_rank_and_masters_keep_their_bits(stage: int) -> None:
    start = torch.full((WIDTH, WIDTH), 1.0 + 2**-12)  # 1.0 in bf16

    def body(mesh: Mesh) -> tuple[Tensor, ...]:
        model = make_model()
        with torch.no_grad():
            model[0].weight.copy_(start)
        shardwise.shard(model, mesh, stage=stage, precision=Precision(param=torch.bfloat16))
        with shardwise.unsharded(model), torch.no_grad():
            model[0].weight[0] = 3.0
            model[1].weight.fill_(float(5 + mesh["data"].rank))
        with shardwise.unsharded(model, writes=False):
            seen = model[1].weight.detach().clone()
        full = shardwise.full_parameters(model)
        return full["0.weight"], full["1.weight"], seen

    (first, edited, seen), (other_first, other_edited, other_seen) = run2(body)
    assert torch.equal(first, other_first)
    assert torch.equal(edited, other_edited)
    assert torch.equal(seen, other_seen)
    assert torch.equal(edited, seen.float())
    assert first[0].eq(3.0).all()
    assert torch.equal(first[1:], start[1:])
    assert set(edited.unique().tolist()) <= {5.0, 6.0}


def test_parameter_edited_in_its_own_forward_is_refused() -> None:
    class Edits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    def body(mesh: Mesh) -> None:
        shardwise.shard(nn.Sequential(Edits(3, 3)), {}, stage=3)(torch.ones(1, 3))

    both_raise(body, StateError, "changed in place during its forward", num_ranks=1)


@all_stages
def test_changed_trees_are_refused(stage: int) -> None:
    def added(model: nn.Sequential) -> None:
        model.append(nn.Linear(WIDTH, WIDTH))

    def replaced(model: nn.Sequential) -> None:
        model[1] = nn.Linear(WIDTH, WIDTH)

    def rewired(model: nn.Sequential) -> None:
        model[1].bias = None

    def swapped(model: nn.Sequential) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            model[1].weight.data = torch.zeros(WIDTH, WIDTH)

    def body(mesh: Mesh) -> None:
        for change, words in (
            (added, "parameters .*3.weight.* are not managed"),
            (replaced, "changed after shard|replaced after shard"),
            (rewired, "removed from 1"),
            (swapped, "memory of parameter 1.weight was replaced"),
        ):
            model = shardwise.shard(make_model(), mesh, stage=stage)
            change(model)
            with pytest.raises(StateError, match=words):
                model(rows(0))

    run2(body)


@all_stages
def test_parameters_unfreeze_while_training(stage: int) -> None:
    def train(model: nn.Module, optimizer: Any, rank: int, shares: int) -> None:
        for step in range(4):
            if step == 2:
                model[0].weight.requires_grad_(True)
                model[1].weight.requires_grad_(False)
            for share in range(shares):
                (loss_of(model, rows(rank + share, step)) / shares).backward()
            optimizer.step()
            optimizer.zero_grad()

    def start() -> nn.Sequential:
        model = make_model()
        model[0].weight.requires_grad_(False)
        return model

    plain = start()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), 0, 2)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(start(), mesh, stage=stage)
        optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model)
        train(model, optimizer, mesh["data"].rank, 1)
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


def test_units_with_a_parameter_frozen_later_are_freed_inside_the_backward() -> None:
    def body(mesh: Mesh) -> tuple[int, int]:
        model = shardwise.shard(make_model(layers=6), mesh, stage=3)
        peaks = []
        for frozen in (False, True):
            for layer in model:
                layer.bias.requires_grad_(not frozen)
            ledger(model).reset_peak()
            loss_of(model, rows(mesh["data"].rank)).backward()
            peaks.append(ledger(model).peak[Kind.GATHERED])
            model.zero_grad()
        return peaks[0], peaks[1]

    alone, frozen = run2(body)[0]
    assert alone == frozen < 4 * 512


@all_stages
def test_plain_model_comes_back(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        loss_of(model, rows(mesh["data"].rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = ledger(model)
        shardwise.unshard_model(model)
        assert held.total_bytes == 0
        assert type(model[0].weight) is nn.Parameter
        return {name: param.detach() for name, param in model.named_parameters()}

    for found in run2(body):
        assert_close(found, plain_sgd())


# The optimizer


@all_stages
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_non_finite_gradient_of_one_rank_decides_on_all(stage: int, bad_rank: int) -> None:
    def body(mesh: Mesh) -> None:
        rank = mesh["data"].rank

        def fill(model: nn.Module) -> None:
            x = rows(rank)
            if rank == bad_rank:
                x[0, 0] = math.inf
            loss_of(model, x).backward()

        for choice in ("raise", "skip", "ignore"):
            model = shardwise.shard(make_model(), mesh, stage=stage)
            optimizer = sgd(model, on_nonfinite=choice)
            before = shardwise.full_parameters(model)
            fill(model)
            assert not math.isfinite(shardwise.clip_grad_norm_(model, 1.0))
            if choice == "raise":
                with pytest.raises(NonFiniteError, match=r"step 0: .*first in 0\.weight"):
                    optimizer.step()
            else:
                optimizer.step()
            assert optimizer.step_was_applied == (choice == "ignore")
            assert optimizer.first_nonfinite == "0.weight"
            after = shardwise.full_parameters(model)
            same = [name for name in before if torch.equal(before[name], after[name])]
            assert same == ([] if choice == "ignore" else list(before))
            optimizer.zero_grad()
            loss_of(model, rows(rank)).backward()
            if choice != "ignore":
                optimizer.step()
                assert optimizer.step_was_applied
                assert optimizer.first_nonfinite is None
                assert_close(shardwise.full_parameters(model), plain_sgd())
            if choice == "raise":
                fill(model)
                with pytest.raises(NonFiniteError, match="step 2: "):
                    optimizer.step()

    run2(body)


@all_stages
def test_finite_gradients_have_a_finite_norm_of_any_order(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(layers=1), mesh, stage=stage)
        factor = 1e30 * (mesh["data"].rank + 1)
        (model(torch.ones(1, WIDTH)).sum() * factor).backward()
        gradients = shardwise.full_gradients(model)
        flat = torch.cat([grad.reshape(-1) for grad in gradients.values()]).double()
        assert bool((flat == flat[0]).all())
        assert float(flat[0]) == pytest.approx(1.5e30)
        largest = float(flat[0])  # in fp64 the squares are finite, the tenth powers are not
        for order in (2.0, 1.0, 11.0, math.inf):
            norm = shardwise.clip_grad_norm_(model, math.inf, order)
            wanted = largest * float(torch.linalg.vector_norm(flat / largest, order))
            assert float(norm) == pytest.approx(wanted, rel=1e-12)
        with pytest.raises(ConfigError):
            shardwise.clip_grad_norm_(model, 1.0, 0.0)

    run2(body)


@all_stages
def test_norm_after_clipping_is_the_limit(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        loss_of(model, rows(mesh["data"].rank)).backward()
        before = shardwise.clip_grad_norm_(model, math.inf)
        limit = float(before) / 4
        assert float(shardwise.clip_grad_norm_(model, limit)) == float(before)
        squares = sum(float(grad.double().pow(2).sum()) for grad in shardwise.full_gradients(model).values())
        assert math.sqrt(squares) == pytest.approx(limit, rel=1e-5)
        assert float(shardwise.clip_grad_norm_(model, math.inf)) == pytest.approx(limit, rel=1e-5)
        loss_of(model, rows(mesh["data"].rank)).backward()  # the norm follows what arrives later
        assert float(shardwise.clip_grad_norm_(model, math.inf)) > 2 * limit
        shardwise.clip_grad_value_(model, 1e-3)
        assert max(float(grad.abs().max()) for grad in shardwise.full_gradients(model).values()) == pytest.approx(1e-3)
        assert float(shardwise.clip_grad_norm_(model, math.inf)) < limit

    run2(body)


@all_stages
def test_parameters_that_no_rank_used_are_not_decayed(stage: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.once, self.never = make_model()

        def forward(self, x: Tensor, first: bool) -> Tensor:
            x = self.used(x)
            return x + self.once.weight.sum() * 0.01 if first else x * 1.0  # a gather order all ranks share

    def train(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for step in range(2):
            for rank in ranks:
                ((model(rows(rank, step), rank == 0) - 1).pow(2).mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    plain = Net()
    train(plain, optimizer_of(plain), [0, 1])
    assert torch.equal(plain.never.weight, Net().never.weight)
    assert not torch.equal(plain.once.weight, Net().once.weight)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(Net(), mesh, stage=stage, units=["used"])
        train(model, shardwise.shard_optimizer(optimizer_of(model), model), [mesh["data"].rank])
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


@all_stages
def test_two_optimizers_keep_their_gradients_apart(stage: int) -> None:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        weights = [p for p in model.parameters() if p.dim() == 2]
        biases = [p for p in model.parameters() if p.dim() == 1]
        return [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.2)]

    def train(model: nn.Module, first: Any, second: Any, ranks: list[int]) -> None:
        for step in range(3):
            for rank in ranks:
                (loss_of(model, rows(rank, step)) / len(ranks)).backward()
            first.step()
            first.zero_grad()
            if step == 1:  # biases collect two backwards
                second.step()
                second.zero_grad()

    plain = make_model()
    train(plain, *build(plain), [0, 1])

    def body(mesh: Mesh) -> dict[str, Tensor]:
        probe = Instruments("late")  # a refresh is in flight when the second optimizer steps
        model = shardwise.shard(make_model(), mesh, stage=stage, lanes=probe.lanes, arena=probe.arena)
        optimizers = [shardwise.shard_optimizer(each, model, partial=True) for each in build(model)]
        train(model, *optimizers, [mesh["data"].rank])
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


@all_stages
@pytest.mark.parametrize("reduce", [False, True])
def test_zero_grad_of_one_optimizer_keeps_local_gradients_of_the_other(stage: int, reduce: bool) -> None:
    def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        weights = [p for p in model.parameters() if p.dim() == 2]
        biases = [p for p in model.parameters() if p.dim() == 1]
        return torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.2)

    plain = make_model()
    first, second = parts(plain)
    for rank in range(2):
        (loss_of(plain, rows(rank, 0)) / 2).backward()
    first.zero_grad()
    for rank in range(2):
        (loss_of(plain, rows(rank, 1)) / 2).backward()
    first.step()
    second.step()

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        first, second = (shardwise.shard_optimizer(each, model, partial=True) for each in parts(model))
        with shardwise.no_sync(model, reduce=reduce):
            loss_of(model, rows(mesh["data"].rank, 0)).backward()
            first.zero_grad()
        loss_of(model, rows(mesh["data"].rank, 1)).backward()
        first.step()
        second.step()
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, {name: param.detach() for name, param in plain.named_parameters()})


def test_optimizers_that_would_miss_or_mistake_parameters_are_refused() -> None:
    model = shardwise.shard(make_model(), {}, stage=3, force_collectives=True)
    params = list(model.parameters())
    for made, words in (
        (torch.optim.SGD(params[:-1], lr=0.1), r"1 trainable parameters are in no group.*2\.bias"),
        (torch.optim.SGD([*params, nn.Parameter(torch.ones(1))], lr=0.1), "no parameter of the sharded model"),
        (torch.optim.LBFGS(params), "LBFGS"),
    ):
        with pytest.raises(ConfigError, match=words):
            shardwise.shard_optimizer(made, model)
    used = torch.optim.Adam(params)
    used.state[params[0]]["step"] = torch.ones(())
    with pytest.raises(ConfigError, match="has state"):
        shardwise.shard_optimizer(used, model)
    counting = torch.optim.SGD(params, lr=0.1)
    counting.state["calls"] = 0
    with pytest.raises(ConfigError, match="has state"):
        shardwise.shard_optimizer(counting, model)
    assert counting.state == {"calls": 0}
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match="sharded already"):
        shardwise.shard_optimizer(optimizer, model)
    with pytest.raises(ConfigError, match="belong to a parameter group already"):
        optimizer.add_param_group({"params": [params[0]]})
    with pytest.raises(StateError, match="sharded already"):
        shardwise.shard(model, {})


def test_optimizer_state_of_another_rank_is_refused() -> None:
    states: dict[int, Any] = {}

    def body(mesh: Mesh) -> None:
        rank = mesh["data"].rank
        model = shardwise.shard(make_model(), mesh, stage=1)
        optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        loss_of(model, rows(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        states[rank] = optimizer.state_dict()
        shardwise.full_parameters(model)  # both ranks have left theirs
        optimizer.load_state_dict(states[rank])
        with pytest.raises(StateError, match="one rank's fragments"):
            optimizer.load_state_dict(states[1 - rank])

    run2(body)


@all_stages
def test_closure_is_run_once_before_the_gradients_are_settled(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        calls = []

        def closure() -> Tensor:
            calls.append(1)
            loss = loss_of(model, rows(mesh["data"].rank))
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
        assert len(calls) == 1
        return shardwise.full_parameters(model)

    for found in run2(body):
        assert_close(found, plain_sgd())


@all_stages
def test_fp16_skips_overflows_on_all_ranks_and_unscales_the_rest(stage: int) -> None:
    rule = LossScale(initial=2.0**14, growth_interval=2, hysteresis=1)

    def body(mesh: Mesh) -> None:
        rank = mesh["data"].rank
        model = shardwise.shard(
            make_model(), mesh, stage=stage, precision=Precision(param=torch.float16, loss_scale=rule)
        )
        optimizer = sgd(model)
        scaler = Managed.of(model).runtime.scaler
        assert scaler is not None
        loss_of(model, rows(rank, dtype=torch.float16)).backward()
        with pytest.raises(StateError, match="scale_loss"):
            optimizer.step()
        optimizer.zero_grad()
        scales, norms = [], []
        for step in range(4):
            x = rows(rank, dtype=torch.float16)
            if step == 1 and rank == 1:
                x *= 4000
            shardwise.scale_loss(model, loss_of(model, x)).backward()
            norms.append(float(shardwise.clip_grad_norm_(model, math.inf)))
            optimizer.step()
            assert optimizer.step_was_applied == (step != 1)
            optimizer.zero_grad()
            scales.append(scaler.scale)
        assert scales == [2.0**14, 2.0**13, 2.0**13, 2.0**14]
        assert norms[0] == pytest.approx(wanted, rel=1e-2)

    plain = make_model()
    (sum(loss_of(plain, rows(rank)) for rank in range(2)) / 2).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf))
    run2(body)


@all_stages
def test_grad_scaler_of_torch_is_refused(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, rows(0)))
        with pytest.raises(StateError, match=r"torch\.amp\.GradScaler does not see"):
            scaler.step(optimizer)  # no gradient is there to be looked at
        scaler.scale(loss_of(model, rows(0))).backward()
        with pytest.raises(StateError, match=r"scale_loss instead of a GradScaler"):
            scaler.step(optimizer)

    run2(body)


# Sums


def test_mean_is_summed_in_rank_order() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 3.0, 3.0, 3.0, -1e8)]
    out = torch.zeros(1)
    rank_order_mean(parts, out, sum=torch.float32)
    total = torch.tensor(0.0)
    for part in parts:
        total = total + part
    assert out.item() == total.item() / 5
    assert out.item() != sum(part.item() for part in parts[::-1]) / 5
    rank_order_mean(parts, out, sum=torch.float64)
    assert out.item() == pytest.approx(9 / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(4))
def test_mean_may_replace_any_of_its_parts(number: int, dtype: torch.dtype) -> None:
    parts = [torch.tensor([value, -value], dtype=dtype) for value in (1.0, 2.0, 4.0, 9.0)]
    kept = [part.clone() for part in parts]
    rank_order_mean(parts, parts[number].view(-1), sum=torch.float32)
    assert parts[number].tolist() == [4.0, -4.0]
    assert all(torch.equal(parts[i], kept[i]) for i in range(4) if i != number)


@pytest.mark.parametrize("number", range(3))
def test_mean_does_not_depend_on_blocks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randn(10, generator=generator).to(torch.bfloat16) for _ in range(3)]
        rank_order_mean(parts, parts[number], sum=torch.float32)
        return parts[number]

    whole = mean()
    monkeypatch.setattr("shardwise.comm.base.BLOCK_NUMEL", 4)
    assert torch.equal(mean(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_widens_one_block_at_a_time(dtype: torch.dtype) -> None:
    parts = [torch.ones(2 * BLOCK_NUMEL + 1, dtype=torch.bfloat16) for _ in range(3)]
    out = torch.empty(parts[0].numel(), dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        rank_order_mean(parts, out, sum=torch.float32)
    assert max(event.self_cpu_memory_usage for event in profiler.events()) == 4 * BLOCK_NUMEL
    assert out.eq(1).all()


def test_walk_knows_where_a_unit_was_used_first_and_last() -> None:
    walk = Walk((Begin(0), End(0), Begin(1), End(1), Begin(0), End(0)))
    assert (walk.first_begin, walk.last_end) == ({0: 0, 1: 2}, {0: 5, 1: 3})


def test_gradients_are_rounded_to_the_wire_and_summed_wider() -> None:
    values = (1.0 + 2**-7, 2.0**-9, 2.0**-9)  # bf16 holds each; their sum in bf16 loses the small ones

    def body(mesh: Mesh) -> float:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        shardwise.shard(model, mesh, stage=2, precision=Precision(wire=torch.bfloat16))
        extra = 2.0**-20  # lost on the wire
        (model(torch.ones(1, 1)) * (values[mesh["data"].rank] + extra)).sum().backward()
        return float(shardwise.full_gradients(model)["weight"])

    assert run_ranks(3, body, timeout=5) == [float(torch.tensor(sum(values)) / 3)] * 3


@all_stages
def test_gradient_replaced_through_data_lasts_one_step(stage: int) -> None:
    plain = make_model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    def halve(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad.data = param.grad.data * 0.5

    reference.register_step_pre_hook(halve)
    for step in range(3):
        (sum(loss_of(plain, rows(rank, step)) for rank in range(2)) / 2).backward()
        reference.step()
        reference.zero_grad()

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(make_model(), mesh, stage=stage)
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(halve)
        for step in range(3):
            loss_of(model, rows(mesh["data"].rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return shardwise.full_parameters(model)

    assert_close(run2(body)[0], {name: param.detach() for name, param in plain.named_parameters()})
