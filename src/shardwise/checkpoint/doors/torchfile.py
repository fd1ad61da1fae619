"""A plain state dict in a file of ``torch.save``, out and in. Nothing in such a file is run."""

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from shardwise.checkpoint.doors.incoming import (
    Incoming,
    check_dense,
    extra_state_module,
    extra_state_name,
    plain_or_refuse,
    shown,
)
from shardwise.checkpoint.doors.outgoing import Outgoing, fill, new_file
from shardwise.checkpoint.doors.scratch import scratch_tensor
from shardwise.checkpoint.plain import from_plain
from shardwise.errors import CheckpointError

__all__ = ["check_zip", "export_torch", "import_torch", "load_values"]

_WRAPPERS = ("state_dict", "model", "module", "model_state_dict")


@torch.no_grad()
def export_torch(path: Path, target: Path, *, dtype: torch.dtype | None = None, verify: bool = True) -> Path:
    """Write the weights of a checkpoint as ``torch.save(model.state_dict())`` would: all names, tied ones together.

    Large tensors wait in files on the disk of ``target``, so memory holds one block at a time.

    Args:
        path: directory of the checkpoint.
        target: new file; it appears whole or not at all.
        dtype: of floating-point parameters; None: as the optimizer keeps them. Buffers keep theirs.
        verify: check the hash of every tensor first.

    Raises:
        CheckpointError: the checkpoint is damaged, ``target`` exists, or cannot be written.
    """
    with Outgoing(path, dtype=dtype, verify=verify) as outgoing, new_file(target) as (file, folder):
        state: dict[str, Any] = {}
        for weight in outgoing.weights:
            tensor = scratch_tensor(folder, weight.shape, weight.dtype)
            fill(tensor, outgoing.blocks(weight))
            state |= dict.fromkeys((weight.name, *weight.aliases), tensor)
        for module, value in outgoing.manifest.values.extra_state.items():
            state[extra_state_name(module)] = from_plain(value)
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of the zip writer, if the disk is full
            raise CheckpointError(f"{target} was not written: {error}") from None
    return target


def import_torch(
    source: Path,
    folder: Path,
    tag: str | None = None,
    *,
    buffers: Collection[str] = (),
    step: int = 0,
    verify: bool = True,
) -> Path:
    """Make a checkpoint of weights from a state dict. The file is mapped, each byte is read once.

    Args:
        source: a file of ``torch.save``: a state dict, alone or under ``state_dict``, ``model``, ``module`` or
            ``model_state_dict``.
        folder: of checkpoints; the new one is ``folder/tag``.
        tag: name of the checkpoint; None: ``step-<step>``.
        buffers: names that are buffers; whole numbers and those of a batch norm are taken for buffers anyway.
        step: updates so far.
        verify: compare the checksums of the file, which torch itself does not.

    Raises:
        CheckpointError: the file cannot be read without running what it says, or holds what a checkpoint does not.
        ConfigError: ``buffers`` has a name that is not there.
    """
    state = _state_dict(source, verify)
    incoming = Incoming(source, buffers=buffers)
    tied: dict[tuple[Any, ...], list[str]] = {}
    for name, value in state.items():
        module = extra_state_module(name)
        if module is not None:
            incoming.extra_state[module] = plain_or_refuse(value, f"{source}: {name}")
            continue
        check_dense(value, f"{source}: {name}")
        same = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        tied.setdefault(same if value.numel() else (name,), []).append(name)
    for first, *others in tied.values():
        incoming.add_weight(first, state[first], others)
    incoming.check_buffers(buffers)
    return incoming.write(folder, tag, step=step)


def load_values(file: Path | IO[bytes], where: str, *, mapped: bool = False) -> Any:
    """Return what a file of ``torch.save`` holds: tensors and plain values; nothing is run.

    Raises:
        CheckpointError: it is malformed, compressed, or wants something to run.
    """
    try:
        return torch.load(file, weights_only=True, mmap=mapped, map_location="cpu")
    except Exception as error:  # whatever a malformed file makes the unpickler do
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{where}: cannot be read as tensors and plain values: {type(error).__name__}: {first[:300]}"
        ) from None


def check_zip(file: Path | IO[bytes], where: str, num_bytes: int, *, verify: bool) -> None:
    """Check that a file of ``torch.save`` holds no more than it has bytes, and that they are what was written.

    Raises:
        CheckpointError: it does, they are not, or it is no zip file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed or sum(entry.file_size for entry in entries) > num_bytes:
                raise CheckpointError(f"{where}: holds more than its {num_bytes} bytes: {shown(packed)}")
            damaged = archive.testzip() if verify else None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: is no file of torch.save: {error}") from None
    if damaged is not None:
        raise CheckpointError(
            f"{where}: {damaged} is damaged: its checksum does not fit. If the file was saved without checksums, do "
            "not verify"
        )


def _state_dict(source: Path, verify: bool) -> Mapping[str, Any]:
    if not source.is_file():
        raise CheckpointError(f"{source}: is no file of torch.save")
    check_zip(source, str(source), source.stat().st_size, verify=verify)
    loaded = load_values(source, str(source), mapped=True)
    for key in _WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) for key in loaded):
        raise CheckpointError(f"{source}: holds a {type(loaded).__name__}, expected a state dict of tensors by name")
    alien = [key for key, value in loaded.items() if not isinstance(value, Tensor) and extra_state_module(key) is None]
    if alien:
        raise CheckpointError(f"{source}: is no state dict of tensors: {shown(alien)}")
    return loaded
