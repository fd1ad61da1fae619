"""The equivalence matrix: every way to shard trains exactly as one plain process on the concatenated batch.

Worlds (stages 0 to 3 on 1 to 4 ranks; the 16 nested triples of axis sets on a 2x2 mesh) x micro-batches x oddities x
clipping x dtype x optimizer. A sample that meets every pair of values runs always, the full product with the marker
``matrix``. Stages and triples that add in the same order must also agree bit for bit.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from shardwise import Sharding, stage_sharding
from shardwise.sharding import resolve
from shardwise.testing.compare import (
    Case,
    MicroBatches,
    Trace,
    assert_equals_plain,
    assert_same_bits,
    train_plain,
    train_sharded,
)
from shardwise.testing.models import ODDITIES
from shardwise.testing.ranks import run_ranks

MESH = {"node": 2, "local": 2}
DEPTHS = range(4)  # of one axis: splits nothing, optimizer state, gradients too, parameters too


def triple(node: int, local: int) -> Sharding:
    """Return the nested axis sets in which each axis goes so deep."""
    optim, grad, param = (
        [axis for axis, depth in (("node", node), ("local", local)) if depth >= least] for least in (1, 2, 3)
    )
    return Sharding(param=param, grad=grad, optim=optim)


TRIPLES = [triple(*depths) for depths in itertools.product(DEPTHS, repeat=2)]
STAGES = [stage_sharding(stage) for stage in range(4)]
KINDS = [*((oddity,) for oddity in ODDITIES), ODDITIES]
WINDOWS = list(MicroBatches)
CLIPS = [None, 1.0]
DTYPES = [torch.float64, torch.float32]
OPTIMIZERS = ["adamw", "sgd"]
RANKS = [1, 2, 3, 4]

Row = tuple[int, tuple[str, ...], MicroBatches, float | None, torch.dtype, str]  # the first is a world's number


def sample_stages(seed: int) -> list[Row]:
    """Return every number of ranks with every kind; any two values of any two factors meet."""
    draw = random.Random(seed)
    return [
        (world, kind, WINDOWS[(world + number) % 4], draw.choice(CLIPS), draw.choice(DTYPES), draw.choice(OPTIMIZERS))
        for world in range(len(RANKS))
        for number, kind in enumerate(KINDS)
    ]


def sample_triples(seed: int) -> list[Row]:
    """Return every kind with every window and all triples; any two values of two factors meet, each depth is one."""
    draw = random.Random(seed)
    return [
        (
            (number + turn) % 4 * 4 + (turn + 2 * number + number // 2) % 4,
            kind,
            window,
            draw.choice(CLIPS),
            draw.choice(DTYPES),
            draw.choice(OPTIMIZERS),
        )
        for number, kind in enumerate(KINDS)
        for turn, window in enumerate(WINDOWS)
    ]


def product(num_worlds: int) -> Iterator[Row]:
    """Return everything, with optimizers in turn."""
    rows = itertools.product(range(num_worlds), KINDS, WINDOWS, CLIPS, DTYPES)
    for number, row in enumerate(rows):
        yield (*row, OPTIMIZERS[(number + number // 2) % 2])


STAGE_SAMPLE = sample_stages(seed=68)
TRIPLE_SAMPLE = sample_triples(seed=39)


def case_of(row: Row, *, force_collectives: bool = False) -> Case:
    _, oddities, window, max_norm, dtype, optimizer = row
    return Case(
        oddities=oddities,
        dtype=dtype,
        optimizer=optimizer,
        max_norm=max_norm,
        micro_batches=window,
        force_collectives=force_collectives,
    )


def row_id(row: Row) -> str:
    world, oddities, window, max_norm, dtype, optimizer = row
    clip = "" if max_norm is None else "-clip"
    kind = "all" if oddities == ODDITIES else "+".join(oddities)
    return f"{world}-{kind}-{window.name}{clip}-{str(dtype).removeprefix('torch.')}-{optimizer}"


@cache
def plain_trace(case: Case) -> Trace:
    trace = train_plain(case)
    if case.max_norm is not None:
        assert min(trace.norms) > 2 * case.max_norm, f"nothing would be clipped: {trace.norms}"
    return trace


def train_and_compare(case: Case, world: int | dict[str, int], sharding: Sharding) -> list[Trace]:
    """Train on threads, compare with the plain process; return what each rank ended with."""
    plain = plain_trace(replace(case, micro_batches=MicroBatches.ONE, force_collectives=False))
    ranks = run_ranks(world, lambda mesh: train_sharded(case, mesh, sharding))
    assert_equals_plain(ranks, plain, case.tolerance, f"{sharding}")
    return ranks


def check_stages(row: Row, *, forced: bool = False) -> None:
    """All stages equal the plain process; those that reduce at the same moments agree bit for bit."""
    case = case_of(row, force_collectives=forced)
    found = [train_and_compare(case, RANKS[row[0]], sharding) for sharding in STAGES]
    assert_same_bits(found[1], found[0], "stages 0 and 1")
    assert_same_bits(found[3], found[2], "stages 2 and 3")
    if case.micro_batches is not MicroBatches.SUMMED:
        assert_same_bits(found[2], found[0], "stages 0 and 2")


def check_triples(row: Row, mesh: dict[str, int] = MESH) -> None:
    """All triples equal the plain process; those that add in the same order agree bit for bit."""
    case = replace(case_of(row), num_rows=6 * math.prod(mesh.values()))
    groups: dict[object, list[list[Trace]]] = {}
    for sharding in TRIPLES:
        summed = sharding.grad if case.micro_batches is MicroBatches.SUMMED else None
        order = (resolve(sharding, mesh).axes, summed)
        groups.setdefault(order, []).append(train_and_compare(case, mesh, sharding))
    assert max(len(group) for group in groups.values()) >= 3
    for order, (first, *others) in groups.items():
        for other in others:
            assert_same_bits(other, first, f"order {order}")


Factors = list[tuple[Sequence[object], list[object]]]  # each with its values and what it is in every row


def rest_of(rows: Sequence[Row]) -> Factors:
    values: list[Sequence[object]] = [KINDS, WINDOWS, CLIPS, DTYPES, OPTIMIZERS]
    return [(each, [row[number] for row in rows]) for number, each in enumerate(values, start=1)]


def assert_all_pairs_meet(factors: Factors) -> None:
    for (values, first), (others, second) in itertools.combinations(factors, 2):
        assert set(zip(first, second, strict=True)) == set(itertools.product(values, others))


def test_every_two_values_meet_in_the_sample_of_stages() -> None:
    worlds = [row[0] for row in STAGE_SAMPLE]
    assert_all_pairs_meet([(range(len(RANKS)), worlds), *rest_of(STAGE_SAMPLE)])


def test_every_two_values_meet_in_the_sample_of_triples() -> None:
    worlds = [row[0] for row in TRIPLE_SAMPLE]
    node, local = [world // 4 for world in worlds], [world % 4 for world in worlds]
    assert_all_pairs_meet([(DEPTHS, node), (DEPTHS, local), *rest_of(TRIPLE_SAMPLE)])


def test_there_are_sixteen_nested_triples_on_two_axes() -> None:
    subsets = [frozenset[str](), frozenset(["node"]), frozenset(["local"]), frozenset(MESH)]
    nested = [(p, g, o) for p, g, o in itertools.product(subsets, repeat=3) if p <= g and g <= o]
    assert len(nested) == 16
    assert set(TRIPLES) == {Sharding(param=p, grad=g, optim=o) for p, g, o in nested}
    assert [TRIPLES[5 * stage] for stage in range(4)] == [triple(stage, stage) for stage in range(4)]
    assert [resolve(sharding, MESH) for sharding in STAGES] == [resolve(TRIPLES[5 * i], MESH) for i in range(4)]


@pytest.mark.parametrize("row", STAGE_SAMPLE, ids=row_id)
def test_stages_equal_a_plain_process_in_the_sample(row: Row) -> None:
    check_stages(row)


@pytest.mark.parametrize("row", TRIPLE_SAMPLE, ids=row_id)
def test_triple_equals_a_plain_process_in_the_sample(row: Row) -> None:
    train_and_compare(case_of(row), MESH, TRIPLES[row[0]])


def test_triples_that_add_in_the_same_order_agree_bit_for_bit() -> None:
    check_triples((0, ("uneven", "tied", "frozen"), MicroBatches.SUMMED, 1.0, torch.float32, "adamw"))


@pytest.mark.parametrize("window", [MicroBatches.REDUCED, MicroBatches.SUMMED], ids=lambda w: w.name)
def test_collectives_of_one_rank_change_nothing(window: MicroBatches) -> None:
    check_stages((0, ODDITIES, window, 1.0, torch.float64, "adamw"), forced=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stages_that_reduce_at_other_moments_differ_in_some_bits(num_ranks: int) -> None:
    # If they agreed here too, the comparisons bit for bit would show nothing.
    case = Case(oddities=("uneven",), dtype=torch.float32, micro_batches=MicroBatches.SUMMED)
    found = [train_and_compare(case, num_ranks, STAGES[stage]) for stage in (0, 2)]
    with pytest.raises(AssertionError, match="off by"):
        assert_same_bits(found[1], found[0])


@pytest.mark.matrix
@pytest.mark.parametrize("row", list(product(len(RANKS))), ids=row_id)
def test_stages_equal_a_plain_process(row: Row) -> None:
    check_stages(row)


@pytest.mark.matrix
@pytest.mark.parametrize("row", list(product(1)), ids=row_id)
def test_stages_equal_a_plain_process_with_collectives_of_one_rank(row: Row) -> None:
    check_stages(row, forced=True)


@pytest.mark.matrix
@pytest.mark.parametrize("row", list(product(1)), ids=row_id)
def test_triples_equal_a_plain_process(row: Row) -> None:
    check_triples(row)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{"node": 3, "local": 2}, {"node": 2, "local": 4}, {"node": 1, "local": 2}], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: w.name)
def test_triples_equal_a_plain_process_on_other_meshes(mesh: dict[str, int], window: MicroBatches) -> None:
    check_triples((0, ODDITIES, window, 1.0, torch.float64, "adamw"), mesh)
