"""Python values as JSON and back, exactly: what optimizers' groups, schedulers and users keep beside tensors.

None, booleans, numbers, texts, lists and dictionaries of texts are themselves; tuples, infinite numbers, scalars of
torch, dictionaries with other keys and those of ``collections`` are objects with one reserved key. Nothing else
passes, so nothing runs on load.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.manifest import DTYPES
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["Plain", "from_plain", "to_plain"]

Plain = Any  # what JSON holds

_TUPLE, _FLOAT, _PAIRS, _SCALAR, _ESCAPED = "$tuple", "$float", "$pairs", "$scalar", "$dict"
_RESERVED = frozenset({_TUPLE, _FLOAT, _PAIRS, _SCALAR, _ESCAPED})
_FLOATS = ("nan", "inf", "-inf")
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_FACTORIES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"bool": bool, "dict": dict, "float": float, "int": int, "list": list, "str": str, "tuple": tuple}
)
_NUMPY = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})
_MAX_DEPTH = 64
_MOST_ALIKE = 64  # keys of one dictionary with one hash; more take a time that grows with their square


def to_plain(value: Any, where: str, depth: int = 0) -> Plain:
    """Return a value as JSON holds it.

    Args:
        value: to be kept.
        where: what it is, for the message.
        depth: of what holds it.

    Raises:
        ConfigError: it holds something that JSON cannot say, or is nested too deeply; names the place.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where[:200]}: is nested more than {_MAX_DEPTH} deep, or holds itself")
    kind = type(value)
    if value is None or kind in (bool, int):
        return value
    if kind is str:
        return _text(value, where)
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0 and not value.is_complex():
        return {_SCALAR: [str(value.dtype).removeprefix("torch."), to_plain(value.item(), where)]}
    if kind is tuple:
        return {_TUPLE: [to_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]}
    if kind is list:
        return [to_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    if kind in _DICTS:
        if kind is not dict or not all(type(key) is str for key in value):
            inner = depth + 1
            pairs = [
                [to_plain(k, f"{where}[key]", inner), to_plain(v, f"{where}[{k!r}]", inner)] for k, v in value.items()
            ]
            return {_PAIRS: pairs if kind is dict else _named(value, where) | {"pairs": pairs}}
        plain = {_text(key, where): to_plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        return {_ESCAPED: plain} if len(plain) == 1 and _RESERVED & plain.keys() else plain
    if isinstance(value, numpy.generic | numpy.ndarray) and value.ndim == 0 and value.dtype.str[1:] in _NUMPY:
        return to_plain(value.item(), where)
    raise ConfigError(
        f"{where} is a {kind.__name__}, which a checkpoint does not hold beside its tensors: numbers, texts, None, "
        "lists, tuples and dictionaries of these"
    )


def _named(value: dict[Any, Any], where: str) -> dict[str, Plain]:
    """Return what tells one kind of dictionary from the others."""
    if not isinstance(value, defaultdict):
        return {"kind": type(value).__name__}
    made = value.default_factory
    name = None if made is None else next((name for name, known in _FACTORIES.items() if known is made), "")
    if name == "":
        raise ConfigError(
            f"{where[:200]} is a defaultdict of {getattr(made, '__qualname__', type(made).__name__)}, which a "
            f"checkpoint does not hold: of {', '.join(_FACTORIES)} and None it does"
        )
    return {"kind": "defaultdict", "factory": name}


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where[:200]}: {value!r} is no text that a file can hold") from None
    return value


def from_plain(plain: Plain) -> Any:
    """Return the value that ``to_plain`` was given.

    Raises:
        CheckpointError: a reserved key holds what ``to_plain`` never writes.
    """
    if isinstance(plain, list):
        return [from_plain(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not _RESERVED & plain.keys():
        return {key: from_plain(item) for key, item in plain.items()}
    ((key, inner),) = plain.items()
    if key == _ESCAPED and isinstance(inner, dict):
        return {name: from_plain(item) for name, item in inner.items()}
    if key == _FLOAT and isinstance(inner, str) and inner in _FLOATS:
        return float(inner)
    if key == _TUPLE and isinstance(inner, list):
        return tuple(from_plain(item) for item in inner)
    if key == _PAIRS and _is_pairs(inner):
        return _dictionary(inner)
    if key == _PAIRS and isinstance(inner, dict) and _is_pairs(inner.get("pairs")):
        return _of_kind(inner)
    if key == _SCALAR and isinstance(inner, list) and len(inner) == 2:
        return _scalar(*inner)
    raise CheckpointError(f"a value of the checkpoint is malformed: {str(plain)[:200]}")


def _is_pairs(inner: object) -> bool:
    return isinstance(inner, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in inner)


def _of_kind(named: dict[str, Any]) -> dict[Any, Any]:
    """Return a dictionary of ``collections``."""
    items, how = _dictionary(named["pairs"]), {key: value for key, value in named.items() if key != "pairs"}
    factory = how.get("factory")
    if how == {"kind": "OrderedDict"}:
        return OrderedDict(items)
    if how == {"kind": "Counter"}:
        return Counter(items)
    if how == {"kind": "defaultdict", "factory": None}:
        return defaultdict(None, items)
    if how == {"kind": "defaultdict", "factory": factory} and isinstance(factory, str) and factory in _FACTORIES:
        return defaultdict(_FACTORIES[factory], items)
    raise CheckpointError(f"a value of the checkpoint is a dictionary of no kind: {str(named)[:200]}")


def _dictionary(pairs: list[Any]) -> dict[Any, Any]:
    try:
        keys = [from_plain(key) for key, _ in pairs]
        if max(Counter(map(hash, keys)).values(), default=0) > _MOST_ALIKE:
            raise TypeError("keys were chosen for their hash")
        return {key: from_plain(item) for key, (_, item) in zip(keys, pairs, strict=True)}
    except TypeError:
        raise CheckpointError(f"a value of the checkpoint is malformed: {str(pairs)[:200]}") from None


def _scalar(name: Any, value: Plain) -> Tensor:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    number = from_plain(value)
    if dtype not in DTYPES.values() or not isinstance(number, bool | int | float):
        raise CheckpointError(f"a value of the checkpoint is no scalar: {str([name, value])[:200]}")
    try:
        return torch.tensor(number, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"a value of the checkpoint is no scalar: {str([name, value])[:200]}") from None
