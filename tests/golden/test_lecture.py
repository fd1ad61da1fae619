"""Published numbers, reproduced by running the engine: CMU 11-868, lecture 18, sections 2.5 and 3.1, exercise 6.

The lecture's model has 14 layers, 52,552 parameters, the largest layer 4,160. It trains with Adam on four ranks, with
bf16 parameters and gradients and fp32 masters and moments. The lecture packs without gaps, hence ``align=1``.
"""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import Precision
from shardwise.comm.base import Mesh, Verb
from shardwise.comm.recording import record
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.planner.balance import greedy_loads
from shardwise.planner.communication import step_elements
from shardwise.planner.memory import MemoryPlan
from shardwise.planner.ways import Ways
from shardwise.sharding import stage_sharding
from shardwise.testing.ranks import run_ranks

NUM_RANKS = 4
NUM_PARAMS = 52_552
LARGEST_LAYER = 4_160
LAST_LAYER = 520
BF16 = Precision(param=torch.bfloat16, wire=torch.bfloat16, accumulate=torch.bfloat16, master=torch.float32)
AT_REST = {
    0: {"param": 105_104, "master": 210_208, "grad": 105_104, "optim": 420_416},
    1: {"param": 105_104, "master": 52_552, "grad": 105_104, "optim": 105_104},
    2: {"param": 105_104, "master": 52_552, "grad": 26_276, "optim": 105_104},
    3: {"param": 26_276, "master": 52_552, "grad": 26_276, "optim": 105_104},
}


def mlp() -> nn.Sequential:
    """32 -> 64, twelve times 64 -> 64, 64 -> 8."""
    generator = torch.Generator().manual_seed(18)
    widths = [32, *[64] * 13, 8]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for param in model.parameters():
            scale = param.shape[1] ** -0.5 if param.dim() == 2 else 0.01
            param.copy_(torch.randn(param.shape, generator=generator) * scale)
    return model


def plan_of(stage: int) -> MemoryPlan:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 64), *(nn.Linear(64, 64) for _ in range(12)), nn.Linear(64, 8))
    return shardwise.plan(
        model, NUM_RANKS, stage=stage, units=nn.Linear, align=1, precision=BF16, optimizer=torch.optim.Adam
    )


@dataclass(frozen=True, kw_only=True)
class Account:
    """One rank's third step."""

    at_rest: dict[str, int]
    planned: dict[str, int]
    sent: dict[Verb, int]  # elements
    peak_forward: dict[Kind, int]
    peak_backward: dict[Kind, int]  # forward included
    peak_backward_total: int
    rest_after_backward: int
    peak_step: dict[Kind, int]
    after_zero_grad: dict[Kind, int]


def accounts(stage: int, *, keep_last_unit: bool = True, overlap: bool = True) -> list[Account]:
    """Each rank's third step, with the default overlap or with none."""
    return _accounts(stage, keep_last_unit, overlap)


@functools.cache
def _accounts(stage: int, keep_last_unit: bool, overlap: bool) -> list[Account]:
    options = {} if overlap else {"prefetch": 0, "reductions_in_flight": 0}

    def body(mesh: Mesh) -> Account:
        recorded, log = record(mesh)
        model = shardwise.shard(
            mlp(),
            recorded,
            stage=stage,
            units=nn.Linear,
            align=1,
            precision=BF16,
            keep_last_unit=keep_last_unit,
            **options,
        )
        optimizer = shardwise.shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
        generator = torch.Generator().manual_seed(mesh["data"].rank)
        ledger = Managed.of(model).runtime.means.arena.ledger
        for _ in range(3):
            log.clear()
            ledger.reset_peak()
            batch = torch.randn(4, 32, generator=generator).bfloat16()
            loss = model(batch).float().pow(2).mean()
            peak_forward = dict(ledger.peak)
            loss.backward()
            peak_backward, peak_total = dict(ledger.peak), ledger.peak_total_bytes
            rest = ledger.total_bytes
            ledger.reset_peak()
            optimizer.step()
            peak_step, at_rest = dict(ledger.peak), shardwise.measured_bytes(model)
            optimizer.zero_grad()
        return Account(
            at_rest=at_rest,
            planned=plan_of(stage).of_rank(mesh["data"].rank),
            sent=log.elements_by_verb(),
            peak_forward=peak_forward,
            peak_backward=peak_backward,
            peak_backward_total=peak_total,
            rest_after_backward=rest,
            peak_step=peak_step,
            after_zero_grad=dict(ledger.now),
        )

    return run_ranks(NUM_RANKS, body)


