"""Weights saved for backward are handles, so that freeing a unit too early costs a gather and never the answer.

autograd saves a view of a gathered weight; ``pack`` keeps (bucket, version, place) instead, ``unpack`` gathers the
bucket again and makes the view. Any other tensor is kept with its version, because saved-tensor hooks switch off
autograd's own check for changes in place. See docs/design/0005-saved-weights-are-handles.md.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.errors import StateError
from shardwise.runtime.bucket import Bucket, ParamState

__all__ = ["Region", "SavedWeights", "is_nonreentrant_recompute", "storage_address"]

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
        self._regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()  # by the checkpoint's hook

    def context(self) -> AbstractContextManager[Any] | None:
        """Return the hooks to enter around a forward, or None if they are active already.

        Hooks of others (activation checkpointing) are kept: weights become handles, the rest goes to them.
        """
        outer = _top_hooks()
        if outer is None:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        outer_pack, outer_unpack = outer
        if outer_pack == self.pack or (isinstance(outer_pack, _ComposedPack) and outer_pack.weights is self):
            return None
        return _ComposedHooks(
            _ComposedPack(self, outer_pack, outer_unpack), _ComposedUnpack(self, outer_unpack), self._region
        )

    def region(self) -> "Region | None":
        """Return the region of an activation checkpoint in which the hooks are active."""
        hooks = _top_hooks()
        pack = hooks[0] if hooks else None
        return pack.region if isinstance(pack, _ComposedPack) and pack.weights is self else None

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

    def _region(self) -> "Region | None":
        """Return the region of the innermost activation checkpoint, if its hooks are the topmost ones."""
        region = None
        for pack, _ in reversed(_all_hooks()):
            checkpoint = _innermost(pack)
            inside = _made_by(checkpoint) == "_checkpoint_hook"
            region = self._regions.setdefault(checkpoint, Region(region)) if inside else None
        return region

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


class Region:
    """The region of one non-reentrant activation checkpoint, which can be asked to be computed again.

    It knows what units saved in there, by weak references: what autograd gives back, it forgets.

    Args:
        around: the region in which this one is; what it needs is computed from there.
    """

    def __init__(self, around: "Region | None" = None) -> None:
        self._around = around
        self._saved: list[weakref.ref[_Saved]] = []
        self._asked: set[Any] = set()  # by which backwards, or groups of them

    def add(self, saved: "_Saved") -> None:
        """Note what a unit saved."""
        self._saved.append(weakref.ref(saved))

    def note_asked(self, backward: Any) -> None:
        """A backward asked for something: it was computed again."""
        self._asked.add(backward)

    def recompute(self) -> None:
        """Compute the region again unless the running backward did, or nothing is left that it could need."""
        backward = _running_backward()
        if backward in self._asked or not _goes_on():
            return
        saved = next((saved for saved in (ref() for ref in self._saved) if saved is not None), None)
        if saved is not None:
            saved.fetch(backward)
        elif self._around is not None:  # other ranks, which need something in here, need its inputs
            self._around.recompute()


class _Saved:
    """What an activation checkpoint gave for a tensor, and the tensor itself from when it was asked for too early."""

    def __init__(self, kept: Any, unpack: Callable[[Any], Tensor], region: Region) -> None:
        self._kept = kept
        self._unpack = unpack
        self._region = region
        self._fetched: dict[Any, Tensor] = {}  # a checkpoint gives a tensor once in a backward
        region.add(self)

    def fetch(self, backward: Any) -> None:
        self._region.note_asked(backward)
        self._fetched[backward] = self._unpack(self._kept)

    def take(self) -> Tensor:
        backward = _running_backward()
        if backward not in self._fetched:
            self.fetch(backward)
        return self._fetched.pop(backward)


class _ComposedPack:
    def __init__(
        self,
        weights: SavedWeights,
        outer_pack: Callable[[Tensor], Any],
        outer_unpack: Callable[[Any], Tensor],
    ) -> None:
        self.weights = weights
        self.outer = outer_pack
        self.region: Region | None = None
        self._outer_unpack = outer_unpack

    def __call__(self, tensor: Tensor) -> Any:
        handle = self.weights.handle(tensor)
        if handle is not None:
            return handle
        kept = self.outer(tensor)
        return (kept,) if self.region is None else _Saved(kept, self._outer_unpack, self.region)


class _ComposedHooks(torch.autograd.graph.saved_tensors_hooks):
    def __init__(
        self, pack: _ComposedPack, unpack: "_ComposedUnpack", find_region: Callable[[], Region | None]
    ) -> None:
        super().__init__(pack, unpack)
        self._pack = pack
        self._find_region = find_region

    def __enter__(self) -> None:
        super().__enter__()
        self._pack.region = self._find_region()  # not before: to look below the topmost hooks is to push them again


class _ComposedUnpack:
    def __init__(self, weights: SavedWeights, outer: Callable[[Any], Tensor]) -> None:
        self._weights = weights
        self._outer = outer

    def __call__(self, kept: Any) -> Tensor:
        if isinstance(kept, _Handle):
            return self._weights.restore(kept)
        return kept.take() if isinstance(kept, _Saved) else self._outer(kept[0])


def storage_address(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage object; 0 if it has none (sparse tensors, transforms)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def is_nonreentrant_recompute() -> bool:
    """Whether a non-reentrant checkpoint computes its region again, to find what it had not saved."""
    hooks = _top_hooks()
    return hooks is not None and _made_by(_innermost(hooks[0])) == "_recomputation_hook"


def _innermost(pack: Any) -> Any:
    while isinstance(pack, _ComposedPack):
        pack = pack.outer
    return pack


def _made_by(pack: Any) -> str:
    # torch 2.11-2.13: torch.utils.checkpoint._recomputation_hook.__init__.<locals>.pack_hook, and _checkpoint_hook
    return str(getattr(pack, "__qualname__", "")).partition(".")[0]


def _running_backward() -> Any:
    """Return what an activation checkpoint takes for one backward: torch.utils.checkpoint.GraphExecGroup joins some."""
    return torch._C._get_graph_exec_group() or torch._C._current_graph_task_id()


def _goes_on() -> bool:
    """Whether the running backward goes on behind the tensor whose hook this is: ``autograd.grad`` may end there."""
    node = torch._C._current_autograd_node()
    try:
        return any(torch._C._will_engine_execute_node(each) for each, _ in node.next_functions if each is not None)
    except RuntimeError:  # how autograd says that a leaf's gradient is wanted
        return True


def _orientations(weight: Tensor, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], Tensor]]:
    view = weight.view(shape)
    views = [view, view.t()] if view.dim() == 2 else [view]
    return [(tuple(v.shape), v) for v in views]


def _same_after_cast(weight: Tensor, copy: Tensor) -> bool:
    if weight.dim() and not torch.equal(weight[:1].to(copy.dtype), copy[:1]):
        return False
    return torch.equal(weight.to(copy.dtype), copy)


def _all_hooks() -> list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]]:
    """Return the saved-tensor hooks that are active, the topmost first."""
    found: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = []
    try:
        while (hooks := _top_hooks()) is not None:
            found.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
    finally:
        for pack, unpack in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def _top_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    # Private in torch 2.11-2.13; there is no public way to see the hooks that ours would hide.
    return cast(
        tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )
