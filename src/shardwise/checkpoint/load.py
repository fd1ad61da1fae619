"""Loading: everything is checked on all ranks, by name, before the first byte reaches the model."""

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import Stateful, links_of, modules_with_state
from shardwise.checkpoint.folder import find_checkpoints, read_latest, read_manifest
from shardwise.checkpoint.generators import generator_states, prepare_generators
from shardwise.checkpoint.manifest import DTYPES, Manifest, Values
from shardwise.checkpoint.match import LoadOptions, Match, match
from shardwise.checkpoint.names import check_tag
from shardwise.checkpoint.owners import foreign
from shardwise.checkpoint.place import place_buffers, place_optimizer, place_params, wanted_ranges
from shardwise.checkpoint.plain import from_plain
from shardwise.checkpoint.save import describe
from shardwise.checkpoint.schedulers import check_scheduler, parts_of
from shardwise.checkpoint.source import TensorSource
from shardwise.checkpoint.verify import verify_share
from shardwise.comm.board import abort_mesh
from shardwise.errors import CheckpointError, RankMismatchError
from shardwise.faults import fault_point
from shardwise.managed import Managed

__all__ = ["Loaded", "load"]

_SHOWN = 8000


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load took over.

    Attributes:
        path: of the checkpoint.
        tag: its name.
        step: updates of the run that saved it.
        user_state: what that run added.
        fresh: parameters whose optimizer state begins anew, because the checkpoint's optimizer did not have them.
        dropped: parameters of the checkpoint whose optimizer state has no place here.
        missing: names of the model that were not in the checkpoint; they keep their values.
        unexpected: names of the checkpoint that are not in the model.
    """

    path: Path
    tag: str
    step: int
    user_state: Any
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def resolve_tag(folder: Path, tag: str | None) -> str:
    """Return the tag to load: the given one, or what ``latest`` names.

    Raises:
        CheckpointError: there is nothing to load.
    """
    if tag is not None:
        return check_tag(tag)
    found = read_latest(folder)
    if found is None:
        there = ", ".join(each.tag for each in find_checkpoints(folder)[-8:])
        raise CheckpointError(
            f"{folder}: has no file `latest`" + (f"; pass a tag, there are {there}" if there else ", and no checkpoint")
        )
    return found


@torch.no_grad()
def load(
    managed: Managed,
    folder: Path,
    tag: str | None,
    objects: Mapping[str, Stateful],
    options: LoadOptions,
    *,
    verify: bool,
) -> Loaded:
    """Load a checkpoint on every rank; see ``load_checkpoint``."""
    council = managed.council
    rank, num_ranks = council.rank, council.size
    path, manifest = _open(managed, folder, tag, f"{options!r}, verify={verify}")
    check = _Together(managed, f"{path} was not loaded, the model is as it was")
    doubt = check.do("owners", lambda: _check_owners(path, manifest, options))
    matched, user = check.do(
        "match", lambda: (match(managed, manifest, objects, options), from_plain(manifest.values.user))
    )
    if verify:
        check.do("hashes", lambda: verify_share(path, manifest, rank, num_ranks))
    with TensorSource(path, manifest) as source:
        check.do("files", lambda: _check_files(managed, matched, source, options))
        set_generators = check.do("generators", lambda: _generators(managed, source, options))
        if not options.weights_only:
            _load_objects(check, managed, manifest.values_of(rank), objects)
        try:
            _place(managed, matched, source, options)
            set_generators()
        except Exception as error:
            abort_mesh(managed.mesh, error)  # peers wait for this rank's slices
            raise CheckpointError(
                f"{path}: could not be read any more after it was checked, and the model holds parts of it: build it "
                f"anew. {describe(error)}"
            ) from error
    _Together(managed, f"{path} was loaded, but not on all ranks: build the model anew").do(
        "end", lambda: fault_point("load.after_place", rank)
    )
    if doubt and not rank:
        warnings.warn(f"load_checkpoint: {doubt}", stacklevel=3)
    _tell(matched, options, rank)
    return Loaded(
        path=path,
        tag=manifest.tag,
        step=manifest.step,
        user_state=user,
        fresh=matched.fresh,
        dropped=matched.dropped,
        missing=matched.missing,
        unexpected=matched.unexpected,
    )


class _Together:
    """Steps that every rank does for itself and that count for all only if no rank failed."""

    def __init__(self, managed: Managed, outcome: str) -> None:
        self._agreement = managed.settler.agreement
        self._outcome = outcome

    def do(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` does on this rank.

        Raises:
            CheckpointError: it failed on some rank; the same on all.
        """
        problem, result = "", None
        try:
            result = work()
        except Exception as error:
            problem = describe(error)
        said = self._agreement.texts(problem[:_SHOWN], f"load_checkpoint: {what}")
        raise_together(said, self._outcome)
        return result


