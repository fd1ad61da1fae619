"""The settings of a run: what nobody wrote gets a value that trains, and every value tells where it comes from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwise.config.model import DataConfig, TrainConfig
from shardwise.config.resolve import Resolved, Written, resolve
from shardwise.configure import Source, read_config
from shardwise.errors import ConfigError
from shardwise.models.sizes import SIZES
from shardwise.train.text import is_packed

__all__ = ["ORIGIN", "engine_settings", "load_settings", "settings_as_toml"]

ORIGIN = "shardwise train"
LINE_EVERY_STEPS = 10
WITH_LENGTH = ("warmup_cosine", "warmup_decay")
FINE_TUNING_LR = 5e-5


def load_settings(source: Source, *, overrides: Sequence[str] = (), num_ranks: int, device: str = "cpu") -> Resolved:
    """Read settings as ``load_config`` does, and fill in what a run needs and nobody wrote.

    That is AdamW with a warm-up and a cosine, a micro-batch that suits the model, clipping at 1 (in native settings),
    a line every 10 updates, and the reduction of losses that suits the text. An optimizer that is named stays as it
    is, and then a scheduler that is not named stays away. A native schedule without a length has that of the run.

    Raises:
        ConfigError: as ``load_config``.
    """
    written = read_config(source, overrides=overrides, device=device)
    filled = _Filled(written)
    size = SIZES.get(str(_section(written.tree, "model").get("name", "gpt-mini")))
    _fill_optimizer(filled, FINE_TUNING_LR if size is None else size.lr)
    batch = _section(written.tree, "batch")
    if not written.needs_batch and not {"size", "micro"} & set(batch):
        filled.put("batch", "micro", 1 if size is None else size.micro)
    if written.dialect == "native":
        filled.put("", "clip_grad_norm", 1.0)
    filled.put("", "log_every", LINE_EVERY_STEPS)
    if _has_documents(written.tree):
        filled.put("", "loss_reduction", "sum")
    return resolve(replace(written, tree=filled.tree, origins=filled.origins), num_ranks)


def engine_settings(resolved: Resolved) -> dict[str, Any]:
    """Return what ``initialize`` is given: what was written or filled in, without the lines that the run prints."""
    values = resolved.config.model_dump(exclude_unset=True)
    return {key: value for key, value in values.items() if key not in ("log_every", "model", "data", "train")}


def settings_as_toml(resolved: Resolved) -> str:
    """Return the effective settings as TOML, each with its origin; a run of this file repeats the run."""
    lines, sections = [], []
    for name, value in resolved.config:
        if isinstance(value, BaseModel):
            body = [
                _line(f"{name}.{key}", key, inner, resolved) for key, inner in value if _counts(name, key, resolved)
            ]
            sections += ["", f"[{name}]", *body] if body else []
        elif value is None and name in ("optimizer", "scheduler"):
            lines.append(f"# {name}: none  # {resolved.origins.get(name, 'default')}")
        else:
            lines.append(_line(name, name, 0.0 if name == "clip_grad_norm" and value is None else value, resolved))
    return "\n".join([*lines, *sections]) + "\n"


class _Filled:
    """A copy of written settings that takes values for keys which are absent."""

    def __init__(self, written: Written) -> None:
        self.tree = {name: dict(value) if isinstance(value, Mapping) else value for name, value in written.tree.items()}
        self.origins = dict(written.origins)
        self.dialect = written.dialect
        self._doubtful = {key.partition(".")[0] for key in written.doubtful}

    def put(self, section: str, key: str, value: Any) -> None:
        """Set a key of a section ("" is the top) unless it is there, or its section is wrong anyway."""
        if (section or key) in self._doubtful:
            return
        target = self.tree.setdefault(section, {}) if section else self.tree
        if isinstance(target, dict) and key not in target:
            target[key] = value
            self.origins[f"{section}.{key}" if section else key] = ORIGIN


def _fill_optimizer(filled: _Filled, lr: float) -> None:
    """Fill in AdamW and a schedule, or what a schedule that is named lacks: its length is that of the run."""
    optimizer, scheduler = (_section(filled.tree, name) for name in ("optimizer", "scheduler"))
    if "name" not in optimizer:
        options = {"name": "adamw", "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}
        for key, value in options.items():
            filled.put("optimizer", key, value)
        if "name" not in scheduler:
            options = {"name": "warmup_cosine", "min_ratio": 0.1, "end_ratio": 0.05, "shape": "linear"}
            for key, value in options.items():
                filled.put("scheduler", key, value)
    steps = _section(filled.tree, "train").get("steps", TrainConfig().steps)
    is_native = filled.dialect == "native" or "name" not in scheduler
    if _section(filled.tree, "scheduler").get("name") in WITH_LENGTH and is_native and type(steps) is int and steps > 0:
        filled.put("scheduler", "total_steps", steps)
        filled.put("scheduler", "num_warmup_steps", max(1, steps // 20))


def _has_documents(tree: Mapping[str, Any]) -> bool:
    """Whether sequences will be of unlike lengths; False where the settings are wrong, which is told later."""
    try:
        return not is_packed(DataConfig.model_validate(_section(tree, "data")))
    except (ConfigError, ValidationError):
        return False


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _counts(section: str, key: str, resolved: Resolved) -> bool:
    """Whether a setting means something beside the others; what does not would be refused if it were read again."""
    if section != "loss_scale":
        return True
    return resolved.config.precision.param == "fp16" and (key == "fixed") == (
        resolved.config.loss_scale.fixed is not None
    )


def _line(dotted: str, key: str, value: Any, resolved: Resolved) -> str:
    origin = resolved.origins.get(dotted, "default")
    if value is None:
        return f"# {key}: none  # {origin}"
    return f"{key} = {json.dumps(value)}  # {origin}"  # TOML writes these values as JSON does
