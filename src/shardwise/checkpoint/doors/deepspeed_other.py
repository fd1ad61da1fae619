"""What DeepSpeed's optimizer keeps where it is not cut: in the universal format, and without ZeRO.

In the universal format each parameter has files of its own. Without ZeRO nothing is named: parameters are told by their
shapes and their order, and only if that leaves no doubt.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.doors.deepspeed_folder import DeepSpeedFiles, read_universal
from shardwise.checkpoint.doors.deepspeed_shards import Held, HeldOptimizer, groups_of, shape_tables, states_of
from shardwise.errors import CheckpointError

__all__ = ["read_universal_optimizer", "read_unsharded"]

_STEP = "step"
_MASTER, _STATES = "fp32", ("exp_avg", "exp_avg_sq")


def read_universal_optimizer(files: DeepSpeedFiles, *, verify: bool) -> HeldOptimizer:
    """Read the universal format.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    where, top = str(files.path), files.universal
    assert top is not None
    tables = shape_tables(files)
    inner = top.get("optimizer_state_dict")  # of stage 3, with the counters that other stages have in files
    counters = states_of(inner, where) if isinstance(inner, Mapping) else {}
    params: dict[str, Held] = {}
    for number, table in enumerate(tables):
        for name, shape in table.items():
            tensors = {
                state: _universal_tensor(files, name, state, shape, verify=verify) for state in (_MASTER, *_STATES)
            }
            master = tensors.pop(_MASTER)
            if master is None:
                raise CheckpointError(f"{where}: the file {_MASTER}.pt of {name} is missing")
            step = read_universal(files.path, name, f"{_STEP}.pt", verify=verify)
            step = counters.get(number, {}).get(_STEP) if step is None else step
            params[name] = Held(
                shape=shape,
                master=[master],
                states={state: [tensor] for state, tensor in tensors.items() if tensor is not None},
                scalars={} if step is None else {_STEP: step},
            )
    return HeldOptimizer(params=params, groups=groups_of(top, [tuple(table) for table in tables], where))


def _universal_tensor(
    files: DeepSpeedFiles, name: str, state: str, shape: tuple[int, ...], *, verify: bool
) -> Tensor | None:
    found = read_universal(files.path, name, f"{state}.pt", verify=verify)
    if found is None:
        return None
    found = found.get("param") if isinstance(found, Mapping) else found
    if not isinstance(found, Tensor) or found.numel() != math.prod(shape):
        raise CheckpointError(f"{files.path}: {state} of {name} has not the {math.prod(shape)} elements of its shape")
    return found.reshape(-1)


def read_unsharded(files: DeepSpeedFiles, weights: Mapping[str, Tensor]) -> HeldOptimizer:
    """Read what an optimizer without ZeRO keeps.

    Args:
        files: of the checkpoint.
        weights: parameters of the model's state dict, each under one name, in order.

    Raises:
        CheckpointError: it is malformed.
    """
    where, top = str(files.path), files.model[0].get("optimizer")
    if not isinstance(top, Mapping):
        return HeldOptimizer(params={}, groups=(), problem="there is none in the files")
    if "fp32_groups_flat" in top:
        return HeldOptimizer(params={}, groups=(), problem="its groups are vectors whose parameters are not named")
    inner = top.get("optimizer_state_dict", top)
    states = states_of(inner, where)
    masters = [tensor for group in top.get("fp32_groups") or () for tensor in group]
    names, problem = _names_by_shape(inner.get("param_groups") or (), states, masters, weights)
    if problem:
        return HeldOptimizer(params={}, groups=(), problem=problem)
    params = {}
    for number, name in enumerate(names):
        held = Held(shape=tuple(weights[name].shape), master=[masters[number].reshape(-1)] if masters else [])
        for key, value in states.get(number, {}).items():
            if isinstance(value, Tensor) and (value.dim() or (key != _STEP and not held.shape)):
                held.states[str(key)] = [value.reshape(-1)]
            else:
                held.scalars[str(key)] = value
        params[name] = held
    return HeldOptimizer(params=params, groups=groups_of(inner, [(name,) for name in names], where))


def _names_by_shape(
    groups: Sequence[Any],
    states: Mapping[int, Mapping[str, Any]],
    masters: Sequence[Any],
    weights: Mapping[str, Tensor],
) -> tuple[list[str], str]:
    """Return the names in the order of the numbers; or why they cannot be told."""
    shapes: dict[int, tuple[int, ...]] = {}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for number in group["params"] if isinstance(group, Mapping) else ():
            known = [value for value in states.get(number, {}).values() if isinstance(value, Tensor) and value.dim()]
            known = [masters[number]] if masters and number < len(masters) else known
            if not known or not isinstance(known[0], Tensor):
                return [], f"nothing tells the shape of its parameter {number}"
            shapes[number], group_of[number] = tuple(known[0].shape), index
    if sorted(shapes) != list(range(len(shapes))) or (masters and len(masters) != len(shapes)):
        return [], "its groups do not number their parameters"
    names: dict[int, str] = {}
    for shape, count in Counter(shapes.values()).items():
        numbers = [number for number in sorted(shapes) if shapes[number] == shape]
        fitting = [name for name, tensor in weights.items() if tuple(tensor.shape) == shape]
        if len(fitting) != count or (count > 1 and len({group_of[number] for number in numbers}) > 1):
            return [], f"it names nothing, and has {count} parameters of shape {shape}, the model {len(fitting)}"
        names |= dict(zip(numbers, fitting, strict=True))
    for number, master in enumerate(masters):
        weight = weights[names[number]]
        if not isinstance(master, Tensor) or not torch.equal(master.to(weight.dtype), weight):
            return [], f"it names nothing, and its parameter {number} is not {names[number]}, as the shapes say"
    return [names[number] for number in range(len(names))], ""
