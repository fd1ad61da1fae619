"""The optimizer's view of the model: one flat fragment of the master per parameter and rank.

A fragment is an ordinary one-dimensional ``nn.Parameter``; its ``.grad`` is a view of the reduced gradient, set just
before the optimizer moves. Fragments are cut at the same places at every stage (slots start at multiples of the
alignment), so element-wise optimizers round alike at every stage.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shardwise.guard import GuardedFragment
from shardwise.layout import Fragment
from shardwise.memory import Kind, Slab
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.loans import Loans, own_version

__all__ = ["BucketFragments"]


class BucketFragments:
    """The fragments of one trainable bucket that this rank owns.

    Attributes:
        params: fragment by slot number; slots of which this rank owns nothing are missing.
    """

    def __init__(self, bucket: Bucket, loans: Loans) -> None:
        self.bucket = bucket
        self._loans = loans
        site = bucket.site
        self._start, stop = site.bounds(site.placement.num_optim)
        self.parts: Mapping[int, Fragment] = {
            part.slot.index: part for part in site.layout.fragments(self._start, stop)
        }
        self.params = {index: self._make(part) for index, part in self.parts.items()}
        self._known_versions = self._versions()
        self._have_grads = False
        self._cast: Slab | None = None
        dtypes = site.dtypes
        if dtypes.accumulate != dtypes.master:
            self._cast = site.arena.slab(Kind.STAGING, bucket.params.master.numel(), dtypes.master, site.owner)

    def _make(self, part: Fragment) -> nn.Parameter:
        fragment = nn.Parameter(own_version(self._cut(self.bucket.params.master, part)))
        slot, grads = part.slot, self.bucket.trainable_grads
        fragment.__dict__.update(
            _name=slot.param.name,
            _is_pending=lambda: slot.index in grads.pending,
            _discard=lambda: grads.discard(slot),
            _lend=lambda: self._loans.lend(fragment.detach()),
        )
        fragment.__class__ = GuardedFragment
        return fragment

    def set_guard(self, *, on: bool) -> None:
        """Guard the fragments' gradients outside the optimizer's step, give torch plain parameters inside it."""
        for param in self.params.values():
            param.__class__ = GuardedFragment if on else nn.Parameter

    def set_grads(self, slots: Iterable[int]) -> None:
        """Give the fragments of ``slots`` their gradients, in the master's dtype; the others get None."""
        wanted = set(slots)
        self.set_guard(on=False)
        grads = self.bucket.trainable_grads
        source = grads.owned if grads.has_result else None
        if source is not None:
            self.bucket.site.lanes.on_compute(reads=[source])
        if source is not None and self._cast is not None and wanted & self.params.keys():
            source = self._cast.fill().copy_(source)
        self._have_grads = True
        for index, param in self.params.items():
            given = source is not None and index in wanted
            # A new view each time: what a user did to the last one, by .data or an attribute, must not last.
            param.grad = self._cut(source, self.parts[index]) if given and source is not None else None

    def drop_grads(self) -> None:
        """Take the gradients away and free what their cast needed."""
        if not self._have_grads:
            return
        self._have_grads = False
        self.set_guard(on=False)
        for param in self.params.values():
            param.grad = None
        self.set_guard(on=True)
        if self._cast is not None:
            self._cast.release()

    def slabs(self) -> list[Slab]:
        """Return what may hold memory."""
        return [] if self._cast is None else [self._cast]

    @property
    def are_edited(self) -> bool:
        """Whether a fragment was edited in place since ``note_versions``."""
        return self._versions() != self._known_versions

    def note_versions(self) -> None:
        """Take the fragments as they are now for unedited."""
        self._known_versions = self._versions()

    def _versions(self) -> int:
        return sum([param._version for param in self.params.values()])

    def _cut(self, owned: Tensor, part: Fragment) -> Tensor:
        offset = part.flat_start - self._start
        return owned[offset : offset + part.numel]
