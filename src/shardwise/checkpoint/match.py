"""What of a checkpoint goes where in a model: by name, never by position; and everything that does not fit, at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.contents import (
    Stateful,
    buffer_aliases,
    modules_with_state,
    persistent_buffers,
    real_view,
)
from shardwise.checkpoint.manifest import DTYPES, MAX_COUNT, Manifest, Stored
from shardwise.checkpoint.match_optimizer import match_optimizers, origins_of
from shardwise.errors import CheckpointError
from shardwise.managed import Managed
from shardwise.modules import collect_params

__all__ = ["LoadOptions", "Match", "match"]

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a load shall take over; see ``load_checkpoint``."""

    strict: bool = True
    weights_only: bool = False
    optimizer_state: bool = True
    rng: bool = True
    strict_owner: bool = False


@dataclass(frozen=True, kw_only=True)
class Match:
    """Names of the model with what the checkpoint has for them.

    Attributes:
        params: parameter of the model -> tensor.
        names: parameter of the model -> its name in the checkpoint.
        buffers: buffer of the model -> tensor.
        groups: for each optimizer that is loaded: for each group, the options to take over.
        origins: for each optimizer that is loaded: its number in the checkpoint.
        fresh: parameters of optimizers that the checkpoint's optimizers did not have.
        dropped: parameters whose optimizer state has no place here.
        missing: names of the model that are not in the checkpoint (empty if ``strict``).
        unexpected: names of the checkpoint that are not in the model (empty if ``strict``).
    """

    params: Mapping[str, Stored]
    names: Mapping[str, str]
    buffers: Mapping[str, Stored]
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()
    origins: Sequence[int] = ()
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass
class _Problems:
    lists: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.lists.setdefault(kind, []).append(text)

    def raise_any(self, where: str) -> None:
        if self.lists:
            told = []
            for kind, texts in self.lists.items():
                more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
                told.append(f"{kind}: {', '.join(texts[:_SHOWN])}{more}")
            raise CheckpointError(f"{where} does not fit, nothing was loaded. {'; '.join(told)}")


def match(managed: Managed, manifest: Manifest, objects: Mapping[str, Stateful], options: LoadOptions) -> Match:
    """Find the place of everything.

    Raises:
        CheckpointError: lists all names that are missing, unexpected, of other shapes, and all else that differs.
    """
    problems = _Problems()
    params, names = _params(managed.model, manifest, options, problems)
    missing = [p.name for p in collect_params(managed.model) if p.name not in params]
    used = set(names.values())
    unexpected = [param.name for param in manifest.params if param.name not in used]
    buffers = _buffers(managed.model, manifest, options, problems, missing, unexpected)
    groups: list[list[dict[str, Any]]] = []
    origins: list[int] = []
    fresh: list[str] = []
    dropped: list[str] = []
    if not options.weights_only and options.optimizer_state:
        origins = origins_of(managed, manifest, names)
        groups = match_optimizers(managed, manifest, names, origins, problems.add, fresh, dropped)
    if not options.weights_only:
        values = manifest.values_of(managed.council.rank)
        absent = [name for name in objects if name not in values.objects]
        if absent:
            problems.add("the checkpoint has no state of", ", ".join(absent))
        odd = [name for name, item in objects.items() if not callable(getattr(item, "load_state_dict", None))]
        if odd:
            problems.add("without load_state_dict", ", ".join(odd))
        _extra_state(managed.model, values.extra_state, options, problems)
        scale = manifest.values.loss_scale
        if managed.runtime.scaler is not None and scale is None and options.strict:
            problems.add("the checkpoint has no loss scale", "this model trains in fp16 with one, pass strict=False")
        if managed.runtime.scaler is not None and scale is not None and not _is_loss_scale(scale):
            problems.add("the loss scale is malformed", str(scale)[:200])
    problems.raise_any(f"checkpoint {manifest.tag!r}")
    return Match(
        params=params,
        names=names,
        buffers=buffers,
        groups=groups,
        origins=origins,
        fresh=tuple(fresh),
        dropped=tuple(dropped),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
    )


