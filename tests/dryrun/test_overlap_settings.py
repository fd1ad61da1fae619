"""Prefetch, reductions in flight, unit size and a kept last unit move the planned peak exactly as the measured one.

The model is a chain of equal layers, so each move has a closed form. A real run computes and is counted with the same
eyes as a dry one: every setting in this process, some on processes over gloo.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh, Verb
from shardwise.dryrun.run import DryRun, dry_run, mirrors, rehearse
from shardwise.testing.ranks import run_processes

NUM_RANKS = 2
WIDTH = 48
UNIT_NUMEL = WIDTH * WIDTH  # divides by 2 x 64: no padding, and ranks need the same
ROWS = 2
FLOAT_BYTES = 4
PARAM_BYTES = {"fp32": 4, "bf16": 2}
PRECISIONS = {"fp32": None, "bf16": shardwise.Precision(param=torch.bfloat16)}


class Pair(nn.Module):
    """Two layers, so that a unit may be one layer or two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.pairs[0].layers[0].weight.dtype)
        for pair in self.pairs:
            rows = pair(rows)
        return rows


class Looked(nn.Module):
    """A chain after an embedding as large as a layer, which backward does not read unless somebody watches it."""

    def __init__(self, *, watched: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.chain = Chain()
        if watched:
            self.table.register_forward_hook(ignore)

    def forward(self, rows: Tensor) -> Tensor:
        return self.chain(self.table(rows.long()[:, 0]))


def ignore(*args: Any) -> None:
    pass


def watched() -> nn.Module:
    return Looked(watched=True)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def batch() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def mean_square(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().square().mean()


def products(model: nn.Module, rows: Tensor) -> Tensor:
    """A loss that needs more memory than any layer, so that the peak lies between forward and backward."""
    out = model(rows).float().repeat(8, 8)
    return (out[:, :, None] * out[:, None, :]).mean()


DEPTHS = range(4)
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"prefetch {depth}": {"prefetch": depth} for depth in DEPTHS},
    **{f"in flight {count}": {"reductions_in_flight": count} for count in (0, 1, 3)},
    "two layers to a unit": {"units": Pair},
    "nothing overlaps": {"prefetch": 0, "reductions_in_flight": 0},
    "embedding": {"model": Looked, "units": is_layer},
    "embedding gathered again": {"model": watched, "units": is_layer},
    "last kept": {"loss": products},
    "last gathered again": {"loss": products, "keep_last_unit": False},
}
KINDS = list(itertools.product((2, 3), PRECISIONS))
every_kind = pytest.mark.parametrize(("stage", "precision"), KINDS, ids=lambda value: str(value))


def arguments(setting: str, stage: int, precision: str) -> dict[str, Any]:
    given = {"model": Chain, "loss": mean_square, "units": nn.Linear} | SETTINGS[setting]
    return (
        {"make_model": given.pop("model"), "make_batch": batch, "stage": stage}
        | given
        | {"precision": PRECISIONS[precision]}
    )


@functools.cache
def planned(setting: str, stage: int, precision: str) -> DryRun:
    return dry_run(num_ranks=NUM_RANKS, **arguments(setting, stage, precision))


def measured(setting: str, stage: int, precision: str, mesh: Mesh) -> DryRun:
    return rehearse(mesh=mesh, compute=True, **arguments(setting, stage, precision))


def check(setting: str, stage: int, precision: str, real: DryRun) -> None:
    dry, where = planned(setting, stage, precision), f"{setting} at stage {stage} in {precision}"
    assert dry.peak.bytes == real.peak.bytes, where
    assert dry.collectives == real.collectives, where
    assert dry == real, where


@every_kind
def test_each_setting_needs_what_was_planned(stage: int, precision: str) -> None:
    for setting in SETTINGS:
        check(setting, stage, precision, measured(setting, stage, precision, mirrors(NUM_RANKS, 0)))


ON_PROCESSES = ("prefetch 0", "prefetch 3", "in flight 0", "in flight 3", "last gathered again")
RUNS = [(setting, *kind) for setting in ON_PROCESSES for kind in KINDS]


def measured_on_processes(mesh: Mesh) -> list[DryRun]:
    return [measured(*run, mesh) for run in RUNS]


def test_settings_need_on_processes_what_was_planned() -> None:
    for runs in run_processes(NUM_RANKS, measured_on_processes):
        for run, real in zip(RUNS, runs, strict=True):
            check(*run, real)


def moves(runs: Mapping[str, DryRun]) -> list[int]:
    """Return by how many bytes each peak lies above the one before."""
    return [after.peak.bytes - before.peak.bytes for before, after in itertools.pairwise(runs.values())]


def gathers(run: DryRun) -> Counter[str]:
    return Counter(event.label for event in run.collectives if event.verb is Verb.UNSHARD)


