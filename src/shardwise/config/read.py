"""From files, dicts and ``--set`` to plain nested dicts. No setting is known here; read ``check.py`` for those.

What cannot be read raises; what can be read but is wrong (a key twice, a number that is none) becomes a problem, so
that one error lists it beside all others.
"""

import json
import math
import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from shardwise.config.words import show
from shardwise.errors import ConfigError

__all__ = ["Tree", "parse_override", "plain", "put", "read_file"]

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32


@dataclass(kw_only=True)
class Tree:
    """Plain settings: dicts with string keys, lists and scalars.

    Attributes:
        values: nested dicts.
        format: how it was written.
        problems: one line each.
    """

    values: dict[str, Any]
    format: Literal["toml", "json", "dict"]
    problems: list[str] = field(default_factory=list)


class _Repeated(dict[str, Any]):
    """A JSON object that has a key twice."""

    def __init__(self, values: Mapping[str, Any], twice: Sequence[str]) -> None:
        super().__init__(values)
        self.twice = tuple(twice)


def read_file(path: str | os.PathLike[str]) -> Tree:
    """Read a TOML or JSON file of at most 1 MiB.

    Raises:
        ConfigError: the file is not there, not a regular file, too large, not UTF-8, not TOML or JSON, or not an
            object; the message names it.
    """
    place = Path(path)
    text = _text(place)
    kind = place.suffix.lower()
    if kind == ".json" or (kind != ".toml" and text.lstrip().startswith("{")):
        return _read_json(text, place)
    if kind == ".toml":
        return _read_toml(text, place)
    raise ConfigError(f"{place}: is it TOML or JSON? Call it *.toml or *.json")


def _text(place: Path) -> str:
    try:
        mode = place.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{place}: is a folder, expected a TOML or JSON file")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{place}: is not a regular file")
        with place.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{place}: there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigError(f"{str(place)!r}: cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{place}: is larger than {MAX_FILE_BYTES} bytes; is it a configuration?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: is not UTF-8 text: {error}") from None


def _read_toml(text: str, place: Path) -> Tree:
    try:
        values = tomllib.loads(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: is not valid TOML: {error}") from None
    tree = plain(values)
    return Tree(values=tree.values, format="toml", problems=tree.problems)


def _read_json(text: str, place: Path) -> Tree:
    problems: list[str] = []

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            problems.append(f"the number {digits[:40]} is too large")
        return value

    def no_number(name: str) -> float:
        problems.append(f"{name} is not a number that JSON has")
        return float(name)

    try:
        values = json.loads(text, object_pairs_hook=_object, parse_float=number, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        hint = " (comments are not JSON)" if "//" in text or "#" in text else ""
        raise ConfigError(f"{place}: is not valid JSON: {error}{hint}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: expected an object {{...}}, got {show(values)}")
    tree = plain(values)
    return Tree(values=tree.values, format="json", problems=[*problems, *tree.problems])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(reversed(pairs))  # the first of two counts
    if len(values) == len(pairs):
        return dict(pairs)
    keys = [key for key, _ in pairs]
    return _Repeated(dict(pairs), sorted({key for key in keys if keys.count(key) > 1}))


def plain(values: Mapping[Any, Any]) -> Tree:
    """Copy a mapping, and the mappings and sequences in it, into dicts and lists.

    Subclasses of dict, int, float and str, numpy's numbers and paths become plain values; anything else is kept, and is
    of a wrong type later.
    """
    tree = Tree(values={}, format="dict")
    tree.values = _plain(values, "", 0, tree.problems)
    return tree


def _plain(value: Any, key: str, depth: int, problems: list[str]) -> Any:
    if depth > MAX_DEPTH:
        problems.append(f"{key[:100]}...: is nested more than {MAX_DEPTH} deep")
        return None
    if isinstance(value, Mapping):
        copied = {}
        for name, inner in value.items():
            if not isinstance(name, str):
                problems.append(f"{key + ': ' if key else ''}keys are strings, got {show(name)}")
                continue
            path = f"{key}.{name}" if key else str(name)
            if "." in name or not name:
                problems.append(f"{show(path)}: a key has no dots and is not empty; write a section instead")
                continue
            if not name.isprintable():  # control characters, half a surrogate pair: pydantic cannot name the latter
                problems.append(f"{show(path)}: a key has printable characters only")
                continue
            copied[str(name)] = _plain(inner, path, depth + 1, problems)
        if isinstance(value, _Repeated):
            twice = (f"{key}.{name}" if key else name for name in value.twice)
            problems.extend(f"{path if path.isprintable() else show(path)}: is there twice" for path in twice)
        return copied
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{index}]", depth + 1, problems) for index, inner in enumerate(value)]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    return str(value) if isinstance(value, os.PathLike) else value


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``a.b=value``; the value is TOML, and a string if it is not (quotes may be left out).

    Raises:
        ConfigError: there is no key or no "=", or a key has dots or what cannot be printed.
    """
    key, sign, value = text.partition("=")
    key = key.strip()
    if not sign or not key or not all(part.strip() for part in key.split(".")):
        written = text[:100] if text[:100].isprintable() else show(text[:100])
        raise ConfigError(f"--set {written}: expected key=value, such as batch.size=32")
    if not key.isprintable():
        raise ConfigError(f"--set {show(key)}: a key has printable characters only")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    kept = parsed["value"] if set(parsed) == {"value"} else value.strip()
    if not isinstance(kept, bool | int | float | str | list | dict):  # a date
        kept = value.strip()
    wrong = plain(kept).problems if isinstance(kept, dict) else []
    if wrong:
        raise ConfigError(f"--set {key}: {wrong[0]}")
    return key, kept


def put(values: Any, key: str, value: Any) -> str | None:
    """Set a dotted key of nested dicts; a dict is merged into a section. Return what is wrong, if something is."""
    if isinstance(value, dict):
        wrong = [put(values, f"{key}.{name}", inner) for name, inner in value.items()]
        return next((problem for problem in wrong if problem), None)
    *sections, name = key.split(".")
    for index, section in enumerate(sections):
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return f"--set {key}: {'.'.join(sections[: index + 1])} is not a section"
    values[name] = value
    return None
