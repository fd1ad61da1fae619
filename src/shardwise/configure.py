"""``load_config``: from a file, a dict or options to settings that fit together.

Chooses the dialect, applies ``--set``, and hands over to ``config/resolve.py``. Native settings pass as they are,
those of DeepSpeed through ``interop/deepspeed.py``.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.config.check import native_keys
from shardwise.config.model import Config
from shardwise.config.read import Tree, parse_override, plain, put, read_file
from shardwise.config.resolve import Resolved, Verdict, Written, examine, resolve
from shardwise.config.words import leaves, nearest, show
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import deepspeed_keys, native_counterparts, translate

__all__ = ["Dialect", "Explanation", "Source", "explain_config", "json_schema", "load_config", "read_config"]

Dialect = Literal["native", "deepspeed"]
Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def load_config(
    source: Source,
    *,
    overrides: Sequence[str] = (),
    num_ranks: int,
    dialect: Dialect | None = None,
    device: str = "cpu",
) -> Resolved:
    """Read, validate and complete settings.

    Args:
        source: path of a TOML or JSON file, a dict of either dialect, a ``Config``, or None for the defaults.
        overrides: "key=value" with dotted keys of the source's dialect or native ones; later than the source.
        num_ranks: data-parallel ranks, for the batch arithmetic.
        dialect: whose names they are; None: those that fit better, native ones in TOML.
        device: type of the device that trains, such as "cuda"; offloading to the host is nothing to do on "cpu".

    Raises:
        ConfigError: the file cannot be read, or something is wrong: all problems in one error, one line each.
    """
    return resolve(read_config(source, overrides=overrides, dialect=dialect, device=device), num_ranks)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What settings mean, key by key.

    Attributes:
        written: what was read.
        verdicts: one for each key that was written, then those that are absent and whose default is not the native one.
        resolved: the effective settings; None if there are problems.
        problems: one line each.
    """

    written: Written
    verdicts: tuple[Verdict, ...]
    resolved: Resolved | None
    problems: tuple[str, ...]


def explain_config(
    source: Source,
    *,
    overrides: Sequence[str] = (),
    num_ranks: int = 1,
    dialect: Dialect | None = None,
    device: str = "cpu",
) -> Explanation:
    """Say of each key what becomes of it; arguments as of ``load_config``.

    Raises:
        ConfigError: the source cannot be read. What else is wrong is in ``problems``.
    """
    written = read_config(source, overrides=overrides, dialect=dialect, device=device)
    resolved, problems = examine(written, num_ranks)
    verdicts = list(written.verdicts)
    if written.dialect == "native":
        written_leaves = leaves(written.tree).items()
        verdicts = [Verdict(key=key, value=value, fate="same", target=key) for key, value in written_leaves]
    by_key: dict[str, list[str]] = {}
    for problem in problems:
        key, _, text = problem.partition(": ")
        by_key.setdefault(key, []).append(text)
    for index, verdict in enumerate(verdicts):
        reasons = by_key.get(verdict.key, [])
        if reasons and verdict.fate != "refused":
            verdicts[index] = replace(verdict, fate="refused", why="; ".join(reasons))
    return Explanation(written=written, verdicts=tuple(verdicts), resolved=resolved, problems=problems)


