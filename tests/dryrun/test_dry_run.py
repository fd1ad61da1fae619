"""A dry run needs what a run needs: the same bytes at the same moment, collective for collective."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.base import BLOCK_NUMEL, Key, Mesh, Verb, part
from shardwise.dryrun.hollow import SMALL_BYTES, Hollow
from shardwise.dryrun.live import Live
from shardwise.dryrun.run import DryRun, dry_run, mirrors, rehearse
from shardwise.errors import ConfigError, StateError
from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.models.gpt import loss as gpt_loss
from shardwise.testing.ranks import run_processes

SHAPE = GPTConfig(vocab=97, context=48, width=32, heads=2, depth=3)
WIDE = GPTConfig(vocab=32_000, context=1024, width=2048, heads=16, depth=4)


def tokens(rows: int, length: int, vocab: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make() -> tuple[Tensor, Tensor]:
        both = torch.randint(vocab, (2, rows, length), generator=torch.Generator().manual_seed(1))
        return both[0], both[1]

    return make


def language_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return gpt_loss(model(batch[0]), batch[1])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Dropout())
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).mean((2, 3)))


class Recomputed(nn.Module):
    """Blocks whose activations are computed again; the first and the last share a weight; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)) for _ in range(4))
        self.blocks[3][2].weight = self.blocks[0][0].weight
        self.blocks[1].requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            rows = checkpoint(block, rows, use_reentrant=False)
        return rows


def square(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Tensor]]] = {
    "gpt": (lambda: GPT(SHAPE), tokens(3, 48, 97), language_loss),
    "convolutions": (Convolutions, lambda: torch.ones(4, 3, 12, 12), square),
    "recomputed": (Recomputed, lambda: torch.ones(7, 40), square),
}
BF16 = shardwise.Precision(param=torch.bfloat16)
PRECISIONS = {"fp32": None, "bf16": BF16}


def both(name: str, num_ranks: Any, **options: Any) -> tuple[DryRun, DryRun]:
    made, batch, loss = CASES[name]
    mesh = mirrors(num_ranks, options.pop("rank", 0))
    runs = [rehearse(made, batch, loss, mesh, compute=compute, **options) for compute in (False, True)]
    return runs[0], runs[1]


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (1, 5), (2, 3), (3, 2), (3, 1)])
@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_needs_what_a_run_needs(name: str, stage: int, num_ranks: int) -> None:
    dry, real = both(name, num_ranks, stage=stage, rank=num_ranks - 1)
    assert dry == real
    assert dry.peak.bytes == sum(dry.peak.by_kind.values()) == sum(dry.peak.by_owner.values())
    assert dry.peak.by_kind["activation"] > 0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["gpt", "recomputed"])
def test_in_bf16_with_clipping(name: str, stage: int) -> None:
    dry, real = both(name, 3, stage=stage, precision=BF16, max_norm=1.0)
    assert dry == real
    assert dry.at_rest["master"] > 0


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_with_optimizers_and_two_axes(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    sharding = shardwise.hybrid("local")
    dry, real = both("gpt", {"node": 2, "local": 2}, rank=3, optimizer=optimizer, sharding=sharding)
    assert dry == real


def test_rest_is_what_the_plan_says() -> None:
    dry, _ = both("gpt", 4, stage=2, rank=1, units=Block)
    with torch.device("meta"):
        planned = shardwise.plan(GPT(SHAPE), 4, stage=2, units=Block).of_rank(1)
    scalars = dry.at_rest["optim"] - planned["optim"]  # step counters
    assert 0 <= scalars < 1000
    assert {kind: dry.at_rest.get(kind, 0) for kind in planned} == planned | {"optim": dry.at_rest["optim"]}


def test_a_large_model_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dry = dry_run(lambda: GPT(WIDE), tokens(8, 1024, 32_000), language_loss, 64, stage=3, units=Block)
    assert dry.peak.bytes > 8e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
    assert dry.peak.event.phase == "backward"
    assert dry.peak.event.operator == "aten._log_softmax_backward_data.default"
    matrices = 4 * 12 * 2048**2 + 32_000 * 2048
    attention = 4 * 4 * 8 * 1024**2 * 2048  # the whole square, as it is counted
    assert dry.flops["forward"] == 2 * matrices * 8 * 1024 + attention


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.lstm(rows)[0]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="mean")

    def forward(self, words: Tensor) -> Tensor:
        return self.bag(words)


