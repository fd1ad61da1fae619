"""The parameter half of a bucket: the full buffer, this rank's shard, the master the optimizer updates.

Verbs: ``unshard`` (all-gather over P), ``reshard`` (free), ``refresh`` (all-gather over O minus P after a step).
Where P is empty the shard *is* the full buffer; where no wider master is kept, the master is a view of the shard.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from shardwise.comm.base import Verb
from shardwise.errors import StateError
from shardwise.lanes import Handle, Steps
from shardwise.layout import Slot
from shardwise.memory import Kind
from shardwise.numerics.fingerprint import fingerprint
from shardwise.runtime.site import Site

__all__ = ["ParamBuffers", "ParamState"]


class ParamState(Enum):
    """Whether the full parameters may be read."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class ParamBuffers:
    """Parameters of one bucket on one rank.

    Attributes:
        full: [numel] parameter dtype; its memory comes and goes with ``unshard`` and ``reshard`` if P is not empty.
        shard: [numel / |P|] parameter dtype, at rest.
        master: [numel / |O|] master dtype, at rest; a view of ``shard`` when the dtypes agree.
        version: number of times the parameters changed; weights saved for backward carry it.
        still_held: says whether somebody holds the parameter objects themselves and may read them; None: nobody.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        place, dtypes, numel = site.placement, site.dtypes, site.layout.numel
        self.sharded_axes = place.num_param > 0
        kind = Kind.GATHERED if self.sharded_axes else Kind.PARAM
        self.full = site.arena.slab(kind, numel, dtypes.param, site.owner)
        self.full.fill()
        for start, stop in site.layout.gaps:  # the rest is written by whoever brings the values
            self.full.tensor[start:stop].zero_()
        self.shard = self.full.tensor
        if self.sharded_axes:
            shard_numel = numel // place.ways(place.num_param)
            self.shard = site.arena.persistent(Kind.PARAM, shard_numel, dtypes.param, site.owner)
        self.separate_master = site.trainable and dtypes.master != dtypes.param
        if self.separate_master:
            owned_numel = numel // place.ways(place.num_optim)
            self.master = site.arena.persistent(Kind.MASTER, owned_numel, dtypes.master, site.owner)
        else:
            self.master = self.owned()
        self.still_held: Callable[[], bool] | None = None
        self.state = ParamState.UNSHARDED
        self.version = 0
        self._pending: Handle | None = None

    def slot_view(self, slot: Slot) -> Tensor:
        """Return a tensor with its own version counter over the slot's place in the full buffer."""
        full, shape = self.full.tensor, slot.param.shape
        view = torch.empty(0, dtype=full.dtype, device=full.device)
        # [Note: storage identity] views share the slab's storage object, which never changes, so that freeing and
        # refilling the slab keeps them, and everything autograd saved of them, valid.
        view.set_(full.untyped_storage(), slot.start, shape, full[slot.start : slot.stop].view(shape).stride())
        return view

    def owned(self) -> Tensor:
        """Return this rank's range of O inside the shard."""
        place = self.site.placement
        return self.site.view(self.shard, place.num_param, place.num_optim)

    def adopt_full(self) -> None:
        """Take the values now in the full buffer as the parameters: fill shard and master from them."""
        place = self.site.placement
        self.wait()
        self.site.lanes.on_compute(reads=[self.full.tensor], writes=[self.shard, self.master])
        if self.sharded_axes:
            self.shard.copy_(self.site.view(self.full.tensor, 0, place.num_param))
        if self.separate_master:
            self.master.copy_(self.owned())

    def adopt_masters(self, values: Sequence[Tensor]) -> None:
        """Fill a separate master from wider initial values, one tensor per slot, instead of the rounded parameters."""
        if not self.separate_master:
            return
        start, stop = self.site.bounds(self.site.placement.num_optim)
        self.site.lanes.on_compute(writes=[self.master])
        for part in self.site.layout.fragments(start, stop):
            flat = values[part.slot.index].reshape(-1)
            offset = part.flat_start - start
            self.master[offset : offset + part.numel] = flat[part.param_start : part.param_start + part.numel]

    def adopt_value(self, slot: Slot, value: Tensor) -> None:
        """Write this rank's part of one parameter's initial value into shard and master; the full buffer stays away.

        Args:
            slot: the parameter's place.
            value: the whole parameter; rounded to the dtypes of shard and master.
        """
        place, site = self.site.placement, self.site
        targets = [(self.shard, place.num_param)]
        if self.separate_master:
            targets.append((self.master, place.num_optim))
        site.lanes.on_compute(writes=[target for target, _ in targets])
        flat = value.reshape(-1)
        for target, depth in targets:
            begin, end = site.bounds(depth)
            first, last = max(slot.start, begin), min(slot.stop, end)
            if first < last:
                target[first - begin : last - begin] = flat[first - slot.start : last - slot.start]

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Take a user's edits of the full buffer over into shard and master; masters not edited keep their bits.

        Ranks that edited differently end up alike: each element is taken from the rank whose finest slice holds it.
        """
        place, site = self.site.placement, self.site
        site.lanes.on_compute(writes=[self.full.tensor, self.shard, self.master])
        for work in site.gather(self.full.tensor, Verb.ACCESS, base=0, depth=len(place.axes)):
            if work is not None:
                work.wait()
        if self.sharded_axes:
            self.shard.copy_(site.view(self.full.tensor, 0, place.num_param))
        if self.separate_master:
            owned = self.owned()
            edited = owned != self.master.to(owned.dtype)
            torch.where(edited, owned.to(self.master.dtype), self.master, out=self.master)
        self.version += 1

    def unshard(self) -> bool:
        """Start the all-gather over P if the parameters are not there; return whether one was started."""
        if self.state is not ParamState.SHARDED:
            return False
        site, depth = self.site, self.site.placement.num_param
        self._wait_pending()  # a refresh of the shard
        full = self.full.fill()
        site.journal.add(f"gathered {site.label}")
        self.state = ParamState.GATHERING
        site.lanes.on_compute(writes=[full])

        def job() -> Steps:
            site.view(full, 0, depth).copy_(self.shard)
            yield from site.gather(full, Verb.UNSHARD, base=0, depth=depth)

        self._pending = site.lanes.gather.run(job, reads=[self.shard], writes=[full])
        return True

    def wait(self) -> None:
        """Order what follows after the gather or refresh in flight.

        Raises:
            StateError: the parameters are not gathered and nobody gathers them.
        """
        self._wait_pending()
        if self.state is ParamState.SHARDED:
            raise StateError(f"{self.site.label}: waited for parameters that nobody gathers")
        self.state = ParamState.UNSHARDED

    def settle(self) -> None:
        """Wait for what is in flight, whatever the state."""
        self._wait_pending()
        if self.state is ParamState.GATHERING:
            self.state = ParamState.UNSHARDED

    def reshard(self) -> None:
        """Free the full buffer if P is not empty.

        [Note: foreign views] Where somebody still holds a view of it (a module that keeps one, a function's context,
        saved-tensor hooks of the user's), the memory stays, so that nobody reads what was freed. The next gather writes
        to the same place all the same: ranks must gather alike, whatever is held on one of them.
        """
        if not self.sharded_axes:
            return
        if self.state is not ParamState.SHARDED:
            self.wait()
            self.site.lanes.on_compute(writes=[self.full.tensor])
            self.state = ParamState.SHARDED
        if self.still_held is not None and not self.still_held():
            self.still_held = None
        if self.full.filled and self.still_held is None and not self.full.has_foreign_aliases:
            self.full.release()

    def fingerprint(self) -> int:
        """Return a number for the gathered parameters; 0 where they are not freed, or not there."""
        if not self.sharded_axes or self.state is not ParamState.UNSHARDED:
            return 0
        self.site.lanes.on_compute(reads=[self.full.tensor])
        return fingerprint(self.full.tensor)

    def refresh(self) -> None:
        """After the master changed: write the shard, start the all-gather over O minus P."""
        site, place = self.site, self.site.placement
        if self.sharded_axes:
            self.reshard()
        self.settle()
        self.version += 1
        if place.num_optim == place.num_param and not self.separate_master:
            return
        base, depth = place.num_param, place.num_optim
        if depth > base:
            site.journal.add(f"refreshed {site.label}")

        def job() -> Steps:
            if self.separate_master:
                self.owned().copy_(self.master)
            yield from site.gather(self.shard, Verb.REFRESH, base=base, depth=depth)

        outside = site.outside(self.shard, base, depth)
        writes = [*outside, self.owned()] if self.separate_master else outside
        self._pending = site.lanes.gather.run(job, reads=[self.master], writes=writes)
        if not self.sharded_axes:
            self.state = ParamState.GATHERING

    def drop(self) -> None:
        """Give all memory back; weights saved for backward become invalid where they are handles."""
        self.settle()
        self.version = -1
        self.full.abandon()
        if self.sharded_axes:
            self.site.arena.drop(Kind.PARAM, self.shard, self.site.owner)
        if self.separate_master:
            self.site.arena.drop(Kind.MASTER, self.master, self.site.owner)

    def touch(self) -> None:
        """Tell the instruments that compute reads the full parameters now."""
        self.site.lanes.on_compute(reads=[self.full.tensor])

    def _wait_pending(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