def read_config(
    source: Source, *, overrides: Sequence[str] = (), dialect: Dialect | None = None, device: str = "cpu"
) -> Written:
    """Read settings into native names, without validation of their values; arguments as of ``load_config``.

    Raises:
        ConfigError: the source cannot be read. What else is wrong is in ``problems``.
    """
    if dialect not in (None, "native", "deepspeed"):
        raise ConfigError(f"dialect: expected native or deepspeed, got {show(dialect)}")
    given: object = overrides  # a string is a sequence of strings, too
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if not listed or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(f'overrides: expected a list of strings such as ["stage=1"], got {show(overrides)}')
    tree, name = _read(source)
    dialect = dialect or ("native" if tree.format == "toml" else _dialect_of(tree.values))
    foreign, native = _sorted_overrides(overrides, dialect, tree.problems)
    if dialect == "deepspeed":
        overridden = _put_all(tree, foreign)
        written = translate(tree.values, source=name, device=device, overridden=frozenset(overridden))
    else:
        origins = dict.fromkeys(leaves(tree.values), name)
        written = Written(tree=tree.values, source=name, origins=origins, hints=_hints(tree.values))
    result = Tree(values=plain(written.tree).values, format="dict", problems=[*tree.problems, *written.problems])
    overridden = _put_all(result, native)
    return replace(
        written,
        tree=result.values,
        origins={**written.origins, **{key: f"--set {key}" for key in overridden}},
        names={key: foreign_key for key, foreign_key in written.names.items() if key not in overridden},
        problems=tuple(result.problems),
    )


def _hints(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what to say of DeepSpeed's names at the top of native settings."""
    counterparts = native_counterparts()
    hint = "a name of DeepSpeed's, where native ones are read: the two cannot be mixed"
    return {
        key: f"{hint}; write {counterparts[key]}" if counterparts[key] else hint
        for key in values
        if key in counterparts  # of those that are native too, nobody asks
    }


def _put_all(tree: Tree, overrides: Sequence[tuple[str, Any]]) -> list[str]:
    """Apply overrides and return the dotted keys that they set; what cannot be set becomes a problem."""
    keys: list[str] = []
    for key, value in overrides:
        problem = put(tree.values, key, value)
        if problem:
            tree.problems.append(problem)
        keys.extend(leaves(value, f"{key}.") if isinstance(value, dict) else [key])
    return keys


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of native settings, for editors."""
    return Config.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def _read(source: Source) -> tuple[Tree, str]:
    """Return the settings and what to call them."""
    if source is None:
        return Tree(values={}, format="toml"), "config"
    if isinstance(source, Config):
        values = source.model_dump(exclude_unset=True)
        return Tree(values=values, format="toml"), "config"
    if isinstance(source, Mapping):
        return plain(source), "config"
    if isinstance(source, str | os.PathLike):
        return read_file(source), os.path.basename(os.fspath(source))
    raise ConfigError(f"config: expected a path, a dict or None, got {type(source).__name__}")


def _sorted_overrides(
    overrides: Sequence[str], dialect: Dialect, problems: list[str]
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the overrides in DeepSpeed's names, and those in native ones (unknown ones go to the dialect's)."""
    foreign: list[tuple[str, Any]] = []
    native: list[tuple[str, Any]] = []
    seen = set()
    known_foreign = deepspeed_keys() if dialect == "deepspeed" else ()
    known_native = native_keys()
    for text in overrides:
        key, value = parse_override(text)
        if key in seen:
            problems.append(f"--set {key}: is given twice")
        seen.add(key)
        is_native = _has(key, known_native) and not _has(key, known_foreign)
        (native if dialect == "native" or is_native else foreign).append((key, value))
    return foreign, native


def _has(key: str, known: Sequence[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for name in known)


def _dialect_of(values: Mapping[str, Any]) -> Dialect:
    """Return the dialect whose names the keys at the top resemble more; native if there is nothing to tell."""
    tops = {
        "native": {key.partition(".")[0] for key in native_keys()},
        "deepspeed": {key.partition(".")[0] for key in deepspeed_keys()},
    }
    points = dict.fromkeys(tops, 0.0)
    for key, value in values.items():
        in_both = all(key in names for names in tops.values())
        if in_both and isinstance(value, Mapping):
            points["deepspeed"] += ("type" in value) + ("params" in value)
            points["native"] += "name" in value
        elif not in_both:
            for dialect, names in tops.items():
                points[dialect] += 2.0 if key in names else 1.0 if nearest(key, names, 0.75) else 0.0
    return "deepspeed" if points["deepspeed"] > points["native"] else "native"