class Frozen(nn.Module):
    """Batch norm by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8).eval()

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(self.layer(rows))


KERNELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "a workspace of the kernel's": (Recurrent, lambda: torch.ones(8, 100, 64)),
    "empty results": (lambda: nn.Linear(8, 8), lambda: torch.ones(0, 8)),
    "empty results of a bag": (Bag, lambda: torch.arange(40).view(8, 5)),
    "no statistics": (Frozen, lambda: torch.ones(6, 8)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_with_shapes_of_their_own(name: str) -> None:
    made, batch = KERNELS[name]
    mesh = mirrors(2, 0)
    dry, real = (
        rehearse(made, batch, lambda model, rows: model(rows).sum(), mesh, stage=3, compute=compute)
        for compute in (False, True)
    )
    assert dry == real


def test_mistakes_are_told_in_the_words_of_torch() -> None:
    with pytest.raises(ConfigError, match=r"must have same reduction dim|cannot be multiplied"):
        dry_run(lambda: nn.Linear(600, 600), lambda: torch.ones(600, 601), square, 2)
    with pytest.raises(StateError, match="sparse gradients"):
        dry_run(lambda: nn.Embedding(50, 8, sparse=True), lambda: torch.arange(6), square, 2)
    for wrong in ({"accumulation": 0}, {"accumulation": 1.5}, {"num_ranks": {}}):
        with pytest.raises(ConfigError):
            dry_run(lambda: nn.Linear(4, 4), lambda: torch.ones(2, 4), square, **wrong)


def test_records_of_a_thousand_ranks_are_not_hollow() -> None:
    layers = 100
    dry = dry_run(
        lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))),
        lambda: torch.ones(2, 4),
        square,
        1024,
        stage=3,
        units=nn.Linear,
        max_norm=1.0,
    )
    assert 2 * layers * 8 * 1024 > SMALL_BYTES  # a word of every parameter and rank
    assert dry.at_rest["param"] == layers * 64 * 4


def test_activations_may_be_larger_than_the_host() -> None:
    rows = 1 << 19
    dry = dry_run(lambda: nn.Linear(1, rows, bias=False), lambda: torch.ones(rows, 1), square, 2, stage=0)
    assert dry.peak.by_kind["activation"] >= rows * rows * 4


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "0", reason="the kernel promises any memory"
)
def test_a_parameter_larger_than_the_host_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match="no address space"):
        dry_run(lambda: nn.Linear(1 << 20, 1 << 20, bias=False), lambda: torch.ones(1, 1 << 20), square, 2, stage=0)


def test_a_shape_that_depends_on_data_is_an_error_by_name() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(600, 600)

        def forward(self, rows: Tensor) -> Tensor:
            out = self.layer(rows)
            return out[out > 0]

    with pytest.raises(ConfigError, match=r"aten.index.* cannot be known without data"):
        dry_run(Chooses, lambda: torch.ones(600, 600), square, 2)


def test_wrong_ranks_are_refused() -> None:
    made, batch, loss = CASES["recomputed"]
    with pytest.raises(ConfigError, match="no rank 2"):
        dry_run(made, batch, loss, 2, rank=2)
    with pytest.raises(ConfigError, match="positive number"):
        dry_run(made, batch, loss, 0)


MEASURED = [(stage, kind) for stage in range(4) for kind in PRECISIONS]


def measured(mesh: Mesh) -> list[DryRun]:
    made, batch, loss = CASES["gpt"]
    return [
        rehearse(made, batch, loss, mesh, compute=True, stage=stage, precision=PRECISIONS[kind])
        for stage, kind in MEASURED
    ]


@pytest.mark.timeout(120)
def test_real_processes_need_what_was_planned() -> None:
    made, batch, loss = CASES["gpt"]
    for rank, runs in enumerate(run_processes(2, measured)):
        for (stage, kind), real in zip(MEASURED, runs, strict=True):
            dry = dry_run(made, batch, loss, 2, rank=rank, stage=stage, precision=PRECISIONS[kind])
            assert dry == real, f"stage {stage} in {kind}"


@pytest.mark.parametrize(("rank", "num_blocks"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_a_sum_in_place_needs_a_block_from_the_third_rank_on(rank: int, num_blocks: int) -> None:
    live, fp32 = Live(), torch.float32
    with Hollow(live), torch.no_grad():
        comm, buffer = mirrors(4, rank)["data"], torch.empty(8 * BLOCK_NUMEL)
        work = comm.reduce_scatter(buffer, part(buffer, rank, 4), Key(0, Verb.REDUCE, 0, ""), wire=fp32, sum=fp32)
        assert work is not None
        start = len(live.changes)
        work.wait()
    assert [num_bytes for _, num_bytes in live.changes[start:] if num_bytes] == num_blocks * [4 * BLOCK_NUMEL]


def test_a_gradient_that_is_added_in_another_dtype_is_widened_where_it_counts() -> None:
    numel, precision = 37 * 53, shardwise.Precision(param=torch.bfloat16)

    def widened(accumulation: int) -> int:
        found = dry_run(
            lambda: nn.Linear(37, 53, bias=False),
            lambda: torch.ones(2, 37),
            lambda model, rows: square(model, rows.bfloat16()),
            2,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            accumulation=accumulation,
            stage=0,
            precision=precision,
        )
        return sum(num_bytes == 4 * numel for _, num_bytes in found.changes)

    assert widened(3) > widened(2) > widened(1)
