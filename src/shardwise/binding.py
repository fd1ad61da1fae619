"""The tie between a user's ``nn.Parameter`` objects and one bucket: views, guards, gradient hooks.

The objects stay the user's: only their ``.data`` becomes a view of the flat buffer, and their class changes between
the original one and a guarded one (``guard.py``).
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.guard import GuardAccess, guard_class
from shardwise.layout import Slot
from shardwise.modules import NamedParam, leave_meta
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import Unit

__all__ = ["Binding"]

_version = attrgetter("_version")
GradReady = Callable[[Unit, int, int, Any], None]


class Binding(GuardAccess):
    """The parameters of one bucket.

    Args:
        runtime: owner of the unit.
        unit: the bucket's unit.
        number: the bucket's position in the unit.
        members: the bucket's parameters, in slot order.
        inside: says whether a forward of the model or a backward is running.
        arm: makes sure that the end of a running backward is noticed.
    """

    def __init__(
        self,
        runtime: Runtime,
        unit: Unit,
        number: int,
        members: Sequence[NamedParam],
        inside: Callable[[], bool],
        arm: Callable[[], None],
    ) -> None:
        self.unit = unit
        self.number = number
        self._own = unit.buckets[number]
        self._params = tuple(member.param for member in members)
        self.members = tuple(members)
        self._inside = inside
        self._arm = arm
        self.runtime = runtime
        self._slots = {
            id(member.param): slot for member, slot in zip(members, self.bucket.site.layout.slots, strict=True)
        }
        self._originals = tuple(type(member.param) for member in members)
        self._guards = tuple(guard_class(original, self) for original in self._originals)
        self._hooks: list[RemovableHandle] = []
        self.guarded = False
        self._known_versions = 0
        self._grad_ready: GradReady = _no_model

    @property
    def bucket(self) -> Bucket:
        """The bucket."""
        return self._own

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in slot order."""
        return [member.param for member in self.members]

    def slot(self, param: Tensor) -> Slot:
        """Return the place of one of the parameters."""
        return self._slots[id(param)]

    def attach(self, grad_ready: GradReady) -> None:
        """Copy the parameters' values into the bucket and make the parameters views of it.

        Parameters on the meta device have no values; somebody else brings them.
        """
        for member, slot in zip(self.members, self.bucket.site.layout.slots, strict=True):
            view = self.bucket.params.slot_view(slot)
            if member.param.is_meta:
                leave_meta(member.param, view)
            else:
                view.copy_(member.param.data)
                member.param.data = view
            if self.bucket.grads is not None:
                self._hook(member.param, slot.index, grad_ready)
        self.note_versions()
        self.unit.after_edit.append(self.note_versions)
        self.unit.after_unpin.append(self._void_graphs)

    def _hook(self, param: nn.Parameter, slot: int, grad_ready: GradReady) -> None:
        # [Note: no cycle through torch] torch keeps this hook where Python's collector does not look, so a strong
        # reference from it to the model would keep every model for ever.
        own = weakref.ref(self)
        self._grad_ready = grad_ready

        def hook(param: Tensor) -> None:
            binding = own()
            if binding is not None:  # else the model is gone, and its optimizer with it
                binding._grad_ready(binding.unit, binding.number, slot, param)

        self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def release(self, *, keep: bool) -> None:
        """Unhook and unguard the parameters; if ``keep``, give them memory of their own with their full values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.unit.after_edit.remove(self.note_versions)
        self.unit.after_unpin.remove(self._void_graphs)
        self.set_guard(on=False)
        for param in self.params:
            param.data = param.data.clone() if keep else torch.empty(0, dtype=param.dtype, device=param.device)

    def set_guard(self, *, on: bool) -> None:
        """Switch the parameters' class between the user's and the guarded one."""
        if on is not self.guarded:
            for param, cls in zip(self.params, self._guards if on else self._originals, strict=True):
                param.__class__ = cls
            self.guarded = on

    def accumulators(self) -> list[Any]:
        """Return autograd's nodes of the parameters. While they live, a graph adds no reference to the parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return [torch.autograd.graph.get_gradient_edge(p).node for p in self.params if p.requires_grad]

    def num_references(self) -> int:
        """Return how often Python refers to the parameters; saved-tensor hooks of the user's hold them that way."""
        return sum(sys.getrefcount(member.param) for member in self.members)

    def hold(self, num_references: int) -> None:
        """Keep the gathered memory as long as the parameters have more references than this."""
        own = weakref.ref(self)

        def still_held() -> bool:
            binding = own()
            return binding is not None and binding.num_references() > num_references

        self.bucket.params.still_held = still_held

    def versions(self) -> int:
        """Return a number that changes when a parameter is edited in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return sum(map(_version, self._params))

    def note_versions(self) -> None:
        """Take the parameters as they are now for unedited."""
        self._known_versions = self.versions()

    def _void_graphs(self) -> None:
        """Make autograd refuse graphs that saved the gathered parameters themselves: their memory goes now."""
        if self.bucket.params.sharded_axes and not self.is_edited():
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(self.params)
            self.note_versions()

    def is_edited(self) -> bool:
        """Whether a parameter was edited in place since ``note_versions``."""
        return self.versions() != self._known_versions

    def name(self, param: Tensor) -> str:
        """Return the parameter's fully qualified name."""
        return self.slot(param).param.name

    def renumber(self) -> None:
        """The unit's buckets changed around this one: find its number again."""
        self.number = self.unit.buckets.index(self._own)

    def inside(self) -> bool:
        """Whether a forward of the model or a backward is running."""
        return self._inside()

    def demand(self) -> None:
        """Gather the bucket now, or wait for what is in flight."""
        self._arm()
        self.bucket.unshard()
        self.bucket.params.wait()
        self.bucket.params.touch()

    def readable(self) -> bool:
        """Whether the whole parameters are in memory; waits for a refresh in flight."""
        params = self.bucket.params
        params.settle()
        whole = not params.sharded_axes or self.unit.pins > 0
        if whole:
            params.touch()
        return whole

    def editable(self) -> bool:
        """Whether ``unsharded`` holds the unit."""
        return self.unit.pins > 0

    def has_separate_master(self) -> bool:
        """Whether the optimizer updates other memory than the parameters'."""
        return self.bucket.params.separate_master

    def grad_pending(self, param: Tensor) -> bool:
        """Whether a gradient for this parameter waits in the bucket."""
        grads = self.bucket.grads
        return grads is not None and self.slot(param).index in grads.pending

    def discard_grad(self, param: Tensor) -> None:
        """Forget the parameter's gradient."""
        if self.grad_pending(param):
            self.bucket.trainable_grads.discard(self.slot(param))
            self.runtime.grads_version += 1


def _no_model(unit: Unit, number: int, slot: int, param: Any) -> None:
    raise AssertionError("a gradient arrived before the binding was attached")
