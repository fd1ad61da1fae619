"""What a run remembers across interruptions: sums for its summary, and its place in the text."""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint.calls import load_checkpoint
from shardwise.checkpoint.folder import find_checkpoints, folder_of_run, newest_whole, read_latest, read_manifest
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.names import LATEST
from shardwise.checkpoint.plain import from_plain
from shardwise.engine import Engine
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.closed_form import ClosedForm
from shardwise.start import OPTIMIZERS
from shardwise.train.output import CHECKPOINTS

__all__ = ["Continued", "Progress", "find_resume", "resume_run", "save_run"]

_NEED_STATE = ("amsgrad", "initial_accumulator_value")  # options that are of no use without state from the start


@dataclass(kw_only=True)
class Progress:
    """Sums over the updates so far.

    Attributes:
        step: updates.
        samples: sequences used for training, over all ranks.
        tokens: targets, over all ranks.
        seconds: of training and evaluation on rank 0.
        first_loss: of the first update.
        last_loss: of the last update.
        first_held_out_loss: before the first update.
        held_out_loss: the last one.
        sample: the last one.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    first_held_out_loss: float | None = None
    held_out_loss: float | None = None
    sample: str = ""


def find_resume(wanted: str, output: Path) -> Path | None:
    """Return the checkpoint that a run shall go on from.

    Args:
        wanted: "none"; "auto": the latest of the run in ``output`` if there is one; "last": the latest; or the path of
            a checkpoint, or of a folder of checkpoints.
        output: folder of the run.

    Raises:
        ConfigError: there is none although one is wanted.
        CheckpointError: the path holds something else, or `latest` names what cannot be loaded.
    """
    if wanted == "none":
        return None
    folder = output / CHECKPOINTS if wanted in ("auto", "last") else Path(wanted).expanduser().resolve()
    if wanted not in ("auto", "last"):
        if not folder.is_dir():
            raise ConfigError(f"--resume {wanted}: there is no such folder")
        folder = folder_of_run(folder)
    if not (folder / LATEST).exists() and not find_checkpoints(folder):
        if wanted == "auto":
            return None
        if wanted == "last":
            raise ConfigError(f"--resume last: {output} has no checkpoint; --resume auto begins anew then")
        read_manifest(folder)  # says what it is, if it is none
        return folder
    tag = read_latest(folder) if (folder / LATEST).exists() else None
    if tag is None:
        found = newest_whole(folder)
        if found is None:
            raise CheckpointError(f"{folder}: no checkpoint is whole: see `shardwise checkpoint ls {folder}`")
        return found.path
    try:
        read_manifest(folder / tag)
    except CheckpointError as error:
        whole = [each.tag for each in find_checkpoints(folder) if not each.problem]
        there = f"whole: {', '.join(whole)}: pass --resume {folder / whole[-1]}" if whole else "none is whole"
        raise CheckpointError(f"{folder}: latest names {tag!r}, which cannot be loaded: {error}; {there}") from None
    return folder / tag


def save_run(engine: Engine, output: Path, progress: Progress, *, keep_last: int, background: bool) -> None:
    """Save everything that the run needs to go on. Collective."""
    engine.save_checkpoint(
        output / CHECKPOINTS,
        tag=f"step-{progress.step}",
        client_state=asdict(progress),
        keep_last=keep_last,
        background=background,
    )


@dataclass(frozen=True, kw_only=True)
class Continued:
    """A run that goes on: how far it was, the ranks that saved it, and settings that are others now."""

    progress: Progress
    num_ranks: int
    changed: tuple[str, ...] = ()


def resume_run(engine: Engine, path: Path, *, weights_only: bool) -> Continued:
    """Load a checkpoint into the engine; options of optimizer and schedule are those of the settings. Collective.

    Raises:
        CheckpointError: it does not fit; nothing was loaded.
        ConfigError: a setting cannot be another than the checkpoint's; nothing was loaded.
    """
    if weights_only:
        load_checkpoint(engine.module, path.parent, tag=path.name, weights_only=True)
        return Continued(progress=Progress(), num_ranks=read_manifest(path).num_ranks)
    wanted = _wanted_options(engine)
    changed: list[str] = []
    with contextlib.suppress(CheckpointError):  # loading tells it, on all ranks
        changed = _changes(engine, read_manifest(path), wanted)
    _, state = engine.load_checkpoint(path.parent, tag=path.name)
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group.update(wanted)
    if isinstance(engine.lr_scheduler, ClosedForm):
        engine.lr_scheduler.set_rates()
    manifest = read_manifest(path)
    old = [group.options.get("lr") for each in manifest.values.optimizers[:1] for group in each.groups[:1]]
    new = engine.optimizer.param_groups[0]["lr"]
    if engine.lr_scheduler is not None and old and old[0] != new:
        changed.append(f"rate of the next update {old[0]} -> {new}")
    return Continued(
        progress=_progress(state, engine.global_steps), num_ranks=manifest.num_ranks, changed=tuple(changed)
    )


def _wanted_options(engine: Engine) -> dict[str, Any]:
    """Return the options of the optimizer that the settings ask for, without those that the schedule moves."""
    config = engine.settings.config.optimizer
    assert config is not None  # load_settings fills it in
    assert engine.optimizer is not None
    group, scheduler = engine.optimizer.param_groups[0], engine.lr_scheduler
    wanted = {key: group[key] for key in config.model_dump(exclude={"name"}) if key in group}
    if scheduler is not None:
        wanted.pop("lr")
        wanted["initial_lr"] = group["initial_lr"]
    if getattr(scheduler, "cycle_momentum", False):
        wanted.pop("betas", None)
    return wanted


def _changes(engine: Engine, manifest: Manifest, wanted: Mapping[str, Any]) -> list[str]:
    """Return what the settings change, as "name old -> new".

    Raises:
        ConfigError: the state of the optimizer would not fit.
    """
    changed: list[str] = []
    if not manifest.values.optimizers:
        return changed
    facts = manifest.values.optimizers[0]
    config = engine.settings.config.optimizer
    name = OPTIMIZERS[config.name].__name__ if config is not None else ""
    if facts.class_name != name:
        changed.append(f"optimizer.name {facts.class_name} -> {name}")
    if engine.lr_scheduler is None and "scheduler" in manifest.values.objects:
        changed.append("scheduler -> none")
    saved = {key: from_plain(value) for key, value in facts.groups[0].options.items()} if facts.groups else {}
    for key, new in wanted.items():
        old = saved.get("initial_lr", saved.get("lr")) if key in ("lr", "initial_lr") else saved.get(key)
        alike = (
            list(old) == list(new) if isinstance(old, list | tuple) and isinstance(new, list | tuple) else old == new
        )
        if old is None or alike:
            continue
        shown = f"optimizer.{'lr' if key == 'initial_lr' else key}"
        if key in _NEED_STATE or (key == "momentum" and not (old and new)):
            raise ConfigError(
                f"{shown}: the checkpoint has {old}, the settings {new}: the state of the optimizer would not fit. "
                "Leave it as it was, or pass --weights-only to begin anew with the weights"
            )
        changed.append(f"{shown} {_plainly(old)} -> {_plainly(new)}")
    return changed


def _plainly(value: Any) -> str:
    return str(list(value) if isinstance(value, list | tuple) else value)


def _progress(state: Any, num_steps: int) -> Progress:
    """Read what ``save_run`` kept; of a run by other means only the number of updates is known."""
    if not isinstance(state, dict) or set(state) != {field.name for field in fields(Progress)}:
        return Progress(step=num_steps)
    whole = {"step", "samples", "tokens"}
    values: dict[str, Any] = {}
    for key, value in state.items():
        if value is not None and not isinstance(
            value, str if key == "sample" else int if key in whole else int | float
        ):
            return Progress(step=num_steps)
        values[key] = value
    return Progress(**values)
