"""A number of parameters instead of a model: what its states take at each stage. Whether it fits they do not say."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.errors import ConfigError
from shardwise.planner.states import FLOAT_GRADIENTS, SINGLE_PRECISION, Accounting, fewest_ranks, state_bytes
from shardwise.planner.ways import Ways
from shardwise.sharding import stage_sharding

__all__ = ["ACCOUNTING_OF", "StateRow", "parse_num_params", "state_rows"]

# What the engine keeps: with 16-bit parameters gradients rest in fp32.
ACCOUNTING_OF: Mapping[str, Accounting] = MappingProxyType(
    {"bf16": FLOAT_GRADIENTS, "fp16": FLOAT_GRADIENTS, "fp32": SINGLE_PRECISION}
)
_SUFFIXES = MappingProxyType({"M": 10**6, "B": 10**9, "T": 10**12})


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """Planned bytes of the states at one stage, with AdamW.

    Attributes:
        stage: ZeRO stage.
        precision: dtype of the parameters.
        accounting: bytes per parameter.
        gpus: number of ranks; None: no number is enough for the states.
        bytes: on one rank.
    """

    stage: int
    precision: str
    accounting: Accounting
    gpus: int | None
    bytes: float


def parse_num_params(text: str) -> int | None:
    """Return the number that "7.5B" or "350M" stands for; None if it is no number."""
    number, suffix = text[:-1], text[-1:].upper()
    if suffix not in _SUFFIXES:
        return None
    try:
        return round(float(number) * _SUFFIXES[suffix])
    except (ValueError, OverflowError):
        return None


def state_rows(
    num_params: int, memory_bytes: int, gpus: int | None, *, stages: tuple[int, ...], precisions: tuple[str, ...]
) -> list[StateRow]:
    """Return what the states take on one of ``gpus`` ranks, or on the fewest whose memory holds them.

    Raises:
        ConfigError: there is no parameter.
    """
    if num_params < 1:
        raise ConfigError(f"a model needs at least one parameter, got {num_params}")
    rows = []
    for stage in stages:
        for precision in precisions:
            accounting, sharding = ACCOUNTING_OF[precision], stage_sharding(stage)
            ranks = gpus or fewest_ranks(num_params, memory_bytes, accounting, sharding)
            ways = Ways.over(sharding, ranks) if ranks else Ways.over(sharding)
            taken = state_bytes(num_params, accounting, ways).total
            rows.append(StateRow(stage=stage, precision=precision, accounting=accounting, gpus=ranks, bytes=taken))
    return rows
