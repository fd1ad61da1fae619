"""The gradient half of a bucket: local gradients in, reduced gradients out.

A *window* is what is reduced together: the micro-batches up to and with a backward outside ``no_sync``. Local
gradients grow in a buffer as long as the full space; ``reduce_grads`` sums them over G into the window buffer,
``finalize`` over O minus G and D minus O. The first window's buffer is the resting gradient itself; a later window
before the step is reduced alone in a slab and added, so that no sum mixes reduced with local terms.
"""

from collections.abc import Collection, Iterable
from enum import Enum

import torch
from torch import Tensor

from shardwise.comm.base import Verb
from shardwise.lanes import Handle, Steps
from shardwise.layout import Slot
from shardwise.memory import Kind, Slab
from shardwise.runtime.site import Site

__all__ = ["GradBuffers", "GradState"]


class GradState(Enum):
    """What the gradient buffers hold."""

    EMPTY = "empty"
    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    REDUCED = "reduced"


class GradBuffers:
    """Gradients of one trainable bucket on one rank.

    Attributes:
        resting: [numel / |G|] accumulate dtype; after a window its O-range is the mean gradient over all ranks.
        arrived: slots that received a gradient on this rank since the gradients were last emptied.
        pending: slots for which a gradient may wait here: this rank's own or, after a reduction, that of any rank. When
            the ranks have agreed on what arrived, exactly those.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        place, dtype, numel = site.placement, site.dtypes.accumulate, site.layout.numel
        shard_numel = numel // place.ways(place.num_grad)
        self.resting = site.arena.slab(Kind.GRAD, shard_numel, dtype, site.owner)
        self._window = site.arena.slab(Kind.STAGING, shard_numel, dtype, site.owner)
        self._local = site.arena.slab(Kind.STAGING, numel, dtype, site.owner) if place.num_grad else None
        self.state = GradState.EMPTY
        self.arrived: set[int] = set()
        self.pending: set[int] = set()
        self._agreed: set[int] = set()  # slots that are pending on every rank
        self._written: set[int] = set()  # slots with a value in the local buffer
        self._partial = False  # the window buffer holds sums over G that are not final
        self._has_result = False  # the resting buffer holds a final gradient
        self._pending: Handle | None = None
        self._all_slots = frozenset(slot.index for slot in site.layout.slots)
        self._views: dict[tuple[int, int], Tensor] = {}
        self._gaps: dict[int, list[Tensor]] = {}

    @property
    def owned(self) -> Tensor:
        """This rank's range of O of the final gradient, [numel / |O|]."""
        place = self.site.placement
        return self.site.view(self.resting.tensor, place.num_grad, place.num_optim)

    @property
    def own_slice(self) -> Tensor:
        """This rank's finest slice of the final gradient, [shard_numel]."""
        place = self.site.placement
        return self.site.view(self.resting.tensor, place.num_grad, len(place.axes))

    @property
    def has_local(self) -> bool:
        """Whether local gradients wait for a reduction."""
        return bool(self._written) or self._partial

    @property
    def has_written(self) -> bool:
        """Whether a gradient arrived that no reduction has taken yet."""
        return bool(self._written)

    @property
    def has_result(self) -> bool:
        """Whether a final gradient is there."""
        return self._has_result

    def accumulate(self, slot: Slot, grad: Tensor, factor: float = 1.0) -> None:
        """Copy (or add) ``factor`` times one parameter's local gradient into its place."""
        if self.state is GradState.REDUCING:
            self.wait()
        slab = self._target()
        slab.fill()
        view = self._view(slab, slot)
        self.site.lanes.on_compute(writes=[view])
        if slot.index in self._written:
            # On the CPU add_ would widen the gradient itself, where no dry run can see it.
            view.add_(grad.to(view.dtype) if grad.is_cpu else grad, alpha=factor)
        else:
            view.copy_(grad)
            if factor != 1.0:
                view.mul_(factor)
            self._written.add(slot.index)
        self.arrived.add(slot.index)
        self.pending.add(slot.index)
        self.state = GradState.ACCUMULATING

    def reduce(self, *, final: bool, factor: float = 1.0) -> None:
        """Start the reduction of the local gradients over G and, if ``final``, the rest of the window.

        Slots without a local gradient count as zero. Without ``final`` nothing happens where G is empty. ``factor``
        multiplies the window's final gradient (the inverse of the loss scale).
        """
        place = self.site.placement
        if not final and not place.num_grad:
            return
        self.wait()
        site, window = self.site, self._window_slab()
        local = self._local or window
        local.fill()
        window.fill()
        self._zero_missing(local)
        grad_depth, optim_depth, all_depth = place.num_grad, place.num_optim, len(place.axes)
        fresh, merge = not self._partial, window is not self.resting
        site.journal.add(f"{'finalized' if final else 'reduced'} {site.label}")

        def job() -> Steps:
            if grad_depth:
                summed = window.tensor if fresh else None
                yield from site.scatter(local.tensor, Verb.REDUCE, base=0, start=0, depth=grad_depth, out=summed)
                if not fresh:
                    window.tensor.add_(site.view(local.tensor, 0, grad_depth))
            if final:
                yield from site.scatter(
                    window.tensor, Verb.FINALIZE_SCATTER, base=grad_depth, start=grad_depth, depth=all_depth
                )
                owned = site.view(window.tensor, grad_depth, optim_depth)
                yield from site.gather(owned, Verb.FINALIZE_GATHER, base=optim_depth, depth=all_depth)
                if factor != 1.0:
                    owned.mul_(factor)
                if merge:
                    self.owned.add_(owned)

        writes = [window.tensor] if grad_depth and fresh else []
        updates = [local.tensor, *([] if writes else [window.tensor]), *([self.owned] if merge and final else [])]
        self._pending = site.lanes.reduce.run(job, writes=writes, updates=updates)
        self._partial = not final
        self._has_result = self._has_result or final
        self._written.clear()
        if place.num_ranks > 1:
            self.agree(self._all_slots)
        self.state = GradState.REDUCING

    def wait(self) -> None:
        """Order what follows after the reduction in flight, and free what it alone needed."""
        if self.state is not GradState.REDUCING or self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self.state = GradState.REDUCED
        if self._local is not None:
            self._free(self._local)
        if not self._partial:
            self._free(self._window)

    def agree(self, slots: Collection[int]) -> None:
        """Take over which slots may have a gradient, as all ranks see it."""
        self.pending, self._agreed = set(slots), set(slots)

    def discard(self, slot: Slot, *, keep_arrived: bool = False) -> None:
        """Zero everything that arrived for one parameter and, unless ``keep_arrived``, forget that it did.

        When no parameter is left that a gradient may wait for, the memory is given back.
        """
        self.wait()
        if not keep_arrived:
            if slot.index in self._agreed:  # all ranks must do it
                self.site.journal.add(f"cleared {slot.param.name}")
            self._agreed.discard(slot.index)
            self.arrived.discard(slot.index)
            self.pending.discard(slot.index)
        place, site = self.site.placement, self.site
        if slot.index in self._written:
            view = self._view(self._target(), slot)
            site.lanes.on_compute(writes=[view])
            view.zero_()
        origin, end = site.bounds(place.num_grad)
        first, last = max(slot.start, origin), min(slot.stop, end)
        for slab in (self.resting, self._window):
            if slab.filled and first < last:
                view = slab.tensor[first - origin : last - origin]
                site.lanes.on_compute(writes=[view])
                view.zero_()
        if not self.pending:
            self.empty()

    def empty(self) -> None:
        """Forget all gradients and give their memory back."""
        self.wait()
        if self._agreed:
            self.site.journal.add(f"cleared {self.site.label}")
        self._agreed.clear()
        for slab in self.slabs():
            self._free(slab)
        self.arrived.clear()
        self.pending.clear()
        self._written.clear()
        self._partial = self._has_result = False
        self.state = GradState.EMPTY

    def _target(self) -> Slab:
        """Return where local gradients grow."""
        return self._local or self._window_slab()

    def _window_slab(self) -> Slab:
        return self._window if self._has_result else self.resting

    def slabs(self) -> Iterable[Slab]:
        """Return what may hold memory."""
        return (slab for slab in (self._local, self._window, self.resting) if slab is not None)

    def _view(self, slab: Slab, slot: Slot) -> Tensor:
        key = (id(slab), slot.index)
        if key not in self._views:
            self._views[key] = slab.tensor[slot.start : slot.stop].view(slot.param.shape)
        return self._views[key]

    def _zero_missing(self, local: Slab) -> None:
        """Zero padding and slots without a gradient, so that sums and norms read no stale memory."""
        layout = self.site.layout
        self.site.lanes.on_compute(writes=[local.tensor])
        if id(local) not in self._gaps:
            self._gaps[id(local)] = [local.tensor[start:stop] for start, stop in layout.gaps]
        missing = [local.tensor[layout.slots[i].start : layout.slots[i].stop] for i in self._all_slots - self._written]
        stale = [*self._gaps[id(local)], *missing]
        if stale:
            torch._foreach_zero_(stale)

    def _free(self, slab: Slab) -> None:
        if slab.filled:
            self.site.lanes.on_compute(writes=[slab.tensor])
            slab.release()
