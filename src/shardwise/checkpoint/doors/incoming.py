"""What comes into a checkpoint: tensors and values of another library, checked, then written by one process.

Sources are not trusted: nothing that they say is run, and nothing larger than they are is allocated. Every import
ends here; ``huggingface.py`` and ``torchfile.py`` are the simplest.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from shardwise.checkpoint.contents import Contents, Part, real_view
from shardwise.checkpoint.manifest import Kind, OptimizerFacts, Param, Stored, Values
from shardwise.checkpoint.names import check_tag
from shardwise.checkpoint.plain import Plain, to_plain
from shardwise.checkpoint.save import SaveOptions, printable, write_contents
from shardwise.checkpoint.tensorfile import NAMES_OF_DTYPES
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["Incoming", "check_dense", "extra_state_module", "extra_state_name", "facts_of", "plain_or_refuse", "shown"]

_EXTRA_STATE = "_extra_state"
_BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
_SHOWN = 8
Facts = TypeVar("Facts", bound=BaseModel)


@dataclass
class Incoming:
    """A checkpoint in the making.

    Args:
        source: what is imported, for messages.
        buffers: names that are buffers; others are, if they hold whole numbers or are called as those of a batch norm.
        frozen: parameters that did not train.
    """

    source: Path
    buffers: Collection[str] = ()
    frozen: Collection[str] = ()
    params: dict[str, Param] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    extra_state: dict[str, Plain] = field(default_factory=dict)

    def is_buffer(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of a state dict is taken for a buffer."""
        last = name.rpartition(".")[2]
        return name in self.buffers or not tensor.dtype.is_floating_point or last in _BUFFER_NAMES

    def add_weight(self, name: str, tensor: Tensor, aliases: Collection[str] = ()) -> None:
        """Take over a parameter or a buffer.

        Raises:
            CheckpointError: no checkpoint holds such a tensor.
        """
        check_dense(tensor, f"{self.source}: {name}")
        if self.is_buffer(name, tensor):
            real = real_view(tensor, name)
            self._add("buffer", name, real, aliases=aliases, is_complex=tensor.is_complex())
            return
        param = self._add("param", name, tensor)
        self.params[name] = facts_of(
            Param,
            f"{self.source}: {name[:200]}",
            name=name,
            shape=param.shape,
            dtype=param.dtype,
            aliases=tuple(aliases),
            trainable=name not in self.frozen,
        )

    def check_buffers(self, names: Collection[str]) -> None:
        """Check that each name which a user calls a buffer became one.

        Raises:
            ConfigError: one did not: there is no such tensor.
        """
        there = {name for p in self.parts if p.stored.kind == "buffer" for name in (p.stored.name, *p.stored.aliases)}
        if absent := [name for name in names if name not in there]:
            raise ConfigError(f"buffer {shown(list(map(repr, absent)))}: {self.source} has no such tensor of its own")

    def add_state(self, name: str, state: str, tensor: Tensor) -> None:
        """Take over element-wise state that the optimizer has of a parameter.

        Raises:
            CheckpointError: it is not element-wise.
        """
        where = f"{self.source}: state {state!r} of {name}"
        check_dense(tensor, where)
        if tensor.is_complex():
            raise CheckpointError(f"{where} is of dtype {tensor.dtype}, which a checkpoint does not hold")
        if tuple(tensor.shape) != self.params[name].shape:
            raise CheckpointError(
                f"{where} has the shape {tuple(tensor.shape)}, the parameter {self.params[name].shape}: a checkpoint "
                "holds one element per element of the parameter, or one value"
            )
        self._add("optim", name, tensor, state)

    def assign_states(self, names: Collection[str], optimizer: int) -> None:
        """Let the state of parameters belong to an optimizer, by its number."""
        for position, part in enumerate(self.parts):
            if part.stored.kind == "optim" and part.stored.name in names:
                self.parts[position] = replace(part, stored=part.stored.model_copy(update={"optimizer": optimizer}))

    def write(
        self,
        folder: Path,
        tag: str | None,
        *,
        step: int = 0,
        optimizers: tuple[OptimizerFacts, ...] = (),
        loss_scale: Mapping[str, float] | None = None,
        objects: Mapping[str, Plain] | None = None,
        user: Plain = None,
    ) -> Path:
        """Write the checkpoint ``folder/tag`` and let ``latest`` name it; without a tag it is ``step-<step>``.

        Raises:
            CheckpointError: it was not saved.
            ConfigError: the tag is no name.
        """
        options = SaveOptions(folder=folder, tag=check_tag(f"step-{step}" if tag is None else tag), step=step)
        if not self.params:
            raise CheckpointError(f"{self.source}: has no parameters")
        if os.path.lexists(options.target):
            raise CheckpointError(f"{options.target}: exists already; nothing was written. Choose another tag")
        values = facts_of(
            Values,
            str(self.source),
            num_steps=step,
            loss_scale=None if loss_scale is None else dict(loss_scale),
            optimizers=optimizers,
            extra_state=self.extra_state,
            objects=dict(objects or {}),
            generators={},
            user=user,
        )
        contents = Contents(params=tuple(self.params.values()), parts=tuple(self.parts), values=values)
        return write_contents(options, contents, sharding="imported")

    def _add(
        self,
        kind: Kind,
        name: str,
        tensor: Tensor,
        state: str = "",
        *,
        aliases: Collection[str] = (),
        is_complex: bool = False,
    ) -> Stored:
        stored = facts_of(
            Stored,
            f"{self.source}: {name[:200]}",
            kind=kind,
            name=name,
            aliases=tuple(aliases),
            is_complex=is_complex,
            state=state,
            shape=tuple(tensor.shape),
            dtype=NAMES_OF_DTYPES[tensor.dtype],
            pieces=(),
        )
        self.parts.append(Part(stored=stored, start=0, flat=tensor.detach().resolve_neg().contiguous().reshape(-1)))
        return stored


def facts_of(kind: type[Facts], where: str, /, **fields: Any) -> Facts:
    """Return facts for a manifest.

    Raises:
        CheckpointError: a manifest cannot hold them, as a name with control characters.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise CheckpointError(printable(f"{where}: {place}: {first['msg']}")) from None


def check_dense(tensor: object, where: str) -> None:
    """Check that something from a file is a plain tensor, with as many values in memory as it claims.

    Raises:
        CheckpointError: it is not.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CheckpointError(printable(f"{where} is a {type(tensor).__name__}, expected a tensor"))
    assert isinstance(tensor, Tensor)
    try:
        real = real_view(tensor, where)
    except ConfigError as error:
        raise CheckpointError(printable(str(error).removeprefix("buffer "))) from None
    if real.numel() * real.dtype.itemsize > real.untyped_storage().nbytes():
        raise CheckpointError(printable(f"{where} repeats its elements: it claims {tuple(real.shape)} and holds fewer"))


def extra_state_module(name: str) -> str | None:
    """Return the module whose extra state a name of a state dict means; None for other names."""
    head, _, last = name.rpartition(".")
    return head if last == _EXTRA_STATE else None


def extra_state_name(module: str) -> str:
    """Return the name that a state dict gives to the extra state of a module."""
    return f"{module}.{_EXTRA_STATE}" if module else _EXTRA_STATE


def plain_or_refuse(value: Any, where: str) -> Plain:
    """Return a value as JSON holds it.

    Raises:
        CheckpointError: it holds what is no plain value.
    """
    try:
        return to_plain(value, where)
    except ConfigError as error:
        raise CheckpointError(printable(str(error))) from None


def shown(names: Collection[str]) -> str:
    """Return the first of many names."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return printable(", ".join(listed[:_SHOWN])) + more
