"""One combination of settings, what it needs, and whether that fits. Pure; ``subject.py`` finds what it needs.

Words: ``fits`` leaves the margin free for what a plan leaves out, ``tight`` leaves less, ``no`` is too much. What is
left out: the allocator's rounding and fragmentation, memory that kernels take and give back, the device's context.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.planner.budget import Budget

__all__ = ["MARGIN", "Case", "Memory", "Need", "Verdict"]

MARGIN = 0.1
STATES = ("param", "master", "grad", "optim")

Verdict = Literal["fits", "tight", "no"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of one dry run.

    Attributes:
        stage: ZeRO stage.
        precision: dtype of the parameters, "fp32", "bf16" or "fp16"; None: as they are built.
        checkpointing: whether blocks are computed again in backward.
        gpus: number of data-parallel ranks.
        micro: samples per forward on one rank; None: what follows from the settings.
        depth: number of blocks; None: the model's own.
    """

    stage: int
    precision: str | None
    checkpointing: bool
    gpus: int
    micro: int | None
    depth: int | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one device has.

    Attributes:
        bytes: of its memory.
        margin: part of it that a plan that fits leaves free.
    """

    bytes: int
    margin: float = MARGIN

    def __post_init__(self) -> None:
        if self.bytes < 1 or not 0 <= self.margin < 1:
            raise ConfigError(f"memory: need at least a byte and a margin from 0 up to 1, got {self}")

    def verdict(self, peak_bytes: float) -> Verdict:
        """Say whether a planned peak fits."""
        budget = Budget(states=peak_bytes, fragmentation=self.margin)
        return "fits" if budget.fits(self.bytes) else "tight" if peak_bytes <= self.bytes else "no"


@dataclass(frozen=True, kw_only=True)
class Need:
    """Planned bytes of one rank.

    Attributes:
        case: whose.
        states: parameters, masters, gradients and optimizer state at rest.
        peak: all bytes at the moment with the most; of states alone where these are too much already.
        by_kind: the peak by kind.
        moment: when it is: the phase and the units that run; "" for states alone.
        num_params: of the model.
        flops: of one step on one rank; 0 for states alone.
        sent_bytes: of one step on one rank; 0 for states alone.
    """

    case: Case
    states: int
    peak: int
    by_kind: Mapping[str, int]
    moment: str
    num_params: int
    flops: int
    sent_bytes: int

    @property
    def states_alone(self) -> bool:
        """Whether only the states were summed, because they are too much already."""
        return not self.moment

    @property
    def largest_kind(self) -> str:
        """The kind with the most bytes at the peak."""
        return max(self.by_kind, key=lambda kind: self.by_kind[kind])

    def kinds(self, *names: str) -> int:
        """Return the bytes of some kinds at the peak."""
        return sum(self.by_kind.get(name, 0) for name in names)
