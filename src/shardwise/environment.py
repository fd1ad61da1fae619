"""The environment variables that this library reads, and the only place where it reads them.

A launcher (``shardwise launch``, ``torchrun``) tells each process its place through variables. ``Environment.read``
checks them once and returns values; nothing else depends on names of variables.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError

__all__ = ["Environment", "read_variables", "set_default"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a launcher and a terminal say; None is a variable that is not set, or set to nothing.

    Attributes:
        rank: this process's number among all, from RANK.
        world_size: number of processes of the job, from WORLD_SIZE.
        local_rank: this process's number on its machine, from LOCAL_RANK.
        local_world_size: number of processes on this machine, from LOCAL_WORLD_SIZE.
        master_addr: host of the store where the ranks meet, from MASTER_ADDR.
        master_port: its port, from MASTER_PORT.
        restart_count: how often the launcher has restarted the ranks, from TORCHELASTIC_RESTART_COUNT; 0 if not set.
        no_color: output shall have no colours, from NO_COLOR (https://no-color.org).
    """

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    no_color: bool = False

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> "Environment":
        """Read the variables of this process, or those given.

        Raises:
            ConfigError: a number is none or out of range, or RANK and WORLD_SIZE are not set together.
        """
        found = os.environ if variables is None else variables
        rank, world_size = _place(found, "RANK", "WORLD_SIZE")
        if (rank is None) != (world_size is None):
            there, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
            raise ConfigError(
                f"environment: {there}={found[there]} is set, {missing} is not; a launcher sets both. Unset {there} "
                "to run alone, or start the script with `shardwise launch`"
            )
        local_rank, local_world_size = _place(found, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if local_world_size is not None and world_size is not None and local_world_size > world_size:
            raise ConfigError(
                f"environment: LOCAL_WORLD_SIZE={local_world_size} is larger than WORLD_SIZE={world_size}"
            )
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_addr=found.get("MASTER_ADDR") or None,
            master_port=_number(found, "MASTER_PORT", least=1, most=65535),
            restart_count=_number(found, "TORCHELASTIC_RESTART_COUNT", least=0) or 0,
            no_color=bool(found.get("NO_COLOR")),
        )


def read_variables(names: Iterable[str]) -> dict[str, str]:
    """Return those of the named variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def set_default(name: str, value: str) -> str:
    """Set a variable for this process and its children unless it is set; return its value."""
    return os.environ.setdefault(name, value)


def _place(found: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int | None, int | None]:
    rank, size = _number(found, rank_name, least=0), _number(found, size_name, least=1)
    if rank is not None and size is not None and rank >= size:
        raise ConfigError(f"environment: {rank_name}={rank} must be below {size_name}={size}")
    return rank, size


def _number(found: Mapping[str, str], name: str, *, least: int, most: int = 1 << 31) -> int | None:
    text = found.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        limit = f", at most {most}" if most < 1 << 31 else ""
        raise ConfigError(f"environment: {name} must be a whole number, at least {least}{limit}, got {text!r}")
    return int(text)
