"""Where a bucket lives: its layout over its mesh, and the two collectives that every verb is made of.

``scatter`` walks the list of splits forwards (reduce-scatter, axis by axis), ``gather`` walks it backwards
(all-gather). Both work in place on one flat buffer that holds the range of some depth of the split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from shardwise.comm.base import Comm, Key, Verb, Work
from shardwise.lanes import Lanes
from shardwise.layout import Layout
from shardwise.memory import Arena
from shardwise.precision import StateDtypes
from shardwise.runtime.journal import Journal
from shardwise.sharding import Placement

__all__ = ["Site"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """Everything about a bucket that does not change, and the means its verbs use.

    Attributes:
        index: the bucket's number in the model, the same on all ranks.
        label: what error messages call the bucket.
        mesh: communicators by axis: those of the whole model, which may be wrapped while it lives.
    """

    index: int
    label: str
    layout: Layout
    placement: Placement
    dtypes: StateDtypes
    trainable: bool
    mesh: Mapping[str, Comm]
    arena: Arena
    lanes: Lanes
    journal: Journal
    _sequence: dict[tuple[Verb, int], int] = field(default_factory=dict)

    @cached_property
    def owner(self) -> str:
        """Name of the unit, as the ledger knows it; "root" for the model itself."""
        return self.label.partition(" (")[0]

    def bounds(self, depth: int) -> tuple[int, int]:
        """Range of the flat space this rank holds after ``depth`` splits."""
        return self._bounds[depth]

    @cached_property
    def _bounds(self) -> tuple[tuple[int, int], ...]:
        coordinates = {axis: comm.rank for axis, comm in self.mesh.items()}
        depths = range(len(self.placement.axes) + 1)
        return tuple(self.placement.slice_range(depth, self.layout.numel, coordinates) for depth in depths)

    def view(self, buffer: Tensor, base: int, depth: int) -> Tensor:
        """Return the range of ``depth`` inside a buffer that holds the range of ``base``."""
        origin = self.bounds(base)[0]
        start, stop = self.bounds(depth)
        return buffer[start - origin : stop - origin]

    def key(self, verb: Verb, depth: int) -> Key:
        """Return a key that no earlier collective of this bucket had."""
        sequence = self._sequence.get((verb, depth), 0)
        self._sequence[verb, depth] = sequence + 1
        return Key(self.index, verb, sequence, self.label)

    def gather(self, buffer: Tensor, verb: Verb, *, base: int, depth: int) -> Iterator[Work | None]:
        """Fill ``buffer`` (the range of ``base``) from the part of ``depth`` that this rank has in place."""
        for level in reversed(range(base, depth)):
            if buffer.numel() == 0:
                return  # only empty parameters: nothing to move
            comm = self.mesh[self.placement.axes[level]]
            yield comm.all_gather(self.view(buffer, base, level), self.key(verb, level))

    def scatter(
        self, buffer: Tensor, verb: Verb, *, base: int, start: int, depth: int, out: Tensor | None = None
    ) -> Iterator[Work | None]:
        """Reduce the range of ``start`` inside ``buffer`` (the range of ``base``) to the part of ``depth``.

        The result replaces that part of the buffer, or goes to ``out`` if given.
        """
        for level in range(start, depth):
            if buffer.numel() == 0:
                return
            comm = self.mesh[self.placement.axes[level]]
            source = self.view(buffer, base, level)
            own = self.view(buffer, base, level + 1)
            target = out if out is not None and level == depth - 1 else own
            yield comm.reduce_scatter(source, target, self.key(verb, level), wire=self.dtypes.wire, sum=self.dtypes.sum)

    def outside(self, buffer: Tensor, base: int, depth: int) -> list[Tensor]:
        """Return the parts of ``buffer`` (the range of ``base``) that a gather from ``depth`` writes."""
        origin = self.bounds(base)[0]
        start, stop = self.bounds(depth)
        return [piece for piece in (buffer[: start - origin], buffer[stop - origin :]) if piece.numel()]
