"""The flat shards of DeepSpeed's ranks as whole tensors by parameter name. Pure arithmetic over what files hold.

Stages 1 and 2 cut each flat group once per rank and note which fragments of parameters a rank has. Stage 3 cuts each
parameter, and pads it to a multiple of the number of ranks; a group there is a part of a group of the optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.doors.deepspeed_reader import DeepSpeedFiles
from shardwise.checkpoint.doors.incoming import check_dense, shown
from shardwise.checkpoint.doors.scratch import scratch_tensor
from shardwise.errors import CheckpointError

__all__ = ["Shards", "read_shards"]

_MAX_DIMS = 32


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What the ranks hold together.

    Attributes:
        trained: parameters that trained, as the optimizer keeps them, by name.
        frozen: the others.
        states: element-wise state of the optimizer, by parameter and name.
        scalars: state that is one value, by parameter and name.
        groups: of the optimizer: names of parameters, and options.
        loss_scaler: as it was saved, None without one.
        whole_module: whether the state of the module has its values; at stage 3 it has names only.
    """

    trained: dict[str, Tensor]
    frozen: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    scalars: dict[str, dict[str, Any]]
    groups: list[tuple[tuple[str, ...], dict[str, Any]]]
    loss_scaler: Any
    whole_module: bool


@dataclass(frozen=True, kw_only=True)
class _Fragment:
    """Consecutive elements of a parameter, in a flat tensor of one rank: elements ``[start, start + numel)`` of it."""

    name: str
    start: int
    numel: int
    param_start: int


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank: per flat group its parameters, its fragments and its states."""

    masters: Sequence[Tensor]
    fragments: list[list[_Fragment]]
    states: list[Mapping[str, Any]]


@dataclass
class _Whole:
    """Tensors in the making."""

    where: str
    staging: Path
    shapes: Mapping[str, tuple[int, ...]]
    trained: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, rank: _Rank) -> None:
        """Copy what one rank has to its place."""
        for master, fragments, states in zip(rank.masters, rank.fragments, rank.states, strict=True):
            whole = {key: value for key, value in states.items() if isinstance(value, Tensor) and value.dim()}
            for fragment in fragments:
                self._copy(self.trained, fragment.name, fragment, master)
                for key, value in whole.items():
                    self._copy(self.states.setdefault(fragment.name, {}), key, fragment, value)
                for key, value in states.items():
                    if key not in whole:
                        self.scalars.setdefault(fragment.name, {}).setdefault(key, value)

    def _copy(self, into: dict[str, Tensor], key: str, fragment: _Fragment, flat: Tensor) -> None:
        check_dense(flat, f"{self.where}: {key}")
        if flat.dim() != 1 or flat.numel() < fragment.start + fragment.numel:
            raise CheckpointError(
                f"{self.where}: {key} of shape {tuple(flat.shape)} has no elements {fragment.start} to "
                f"{fragment.start + fragment.numel}, where {fragment.name} has some"
            )
        if key not in into:
            into[key] = scratch_tensor(self.staging, self.shapes[fragment.name], flat.dtype)
        elif into[key].dtype != flat.dtype:
            raise CheckpointError(f"{self.where}: {key} of {fragment.name} is of two dtypes")
        target = into[key].view(-1)[fragment.param_start : fragment.param_start + fragment.numel]
        target.copy_(flat[fragment.start : fragment.start + fragment.numel])


def read_shards(
    files: DeepSpeedFiles, models: Sequence[Mapping[str, Any]], optims: Sequence[Mapping[str, Any]], staging: Path
) -> Shards:
    """Join the shards of all ranks.

    Args:
        files: where they come from.
        models: states of the module, of each file.
        optims: states of the optimizer, of each rank.
        staging: directory on whose disk large tensors wait.

    Raises:
        CheckpointError: they do not fit each other, or are of a kind that is not read.
    """
    where = str(files.path)
    if not optims or not models[0].get("param_shapes"):
        raise CheckpointError(
            f"{where}: was saved without ZeRO, or without its optimizer: its parameters have no names there. Take the "
            "weights alone, with --from torch from its file *model_states.pt"
        )
    states = [optim["optimizer_state_dict"] for optim in optims]
    num_ranks = len(states)
    counts = {count for s in states for count in _listed(s.get("partition_count", num_ranks))}
    if counts != {num_ranks}:
        raise CheckpointError(
            f"{where}: was cut into {sorted(counts)} partitions, there are files of {num_ranks} ranks"
        )
    by_param = "fp32_flat_groups" in states[0]  # of stage 3
    if len(models) != (num_ranks if by_param else 1) or any(("fp32_flat_groups" in s) != by_param for s in states):
        raise CheckpointError(
            f"{where}: its {len(models)} files of the model and {num_ranks} of the optimizer are not of one stage"
        )
    tables = [{str(name): _shape(shape, where) for name, shape in table.items()} for table in models[0]["param_shapes"]]
    shapes = {name: shape for table in tables for name, shape in table.items()}
    if sum(map(len, tables)) != len(shapes):
        raise CheckpointError(f"{where}: a parameter is in two groups")
    whole = _Whole(where, staging, shapes)
    inner = [s["optimizer_state_dict" if by_param else "base_optimizer_state"] for s in states]
    if not all(isinstance(each, dict) and {"state", "param_groups"} <= set(each) for each in inner):
        raise CheckpointError(f"{where}: its optimizer was saved in the elastic form, which is not read")
    ranks = (_cut_by_param if by_param else _cut_by_group)(states, inner, tables, where)
    _check_cover(ranks, shapes, where)
    for rank in ranks:
        whole.add(rank)
    for name, shape in shapes.items():
        if math.prod(shape) == 0:
            whole.trained.setdefault(name, torch.empty(shape))
    return Shards(
        trained={name: whole.trained[name] for name in shapes},
        frozen=_frozen(models if by_param else models[:1], staging, where),
        states=whole.states,
        scalars=whole.scalars,
        groups=_groups(inner[0]["param_groups"], tables, where),
        loss_scaler=states[0].get("loss_scaler"),
        whole_module=not by_param,
    )


def _cut_by_group(
    states: Sequence[Mapping[str, Any]],
    inner: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, tuple[int, ...]]],
    where: str,
) -> list[_Rank]:
    if any("param_slice_mappings" not in s for s in states):
        raise CheckpointError(f"{where}: does not tell where its parameters lie: it is of DeepSpeed before 0.7")
    position: dict[str, int] = {}
    ranks = []
    for s, own in zip(states, inner, strict=True):
        fragments: list[list[_Fragment]] = []
        for table, places in zip(tables, s["param_slice_mappings"], strict=True):
            fragments.append([])
            for name, place in places.items():
                if name not in table:
                    raise CheckpointError(f"{where}: {name} is no parameter of its group")
                first = position.get(name, 0)
                fragments[-1].append(
                    _Fragment(name=name, start=int(place.start), numel=int(place.numel), param_start=first)
                )
                position[name] = first + int(place.numel)
        ranks.append(
            _Rank(
                masters=s["single_partition_of_fp32_groups"],
                fragments=fragments,
                states=_states_of_groups(own, len(tables)),
            )
        )
    return ranks


def _cut_by_param(
    states: Sequence[Mapping[str, Any]],
    inner: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, tuple[int, ...]]],
    where: str,
) -> list[_Rank]:
    del where
    ranks = []
    for rank, (s, own) in enumerate(zip(states, inner, strict=True)):
        fragments: list[list[_Fragment]] = []
        for table in tables:
            start = 0
            fragments.append([])
            for name, shape in table.items():
                numel = math.prod(shape)
                share = -(-numel // len(states))
                first = min(numel, rank * share)
                fragments[-1].append(
                    _Fragment(name=name, start=start, numel=min(numel, first + share) - first, param_start=first)
                )
                start += share
        ranks.append(
            _Rank(masters=s["fp32_flat_groups"], fragments=fragments, states=_states_of_groups(own, len(tables)))
        )
    return ranks


def _states_of_groups(inner: Mapping[str, Any], num_flat: int) -> list[Mapping[str, Any]]:
    """Return the state of each flat group; DeepSpeed numbers them in the order of the optimizer's groups."""
    numbers = [number for group in inner["param_groups"] for number in group["params"]]
    if len(numbers) != num_flat:
        raise CheckpointError(f"the optimizer has {len(numbers)} flat parameters, the model {num_flat} flat groups")
    return [inner["state"].get(number, {}) for number in numbers]


