"""Properties of the flat index space."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.layout import Fragment, Layout, ParamSpec, plan_layout

PROPERTY = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def spec(name: str, *shape: int, atom: int = 1, dtype: torch.dtype = torch.float32) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, dtype=dtype, atom=atom)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    atom = draw(st.sampled_from([1, 2, 3, 32, 48]))
    shapes = draw(st.lists(SHAPES, max_size=7))
    params = [spec(f"layers.{number}", *shape, atom=atom) for number, shape in enumerate(shapes)]
    return plan_layout(params, draw(st.integers(1, 9)), align=draw(st.sampled_from([1, 2, 5, 16, 64])))


def slices(layout: Layout) -> list[tuple[int, int]]:
    length = layout.shard_numel
    return [(rank * length, (rank + 1) * length) for rank in range(layout.num_ranks)]


@PROPERTY
@given(layouts())
def test_slots_are_disjoint_in_order_and_inside(layout: Layout) -> None:
    assert [slot.index for slot in layout.slots] == list(range(len(layout.slots)))
    ends = [0, *(slot.stop for slot in layout.slots), layout.numel]
    starts = [0, *(slot.start for slot in layout.slots), layout.numel]
    assert all(stop <= start for stop, start in zip(ends, starts[1:], strict=False))
    assert all(slot.stop - slot.start == math.prod(slot.param.shape) for slot in layout.slots)


@PROPERTY
@given(layouts())
def test_slots_and_slices_start_at_multiples_of_alignment_and_atom(layout: Layout) -> None:
    starts = [slot.start for slot in layout.slots] + [start for start, _ in slices(layout)]
    for start in starts:
        assert start % layout.align == 0
        assert all(start % slot.param.atom == 0 for slot in layout.slots)


@PROPERTY
@given(layouts())
def test_slices_are_equal_and_cover_the_space(layout: Layout) -> None:
    assert layout.numel == layout.num_ranks * layout.shard_numel
    assert layout.numel >= max((slot.stop for slot in layout.slots), default=0)


@PROPERTY
@given(layouts())
def test_padding_is_bounded_by_one_step_per_slot_and_rank(layout: Layout) -> None:
    step = math.lcm(layout.align, *(slot.param.atom for slot in layout.slots))
    assert layout.padding_numel == layout.numel - layout.used_numel
    assert 0 <= layout.padding_numel < (len(layout.slots) + layout.num_ranks) * step or layout.numel == 0


@PROPERTY
@given(layouts())
def test_atoms_are_never_cut(layout: Layout) -> None:
    for slot in layout.slots:
        for start in range(slot.start, slot.stop, slot.param.atom):
            last = min(start + slot.param.atom, slot.stop) - 1
            assert start // layout.shard_numel == last // layout.shard_numel


@PROPERTY
@given(layouts())
def test_gaps_and_slots_tile_the_space(layout: Layout) -> None:
    pieces = sorted([*layout.gaps, *((slot.start, slot.stop) for slot in layout.slots if slot.param.numel)])
    assert all(start < stop for start, stop in pieces)
    assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), layout.numel]
    assert sum(stop - start for start, stop in layout.gaps) == layout.padding_numel


@PROPERTY
@given(layouts())
def test_fragments_of_all_slices_partition_every_parameter(layout: Layout) -> None:
    seen: dict[str, int] = {slot.param.name: 0 for slot in layout.slots}
    for start, stop in slices(layout):
        for part in layout.fragments(start, stop):
            assert part.numel > 0
            assert start <= part.flat_start
            assert part.flat_start + part.numel <= stop
            assert part.flat_start - part.slot.start == part.param_start
            assert part.param_start == seen[part.slot.param.name]  # each goes on where the last slice ended
            seen[part.slot.param.name] += part.numel
    assert seen == {slot.param.name: slot.param.numel for slot in layout.slots}


@PROPERTY
@given(layouts(), st.data())
def test_fragments_and_gaps_tile_any_range(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.numel))
    stop = data.draw(st.integers(start, layout.numel))
    parts = [(part.flat_start, part.flat_start + part.numel) for part in layout.fragments(start, stop)]
    gaps = [(max(first, start), min(last, stop)) for first, last in layout.gaps]
    pieces = sorted([*parts, *((first, last) for first, last in gaps if first < last)])
    assert parts == sorted(parts)
    assert [start, *(last for _, last in pieces)] == [*(first for first, _ in pieces), stop]


def test_fragment_says_where_it_lies_in_the_space_and_in_the_parameter() -> None:
    layout = plan_layout([spec("a", 3), spec("b", 5)], 2, align=1)
    first, second = layout.slots
    assert list(layout.fragments(0, 4)) == [
        Fragment(slot=first, flat_start=0, param_start=0, numel=3),
        Fragment(slot=second, flat_start=3, param_start=0, numel=1),
    ]
    assert list(layout.fragments(4, 8)) == [Fragment(slot=second, flat_start=4, param_start=1, numel=4)]
    assert list(layout.fragments(5, 5)) == []


def test_default_alignment_is_64_elements() -> None:
    layout = plan_layout([spec("a", 3), spec("b", 65), spec("c", 1)], 2)
    assert [slot.start for slot in layout.slots] == [0, 64, 192]
    assert (layout.shard_numel, layout.gaps) == (128, ((3, 64), (129, 192), (193, 256)))


def test_alignment_one_packs_without_gaps_between_parameters() -> None:
    layout = plan_layout([spec("a", 3), spec("b", 65), spec("c", 1)], 2, align=1)
    assert [slot.start for slot in layout.slots] == [0, 3, 68]
    assert (layout.shard_numel, layout.gaps) == (35, ((69, 70),))


@pytest.mark.parametrize("params", [[], [spec("a", 0)], [spec("a", 0, 3), spec("b", 0)]])
def test_layout_without_elements_is_empty(params: list[ParamSpec]) -> None:
    layout = plan_layout(params, 3)
    assert (layout.numel, layout.gaps, list(layout.fragments(0, 0))) == (0, (), [])


def test_scalar_has_one_element_and_order_is_kept() -> None:
    layout = plan_layout([spec("z"), spec("a", 2), spec("m", 0)], 1, align=1)
    assert [(slot.param.name, slot.start, slot.stop) for slot in layout.slots] == [
        ("z", 0, 1),
        ("a", 1, 3),
        ("m", 3, 3),
    ]


BASE = ParamSpec(name="a", shape=(4, 6), dtype=torch.float32)
OTHER = ParamSpec(name="b", shape=(5,), dtype=torch.float32)
PLANNED = plan_layout([BASE, OTHER], 2)
VARIANTS = {
    "base": PLANNED,
    "name": plan_layout([dataclasses.replace(BASE, name="c"), OTHER], 2),
    "transposed": plan_layout([dataclasses.replace(BASE, shape=(6, 4)), OTHER], 2),
    "flattened": plan_layout([dataclasses.replace(BASE, shape=(24,)), OTHER], 2),
    "dtype": plan_layout([dataclasses.replace(BASE, dtype=torch.bfloat16), OTHER], 2),
    "frozen": plan_layout([dataclasses.replace(BASE, requires_grad=False), OTHER], 2),
    "aliases": plan_layout([dataclasses.replace(BASE, aliases=("head",)), OTHER], 2),
    "atom": plan_layout([dataclasses.replace(p, atom=2) for p in (BASE, OTHER)], 2),
    "order": plan_layout([OTHER, BASE], 2),
    "fewer": plan_layout([BASE], 2),
    "ranks": plan_layout([BASE, OTHER], 4),
    "alignment": plan_layout([BASE, OTHER], 2, align=32),
    "alignment alone": dataclasses.replace(PLANNED, align=32),
    "ranks alone": dataclasses.replace(PLANNED, num_ranks=3),
    "slice alone": dataclasses.replace(PLANNED, shard_numel=128),
    "moved": dataclasses.replace(PLANNED, slots=(PLANNED.slots[0], dataclasses.replace(PLANNED.slots[1], start=32))),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(VARIANTS, 2)))
def test_digest_tells_any_two_layouts_apart(first: str, second: str) -> None:
    assert VARIANTS[first].digest != VARIANTS[second].digest


def test_digest_is_a_function_of_the_contents() -> None:
    again = plan_layout([dataclasses.replace(BASE), dataclasses.replace(OTHER)], 2)
    assert again is not PLANNED
    assert again.digest == PLANNED.digest


@pytest.mark.parametrize(
    ("params", "num_ranks", "align", "words"),
    [
        ([BASE], 0, 64, "num_ranks >= 1 and align >= 1, got 0 and 64"),
        ([BASE], 2, 0, "num_ranks >= 1 and align >= 1, got 2 and 0"),
        ([BASE, OTHER, BASE], 2, 64, r"these occur twice: \['a'\]"),
        ([BASE, dataclasses.replace(OTHER, atom=32)], 2, 64, r"atoms \[1, 32\]"),
        ([dataclasses.replace(BASE, atom=0)], 2, 64, "number of elements >= 1, got 0"),
    ],
)
def test_impossible_layout_is_refused(params: list[ParamSpec], num_ranks: int, align: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        plan_layout(params, num_ranks, align=align)
