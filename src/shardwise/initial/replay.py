"""Computes from the tape what a storage holds, one at a time, with the random numbers of ordinary construction.

Random operations are drawn in the order of the tape; those that nobody needs, or not yet, are drawn into scratch memory
that is freed at once. What lives at a time is the storage that is computed and the temporaries of its own computation.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.initial.tape import Constant, Node, Op, Ref, Tape, each, is_same_place, map_leaves, name_of

__all__ = ["Replay", "strided"]

Memory = dict[int, torch.UntypedStorage]  # by number of the recording

# Overloads that take a generator, by those that do not.
_WITH_GENERATOR = MappingProxyType(
    {"default": "generator", "out": "generator_out", "low": "low_generator", "low_out": "low_generator_out"}
)
_SWITCHING = threading.Lock()
_UNDEFINED = frozenset(["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"])


class Replay:
    """Runs parts of a tape.

    Args:
        tape: what was recorded.
        roots: states to begin from, in the place of those that were recorded.
        keep: keep all random states that were ever computed (5 KB each), for a tape that still grows. Otherwise those
            that will be needed are kept, unless some draw depends on data: its data may go back to any state.
    """

    def __init__(self, tape: Tape, roots: Mapping[Node, Tensor] | None = None, *, keep: bool = False) -> None:
        self._tape = tape
        self._roots = dict(roots or {})
        self._known: dict[Node, Tensor] = {}  # states that will be needed, and the latest
        self._pending: Counter[Node] = Counter()
        self._keep = keep or any(op.draws is not None and not op.blind for op in tape.ops)
        self._generator = torch.Generator()

    def expect(self, parts: Iterable[Sequence[int]]) -> None:
        """Keep the random states from which these parts of the tape will draw, until they did."""
        nodes = (self._tape.ops[index].draws for part in parts for index in part)
        self._pending.update(node for node in nodes if node is not None)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute(self, wanted: Sequence[int], *, before: int, part: Sequence[int] | None = None) -> Memory:
        """Return what storages hold just before an operation; ``part`` is their slice of the tape, if it is known."""
        memory: Memory = {}
        with torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            self._run(self._tape.slice(wanted, before=before) if part is None else part, memory, frozenset(wanted))
        return memory

    @torch.inference_mode(False)
    @torch.no_grad()
    def state(self, node: Node) -> Tensor:
        """Return a random state; draws what comes before it."""
        with torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            return self._state(node)

    def _state(self, node: Node) -> Tensor:
        ahead = []
        while node not in self._known and node.parent is not None:
            ahead.append(self._tape.ops[node.op])
            node = node.parent
        for op in reversed(ahead):
            memory: Memory = {}
            if not op.blind:
                self._run(self._tape.slice([ref.storage for ref in op.reads], before=op.index), memory, None)
            self._draw(op, memory, self._start(op), for_nobody=op.blind)
        target = ahead[0].after if ahead else node
        assert target is not None
        return self._start_of(target)

    def _start(self, op: Op) -> Tensor:
        assert op.draws is not None
        return self._start_of(op.draws)

    def _start_of(self, node: Node) -> Tensor:
        if node in self._known:
            return self._known[node]
        state = self._roots.get(node, node.state)
        assert state is not None
        return state

    def _run(self, part: Sequence[int], memory: Memory, keep: frozenset[int] | None) -> None:
        """Run operations in order; what is not in ``keep`` is freed after its last use (None: keep all)."""
        last = {storage: index for index in part for storage in _touched(self._tape.ops[index])}
        for index in part:
            op = self._tape.ops[index]
            if op.draws is not None:
                self._draw(op, memory, self._state(op.draws))
                self._pending[op.draws] -= 1
                self._forget(op.draws)
            elif keep is None or not self._steal(op, memory, last, keep):
                self._execute(op, memory, None)
            for storage in _touched(op):
                if keep is not None and last[storage] == index and storage not in keep:
                    memory.pop(storage, None)

    def _draw(self, op: Op, memory: Memory, state: Tensor, *, for_nobody: bool = False) -> None:
        """Run a random operation from a state; ``for_nobody``: on scratch memory."""
        assert op.draws is not None
        assert op.after is not None
        self._generator.set_state(state)
        self._execute(op, memory, self._generator, for_nobody=for_nobody)
        self._known[op.after] = self._generator.get_state()
        self._forget(op.draws)

    def _forget(self, node: Node) -> None:
        if self._pending[node] <= 0 and not self._keep:
            self._known.pop(node, None)

    def _steal(self, op: Op, memory: Memory, last: Mapping[int, int], keep: frozenset[int]) -> bool:
        """Let a whole copy of a tensor that nobody needs afterwards be the tensor itself."""
        if op.func is not torch.ops.aten.copy_.default or not isinstance(op.args[1], Ref):
            return False
        target, source = op.args[0], op.args[1]
        alike = (source.size, source.stride, source.dtype) == (target.size, target.stride, target.dtype)
        home = self._tape.devices[target.storage] == self._tape.devices[source.storage]
        free = last[source.storage] == op.index and source.storage not in keep
        covered = self._tape.covers(source) and self._tape.covers(target) and source.storage != target.storage
        if alike and home and free and covered:
            memory[target.storage] = memory.pop(source.storage)
            return True
        return False

    def _execute(self, op: Op, memory: Memory, generator: torch.Generator | None, *, for_nobody: bool = False) -> None:
        """Run one operation and give names to the memory it made.

        Raises:
            ConfigError: the result is not of the form that was recorded, or torch failed.
        """

        def real(value: Any) -> Any:
            if isinstance(value, Constant):
                return value.value()
            if not isinstance(value, Ref):
                return value
            if value.storage in memory:
                return strided(memory[value.storage], value)
            assert for_nobody or all(ref.storage != value.storage for ref in op.reads), "the slice lacks an operation"
            home = self._tape.devices[value.storage]
            scratch = _bare(self._tape.num_bytes[value.storage], home)
            if any(ref.storage == value.storage for ref in op.writes):
                memory[value.storage] = scratch
            return strided(scratch, value)

        args, kwargs = map_leaves(op.args, real), map_leaves(op.kwargs, real)
        given = {tensor.untyped_storage()._cdata for tensor in each([args, kwargs], Tensor)}
        with _default_dtype(op.default_dtype):
            if generator is None:
                out = op.func(*args, **kwargs)
            else:
                out = _call_drawing(op.func, args, kwargs, generator)
        for tensor, ref in zip(each(out, Tensor), op.makes, strict=True):
            if ref.storage not in op.new:
                continue
            found = Ref(
                ref.storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
            )
            if not is_same_place(found, ref):
                raise ConfigError(
                    f"{name_of(op.func)} of the recorded construction gives {found}, but on the meta device {ref}: "
                    "torch's meta kernel is wrong there. Compute this value without it, or build the model without "
                    "deferred_init()"
                )
            if tensor.untyped_storage()._cdata in given:
                tensor = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=tensor.device).copy_(tensor)
            if op.func.overloadpacket.__name__ in _UNDEFINED:
                tensor.zero_()  # the same on every rank and in every run
            memory[ref.storage] = tensor.untyped_storage()


def strided(storage: torch.UntypedStorage, ref: Ref) -> Tensor:
    """Return a view of a storage."""
    view = torch.empty(0, dtype=ref.dtype, device=storage.device)
    return view.set_(storage, ref.offset, ref.size, ref.stride)


def _bare(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


def _touched(op: Op) -> Iterator[int]:
    yield from (ref.storage for ref in op.reads)
    yield from (ref.storage for ref in op.writes)
    yield from op.new


def _call_drawing(func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, **{**kwargs, "generator": generator})
    overload = _WITH_GENERATOR.get(func._overloadname, "")
    if overload in func.overloadpacket.overloads():
        return getattr(func.overloadpacket, overload)(*args, **kwargs, generator=generator)
    kept = torch.get_rng_state()
    try:
        torch.set_rng_state(generator.get_state())
        out = func(*args, **kwargs)
        generator.set_state(torch.get_rng_state())
    finally:
        torch.set_rng_state(kept)
    return out


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    if dtype == torch.get_default_dtype():
        yield
        return
    with _SWITCHING:  # ranks may be threads, and the default is everyone's
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