def _params(
    model: nn.Module, manifest: Manifest, options: LoadOptions, problems: _Problems
) -> tuple[dict[str, Stored], dict[str, str]]:
    known = {name: param.name for param in manifest.params for name in (param.name, *param.aliases)}
    found: dict[str, Stored] = {}
    names: dict[str, str] = {}
    for p in collect_params(model):
        candidates = sorted({known[name] for name in (p.name, *p.aliases) if name in known})
        if not candidates:
            if options.strict:
                problems.add("missing in the checkpoint", p.name)
            continue
        if len(candidates) > 1 and options.strict:
            problems.add("tied in the model but not in the checkpoint", " and ".join(candidates))
        item = manifest.by_key[f"param.{candidates[0]}"]
        if item.shape != tuple(p.param.shape):
            problems.add("of another shape", f"{p.name} {item.shape} for {tuple(p.param.shape)}")
        elif DTYPES[item.dtype].is_floating_point is not p.param.dtype.is_floating_point:
            problems.add("of another kind", f"{p.name} {item.dtype} for {p.param.dtype}")
        found[p.name], names[p.name] = item, candidates[0]
    used = {known[name] for p in collect_params(model) for name in (p.name, *p.aliases) if name in known}
    buffers = {name for first, others in buffer_aliases(model).items() for name in (first, *others)}
    for param in manifest.params if options.strict else ():
        if param.name not in used and buffers.isdisjoint((param.name, *param.aliases)):
            problems.add("not in the model", param.name)
    return found, names


def _buffers(
    model: nn.Module,
    manifest: Manifest,
    options: LoadOptions,
    problems: _Problems,
    missing: list[str],
    unexpected: list[str],
) -> dict[str, Stored]:
    # Files of other libraries do not say which of their tensors are buffers.
    known = {name: manifest.by_key[f"param.{p.name}"] for p in manifest.params for name in (p.name, *p.aliases)}
    saved = {item.name: item for item in manifest.stored if item.kind == "buffer"}
    known |= {name: item for item in saved.values() for name in (item.name, *item.aliases)}
    aliases = buffer_aliases(model)
    found: dict[str, Stored] = {}
    for name, buffer in persistent_buffers(model).items():
        candidates = {known[each].key: known[each] for each in (name, *aliases[name]) if each in known}
        if not candidates:
            missing.append(name)
            if options.strict:
                problems.add("missing in the checkpoint", name)
            continue
        item, *others = candidates.values()
        if options.strict and any(_codes(other) != _codes(item) for other in others):
            names = " and ".join(each.name for each in candidates.values())
            problems.add("one buffer in the model, of unlike values in the checkpoint", names)
        seen = real_view(buffer, name)
        if item.shape != tuple(seen.shape):
            problems.add("of another shape", f"{name} {item.shape} for {tuple(seen.shape)}")
        if not _holds(seen.dtype, DTYPES[item.dtype]):
            problems.add("of another kind", f"{name} {item.dtype} for {seen.dtype}")
        if reason := _why_not_writable(buffer):
            problems.add("buffers that cannot be written", f"{name} {reason}")
        found[name] = item
        unexpected[:] = [each for each in unexpected if f"param.{each}" not in candidates]
    taken = {item.key for item in found.values()} | {
        known[other].key for name in found for other in aliases[name] if other in known
    }
    for name in (name for name, item in saved.items() if item.key not in taken):
        unexpected.append(name)
        if options.strict:
            problems.add("not in the model", name)
    return found


def _codes(item: Stored) -> tuple[object, ...]:
    """Return what two tensors have in common if all their bytes are the same."""
    return item.shape, item.dtype, sorted(piece.hash for piece in item.pieces)


def _why_not_writable(buffer: torch.Tensor) -> str:
    """Say why torch cannot copy into a tensor; "" if it can."""
    if buffer.is_inference():
        return "was made in inference mode"
    repeats = any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return "repeats its elements in memory (expand): register a clone" if repeats else ""


def _holds(here: torch.dtype, saved: torch.dtype) -> bool:
    """Whether values of one dtype may go into a buffer of another one: floating ones are rounded, others fit."""
    if here.is_floating_point or saved.is_floating_point:
        return here.is_floating_point and saved.is_floating_point
    return torch.promote_types(here, saved) == here


def _extra_state(model: nn.Module, saved: Mapping[str, Any], options: LoadOptions, problems: _Problems) -> None:
    here = modules_with_state(model).keys()
    if options.strict:
        for name in sorted(here - saved.keys()):
            problems.add("extra state missing in the checkpoint", name or "the model")
        for name in sorted(saved.keys() - here):
            problems.add("extra state not in the model", name or "the model")


def _is_loss_scale(scale: Mapping[str, float]) -> bool:
    """Whether the numbers are what a ``LossScaler`` may hold."""
    steps, tolerance = scale.get("clean_steps", -1.0), scale.get("tolerance", math.inf)
    # The tolerance goes on falling below 0 while every step overflows.
    return 0 < scale.get("scale", 0.0) < math.inf and 0 <= steps < MAX_COUNT and abs(tolerance) < MAX_COUNT
