"""The folder of a run: refused if it holds one already; what is written there appears whole or not at all."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from shardwise.checkpoint.folder import remove_all, replace_file
from shardwise.checkpoint.tensorfile import each_once
from shardwise.errors import ConfigError

__all__ = [
    "CHECKPOINTS",
    "METRICS",
    "SETTINGS",
    "SUMMARY",
    "WEIGHTS",
    "keep_metrics",
    "prepare_output",
    "write_json",
    "write_weights",
]

METRICS, SETTINGS, SUMMARY, WEIGHTS = "metrics.jsonl", "settings.toml", "summary.json", "model.safetensors"
CHECKPOINTS = "checkpoints"
_RUN_FILES = (METRICS, SETTINGS, SUMMARY, WEIGHTS, "config.json", "generation_config.json", "tokenizer.json")
_RANK_FILES = ("rank-*.log", "timeline-rank-*.jsonl", "trace-rank-*.json")


def prepare_output(folder: Path, settings: str, *, overwrite: bool, resumes: bool = False) -> None:
    """Make the folder of a run and write its settings there.

    Args:
        folder: of the run.
        settings: effective settings, as TOML.
        overwrite: remove the files and checkpoints of the run that the folder holds; others stay.
        resumes: the run that the folder holds goes on.

    Raises:
        ConfigError: the folder holds a run and ``overwrite`` is false, or it cannot be made.
    """
    try:
        # Settings beside a log and nothing else: ranks failed at once. Without a log they are a user's own.
        marks = () if (folder / "rank-0.log").exists() else (SETTINGS,)
        names = (METRICS, *marks, SUMMARY, WEIGHTS, CHECKPOINTS)
        found = [] if resumes else [name for name in names if (folder / name).exists()]
        if found and not overwrite:
            raise ConfigError(
                f"train.output: {folder} holds a run already ({', '.join(found)}): pass --resume auto to go on with "
                "it, --overwrite to replace it, or take another folder: --set train.output=FOLDER"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if found:
            remove_all(folder / CHECKPOINTS)
            of_ranks = [path for pattern in _RANK_FILES for path in folder.glob(pattern)]
            for path in [*(folder / name for name in _RUN_FILES), *of_ranks]:
                path.unlink(missing_ok=True)
        replace_file(folder / SETTINGS, lambda path: path.write_text(settings, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"train.output: {folder}: {error.strerror}") from None


def keep_metrics(path: Path, steps: int) -> None:
    """Cut the metrics of a run back to its first updates: what came after them is done again."""
    if path.exists():
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                break  # written by halves
            if step <= steps:
                kept.append(line + "\n")
        replace_file(path, lambda temporary: temporary.write_text("".join(kept), encoding="utf-8"))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_weights(folder: Path, state: Mapping[str, Tensor], tokenizer: str) -> Path:
    """Write a state dict as safetensors, and the tokenizer's file beside it; return the file of the weights.

    Args:
        folder: where.
        state: whole tensors by name.
        tokenizer: "bytes", or the path of a tokenizer.json or of its folder.
    """
    tensors, path = each_once(state), folder / WEIGHTS
    replace_file(path, lambda temporary: safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"}))
    if tokenizer != "bytes":
        source = Path(tokenizer).expanduser()
        source = source / "tokenizer.json" if source.is_dir() else source
        replace_file(folder / "tokenizer.json", lambda temporary: shutil.copyfile(source, temporary))
    return path
