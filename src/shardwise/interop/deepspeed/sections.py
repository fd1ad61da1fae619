"""Settings that several of DeepSpeed's keys make together: precision, loss scale, optimizer, scheduler, defaults."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardwise.config.words import nearest, show
from shardwise.interop.deepspeed.build import Build, Entry, number
from shardwise.interop.deepspeed.keys import KEYS, OPTIMIZERS, OPTIMIZERS_REFUSED, SCHEDULERS

__all__ = ["SECTIONS"]

MAX_SCALE_POWER = 127  # of fp32, in which losses are scaled
KNOWN_TYPES = MappingProxyType(
    {"optimizer": ("Adam", "AdamW", "Adagrad", "Lion", "SGD"), "scheduler": tuple(SCHEDULERS)}
)
SCALE_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def _precision(build: Build) -> None:
    fp16, bf16 = build.get("fp16.enabled", False), build.get("bf16.enabled", False)
    if fp16 and bf16:
        build.problems.append(f"fp16.enabled and {build.path('bf16.enabled')} are both true; choose one of them")
        build.doubtful |= {"precision", "loss_scale"}
        return
    param = "fp16" if fp16 else "bf16" if bf16 else None
    if param is not None:
        build.set("precision.param", param, f"{param}.enabled")
    wire = build.get("communication_data_type")
    if wire is not None:
        build.set("precision.wire", wire.lower(), "communication_data_type")
    _accumulation(build, param)
    if _dtype(build, "data_types.param_dtype") not in (None, param or "fp32"):
        entry = build.entries["data_types.param_dtype"]
        build.refuse(entry, f"{show(entry.value)} does not agree with fp16.enabled and bf16.enabled")
    if bf16:
        _bf16_options(build)


def _dtype(build: Build, name: str) -> str | None:
    """Return a dtype under its short name; refuse what is none."""
    value: str | None = build.get(name)
    if value is None:
        return None
    long = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
    short = value.lower().removeprefix("torch.")
    short = long.get(short, short)
    if short not in ("fp32", "fp16", "bf16"):
        build.refuse(build.entries[name], f"expected one of fp32, fp16, bf16, got {show(value)}")
        return None
    return short


def _accumulation(build: Build, param: str | None) -> None:
    name = "data_types.grad_accum_dtype"
    dtype = _dtype(build, name)
    if dtype is not None:
        build.set("precision.accumulate", dtype, name)
    elif param is not None and name not in build.entries:
        build.remark_default(
            name,
            f"{name} is absent: gradients are accumulated in fp32; DeepSpeed would take {param}, which rounds more",
        )


def _bf16_options(build: Build) -> None:
    if build.get("bf16.check_grad_overflow") is False:
        build.set("on_nonfinite", "ignore", "bf16.check_grad_overflow")
    master = build.get("bf16.bf16_master_weights_and_grads", False)
    states = build.get("bf16.bf16_optimizer_states", False)
    if master and states:
        build.set("precision.master", "bf16", "bf16.bf16_optimizer_states")
        if "precision.accumulate" not in build.origins:
            build.set("precision.accumulate", "bf16", "bf16.bf16_master_weights_and_grads")
    elif master or states:
        entry = build.entries["bf16.bf16_master_weights_and_grads" if master else "bf16.bf16_optimizer_states"]
        build.refuse(entry, entry.key.why)


def _loss_scale(build: Build) -> None:
    if not build.get("fp16.enabled", False) or build.get("bf16.enabled", False):
        return
    fixed = build.get("fp16.loss_scale", 0)
    entries = [build.entries[f"fp16.{name}"] for name in SCALE_KEYS if build.get(f"fp16.{name}") is not None]
    if fixed:
        build.set("loss_scale.fixed", float(fixed), "fp16.loss_scale")
        for entry in entries:
            build.ignore(entry, "fp16.loss_scale is fixed")
        return
    for entry in entries:
        if entry.key.name != "fp16.initial_scale_power":
            build.set(entry.key.to, number(entry.value), entry.key.name)
        elif 0 <= entry.value <= MAX_SCALE_POWER:
            build.set("loss_scale.initial", 2.0**entry.value, "fp16.initial_scale_power")
        else:
            build.refuse(entry, f"expected an integer from 0 to {MAX_SCALE_POWER}, got {show(entry.value)}")


def _choice(
    build: Build, section: str, table: Mapping[str, tuple[str, tuple[str, ...]]], *, any_case: bool
) -> tuple[str, tuple[str, ...]] | None:
    """Return the row of the type that a section names; None if there is none, which is a problem if it should."""
    if section not in build.sections:
        return None
    name = f"{section}.type"
    types = ", ".join(KNOWN_TYPES[section])
    if name not in build.entries:
        build.problems.append(f"{name}: is missing; one of {types}")
        build.doubtful.add(section)
        return None
    kind = build.get(name)
    if kind is None:  # refused already
        build.doubtful.add(section)
        return None
    row = table.get(kind.lower() if any_case else kind)
    if row is None:
        near = nearest(kind, KNOWN_TYPES[section])
        hint = f"did you mean {near}? " if near and kind.lower() not in OPTIMIZERS_REFUSED else ""
        words = "is not in this version" if kind.lower() in OPTIMIZERS_REFUSED else f"is no {section} here"
        build.refuse(build.entries[name], f"{show(kind)} {words}; {hint}There are {types}")
        build.doubtful.add(section)
    return row


def _params(build: Build, section: str, allowed: tuple[str, ...]) -> list[Entry]:
    """Return the parameters that were written and that the type has; refuse the others."""
    kind = build.get(f"{section}.type")
    prefix = f"{section}.params."
    found = []
    for name, entry in build.entries.items():
        if not name.startswith(prefix):
            continue
        if name.removeprefix(prefix) in allowed:
            found.append(entry)
        elif build.verdicts[name].fate != "refused":
            build.refuse(entry, f"is no parameter of {kind}, which has {', '.join(allowed)}")
    return found


def _optimizer(build: Build) -> None:
    row = _choice(build, "optimizer", OPTIMIZERS, any_case=True)
    if row is None:
        return
    name, allowed = row
    params = _params(build, "optimizer", allowed)
    decoupled = build.get("optimizer.params.adam_w_mode", True)
    said_by = "optimizer.type" if name != "adam" or decoupled else "optimizer.params.adam_w_mode"
    if name == "adam" and decoupled:
        name = "adamw"
    elif name == "adamw" and not decoupled:
        build.ignore(build.entries["optimizer.params.adam_w_mode"], "AdamW always takes the decay from the weights")
    build.set("optimizer.name", name, said_by)
    for entry in params:
        if build.verdicts[entry.key.name].fate == "same":
            build.set(entry.key.to, entry.value, entry.key.name)
    if name == "lion":
        for key, value in (("lr", 1e-3), ("betas", [0.9, 0.999])):
            if f"optimizer.params.{key}" not in build.entries:
                full = f"optimizer.params.{key}"
                note = f"{full} is absent: {show(value)}, the default of DeepSpeed's Lion"
                build.set_default(f"optimizer.{key}", value, full, note)
    decay = "optimizer.params.weight_decay"
    if name == "adamw" and build.get("optimizer.params.torch_adam", False) and decay not in build.entries:
        note = f"{decay} is absent: 0.01, the default of torch's AdamW, because torch_adam is true"
        build.set_default("optimizer.weight_decay", 0.01, decay, note)


def _scheduler(build: Build) -> None:
    row = _choice(build, "scheduler", SCHEDULERS, any_case=False)
    if row is None:
        return
    name, allowed = row
    for key in allowed:
        full = f"scheduler.params.{key}"
        build.names[KEYS[full].to] = full
    params = _params(build, "scheduler", allowed)
    build.set("scheduler.name", name, "scheduler.type")
    for entry in params:
        if build.verdicts[entry.key.name].fate == "same":
            value = entry.value.lower() if isinstance(entry.value, str) else number(entry.value)
            build.set(entry.key.to, value, entry.key.name)
    highest = "scheduler.params.warmup_max_lr"
    if name == "warmup_decay" and highest not in build.entries:
        build.set_default("scheduler.max_lr", 1e-3, highest, f"{highest} is absent: 0.001, DeepSpeed's default")


def _rest(build: Build) -> None:
    if "steps_per_print" in build.entries:
        steps = build.get("steps_per_print")
        if steps is not None and steps != math.inf:
            build.set("log_every", number(steps), "steps_per_print")
    if "zero_optimization.stage" not in build.entries:
        build.set_default(
            "stage", 0, "zero_optimization.stage", "zero_optimization.stage is absent: 0, DeepSpeed's default"
        )
    if "gradient_clipping" not in build.entries:
        note = "gradient_clipping is absent: 1.0 as in DeepSpeed 0.19.8 (0.0 in 0.16.5); 0 switches it off"
        build.set_default("clip_grad_norm", 1.0, "gradient_clipping", note)
    for section in ("offload_param", "offload_optimizer"):
        pin = f"zero_optimization.{section}.pin_memory"
        if build.is_on(f"zero_optimization.{section}.device") and pin not in build.entries:
            build.remark_default(
                pin, f"{pin} is absent: true in DeepSpeed 0.19.8 (false in 0.16.5); nothing is pinned here"
            )


SECTIONS: tuple[Callable[[Build], None], ...] = (_precision, _loss_scale, _optimizer, _scheduler, _rest)
