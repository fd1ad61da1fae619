"""The directory of a DeepSpeed checkpoint: which files there must be, and what each is for.

Names come from the directory and are matched whole; nothing outside it is opened. Read ``deepspeed_shards.py`` next.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.doors.deepspeed_files import read_file
from shardwise.checkpoint.doors.incoming import shown
from shardwise.checkpoint.names import LATEST, check_tag, is_tag, read_small
from shardwise.errors import CheckpointError

__all__ = ["DeepSpeedFiles", "find_tag", "mapping_in", "read_folder", "read_universal"]

_LATEST_UNIVERSAL = "latest_universal"
_LATEST_BYTES = 256
_MAX_RANKS = 100_000
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_00_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
_STATES = re.compile(r".*_states\.pt|layer_.*\.pt|expp?_rank_.*\.pt")
_UNIVERSAL, _UNIVERSAL_STATE = "zero", "optimizer_state.pt"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """What the files hold.

    Attributes:
        path: the checkpoint's directory.
        model: states of the model by rank; one for stages that keep all parameters on each rank.
        optim: states of the optimizer by rank; empty without ZeRO and in the universal format.
        universal: in the universal format, what its optimizer holds beside tensors; None in other formats.
    """

    path: Path
    model: Sequence[Mapping[str, Any]]
    optim: Sequence[Mapping[str, Any]]
    universal: Mapping[str, Any] | None

    @property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration of the run, as far as it is told."""
        found = self.model[0].get("ds_config")
        return found if isinstance(found, Mapping) else {}


def find_tag(source: Path, tag: str | None) -> tuple[Path, str]:
    """Return the directory of a checkpoint and its name.

    Args:
        source: a folder of checkpoints, or the directory of one.
        tag: which one; None: what ``latest`` names.

    Raises:
        CheckpointError: there is none, or ``latest`` leads elsewhere.
        ConfigError: the tag is no name.
    """
    source = Path(os.path.realpath(source.expanduser()))
    if tag is None:
        if source.is_dir() and any(_STATES.fullmatch(name) for name in os.listdir(source)) and is_tag(source.name):
            return source, source.name
        names = [name for name in (LATEST, _LATEST_UNIVERSAL) if os.path.lexists(source / name)]
        if not names:
            raise CheckpointError(
                f"{source}: has no file `{LATEST}` and no files of a DeepSpeed checkpoint; pass a tag"
            )
        tag = read_small(source, names[0], _LATEST_BYTES).decode(errors="replace").strip("\n\r ")
        if not is_tag(tag):
            raise CheckpointError(f"{source / names[0]}: {tag!r} is no name of a checkpoint")
    path = source / check_tag(tag)
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path}: is no directory of its own")
    return path, tag


def read_folder(path: Path, *, verify: bool) -> DeepSpeedFiles:
    """Read the files of a checkpoint; tensors are mapped.

    Raises:
        CheckpointError: one is missing, damaged or malformed, or the checkpoint is of a kind that is not read.
    """
    names = sorted(os.listdir(path))
    alien = [n for n in names if _STATES.fullmatch(n) and not (_MODEL.fullmatch(n) or _OPTIM.fullmatch(n))]
    if alien:
        raise CheckpointError(
            f"{path}: {shown(alien)}: tensor, pipeline and expert parallel checkpoints are not read; DeepSpeed's "
        )
    model = _by_rank(path, _MODEL, names)
    optim = _by_rank(path, _OPTIM, names)
    if not model:
        raise CheckpointError(f"{path}: has no file *_model_states.pt: it is no DeepSpeed checkpoint, or lost them")
    universal = None
    if not optim and (path / _UNIVERSAL).is_dir():
        universal = mapping_in(read_universal(path, _UNIVERSAL_STATE, verify=verify), f"{path}: {_UNIVERSAL_STATE}")
    first = _read(path, model[0], verify)
    rest = [_read(path, name, verify) for name in model[1:]] if _is_partitioned(first) else []
    if not optim and universal is None and first.get("param_shapes") is not None:
        raise CheckpointError(f"{path}: has no file *_optim_states.pt, but its parameters are in such files")
    inner = [mapping_in(_read(path, n, verify).get("optimizer_state_dict"), f"{path / n}") for n in optim]
    files = DeepSpeedFiles(path=path, model=[first, *rest], optim=inner, universal=universal)
    _check_counts(files, optim)
    return files


def read_universal(path: Path, *parts: str, verify: bool) -> Any:
    """Return what a file below ``zero`` holds; None if there is none.

    Raises:
        CheckpointError: a name leads elsewhere, or the file is malformed.
    """
    folder = path / _UNIVERSAL
    for part in parts[:-1]:
        if part != os.path.basename(part) or part in ("", ".", "..") or "\0" in part or "\\" in part:
            raise CheckpointError(f"{path}: {part[:200]!r} is no name of a directory in it")
        folder /= part
    for place in (path / _UNIVERSAL, folder):
        if place.is_symlink():
            raise CheckpointError(f"{place}: is a link")
    return read_file(folder, parts[-1], verify=verify) if os.path.lexists(folder / parts[-1]) else None


def mapping_in(value: Any, where: str) -> Mapping[str, Any]:
    """Return a value that must be a table of names.

    Raises:
        CheckpointError: it is not.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{where}: has no table by name where a DeepSpeed checkpoint has one")
    return value


def _by_rank(path: Path, pattern: re.Pattern[str], names: Sequence[str]) -> list[str]:
    """Return the names of files in the order of their ranks, which must be 0, 1, ..."""
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            rank = int(match[1] or 0)
            if rank in found:
                raise CheckpointError(f"{path}: {found[rank]} and {name} are both of rank {rank}: of two checkpoints")
            found[rank] = name
    missing = [str(rank) for rank in range(min(_MAX_RANKS, max(found, default=-1) + 1)) if rank not in found]
    if missing:
        kind = "model" if pattern is _MODEL else "optimizer"
        raise CheckpointError(f"{path}: the files of {kind} states of rank {shown(missing)} are missing")
    return [found[rank] for rank in sorted(found)]


def _read(path: Path, name: str, verify: bool) -> Mapping[str, Any]:
    return mapping_in(read_file(path, name, verify=verify), str(path / name))


def _is_partitioned(model: Mapping[str, Any]) -> bool:
    """Whether each rank holds a part of frozen parameters too, as at stage 3."""
    fragments, shapes = model.get("frozen_param_fragments"), model.get("frozen_param_shapes")
    if not isinstance(fragments, Mapping) or not isinstance(shapes, Mapping):
        return False
    return any(tuple(getattr(part, "shape", ())) != tuple(shapes.get(name, ())) for name, part in fragments.items())


def _check_counts(files: DeepSpeedFiles, optim: Sequence[str]) -> None:
    """Check that the files are of as many ranks as they say."""
    num_files = len(optim)
    for name, state in zip(optim, files.optim, strict=True):
        count = state.get("partition_count")
        found = set(count) if isinstance(count, list | tuple) else {count}
        found |= {
            entry.get("partition_count", num_files)
            for entry in state.get("ds_zero_partition_groups") or ()
            if isinstance(entry, Mapping)
        }
        if found != {num_files}:
            raise CheckpointError(
                f"{files.path / name}: is one of {shown(sorted(map(str, found)))} partitions, there are files of "
                f"{num_files} ranks: some are missing, are of another checkpoint, or hold experts"
            )
    levels = {str(state.get("zero_stage", 1)) for state in files.optim}
    if len(levels) > 1:
        raise CheckpointError(f"{files.path}: its files are of unlike stages: {sorted(levels)}")
