"""Whether a scheduler can go on from a state of a checkpoint: torch's take any name and any value.

Checked before the state is given. A class that loads in its own way knows itself what it takes.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint.manifest import MAX_COUNT
from shardwise.checkpoint.sane import is_finite, is_like, is_number
from shardwise.checkpoint.trial import OURS
from shardwise.errors import CheckpointError
from shardwise.optim.closed_form import DEEPEST

__all__ = ["check_scheduler", "parts_of"]

_COUNTS = frozenset({"last_epoch", "_step_count"})
_ABOVE_ZERO = frozenset({"step_size", "T_max", "T_0", "T_i", "T_mult", "total_size", "step_ratio", "start_factor"})
_NEVER_REACHED = frozenset({"best", "mode_worse", "patience", "cooldown", "T_max", "step_size", "total_iters"})  # inf
_TEXTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "_anneal_func_type": ("cos", "linear"),
        **{f"{end}_lr": ("initial_lr", "max_lr", "min_lr") for end in ("start", "end")},
        **{f"{end}_momentum": ("max_momentum", "base_momentum") for end in ("start", "end")},
    }
)
# Classes of torch whose rates come from one base rate for each group; CosineAnnealingLR's after T_max.
_PER_GROUP = (
    lr_scheduler.LambdaLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.CyclicLR,
)
_LISTS_PER_GROUP = ("base_lrs", "max_lrs", "base_momentums", "max_momentums")
_WITH_STATES = ("_schedulers", "lr_lambdas", "_scale_fn_custom")
_MOST_MILESTONES = 1 << 16  # torch writes each of them out


def check_scheduler(item: object, state: Any, *, begins_later: bool = False) -> None:
    """Check the state of a scheduler, and of those that it holds; other objects pass.

    Args:
        item: an object that is to be given a state.
        state: what it is to be given.
        begins_later: whether a ``SequentialLR`` has others before it.

    Raises:
        CheckpointError: a method would be lost, or the next steps could not use a value.
    """
    if not isinstance(item, LRScheduler) or not _is_ours(type(item).load_state_dict):
        return
    name, now = type(item).__name__, vars(item)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state of a {name} is no dictionary: {state!r:.40}")
    methods = [key for key in state if callable(getattr(type(item), str(key), None))]
    lost = [key for key in state if key == "optimizer" or (key in methods and key not in now)]
    if lost:
        raise CheckpointError(f"the state of a {name} would replace its {lost}")
    if not _is_ours(type(item).state_dict):
        return
    if "last_epoch" in now and "last_epoch" not in state:
        raise CheckpointError(f"the state of a {name} has no last_epoch")
    for key, value in state.items():
        if not _can_use(str(key), value, now.get(key), is_known=_is_ours(type(item))):
            raise CheckpointError(f"the state of a {name} has a {key} that it cannot use: {value!r:.40}")
    for key in _lists_per_group(item, {**now, **state}, begins_later=begins_later):
        found, num_groups = state.get(key, now.get(key)), len(item.optimizer.param_groups)
        if isinstance(found, list | tuple) and len(found) != num_groups:
            raise CheckpointError(f"the state of a {name} is one of {len(found)} groups ({key}), not of {num_groups}")
    if isinstance(item, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
        _check_held(item, state)


def _lists_per_group(item: LRScheduler, then: Mapping[Any, Any], *, begins_later: bool) -> tuple[str, ...]:
    """Return what must have a value for each group, by name."""
    if isinstance(item, lr_scheduler.ReduceLROnPlateau):
        return ("min_lrs",) if then.get("default_min_lr") is None else ()
    if begins_later and hasattr(item, "_get_closed_form_lr"):
        return _LISTS_PER_GROUP  # its first rates are those of its closed form
    return _LISTS_PER_GROUP if isinstance(item, _PER_GROUP) and _is_ours(type(item).get_lr) else ()


def _check_held(item: Any, state: Mapping[Any, Any]) -> None:
    name, held, inner = type(item).__name__, item._schedulers, state.get("_schedulers")
    if not isinstance(inner, list | tuple) or len(inner) != len(held):
        raise CheckpointError(f"the state of a {name} is not one of {len(held)} schedulers")
    is_sequence = isinstance(item, lr_scheduler.SequentialLR)
    milestones = state.get("_milestones")
    if is_sequence and not (isinstance(milestones, list | tuple) and len(milestones) == len(held) - 1):
        raise CheckpointError(
            f"the state of a {name} of {len(held)} schedulers has other milestones: {milestones!r:.40}"
        )
    for number, (each, own) in enumerate(zip(held, inner, strict=True)):
        check_scheduler(each, own, begins_later=is_sequence and number > 0)


def parts_of(item: object) -> Iterator[object]:
    """Yield an object, and what a scheduler gives states of their own: schedulers in it, and functions with a state."""
    yield item
    for name in _WITH_STATES if isinstance(item, LRScheduler) else ():
        value = vars(item).get(name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, LRScheduler):
                yield from parts_of(each)
            elif isinstance(getattr(each, "__dict__", None), dict) and not inspect.isroutine(each):
                yield each


def _is_ours(what: type | Callable[..., object]) -> bool:
    return what.__module__.startswith(OURS)


def _can_use(key: str, value: object, now: object, *, is_known: bool) -> bool:
    """Whether a value may take the place of what a scheduler has under this name."""
    if key in _COUNTS:
        return isinstance(value, int | float) and not isinstance(value, bool) and -DEEPEST <= value < MAX_COUNT
    if key == "_last_lr":
        return isinstance(value, list | tuple) and all(is_number(one) and is_finite(one) for one in value)
    if not is_known or key == "_schedulers":
        return True
    if key == "default_min_lr":
        return value is None or (is_number(value) and is_finite(value))
    if key in ("cycle_momentum", "use_beta1") and value and not now:
        return False  # the groups have no such option
    return _is_like(key, value, now)


def _is_like(key: str, value: Any, now: object) -> bool:
    """Whether a value is of the kind of another, or of the first in a list of others; lists may have any length."""
    if isinstance(now, bool):
        return bool(value in (0, 1))
    if key in _TEXTS:
        return value in _TEXTS[key]
    if isinstance(now, Counter):
        if not isinstance(value, Counter) or not all(type(count) is int and count > 0 for count in value.values()):
            return False
        return value.total() <= _MOST_MILESTONES and all(is_number(one) and is_finite(one) for one in value)
    if isinstance(now, Mapping):
        return isinstance(value, Mapping) and all(one in value and _is_like(one, value[one], now[one]) for one in now)
    if isinstance(now, list | tuple):
        is_list = isinstance(value, list | tuple) and bool(value or not now)
        return is_list and (not now or all(_is_like(key, one, now[0]) for one in value))
    if now is None or callable(now):
        return True
    if not is_like(value, now):
        return False
    if not is_number(value):
        return True
    if key in _ABOVE_ZERO and not value > 0:
        return False
    return is_finite(value) or (key in _NEVER_REACHED and value == value)
