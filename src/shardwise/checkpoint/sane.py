"""Whether an optimizer can go on from values of a checkpoint: a right hash does not make them sane.

Only what every optimizer asks is asked of all; of torch's own classes, and ours, ``trial.py`` finds out
more.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.manifest import DTYPES, MAX_COUNT, OptimizerFacts, Stored
from shardwise.checkpoint.plain import from_plain
from shardwise.checkpoint.trial import WHAT_ADDS_STATE, Kept, base_of, kept_with, refusal_of, steps_like
from shardwise.optim.shard import OptimizerLink

__all__ = ["Tell", "check_options", "check_states", "is_finite", "is_like", "is_number"]

Tell = Callable[[str, str], None]  # kind of problem, text


def check_options(link: OptimizerLink, number: int, index: int, options: Mapping[str, Any], tell: Tell) -> None:
    """Compare a group's options with the kinds of values that the optimizer's defaults, or the group itself, have.

    A class of torch's or ours says itself which values it takes.
    """
    base, now = steps_like(link.original_class), link.optimizer.param_groups[index]
    where, odd = f"of group {index} of optimizer {number}", False
    for key, value in options.items():
        default = link.optimizer.defaults.get(key)
        if base is None and (value is None or (isinstance(value, list | tuple) and isinstance(default, list | tuple))):
            continue  # other classes may take more than their defaults show
        if not is_like(value, default) and not _is_like_now(value, now.get(key)):
            odd = True
            tell("options of another kind", f"{key} {where} is {_shown(value)}")
        elif base is not None and _numbers(default) and not is_finite(value) and is_finite(default):
            odd = True
            tell("options that are no finite numbers", f"{key} {where} is {_shown(value)}")
    if base is None or odd:
        return
    lacking = [key for key, value in link.optimizer.defaults.items() if _numbers(value) and key not in options]
    if lacking:
        tell("options missing in the checkpoint", f"{', '.join(lacking)} {where}")
    refusal = refusal_of(base, {**now, **options})
    if refusal and not refusal_of(base, now):
        tell("options that the optimizer refuses", f"those {where}: {refusal[:200]}")


def check_states(
    link: OptimizerLink,
    number: int,
    facts: OptimizerFacts,
    stored: Sequence[Stored],
    options: Mapping[str, Mapping[str, Any]],
    tell: Tell,
) -> None:
    """Check the states of an optimizer's parameters; decodes each that is one value, so that placing cannot fail.

    Args:
        link: the optimizer here.
        number: of the optimizer in the checkpoint.
        facts: of that one.
        stored: the tensors of the checkpoint.
        options: of the group here, for each parameter that has one, by its name in the checkpoint.
        tell: is told what does not fit.
    """
    is_known = steps_like(link.original_class) is not None
    from_plain(list(facts.other.values()))
    single: dict[str, dict[str, Any]] = {
        name: {key: from_plain(plain) for key, plain in states.items()} for name, states in facts.scalars.items()
    }
    for name, states in single.items():
        if "step" in states and not _is_count(states["step"], is_known):
            tell("steps that are no number", f"{_shown(states['step'])} of {name}")
    whole: dict[str, set[str]] = {}
    for item in stored:
        if item.kind == "optim" and item.optimizer == number:
            whole.setdefault(item.name, set()).add(item.state)
            if is_known and not DTYPES[item.dtype].is_floating_point:
                tell("states of another kind", f"{item.state} of {item.name} is {item.dtype}")
    for group in facts.groups if is_known else ():
        held = [(name, {*single.get(name, ()), *whole.get(name, ())}) for name in group.params]
        held = [(name, own) for name, own in held if own]
        for name, own in held[1:]:
            if own != held[0][1]:
                tell("incomplete states", f"{held[0][0]} has {sorted(held[0][1])}, {name} has {sorted(own)}")
    base = base_of(link.original_class)
    if base is None:
        return
    tried: dict[str, Kept] = {}
    for name, group_options in options.items():
        if name in single or name in whole:
            flags = str([bool(group_options.get(key)) for key in WHAT_ADDS_STATE])
            if flags not in tried:
                tried[flags] = kept_with(base, group_options)
            _check_kinds(name, single.get(name, {}), whole.get(name, set()), tried[flags], is_known, tell)


def _check_kinds(name: str, single: Mapping[str, Any], whole: Set[str], kept: Kept, is_known: bool, tell: Tell) -> None:
    """Check that a parameter has the states of its optimizer; torch's kernels read what they expect, not what is."""
    for key, value in single.items():
        if key in kept.whole and not (value is None and key not in kept.needed):
            tell("states of one value for a whole parameter", f"{key} of {name}")
        elif is_known and key in kept.single and not (isinstance(value, Tensor) and value.is_floating_point()):
            tell("states of another kind", f"{key} of {name} is {_shown(value)}")
    if is_known:
        for key in sorted(whole & kept.single):
            tell("states that are more than one value", f"{key} of {name}")
        lacking = sorted(kept.needed - single.keys() - whole)
        if lacking:
            tell("incomplete states", f"{name} has no {', '.join(lacking)}")


def _shown(value: object) -> str:
    """Return the beginning of a value's text; torch imports half of itself to write a tensor's."""
    return f"{value.item()} of {value.dtype}" if isinstance(value, Tensor) else str(value)[:40]


def _numbers(value: object) -> list[float]:
    """Return the numbers of an option that is one or a list of some; flags are none."""
    values = value if isinstance(value, list | tuple) else [value]
    return [float(one) for one in values if isinstance(one, int | float | Tensor) and not isinstance(one, bool)]


def is_finite(value: object) -> bool:
    """Whether no number of an option is infinite or NaN."""
    return all(map(math.isfinite, _numbers(value)))


def is_number(value: object) -> bool:
    """Whether a value is one number that can be computed with."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype != torch.bool
    if isinstance(value, int):
        return abs(value) < MAX_COUNT
    return isinstance(value, float)


def _is_count(value: object, is_known: bool) -> bool:
    if isinstance(value, Tensor):
        return bool(0 <= value.item() < MAX_COUNT)
    return not is_known and isinstance(value, int | float) and math.isfinite(value) and 0 <= value < MAX_COUNT


def _is_like_now(value: object, now: object) -> bool:
    return value is None if now is None else is_like(value, now)


def is_like(value: object, default: object) -> bool:
    """Whether a value may take the place of a default; any may where that says nothing."""
    if isinstance(default, numpy.generic):
        default = default.item()  # a checkpoint holds Python's
    if default is None or value is default:
        return True
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float | Tensor):
        return is_number(value)
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            return False
        return all(is_like(one, other) for one, other in zip(value, default, strict=True))
    return type(value) is type(default)
