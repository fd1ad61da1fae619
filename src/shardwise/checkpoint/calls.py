"""What users call: ``save_checkpoint`` and ``load_checkpoint``."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from shardwise.checkpoint.background import PendingSave
from shardwise.checkpoint.contents import Contents, Stateful, collect_contents
from shardwise.checkpoint.copies import check_buffers, describe_buffers, without_copies
from shardwise.checkpoint.load import Loaded, check_alike, load, raise_together
from shardwise.checkpoint.match import LoadOptions
from shardwise.checkpoint.names import MANIFEST, check_tag
from shardwise.checkpoint.save import SaveJob, SaveOptions, describe, free_bytes, new_save_id
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.faults import fault_point
from shardwise.hooks import backward_is_running
from shardwise.managed import Managed

__all__ = ["load_checkpoint", "save_checkpoint", "wait_for_save"]

_SHOWN = 4000
_SPARE_BYTES = 1 << 20
_UNLIKE = "ranks save with unlike arguments, nothing was saved"
_KINDS: Mapping[str, type[Exception]] = MappingProxyType({"ConfigError": ConfigError, "StateError": StateError})


@torch.no_grad()
def save_checkpoint(
    model: nn.Module,
    folder: str | Path,
    *,
    tag: str | None = None,
    step: int | None = None,
    objects: Mapping[str, Stateful] | None = None,
    user_state: Any = None,
    overwrite: bool = False,
    set_latest: bool = True,
    exclude_frozen: bool = False,
    keep_last: int | None = None,
    keep: Collection[str] = (),
    background: bool = False,
    when_pending: Literal["wait", "refuse"] = "wait",
) -> Path:
    """Save a sharded model, its optimizers, and what else a later run needs.

    Collective. Nothing is gathered: every rank writes the part it owns. The checkpoint appears whole, or not at all.

    Args:
        model: what ``shard`` returned.
        folder: of the run's checkpoints, shared by all ranks; made if it does not exist. It may be a link.
        tag: name of the checkpoint; None: ``step-<step>``.
        step: updates so far, for names and order; None: steps of the model's optimizers.
        objects: schedulers, loaders, ... by name: what has ``state_dict`` and ``load_state_dict`` of plain values.
        user_state: anything that JSON can say; ``load_checkpoint`` returns rank 0's.
        overwrite: replace a checkpoint of the same tag; otherwise that is an error.
        set_latest: let the file ``latest`` name it, which is what loads by default.
        exclude_frozen: leave out parameters that do not train; it loads with ``strict=False`` only.
        keep_last: remove whole checkpoints but the last so many and what ``latest`` names, once this one was read back;
            None: keep all.
        keep: tags that are never removed.
        background: return at once. The state is written beside the next forward and backward; what is left when the
            optimizer is about to change it is copied to host memory. What goes wrong is raised by an optimizer step
            that follows, on all ranks. ``wait_for_save`` waits for the end, and so does a process that ends well.
        when_pending: what to do if a save in the background goes on: "wait" for it, or "refuse" with an error.

    Returns:
        The checkpoint's directory, which a save in the background makes later.

    Raises:
        ConfigError: an argument is wrong, or something cannot be kept, as a buffer of unlike shapes on the ranks.
        CheckpointError: it was not saved (the message says what and where); the same on all ranks.
        StateError: inside a backward or ``unsharded``, or a save goes on and ``when_pending`` is "refuse".
        RankMismatchError: some rank did not call it, or with other arguments.
    """
    managed = Managed.of(model)
    _check_no_backward("save_checkpoint")
    _end_pending(managed, "save_checkpoint", when_pending)
    number = managed.runtime.num_steps if step is None else step
    how = f"background={bool(background)}, when_pending={when_pending!r}, exclude_frozen={bool(exclude_frozen)}"
    facts: dict[str, Any] = {"save_id": new_save_id(), "how": how, "kind": "", "problem": ""}
    job = None
    try:
        fault_point("save.begin", managed.council.rank)
        if when_pending not in ("wait", "refuse"):
            raise ConfigError(f'when_pending must be "wait" or "refuse", got {when_pending!r}')
        if managed.pending_save is not None:
            raise StateError(f"a save to {managed.pending_save.path} goes on: wait() for it first")
        if any(unit.pins for unit in managed.runtime.units):
            raise StateError("save_checkpoint: inside unsharded(): leave it first")
        options = _options(folder, tag, number, overwrite, set_latest, keep_last, keep)
        facts["how"] = f"{options!r}, {how}"
        contents = collect_contents(managed, objects or {}, user_state)
        if exclude_frozen:
            contents = contents.without_frozen()
        job = _job(managed, options, contents, facts["save_id"])
        facts |= {"bytes": job.num_bytes, "free": free_bytes(job.options.folder), "taken": _taken(job.options)}
        facts["buffers"] = describe_buffers(contents)
    except Exception as error:
        facts["kind"] = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "CheckpointError")
        facts["problem"] = describe(error)[:_SHOWN]
    answers = [json.loads(text) for text in managed.council.round("save_checkpoint", json.dumps(facts))]
    _raise_problems(answers)
    assert job is not None
    check_alike([answer["how"] for answer in answers], _UNLIKE)
    _check_place(answers, job.options)
    buffers = [answer["buffers"] for answer in answers]
    check_buffers(buffers)
    contents = without_copies(buffers, managed.council.rank, job.contents)
    job = replace(job, save_id=answers[0]["save_id"], contents=contents)
    if background:
        return PendingSave(managed, job).path
    return job.run(lambda what, text: _exchange(managed, what, text))


def wait_for_save(model: nn.Module) -> Path | None:
    """Wait until a save in the background is over on all ranks. Collective.

    Returns:
        The checkpoint's directory; None if no save was going on.

    Raises:
        CheckpointError: it failed, on any rank; the same on all.
        RankMismatchError: a save goes on and some rank did not call it.
    """
    return _end_pending(Managed.of(model), "wait_for_save")


def load_checkpoint(
    model: nn.Module,
    folder: str | Path,
    *,
    tag: str | None = None,
    objects: Mapping[str, Stateful] | None = None,
    strict: bool = True,
    weights_only: bool = False,
    optimizer_state: bool = True,
    rng: bool = True,
    verify: bool = True,
    strict_owner: bool = False,
) -> Loaded:
    """Load a checkpoint into a sharded model, whatever stage and number of ranks saved it.

    Collective. Everything is checked on all ranks first; if anything does not fit, the model stays as it was.

    Args:
        model: what ``shard`` returned, its optimizers sharded already.
        folder: of the run's checkpoints.
        tag: name of the checkpoint; None: what the file ``latest`` names.
        objects: schedulers, loaders, ... by name, to be given their states.
        strict: names of parameters and buffers must be the same here and there; otherwise what both have is loaded.
        weights_only: load parameters and buffers, nothing else.
        optimizer_state: load the optimizers' states and options.
        rng: set the random generators of this process as its rank had them.
        verify: check the hash of every tensor; each is read once across the ranks.
        strict_owner: refuse what another user owns or anyone may write; otherwise that is a warning. A hash does not
            protect from somebody who can change the manifest, too.

    Returns:
        What was taken over.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit; lists everything; the same on all ranks.
        StateError: inside a backward, or inside ``unsharded``.
        RankMismatchError: some rank did not call it, loads another checkpoint, or with other arguments.
    """
    managed = Managed.of(model)
    _check_no_backward("load_checkpoint")
    options = LoadOptions(
        strict=strict,
        weights_only=weights_only,
        optimizer_state=optimizer_state,
        rng=rng,
        strict_owner=strict_owner,
    )
    with torch.inference_mode(False):  # what was made or written inside it could not be trained
        managed.clear_failed_backward()
        if any(unit.pins for unit in managed.runtime.units):
            raise StateError("load_checkpoint: inside unsharded(): leave it first")
        _end_pending(managed, "load_checkpoint")
        return load(managed, _source(folder), tag, objects or {}, options, verify=verify)


def _check_no_backward(what: str) -> None:
    if backward_is_running():
        raise StateError(f"{what}: inside a backward: call it between steps")


def _end_pending(managed: Managed, call: str, when: str = "wait") -> Path | None:
    """Wait for the save that goes on, if that is what to do; return where it went."""
    pending = managed.pending_save
    if pending is None:
        return None
    check_alike(managed.council.round(call, f"when_pending={when!r}"), _UNLIKE)
    return pending.wait() if when == "wait" else None


def _source(folder: str | Path) -> Path:
    """Return where a folder to load from is; one that cannot be stays as given, and all ranks learn what is missing."""
    try:
        return Path(os.path.realpath(os.path.expanduser(folder)))
    except (TypeError, ValueError, OSError):
        return Path(str(folder))


def _options(
    folder: str | Path,
    tag: str | None,
    step: int,
    overwrite: bool,
    set_latest: bool,
    keep_last: int | None,
    keep: Collection[str],
) -> SaveOptions:
    if type(step) is not int or step < 0:
        raise ConfigError(f"step must be a whole number, at least 0, got {step!r}")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ConfigError(f"keep_last must be at least 1, got {keep_last!r}")
    if isinstance(keep, str):
        raise ConfigError(f"keep holds tags, got the text {keep!r}: pass keep=({keep!r},)")
    try:
        place = Path(folder).expanduser().absolute()  # it stays the same when the current directory changes
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"folder {folder!r}: {describe(error)}") from None
    return SaveOptions(
        folder=place,
        tag=check_tag(f"step-{step}" if tag is None else tag),
        step=step,
        overwrite=bool(overwrite),
        set_latest=bool(set_latest),
        keep_last=keep_last,
        keep=tuple(sorted(check_tag(each) for each in keep)),
    )


def _job(managed: Managed, options: SaveOptions, contents: Contents, save_id: str) -> SaveJob:
    """Return this rank's part; a link to the folder is followed here, and not again."""
    return SaveJob(
        options=replace(options, folder=Path(os.path.realpath(options.folder))),
        contents=contents,
        mesh=tuple((axis, comm.size) for axis, comm in managed.mesh.items()),
        sharding=str(managed.settings.default),
        save_id=save_id,
        rank=managed.council.rank,
        num_ranks=managed.council.size,
    )


