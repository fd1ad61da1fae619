"""Which torch optimizers work on fragments, and how much state they keep.

Pure facts about classes, by name, so that nothing outside torch has to be imported. An element-wise optimizer updates
each element from that element's gradient and state alone, so it gives the same result on any cut of a parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.planner.optimizers import state_words as planned_words

__all__ = ["check_elementwise", "state_at_start", "state_words", "supports_fused"]

_WHOLE = frozenset(
    {"Muon", "Shampoo", "DistributedShampoo", "SOAP", "Adafactor", "CAME", "GaLore", "LAMB", "Lamb", "LARS"}
)
_SEVERAL_PASSES = frozenset({"LBFGS"})
_SPARSE = frozenset({"SparseAdam"})


def check_elementwise(optimizer_class: type) -> None:
    """Refuse optimizers that need more of a parameter than the elements a rank owns.

    Raises:
        ConfigError: names the optimizer and what it needs.
    """
    for name in (cls.__name__ for cls in optimizer_class.__mro__):
        if name in _WHOLE:
            raise ConfigError(
                f"{name} needs whole matrices or norms of whole tensors, but a rank owns flat fragments; "
                "use an element-wise optimizer such as torch.optim.AdamW"
            )
        if name in _SEVERAL_PASSES:
            raise ConfigError(
                f"{name} runs several backwards and scalar products inside step(), which fragments do "
                "not give; use an element-wise optimizer such as torch.optim.AdamW"
            )
        if name in _SPARSE:
            raise ConfigError(
                f"{name} works on sparse gradients, which flat buffers do not hold; use torch.optim.AdamW"
            )


def state_words(optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any] | None = None) -> int:
    """Return the number of state elements per parameter element, scalar counters left out.

    Raises:
        ConfigError: the class is not in the table.
    """
    check_elementwise(optimizer_class)
    return planned_words(optimizer_class.__name__, options)


def state_at_start(optimizer_class: type, group: Mapping[str, Any], fragment: Tensor) -> dict[str, Tensor] | None:
    """Return the state that torch gives a parameter when the optimizer is built; None if it waits for a step."""
    if torch.optim.Adagrad not in optimizer_class.__mro__:
        return None
    start = float(group["initial_accumulator_value"])
    return {
        "step": torch.zeros((), dtype=torch.float32, device=fragment.device),
        "sum": torch.full_like(fragment, start, requires_grad=False),
    }


def supports_fused(optimizer_class: type, device: torch.device) -> bool:
    """Whether torch has a fused kernel for this optimizer on this device."""
    classes = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}
    known = next((cls for cls in optimizer_class.__mro__ if cls in classes), None)
    if known is None or (known is torch.optim.Adagrad and device.type != "cpu"):
        return False
    return device.type in ("cpu", "cuda")
