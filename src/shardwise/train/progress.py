"""What a run remembers across interruptions: sums for its summary, and its place in the text."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint.calls import load_checkpoint
from shardwise.checkpoint.folder import find_checkpoints, folder_of_run, newest_whole, read_latest, read_manifest
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.names import LATEST
from shardwise.engine import Engine
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.output import CHECKPOINTS

__all__ = ["Progress", "find_resume", "resume_run", "save_run"]


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
        CheckpointError: the path holds something else.
    """
    if wanted == "none":
        return None
    folder = output / CHECKPOINTS if wanted in ("auto", "last") else Path(wanted).expanduser()
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


def resume_run(engine: Engine, path: Path, *, weights_only: bool) -> tuple[Progress, Manifest]:
    """Load a checkpoint into the engine; return how far its run was. Collective.

    Raises:
        CheckpointError: it does not fit; nothing was loaded.
    """
    if weights_only:
        load_checkpoint(engine.module, path.parent, tag=path.name, weights_only=True)
        return Progress(), read_manifest(path)
    _, state = engine.load_checkpoint(path.parent, tag=path.name)
    return _progress(state, engine.global_steps), read_manifest(path)


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