def _raise_problems(answers: list[dict[str, Any]]) -> None:
    """Raise the same on all ranks if some cannot save."""
    kind = next((answer["kind"] for answer in answers if answer["kind"]), "")
    try:
        raise_together([answer["problem"] for answer in answers], "nothing was saved")
    except CheckpointError as error:
        raise _KINDS.get(kind, CheckpointError)(str(error)) from None


def _check_place(answers: list[dict[str, Any]], options: SaveOptions) -> None:
    """Check what all ranks said of the disk; what changes later, writing tells."""
    needed = sum(answer["bytes"] for answer in answers) + _SPARE_BYTES
    free = min(answer["free"] for answer in answers)
    if needed > free:
        raise CheckpointError(
            f"{options.folder}: checkpoint {options.tag!r} needs {needed:,} bytes and {free:,} are free; nothing was "
            "written. Remove old checkpoints (keep_last does so only after a save), or save elsewhere"
        )
    taken = next((answer["taken"] for answer in answers if answer["taken"]), "")
    if taken:
        raise CheckpointError(f"{options.target}: {taken}")


def _taken(options: SaveOptions) -> str:
    """Return why the place of the checkpoint cannot be had, as this rank sees it."""
    target = options.target
    if not os.path.lexists(target):
        return ""
    if target.is_symlink() or not (target / MANIFEST).exists():
        return "exists and is no checkpoint; it is left alone. Choose another tag"
    return "" if options.overwrite else "exists already: choose another tag, or pass overwrite=True"


def _exchange(managed: Managed, what: str, text: str) -> list[str]:
    """Tell all ranks a text; a collective, so that a rank that died is noticed."""
    return managed.settler.agreement.texts(text, f"save_checkpoint: {what}")
