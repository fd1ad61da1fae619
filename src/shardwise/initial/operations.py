"""What the recorder must know of torch's operations by name; everything else it reads from their schemas."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.initial.tape import each, name_of

__all__ = [
    "AUTOCAST",
    "BLIND_DRAWS",
    "OVERWRITES",
    "REFUSED",
    "SHAPE_ONLY",
    "WRONG_ON_META",
    "check_without_autocast",
    "makes_tensor",
    "refusal",
    "written_by",
]

# In-place operations that need nothing of what their target held.
OVERWRITES = frozenset(
    """normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ zero_ fill_ copy_ eye arange linspace zeros
    ones full""".split()  # noqa: SIM905 (a table of words)
)
# Draws whose number of random numbers is decided by shapes alone, in place or new.
BLIND_DRAWS = frozenset(
    """normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ rand randn randint randperm rand_like
    randn_like randint_like""".split()  # noqa: SIM905
)
# torch 2.13: their meta kernels promise other strides than the real ones give, so they are computed at once. Found by
# comparing the two for torch's own table of operations; replay finds the rest.
WRONG_ON_META = frozenset(
    """_linalg_svd linalg_eig _fft_c2r _fft_r2c copysign floor_divide log_sigmoid_forward xlogy
    special_xlog1py""".split()  # noqa: SIM905
)
# Their tensor argument gives its shape, never its contents.
SHAPE_ONLY = frozenset(
    """empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_zeros
    new_ones new_full""".split()  # noqa: SIM905
)
# Their results have the dtype of their argument or one that is asked for, under autocast too.
_COPIES = frozenset("clone _to_copy lift_fresh contiguous".split()) | SHAPE_ONLY  # noqa: SIM905
AUTOCAST = MappingProxyType({"cpu": "AutocastCPU", "cuda": "AutocastCUDA"})  # torch's dispatch keys
REFUSED = MappingProxyType(
    {
        "set_": "it puts other memory behind a tensor (copies by pickle and torch.load do): load weights outside, and "
        "give them to shard() with recipe.with_weights(...)",
        "resize_": "it changes the memory behind a tensor: make a new tensor instead",
        "resize_as_": "it changes the memory behind a tensor: make a new tensor instead",
        "native_batch_norm": "it changes running statistics unseen: run no forward in the constructor",
        "cudnn_batch_norm": "it changes running statistics unseen: run no forward in the constructor",
        "miopen_batch_norm": "it changes running statistics unseen: run no forward in the constructor",
        "_pin_memory": "deferred tensors have no memory to pin: leave pin_memory out",
        "record_stream": "deferred tensors have no memory: leave it out",
    }
)


def refusal(func: Any, reason: str) -> ConfigError:
    """Return the error for an operation that cannot be recorded."""
    return ConfigError(f"deferred_init(): {name_of(func)} cannot be recorded: {reason}")


def check_without_autocast(func: Any, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Refuse what autocast might compute in another dtype: all but copies and what it has no kernel for, by element."""
    if not any(tensor.is_floating_point() for tensor in tensors) or func.overloadpacket.__name__ in _COPIES:
        return
    casts = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), AUTOCAST[device.type])
    if casts or torch.Tag.pointwise not in func.tags:
        raise refusal(func, "torch.autocast may change its dtype, unseen: leave autocast out of the constructor")


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes, as its schema says."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += each(args[position] if position < len(args) else kwargs.get(argument.name), Tensor)
    return found


def makes_tensor(func: Any) -> bool:
    """Whether the result of an operation is a tensor, or holds some, or is nothing."""
    returns = func._schema.returns
    return not returns or any("Tensor" in str(value.type) for value in returns)
