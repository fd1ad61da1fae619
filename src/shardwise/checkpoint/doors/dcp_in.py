"""A checkpoint of torch.distributed.checkpoint to ours: FSDP2's, torchtitan's, or one that we exported."""

import io
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.doors.dcp_metadata import DcpFacts, DcpTensor, Place, read_dcp_metadata
from shardwise.checkpoint.doors.dcp_names import NOTE, Note
from shardwise.checkpoint.doors.dcp_optimizer import ReadOptimizer
from shardwise.checkpoint.doors.incoming import Incoming, check_dense, extra_state_module, plain_or_refuse, shown
from shardwise.checkpoint.doors.scratch import scratch_tensor, staging_folder
from shardwise.checkpoint.doors.torchfile import check_zip, load_values
from shardwise.checkpoint.names import open_inside
from shardwise.checkpoint.plain import Plain
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["import_dcp"]

_MODELS = ("model", "state_dict", "module")
_OPTIMIZERS = ("optim", "optimizer")


@torch.no_grad()
def import_dcp(
    source: Path,
    folder: Path,
    tag: str | None = None,
    *,
    buffers: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    optimizer: str | None = None,
    drop_unknown: bool = False,
    verify: bool = True,
) -> Path:
    """Make a checkpoint from one that ``dcp.save`` wrote.

    The model's tensors are those under ``model``, ``module`` or ``state_dict``, or else all at the top; the optimizer's
    are under ``optim`` or ``optimizer``, in either form of torch. Other plain values become the user state. Large
    tensors wait in files on the disk of ``folder``; memory holds one chunk at a time.

    Args:
        source: directory with ``.metadata``.
        folder: of checkpoints; the new one is ``folder/tag``.
        tag: name of the checkpoint; None: ``step-<step>``.
        buffers: names that are buffers; whole numbers and those of a batch norm are taken for buffers anyway.
        tied: other names of tied weights -> their name; torch writes each as a tensor of its own.
        optimizer: class of the optimizer; None: told by its state.
        drop_unknown: leave out what is neither model nor optimizer and no plain value; otherwise that is an error.
        verify: compare the checksums of the files, which torch itself does not.

    Raises:
        CheckpointError: it is damaged, leads outside, wants something to run, or holds what a checkpoint does not.
        ConfigError: ``buffers`` or ``tied`` has a name that is not there.
    """
    facts = read_dcp_metadata(source)
    with staging_folder(folder) as staging:
        items = _Items(source, facts, staging, verify)
        note = Note.parse(items.value(NOTE), str(source)) if NOTE in facts.values else None
        incoming = Incoming(
            source, buffers={*buffers, *(note.buffers if note else ())}, frozen=note.frozen if note else ()
        )
        sections = _sections(facts)
        if absent := [name for name in tied or () if name not in sections["model"]]:
            raise ConfigError(f"tied {shown(absent)}: {source} has no such tensor in the model")
        _add_model(incoming, items, sections["model"], dict(tied or {}) | (note.aliases if note else {}))
        incoming.check_buffers(buffers)
        read = ReadOptimizer(incoming, items.tensor, items.value, facts)
        for name, key in sections["optim"].items():
            read.add(name, key)
        optimizers = read.finish(optimizer, note)
        others = _others(items, sections["other"], drop_unknown)
        return incoming.write(
            folder,
            tag,
            step=note.step if note else read.num_steps,
            optimizers=optimizers,
            loss_scale=note.loss_scale if note else None,
            objects=note.objects if note else {},
            user=note.user if note else others or None,
        )


def _sections(facts: DcpFacts) -> dict[str, dict[str, str]]:
    """Deal the keys out to model, optimizer and the rest; a key becomes a name without what stands before it."""
    found: dict[str, dict[str, str]] = {"model": {}, "optim": {}, "other": {}}
    flat = []
    for key in (*facts.tensors, *facts.values):
        path = facts.paths.get(key, (key,))
        section, name = "other", key
        for depth, part in enumerate(path[:-1]):
            if part in _MODELS or part in _OPTIMIZERS:
                section, name = "model" if part in _MODELS else "optim", ".".join(map(str, path[depth + 1 :]))
                break
        if section == "other" and len(path) == 1 and (key in facts.tensors or extra_state_module(key) is not None):
            flat.append(key)
        elif key != NOTE:
            found[section][name] = key
    found["other" if found["model"] else "model"] |= {key: key for key in flat}
    return found


