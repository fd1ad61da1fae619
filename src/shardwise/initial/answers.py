"""What a recorded tensor answers where torch would look at its memory: its device, its data, copies of Python data.

A mode over torch's functions, beside the mode over its operations in ``recorder.py``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ConfigError
from shardwise.initial.recorder import Recorder
from shardwise.initial.tape import each, map_leaves

__all__ = ["Answers"]

_NO_META = "leave torch.device('meta') out, the context does what it is for"
_META = torch.device("meta")
_CPU = torch.device("cpu")

# Under a mode torch takes another path through these than without (singular vectors, which nobody asked for), and
# rounds otherwise. They are put on the tape undivided, and torch divides them when they are replayed.
_UNDIVIDED = frozenset(
    """linalg_svdvals linalg_eigvalsh linalg_matrix_norm linalg_norm linalg_cond linalg_matrix_rank norm
    nuclear_norm""".split()  # noqa: SIM905 (a table of words)
)


class Answers(TorchFunctionMode):
    """Answers for recorded tensors what torch would ask their memory: the device they are meant for, their data."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer, or let torch go on."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], Tensor) else None
        with torch._C.DisableTorchFunction():
            answer = self._answer(func, own, args, kwargs)
        if answer is not NotImplemented:
            return answer
        with self._recorder.autocast():
            if getattr(func, "__name__", "") not in _UNDIVIDED or _is_differentiated([args, kwargs]):
                return func(*args, **kwargs)
            with torch._C._AutoDispatchBelowAutograd():  # where operations are not divided yet
                return func(*args, **kwargs)

    def _answer(self, func: Any, own: Tensor | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and own is not None and own.is_meta:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            device = self._recorder.device_of(own)
            if attribute == "device":
                return device
            if attribute in ("is_meta", "is_cpu", "is_cuda"):
                return attribute == f"is_{device.type}"
        elif name in ("to", "cpu") and own is not None:
            if name == "cpu":
                args = (own, _CPU)
            return self._to(own, *args[1:], **kwargs)
        elif own is not None and own.is_meta and name in ("tolist", "numpy", "__array__"):
            result = getattr(torch.Tensor, name)(self._recorder.value(own), *args[1:], **kwargs)
            if name != "tolist":
                result.flags.writeable = False  # what is written there would be lost
            return result
        elif own is not None and own.is_meta and name == "data_ptr":
            raise ConfigError("deferred_init(): a deferred tensor has no address: compare tensors with `is`")
        elif name in ("__getitem__", "__setitem__") and own is not None and own.is_meta:
            index = args[1] if type(args[1]) is tuple else (args[1],)
            if any(isinstance(part, list) or type(part).__module__ == "numpy" for part in index):
                # Torch would make these tensors where no mode sees them.
                return func(own, tuple(_as_index(part) for part in index), *args[2:])
        elif name == "__deepcopy__" and own is not None and not own.is_meta and type(own) is Tensor:
            copied = own.detach().clone().requires_grad_(own.requires_grad)
            args[1][id(own)] = copied
            return copied
        elif name in ("tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "frombuffer"):
            return self._from_data(func, args, kwargs)
        elif "device" in kwargs and name != "__get__" and torch.device(kwargs["device"] or _CPU) == _META:
            raise ConfigError(f"deferred_init(): {name} asks for the meta device: {_NO_META}")
        return NotImplemented

    def _from_data(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a tensor of Python data, in which recorded tensors may occur."""
        first = 1 if func.__name__ == "new_tensor" else 0
        data = args[first] if len(args) > first else kwargs.get("data")
        if isinstance(data, Tensor):
            if func.__name__ not in ("tensor", "new_tensor") or not data.is_meta:
                return NotImplemented
            made = data.detach().clone()
            made = self._to(made, **{key: value for key, value in kwargs.items() if key in ("dtype", "device")})
            return made.requires_grad_(kwargs.get("requires_grad", False))
        if func.__name__ in ("tensor", "new_tensor") or isinstance(data, list | tuple | int | float | complex):
            own = list(args)
            if len(own) > first:
                own[first] = map_leaves(data, self._recorder.number)
            return func(*own, **kwargs)
        return self._recorder.outside(func, args, kwargs)  # shares its memory with an array

    def _to(self, own: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to``, in which the meta device stands for the device the tensor is meant for already."""
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            kwargs = {key: value for key, value in kwargs.items() if key != "other"}
            args = (self._recorder.device_of(other), other.dtype, *args[1:])
        home = self._recorder.device_of(own)

        def place(value: Any) -> Any:
            if isinstance(value, str) or type(value) is int:
                value = torch.device(value)
            if value == _META:
                raise ConfigError(f"deferred_init(): a tensor is moved to the meta device: {_NO_META}")
            same = isinstance(value, torch.device) and own.is_meta and _is_same_device(value, home)
            return _META if same else value

        head = [place(args[0]), *args[1:]] if args else []
        if "device" in kwargs:
            kwargs = {**kwargs, "device": place(kwargs["device"])}
        result: Tensor = torch.Tensor.to(own, *head, **kwargs)
        return result


def _is_differentiated(arguments: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in each(arguments, Tensor))


def _as_index(part: Any) -> Any:
    return torch.tensor(part) if isinstance(part, list) or type(part).__module__ == "numpy" else part


def _is_same_device(first: torch.device, second: torch.device) -> bool:
    return first.type == second.type and (first.index or 0) == (second.index or 0)
