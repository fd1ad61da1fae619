"""A checkpoint of DeepSpeed, of any stage and number of ranks, to ours; without DeepSpeed, and nothing in it is run.

``deepspeed_files.py`` reads a file, ``deepspeed_folder.py`` knows which there are, ``deepspeed_shards.py`` and
``deepspeed_other.py`` where parameters lie in them, ``deepspeed_values.py`` what is beside tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.contents import Part
from shardwise.checkpoint.doors.deepspeed_folder import DeepSpeedFiles, find_tag, mapping_in, read_folder
from shardwise.checkpoint.doors.deepspeed_other import read_universal_optimizer, read_unsharded
from shardwise.checkpoint.doors.deepspeed_shards import Held, HeldOptimizer, read_shards
from shardwise.checkpoint.doors.deepspeed_values import (
    client_state,
    counters,
    loss_scale,
    optimizer_facts,
    scheduler_state,
    warn,
)
from shardwise.checkpoint.doors.incoming import Incoming, check_dense, extra_state_module, plain_or_refuse
from shardwise.checkpoint.doors.scratch import scratch_tensor, staging_folder
from shardwise.checkpoint.manifest import Stored
from shardwise.checkpoint.plain import Plain
from shardwise.checkpoint.tensorfile import NAMES_OF_DTYPES
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["import_deepspeed"]


@torch.no_grad()
def import_deepspeed(
    source: Path, folder: Path, tag: str | None = None, *, optimizer: str | None = None, verify: bool = True
) -> Path:
    """Make a checkpoint from one that DeepSpeed saved: at stages 0 to 3, or in the universal format.

    Files are mapped. What DeepSpeed cut waits, put together, in files on the disk of ``folder``, not in memory.

    Args:
        source: a folder of DeepSpeed's checkpoints, or the directory of one.
        folder: of checkpoints; the new one has the name of the old.
        tag: which one of ``source``; None: what ``latest`` names.
        optimizer: class of the optimizer; None: told by its options, DeepSpeed's configuration or its state.
        verify: compare the checksums of the files, which DeepSpeed itself does not.

    Raises:
        CheckpointError: it is damaged, incomplete, leads outside, wants something to run, is of a kind that is not
            read (tensor, pipeline or expert parallel), or holds what a checkpoint does not.
        ConfigError: the tag is no name.
    """
    path, found = find_tag(source, tag)
    try:
        return _import(path, folder, found, optimizer, verify)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, CheckpointError | ConfigError):
            raise
        raise CheckpointError(f"{path}: is malformed: {type(error).__name__}: {str(error)[:200]}") from None


def _import(path: Path, folder: Path, tag: str, optimizer: str | None, verify: bool) -> Path:
    """Read everything, then write it."""
    files = read_folder(path, verify=verify)
    model = _Model.parse(files)
    if files.universal is not None:
        held = read_universal_optimizer(files, verify=verify)
    else:
        held = read_shards(files) if files.optim else read_unsharded(files, model.weights)
    if held.problem:
        warn(path, f"the state of the optimizer is left out: {held.problem}")
    with staging_folder(folder) as staging:
        incoming = Incoming(path, buffers=model.buffers.keys(), frozen=_frozen(model, held))
        incoming.extra_state.update(model.extra_state)
        for name in dict.fromkeys((*model.weights, *held.params)):
            _add_param(incoming, model, held.params.get(name), name, staging)
        for name, tensor in model.buffers.items():
            incoming.add_weight(name, tensor)
        optimizers = () if held.problem else (optimizer_facts(files, held, optimizer),)
        engine = counters(files)
        objects: dict[str, Plain] = {"engine": engine}
        scheduler = scheduler_state(files, held)
        if scheduler is not None:
            objects["scheduler"] = scheduler
        return incoming.write(
            folder,
            tag,
            step=engine["global_steps"],
            optimizers=optimizers,
            loss_scale=loss_scale(files),
            objects=objects,
            user=client_state(files),
        )


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The model's state dict.

    Attributes:
        weights: parameters, each under one name, in order; at stage 3 without their values.
        aliases: other names of parameters -> that name.
        buffers: under every name.
        extra_state: of modules, plain.
        frozen: pieces of parameters that stage 3 keeps elsewhere, with their shapes.
    """

    weights: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    extra_state: Mapping[str, Plain]
    frozen: Mapping[str, tuple[tuple[int, ...], Sequence[Tensor]]]

    @classmethod
    def parse(cls, files: DeepSpeedFiles) -> "_Model":
        """Take the state dict apart.

        Raises:
            CheckpointError: it is malformed.
        """
        where, top = str(files.path), files.model[0]
        module = mapping_in(top.get("module"), f"{where}: module")
        given = top.get("buffer_names")
        buffer_names = {name for name in given if isinstance(name, str)} if isinstance(given, list) else set()
        shared = top.get("shared_params")
        aliases = dict(mapping_in(shared, f"{where}: shared_params")) if shared else {}
        weights: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        extra_state: dict[str, Plain] = {}
        first_names: dict[tuple[Any, ...], str] = {}
        for name, value in module.items():
            extra = extra_state_module(name)
            if extra is not None:
                extra_state[extra] = plain_or_refuse(value, f"{where}: {name}")
                continue
            check_dense(value, f"{where}: {name}")
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
            original = aliases.get(name) or first_names.setdefault(same, name)
            if name in buffer_names or not value.dtype.is_floating_point:
                buffers[name] = value
            elif original == name:
                weights[name] = value
            else:
                aliases[name] = original
        unknown = [name for name in aliases.values() if name not in weights]
        if unknown:
            raise CheckpointError(f"{where}: {str(unknown[0])[:200]} has other names and is not in the model")
        return cls(
            weights=weights,
            aliases=aliases,
            buffers=buffers,
            extra_state=extra_state,
            frozen=_frozen_pieces(files),
        )


