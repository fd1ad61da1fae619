"""Watches a constructor: every new tensor becomes a meta tensor, every operation goes on the tape.

Tensors that were made outside stay what they are, and so does everything that is computed from them alone. The mode
here sees the operations of torch; ``answers.py`` sees what is no operation. Read ``replay.py`` next.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ConfigError
from shardwise.initial.operations import (
    AUTOCAST,
    BLIND_DRAWS,
    OVERWRITES,
    REFUSED,
    SHAPE_ONLY,
    WRONG_ON_META,
    check_without_autocast,
    makes_tensor,
    refusal,
    written_by,
)
from shardwise.initial.replay import Replay, strided
from shardwise.initial.states import GeneratorStates
from shardwise.initial.tape import Constant, Node, Op, Ref, Tape, each, map_leaves
from shardwise.numerics.fingerprint import fingerprint

__all__ = ["Recorder"]

_META = torch.device("meta")
_CPU = torch.device("cpu")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records one construction; see ``deferred_init``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.states = GeneratorStates()
        self._replay = Replay(self.tape, keep=True)
        self._paused = False
        self._autocast: frozenset[str] = frozenset()  # kinds of devices
        self._storages: dict[int, int] = {}  # by identity of the meta storage
        self._kept: list[torch.UntypedStorage] = []  # so that identities are not used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this mode: two seconds and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on meta tensors and put it on the tape."""
        if self._paused:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._record(func, tuple(args), dict(kwargs or {}))

    def ref(self, tensor: Tensor) -> Ref | None:
        """Return the name of a recorded tensor, None for one of the outside."""
        if not tensor.is_meta:
            return None
        storage = self._storage(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise ConfigError("deferred_init(): lazily conjugated tensors cannot be recorded: call resolve_conj()")
        return Ref(storage, int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device a tensor would be on."""
        return self.tape.devices[self._storage(tensor)] if tensor.is_meta else tensor.device

    def _storage(self, tensor: Tensor) -> int:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ConfigError(
                "deferred_init(): torch.func's transforms (grad, vmap, jvp) cannot be recorded: use torch.autograd or "
                "plain operations in the constructor"
            )
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            raise ConfigError(
                "deferred_init(): a tensor was put on the meta device by other means; build the whole model inside the "
                "context, without torch.device('meta')"
            )
        return storage

    def value(self, tensor: Tensor) -> Tensor:
        """Compute what a recorded tensor holds now."""
        ref = self.ref(tensor)
        if ref is None:
            return tensor
        with self._pause():
            memory = self._replay.compute([ref.storage], before=len(self.tape.ops))
            return strided(memory[ref.storage], ref)

    def number(self, value: Any) -> Any:
        """Return the value of a recorded scalar as a real tensor; anything else as it is."""
        return self.value(value.detach()) if isinstance(value, Tensor) and value.is_meta else value

    def outside(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function without recording."""
        with self._pause():
            return func(*args, **kwargs)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Remember what autocast is on for; torch hides it from the operations that a mode over operations sees."""
        before, self._autocast = (
            self._autocast,
            frozenset(kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)),
        )
        try:
            yield
        finally:
            self._autocast = before

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        word = func.overloadpacket.__name__
        tensors = list(each([args, kwargs], Tensor))
        for tensor in tensors:
            if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
                kind = type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)
                raise refusal(func, f"it works on a {kind}; build that outside")
        refs = [self.ref(tensor) for tensor in tensors]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not any(refs) and not draws:
            # Memory of an array cannot be resized; what torch makes of Python data can, and nobody else has it.
            if word not in ("lift_fresh", "lift") or not tensors[0].untyped_storage().resizable():
                return func(*args, **kwargs)  # of outside tensors alone
            func = torch.ops.aten.clone.default
        if word == "resize_" and tuple(args[0].shape) == tuple(args[1]):
            return args[0]
        if func is torch.ops.aten.set_.source_Tensor and all(refs):
            return func(*args, **kwargs)  # the tensor shares the other one's storage now
        if word in REFUSED or next(each([args, kwargs], torch.UntypedStorage), None) is not None:
            raise refusal(func, REFUSED.get(word, "it works on bare memory"))
        written = written_by(func, args, kwargs)
        if not all(self.ref(tensor) for tensor in written):
            raise refusal(
                func,
                "it writes what is known only later into a tensor from outside (made before, or by torch.from_numpy); "
                "clone that inside first",
            )
        generator = next(each([args, kwargs], torch.Generator), torch.default_generator) if draws else None
        args, kwargs = map_leaves(args, _no_generator), map_leaves(kwargs, _no_generator)
        device = self._device(kwargs, tensors)
        out = self._run(func, args, kwargs, in_place=bool(written), draws=draws)
        results = list(each(out, Tensor))
        begun = [number for tensor in results if (number := self._adopt(tensor, device)) is not None]
        if begun and not written and device.type in self._autocast:
            check_without_autocast(func, tensors, device)
        if begun or written:  # else a view, or a number
            self._append(func, args, kwargs, results, begun, written, device, generator)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool, draws: bool) -> Any:
        """Return the result on meta tensors; what is no tensor is computed in earnest."""
        word = func.overloadpacket.__name__
        if word in BLIND_DRAWS and word.endswith("_"):
            return args[0]  # torch imports its compiler, two seconds and 80 MB, to run normal_ on the meta device
        divides_in_a_mode = word == "div" and kwargs.get("rounding_mode") is not None  # as WRONG_ON_META
        if makes_tensor(func) and word not in WRONG_ON_META and not divides_in_a_mode:
            on_meta = map_leaves(args, _as_meta), map_leaves(kwargs, _as_meta)
            try:
                made = func(*on_meta[0], **on_meta[1])
                # Its real kernels give contiguous tensors, its meta kernels keep the strides of the mean.
                return torch.empty(made.shape, dtype=made.dtype, device=_META) if word == "normal" else made
            except NotImplementedError:  # the shape depends on the data, or nobody wrote the meta kernel
                if draws or in_place:
                    raise refusal(func, "torch cannot run it without data; use other operations") from None
        real = map_leaves(args, self._real), map_leaves(kwargs, self._real)
        found = func(*real[0], **real[1])
        if any(tensor.layout is not torch.strided for tensor in each(found, Tensor)):
            raise refusal(func, "it makes a sparse tensor")
        return map_leaves(tuple(found) if isinstance(found, tuple) else found, _as_meta)

    def _append(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
        begun: list[int],
        written: list[Tensor],
        device: torch.device,
        generator: torch.Generator | None,
    ) -> None:
        """Put an operation on the tape."""
        word = func.overloadpacket.__name__
        if generator is not None and device.type != "cpu":
            raise refusal(
                func,
                f"it draws on {device}, and values are drawn on the CPU, equal on every device; build the model on the "
                "CPU and end with model.to(device), inside the context",
            )
        sources = list(each([args, kwargs], Tensor))
        for tensor in written:
            del sources[next(position for position, other in enumerate(sources) if other is tensor)]
        reads = [] if word in SHAPE_ONLY else self._refs(sources)
        writes = self._refs(written)
        held = {ref.storage for ref in reads}
        whole: list[int] = []
        if word in OVERWRITES and (word.endswith("_") or "out" in kwargs):
            whole = [ref.storage for ref in writes if self.tape.covers(ref) and ref.storage not in held]
        reads += [ref for ref in writes if ref.storage not in whole]
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = device
        if not sources and not written and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs.setdefault("dtype", results[0].dtype)
        node = None if generator is None else self.states.node(generator)
        op = Op(
            index=len(self.tape.ops),
            func=func,
            args=map_leaves(args, self._leaf),
            kwargs=map_leaves(kwargs, self._leaf),
            reads=tuple(reads),
            writes=tuple(writes),
            makes=tuple(self._refs(results)),
            new=tuple(dict.fromkeys(begun)),
            blind=word in BLIND_DRAWS,
            default_dtype=torch.get_default_dtype(),
            draws=node,
            after=None if node is None else Node(parent=node, op=len(self.tape.ops)),
        )
        self.tape.add(op, overwrites=whole)
        if generator is not None and op.after is not None:
            self.states.advance(generator, op.after)

    def _refs(self, tensors: Sequence[Tensor]) -> list[Ref]:
        return [ref for tensor in tensors if (ref := self.ref(tensor)) is not None]

    def _adopt(self, tensor: Tensor, device: torch.device) -> int | None:
        """Number the storage of a result; None if it has a number."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return None
        self._kept.append(storage)
        number = self.tape.add_storage(storage.nbytes(), device)
        self._storages[storage._cdata] = number
        return number

    def _device(self, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> torch.device:
        """Return the device on which a result would be."""
        given = kwargs.get("device")
        if given is not None and torch.device(given) != _META:
            return torch.device(given)
        recorded = [tensor for tensor in tensors if tensor.is_meta]
        if recorded:
            return self.device_of(next((tensor for tensor in recorded if tensor.dim()), recorded[0]))
        return tensors[0].device if tensors else _CPU

    def _real(self, value: Any) -> Any:
        return self.value(value) if isinstance(value, Tensor) else value

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        ref = self.ref(value)
        return Constant(value.detach(), fingerprint(value)) if ref is None else ref


def _no_generator(value: Any) -> Any:
    return None if isinstance(value, torch.Generator) else value


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return _META if isinstance(value, torch.device) else value
