"""Under which keys a checkpoint's contents stand in a nested state dict, as torch's ``get_state_dict`` builds one.

``{"model": {name: ...}, "optim": {"state": {name: {...}}, "param_groups": [...]}, "shardwise": note}``. Names may be
those of tied weights, too. The note is JSON and says what torch's state dict has no place for.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from shardwise.checkpoint.contents import NOT_KEPT
from shardwise.checkpoint.doors.incoming import extra_state_name
from shardwise.checkpoint.manifest import Manifest, OptimizerFacts, Stored
from shardwise.checkpoint.plain import from_plain
from shardwise.errors import CheckpointError

__all__ = ["NOTE", "WRITTEN", "Leaf", "Note", "leaves_of"]

NOTE = "shardwise"
WRITTEN = "torch.distributed.checkpoint"  # among the objects of a checkpoint that dcp.save wrote: values and paths

Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class Note(BaseModel):
    """What a checkpoint holds beside a model's and an optimizer's state dict; values as ``plain.py`` writes them.

    Attributes:
        step: updates so far.
        optimizers: name of the class and number of groups, of each optimizer.
        aliases: other name of a tied weight or buffer -> name.
        buffers: names of buffers.
        frozen: parameters that do not train.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    step: Count
    optimizers: tuple[tuple[str, Count], ...]
    aliases: dict[str, str]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    loss_scale: dict[str, float] | None
    objects: dict[str, Any]
    user: Any

    @staticmethod
    def of(manifest: Manifest) -> "Note":
        """Return the note of a checkpoint."""
        values = manifest.values
        return Note(
            step=manifest.step,
            optimizers=tuple((facts.class_name, len(facts.groups)) for facts in values.optimizers),
            aliases={alias: param.name for param in manifest.params for alias in param.aliases}
            | {alias: item.name for item in manifest.stored for alias in item.aliases},
            buffers=tuple(item.name for item in manifest.stored if item.kind == "buffer"),
            frozen=tuple(param.name for param in manifest.params if not param.trainable),
            loss_scale=values.loss_scale,
            objects=values.objects,
            user=values.user,
        )

    @staticmethod
    def parse(text: object, where: str) -> "Note":
        """Read what ``model_dump_json`` wrote.

        Raises:
            CheckpointError: it is malformed.
        """
        try:
            note = Note.model_validate_json(text if isinstance(text, str) else json.dumps(None))
            from_plain([note.objects, note.user])
        except (ValidationError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: the item {NOTE!r} is malformed: {str(error)[:200]}") from None
        return note


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One value of the nested state dict: a tensor of the checkpoint, or a ``value`` in memory."""

    path: tuple[str | int, ...]
    stored: Stored | None = None
    value: Any = None

    @property
    def key(self) -> str:
        """Name under which torch.distributed.checkpoint keeps it."""
        return ".".join(map(str, self.path))


def leaves_of(manifest: Manifest, where: str) -> dict[str, Leaf]:
    """Return everything by key.

    Raises:
        CheckpointError: two things would have one key.
    """
    found: dict[str, Leaf] = {}
    for leaf in _written(manifest) if WRITTEN in manifest.values.objects else _leaves(manifest):
        if leaf.key in found:
            raise CheckpointError(f"{where}: two values would be called {leaf.key} in a nested state dict")
        found[leaf.key] = leaf
    return found


def _written(manifest: Manifest) -> Iterator[Leaf]:
    """Yield what ``ShardwiseStorageWriter`` wrote, under the keys that it was given."""
    try:
        told = manifest.values.objects[WRITTEN]
        values, paths = told["values"], {key: tuple(path) for key, path in told["paths"].items()}
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"checkpoint {manifest.tag!r}: its object {WRITTEN!r} is malformed") from None
    for param in manifest.params:
        yield Leaf(path=paths.get(param.name, (param.name,)), stored=manifest.by_key[f"param.{param.name}"])
    for key, value in values.items():
        yield Leaf(path=paths.get(key, (key,)), value=from_plain(value))


def _leaves(manifest: Manifest) -> Iterator[Leaf]:
    for param in manifest.params:
        stored = manifest.by_key[f"param.{param.name}"]
        for name in (param.name, *param.aliases):
            yield Leaf(path=("model", name), stored=stored)
    for item in manifest.stored:
        if item.kind == "buffer":
            for name in (item.name, *item.aliases):
                yield Leaf(path=("model", name), stored=item)
        elif item.kind == "optim":
            yield Leaf(path=("optim", "state", item.name, item.state), stored=item)
    for module, state in manifest.values.extra_state.items():
        yield Leaf(path=("model", extra_state_name(module)), value=from_plain(state))
    number = 0
    for facts in manifest.values.optimizers:
        yield from _scalars(facts, manifest)
        defaults = _implementation_defaults(facts.class_name)
        for group in facts.groups:
            options = {name: from_plain(value) for name, value in group.options.items()}
            for name, value in (defaults | options | {"params": list(group.params)}).items():
                yield Leaf(path=("optim", "param_groups", number, name), value=value)
            number += 1
    yield Leaf(path=(NOTE,), value=Note.of(manifest).model_dump_json())


def _scalars(facts: OptimizerFacts, manifest: Manifest) -> Iterator[Leaf]:
    """Yield single values; an empty parameter, of which no rank holds state, gets what torch would make for it."""
    for name, states in facts.scalars.items():
        for state, value in states.items():
            yield Leaf(path=("optim", "state", name, state), value=from_plain(value))
    there = {item.name for item in manifest.stored if item.kind == "optim"} | facts.scalars.keys()
    params = {param.name: param for param in manifest.params}
    pattern = next(((name, states) for name, states in facts.scalars.items() if params.get(name)), None)
    for name in (name for group in facts.groups for name in group.params):
        param = params.get(name)
        if param is None or name in there or 0 not in param.shape or not param.trainable or pattern is None:
            continue
        for state, value in pattern[1].items():
            yield Leaf(path=("optim", "state", name, state), value=from_plain(value))
        for item in manifest.stored:
            if item.kind == "optim" and item.name == pattern[0]:
                empty = item.model_copy(update={"name": name, "shape": param.shape, "pieces": ()})
                yield Leaf(path=("optim", "state", name, item.state), stored=empty)


def _implementation_defaults(class_name: str) -> dict[str, Any]:
    """Return the options that are not kept, as torch's optimizer of that name has them; torch asks for their keys."""
    found = getattr(torch.optim, class_name, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        with contextlib.suppress(TypeError, ValueError):  # an optimizer that needs more than parameters
            made: Any = found
            defaults: dict[str, Any] = made([Tensor([0.0])]).defaults
            return {name: value for name, value in defaults.items() if name in NOT_KEPT}
    return {}
