"""Regions of non-reentrant activation checkpoints: which are around, and how to have one computed again.

The only file that knows how ``torch.utils.checkpoint`` does it (2.11 to 2.13): each region enters a pair of
saved-tensor hooks; the first packs what is not kept, the second computes the region when a backward first asks it.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Regions", "compute_again", "is_recomputation", "regions_here", "top_hooks"]

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
Regions = Sequence[weakref.ref[Callable[[Any], Tensor]]]  # alive as long as autograd keeps anything saved in there


def regions_here() -> Regions:
    """Return the regions in which this runs, the innermost first.

    Not those in which a region is computed again: they do not wait for what this computes.
    """
    around = itertools.takewhile(lambda hooks: not is_recomputation(hooks[0]), _all_hooks())
    return [weakref.ref(unpack) for pack, unpack in around if _maker(pack) == "_checkpoint_hook"]


def is_recomputation(pack: Callable[[Tensor], Any]) -> bool:
    """Whether these are the hooks under which a region is computed again."""
    return _maker(pack) == "_recomputation_hook"


def compute_again(regions: Regions) -> None:
    """Compute the innermost region of which anything is saved again, unless the running backward already did.

    Call it in a tensor's hook. Nothing happens if the backward ends at that tensor, as ``autograd.grad`` may.
    """
    unpack = next((unpack for unpack in (region() for region in regions) if unpack is not None), None)
    if unpack is not None and _goes_on():
        with contextlib.suppress(_ComputedError):
            unpack(_NoTensor())


class _ComputedError(Exception):
    """The region was computed, and what was asked for is looked up now."""


class _NoTensor:
    """Stands for a tensor that nobody packed."""

    @property
    def handles(self) -> Any:
        """Read by the checkpoint's hook when all that it packed is there again."""
        raise _ComputedError


def _goes_on() -> bool:
    node = torch._C._current_autograd_node()
    try:
        return any(torch._C._will_engine_execute_node(each) for each, _ in node.next_functions if each is not None)
    except RuntimeError:  # how autograd says that a leaf's gradient is wanted
        return True


def _maker(pack: Callable[[Tensor], Any]) -> str:
    # such as torch.utils.checkpoint._checkpoint_hook.__init__.<locals>.pack_hook
    return str(getattr(pack, "__qualname__", "")).partition(".")[0]


def top_hooks() -> _Hooks | None:
    """Return the saved-tensor hooks that new ones would hide."""
    # Private in torch 2.11-2.13; there is no public way to see them.
    return cast(_Hooks | None, torch._C._autograd._top_saved_tensors_default_hooks(True))


def _all_hooks() -> list[_Hooks]:
    """Return all saved-tensor hooks, the topmost first."""
    found: list[_Hooks] = []
    if (hooks := top_hooks()) is None:
        return found
    try:
        _push(hooks)
    except RuntimeError:  # switched off here, so that what is taken off could not be put back
        return found
    _pop()
    try:
        while (hooks := top_hooks()) is not None:
            found.append(hooks)
            _pop()
    finally:
        for hooks in reversed(found):
            _push(hooks)
    return found


def _push(hooks: _Hooks) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _pop() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
