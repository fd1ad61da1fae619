"""A ZeRO stage is three nested sets of mesh axes.

``Sharding`` names the axes over which parameters, gradients and optimizer state are split at rest. ``resolve`` lays
them over a mesh and gives a ``Placement``: the axis lists of the five verbs and the slice of every rank. Nothing else
in the library asks "which stage?". Read ``runtime/params.py`` next: it holds buffers.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError

__all__ = ["MeshAxes", "Placement", "Sharding", "hybrid", "resolve", "stage_sharding"]

ALL = "*"  # stands for every data-parallel axis of the mesh


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The mesh axes over which each state is split at rest; over the other axes it is replicated.

    ``param`` lies inside ``grad``, ``grad`` inside ``optim``, ``optim`` inside the data-parallel axes of the mesh.
    The name ``"*"`` stands for all of these axes.

    Source: ZeRO, arXiv:1910.02054 (P_os, P_os+g, P_os+g+p); hybrid forms after FSDP, arXiv:2304.11277.
    """

    param: frozenset[str] = frozenset()
    grad: frozenset[str] = frozenset()
    optim: frozenset[str] = frozenset()

    def __init__(self, *, param: Collection[str] = (), grad: Collection[str] = (), optim: Collection[str] = ()) -> None:
        for field, axes in (("param", param), ("grad", grad), ("optim", optim)):
            object.__setattr__(self, field, frozenset([axes] if isinstance(axes, str) else axes))

    def __repr__(self) -> str:
        """Name the axes in an order that does not depend on the process."""
        return f"Sharding(param={sorted(self.param)}, grad={sorted(self.grad)}, optim={sorted(self.optim)})"


def stage_sharding(stage: int) -> Sharding:
    """Return the sharding that the literature calls ZeRO stage 0, 1, 2 or 3.

    Raises:
        ConfigError: ``stage`` is not one of these numbers.
    """
    presets = {
        0: Sharding(),
        1: Sharding(optim=ALL),
        2: Sharding(grad=ALL, optim=ALL),
        3: Sharding(param=ALL, grad=ALL, optim=ALL),
    }
    if isinstance(stage, bool) or stage not in presets:
        raise ConfigError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    return presets[stage]


def hybrid(axis: str) -> Sharding:
    """Split every state over ``axis`` and replicate it over the others (HSDP, MiCS)."""
    return Sharding(param=axis, grad=axis, optim=axis)


MeshAxes = Mapping[str, int]  # axis name -> number of ranks, outermost (slowest) axis first


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A ``Sharding`` over a concrete mesh.

    The flat space is split axis by axis in the order ``axes``: first the axes of P, then of G outside P, of O outside
    G, of D outside O; inside a level the innermost mesh axis comes first. The first axis is the most significant, so
    that every set of the chain owns one contiguous range.

    Attributes:
        axes: order of the splits; its prefixes of length ``num_param``, ``num_grad``, ``num_optim`` are P, G, O.
        sizes: number of ranks of each axis.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    num_param: int
    num_grad: int
    num_optim: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all data-parallel axes."""
        return math.prod(self.sizes)

    def ways(self, depth: int) -> int:
        """Number of slices after the first ``depth`` splits."""
        return math.prod(self.sizes[:depth])

    def slice_range(self, depth: int, numel: int, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """Return the range ``[start, stop)`` a rank holds after the first ``depth`` splits of ``numel`` elements."""
        index = 0
        for axis, size in zip(self.axes[:depth], self.sizes[:depth], strict=True):
            index = index * size + coordinates[axis]
        length = numel // self.ways(depth)
        return index * length, (index + 1) * length


def resolve(sharding: Sharding, mesh: MeshAxes) -> Placement:
    """Lay a sharding over a mesh.

    Args:
        sharding: axis sets; ``"*"`` is replaced by every axis of the mesh.
        mesh: data-parallel axes with their sizes, outermost first.

    Raises:
        ConfigError: an axis is not in the mesh, or the sets are not nested.
    """
    sets = [_expand(field, getattr(sharding, field), mesh) for field in ("param", "grad", "optim")]
    for (inner_name, inner), (outer_name, outer) in (
        (("param", sets[0]), ("grad", sets[1])),
        (("grad", sets[1]), ("optim", sets[2])),
    ):
        if not inner <= outer:
            raise ConfigError(
                f"sharding: the axes of {inner_name} {sorted(inner)} must lie inside those of {outer_name} "
                f"{sorted(outer)}; add {sorted(inner - outer)} to {outer_name}"
            )
    order: list[str] = []
    depths = []
    for level in (*sets, frozenset(mesh)):
        order += [axis for axis in reversed(list(mesh)) if axis in level and axis not in order]
        depths.append(len(order))
    return Placement(
        axes=tuple(order),
        sizes=tuple(mesh[axis] for axis in order),
        num_param=depths[0],
        num_grad=depths[1],
        num_optim=depths[2],
    )


def _expand(field: str, axes: frozenset[str], mesh: MeshAxes) -> frozenset[str]:
    if ALL in axes:
        return frozenset(mesh)
    unknown = axes - set(mesh)
    if unknown:
        raise ConfigError(f"sharding: {field} names the axes {sorted(unknown)}, but the mesh has {list(mesh)}")
    return axes
