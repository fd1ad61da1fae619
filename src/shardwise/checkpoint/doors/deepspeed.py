"""A checkpoint of DeepSpeed, of stage 1, 2 or 3 and any number of ranks, to ours: weights, optimizer, counters.

The flat shards of its ranks become whole tensors by parameter name (``deepspeed_join.py``). DeepSpeed is not needed,
and nothing in its files is run (``deepspeed_reader.py``).
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.contents import NOT_KEPT
from shardwise.checkpoint.doors.deepspeed_join import Shards, read_shards
from shardwise.checkpoint.doors.deepspeed_reader import find_files, read_states
from shardwise.checkpoint.doors.incoming import Incoming, extra_state_module, plain_or_refuse, shown
from shardwise.checkpoint.folder import make_temporary
from shardwise.checkpoint.manifest import Group, OptimizerFacts
from shardwise.checkpoint.names import is_tag
from shardwise.checkpoint.plain import Plain
from shardwise.checkpoint.save import new_save_id
from shardwise.checkpoint.tensorfile import NAMES_OF_DTYPES
from shardwise.errors import CheckpointError

__all__ = ["import_deepspeed"]

_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
    }
)


@torch.no_grad()
def import_deepspeed(source: Path, folder: Path, tag: str | None) -> Path:
    """Make a checkpoint from one that DeepSpeed saved; it keeps its name.

    The files are mapped; whole tensors wait in files on the disk of ``folder``.

    Args:
        source: the folder that DeepSpeed saved in, or the directory of one checkpoint.
        folder: of checkpoints; the new one is named as DeepSpeed's, or ``step-<step>`` if that is no name here.
        tag: which checkpoint of ``source``; None: the one that ``latest`` names.

    Raises:
        CheckpointError: it is incomplete, damaged, leads outside, wants something to run, or is of a kind not read.
    """
    files = find_files(source, tag)
    models = [read_states(files.path, name) for name in files.model]
    optims = [read_states(files.path, name) for name in files.optim]
    with _staging(folder) as staging:
        try:
            shards = read_shards(files, models, optims, staging)
            incoming, facts = _filled(files.path, models[0], shards)
            step = _count(models[0], "global_steps")
            return incoming.write(
                folder,
                files.path.name if is_tag(files.path.name) else None,
                step=step,
                optimizers=(facts,),
                loss_scale=_loss_scale(shards, models[0]),
                objects=_objects(models[0], facts, files.path),
                user=_user(models[0], files.path),
            )
        except CheckpointError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{files.path}: is malformed: {type(error).__name__}: {str(error)[:200]}") from None


def _filled(path: Path, model: Mapping[str, Any], shards: Shards) -> tuple[Incoming, OptimizerFacts]:
    """Return the checkpoint in the making, with its tensors, and what is known of the optimizer."""
    module: Mapping[str, Any] = model["module"]
    incoming = Incoming(path, buffers=frozenset(model["buffer_names"]), frozen=shards.frozen)
    tied = _tied(model, {**shards.trained, **shards.frozen}, path)
    if shards.whole_module:
        _complete(module, shards, tied, incoming)
    for name, tensor in {**dict.fromkeys(module), **shards.trained, **shards.frozen}.items():
        extra = extra_state_module(name)
        if tensor is not None:
            if incoming.is_buffer(name, tensor):
                raise CheckpointError(f"{path}: {name} is a parameter and a buffer")
            incoming.add_weight(name, tensor, [other for other, first in tied.items() if first == name])
            dtype = module[name].dtype if name in module else tensor.dtype
            incoming.params[name] = incoming.params[name].model_copy(update={"dtype": NAMES_OF_DTYPES[dtype]})
        elif extra is not None:
            incoming.extra_state[extra] = plain_or_refuse(module[name], f"{path}: {name}")
        elif name in incoming.buffers:
            incoming.add_weight(name, module[name])
        elif name not in tied:
            raise CheckpointError(f"{path}: {name} is neither a parameter that was sharded, nor frozen, nor a buffer")
    for name, states in shards.states.items():
        for state, tensor in states.items():
            incoming.add_state(name, state, tensor)
    return incoming, _optimizer(path, model, shards)


def _tied(model: Mapping[str, Any], params: Mapping[str, Tensor], path: Path) -> dict[str, str]:
    """Return other names of tied weights -> the name that has the values."""
    tied: dict[str, str] = {}
    for other, first in dict(model.get("shared_params") or {}).items():
        one, two = (other, first) if first in params else (first, other)
        if two not in params or one in params:
            raise CheckpointError(f"{path}: {other} and {first} are tied, but not one of the two has values")
        tied[one] = two
    return tied


def _complete(module: Mapping[str, Any], shards: Shards, tied: dict[str, str], incoming: Incoming) -> None:
    """Find, up to stage 2, what only the state of the module tells: stage 1 does not list frozen and tied weights."""
    known = {_memory(module[name]): name for name in (*shards.trained, *shards.frozen) if name in module}
    for name, value in module.items():
        if extra_state_module(name) is not None or name in incoming.buffers or name in tied:
            continue
        first = known.setdefault(_memory(value), name)
        if first == name:
            if name not in shards.trained:
                shards.frozen[name] = value
        elif name not in shards.trained and name not in shards.frozen:
            tied[name] = first


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the values of a tensor are; tied weights share them, as in the file."""
    if not tensor.numel():
        return (id(tensor),)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _optimizer(path: Path, model: Mapping[str, Any], shards: Shards) -> OptimizerFacts:
    groups, scalars = [], {name: dict(values) for name, values in shards.scalars.items()}
    for names, options in shards.groups:
        if options.get("bias_correction") is False:
            raise CheckpointError(f"{path}: the optimizer does not correct its bias, which none here does")
        if "step" in options:  # where an optimizer of DeepSpeed counts
            for name in names:
                scalars.setdefault(name, {}).setdefault("step", torch.tensor(float(options["step"])))
        kept = {key: value for key, value in options.items() if key not in {*NOT_KEPT, "step", "bias_correction"}}
        where = f"{path}: option"
        groups.append(
            Group(params=names, options={key: plain_or_refuse(kept[key], f"{where} {key!r}") for key in kept})
        )
    return OptimizerFacts(
        class_name=_class_name(path, model, shards),
        groups=tuple(groups),
        scalars={
            name: {key: plain_or_refuse(_as_torch(key, value), f"{path}: state {key!r}") for key, value in each.items()}
            for name, each in scalars.items()
        },
    )


