"""Axis sets over a mesh: every nested triple on meshes of up to three axes."""

import itertools
from collections.abc import Iterator, Mapping

import pytest

from shardwise.errors import ConfigError
from shardwise.sharding import Placement, Sharding, hybrid, resolve, stage_sharding

MESHES: dict[str, dict[str, int]] = {
    "none": {},
    "one": {"data": 4},
    "single": {"data": 1},
    "two": {"node": 2, "local": 3},
    "three": {"pod": 2, "node": 1, "local": 3},
}
NUMEL = 5 * 36  # divisible by every number of ranks above


def triples(axes: list[str]) -> Iterator[tuple[set[str], set[str], set[str]]]:
    """Every P inside G inside O: each axis enters at one of four levels."""
    for levels in itertools.product(range(4), repeat=len(axes)):
        yield tuple({axis for axis, level in zip(axes, levels, strict=True) if level <= limit} for limit in range(3))


def places(mesh: Mapping[str, int]) -> list[dict[str, int]]:
    return [
        dict(zip(mesh, place, strict=True)) for place in itertools.product(*(range(size) for size in mesh.values()))
    ]


CASES = [
    pytest.param(mesh, sets, id=f"{name}-{'/'.join('+'.join(sorted(s)) or 'none' for s in sets)}")
    for name, mesh in MESHES.items()
    for sets in triples(list(mesh))
]


def test_two_axes_have_sixteen_nested_triples() -> None:
    assert len(list(triples(["node", "local"]))) == 16


@pytest.mark.parametrize(("mesh", "sets"), CASES)
def test_prefixes_of_the_split_order_are_the_axis_sets(
    mesh: dict[str, int], sets: tuple[set[str], set[str], set[str]]
) -> None:
    param, grad, optim = sets
    placement = resolve(Sharding(param=param, grad=grad, optim=optim), mesh)
    assert set(placement.axes[: placement.num_param]) == param
    assert set(placement.axes[: placement.num_grad]) == grad
    assert set(placement.axes[: placement.num_optim]) == optim
    assert sorted(placement.axes) == sorted(mesh)
    assert dict(zip(placement.axes, placement.sizes, strict=True)) == mesh
    levels = [set(), param, grad, optim, set(mesh)]
    for inside, outside in itertools.pairwise(levels):  # the innermost mesh axis of a level comes first
        level = [axis for axis in placement.axes if axis in outside - inside]
        assert level == [axis for axis in reversed(list(mesh)) if axis in outside - inside]


@pytest.mark.parametrize(("mesh", "sets"), CASES)
def test_slices_of_every_depth_partition_the_space(
    mesh: dict[str, int], sets: tuple[set[str], set[str], set[str]]
) -> None:
    placement = resolve(Sharding(param=sets[0], grad=sets[1], optim=sets[2]), mesh)
    for depth in range(len(mesh) + 1):
        held: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for place in places(mesh):
            key = tuple(place[axis] for axis in placement.axes[:depth])
            held.setdefault(placement.slice_range(depth, NUMEL, place), set()).add(key)
        ranges = sorted(held)
        assert len(ranges) == placement.ways(depth)
        assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), NUMEL]
        # Replicas over the other axes hold the same slice, and nobody else does.
        assert all(len(keys) == 1 for keys in held.values())


@pytest.mark.parametrize(("mesh", "sets"), CASES)
def test_slices_are_nested_and_the_finest_belong_to_one_rank(
    mesh: dict[str, int], sets: tuple[set[str], set[str], set[str]]
) -> None:
    placement = resolve(Sharding(param=sets[0], grad=sets[1], optim=sets[2]), mesh)
    finest = []
    for place in places(mesh):
        chain = [placement.slice_range(depth, NUMEL, place) for depth in range(len(mesh) + 1)]
        assert chain[0] == (0, NUMEL)
        for outer, inner in itertools.pairwise(chain):
            assert outer[0] <= inner[0] < inner[1] <= outer[1]
        finest.append(chain[-1])
    assert len(set(finest)) == len(finest) == placement.num_ranks


NOT_NESTED = [
    (param, grad, optim)
    for param, grad, optim in itertools.product([(), ("node",), ("local",), ("node", "local")], repeat=3)
    if not set(param) <= set(grad) <= set(optim)
]


@pytest.mark.parametrize(("param", "grad", "optim"), NOT_NESTED)
def test_sets_that_are_not_nested_are_refused(
    param: tuple[str, ...], grad: tuple[str, ...], optim: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"must lie inside those of .*; add \["):
        resolve(Sharding(param=param, grad=grad, optim=optim), {"node": 2, "local": 2})


def test_all_other_triples_are_nested() -> None:
    assert len(NOT_NESTED) == 4**3 - 16


def test_nesting_error_names_what_to_add() -> None:
    message = r"axes of param \['local'\] must lie inside those of grad \[\]; add \['local'\] to grad"
    with pytest.raises(ConfigError, match=message):
        resolve(Sharding(param="local"), {"node": 2, "local": 2})
    with pytest.raises(ConfigError, match=r"axes of grad \['local', 'node'\] .* of optim \['node'\]; add \['local'\]"):
        resolve(Sharding(grad=["node", "local"], optim=["node"]), {"node": 2, "local": 2})
    with pytest.raises(ConfigError, match=r"of param \['node'\] must lie inside those of grad \[\]"):
        resolve(Sharding(param="*", optim="*"), {"node": 2})


@pytest.mark.parametrize("field", ["param", "grad", "optim"])
def test_unknown_axis_is_refused(field: str) -> None:
    sets = {"param": ("local",), "grad": ("local",), "optim": ("local",)} | {field: ("local", "rack")}
    message = rf"{field} names the axes \['rack'\], but the mesh has \['node', 'local'\]"
    with pytest.raises(ConfigError, match=message):
        resolve(Sharding(**sets), {"node": 2, "local": 2})


def depths(placement: Placement) -> tuple[int, int, int]:
    return placement.num_param, placement.num_grad, placement.num_optim


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_splits_the_last_states_over_every_axis(stage: int, mesh: dict[str, int]) -> None:
    every = len(mesh)
    expected = {0: (0, 0, 0), 1: (0, 0, every), 2: (0, every, every), 3: (every, every, every)}
    assert depths(resolve(stage_sharding(stage), mesh)) == expected[stage]


@pytest.mark.parametrize("stage", [-1, 4, True, False, "3", None, 1.5])
def test_unknown_stage_is_refused(stage: object) -> None:
    with pytest.raises(ConfigError, match="stage must be 0, 1, 2 or 3, got"):
        stage_sharding(stage)  # type: ignore[arg-type]


def test_hybrid_splits_everything_over_one_axis_and_replicates_over_the_others() -> None:
    placement = resolve(hybrid("local"), {"node": 2, "local": 4})
    assert (placement.axes, depths(placement)) == (("local", "node"), (1, 1, 1))
    assert placement.ways(placement.num_param) == 4
    same = [placement.slice_range(1, 64, {"node": node, "local": 3}) for node in range(2)]
    assert same == [(48, 64), (48, 64)]


def test_axis_sets_are_values() -> None:
    assert Sharding(param="data", grad=["data"], optim=("data",)) == hybrid("data")
    assert hash(Sharding(optim={"a", "b"})) == hash(Sharding(optim=["b", "a"]))
    assert Sharding(param="data").param == {"data"}  # a name is one axis, not a set of letters


def test_star_beside_names_is_every_axis() -> None:
    mesh = {"node": 2, "local": 2}
    assert resolve(Sharding(optim=["*", "node"]), mesh) == resolve(Sharding(optim=["node", "local"]), mesh)
