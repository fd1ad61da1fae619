"""The fixed table by which configurations name learning-rate schedules, and the one function that builds from it.

A name is one of ours with options of ours, or one of DeepSpeed's with options of DeepSpeed's: nothing is ever looked up
by import path. ``interop`` reads the table to translate. Read ``cycles.py`` and ``warmups.py`` for the schedules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config.words import nearest
from shardwise.errors import ConfigError
from shardwise.optim.cycles import LRRangeTest, OneCycle
from shardwise.optim.warmups import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "ScheduleEntry",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """How configurations name one schedule.

    Attributes:
        make: the class.
        deepspeed_name: its name in a DeepSpeed configuration.
        options: our option name -> DeepSpeed's.
        required: our names of options without a default.
        deepspeed_defaults: by our name, where DeepSpeed's default is not ours.
    """

    make: Callable[..., LRScheduler]
    deepspeed_name: str
    options: Mapping[str, str]
    required: tuple[str, ...] = ()
    deepspeed_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def _options(**names: str) -> Mapping[str, str]:
    return MappingProxyType(names)


_WARMUP = _options(num_warmup_steps="warmup_num_steps", shape="warmup_type")
_BOUNDS = _options(min_lr="warmup_min_lr", max_lr="warmup_max_lr")

SCHEDULES: Mapping[str, ScheduleEntry] = MappingProxyType(
    {
        "lr_range_test": ScheduleEntry(
            make=LRRangeTest,
            deepspeed_name="LRRangeTest",
            options=_options(
                min_lr="lr_range_test_min_lr",
                interval="lr_range_test_step_size",
                growth="lr_range_test_step_rate",
                staircase="lr_range_test_staircase",
            ),
        ),
        "one_cycle": ScheduleEntry(
            make=OneCycle,
            deepspeed_name="OneCycle",
            options=_options(
                min_lr="cycle_min_lr",
                max_lr="cycle_max_lr",
                num_rise_steps="cycle_first_step_size",
                num_fall_steps="cycle_second_step_size",
                rise_stairs="cycle_first_stair_count",
                fall_stairs="cycle_second_stair_count",
                decay_interval="decay_step_size",
                decay_rate="decay_lr_rate",
                cycle_momentum="cycle_momentum",
                min_momentum="cycle_min_mom",
                max_momentum="cycle_max_mom",
                momentum_decay_rate="decay_mom_rate",
            ),
            required=("min_lr", "max_lr"),
        ),
        "warmup": ScheduleEntry(
            make=WarmupLR,
            deepspeed_name="WarmupLR",
            options=_options(**_BOUNDS, **_WARMUP),
        ),
        "warmup_decay": ScheduleEntry(
            make=WarmupDecayLR,
            deepspeed_name="WarmupDecayLR",
            options=_options(total_steps="total_num_steps", **_BOUNDS, **_WARMUP),
            required=("total_steps",),
            deepspeed_defaults=MappingProxyType({"max_lr": 1e-3}),
        ),
        "warmup_cosine": ScheduleEntry(
            make=WarmupCosineLR,
            deepspeed_name="WarmupCosineLR",
            options=_options(
                total_steps="total_num_steps", min_ratio="warmup_min_ratio", end_ratio="cos_min_ratio", **_WARMUP
            ),
            required=("total_steps",),
        ),
    }
)


def build_scheduler(name: str, options: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Build a schedule by name.

    Args:
        name: a key of ``SCHEDULES`` with options of ours, or a DeepSpeed name with DeepSpeed's options and defaults.
        options: by name; those left out take their default.
        optimizer: sharded or not; its groups' ``lr`` is set to that of the first update.

    Raises:
        ConfigError: the name or an option is unknown, an option is missing or out of range.
    """
    by_deepspeed = {entry.deepspeed_name: entry for entry in SCHEDULES.values()}
    known = (*SCHEDULES, *by_deepspeed)
    if name not in known:
        raise ConfigError(f"scheduler: unknown name {name!r}{_nearest(name, known)}; known are {', '.join(known)}")
    entry = SCHEDULES.get(name) or by_deepspeed[name]
    names = {ours if name in SCHEDULES else theirs: ours for ours, theirs in entry.options.items()}
    unknown = [option for option in options if option not in names]
    if unknown:
        translated = dict(entry.options) if name not in SCHEDULES else {v: k for k, v in entry.options.items()}
        hints = ", ".join(f"{option!r}{_nearest(translated.get(option, option), names)}" for option in unknown)
        raise ConfigError(f"scheduler {name}: unknown option {hints}; known are {', '.join(names)}")
    chosen = {} if name in SCHEDULES else dict(entry.deepspeed_defaults)
    chosen.update({names[option]: value for option, value in options.items()})
    missing = [option for option, ours in names.items() if ours in entry.required and ours not in chosen]
    if missing:
        raise ConfigError(f"scheduler {name}: needs {' and '.join(missing)}")
    return entry.make(optimizer, **chosen)


def _nearest(word: object, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    near = nearest(str(word), list(known))
    return f" (nearest: {near!r})" if near else ""
