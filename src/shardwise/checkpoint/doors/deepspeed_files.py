"""One file that DeepSpeed wrote, a zip of ``torch.save``: its pickle read without its classes, its tensors mapped.

The unpickler knows two dozen names. Each stands for a function or an inert class of this file, so that nothing of
torch or DeepSpeed is called or changed, whatever the file says. Read ``deepspeed_folder.py`` next.
"""

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor

from shardwise.checkpoint.doors.torchfile import check_zip
from shardwise.checkpoint.names import open_inside
from shardwise.errors import CheckpointError

__all__ = ["FragmentAddress", "LossScalerState", "read_file"]

_MAX_PICKLE_BYTES = 1 << 30
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip file: signature, length of the name, length of the extra field
_STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "FloatStorage": torch.float32,
        "DoubleStorage": torch.float64,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
    }
)


class LossScalerState:
    """What stands for DeepSpeed's loss scalers: their attributes in ``__dict__``, as the file has them."""


class FragmentAddress:
    """What stands for where a part of a parameter lies in a vector: ``numel`` and ``start``, as the file has them."""


class _Class:
    """What stands for the class of a tensor; nothing here needs it."""


class _Storage:
    """Elements of a file. ``flat`` is [n], mapped."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat


def read_file(folder: Path, name: str, *, verify: bool = True) -> Any:
    """Return what a file of a folder holds; tensors are views of the mapped file.

    Args:
        folder: its directory.
        name: of the file.
        verify: compare the checksums of the zip file.

    Raises:
        CheckpointError: it is missing, a link, damaged, or asks for anything but tensors and plain values.
    """
    where = str(folder / name)
    with os.fdopen(open_inside(folder, name), "rb") as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        check_zip(stream, where, num_bytes, verify=verify)
        try:
            entries, raw = _entries(stream, num_bytes, where)
            mapped = torch.from_file(f"/proc/self/fd/{stream.fileno()}", size=num_bytes, dtype=torch.uint8)
            return _Reader(raw, where, _Mapped(mapped, entries, where)).load()
        except CheckpointError:
            raise
        except Exception as error:  # whatever a malformed zip or pickle makes of itself
            raise CheckpointError(f"{where}: is malformed: {type(error).__name__}: {str(error)[:200]}") from None


def _entries(stream: IO[bytes], num_bytes: int, where: str) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Return where each storage begins and ends, by its key, and the pickle."""
    found: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
    for entry in entries:
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(_pread(stream, 30, entry.header_offset))
        start = entry.header_offset + 30 + name_bytes + extra_bytes
        name = entry.filename.partition("/")[2]
        if signature != b"PK\x03\x04" or start + entry.file_size > num_bytes or name in found:
            raise CheckpointError(f"{where}: is damaged: {entry.filename[:200]!r} does not lie where it should")
        found[name] = (start, start + entry.file_size)
    if "data.pkl" not in found or found["data.pkl"][1] - found["data.pkl"][0] > _MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where}: is no file of torch.save: it has no data.pkl of a sane length")
    if "byteorder" in found and _slice(stream, found["byteorder"]) != b"little":
        raise CheckpointError(f"{where}: was written on a machine of another byte order")
    keys = {name.removeprefix("data/"): place for name, place in found.items() if name.startswith("data/")}
    return keys, _slice(stream, found["data.pkl"])


def _slice(stream: IO[bytes], place: tuple[int, int]) -> bytes:
    return _pread(stream, place[1] - place[0], place[0])


def _pread(stream: IO[bytes], length: int, offset: int) -> bytes:
    raw = os.pread(stream.fileno(), length, offset)
    if len(raw) != length:
        raise EOFError("it was cut off")
    return raw


class _Mapped:
    """Gives the storages of a mapped file."""

    def __init__(self, mapped: Tensor, entries: Mapping[str, tuple[int, int]], where: str) -> None:
        self._mapped = mapped
        self._entries = entries
        self._where = where

    def storage(self, dtype: torch.dtype, key: str, numel: int) -> _Storage:
        """Return a storage.

        Raises:
            CheckpointError: the file has no such bytes.
        """
        start, stop = self._entries.get(key, (0, -1))
        if numel < 0 or numel * dtype.itemsize > stop - start:
            raise CheckpointError(f"{self._where}: claims {numel} elements in its storage {key[:40]!r}: it has fewer")
        if not numel:
            return _Storage(torch.empty(0, dtype=dtype))
        raw = self._mapped[start : start + numel * dtype.itemsize]
        return _Storage((raw if start % dtype.itemsize == 0 else raw.clone()).view(dtype))


