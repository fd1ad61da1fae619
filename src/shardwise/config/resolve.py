"""From what a user wrote to settings: every problem in one error, every value with its origin.

A file is read into a ``Written`` (a native tree and where each key of it comes from) by the loader; ``resolve``
validates it, completes the batch arithmetic and keeps the origins, so that ``--print-config`` can tell them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.config.model import Config

__all__ = ["Batch", "Resolved", "Written", "resolve"]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written, in native names.

    Attributes:
        tree: nested mappings, as in TOML.
        origins: dotted native key -> where it was written, such as "ds.json: zero_optimization.stage".
        notes: one line each: keys accepted without effect, and changed defaults.
        problems: what is wrong already; the error lists them with those of the values.
    """

    tree: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples per update; ``size == micro * accumulation * num_ranks``."""

    size: int
    micro: int
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Settings that fit together.

    Attributes:
        config: the validated tree, defaults filled in.
        batch: complete batch arithmetic for ``num_ranks``.
        num_ranks: data-parallel ranks.
        origins: dotted key of every effective value -> where it comes from ("default" if nobody wrote it).
        notes: what the user should know, once.
    """

    config: Config
    batch: Batch
    num_ranks: int
    origins: Mapping[str, str]
    notes: tuple[str, ...]


def resolve(written: Written, num_ranks: int) -> Resolved:
    """Validate, complete and explain.

    Raises:
        ConfigError: lists every problem, unknown keys with the nearest valid one.
    """
    raise NotImplementedError
