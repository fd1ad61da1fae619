"""What a parameter is outside its unit's forward: an object that cannot be misread.

While a unit does not compute, its parameters' class is a subclass of ``ShardedParameter``. Metadata passes; data is
gathered on demand inside a forward or backward, and elsewhere read only where it is whole; everything else raises
``StateError`` with the name and the call that works. A freed CPU storage would otherwise end the process.
See docs/design/0006-guarded-parameters.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.errors import StateError

__all__ = ["HOOK_ADVICE", "GuardAccess", "GuardedFragment", "PendingGradient", "ShardedParameter", "guard_class"]

_METADATA = frozenset(
    """
    __hash__ __len__ __torch_dispatch__ _backward_hooks _base _grad _grad_fn _has_compatible_shallow_copy_type
    _has_symbolic_sizes_strides _is_view
    _is_zerotensor _post_accumulate_grad_hooks _version can_cast dense_dim device dim dim_order dtype element_size
    empty_like full_like get_device grad_dtype grad_fn has_names is_complex is_conj is_contiguous is_cpu is_cuda
    is_distributed is_floating_point is_hpu is_inference is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia
    is_neg is_nested is_non_overlapping_and_dense is_ort is_pinned is_quantized is_same_size is_shared is_signed
    is_sparse is_sparse_csr is_tensor is_vulkan is_xla is_xpu itemsize layout name names nbytes ndim ndimension
    nelement new_empty new_empty_strided new_full new_ones new_tensor new_zeros numel ones_like output_nr rand_like
    randint_like randn_like register_hook requires_grad requires_grad_
    result_type retain_grad retains_grad shape size sparse_dim storage_offset stride sym_numel sym_size sym_stride
    volatile zeros_like
    """.split()  # noqa: SIM905 (a table of words)
)
_GRADIENT_METADATA = frozenset(
    {"shape", "dtype", "requires_grad", "ndim", "dim", "size", "numel", "grad_fn", "is_leaf"}
)
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward)
_CONVERSIONS = MappingProxyType(
    {
        "float": torch.float32,
        "double": torch.float64,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
    }
)


class GuardAccess(Protocol):
    """What the guard asks about the parameters of one bucket."""

    def name(self, param: Tensor) -> str:
        """Fully qualified name."""

    def inside(self) -> bool:
        """Whether a forward of the model or a backward is running."""

    def demand(self) -> None:
        """Gather the bucket, or wait for what is in flight."""

    def readable(self) -> bool:
        """Whether the whole parameters are in memory; waits for a refresh in flight."""

    def editable(self) -> bool:
        """Whether ``unsharded`` holds the bucket."""

    def has_separate_master(self) -> bool:
        """Whether the optimizer updates other memory than the parameter's."""

    def grad_pending(self, param: Tensor) -> bool:
        """Whether a gradient for this parameter waits in the flat buffer."""

    def discard_grad(self, param: Tensor) -> None:
        """Forget the parameter's gradient."""


