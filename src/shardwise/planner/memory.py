"""Bytes at rest, known before anything is allocated: layout x sharding x precision, in closed form.

Per rank and bucket of N elements the states take N (w_p / |P| + w_m / |O| + w_g / |G|) bytes plus the optimizer's own
state over the rank's real elements. The ledger of a run must equal it; the tests compare the two to the byte.
Source: ZeRO, arXiv:1910.02054, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.layout import Layout
from shardwise.precision import StateDtypes
from shardwise.sharding import Placement

__all__ = ["BucketPlan", "MemoryPlan"]


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """One bucket before it exists.

    Attributes:
        unit: number of its unit.
        label: what messages call it.
        trainable: whether it has gradients, a master and optimizer state.
    """

    unit: int
    label: str
    layout: Layout
    placement: Placement
    dtypes: StateDtypes
    trainable: bool

    def bytes_at_rest(self, coordinates: Mapping[str, int], optim_words: int) -> dict[str, int]:
        """Return bytes by kind on the rank with these mesh coordinates.

        Args:
            coordinates: rank on every axis of the placement.
            optim_words: elements of optimizer state per parameter element, in the master's dtype.
        """
        place, numel = self.placement, self.layout.numel
        held = {"param": numel // place.ways(place.num_param) * self.dtypes.param.itemsize}
        if not self.trainable:
            return held | {"master": 0, "grad": 0, "optim": 0}
        separate = self.dtypes.master != self.dtypes.param
        owned = place.slice_range(place.num_optim, numel, coordinates)
        real = sum(fragment.numel for fragment in self.layout.fragments(*owned))
        master_bytes = self.dtypes.master.itemsize
        return held | {
            "master": numel // place.ways(place.num_optim) * master_bytes if separate else 0,
            "grad": numel // place.ways(place.num_grad) * self.dtypes.accumulate.itemsize,
            "optim": real * optim_words * master_bytes,
        }

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the full parameters while they are gathered; 0 where they rest whole."""
        return self.layout.numel * self.dtypes.param.itemsize if self.placement.num_param else 0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Planned bytes of the model states of one rank (activations and temporaries are left out).

    Attributes:
        buckets: the buckets the run will have.
        optim_words: elements of optimizer state per parameter element.
        mesh: data-parallel axes with their sizes, outermost first.
    """

    buckets: tuple[BucketPlan, ...]
    optim_words: int
    mesh: Mapping[str, int]

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes by kind on rank 0: "param", "master", "grad", "optim"."""
        return self.of_rank(0)

    def of_rank(self, rank: int) -> dict[str, int]:
        """Return bytes by kind on one rank of the mesh, ranks in row-major order."""
        coordinates = {}
        for axis, size in reversed(list(self.mesh.items())):
            rank, coordinates[axis] = divmod(rank, size)
        return _total([bucket.bytes_at_rest(coordinates, self.optim_words) for bucket in self.buckets])

    @property
    def num_params(self) -> int:
        """Number of parameter elements, padding not counted."""
        return sum(bucket.layout.used_numel for bucket in self.buckets)

    @property
    def padding_numel(self) -> int:
        """Number of padding elements over all ranks."""
        return sum(bucket.layout.padding_numel for bucket in self.buckets)

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of the largest unit's gathered parameters: the least transient memory of a forward."""
        by_unit: dict[int, int] = {}
        for bucket in self.buckets:
            by_unit[bucket.unit] = by_unit.get(bucket.unit, 0) + bucket.gathered_bytes
        return max(by_unit.values(), default=0)


def _total(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {kind: sum(part[kind] for part in parts) for kind in ("param", "master", "grad", "optim")}
