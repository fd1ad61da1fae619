"""What a DeepSpeed checkpoint holds beside tensors, in the words of ours: groups, counters, schedule, loss scale, user.

What has no place here is left out with a warning, unless a run that goes on would differ without a word.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.contents import NOT_KEPT
from shardwise.checkpoint.doors.deepspeed_files import LossScalerState
from shardwise.checkpoint.doors.deepspeed_folder import DeepSpeedFiles
from shardwise.checkpoint.doors.deepspeed_shards import HeldOptimizer
from shardwise.checkpoint.doors.incoming import facts_of, plain_or_refuse, shown
from shardwise.checkpoint.manifest import Group, OptimizerFacts
from shardwise.checkpoint.plain import Plain
from shardwise.errors import CheckpointError

__all__ = ["client_state", "counters", "loss_scale", "optimizer_facts", "scheduler_state", "warn"]

_STEP, _POSITION = "step", "last_batch_iteration"
_ADAMS = ("Adam", "AdamW")
_CLASSES = MappingProxyType({name.lower(): name for name in ("Adam", "AdamW", "Lion", "SGD", "Adagrad", "RMSprop")})
_NOT_OURS = frozenset({_STEP, "bias_correction"})  # options of DeepSpeed's own optimizers
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
_MOST = 1 << 53
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "num_experts",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "ds_config",
        "ds_version",
    }
)


def warn(path: Path, text: str) -> None:
    """Tell the user what is not taken over."""
    warnings.warn(f"{path}: {text}", stacklevel=3)


def optimizer_facts(files: DeepSpeedFiles, held: HeldOptimizer, given: str | None) -> OptimizerFacts:
    """Return the optimizer: its class, groups, and state that is one value.

    Args:
        files: of the checkpoint.
        held: what they hold of it.
        given: class of the optimizer; None: to be told here.

    Raises:
        CheckpointError: nothing tells the class, or something cannot be kept.
    """
    name = given or _class_name(files, held)
    groups = []
    for number, group in enumerate(held.groups):
        where = f"{files.path}: option {{!r}} of group {number} of the optimizer"
        options = {
            key: plain_or_refuse(value, where.format(key))
            for key, value in group.options.items()
            if key not in NOT_KEPT and key not in _NOT_OURS
        }
        if name in _ADAMS:
            options["decoupled_weight_decay"] = name == "AdamW"
            if group.options.get("bias_correction") is False:
                raise CheckpointError(f"{files.path}: {name} without bias correction is none of torch's optimizers")
        groups.append(facts_of(Group, f"{files.path}: group {number}", params=group.params, options=options))
    scalars = _scalars(files, held, name)
    return facts_of(OptimizerFacts, str(files.path), class_name=name, groups=tuple(groups), scalars=scalars)


def _scalars(files: DeepSpeedFiles, held: HeldOptimizer, class_name: str) -> dict[str, dict[str, Plain]]:
    """Return state that is one value; steps of Adam as torch counts them, in fp32."""
    found: dict[str, dict[str, Plain]] = {}
    for group in held.groups:
        for name in group.params:
            param = held.params[name]
            own = dict(param.scalars)
            step = own.pop(_STEP, group.options.get(_STEP))
            if step is not None and class_name != "Lion" and param.states:
                own[_STEP] = torch.tensor(_number(step, f"{files.path}: step of {name}"))
            found[name] = {
                str(key): plain_or_refuse(value, f"{files.path}: state {key!r} of {name}") for key, value in own.items()
            }
    return {name: values for name, values in found.items() if values}


def _number(value: Any, where: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        raise CheckpointError(f"{where} is {str(value)[:40]}, expected a count")
    return float(value)


def _class_name(files: DeepSpeedFiles, held: HeldOptimizer) -> str:
    """Tell the class: by what groups say of weight decay, by DeepSpeed's configuration, by the names of states."""
    states = {state for param in held.params.values() for state in param.states}
    options = held.groups[0].options if held.groups else {}
    section = files.config.get("optimizer")
    section = section if isinstance(section, Mapping) else {}
    params = section.get("params")
    params = params if isinstance(params, Mapping) else {}
    name = _CLASSES.get(str(section.get("type")).lower())
    if name == "Adagrad" and states == {"exp_avg_sq"}:
        raise CheckpointError(f"{files.path}: Adagrad of DeepSpeed on CPUs keeps another state than torch's")
    if states >= {"exp_avg", "exp_avg_sq"}:
        decoupled = options.get("decoupled_weight_decay")
        if decoupled is None and name in _ADAMS:
            decoupled = name == "AdamW" or params.get("adam_w_mode", True)
        if decoupled is None:
            decoupled = True
            if any(group.options.get("weight_decay") for group in held.groups):
                warn(files.path, "nothing tells whether the optimizer is Adam or AdamW: AdamW, DeepSpeed's default")
        return "AdamW" if decoupled else "Adam"
    if name is not None:
        return name
    if "momentum" in options and "nesterov" in options and states <= {"momentum_buffer"}:
        return "SGD"
    if states == {"exp_avg"} and "betas" in options:
        return "Lion"
    raise CheckpointError(
        f"{files.path}: nothing tells the class of the optimizer, whose state is {sorted(states) or 'empty'}: name it"
    )


