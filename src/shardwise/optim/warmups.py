"""Schedules that begin with a warm-up, with the values of DeepSpeed 0.19.8.

Pure arithmetic over ``closed_form.py``; read [Note: step 0] there for how updates are counted.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from shardwise.optim.closed_form import ClosedForm
from shardwise.optim.options import OptionChecker, PerGroup

__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


@dataclass(frozen=True)
class _Warmup:
    """The rising part that three schedules share, from 0 to 1 over ``num_steps`` updates."""

    num_steps: int
    shape: str

    @classmethod
    def checked(cls, check: OptionChecker, num_steps: int, shape: str) -> "_Warmup":
        num_steps = check.count("num_warmup_steps", num_steps, least=1)
        return cls(max(2, num_steps), check.choice("shape", shape, ("log", "linear")))

    def at(self, index: int) -> float:
        """Return the height at DeepSpeed's index; see [Note: step 0]."""
        if self.shape == "linear":
            return index / self.num_steps
        return 1.0 / math.log(self.num_steps) * math.log(index + 1)


class WarmupLR(ClosedForm):
    """Raise the rate from a minimum to a maximum, then keep it.

    Args:
        optimizer: any torch optimizer.
        min_lr: rate of the first two updates; one number or one per group.
        max_lr: rate after the warm-up; None takes that of the optimizer's groups.
        num_warmup_steps: updates of the warm-up.
        shape: ``"log"`` or ``"linear"``.

    Raises:
        ConfigError: a value is out of range.

    Source: values of DeepSpeed 0.19.8, see [Note: step 0].
    """

    _name = "warmup"

    def __init__(
        self,
        optimizer: Optimizer,
        min_lr: PerGroup = 0.0,
        max_lr: PerGroup | None = None,
        num_warmup_steps: int = 1000,
        shape: str = "log",
    ) -> None:
        check = OptionChecker.of_schedule(self._name, optimizer)
        self.min_lrs = check.per_group("min_lr", min_lr)
        self.max_lrs = None if max_lr is None else check.per_group("max_lr", max_lr)
        self.warmup = _Warmup.checked(check, num_warmup_steps, shape)
        super().__init__(optimizer)

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the rate of every group."""
        gamma = 0.0 if step == 0 else self._gamma(step - 1)
        highest = self.base_lrs if self.max_lrs is None else self.max_lrs
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, highest, strict=True)]

    def _gamma(self, index: int) -> float:
        return self.warmup.at(index) if index < self.warmup.num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """Raise the rate from a minimum to a maximum, then lower it linearly to 0 at ``total_steps``.

    Args:
        optimizer: any torch optimizer.
        total_steps: updates of the whole training, the warm-up included.
        min_lr: rate of the first two updates; one number or one per group.
        max_lr: rate at the top; None takes that of the optimizer's groups.
        num_warmup_steps: updates of the warm-up.
        shape: ``"log"`` or ``"linear"``.

    Raises:
        ConfigError: a value is out of range, or the warm-up is longer than the whole.

    Source: values of DeepSpeed 0.19.8, see [Note: step 0].
    """

    _name = "warmup_decay"

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        min_lr: PerGroup = 0.0,
        max_lr: PerGroup | None = None,
        num_warmup_steps: int = 1000,
        shape: str = "log",
    ) -> None:
        self.total_steps = OptionChecker.of_schedule(self._name, optimizer).whole_training(
            total_steps, num_warmup_steps
        )
        super().__init__(optimizer, min_lr, max_lr, num_warmup_steps, shape)

    def _gamma(self, index: int) -> float:
        if index < self.warmup.num_steps:
            return self.warmup.at(index)
        return max(0.0, (self.total_steps - index) / max(1.0, self.total_steps - self.warmup.num_steps))


class WarmupCosineLR(ClosedForm):
    """Raise the optimizer's rates by a factor up to 1, then lower them along half a cosine.

    The first update has rate 0, whatever ``min_ratio`` says; that is DeepSpeed's.

    Args:
        optimizer: any torch optimizer; the rates of its groups are the highest ones.
        total_steps: updates of the whole training, the warm-up included.
        min_ratio: factor at which the warm-up begins, from 0 to 1.
        num_warmup_steps: updates of the warm-up.
        end_ratio: factor at the end and after it, from 0 to 1.
        shape: ``"log"`` or ``"linear"``.

    Raises:
        ConfigError: a value is out of range, or the warm-up is longer than the whole.

    Source: arXiv:1608.03983, equation 5 with one period; values of DeepSpeed 0.19.8, see [Note: step 0].
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        min_ratio: float = 0.0,
        num_warmup_steps: int = 1000,
        end_ratio: float = 1e-4,
        shape: str = "log",
    ) -> None:
        check = OptionChecker.of_schedule("warmup_cosine", optimizer)
        self.total_steps = check.whole_training(total_steps, num_warmup_steps)
        self.warmup = _Warmup.checked(check, num_warmup_steps, shape)
        self.min_ratio = check.number("min_ratio", min_ratio, least=0.0, most=1.0)
        self.end_ratio = check.number("end_ratio", end_ratio, least=0.0, most=1.0)
        super().__init__(optimizer)

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the rate of every group."""
        ratio = 0.0 if step == 0 else self._ratio(step - 1)
        return [base * ratio for base in self.base_lrs]

    def _ratio(self, index: int) -> float:
        if index < self.warmup.num_steps:
            return self.min_ratio + self.warmup.at(index) * (1.0 - self.min_ratio)
        num_decays = max(1, self.total_steps - self.warmup.num_steps)
        progress = min(1.0, (index - self.warmup.num_steps + 1) / num_decays)
        return self.end_ratio + (1.0 - self.end_ratio) * ((1 + math.cos(math.pi * progress)) / 2)
