"""Tensors with a size but no contents: training runs through them at no cost, and every byte of it can be counted.

``Hollow`` is a dispatch mode. What reads a hollow tensor is not computed: only the shape of its result is, and the
result is hollow again or, if it is small, zero. A hollow tensor is an ordinary tensor on the CPU whose pages are never
touched, so classes, views, hooks and storages behave as in a real run; memory of one rank of thousands fits anywhere.
Why not ``FakeTensorMode``: docs/design/0012-hollow-tensors.md.
"""

import mmap
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import numpy
import torch
import torch._meta_registrations  # shapes of operators that only have a Python implementation on the meta device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from shardwise.dryrun.live import Live, has_storage
from shardwise.errors import ConfigError
from shardwise.numerics import fingerprint as _operator  # noqa: F401 - it must exist before it can be answered for

__all__ = ["Hollow"]

SMALL_BYTES = 1 << 20
SMALL_WHOLE_BYTES = 1 << 26  # of whole numbers: tokens, and the records of the ranks, which grow with their number
_MAP_NORESERVE = 0x4000  # of Linux; mmap has no name for it
_ATEN = torch.ops.aten
_ANSWERS = MappingProxyType(
    {
        _ATEN._local_scalar_dense.default: None,
        _ATEN.equal.default: True,
        _ATEN.is_nonzero.default: False,
        torch.ops.shardwise.fingerprint.default: 0,
    }
)
# They return their argument's memory although their schemas do not say so.
_HIDDEN_VIEWS = frozenset({_ATEN._unsafe_view.default, _ATEN._reshape_alias.default})


class Hollow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Do not compute with large tensors.

    Attributes:
        flops: floating-point operations by phase, a multiply-add counted as two.

    Args:
        live: is told every storage that comes.
        compute: compute all the same, to count a real run with the same eyes.
    """

    def __init__(self, live: Live, *, compute: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[str, int] = {}
        self._live = live
        self._compute = compute

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run one operator, or let it be."""
        kwargs = kwargs or {}
        self._live.runs(func)
        result = self._run(func, args, kwargs)
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=result)
            self.flops[self._live.phase] = self.flops.get(self._live.phase, 0) + flops
        for tensor in _tensors([result]):
            self._live.add(tensor)
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inputs = list(_tensors([args, kwargs]))
        if self._compute or func.is_view or func in _HIDDEN_VIEWS or func is _ATEN.set_.source_Storage_storage_offset:
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in inputs):
            return func(*args, **kwargs)
        reads_hollow = any(self._live.is_hollow(tensor) for tensor in inputs)
        if reads_hollow and func in _ANSWERS:
            answer = _ANSWERS[func]
            return inputs[0].new_zeros(()).item() if answer is None else answer
        written = _written(func, args, kwargs)
        if written is not None:
            return written[0] if reads_hollow else func(*args, **kwargs)
        if func in _KERNELS_DECIDE:
            return _map(self._emptied, func(*args, **kwargs))
        try:
            shapes = _SHAPES.get(func, _on_meta)(func, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if reads_hollow:
                raise ConfigError(
                    f"{func} in {self._live.phase}: the shape of its result cannot be known without data, which a dry "
                    f"run does not have, or its arguments do not fit: {str(error).splitlines()[0]}"
                ) from error
            return func(*args, **kwargs)
        if any(not has_storage(shape) for shape in _tensors([shapes])):
            return func(*args, **kwargs)
        if not reads_hollow and all(_is_small(shape) for shape in _tensors([shapes])):
            return func(*args, **kwargs)
        return _map(lambda shape: self._empty(shape, is_resized=not inputs), shapes)

    def _emptied(self, result: Tensor) -> Tensor:
        """Forget what a kernel computed, but not how much memory it made."""
        self._live.adopt(result, hollow=not _is_small(result))
        return result

    def _empty(self, shape: Tensor, *, is_resized: bool) -> Tensor:
        if not shape.numel():
            return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        if _is_small(shape):
            zeros = torch.from_numpy(numpy.zeros(shape.untyped_storage().nbytes(), dtype=numpy.uint8))
            return zeros.view(shape.dtype).as_strided(shape.shape, shape.stride())
        made = _untouched(shape.untyped_storage().nbytes(), shape.dtype, is_resized=is_resized).as_strided(
            shape.shape, shape.stride()
        )
        self._live.add(made, hollow=True)
        return made


def _is_small(shape: Tensor) -> bool:
    return shape.nbytes <= (SMALL_WHOLE_BYTES if shape.dtype == torch.int64 else SMALL_BYTES)


def _untouched(num_bytes: int, dtype: torch.dtype, *, is_resized: bool) -> Tensor:
    """Return a flat tensor of pages that nobody has touched, if nobody resizes it also of more than the host has."""
    try:
        return torch.empty(num_bytes // dtype.itemsize, dtype=dtype)
    except RuntimeError:
        if is_resized:
            raise
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Return what an operator returns that only writes to its arguments; None for other operators."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    by_alias = {
        alias: values.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    results = []
    for returned in schema.returns:
        aliases = returned.alias_info.before_set if returned.alias_info is not None else ()
        if not aliases:
            return None
        results.append(by_alias[next(iter(aliases))])
    return (None if not results else results[0] if len(results) == 1 else tuple(results),)


def _on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    moved = _map(_meta, kwargs)
    if any(argument.name == "device" for argument in func._schema.arguments):
        moved["device"] = torch.device("meta")
        moved.pop("pin_memory", None)
    return func(*_map(_meta, args), **moved)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _batch_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the shapes of a batch norm on the CPU, which saves no statistics where it uses the running ones."""
    output, *statistics = _on_meta(func, args, kwargs)
    trains = args[5]
    return output, *(each if trains else each.new_empty(0) for each in statistics)


def _grouped_mm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the shape of a product that torch's own function knows for bf16 only."""
    halves = _map(lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor, _map(_meta, args))
    return func(*halves, **_map(_meta, kwargs)).to(args[0].dtype)


def _normalization(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the shapes of a norm on the CPU, whose statistics have the weight's dtype (the input's without one)."""
    output, *statistics = _on_meta(func, args, kwargs)
    weight = next((tensor for tensor in args[1:] if isinstance(tensor, Tensor)), args[0])
    return output, *(each.to(weight.dtype) for each in statistics)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_backward_flop_count(grad, query, key, value)  # type: ignore[no-untyped-call]


# torch's table has attention on accelerators only.
_FLOPS = MappingProxyType(
    flop_registry
    | {
        _ATEN._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(  # type: ignore[no-untyped-call]
            _attention_flops
        ),
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(  # type: ignore[no-untyped-call]
            _attention_backward_flops
        ),
    }
)
# Where torch's own function for the meta device gives what an accelerator returns.
_SHAPES = MappingProxyType(
    {
        _ATEN.native_layer_norm.default: _normalization,
        _ATEN.native_group_norm.default: _normalization,
        _ATEN.native_batch_norm.default: _batch_norm,
        _ATEN._grouped_mm.default: _grouped_mm,
    }
)
# They keep a workspace of a size that only the kernel knows.
_KERNELS_DECIDE = frozenset({_ATEN.mkldnn_rnn_layer.default})


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _map(change: Any, values: Any) -> Any:
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)(_map(change, value) for value in values)
    if isinstance(values, dict):
        return {key: _map(change, value) for key, value in values.items()}
    return values