def counters(files: DeepSpeedFiles) -> dict[str, int]:
    """Return the counters as an engine has them; micro-steps, which are not saved, by the configuration.

    Raises:
        CheckpointError: one is no count.
    """
    found = {}
    for name in ("global_steps", "global_samples", "skipped_steps"):
        value = files.model[0].get(name, 0)
        if type(value) is not int or not 0 <= value < _MOST:
            raise CheckpointError(f"{files.path}: {name} is {str(value)[:40]}, expected a count")
        found[name] = value
    return found | {"micro_steps": found["global_steps"] * _accumulation(files)}


def _accumulation(files: DeepSpeedFiles) -> int:
    def count(value: Any) -> int:
        return value if type(value) is int and 0 < value < 1 << 31 else 0

    config = files.config
    given = count(config.get("gradient_accumulation_steps"))
    batch, micro = count(config.get("train_batch_size")), count(config.get("train_micro_batch_size_per_gpu"))
    ranks = count(files.model[0].get("dp_world_size"))
    return given or (batch // (micro * ranks) if batch and micro and ranks else 1) or 1


def scheduler_state(files: DeepSpeedFiles, held: HeldOptimizer) -> Plain | None:
    """Return the state of the learning-rate schedule as the schedule of the same name has it here.

    States of other schedules, which are torch's own, are taken as they are.
    """
    state = files.model[0].get("lr_scheduler")
    if state is None:
        return None
    section = files.config.get("scheduler")
    name = section.get("type") if isinstance(section, Mapping) else None
    position = state.get(_POSITION) if isinstance(state, Mapping) else None
    if position is None:
        try:
            return plain_or_refuse(state, f"{files.path}: state of the scheduler") if isinstance(state, dict) else None
        except CheckpointError as error:
            warn(files.path, f"the state of the scheduler is left out: {error}")
            return None
    rates = [float(r) for r in (group.options.get("lr") for group in held.groups) if isinstance(r, int | float)]
    fits = bool(rates) and len(rates) == len(held.groups) and all(map(math.isfinite, rates))
    if name not in _SCHEDULES or type(position) is not int or not -1 <= position < _MOST or not fits:
        warn(
            files.path, f"the state of the scheduler is left out: {name or 'its class, which is not told'} is not ours"
        )
        return None
    return {
        "schedule": name,
        "last_epoch": position + 1,
        "step_count": position + 2,
        "last_lr": rates,
    }


def loss_scale(files: DeepSpeedFiles) -> dict[str, float] | None:
    """Return the state of the loss scale; None if the model does not compute in fp16.

    Raises:
        CheckpointError: it is malformed.
    """
    module = files.model[0]["module"]
    if not any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in module.values()):
        return None
    outer = files.optim[0] if files.optim else files.universal or files.model[0].get("optimizer")
    found = outer.get("loss_scaler") if isinstance(outer, Mapping) else None
    state: Mapping[str, Any] = vars(found) if isinstance(found, LossScalerState) else outer or {}
    where = f"{files.path}: loss scale"
    if "cur_scale" not in state:
        warn(files.path, "has no loss scale, though it computes in fp16: it begins anew")
        return None
    scale = _number(state["cur_scale"], where)
    if "scale_window" not in state:
        return {"scale": scale, "clean_steps": 0.0, "tolerance": 1.0}
    window = max(1.0, _number(state["scale_window"], where))
    # DeepSpeed counts all steps, and grows the scale one step later than its window says. So does what goes on here,
    # but for a checkpoint of the step that overflowed, where no count says so: there the scale grows a step earlier.
    clean = _number(state["cur_iter"], where) - _number(state["last_overflow_iter"] + 1, where)
    return {
        "scale": scale,
        "clean_steps": (clean - 1) % window if clean > 0 else 0.0,
        "tolerance": _number(state.get("cur_hysteresis", 1), where),
    }


def client_state(files: DeepSpeedFiles) -> Plain:
    """Return what the user added, as far as it is plain."""
    kept, alien = {}, []
    for key, value in files.model[0].items():
        if key in _OWN_KEYS:
            continue
        try:
            kept[key] = plain_or_refuse(value, f"client_state {key!r}")
        except CheckpointError:
            alien.append(key)
    if alien:
        warn(files.path, f"of the client state {shown(alien)} is left out: it is no plain value")
    return kept or None