def raise_together(said: list[str], outcome: str) -> None:
    """Raise the same error on every rank if some rank said something.

    Raises:
        CheckpointError: with what was said, and by whom unless all say the same.
    """
    told = {text: rank for rank, text in reversed(list(enumerate(said))) if text}
    if told:
        alike = len(told) == 1 and all(said)
        listed = next(iter(told)) if alike else "; ".join(f"rank {rank}: {text}" for text, rank in told.items())
        raise CheckpointError(f"{outcome}. {listed[:_SHOWN]}")


def check_alike(said: list[str], problem: str) -> None:
    """Raise on every rank if not all said the same.

    Raises:
        RankMismatchError: with what was said, and the first rank that said it.
    """
    unlike = {text: rank for rank, text in reversed(list(enumerate(said)))}
    if len(unlike) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for text, rank in sorted(unlike.items(), key=lambda item: item[1]))
        raise RankMismatchError(f"{problem}: {listed}")


def _open(managed: Managed, folder: Path, tag: str | None, how: str) -> tuple[Path, Manifest]:
    """Let all ranks find the same manifest, and load it in the same way."""
    problem, manifest, found = "", None, ""
    try:
        fault_point("load.begin", managed.council.rank)
        found = resolve_tag(folder, tag)
        manifest = read_manifest(folder / found)
        fault_point("load.after_manifest", managed.council.rank)
    except Exception as error:
        problem = describe(error)
    identity = manifest.save_id if manifest else ""
    answers = [
        json.loads(text)
        for text in managed.council.round(
            "load_checkpoint", json.dumps([problem[:_SHOWN], [found, identity], str(folder / found), how])
        )
    ]
    raise_together([text for text, *_ in answers], f"nothing was loaded from {folder}")
    if manifest is None or len({tuple(name_and_save) for _, name_and_save, *_ in answers}) > 1:
        listed = "; ".join(
            f"rank {rank}: {path}, save {save[:8]}" for rank, (_, (_, save), path, _) in enumerate(answers)
        )
        raise RankMismatchError(f"ranks would load unlike checkpoints, nothing was loaded: {listed[:_SHOWN]}")
    check_alike([how for *_, how in answers], "ranks load with unlike arguments, nothing was loaded")
    return folder / found, manifest


def _check_owners(path: Path, manifest: Manifest, options: LoadOptions) -> str:
    doubt = foreign(path, manifest)
    if doubt and options.strict_owner:
        raise CheckpointError(f"others could have changed it: {doubt}")
    return doubt


def _check_files(managed: Managed, matched: Match, source: TensorSource, options: LoadOptions) -> None:
    """Check that what this rank will read is there."""
    fault_point("load.after_verify", managed.council.rank)
    with_optimizers = options.optimizer_state and not options.weights_only
    source.check(wanted_ranges(managed, matched, source.manifest, with_optimizers=with_optimizers))
    source.check_copies(matched.buffers.values(), managed.council.rank)


