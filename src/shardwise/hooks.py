"""The only file that knows forward hooks and autograd: it turns their calls into the runtime's events.

One ``ModelHooks`` per model. The outermost unit whose forward runs counts as the root, so that a submodule called by
itself works too. Everything here may run inside a backward (activation checkpointing calls modules again);
autograd's task number tells. See docs/design/0005-saved-weights-are-handles.md for what is saved.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.binding import Binding
from shardwise.errors import StateError
from shardwise.regions import Regions, regions_here
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import Unit, Use
from shardwise.saved import SavedWeights, is_nonreentrant_recompute, storage_address
from shardwise.uses import UseHooks, walk_tensors

__all__ = ["ModelHooks", "backward_is_running"]


def backward_is_running() -> bool:
    """Whether the calling thread is inside an autograd backward."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclasses.dataclass(kw_only=True)
class _Call:
    """One running forward call of a unit."""

    unit: Unit
    saved: AbstractContextManager[Any] | None
    grad_enabled: bool
    use: Use | None
    regions: Regions  # of activation checkpoints
    fingerprints: list[int]  # of the unit's gathered parameters, because edits through .data leave no version
    references: list[tuple[Binding, int, list[Any]]]  # to the unit's parameters, to notice who keeps them


class _ForwardHook:
    """A forward hook that the compiler does not look into, and that keeps modules from being copied or pickled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> None:
        """Forward to the hook."""
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: see ``__reduce_ex__``."""
        return self.__reduce_ex__(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: the hooks hang on every unit, and a copy of a unit would not train."""
        raise StateError(
            "a sharded model, or a part of it, cannot be copied or pickled: build a second model and load "
            "shardwise.full_state_dict(model) into it; for an average of weights, average "
            "shardwise.local_parameters(model) on every rank"
        )


class ModelHooks:
    """The hooks of one model.

    Args:
        runtime: receives the events.
        modules: the module of each unit, in the order of ``runtime.units``.
        check_tree: called at the start of a root forward; raises if the model changed.
    """

    def __init__(self, runtime: Runtime, modules: Sequence[nn.Module], check_tree: Callable[[], None]) -> None:
        self.runtime = runtime
        self.bindings: dict[int, list[Binding]] = {unit.index: [] for unit in runtime.units}
        self._modules = modules
        self._lookups = {i: m for i, m in enumerate(modules) if type(m) is nn.Embedding}
        self._check_tree = check_tree
        self._calls: list[_Call] = []
        self._hooks: list[RemovableHandle] = []
        self._by_storage: dict[int, Bucket] = {}
        self._kept_outside: set[int] = set()  # units whose forward leaves references to parameters behind
        self._saved = SavedWeights(self._by_storage, self._active_buckets)
        self._uses = UseHooks(runtime, self._backward_event)

    def attach(self) -> None:
        """Register the module hooks."""
        for unit, module in zip(self.runtime.units, self._modules, strict=True):
            before, after = (
                _ForwardHook(partial(self._before_forward, unit)),
                _ForwardHook(partial(self._after_forward, unit)),
            )
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))

        for module in self._modules[0].modules():
            if any(param is not None for param in module._parameters.values()):
                self._hooks.append(module.register_state_dict_post_hook(_own_memory))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def bind(self, binding: Binding) -> None:
        """Take over a binding: attach and guard it."""
        binding.attach(self._grad_ready)
        self.bindings[binding.unit.index].append(binding)
        self._index_storages()

    def unbind(self, binding: Binding) -> None:
        """Give up a binding whose bucket is replaced."""
        self.bindings[binding.unit.index].remove(binding)
        self._index_storages()

    def all_bindings(self) -> Iterator[Binding]:
        """Yield every binding, by unit."""
        return (binding for bindings in self.bindings.values() for binding in bindings)

    def inside(self) -> bool:
        """Whether a forward of this model or any backward is running on this thread."""
        return bool(self._calls) or backward_is_running()

    def saved_weights(self) -> AbstractContextManager[Any] | None:
        """Return saved-tensor hooks that turn weights into handles; None if no weight is ever freed, or they are on."""
        return self._saved.context() if self._by_storage else None

    def abandon_calls(self) -> None:
        """Forget forwards that never ended: torch calls no hook after a KeyboardInterrupt."""
        while self._calls:
            call = self._calls.pop()
            if call.saved is not None:
                call.saved.__exit__(None, None, None)
            call.unit.active = 0
            for binding in self.bindings[call.unit.index]:
                binding.set_guard(on=True)

    def end_backward(self) -> None:
        """Autograd's callback at the end of a backward."""
        self._uses.end_backward()
        self.runtime.end_backward()

    def _index_storages(self) -> None:
        self._by_storage.clear()
        for binding in self.all_bindings():
            if binding.bucket.params.sharded_axes:
                self._by_storage[binding.bucket.params.full.tensor.untyped_storage()._cdata] = binding.bucket

    def _active_buckets(self) -> list[Bucket]:
        return [bucket for call in reversed(self._calls) for bucket in call.unit.buckets]

    def arm(self) -> None:
        """If a backward runs, note it once, and ask autograd to call back at its end."""
        if not self.runtime.in_backward and backward_is_running():
            self.runtime.begin_backward(expects_grads=self._expects_grads())
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _expects_grads(self) -> bool:
        """Whether the running backward will bring a gradient of any parameter; not so in ``autograd.grad``."""
        trainable = (p for b in self.all_bindings() if b.bucket.grads is not None for p in b.params if p.requires_grad)
        try:
            return any(torch._C._will_engine_execute_node(_accumulator(param)) for param in trainable)
        except (RuntimeError, AttributeError):  # how autograd says that it runs autograd.grad, or torch.func
            return False

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        in_backward, grad_enabled = backward_is_running(), torch.is_grad_enabled()
        recomputes = False
        if self._calls and unit.index == 0 and not in_backward and self._calls[0].unit is unit:
            self.abandon_calls()
        if in_backward:
            self.arm()
            recomputes = grad_enabled and not is_nonreentrant_recompute()
            if recomputes:
                self.runtime.recompute_begins(unit)
        elif not self._calls:
            for binding in self.all_bindings():
                binding.set_guard(on=True)  # a pre-hook that failed left it off
            self.runtime.begin_root(records=torch.is_grad_enabled())
            self._find_lookups()
            self._check_tree()
        if not in_backward and not grad_enabled and self._calls and self._calls[0].grad_enabled:
            unit.recomputes += 1
        bindings = self.bindings[unit.index]
        with torch._C._DisableFuncTorch():
            self.runtime.before_forward(unit)
        try:
            saved = self._enter_saved_hooks(unit)  # without grad mode too: the forward may switch it on
        except BaseException:
            self.runtime.after_forward(unit)
            raise
        for binding in bindings:
            binding.set_guard(on=False)
        counts = grad_enabled and (recomputes or not in_backward)
        use = self._uses.begin(unit, [*args, *kwargs.values()]) if counts else None
        self._calls.append(
            _Call(
                unit=unit,
                saved=saved,
                grad_enabled=grad_enabled,
                use=use,
                regions=regions_here() if self._by_storage else (),
                fingerprints=self._fingerprints(unit),
                references=self._count_references(unit) if grad_enabled else [],
            )
        )

    def _find_lookups(self) -> None:
        """Tell the schedule which units no backward reads: embeddings into which no code of the user's was put.

        What such code does may depend on a rank's data, and then one rank alone would gather in backward.
        """
        plain = frozenset(i for i, module in self._lookups.items() if _is_plain(module))
        if plain != self.runtime.schedule.not_read_backward:
            self.runtime.schedule = self.runtime.schedule.without_backward_reads(plain)

    def _fingerprints(self, unit: Unit) -> list[int]:
        """Look at the parameters' values before and after the forwards of the first step; later steps are trusted."""
        if self.runtime.num_steps > 0 or unit.pins:
            return []
        return [bucket.params.fingerprint() for bucket in unit.buckets]

    def _count_references(self, unit: Unit) -> list[tuple[Binding, int, list[Any]]]:
        """Count who refers to a unit's parameters, before a forward of the first step or of one that keeps some."""
        if self.runtime.num_steps > 0 and unit.index not in self._kept_outside:
            return []
        held = [(binding, binding.accumulators()) for binding in self.bindings[unit.index] if self._frees(binding)]
        return [(binding, binding.num_references(), nodes) for binding, nodes in held]

    def _frees(self, binding: Binding) -> bool:
        return binding.bucket.params.sharded_axes and not binding.unit.pins

    def _enter_saved_hooks(self, unit: Unit) -> AbstractContextManager[Any] | None:
        """Turn weights saved for backward into handles from here on."""
        saved = self.saved_weights()
        if saved is not None:
            try:
                saved.__enter__()
            except RuntimeError as error:
                if unit.pins or not torch.is_grad_enabled():
                    return None
                raise StateError(
                    f"unit {unit.name or 'root'}: saved-tensor hooks are switched off here (by a torch.func transform "
                    "or disable_saved_tensors_hooks), but weights that are freed need them. Run this inside `with "
                    "shardwise.unsharded(model):`"
                ) from error
        return saved

    def _after_forward(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._calls or self._calls[-1].unit is not unit:
            return  # the forward failed before its pre-hook was through
        call = self._calls.pop()
        try:
            if call.saved is not None:
                call.saved.__exit__(None, None, None)
        finally:
            self._end_call(call, output)

    def _end_call(self, call: _Call, output: Any) -> None:
        unit = call.unit
        escapes = self._hold_escaping_weights(output)
        edited = any(binding.is_edited() for binding in self.bindings[unit.index])
        edited = edited or self._fingerprints(unit) != call.fingerprints
        for binding, num_references, _ in call.references:
            if binding.num_references() > num_references:
                binding.hold(num_references)
                self._kept_outside.add(unit.index)
        if torch.is_autocast_enabled(self.runtime.means.arena.device.type):
            torch.clear_autocast_cache()  # its copies must not outlive the unit, nor go stale
        if output is not None:
            self._uses.hook_outputs(unit, call.use, call.regions, output)
        self.runtime.after_forward(unit)
        if unit.active == 0:
            for binding in self.bindings[unit.index]:
                binding.set_guard(on=True)
        if not self._calls:
            self._uses.end_root()
        if not self._calls and not backward_is_running():
            self.runtime.end_root(keeps=call.grad_enabled)
        if edited and not unit.pins:
            raise StateError(
                f"unit {unit.name or 'root'}: a parameter was changed in place during its forward, which a "
                "sharded model would lose; change it inside `with shardwise.unsharded(model):`"
            )
        if escapes and not self._calls and not backward_is_running():
            raise StateError(
                f"unit {unit.name or 'root'}: its output is a view of a weight, whose memory is freed now; return a "
                "copy (.clone()), or call the model inside `with shardwise.unsharded(model):`"
            )

    def _hold_escaping_weights(self, output: Any) -> bool:
        """Keep units of which a view leaves a forward until the root's forward ends; return whether there are any."""
        escapes = False
        if self._by_storage:
            for tensor in walk_tensors(output):
                bucket = None if isinstance(tensor, nn.Parameter) else self._by_storage.get(storage_address(tensor))
                for unit in self.runtime.units:
                    if bucket is not None and bucket in unit.buckets and not unit.pins:
                        unit.held = escapes = True
        return escapes

    def _grad_ready(self, unit: Unit, number: int, slot: int, param: nn.Parameter) -> None:
        self._backward_event(unit)
        with torch._C.DisableTorchFunctionSubclass():
            grad, param.grad = param.grad, None
        if grad is not None and grad.layout is not torch.strided:
            name = unit.buckets[number].site.layout.slots[slot].param.name
            raise StateError(f"{name}: sparse gradients cannot be reduced in a flat buffer; use sparse=False")
        self.runtime.grad_ready(unit, number, slot, grad)

    def _backward_event(self, unit: Unit) -> None:
        """Something happened in a backward: refuse double backward, note that it runs."""
        if torch.is_grad_enabled() and not unit.pins:  # inside a hook: create_graph=True
            raise StateError(
                "create_graph=True needs gathered parameters until the second backward is over: run both inside "
                "`with shardwise.unsharded(model):`"
            )
        if not self.runtime.in_backward:
            self.arm()


def _is_plain(module: nn.Embedding) -> bool:
    """Whether nothing but the module's own forward, and our hooks, runs in its call and its backward."""
    everywhere = torch.nn.modules.module  # hooks of all modules
    theirs = [
        *everywhere._global_forward_hooks,
        *everywhere._global_forward_pre_hooks,
        *everywhere._global_backward_hooks,
        *everywhere._global_backward_pre_hooks,
        *module._backward_hooks,
        *module._backward_pre_hooks,
        *(hook for hook in module._forward_hooks.values() if not isinstance(hook, _ForwardHook)),
        *(hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, _ForwardHook)),
    ]
    with torch._C.DisableTorchFunctionSubclass():
        theirs += module.weight._backward_hooks or ()
    return not theirs and "forward" not in module.__dict__


def _accumulator(param: nn.Parameter) -> Any:
    """Return autograd's node that collects a parameter's gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(param).node


def _own_memory(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give a state dict copies: views would keep, and save, the whole flat buffer."""
    for name, param in module._parameters.items():
        value = state.get(prefix + name)
        if param is not None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.clone()
