"""What an optimizer keeps for a parameter, found out with one of its class that moves two elements once.

Only of torch's classes and ours, and of what is derived from them; no code of other classes runs here.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

__all__ = ["OURS", "WHAT_ADDS_STATE", "Kept", "base_of", "kept_with", "refusal_of", "steps_like"]

OURS = ("torch.optim.", "shardwise.optim.")
WHAT_ADDS_STATE: Mapping[str, Any] = MappingProxyType({"amsgrad": True, "centered": True, "momentum": 0.9})


@dataclass(frozen=True, kw_only=True)
class Kept:
    """States of one parameter, by key.

    Attributes:
        needed: without which the next step fails, if the parameter has any.
        whole: one element for each of the parameter's.
        single: one value.
    """

    needed: frozenset[str]
    whole: frozenset[str]
    single: frozenset[str]


def base_of(kind: type) -> type[Optimizer] | None:
    """Return the first class of torch's, or ours, that an optimizer's class is or is derived from."""
    for cls in kind.__mro__:
        if cls.__module__.startswith(OURS) and cls is not Optimizer and "step" in vars(cls):
            return cls if issubclass(cls, Optimizer) and not hasattr(cls, "_shardwise") else None
    return None


def steps_like(kind: type) -> type[Optimizer] | None:
    """Return ``base_of`` a class that has no step of its own."""
    base = base_of(kind)  # torch wraps the step of every class that it builds an object of, where it was inherited
    same = all(_plain(kind, name) is _plain(base, name) for name in ("step", "_init_group"))
    return base if same else None


def _plain(kind: type | None, name: str) -> Any:
    method = getattr(kind, name, None)
    return method and inspect.unwrap(method)


def refusal_of(base: type[Optimizer], options: Mapping[str, Any]) -> str:
    """Return why a class cannot be built with some options; "" if it can."""
    try:
        _build(base, options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kept_with(base: type[Optimizer], options: Mapping[str, Any]) -> Kept:
    """Return what an optimizer with these options keeps; what it would keep with others is not needed."""
    known = _known(base) & WHAT_ADDS_STATE.keys()
    now = _state(
        base, {key: WHAT_ADDS_STATE[key] if options.get(key) else type(WHAT_ADDS_STATE[key])() for key in known}
    )
    everything = _state(base, {key: WHAT_ADDS_STATE[key] for key in known})
    return Kept(
        needed=frozenset() if base is SGD else frozenset(now),  # it makes a momentum when it misses one
        whole=frozenset(key for key, value in everything.items() if isinstance(value, Tensor) and value.dim()),
        single=frozenset(key for key, value in everything.items() if isinstance(value, Tensor) and not value.dim()),
    )


def _known(base: type[Optimizer]) -> set[str]:
    return inspect.signature(base.__init__).parameters.keys() - {"self", "params"}


def _build(base: type[Optimizer], options: Mapping[str, Any]) -> Optimizer:
    param = nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))
    known = _known(base) - {"fused", "foreach", "capturable", "differentiable"}
    given = {key: copy.copy(value) for key, value in options.items() if key in known}
    maker: Any = base
    with torch.device("cpu"):
        made: Optimizer = maker([param], **given)
    return made


def _state(base: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after one step; hooks that are registered for all optimizers are left out."""
    optimizer = _build(base, {"lr": 0.1, **options})
    param = optimizer.param_groups[0]["params"][0]
    with torch.device("cpu"), torch.no_grad():
        param.grad = torch.ones(2, dtype=torch.float32)
        inspect.unwrap(vars(base)["step"])(optimizer)
    return dict(optimizer.state[param])
