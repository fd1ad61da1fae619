"""Files of a DeepSpeed checkpoint, found and read without DeepSpeed. Nothing in them is run.

torch's restricted unpickler reads them; four classes of DeepSpeed have inert stand-ins, made for one reading.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.doors.incoming import shown
from shardwise.checkpoint.doors.torchfile import check_zip
from shardwise.checkpoint.names import LATEST, open_inside, read_small
from shardwise.errors import CheckpointError

__all__ = ["DeepSpeedFiles", "find_files", "read_states"]

_MAX_LATEST_BYTES = 4096
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<tp>\d+)_(?P<kind>model|optim)_states\.pt"
)
_OTHER = re.compile(r"(?:layer_\d+|expp?_rank_\d+|.*expert_\d+)[-_].*\.pt")
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:class|function) (\S+)|Unsupported (?:class|operand) (\S+)")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """The files of one checkpoint.

    Attributes:
        path: its directory.
        model: names of files with the state of the module: one up to stage 2, one per rank at stage 3.
        optim: names of files with the state of the optimizer, by rank.
    """

    path: Path
    model: tuple[str, ...]
    optim: tuple[str, ...]


def find_files(source: Path, tag: str | None) -> DeepSpeedFiles:
    """Find the files of a checkpoint: of ``source`` itself, or of the directory in it that ``tag`` or ``latest`` names.

    Raises:
        CheckpointError: a file is missing, a name leads outside, or the checkpoint is of a kind that is not read.
    """
    path = _directory(source, tag)
    found: dict[tuple[str, int | None], str] = {}
    for file in sorted(path.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match is None:
            if _OTHER.fullmatch(file.name):
                raise CheckpointError(f"{file}: checkpoints of experts and pipelines of DeepSpeed are not read")
            continue
        if int(match["tp"]):
            raise CheckpointError(f"{file}: checkpoints of DeepSpeed with tensor parallelism are not read")
        key = match["kind"], None if match["rank"] is None else int(match["rank"])
        if key in found:
            raise CheckpointError(f"{path}: has {found[key]} and {file.name}: which one counts?")
        found[key] = file.name
    if (path / "zero").is_dir():
        raise CheckpointError(f"{path}: is a universal checkpoint of DeepSpeed: read the one that it was made of")
    model = _series(path, "model", {rank: name for (kind, rank), name in found.items() if kind == "model"})
    optim = _series(path, "optim", {rank: name for (kind, rank), name in found.items() if kind == "optim"})
    if not model:
        raise CheckpointError(f"{path}: has no file *model_states.pt: it is no checkpoint of DeepSpeed")
    return DeepSpeedFiles(path=path, model=model, optim=optim)


def read_states(path: Path, name: str) -> dict[str, Any]:
    """Return what a file holds; its tensors are mapped, not read.

    Raises:
        CheckpointError: it is missing, damaged, or asks for something beyond tensors, plain values and the stand-ins.
    """
    file = path / name
    with open(open_inside(path, name), "rb") as stream:
        check_zip(stream, str(file), file.stat().st_size, verify=True)
    try:
        with torch.serialization.safe_globals(list(_stand_ins())):
            loaded = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # whatever a malformed file makes the unpickler do
        text = str(error)
        refused = _REFUSED.search(text.partition("WeightsUnpickler error")[2])
        named = next((group for group in refused.groups() if group), "") if refused else ""
        raise CheckpointError(
            f"{file}: asks for {named}, which no checkpoint of ZeRO needs; nothing was run"
            if named
            else f"{file}: cannot be read: {type(error).__name__}: {text.strip().partition(chr(10))[0][:300]}"
        ) from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file}: holds a {type(loaded).__name__}, no states of DeepSpeed")
    return loaded


def _stand_ins() -> list[tuple[type, str]]:
    names: Mapping[str, tuple[type, ...]] = {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": (),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": (),
        "deepspeed.runtime.zero.config.ZeroStageEnum": (int,),
        "deepspeed.utils.tensor_fragment.fragment_address": (),
    }
    return [(type(name.rpartition(".")[2], bases, {}), name) for name, bases in names.items()]


def _directory(source: Path, tag: str | None) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"{source}: there is no such directory")
    if tag is None:
        if any(source.glob("*_states.pt")):
            return source
        raw = read_small(source, LATEST, _MAX_LATEST_BYTES)
        try:
            tag = raw.decode().strip()
        except UnicodeDecodeError:
            raise CheckpointError(f"{source / LATEST}: is no text") from None
    path = source / tag
    if not tag or Path(tag).name != tag or tag in (".", "..") or "\0" in tag or "\\" in tag:
        raise CheckpointError(f"{source}: {tag[:200]!r} is no name of a checkpoint in this folder")
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path}: is no directory of its own")
    return path


def _series(path: Path, kind: str, found: Mapping[int | None, str]) -> tuple[str, ...]:
    """Return files in the order of their ranks; either one without a rank, or all from 0 on."""
    ranks = sorted(rank for rank in found if rank is not None)
    if None in found:
        return (found[None],) if not ranks else _mixed(path, kind)
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))[:9] if ranks else []
    if missing:
        raise CheckpointError(f"{path}: {kind} states of {shown([f'rank {rank}' for rank in missing])} are missing")
    return tuple(found[rank] for rank in ranks)


def _mixed(path: Path, kind: str) -> tuple[str, ...]:
    raise CheckpointError(f"{path}: holds {kind} states of one rank and of all")