def _groups(
    saved: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]], where: str
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    groups, position = [], 0
    for group in saved:
        count = len(group["params"])
        names = tuple(name for table in tables[position : position + count] for name in table)
        position += count
        groups.append((names, {str(key): value for key, value in group.items() if key != "params"}))
    if not groups:
        raise CheckpointError(f"{where}: the optimizer has no groups")
    return groups


def _check_cover(ranks: Sequence[_Rank], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Check that the fragments lie within what there is, one after the other, and cover each parameter once."""
    covered = dict.fromkeys(shapes, 0)
    for rank in ranks:
        for master, fragments in zip(rank.masters, rank.fragments, strict=True):
            end = 0
            for fragment in fragments:
                if fragment.numel < 0 or fragment.start < end:
                    raise CheckpointError(f"{where}: the fragments of {fragment.name} overlap others")
                end = fragment.start + fragment.numel
                covered[fragment.name] += fragment.numel
            check_dense(master, f"{where}: a flat group")
            if end > master.numel():
                raise CheckpointError(f"{where}: a flat group has {master.numel()} elements, {end} are named")
    short = [name for name, shape in shapes.items() if covered[name] != math.prod(shape)]
    if short:
        raise CheckpointError(f"{where}: the shards do not cover {shown(short)}: elements are missing or twice there")


def _frozen(models: Sequence[Mapping[str, Any]], staging: Path, where: str) -> dict[str, Tensor]:
    frozen = {}
    for name, given in dict(models[0].get("frozen_param_shapes") or {}).items():
        shape = _shape(given, where)
        parts = [model["frozen_param_fragments"][name] for model in models]
        for part in parts:
            check_dense(part, f"{where}: {name}")
        if sum(part.numel() for part in parts) < math.prod(shape) or len({part.dtype for part in parts}) > 1:
            raise CheckpointError(f"{where}: the shards of {name} have fewer elements than its shape {shape}")
        out = scratch_tensor(staging, shape, parts[0].dtype)
        flat, start = out.view(-1), 0
        for part in parts:
            count = min(part.numel(), flat.numel() - start)
            flat[start : start + count] = part.reshape(-1)[:count]
            start += count
        frozen[str(name)] = out
    return frozen


def _shape(given: Any, where: str) -> tuple[int, ...]:
    shape = tuple(given)
    if len(shape) > _MAX_DIMS or not all(type(length) is int and 0 <= length < 1 << 62 for length in shape):
        raise CheckpointError(f"{where}: {str(given)[:200]} is no shape")
    return shape


def _listed(count: Any) -> list[Any]:
    return list(count) if isinstance(count, list | tuple) else [count]
