"""From any number of ranks and any stage to any other, bit by bit."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.base import Comm
from shardwise.sharding import Sharding, hybrid
from shardwise.testing.ranks import run_ranks

from .case import State, assert_same, build, state_of, train

FLAT = [({"data": ranks}, stage) for ranks in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]
GRID = {"node": 2, "local": 2}
BEYOND = [
    (GRID, hybrid("local")),
    (GRID, hybrid("node")),
    (GRID, 3),
    (GRID, Sharding(grad="local", optim=("local", "node"))),
    (GRID, Sharding(param="local", grad="local", optim=("local", "node"))),
]
LAYOUTS = FLAT + BEYOND


def save(layout: tuple[dict[str, int], Any], folder: Path, **options: Any) -> list[State]:
    """Train and save; return the whole state as every rank sees it."""
    mesh_shape, sharding = layout

    def body(mesh: Mapping[str, Comm]) -> State:
        net, optimizer = build(mesh, sharding, **options)
        train(net, optimizer, mesh, range(3))
        shardwise.save_checkpoint(net, folder, tag="a")
        return state_of(net, buffers=False)

    return run_ranks(mesh_shape, body)


def load(layout: tuple[dict[str, int], Any], folder: Path, **options: Any) -> list[tuple[State, State]]:
    """Load into a model of other values; return the state, and the state after one more update."""
    mesh_shape, sharding = layout

    def body(mesh: Mapping[str, Comm]) -> tuple[State, State]:
        net, optimizer = build(mesh, sharding, seed=1, lr=0.5, **options)
        if options.get("align") is None:
            train(net, optimizer, mesh, range(1))  # so that there is state to be replaced
        shardwise.load_checkpoint(net, folder, rng=False)
        before = state_of(net, buffers=False)
        train(net, optimizer, mesh, range(3, 4))
        return before, state_of(net, buffers=False)

    return run_ranks(mesh_shape, body)


def go_on(layout: tuple[dict[str, int], Any], folder: Path) -> State:
    """Return the state after one more update of a run that was never interrupted."""
    mesh_shape, sharding = layout

    def body(mesh: Mapping[str, Comm]) -> State:
        net, optimizer = build(mesh, sharding)
        train(net, optimizer, mesh, range(4))
        return state_of(net, buffers=False)

    return run_ranks(mesh_shape, body)[0]


def name_of(layout: tuple[dict[str, int], Any]) -> str:
    """Return a short name."""
    shape, sharding = layout
    size = "x".join(map(str, shape.values()))
    return f"{size}-{sharding}" if isinstance(sharding, int) else f"{size}-{LAYOUTS.index(layout)}"


PAIRWISE = list(zip(LAYOUTS, [*LAYOUTS[7:], *LAYOUTS[:7]], strict=True))


@pytest.mark.parametrize(("saved", "loaded"), PAIRWISE, ids=[f"{name_of(a)}to{name_of(b)}" for a, b in PAIRWISE])
def test_state_is_bitwise_after_a_change_of_ranks_and_stage(saved: Any, loaded: Any, tmp_path: Path) -> None:
    expected = save(saved, tmp_path)[0]
    for before, _ in load(loaded, tmp_path):
        assert_same(before, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("saved", LAYOUTS, ids=name_of)
def test_state_is_bitwise_from_this_layout_to_every_other(saved: Any, tmp_path: Path) -> None:
    expected = save(saved, tmp_path)[0]
    for loaded in LAYOUTS:
        for before, _ in load(loaded, tmp_path):
            assert_same(before, expected)


@pytest.mark.parametrize("stage", range(4))
def test_the_next_update_is_that_of_a_run_that_was_not_interrupted(stage: int, tmp_path: Path) -> None:
    layout = ({"data": 2}, stage)
    save(layout, tmp_path)
    expected = go_on(layout, tmp_path)
    for other in (stage, (stage + 1) % 4, (stage + 2) % 4):
        for _, after in load(({"data": 2}, other), tmp_path):
            assert_same(after, expected)


@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (3, 1), (1, 0)])
def test_masters_and_rounded_copies_are_bitwise(
    saved: torch.dtype, loaded: torch.dtype, ranks: int, stage: int, tmp_path: Path
) -> None:
    expected = save(({"data": 2}, 2), tmp_path, dtype=saved)[0]
    for before, _ in load(({"data": ranks}, stage), tmp_path, dtype=loaded):
        assert_same(before, expected)


@pytest.mark.parametrize(("saved", "loaded"), [(torch.bfloat16, None), (None, torch.bfloat16)], ids=["up", "down"])
def test_masters_load_into_another_dtype(saved: Any, loaded: Any, tmp_path: Path) -> None:
    expected = save(({"data": 2}, 3), tmp_path, dtype=saved)[0]
    for before, _ in load(({"data": 3}, 1), tmp_path, dtype=loaded):
        trained = [name for name in before if not name.startswith("copy") and "frozen" not in name]
        assert_same({name: before[name] for name in trained}, {name: expected[name] for name in trained})


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1),
        lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5, centered=True),
        lambda net: torch.optim.Rprop(net.parameters(), lr=0.01),
        lambda net: torch.optim.ASGD(net.parameters(), lr=0.01),
        lambda net: torch.optim.NAdam(net.parameters(), lr=0.01),
    ],
    ids=["momentum", "sgd", "adagrad", "rmsprop", "rprop", "asgd", "nadam"],
)
def test_every_optimizer_resumes(make: Any, tmp_path: Path) -> None:
    def trainable(net: torch.nn.Module) -> torch.optim.Optimizer:
        return make(torch.nn.ParameterList(p for p in net.parameters() if p.requires_grad))

    expected = save(({"data": 2}, 3), tmp_path, make=trainable)[0]
    for before, _ in load(({"data": 3}, 1), tmp_path, make=trainable):
        assert_same(before, expected)


def test_slots_packed_without_gaps_load_into_aligned_ones(tmp_path: Path) -> None:
    for index, (first, second) in enumerate(itertools.permutations((1, 64))):
        folder = tmp_path / str(index)
        expected = save(({"data": 3}, 3), folder, align=first)[0]
        for before, _ in load(({"data": 2}, 2), folder, align=second):
            assert_same(before, expected)