def sent_without_record(account: Account) -> int:
    return sum(count for verb, count in account.sent.items() if verb is not Verb.RECORD)


def test_lecture_model_has_the_published_size() -> None:
    layers = [sum(p.numel() for p in layer.parameters()) for layer in mlp() if isinstance(layer, nn.Linear)]
    assert (len(layers), sum(layers), max(layers), layers[-1]) == (14, NUM_PARAMS, LARGEST_LAYER, LAST_LAYER)


@pytest.mark.parametrize(("stage", "total"), [(0, 840_832), (1, 367_864), (2, 289_036), (3, 210_208)])
def test_bytes_at_rest_are_those_of_the_lecture(stage: int, total: int) -> None:
    for account in accounts(stage):
        assert account.at_rest == AT_REST[stage]
        assert sum(account.at_rest.values()) == total
        assert account.planned == account.at_rest
        assert account.after_zero_grad[Kind.GRAD] == 0


@pytest.mark.parametrize(
    ("stage", "keep_last_unit", "elements"),
    [
        (0, True, 78_828),
        (1, True, 78_828),
        (2, True, 78_828),
        (3, False, 118_242),
        (3, True, 117_852),
    ],
)
def test_elements_sent_are_those_of_the_lecture(stage: int, keep_last_unit: bool, elements: int) -> None:
    verbs = {
        0: {Verb.FINALIZE_SCATTER, Verb.FINALIZE_GATHER},
        1: {Verb.FINALIZE_SCATTER, Verb.REFRESH},
        2: {Verb.REDUCE, Verb.REFRESH},
        3: {Verb.REDUCE, Verb.UNSHARD},
    }
    ways = Ways.over(stage_sharding(stage), NUM_RANKS)
    assert step_elements(NUM_PARAMS, ways, kept_numel=LAST_LAYER if keep_last_unit else 0) == elements
    for account in accounts(stage, keep_last_unit=keep_last_unit):
        assert sent_without_record(account) == elements
        assert set(account.sent) == verbs[stage] | {Verb.RECORD}
        # 3 peers x (5 words + 1 of flags for 28 parameters, 14 buckets, 15 units + 14 norms)
        assert account.sent[Verb.RECORD] == 3 * 20


@pytest.mark.parametrize(
    ("stage", "keep_last_unit", "over_rest"), [(2, True, 7_264), (3, True, 13_504), (3, False, 13_504)]
)
def test_transients_stay_within_one_layer_without_overlap(stage: int, keep_last_unit: bool, over_rest: int) -> None:
    one_layer = LARGEST_LAYER * 2
    assert plan_of(3).largest_unit_bytes == one_layer
    for account in accounts(stage, keep_last_unit=keep_last_unit, overlap=False):
        gathered = one_layer if stage == 3 else 0
        assert account.peak_forward[Kind.GATHERED] == gathered
        assert account.peak_forward[Kind.STAGING] == 0
        assert account.peak_backward[Kind.GATHERED] == gathered
        assert account.peak_backward[Kind.STAGING] == one_layer
        # The ledger does not count what torch allocates: the optimizer's state is the same before and after.
        assert account.rest_after_backward == sum(AT_REST[stage].values()) - AT_REST[stage]["optim"]
        # Reached at the second layer, when the first layer's gradients do not rest yet (1,056 bytes), and at stage 3
        # while its own do not either (2,080): one layer of gradients, and at stage 3 one of parameters, less these.
        assert account.peak_backward_total - account.rest_after_backward == over_rest