class ShardedParameter(nn.Parameter):
    """Base of the classes that guarded parameters have; never instantiated."""

    _access: GuardAccess

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check the access, then do what plain torch does."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        kind = ""
        if name in ("__get__", "__set__", "__delete__"):
            kind, name = name, _attribute(func)
        if func in _BACKWARDS:  # runs a whole backward, in which the guard must stay on
            return _run_backward(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "grad" and kind:
                return _grad(func, kind, args)
            if _is_torchs(func) and (name in _METADATA or name == "backward"):
                return func(*args, **kwargs)
            if name == "register_post_accumulate_grad_hook":
                raise StateError(f"{_name(args[0])}: {HOOK_ADVICE}")
            if name == "data" and kind == "__set__":
                _set_data(args[0], args[1])
                return None
            if _converts_nothing(name, args, kwargs):
                return args[0]
            for param in _guarded([args, kwargs]):
                _check(param, name, kind, written=_is_written(param, name, args, kwargs))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: a copy of a shard is no model."""
        raise StateError(f"{_name(self)} is sharded and cannot be deep-copied: {_COPY_ADVICE}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a pickled shard is no model."""
        raise StateError(f"{_name(self)} is sharded and cannot be pickled: {_COPY_ADVICE}")


HOOK_ADVICE = (
    "a post-accumulate-grad hook would not see the gradient, which is moved into a flat buffer and reduced over all "
    "ranks; use optimizer.register_step_pre_hook, or shardwise.full_gradients(model) after the backward"
)
_COPY_ADVICE = (
    "copy or save the tensors of shardwise.full_state_dict(model), or shard a freshly built model and load them"
)


def guard_class(original: type[nn.Parameter], access: GuardAccess) -> type[nn.Parameter]:
    """Return the class that guarded parameters of one bucket have instead of ``original``."""
    bases = (ShardedParameter,) if original is nn.Parameter else (ShardedParameter, original)
    return type(f"Sharded{original.__name__}", bases, {"_access": access, "__doc__": ShardedParameter.__doc__})


class GuardedFragment(nn.Parameter):
    """Class of an optimizer's fragments outside its step: what is done to them there must not be lost."""

    _name: str
    _is_pending: Callable[[], bool]
    _discard: Callable[[], None]
    _lend: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what plain torch does, but for a pending gradient and for ``.data``, whose edits leave no version."""
        with torch._C.DisableTorchFunctionSubclass():
            fragment = args[0] if args else None
            if isinstance(fragment, GuardedFragment):
                kind, name = getattr(func, "__name__", ""), _attribute(func)
                if (kind, name) == ("__get__", "grad") and fragment._is_pending():
                    return PendingGradient.of(fragment, fragment._name)
                if (kind, name) == ("__get__", "data"):
                    return fragment._lend()
                if (kind, name) == ("__set__", "grad") and args[1] is not None:
                    if isinstance(args[1], PendingGradient):
                        return None
                    raise StateError(
                        f"{fragment._name}: assigning .grad to what the optimizer holds has no effect: the gradient "
                        "lives in a flat buffer; scale the loss, or use shardwise.clip_grad_norm_ or clip_grad_value_"
                    )
                if (kind, name) in (("__set__", "grad"), ("__delete__", "grad")) and fragment._is_pending():
                    fragment._discard()
                if (kind, name) == ("__set__", "data"):
                    raise StateError(f"{fragment._name}: assigning .data would detach it from the master parameters")
            return func(*args, **(kwargs or {}))


class PendingGradient(Tensor):
    """Stands for a gradient that lives in a flat buffer: it has the shape, and any use of its data raises."""

    _parameter_name: str

    @staticmethod
    def of(param: Tensor, name: str) -> "PendingGradient":
        """Return the stand-in for one parameter's gradient."""
        gradient = torch.empty(param.shape, dtype=param.dtype, device="meta").as_subclass(PendingGradient)
        gradient._parameter_name = name
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let metadata pass, refuse the rest."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = _attribute(func)
        if name in _GRADIENT_METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        who = next(
            (g._parameter_name for g in _tensors([args, kwargs or {}]) if isinstance(g, PendingGradient)), "a parameter"
        )
        raise StateError(
            f"the gradient of {who} lives in a flat buffer, so {name} cannot use it as .grad. To clip, call "
            "shardwise.clip_grad_norm_(model, max_norm) or clip_grad_value_; to step, pass the optimizer through "
            "shardwise.shard_optimizer; for fp16, use shardwise.scale_loss instead of a GradScaler; to zero it, "
            "call optimizer.zero_grad(); to look at it, call shardwise.full_gradients(model) or local_gradients(model)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Name the parameter."""
        return f"PendingGradient({self._parameter_name})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: there is nothing here to copy."""
        raise StateError(f"the gradient of {self._parameter_name} lives in a flat buffer and cannot be copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: there is nothing here to copy."""
        raise StateError(f"the gradient of {self._parameter_name} lives in a flat buffer and cannot be copied")


def _attribute(func: Callable[..., Any]) -> str:
    """Return the name of the attribute that a getter or setter belongs to."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _access(param: Tensor) -> GuardAccess:
    access: GuardAccess = type(param)._access  # type: ignore[attr-defined]
    return access


def _name(param: Tensor) -> str:
    return _access(param).name(param)


def _grad(func: Callable[..., Any], kind: str, args: Sequence[Any]) -> Any:
    param = args[0]
    access = _access(param)
    if kind == "__get__":
        if access.grad_pending(param) and not access.inside():
            return PendingGradient.of(param, access.name(param))
        return func(*args)
    if kind == "__set__" and args[1] is not None and not access.inside():
        if isinstance(args[1], PendingGradient):
            return None
        raise StateError(
            f"{access.name(param)}: assigning .grad has no effect on a sharded parameter, whose gradient lives in a "
            "flat buffer; scale the loss instead, or use shardwise.clip_grad_norm_ or clip_grad_value_"
        )
    if not access.inside():
        access.discard_grad(param)
    return func(*args)


def _is_torchs(func: Callable[..., Any]) -> bool:
    """Whether a function's name means what torch means by it; a user's may be called ``size`` and read the data."""
    return str(getattr(func, "__module__", None) or "torch").partition(".")[0] == "torch"


def _run_backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``torch.autograd.grad`` or ``backward`` with places instead of guarded parameters, gradients with values.

    Torch hands over the gradients by keyword, whoever called.
    """
    gradients = {key: _values(func.__name__, kwargs[key]) for key in ("grad_outputs", "grad_tensors") if key in kwargs}
    rest = {**kwargs, **gradients}
    materialized = rest.get("materialize_grads") and [tensor for tensor in args[1] if isinstance(tensor, Tensor)]
    if materialized and len(materialized) == len(args[1]):  # autograd does not do it for places
        rest |= {"materialize_grads": False, "allow_unused": True}
        found = func(*_gradient_edges(args), **_gradient_edges(rest))
        pairs = zip(found, materialized, strict=True)
        return tuple(torch.zeros_like(tensor, requires_grad=True) if g is None else g for g, tensor in pairs)
    return func(*_gradient_edges(args), **_gradient_edges(rest))


def _values(name: str, value: Any) -> Any:
    """Replace guarded parameters by copies, which outlive the unit."""
    if isinstance(value, ShardedParameter):
        with torch._C.DisableTorchFunctionSubclass():
            _check(value, name, "", written=False)
            return value.detach().clone()
    return tuple(_values(name, item) for item in value) if isinstance(value, tuple | list) else value


def _gradient_edges(value: Any) -> Any:
    """Replace guarded parameters by their places in the graph, which is all that autograd needs of them."""
    if isinstance(value, ShardedParameter):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(value)
    if isinstance(value, Mapping):
        return {key: _gradient_edges(item) for key, item in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, torch.autograd.graph.GradientEdge):
        return tuple(_gradient_edges(item) for item in value)
    return value


def _set_data(param: Tensor, value: Tensor) -> None:
    if value is not param:
        raise StateError(
            f"{_name(param)}: assigning .data would detach it from its flat buffer. Convert and move the model before "
            "shard(); change values inside `with shardwise.unsharded(model):`, in place"
        )


def _converts_nothing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a conversion such as ``to(device)`` that changes nothing and so needs no data."""
    if not args or not isinstance(args[0], ShardedParameter):
        return False
    param: Tensor = args[0]
    device: Any = None
    dtype: torch.dtype | None = None
    if name == "to" and not kwargs.get("copy"):
        if len(args) > 1 and isinstance(args[1], Tensor):
            device, dtype = args[1].device, args[1].dtype
        else:
            device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
    elif name in _CONVERSIONS and len(args) == 1:
        dtype = _CONVERSIONS[name]
    elif name == "cpu" and len(args) == 1:
        device = torch.device("cpu")
    elif name == "cuda":
        device = torch.device("cuda", torch.cuda.current_device()) if len(args) == 1 else torch.device(args[1])
    else:
        return False
    same_device = (
        device is None or device == param.device or (device.index is None and device.type == param.device.type)
    )
    return bool(same_device) and dtype in (None, param.dtype)


def _check(param: ShardedParameter, name: str, kind: str, *, written: bool) -> None:
    access = _access(param)
    if access.editable():
        access.demand()
        return
    if written:
        raise StateError(
            f"{access.name(param)}: {name}() would change a sharded parameter behind the optimizer's master copy; "
            "do it inside `with shardwise.unsharded(model):`, on every rank"
        )
    if access.inside():
        access.demand()
        return
    if not access.readable():
        raise StateError(
            f"{access.name(param)} is sharded: {name}() needs the whole parameter outside a forward. Use it inside "
            "`with shardwise.unsharded(module):` (its backward too), call the module of its unit (the root, or one "
            "named in shard(units=...)), or take shardwise.full_parameters(model), shardwise.full_state_dict(model)"
        )
    if name == "data" and kind and access.has_separate_master():
        raise StateError(
            f"{access.name(param)}: edits through .data would be lost, the optimizer updates a wider master copy; use "
            "detach() to read, `with shardwise.unsharded(model):` to edit"
        )


def _is_written(param: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    out = kwargs.get("out")
    if out is param or (isinstance(out, tuple | list) and any(o is param for o in out)):
        return True
    mutates = name in ("__setitem__", "set_", "resize_") or (name.endswith("_") and not name.endswith("__"))
    mutates = mutates or (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    )
    target = args[0] if args else next(iter(kwargs.values()), None)  # torch.nn.init passes by keyword
    return mutates and (target is param or (isinstance(target, tuple | list) and any(t is param for t in target)))


def _guarded(values: Any) -> Iterator[ShardedParameter]:
    return (tensor for tensor in _tensors(values) if isinstance(tensor, ShardedParameter))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple | set | frozenset):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
