"""Schedules that look for a rate or cycle through rates, with the values of DeepSpeed 0.19.8.

Pure arithmetic over ``closed_form.py``; read [Note: step 0] there for how updates are counted.
"""

import math
import warnings

from torch import Tensor
from torch.optim import Optimizer

from shardwise.optim.closed_form import ClosedForm
from shardwise.optim.options import OptionChecker, PerGroup

__all__ = ["LRRangeTest", "OneCycle"]

_CYCLED_BETA2 = 0.99  # what DeepSpeed gives every group whose momentum it cycles


class LRRangeTest(ClosedForm):
    """Raise the rate steadily, to find where training diverges: ``min_lr * (1 + growth * step / interval)``.

    Args:
        optimizer: any torch optimizer.
        min_lr: rate of the first update; one number or one per group.
        interval: updates in which the factor grows by ``growth``.
        growth: rise per interval, as a fraction of ``min_lr``.
        staircase: grow at the end of every interval only.

    Raises:
        ConfigError: a value is out of range.

    Source: arXiv:1803.09820, section 4; values of DeepSpeed 0.19.8.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        min_lr: PerGroup = 1e-3,
        interval: int = 2000,
        growth: float = 1.0,
        staircase: bool = False,
    ) -> None:
        check = OptionChecker.of_schedule("lr_range_test", optimizer)
        self.min_lrs = check.per_group("min_lr", min_lr)
        self.interval = check.count("interval", interval, least=1)
        self.growth = check.number("growth", growth, least=0.0)
        self.staircase = check.flag("staircase", staircase)
        super().__init__(optimizer)

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the rate of every group."""
        intervals = step // self.interval if self.staircase else step / self.interval
        return [min_lr * (1 + self.growth * intervals) for min_lr in self.min_lrs]


class OneCycle(ClosedForm):
    """Raise the rate to a maximum and lower it again, linearly or in stairs, then let it decay.

    The first momentum coefficient of optimizers with ``betas`` moves the other way. The second becomes 0.99, and the
    first update is made with the lowest momentum; both are DeepSpeed's.

    Args:
        optimizer: any torch optimizer.
        min_lr: rate at both ends of the cycle; one number or one per group.
        max_lr: rate at the top.
        num_rise_steps: updates from the bottom to the top.
        num_fall_steps: updates from the top to the bottom; None takes those of the first half.
        rise_stairs: number of stairs in the first half, 0 for a straight line.
        fall_stairs: the same of the second half; None takes that of the first.
        decay_interval: updates in which the decay's denominator grows by its rate; 0 switches the decay off.
        decay_rate: after the cycle the rate is ``min_lr / (1 + decay_rate * intervals)``.
        cycle_momentum: move the momentum too. Without ``betas`` in the optimizer this warns and does nothing.
        min_momentum: momentum at the top; one number or one per group.
        max_momentum: momentum at both ends.
        momentum_decay_rate: after the cycle the momentum is ``max_momentum * (1 + rate * intervals)``.

    Raises:
        ConfigError: a value is out of range.

    Source: arXiv:1803.09820, section 5; values of DeepSpeed 0.19.8.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        min_lr: PerGroup,
        max_lr: PerGroup,
        num_rise_steps: int = 2000,
        num_fall_steps: int | None = None,
        rise_stairs: int = 0,
        fall_stairs: int | None = None,
        decay_interval: int = 0,
        decay_rate: float = 0.0,
        cycle_momentum: bool = True,
        min_momentum: PerGroup = 0.8,
        max_momentum: PerGroup = 0.9,
        momentum_decay_rate: float = 0.0,
    ) -> None:
        check = OptionChecker.of_schedule("one_cycle", optimizer)
        self.min_lrs = check.per_group("min_lr", min_lr)
        self.max_lrs = check.per_group("max_lr", max_lr)
        second_steps = num_rise_steps if num_fall_steps is None else num_fall_steps
        second_stairs = rise_stairs if fall_stairs is None else fall_stairs
        self.num_steps = (
            check.count("num_rise_steps", num_rise_steps, least=1),
            check.count("num_fall_steps", second_steps, least=0),
        )
        self.stair_counts = (
            check.count("rise_stairs", rise_stairs, least=0),
            check.count("fall_stairs", second_stairs, least=0),
        )
        self.decay_interval = check.count("decay_interval", decay_interval, least=0)
        self.decay_rate = check.number("decay_rate", decay_rate, least=0.0)
        self.momentum_decay_rate = check.number("momentum_decay_rate", momentum_decay_rate)
        self.min_momenta = check.per_group("min_momentum", min_momentum, below=1.0)
        self.max_momenta = check.per_group("max_momentum", max_momentum, below=1.0)
        self.cycle_momentum = check.flag("cycle_momentum", cycle_momentum)
        if self.cycle_momentum and "betas" not in optimizer.defaults:
            warnings.warn(
                f"one_cycle: cycle_momentum has no effect, because {type(optimizer).__name__} has no betas; "
                "set it to false",
                stacklevel=2,
            )
            self.cycle_momentum = False
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Go on by one update: set the rates, and the momentum if it is cycled."""
        super().step(epoch)
        self._set_momenta()

    def set_rates(self) -> None:
        """Give the groups their momentum, too."""
        super().set_rates()
        self._set_momenta()

    def _set_momenta(self) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self.momenta_at(self.last_epoch), strict=True):
                group["betas"] = (momentum, _CYCLED_BETA2)

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the rate of every group."""
        if step <= sum(self.num_steps):
            height = self._height(step)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.decay_rate * self._decay_intervals(step)) for low in self.min_lrs]

    def momenta_at(self, step: int) -> list[float]:
        """Return the first momentum coefficient of every group."""
        if step == 0:
            return list(self.min_momenta)
        if step <= sum(self.num_steps):
            height = self._height(step)
            return [high - (high - low) * height for low, high in zip(self.min_momenta, self.max_momenta, strict=True)]
        return [high * (1 + self.momentum_decay_rate * self._decay_intervals(step)) for high in self.max_momenta]

    def _height(self, step: int) -> float:
        """How far up the cycle is, from 0 to 1."""
        first, second = self.num_steps
        total = float(first + second)
        place = 1.0 + step / total
        place -= math.floor(place)  # in cycles; this order of rounding is DeepSpeed's
        rising = place <= first / total
        stairs = self.stair_counts[0 if rising else 1]
        if stairs > 0:  # counted in whole steps, so that the top is never missed by a rounding
            done = step % (first + second)
            whole = done * stairs // first if done <= first else (first + second - done) * stairs // second
            return whole / stairs
        return place / (first / total) if rising else (place - 1.0) / (first / total - 1.0)

    def _decay_intervals(self, step: int) -> float:
        return (step - sum(self.num_steps)) / self.decay_interval if self.decay_interval else 0.0
