"""What several settings say together: contradictions, which are problems, and remarks, which are not.

``check.py`` has validated each setting alone before.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from shardwise.config.model import Config, OneCycleConfig, SGDConfig, WarmupCosineConfig, WarmupDecayConfig
from shardwise.config.words import show

__all__ = ["contradictions", "remarks"]

DYNAMIC_SCALE = ("initial", "growth_interval", "hysteresis", "consecutive_hysteresis", "minimum")


def contradictions(
    config: Config, tree: Mapping[str, Any], names: Mapping[str, str], broken: frozenset[str]
) -> list[str]:
    """Return one line for each pair of settings that cannot both be meant.

    Args:
        config: the sound part of the tree, with defaults.
        tree: what was written.
        names: dotted native key -> the key as the user wrote it.
        broken: sections to leave alone.
    """
    found = []
    if not broken & {"loss_scale", "precision"}:
        found += _about_loss_scale(config, tree, names)
    optimizer = config.optimizer
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and (optimizer.momentum <= 0 or optimizer.dampening):
        key = _name("optimizer.nesterov", names)
        found.append(f"{key}: needs a momentum above 0 and no dampening")
    if "scheduler" not in broken:
        found += _about_schedule(config, names)
    return found


def _about_schedule(config: Config, names: Mapping[str, str]) -> list[str]:
    schedule = config.scheduler
    if isinstance(schedule, WarmupDecayConfig | WarmupCosineConfig) and (
        schedule.total_steps < schedule.num_warmup_steps
    ):
        total, warmup = _name("scheduler.total_steps", names), _name("scheduler.num_warmup_steps", names)
        return [f"{total}: {show(schedule.total_steps)} is less than {warmup} {show(schedule.num_warmup_steps)}"]
    if isinstance(schedule, OneCycleConfig):
        low, high = schedule.min_lr, schedule.max_lr
        lows, highs = (rates if isinstance(rates, list) else [rates] for rates in (low, high))
        one_for_all = 1 in (len(lows), len(highs))
        pairs = product(lows, highs) if one_for_all else zip(lows, highs, strict=False)  # groups are counted later
        if any(bottom > top for bottom, top in pairs):
            lowest, highest = _name("scheduler.min_lr", names), _name("scheduler.max_lr", names)
            return [f"{lowest}: {show(low)} is above {highest} {show(high)}"]
    return []


def _about_loss_scale(config: Config, tree: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    scale, param = config.loss_scale, config.precision.param
    written = tree.get("loss_scale", {})
    found = []
    if written and param not in (None, "fp16"):
        keys = ", ".join(_name(f"loss_scale.{key}", names) for key in written)
        found.append(f"{keys}: only for fp16, but {_name('precision.param', names)} is {param}; remove one of them")
    dynamic = [key for key in DYNAMIC_SCALE if key in written]
    if scale.fixed is not None and dynamic:
        keys = ", ".join(_name(f"loss_scale.{key}", names) for key in dynamic)
        fixed = _name("loss_scale.fixed", names)
        found.append(f"{keys}: for a scale that changes, but {fixed} is {scale.fixed:g}; remove one of them")
    if scale.fixed is None and scale.minimum > scale.initial:
        minimum, initial = _name("loss_scale.minimum", names), _name("loss_scale.initial", names)
        found.append(f"{minimum}: {show(scale.minimum)} is above the first scale ({initial}: {scale.initial:g})")
    return found


def remarks(config: Config, names: Mapping[str, str]) -> list[str]:
    """Return one line for each combination that is possible, but hardly meant."""
    found = []
    schedule = config.scheduler
    if isinstance(schedule, OneCycleConfig) and not schedule.decay_interval:
        for key in ("decay_rate", "momentum_decay_rate"):
            if getattr(schedule, key):
                interval = _name("scheduler.decay_interval", names)
                found.append(f"{_name(f'scheduler.{key}', names)} has no effect: {interval} is 0, so nothing decays")
    return found


def _name(key: str, names: Mapping[str, str]) -> str:
    return names.get(key, key)