def test_transients_with_overlap_are_those_in_flight() -> None:
    one_layer = LARGEST_LAYER * 2
    for stage in range(4):
        for account in accounts(stage):
            # one unit computes, one is gathered ahead
            assert account.peak_backward[Kind.GATHERED] == (2 * one_layer if stage == 3 else 0)
            # one unit's gradients arrive, two reductions are in flight
            assert account.peak_backward[Kind.STAGING] == (3 * one_layer if stage >= 2 else 0)


@pytest.mark.parametrize(("stage", "elements"), [(0, 52_552), (1, 13_138), (2, 13_138), (3, 13_138)])
def test_step_casts_the_owned_gradients_to_fp32_and_no_more(stage: int, elements: int) -> None:
    for account in accounts(stage):
        assert account.peak_step[Kind.STAGING] == elements * 4
        assert account.peak_step[Kind.GATHERED] == 0
        assert account.after_zero_grad[Kind.STAGING] == 0


@pytest.mark.parametrize("precision", [BF16, pytest.param(Precision(), marks=pytest.mark.matrix)], ids=["bf16", "fp32"])
def test_ten_steps_are_bit_identical_at_all_stages(precision: Precision) -> None:
    def train(stage: int) -> tuple[list[Tensor], list[Tensor]]:
        def body(mesh: Mesh) -> tuple[list[Tensor], list[Tensor]]:
            model = shardwise.shard(mlp(), mesh, stage=stage, units=nn.Linear, align=64, precision=precision)
            optimizer = shardwise.shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
            generator = torch.Generator().manual_seed(mesh["data"].rank)
            local = []
            for _ in range(10):
                batch = torch.randn(4, 32, generator=generator).to(precision.param or torch.float32)
                loss = model(batch).float().pow(2).mean()
                local.append(loss.detach())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return list(shardwise.full_parameters(model).values()), local

        first, *others = run_ranks(NUM_RANKS, body)
        for params, losses in others:
            assert all(torch.equal(a, b) for a, b in zip(params, first[0], strict=True))
            assert not torch.equal(torch.stack(losses), torch.stack(first[1])), "ranks saw the same data"
        return first

    expected, losses = train(0)
    start = [param.detach() for param in mlp().parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(expected, start, strict=True)), "a parameter never moved"
    for stage in (1, 2, 3):
        params, own_losses = train(stage)
        assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
        assert torch.equal(torch.stack(own_losses), torch.stack(losses))


class Sizes(nn.Module):
    """Vectors of the given lengths."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)

    def forward(self) -> Tensor:
        return torch.stack([vector.pow(2).sum() for vector in self.vectors]).sum()


@pytest.mark.parametrize(
    ("sizes", "greedy", "flat"), [([100, 60, 40], [100, 100], [100, 100]), ([100, 30, 20], [100, 50], [75, 75])]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flat_slices_balance_what_whole_tensors_cannot(
    sizes: list[int], greedy: list[int], flat: list[int], stage: int
) -> None:
    def body(mesh: Mesh) -> tuple[int, int]:
        model = shardwise.shard(Sizes(sizes), mesh, stage=stage, align=1)
        optimizer = shardwise.shard_optimizer(torch.optim.Adam(model.parameters()), model)
        model().backward()
        optimizer.step()
        owned = sum(part.numel() for part in shardwise.local_parameters(model).values())
        return owned, shardwise.measured_bytes(model)["optim"] // 4

    assert greedy_loads(sizes, 2) == greedy
    measured = run_ranks(2, body)
    assert [owned for owned, _ in measured] == flat
    assert [states for _, states in measured] == [2 * count for count in flat]
