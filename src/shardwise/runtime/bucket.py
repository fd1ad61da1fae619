"""A bucket: one flat buffer of a unit, its state, and the five verbs.

A unit has one bucket per key (dtype, trainable, atom, sharding), so frozen weights, mixed dtypes and mixed policies
are separate buckets launched together. ``params.py`` and ``grads.py`` hold the two halves; both move memory only in
the ways ``site.py`` offers. Read ``runtime.py`` next: it decides when.
"""

from shardwise.errors import StateError
from shardwise.runtime.grads import GradBuffers, GradState
from shardwise.runtime.params import ParamBuffers, ParamState
from shardwise.runtime.site import Site

__all__ = ["Bucket", "GradState", "ParamState"]


class Bucket:
    """Parameters and gradients of one layout on one rank."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.params = ParamBuffers(site)
        self.grads = GradBuffers(site) if site.trainable else None

    @property
    def label(self) -> str:
        """Name for messages: the unit and what sets this bucket apart."""
        return self.site.label

    @property
    def trainable_grads(self) -> GradBuffers:
        """The gradient half.

        Raises:
            StateError: the bucket is frozen and has none.
        """
        if self.grads is None:
            raise StateError(f"{self.label} is frozen: it has no gradients")
        return self.grads

    def unshard(self) -> bool:
        """Start gathering the full parameters (all-gather over P); return whether there was anything to start."""
        return self.params.unshard()

    def reshard(self) -> None:
        """Free the full parameters (nothing where P is empty)."""
        self.params.reshard()

    def reduce_grads(self) -> None:
        """Start summing the local gradients over G; the window goes on."""
        self.trainable_grads.reduce(final=False)

    def finalize_grads(self, factor: float = 1.0) -> None:
        """Start the window's whole reduction: over G, then O minus G, then D minus O; multiply by ``factor``."""
        self.trainable_grads.reduce(final=True, factor=factor)

    def refresh_params(self) -> None:
        """After a step: write the shard from the master and start the all-gather over O minus P."""
        self.params.refresh()

    def drop(self) -> None:
        """Give all memory back; the bucket is dead afterwards."""
        self.params.drop()
        if self.grads is not None:
            self.grads.empty()