@every_kind
def test_each_unit_ahead_costs_its_gathered_bytes(stage: int, precision: str) -> None:
    runs = {str(depth): planned(f"prefetch {depth}", stage, precision) for depth in DEPTHS}
    gathered = UNIT_NUMEL * PARAM_BYTES[precision]
    assert [run.peak.by_kind.get("gathered", 0) for run in runs.values()] == [
        (1 + depth) * gathered if stage == 3 else 0 for depth in DEPTHS
    ]
    if stage == 2:
        assert moves(runs) == [0, 0, 0]
        return
    # The peak is where the last unit ahead is the first of all: a layer earlier in the backward with each unit ahead,
    # when one slice of gradients less rests and one layer's input more is kept.
    shard = UNIT_NUMEL // NUM_RANKS * FLOAT_BYTES
    kept = ROWS * WIDTH * PARAM_BYTES[precision]
    assert moves(runs)[1:] == [gathered - shard + kept] * 2
    assert moves(runs)[0] > 0
    first = runs["0"].collectives
    assert all(Counter(run.collectives) == Counter(first) for run in runs.values())


@every_kind
def test_each_reduction_in_flight_costs_its_gradients_and_what_is_received(stage: int, precision: str) -> None:
    names = ("in flight 0", "in flight 1", "prefetch 1", "in flight 3")  # two are the default
    runs = {name: planned(name, stage, precision) for name in names}
    assert [run.peak.by_kind["staging"] for run in runs.values()] == [
        (1 + count) * UNIT_NUMEL * FLOAT_BYTES for count in DEPTHS
    ]
    wire = UNIT_NUMEL * PARAM_BYTES[precision]
    received = wire * (NUM_RANKS - 1) // NUM_RANKS
    cast = wire if precision == "bf16" else 0  # what is sent is a copy in the dtype of the wire
    assert moves(runs)[1:] == [UNIT_NUMEL * FLOAT_BYTES + received + cast] * 2
    assert moves(runs)[0] > 0
    assert len({run.collectives for run in runs.values()}) == 1


@every_kind
def test_unit_twice_as_large_travels_half_as_often(stage: int, precision: str) -> None:
    one, two = planned("prefetch 1", stage, precision), planned("two layers to a unit", stage, precision)
    for kind in ("gathered", "staging"):
        assert two.peak.by_kind.get(kind, 0) == 2 * one.peak.by_kind.get(kind, 0)
    assert two.peak.bytes - one.peak.bytes > UNIT_NUMEL * FLOAT_BYTES
    assert sum(gathers(one).values()) == (15 if stage == 3 else 0)  # 8 forward, 7 backward
    assert sum(gathers(two).values()) == (7 if stage == 3 else 0)  # 4 forward, 3 backward


@every_kind
def test_unit_that_is_kept_costs_its_bytes_and_saves_a_gather(stage: int, precision: str) -> None:
    kept, freed = planned("last kept", stage, precision), planned("last gathered again", stage, precision)
    gathered = UNIT_NUMEL * PARAM_BYTES[precision] if stage == 3 else 0
    assert moves({"freed": freed, "kept": kept}) == [gathered]
    again = Counter(freed.collectives) - Counter(kept.collectives)
    assert sum(again.values()) == (stage == 3)
    assert sum(gathers(freed).values()) - sum(gathers(kept).values()) == (stage == 3)
    assert freed.sent_bytes - kept.sent_bytes == gathered * (NUM_RANKS - 1) // NUM_RANKS


@every_kind
def test_without_overlap_one_unit_at_a_time(stage: int, precision: str) -> None:
    run = planned("nothing overlaps", stage, precision)
    assert run.peak.by_kind["staging"] == UNIT_NUMEL * FLOAT_BYTES
    assert run.peak.by_kind.get("gathered", 0) == (UNIT_NUMEL * PARAM_BYTES[precision] if stage == 3 else 0)
    assert run.peak.bytes < planned("prefetch 1", stage, precision).peak.bytes


@every_kind
def test_embedding_that_backward_does_not_read_is_not_gathered_again(stage: int, precision: str) -> None:
    skipped, again = planned("embedding", stage, precision), planned("embedding gathered again", stage, precision)
    assert sum(gathers(again).values()) - sum(gathers(skipped).values()) == (stage == 3)
    assert again.sent_bytes - skipped.sent_bytes == (
        UNIT_NUMEL * PARAM_BYTES[precision] * (NUM_RANKS - 1) // NUM_RANKS if stage == 3 else 0
    )
    # Two units are gathered one layer longer: a slice more of gradients rests, a layer's input and output are gone.
    shard, kept = UNIT_NUMEL // NUM_RANKS * FLOAT_BYTES, ROWS * WIDTH * PARAM_BYTES[precision]
    assert moves({"skipped": skipped, "again": again}) == [shard - 2 * kept if stage == 3 else 0]