def _place(managed: Managed, matched: Match, source: TensorSource, options: LoadOptions) -> None:
    """Change the model."""
    rank = managed.council.rank
    managed.runtime.empty_grads()
    place_params(managed, matched, source)
    place_buffers(managed, matched, source, rank)
    if options.weights_only:
        return
    if options.optimizer_state:
        for link, groups, origin in zip(links_of(managed), matched.groups, matched.origins, strict=True):
            place_optimizer(link, groups, origin, matched, source)
    values = source.manifest.values
    if managed.runtime.scaler is not None and values.loss_scale is not None:
        managed.runtime.scaler.load_state(values.loss_scale)
    managed.runtime.num_steps = values.num_steps


def _generators(managed: Managed, source: TensorSource, options: LoadOptions) -> Callable[[], None]:
    """Return what sets the generators of this process as its rank had them; nothing for ranks that did not exist."""
    rank = managed.council.rank
    if options.weights_only or not options.rng or rank >= source.manifest.num_ranks:
        return lambda: None
    now, _ = generator_states(managed.device)
    found = {}
    for item in source.manifest.stored:
        if item.kind == "rng" and item.name in now and any(piece.file == rank for piece in item.pieces):
            if item.shape != tuple(now[item.name].shape) or DTYPES[item.dtype] != now[item.name].dtype:
                raise CheckpointError(f"the state of {item.name}'s random generator has the shape {item.shape}")
            found[item.name] = torch.empty(item.numel, dtype=DTYPES[item.dtype])
            source.read_copy(item, rank, found[item.name])
    return prepare_generators(found, source.manifest.values_of(rank).generators, managed.device)


class _States:
    """States of objects and modules to be given, and what takes them back."""

    def __init__(self, managed: Managed, values: Values, objects: Mapping[str, Stateful]) -> None:
        modules = modules_with_state(managed.model)
        self._objects = [(item, from_plain(values.objects[name])) for name, item in objects.items()]
        for item, state in self._objects:
            check_scheduler(item, state)
        self._modules = [
            (modules[name], from_plain(state)) for name, state in values.extra_state.items() if name in modules
        ]
        self._old_objects = [copy.deepcopy(item.state_dict()) for item, _ in self._objects]
        parts = [part for item, _ in self._objects for part in parts_of(item)]
        self._old_attributes = [(part, dict(getattr(part, "__dict__", {}))) for part in parts]
        self._old_modules = [copy.deepcopy(module.get_extra_state()) for module, _ in self._modules]

    def give(self) -> None:
        """Change the objects and modules."""
        try:
            for item, state in self._objects:
                item.load_state_dict(state)
            for module, state in self._modules:
                module.set_extra_state(state)
        except Exception as error:
            raise CheckpointError(f"a state was refused: {type(error).__name__}: {error}") from error

    def take_back(self) -> None:
        """Let them be as they were."""
        for (item, _), state in zip(self._objects, self._old_objects, strict=True):
            with contextlib.suppress(Exception):  # one that refused a state may refuse any
                item.load_state_dict(state)
        for part, attributes in self._old_attributes:
            now = getattr(part, "__dict__", {})
            now.clear()  # a scheduler takes over any name
            now.update(attributes)
        for (module, _), state in zip(self._modules, self._old_modules, strict=True):
            with contextlib.suppress(Exception):
                module.set_extra_state(state)


def _load_objects(check: _Together, managed: Managed, values: Values, objects: Mapping[str, Stateful]) -> None:
    """Give every object its state; on all ranks or on none."""
    states: _States = check.do("states", lambda: _States(managed, values, objects))
    try:
        check.do("objects", states.give)
    except BaseException:
        states.take_back()
        raise


def _tell(matched: Match, options: LoadOptions, rank: int) -> None:
    if rank or options.weights_only:
        return
    for names, what in (
        (matched.fresh, "are new to the optimizer and begin without its state"),
        (matched.dropped, "had optimizer state that has no place here"),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            warnings.warn(f"load_checkpoint: {', '.join(names[:8])}{more} {what}", stacklevel=4)
