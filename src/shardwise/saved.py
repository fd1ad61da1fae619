"""Weights saved for backward are handles, so that freeing a unit too early costs a gather and never the answer.

autograd saves a view of a gathered weight; ``pack`` keeps (bucket, version, place) instead, ``unpack`` gathers the
bucket again and makes the view. Any other tensor is kept with its version, because saved-tensor hooks switch off
autograd's own check for changes in place. See docs/design/0005-saved-weights-are-handles.md.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import StateError
from shardwise.regions import is_recomputation, top_hooks
from shardwise.runtime.bucket import Bucket, ParamState

__all__ = ["SavedWeights", "is_nonreentrant_recompute", "storage_address"]

_CAST_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Handle:
    """A view of a bucket's full buffer, by place; ``cast`` is the dtype autocast gave a copy of it."""

    bucket: Bucket
    version: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    cast: torch.dtype | None


class SavedWeights:
    """The pair of saved-tensor hooks of one model.

    Args:
        by_storage: buckets whose parameters are freed, by the address of their storage object.
        active: the buckets whose units compute now, looked through for the source of a cast weight.
    """

    def __init__(self, by_storage: Mapping[int, Bucket], active: Callable[[], list[Bucket]]) -> None:
        self._by_storage = by_storage
        self._active = active

    def context(self) -> AbstractContextManager[Any] | None:
        """Return the hooks to enter around a forward, or None if they are active already.

        Hooks of others (activation checkpointing) are kept: weights become handles, the rest goes to them.
        """
        outer = top_hooks()
        if outer is None:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        outer_pack, outer_unpack = outer
        if outer_pack == self.pack or (isinstance(outer_pack, _ComposedPack) and outer_pack.weights is self):
            return None
        return torch.autograd.graph.saved_tensors_hooks(
            _ComposedPack(self, outer_pack), _ComposedUnpack(self, outer_unpack)
        )

    def pack(self, tensor: Tensor) -> Any:
        """Replace a view of a managed weight by a handle, keep other tensors with their version."""
        # An operation's own output would keep its node, and the node what is returned here: a cycle nobody collects.
        return self.handle(tensor) or (tensor.detach(), tensor._version)

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that ``pack`` was given.

        Raises:
            StateError: the weight changed since, or the tensor was modified in place.
        """
        if isinstance(kept, _Handle):
            return self.restore(kept)
        tensor: Tensor
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected {version}"
            )
        return tensor

    def handle(self, tensor: Tensor) -> _Handle | None:
        """Return a handle if the tensor is a view of a managed weight, or autocast's copy of one."""
        bucket = self._by_storage.get(storage_address(tensor))
        if bucket is not None and tensor.dtype == bucket.site.dtypes.param:
            return _Handle(
                bucket, bucket.params.version, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), None
            )
        if tensor.dtype in _CAST_DTYPES:  # autocast looks switched off in here: this runs below its kernels
            return self._cast_handle(tensor)
        return None

    def restore(self, handle: _Handle) -> Tensor:
        """Gather the handle's bucket and return the view it stands for."""
        bucket = handle.bucket
        if handle.version != bucket.params.version:
            raise StateError(
                f"{bucket.label}: parameters changed between forward and backward (an optimizer step, an edit, the end "
                "of an `unsharded` without writes=False, or one became trainable); run backward before that, or run "
                "the forward again"
            )
        if bucket.params.state is not ParamState.UNSHARDED:  # asked for every saved weight
            bucket.unshard()
            bucket.params.wait()
        bucket.params.touch()
        full = bucket.params.full.tensor
        view = torch.empty(0, dtype=full.dtype, device=full.device).set_(
            full.untyped_storage(), handle.offset, handle.size, handle.stride
        )
        return view if handle.cast is None else view.to(handle.cast)

    def _cast_handle(self, tensor: Tensor) -> _Handle | None:
        """Find the weight of which autocast made this 16-bit copy: same elements in the same order."""
        for bucket in self._active():
            if not bucket.params.sharded_axes or bucket.site.dtypes.param in _CAST_DTYPES:
                continue
            for slot in bucket.site.layout.slots:
                numel = slot.param.numel
                if numel != tensor.numel() or numel == 0:
                    continue
                weight = bucket.params.full.tensor[slot.start : slot.stop]
                for shape, view in _orientations(weight, slot.param.shape):
                    if shape == tuple(tensor.shape) and _same_after_cast(view, tensor):
                        return _Handle(
                            bucket,
                            bucket.params.version,
                            int(view.storage_offset()),
                            shape,
                            view.stride(),
                            tensor.dtype,
                        )
        return None


class _ComposedPack:
    def __init__(self, weights: SavedWeights, outer: Callable[[Tensor], Any]) -> None:
        self.weights = weights
        self.outer = outer

    def __call__(self, tensor: Tensor) -> Any:
        handle = self.weights.handle(tensor)
        return (self.outer(tensor),) if handle is None else handle


class _ComposedUnpack:
    def __init__(self, weights: SavedWeights, outer: Callable[[Any], Tensor]) -> None:
        self._weights = weights
        self._outer = outer

    def __call__(self, kept: Any) -> Tensor:
        return self._weights.restore(kept) if isinstance(kept, _Handle) else self._outer(kept[0])


def storage_address(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage object; 0 if it has none (sparse tensors, transforms)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def is_nonreentrant_recompute() -> bool:
    """Whether a non-reentrant checkpoint computes its region again, to find what it had not saved."""
    hooks = top_hooks()
    pack: Any = hooks[0] if hooks else None
    while isinstance(pack, _ComposedPack):
        pack = pack.outer
    return pack is not None and is_recomputation(pack)


def _orientations(weight: Tensor, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], Tensor]]:
    view = weight.view(shape)
    views = [view, view.t()] if view.dim() == 2 else [view]
    return [(tuple(v.shape), v) for v in views]


def _same_after_cast(weight: Tensor, copy: Tensor) -> bool:
    if weight.dim() and not torch.equal(weight[:1].to(copy.dtype), copy[:1]):
        return False
    return torch.equal(weight.to(copy.dtype), copy)