def _as_torch(key: str, value: Any) -> Any:
    """Return a counter of steps as torch's optimizers keep it."""
    return torch.tensor(float(value)) if key == "step" and isinstance(value, int | float) else value


def _class_name(path: Path, model: Mapping[str, Any], shards: Shards) -> str:
    """Tell the class: by the options, the configuration, or the state."""
    options = shards.groups[0][1]
    decoupled = options.get("decoupled_weight_decay")
    states = {state for each in shards.states.values() for state in each}
    section = dict(model.get("ds_config") or {}).get("optimizer") or {}
    params = section.get("params") or {}
    if states >= {"exp_avg", "exp_avg_sq"}:
        if decoupled is None:
            decoupled = params.get("adam_w_mode", True) if section else None
        if decoupled is None:
            decoupled = True
            if any(group.get("weight_decay") for _, group in shards.groups):
                _warn(path, "nothing tells whether the optimizer was Adam or AdamW; taken for AdamW")
        return "AdamW" if decoupled or str(section.get("type")).lower() == "adamw" else "Adam"
    if states == {"exp_avg"}:
        return "Lion"
    if states == {"sum"}:
        return "Adagrad"
    if states <= {"momentum_buffer"} and "momentum" in options:
        return "SGD"
    raise CheckpointError(f"{path}: nothing tells the class of the optimizer, whose state is {sorted(states)}")