def _add_model(incoming: Incoming, items: "_Items", names: Mapping[str, str], tied: Mapping[str, str]) -> None:
    for name, key in names.items():
        module = extra_state_module(name)
        if key in items.facts.values:
            if module is None:
                raise CheckpointError(f"{items.source}: {key} is in the model's state and no tensor")
            incoming.extra_state[module] = plain_or_refuse(items.value(key), f"{items.source}: {key}")
            continue
        original = tied.get(name)
        if original is None:
            others = [alias for alias, known in tied.items() if known == name and alias in names]
            incoming.add_weight(name, items.tensor(key), others)
        elif names.get(original) is None or not torch.equal(items.tensor(key), items.tensor(names[original])):
            raise CheckpointError(f"{items.source}: {name} and {original} are not tied: their values differ")


def _others(items: "_Items", names: Mapping[str, str], drop_unknown: bool) -> dict[str, Plain]:
    """Return what is neither model nor optimizer, as far as it is plain."""
    found, unknown = {}, {}
    for name, key in names.items():
        try:
            value = items.value(key) if key in items.facts.values else items.tensor(key)
            found[name] = plain_or_refuse(value, f"{items.source}: {name}")
        except CheckpointError as error:
            unknown[name] = str(error)
    if unknown and not drop_unknown:
        raise CheckpointError(
            f"{items.source}: {shown(unknown)}: neither model nor optimizer, and no plain value; drop what is unknown, "
            f"if it need not be kept. The first: {next(iter(unknown.values()))}"
        )
    return found


class _Items:
    """Reads tensors and values of a checkpoint of torch.distributed.checkpoint.

    Raises:
        CheckpointError: a file is missing or shorter than the metadata says.
    """

    def __init__(self, source: Path, facts: DcpFacts, staging: Path, verify: bool) -> None:
        self.source = source
        self.facts = facts
        self._staging = staging
        self._verify = verify
        places = [chunk.place for item in facts.tensors.values() for chunk in item.chunks]
        lengths = {file: self._length(file) for file in {place.file for place in (*places, *facts.values.values())}}
        for place in (*places, *facts.values.values()):
            if place.offset + place.num_bytes > lengths[place.file]:
                raise CheckpointError(f"{source / place.file}: has {lengths[place.file]} bytes: it was cut off")
        claimed = sum(math.prod(item.shape) * item.dtype.itemsize for item in facts.tensors.values())
        if claimed > sum(lengths.values()):
            raise CheckpointError(f"{source}: claims {claimed} bytes of tensors and has {sum(lengths.values())}")

    def tensor(self, key: str) -> Tensor:
        """Return a whole tensor.

        Raises:
            CheckpointError: a chunk is not what the metadata says.
        """
        item = self.facts.tensors[key]
        try:
            out = scratch_tensor(self._staging, item.shape, item.dtype)
        except OSError as error:
            raise CheckpointError(f"{self._staging}: {key}: {error.strerror}") from None
        for chunk in item.chunks:
            found = self._chunk(key, item, chunk.size, chunk.place)
            out[tuple(slice(first, first + n) for first, n in zip(chunk.offset, chunk.size, strict=True))] = found
        return out

    def value(self, key: str) -> Any:
        """Return what is no tensor.

        Raises:
            CheckpointError: it is no plain value.
        """
        return self._load(key, self.facts.values[key])

    def _chunk(self, key: str, item: DcpTensor, size: tuple[int, ...], place: Place) -> Tensor:
        found = self._load(key, place)
        check_dense(found, f"{self.source}: {key}")
        assert isinstance(found, Tensor)
        if tuple(found.shape) != size or found.dtype != item.dtype:
            raise CheckpointError(
                f"{self.source}: a chunk of {key} is {found.dtype} {tuple(found.shape)}, the metadata says "
                f"{item.dtype} {size}"
            )
        return found

    def _load(self, key: str, place: Place) -> Any:
        with os.fdopen(open_inside(self.source, place.file), "rb") as stream:
            stream.seek(place.offset)
            raw = io.BytesIO(stream.read(place.num_bytes))
        where = f"{self.source / place.file}: {key}"
        check_zip(raw, where, place.num_bytes, verify=self._verify)
        raw.seek(0)
        return load_values(raw, where)

    def _length(self, file: str) -> int:
        opened = open_inside(self.source, file)
        try:
            return os.fstat(opened).st_size
        finally:
            os.close(opened)
