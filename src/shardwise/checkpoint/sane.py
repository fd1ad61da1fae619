"""Whether an optimizer can go on from values of a checkpoint: a right hash does not make them sane.

Only what every optimizer asks is asked of all; of torch's own classes more is known.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import DTYPES, MAX_COUNT, OptimizerFacts, Stored
from shardwise.checkpoint.plain import from_plain
from shardwise.optim.shard import OptimizerLink

__all__ = ["check_options", "check_states"]

Tell = Callable[[str, str], None]  # kind of problem, text


def check_options(link: OptimizerLink, number: int, index: int, options: Mapping[str, Any], tell: Tell) -> None:
    """Compare a group's options with the kinds of values that the optimizer's defaults, or the group itself, have."""
    is_torch, now = _is_torch(type(link.optimizer)), link.optimizer.param_groups[index]
    for key, value in options.items():
        default = link.optimizer.defaults.get(key)
        if not is_torch and (value is None or (isinstance(value, list | tuple) and isinstance(default, list | tuple))):
            continue  # other classes may take more than their defaults show
        if not _is_like(value, default) and not _is_like_now(value, now.get(key)):
            tell("options of another kind", f"{key} of group {index} of optimizer {number} is {str(value)[:40]}")


def check_states(link: OptimizerLink, number: int, facts: OptimizerFacts, stored: Sequence[Stored], tell: Tell) -> None:
    """Check the states of an optimizer's parameters; decodes each that is one value, so that placing cannot fail."""
    is_torch = _is_torch(type(link.optimizer))
    from_plain(list(facts.other.values()))
    keys: dict[str, set[str]] = {}
    for name, states in facts.scalars.items():
        keys.setdefault(name, set()).update(states)
        for key, plain in states.items():
            value = from_plain(plain)
            if key == "step" and not _is_count(value, is_torch):
                tell("steps that are no number", f"{str(value)[:40]} of {name}")
    for item in stored:
        if item.kind == "optim" and item.optimizer == number:
            keys.setdefault(item.name, set()).add(item.state)
            if is_torch and not DTYPES[item.dtype].is_floating_point:
                tell("states of another kind", f"{item.state} of {item.name} is {item.dtype}")
    for group in facts.groups if is_torch else ():
        held = [(name, keys[name]) for name in group.params if name in keys]
        for name, own in held[1:]:
            if own != held[0][1]:
                tell("incomplete states", f"{held[0][0]} has {sorted(held[0][1])}, {name} has {sorted(own)}")


def _is_torch(kind: type) -> bool:
    """Whether one of torch's optimizers does the work."""
    owner = next((cls for cls in kind.__mro__ if "step" in vars(cls)), kind)
    return owner is not torch.optim.Optimizer and owner.__module__.startswith("torch.optim")


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, int):
        return abs(value) < MAX_COUNT
    return isinstance(value, float)


def _is_count(value: object, is_torch: bool) -> bool:
    if isinstance(value, Tensor):
        return bool(0 <= value.item() < MAX_COUNT)
    return not is_torch and isinstance(value, int | float) and math.isfinite(value) and 0 <= value < MAX_COUNT


def _is_like_now(value: object, now: object) -> bool:
    return value is None if now is None else _is_like(value, now)


def _is_like(value: object, default: object) -> bool:
    """Whether a value may take the place of a default; any may where that says nothing."""
    if default is None or value is default:
        return True
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float | Tensor):
        return _is_number(value)
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            return False
        return all(_is_like(one, other) for one, other in zip(value, default, strict=True))
    return type(value) is type(default)
