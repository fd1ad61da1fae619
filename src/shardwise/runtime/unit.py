"""A unit: what is gathered together, and the counts that say when its backward is over."""

from collections.abc import Callable, Iterator

from shardwise.runtime.bucket import Bucket
from shardwise.schedule import Begin, End

__all__ = ["Unit", "Use"]


class Use:
    """One forward call of a unit whose inputs need gradients; open until they have all arrived.

    Attributes:
        num_open: inputs that still wait.
        reached: whether a backward came to its outputs.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self.num_open = num_parts
        self.reached = False

    def reach(self) -> None:
        """A backward comes to the outputs, perhaps once more through a retained graph."""
        self.reached = True
        self.num_open = self._num_parts if self.num_open <= 0 else self.num_open


class Unit:
    """Buckets of one module that are gathered, freed and reduced together.

    Attributes:
        active: forward calls that are running.
        uses: the open uses.
        recomputes: forward calls without grad mode inside a forward with it: reentrant checkpoints that will
            recompute and bring gradients once more.
        pins: callers that need the full parameters whatever the schedule says.
        held: whether a view of a weight left a forward: the unit stays until the root's forward ends.
        after_edit: called when edits of the full parameters were taken over.
        after_unpin: called when nobody pins the unit any more.
        delivered: trainable slots, as (bucket number in the unit, slot), with a gradient in the running backward.
        awaited: the slots that a complete backward delivers.
    """

    def __init__(self, index: int, name: str, buckets: tuple[Bucket, ...]) -> None:
        self.index = index
        self.name = name
        self.buckets = buckets
        self.begin, self.end = Begin(index), End(index)  # the same objects each time: traces compare fast
        self.active = 0
        self.uses: set[Use] = set()
        self.recomputes = 0
        self.pins = 0
        self.held = False
        self.after_edit: list[Callable[[], None]] = []
        self.after_unpin: list[Callable[[], None]] = []
        self.delivered: set[tuple[int, int]] = set()
        self.awaited: frozenset[tuple[int, int]] = frozenset()
        self.await_slots(frozenset())

    def await_slots(self, inactive: frozenset[tuple[int, int]]) -> None:
        """Wait in each backward for every trainable slot except the ``inactive`` ones (frozen since)."""
        slots = {
            (number, slot.index)
            for number, bucket in enumerate(self.buckets)
            if bucket.grads is not None
            for slot in bucket.site.layout.slots
        }
        self.awaited = frozenset(slots - inactive)

    def set_buckets(self, buckets: tuple[Bucket, ...]) -> None:
        """Replace the buckets; every trainable slot is awaited."""
        self.buckets = buckets
        self.await_slots(frozenset())

    @property
    def trainable(self) -> bool:
        """Whether any bucket has gradients."""
        return any(bucket.grads is not None for bucket in self.buckets)

    @property
    def backward_is_over(self) -> bool:
        """Whether all gradients are in and every use has its input gradients."""
        return (
            not self.uses
            and self.recomputes == 0
            and len(self.delivered) >= len(self.awaited)  # asked at each gradient
            and self.delivered >= self.awaited
        )

    def unshard(self) -> None:
        """Start gathering every bucket."""
        for bucket in self.buckets:
            bucket.unshard()

    def wait(self) -> None:
        """Order what follows after the gathers."""
        for bucket in self.buckets:
            bucket.params.wait()
            bucket.params.touch()

    def reshard(self) -> None:
        """Free every bucket's full parameters unless somebody needs them."""
        if not self.active and not self.pins and not self.held:
            for bucket in self.buckets:
                bucket.reshard()

    def unpin(self, *, adopt_edits: bool) -> None:
        """One caller less needs the full parameters; take its edits over."""
        self.unshard()  # a step inside the context freed them
        self.wait()
        self.pins -= 1
        if adopt_edits:
            for bucket in self.buckets:
                bucket.params.adopt_edits()
            for notice in self.after_edit:
                notice()
        if not self.pins:
            for notice in self.after_unpin:
                notice()
        self.reshard()

    def trainable_buckets(self) -> Iterator[Bucket]:
        """Yield the buckets with gradients."""
        return (bucket for bucket in self.buckets if bucket.grads is not None)

    def reset_backward(self) -> None:
        """Forget the counts of a backward that is over or failed; uses it did not reach belong to other graphs."""
        self.delivered.clear()
        self.recomputes = 0
        self.held = False
        self.uses = {use for use in self.uses if not use.reached}
