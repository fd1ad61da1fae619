"""Whether a scheduler can go on from a state of a checkpoint: torch's take any name and any value.

Checked before the state is given. Kinds of values are asked only of torch's own classes, and of ours; another class
knows itself what it keeps.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint.manifest import MAX_COUNT
from shardwise.checkpoint.sane import is_like
from shardwise.errors import CheckpointError

__all__ = ["check_scheduler"]

_OURS = ("torch.optim.", "shardwise.optim.")
_COUNTS = frozenset({"last_epoch", "_step_count"})
_DIVISORS = frozenset({"step_size", "total_iters", "T_max", "T_0", "T_i", "T_mult", "total_size", "total_steps"})


def check_scheduler(item: object, state: Any) -> None:
    """Check the state of a scheduler, and of those that it holds; other objects pass.

    Args:
        item: an object that is to be given a state.
        state: what it is to be given.

    Raises:
        CheckpointError: a method would be lost, or the next step could not use a value.
    """
    if not isinstance(item, LRScheduler):
        return
    name, now = type(item).__name__, vars(item)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state of a {name} is no dictionary: {state!r:.40}")
    lost = [key for key in state if key == "optimizer" or callable(getattr(type(item), str(key), None))]
    if lost:
        raise CheckpointError(f"the state of a {name} would replace its {lost}")
    if "last_epoch" in now and "last_epoch" not in state:
        raise CheckpointError(f"the state of a {name} has no last_epoch")
    is_known = type(item).__module__.startswith(_OURS)
    for key, value in state.items():
        if not _can_use(str(key), value, now.get(key), is_known=is_known):
            raise CheckpointError(f"the state of a {name} has a {key} that it cannot use: {value!r:.40}")
    held = [each for each in now.get("_schedulers", ()) if isinstance(each, LRScheduler)]
    inner = state.get("_schedulers", ())
    if held and (not isinstance(inner, list | tuple) or len(inner) != len(held)):
        raise CheckpointError(f"the state of a {name} is not one of {len(held)} schedulers")
    for each, own in zip(held, inner, strict=bool(held)):
        check_scheduler(each, own)


def _can_use(key: str, value: object, now: object, *, is_known: bool) -> bool:
    """Whether a value may take the place of what a scheduler has under this name."""
    if key in _COUNTS:
        return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_COUNT < value < MAX_COUNT
    if not is_known or key == "_schedulers" or callable(now):
        return True
    if key in _DIVISORS and isinstance(now, int | float) and now > 0:
        return isinstance(value, int | float) and value > 0 and _is_like(value, now)
    return _is_like(value, now)


def _is_like(value: object, now: object) -> bool:
    """Whether a value is of the kind of another; lists may be longer or shorter, and no number is NaN."""
    if isinstance(now, Counter):
        return isinstance(value, Counter) and _is_like(list(value), list(now))
    if isinstance(now, Mapping):
        return isinstance(value, Mapping) and all(key in value and _is_like(value[key], now[key]) for key in now)
    if isinstance(now, list | tuple):
        return isinstance(value, list | tuple) and (not now or all(_is_like(one, now[0]) for one in value))
    return (callable(now) or is_like(value, now)) and bool(value == value)
