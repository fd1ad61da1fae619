"""When is one use of a unit over? Hooks on the tensors that went into and came out of a forward.

A use is open until the gradients of all its inputs have arrived; a unit is not freed in backward while a use is open.
That matters where weights are saved by reference: inside the recomputation of an activation checkpoint. Hooks on the
outputs say that a backward reached the use, and start its gather early. See design record 0005 in docs/design.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MemberDescriptorType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.regions import Regions, compute_again
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import Unit, Use

__all__ = ["UseHooks", "walk_tensors"]

_Reached = tuple[Unit, Use | None, Regions]


class UseHooks:
    """Follows the uses of one model's units.

    Args:
        runtime: receives the events.
        on_event: called first in every hook; notes the backward, or refuses it.
    """

    def __init__(self, runtime: Runtime, on_event: Callable[[Unit], None]) -> None:
        self._runtime = runtime
        self._on_event = on_event
        self._leaf_hooks: list[RemovableHandle] = []
        self._outputs: dict[int, tuple[weakref.ref[Tensor], list[_Reached]]] = {}  # by id of the tensor

    def begin(self, unit: Unit, inputs: Sequence[Any]) -> Use | None:
        """Open a use of a unit if its inputs need gradients."""
        tensors = [t for t in walk_tensors(inputs) if t.requires_grad and not isinstance(t, nn.Parameter)]
        if not tensors:
            return None
        # One hook per input: register_multi_grad_hook keeps the graph's nodes in a cycle that nobody collects. An input
        # that a backward does not reach keeps the use open to the end of that backward.
        use = Use(num_parts=len(tensors))
        unit.uses.add(use)
        for tensor in tensors:
            handle = _register(tensor, partial(self._input_arrived, unit, use))
            if tensor.is_leaf:
                self._leaf_hooks.append(handle)
        return use

    def hook_outputs(self, unit: Unit, use: Use | None, regions: Regions, output: Any) -> None:
        """Notice when a backward reaches the outputs of a use.

        A use inside an activation checkpoint has the region computed again then, with the gathers this takes, on every
        rank: otherwise a rank whose data left the unit unused would come to it only after it passed the unit.

        A unit that returns its child's output as it is shares the child's hook and comes first in it: so it is reached
        first on every rank, also where another rank's data made it return another tensor.
        """
        reached = (unit, use, regions)
        for tensor in walk_tensors(output):
            if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                continue
            known, uses = self._outputs.get(id(tensor), (None, []))
            if known is not None and known() is tensor:
                uses.insert(0, reached)
                continue
            uses = [reached]
            self._outputs[id(tensor)] = weakref.ref(tensor), uses
            _register(tensor, partial(self._outputs_reached, uses))

    def end_root(self) -> None:
        """A root forward ended: no further unit can return the tensors seen."""
        self._outputs.clear()

    def end_backward(self) -> None:
        """Take the hooks off the user's leaves, which may live longer than the graph."""
        for hook in self._leaf_hooks:
            hook.remove()
        self._leaf_hooks.clear()

    def _outputs_reached(self, uses: list[_Reached], grad: Tensor) -> None:
        for unit, use, regions in uses:
            self._on_event(unit)
            if use is not None:
                use.reach()
                unit.uses.add(use)
            self._runtime.before_backward(unit)
            compute_again(regions)

    def _input_arrived(self, unit: Unit, use: Use, grads: Any) -> None:
        self._on_event(unit)
        use.num_open -= 1
        if use.num_open <= 0:
            self._runtime.use_done(unit, use)


def _register(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    # torch 2.13 crashes in register_hook on a view of which a part was edited in place, unless its grad_fn, which is
    # made anew lazily, was read before.
    assert tensor.grad_fn is not None or tensor.is_leaf
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def walk_tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, dataclasses and plain objects, with slots or without."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from walk_tensors(item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from walk_tensors(item, depth - 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from walk_tensors(getattr(value, field.name, None), depth - 1)
    else:
        for item in getattr(value, "__dict__", {}).values():
            yield from walk_tensors(item, depth - 1)
        for kind in type(value).__mro__:
            if "__slots__" in vars(kind):
                slots = [name for name, member in vars(kind).items() if isinstance(member, MemberDescriptorType)]
                for name in slots:
                    yield from walk_tensors(getattr(value, name, None), depth - 1)
