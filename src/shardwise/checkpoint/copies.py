"""Buffers that several ranks hold: each keeps its own values, of one shape; what is rank 0's is written once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.checkpoint.contents import Contents
from shardwise.errors import ConfigError
from shardwise.numerics.fingerprint import fingerprint

__all__ = ["check_buffers", "describe_buffers", "without_copies"]

Told = Mapping[str, Sequence[Any]]  # name of a buffer -> number of its bytes, dtype, shape, other names


def describe_buffers(contents: Contents) -> dict[str, list[Any]]:
    """Return what this rank tells of its buffers."""
    return {
        part.stored.name: [fingerprint(part.flat), part.stored.dtype, part.stored.shape, part.stored.aliases]
        for part in contents.parts
        if part.stored.kind == "buffer"
    }


def check_buffers(told: Sequence[Told]) -> None:
    """Check that a buffer is the same on all ranks that have it, but for its values.

    Raises:
        ConfigError: names those that are not; a checkpoint tells of each once.
    """
    known: dict[str, dict[str, int]] = {}
    for rank, buffers in enumerate(told):
        for first, (_, dtype, shape, aliases) in buffers.items():
            names = f" with {first}, {', '.join(aliases)}" if aliases else ""
            for name in (first, *aliases):
                known.setdefault(name, {}).setdefault(f"{dtype} {list(shape)}{names}", rank)
    unlike = [
        f"{name}: " + ", ".join(f"{what} on rank {rank}" for what, rank in kinds.items())
        for name, kinds in known.items()
        if len(kinds) > 1
    ]
    if unlike:
        raise ConfigError(
            f"ranks hold buffers of unlike dtypes, shapes or names, which a checkpoint does not hold; nothing was "
            f"saved. {'; '.join(unlike)[:2000]}"
        )


def without_copies(told: Sequence[Told], rank: int, contents: Contents) -> Contents:
    """Leave out buffers that are rank 0's."""
    first, own = told[0], told[rank]
    repeated = {name for name, facts in own.items() if rank and name in first and first[name][0] == facts[0]}
    kept = tuple(p for p in contents.parts if p.stored.kind != "buffer" or p.stored.name not in repeated)
    return replace(contents, parts=kept)
