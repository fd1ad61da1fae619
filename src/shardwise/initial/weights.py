"""Initial values from weights: a mapping, a safetensors file, or a folder of such files with an index.

Tensors are read one at a time. Nothing that a file says is run, and every file an index names lies in its folder.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.initial.delivery import Delivery, Job, named_tensors, replace_tensors
from shardwise.modules import NamedParam

__all__ = ["WeightSource", "Weights", "from_weights"]

WeightSource = Mapping[str, Tensor] | str | Path

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 5  # names in a message


def from_weights(source: WeightSource, *, rank0_only: bool = False, device: torch.device | str = "cpu") -> "Weights":
    """Take initial values from weights: ``shard(model, initial_values=from_weights("model.safetensors"))``.

    The model may be on the meta device or hold other values. Every parameter and every persistent buffer must be
    there, and nothing else; one name of a tied parameter is enough. Values are rounded to the model's dtypes, as
    ``load_state_dict`` does.

    Args:
        source: tensors by name as in ``state_dict()``; or the path of a safetensors file; or of a folder with
            ``model.safetensors`` or ``model.safetensors.index.json``.
        rank0_only: only rank 0 reads, and sends one tensor at a time to the other ranks; their ``source`` is ignored.
        device: where a model that is on the meta device will be.

    Raises:
        ConfigError: from ``shard``, the same on all ranks and before anything changes: a file cannot be read or does
            not hold what the index places there and nothing else, names are missing or unknown, shapes differ.
    """
    return Weights(source, rank0_only=rank0_only, device=torch.device(device))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor of a source."""

    shape: tuple[int, ...]
    floating: bool
    read: Callable[[], Tensor]