def _loss_scale(shards: Shards, model: Mapping[str, Any]) -> dict[str, float] | None:
    """Return where the loss scale was, for a model that computed in fp16."""
    scaler = shards.loss_scaler
    half = any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in model["module"].values())
    if scaler is None or not half:
        return None
    scale = float(scaler.cur_scale)
    if not hasattr(scaler, "cur_iter"):
        return {"scale": scale, "clean_steps": 0, "tolerance": 1}
    # DeepSpeed grows when this, of the next step, is a multiple of the window and not 0: the first time one step later
    interval = scaler.cur_iter - scaler.last_overflow_iter - 1
    clean = (interval - 1) % scaler.scale_window if interval > 0 else 0
    return {"scale": scale, "clean_steps": clean, "tolerance": scaler.cur_hysteresis}


def _objects(model: Mapping[str, Any], facts: OptimizerFacts, path: Path) -> dict[str, Plain]:
    counters = {name: _count(model, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    accumulation = _accumulation(model)
    counters["micro_steps"] = counters["global_steps"] * accumulation
    objects: dict[str, Plain] = {"engine": counters}
    state, config = model.get("lr_scheduler"), dict(model.get("ds_config") or {}).get("scheduler")
    name = config.get("type") if isinstance(config, dict) else None
    if state is not None and set(state) == {"last_batch_iteration"}:
        if name in _SCHEDULES:
            position = int(state["last_batch_iteration"]) + 1
            objects["scheduler"] = {
                "schedule": name,
                "last_epoch": position,
                "step_count": position + 1,
                "last_lr": [float(group.options["lr"]) for group in facts.groups],
            }
        else:
            _warn(path, f"the state of the learning-rate schedule is left out: its configuration names {name!r}")
    elif state is not None:
        try:
            objects["scheduler"] = plain_or_refuse(state, "state of the scheduler")
        except CheckpointError as error:
            _warn(path, f"the state of the learning-rate schedule is left out: {error}")
    if model.get("data_sampler") is not None or model.get("random_ltd") is not None:
        _warn(path, "the states of DeepSpeed's data sampler and layer dropping are left out")
    return objects


def _accumulation(model: Mapping[str, Any]) -> int:
    """Return the number of micro-batches per update, as far as the configuration tells."""
    config = dict(model.get("ds_config") or {})
    given, whole = config.get("gradient_accumulation_steps"), config.get("train_batch_size")
    micro, ranks = config.get("train_micro_batch_size_per_gpu"), model.get("dp_world_size")
    if isinstance(given, int):
        return max(1, given)
    if isinstance(whole, int) and isinstance(micro, int) and isinstance(ranks, int) and micro * ranks > 0:
        return max(1, whole // (micro * ranks))
    return 1


def _user(model: Mapping[str, Any], path: Path) -> Plain:
    """Return what the user added (``client_state``), as far as it is plain."""
    kept, lost = {}, []
    for key, value in model.items():
        if key not in _OWN_KEYS:
            try:
                kept[key] = plain_or_refuse(value, key)
            except CheckpointError:
                lost.append(key)
    if lost:
        _warn(path, f"of the client state, {shown(lost)} is left out: it is no plain value")
    return kept or None


def _count(model: Mapping[str, Any], name: str) -> int:
    value = model.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{name} is {str(value)[:200]}, no count")
    return value


def _warn(path: Path, text: str) -> None:
    warnings.warn(f"{path}: {text}", stacklevel=4)


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Give a private directory on the disk of a folder, removed at the end."""
    place = folder if folder.is_dir() else folder.absolute().parent
    try:
        temporary = make_temporary(place, "import", new_save_id())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        yield temporary
    except OSError as error:
        raise CheckpointError(f"{folder}: was not written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