# The C unpickler reserves as much memory as a crafted file asks for; the one in Python does not.
class _Reader(pickle._Unpickler):
    """An unpickler that makes tensors, plain values and inert objects only."""

    def __init__(self, raw: bytes, where: str, mapped: _Mapped) -> None:
        super().__init__(io.BytesIO(raw))
        self._where = where
        self._mapped = mapped
        vars(self)["dispatch"] = {**self.dispatch, ord("b"): type(self)._build}  # the code of BUILD

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what stands for a class or function.

        Raises:
            CheckpointError: no checkpoint of DeepSpeed needs it.
        """
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise CheckpointError(
                f"{self._where}: asks for {module[:200]}.{name[:200]}: only tensors, plain values and a few classes "
                "of DeepSpeed are read; nothing was run"
            )
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that a tensor refers to.

        Raises:
            CheckpointError: it is none.
        """
        match pid:
            case ("storage", torch.dtype() as dtype, str() as key, _, int() as numel):
                return self._mapped.storage(dtype, key, numel)
        raise CheckpointError(f"{self._where}: refers to something that is no storage of a tensor")

    def _build(self) -> None:
        """Give attributes to what a loss scaler or an address became; others take none."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state = stack.pop()
        if isinstance(stack[-1], LossScalerState | FragmentAddress) and type(state) is dict:
            stack[-1].__dict__.update(state)
        elif not isinstance(stack[-1], OrderedDict):  # a state dict's attribute is about its writer
            raise CheckpointError(f"{self._where}: sets attributes of a {type(stack[-1]).__name__}")


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """Stand for the function by which torch makes a tensor of a storage; not more than the storage has."""
    if not isinstance(storage, _Storage) or len(size) != len(stride):
        raise ValueError("a tensor has no storage or no shape")
    if any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise ValueError(f"a tensor has the shape {tuple(size)} and the strides {tuple(stride)}")
    available, numel = storage.flat.numel(), math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel and (numel > available or last >= available):
        raise ValueError(f"a tensor of shape {tuple(size)} is larger than its storage of {available} elements")
    start = storage.flat.storage_offset() + offset  # torch counts it from the start of the mapped file
    return storage.flat.as_strided(size, stride, start) if numel else storage.flat[:0].view(size)


def _of_dtype(storage: Any, offset: Any, size: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Tensor:
    """Stand for the same function for dtypes without a storage of their own, which is of bytes then."""
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no storage or no dtype")
    return _tensor(_Storage(storage.flat.view(dtype)), offset, size, stride)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_type(make: Any, _: Any, arguments: Any, *__: Any) -> Any:
    if not any(make is known for known in (_tensor, _of_dtype, _parameter)):
        raise ValueError("a tensor is made by something else than torch's functions")
    return make(*arguments)


def _size(dims: Any = ()) -> tuple[int, ...]:
    if any(type(n) is not int or n < 0 for n in dims):
        raise ValueError("a shape is malformed")
    return tuple(dims)


def _zero_level(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= 3:
        raise ValueError(f"{str(number)[:40]} is no stage of ZeRO")
    return number


def _bytes(text: Any = "", _: Any = "latin1") -> bytes:
    return str(text).encode("latin1")


def _device(*_: Any) -> str:
    return "a device"


_KNOWN: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _of_dtype,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
        ("torch", "Tensor"): _Class,
        ("torch.nn.parameter", "Parameter"): _Class,
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("collections", "OrderedDict"): OrderedDict,
        ("_codecs", "encode"): _bytes,
        ("builtins", "set"): set,
        ("__builtin__", "set"): set,
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): LossScalerState,
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): LossScalerState,
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _zero_level,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): FragmentAddress,
    }
)