def _frozen_pieces(files: DeepSpeedFiles) -> dict[str, tuple[tuple[int, ...], list[Tensor]]]:
    """Return what files of stages 2 and 3 hold of parameters that do not train: by rank, the last piece padded."""
    shapes = files.model[0].get("frozen_param_shapes") or {}
    found: dict[str, tuple[tuple[int, ...], list[Tensor]]] = {}
    for name, shape in mapping_in(shapes, f"{files.path}: frozen_param_shapes").items():
        where = f"{files.path}: frozen parameter {name}"
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise CheckpointError(f"{where}: its shape is malformed")
        left, kept = math.prod(shape), []
        for model in files.model:
            piece = mapping_in(model.get("frozen_param_fragments"), where).get(name)
            check_dense(piece, where)
            assert isinstance(piece, Tensor)
            kept.append(piece.reshape(-1)[:left])
            left -= kept[-1].numel()
        if left or len({piece.dtype for piece in kept}) != 1:
            raise CheckpointError(f"{where}: {left} of its {math.prod(shape)} elements are missing")
        found[name] = (shape, kept)
    return found


def _frozen(model: _Model, held: HeldOptimizer) -> set[str]:
    """Return the parameters that did not train: those that the optimizer does not have."""
    return set() if held.problem else {name for name in model.weights if name not in held.params}


def _add_param(incoming: Incoming, model: _Model, held: Held | None, name: str, staging: Path) -> None:
    """Take over a parameter, its copy for computing where that is another, and its state."""
    copy = model.weights.get(name)
    shape = tuple(copy.shape) if copy is not None else ()
    if held is not None and held.master:
        shape, tensor = held.shape, _whole(held.master, held.shape, staging)
    elif name in model.frozen:
        shape, pieces = model.frozen[name]
        tensor = _whole(pieces, shape, staging)
    elif copy is not None:
        tensor = copy
    else:
        raise CheckpointError(f"{incoming.source}: the files have no values of {name}")
    incoming.add_weight(name, tensor, [other for other, original in model.aliases.items() if original == name])
    if copy is not None and copy.dtype != tensor.dtype and name in incoming.params:
        dtype = NAMES_OF_DTYPES[copy.dtype]
        incoming.params[name] = incoming.params[name].model_copy(update={"dtype": dtype})
        if tuple(copy.shape) == shape and not torch.equal(tensor.to(copy.dtype), copy):
            stored = Stored(kind="compute", name=name, shape=shape, dtype=dtype, pieces=())
            incoming.parts.append(Part(stored=stored, start=0, flat=copy.contiguous().reshape(-1)))
    for state, parts in held.states.items() if held is not None else ():
        incoming.add_state(name, state, _whole(parts, shape, staging))


def _whole(pieces: Sequence[Tensor], shape: tuple[int, ...], staging: Path) -> Tensor:
    """Put pieces together; one piece stays where it is."""
    if len(pieces) == 1:
        return pieces[0].reshape(shape)
    try:
        out = scratch_tensor(staging, shape, pieces[0].dtype if pieces else torch.float32)
    except OSError as error:
        raise CheckpointError(f"{staging}: {error.strerror}") from None
    flat, position = out.view(-1), 0
    for piece in pieces:
        flat[position : position + piece.numel()] = piece
        position += piece.numel()
    return out