class Weights:
    """A source of initial values; made by ``from_weights``."""

    def __init__(self, source: WeightSource, *, rank0_only: bool, device: torch.device | None) -> None:
        if not isinstance(source, Mapping | str | Path):
            raise ConfigError(f"from_weights() takes a mapping or a path, got {type(source).__name__}")
        self._source = source
        self._rank0_only = rank0_only
        self._device = device

    @property
    def label(self) -> str:
        """What ranks compare."""
        return "weights of rank 0" if self._rank0_only else "weights of each rank"

    def device_of(self, tensor: Tensor, name: str) -> torch.device:
        """Return the device that a tensor of the model is on or meant for."""
        return self._device if tensor.is_meta and self._device is not None else tensor.device

    def begin(self, job: Job, *, rest: bool = False) -> Delivery:
        """Check names and shapes with all ranks, then deliver; ``rest``: somebody else delivers what is not saved."""
        wanted = _wanted(job)
        stack, entries, problem = ExitStack(), dict[str, _Entry](), ""
        reads = job.is_first or not self._rank0_only
        try:
            if reads:
                entries = _open(self._source, stack)
                problem = _problem(wanted, entries)
        except Exception as error:  # whatever a file or a user's mapping raises: the other ranks wait for a word
            shown = type(self._source).__name__ if isinstance(self._source, Mapping) else self._source
            problem = str(error) if isinstance(error, ConfigError) else f"from_weights({shown}): {error!r}"
        saved = {id(tensor) for _, tensor in named_tensors(job.model, persistent=True)}
        lost = [name for name, tensor in named_tensors(job.model) if tensor.is_meta and id(tensor) not in saved]
        if lost and not rest and not problem:
            problem = (
                f"from_weights(): {_listed(lost)} on the meta device are in no state dict: build the model in "
                "deferred_init() and pass recipe.with_weights(...)"
            )
        try:
            job.check(problem)
        except ConfigError:
            stack.close()
            raise
        return self._deliver(job, wanted, entries, stack, reads=reads)

    def _deliver(
        self, job: Job, wanted: "list[_Wanted]", entries: dict[str, _Entry], stack: ExitStack, *, reads: bool
    ) -> Delivery:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        with stack:
            for item in wanted:
                value = torch.empty(item.shape, dtype=item.dtype)
                if reads:
                    name = next(name for name in item.names if name in entries)
                    value = entries[name].read().to(item.dtype)
                if self._rank0_only:
                    value = job.send(value.reshape(-1), item.names[0]).view(item.shape)
                if item.param is not None:
                    yield item.param, value
                elif item.tensor.is_meta:
                    own = value.clone() if reads and not self._rank0_only else value
                    found[id(item.tensor)] = item.tensor, own.to(job.device)
                else:
                    item.tensor.data.copy_(value)
                del value
        replace_tensors(job.model, found)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A parameter (``param``) or a persistent buffer, as it was before the model was sharded."""

    names: tuple[str, ...]
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    param: NamedParam | None


def _wanted(job: Job) -> list[_Wanted]:
    params = {id(p.param): p for p in job.params}
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named_tensors(job.model, persistent=True):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [
        _Wanted(
            names=tuple(names[key]),
            tensor=tensor,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            param=params.get(key),
        )
        for key, tensor in tensors.items()
    ]


def _problem(wanted: list[_Wanted], entries: Mapping[str, _Entry]) -> str:
    """Say what does not fit; empty if everything does."""
    known = {name for item in wanted for name in item.names}
    there = [(item, [name for name in item.names if name in entries]) for item in wanted]
    missing = [item.names[0] for item, given in there if not given]
    unknown = sorted(set(entries) - known)
    shapes = [
        f"{name} {entries[name].shape} for {item.shape}"
        for item, given in there
        for name in given
        if entries[name].shape != item.shape
    ]
    kinds = [n for item, given in there for n in given if entries[n].floating is not item.dtype.is_floating_point]
    parts = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("not in the model", unknown),
            ("of another shape", shapes),
            ("whole numbers in one and floating point in the other", kinds),
        )
        if names
    ]
    if not parts:
        parts = _untied(there, entries)
    return f"from_weights(): the weights do not fit the model. {'; '.join(parts)}" if parts else ""


def _untied(there: list[tuple[_Wanted, list[str]]], entries: Mapping[str, _Entry]) -> list[str]:
    """Compare the values that a tied parameter has under its names."""
    unlike = []
    for _, given in there:
        for other in given[1:]:
            first, second = entries[given[0]].read(), entries[other].read()
            if first.data_ptr() != second.data_ptr() and not torch.equal(first, second):
                unlike.append(f"{given[0]} and {other}")
    return [f"tied in the model but of different values: {_listed(unlike)}"] if unlike else []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _open(source: WeightSource, stack: ExitStack) -> dict[str, _Entry]:
    if isinstance(source, Mapping):
        return {name: _held(name, tensor) for name, tensor in source.items()}
    path = Path(source)
    if not path.is_dir():
        return _of_file(path, stack)
    if (path / _FILE).is_file():
        return _of_file(path / _FILE, stack)
    if not (path / _INDEX).is_file():
        raise ConfigError(f"from_weights({path}): the folder has neither {_FILE} nor {_INDEX}")
    return _of_index(path, stack)


def _held(name: Any, tensor: Any) -> _Entry:
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.is_meta:
        raise ConfigError(
            f"from_weights(): the mapping holds a {type(tensor).__name__} under {name!r}, expected a tensor with values"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ConfigError(
            f"from_weights(): the mapping holds a {kind} tensor under {name!r}, expected a dense one: call "
            f"{'dequantize' if tensor.is_quantized else 'to_dense'}()"
        )
    return _Entry(shape=tuple(tensor.shape), floating=tensor.dtype.is_floating_point, read=lambda: tensor.detach())


def _of_file(path: Path, stack: ExitStack) -> dict[str, _Entry]:
    file = stack.enter_context(safetensors.safe_open(path, framework="pt", device="cpu"))

    def entry(name: str) -> _Entry:
        part = file.get_slice(name)
        kind = part.get_dtype()
        return _Entry(
            shape=tuple(part.get_shape()), floating=kind.startswith(("F", "BF")), read=lambda: file.get_tensor(name)
        )

    return {name: entry(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _of_index(folder: Path, stack: ExitStack) -> dict[str, _Entry]:
    index = json.loads((folder / _INDEX).read_text())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"from_weights({folder}): {_INDEX} has no weight_map from names to files")
    outside = [file for file in places.values() if Path(file).name != file]
    if outside:
        raise ConfigError(f"from_weights({folder}): {_INDEX} names {outside[0]!r}, which is not in the folder")
    entries: dict[str, _Entry] = {}
    for file in sorted(set(places.values())):
        found = _of_file(folder / file, stack)
        expected = {name for name, place in places.items() if place == file}
        if found.keys() != expected:  # a tensor in two files would have the values of either
            unlike = sorted(found.keys() ^ expected)
            raise ConfigError(f"from_weights({folder}): {_INDEX} and the files differ in {_listed(unlike)} of {file!r}")
        entries |= found
    return entries
