"""Checks of the options that a user gives an optimizer or a schedule: every wrong value is a ``ConfigError``.

Owns ``OptionChecker``, which knows whose options it checks, so that each message names both.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer

from shardwise.errors import ConfigError

__all__ = ["OptionChecker", "PerGroup"]

PerGroup = float | Sequence[float]


class OptionChecker:
    """Returns checked values, or raises a ``ConfigError`` that names owner, option, expected and got.

    Args:
        owner: whose options these are, as the user writes it.
        num_groups: parameter groups of the optimizer they are for.
    """

    def __init__(self, owner: str, num_groups: int = 1) -> None:
        self._owner = owner
        self._num_groups = num_groups

    @classmethod
    def of_schedule(cls, owner: str, optimizer: object) -> "OptionChecker":
        """Return a checker for the options of a schedule that moves ``optimizer``."""
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"{owner}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return cls(owner, len(optimizer.param_groups))

    def number(
        self, name: str, value: object, *, least: float = -math.inf, most: float = math.inf, below: float = math.inf
    ) -> float:
        """Return a finite number between ``least`` and ``most``, and smaller than ``below``."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not least <= value <= most or not value < below:  # type: ignore[operator]
            bounds = [f"at least {least:g}"] if least > -math.inf else []
            bounds += [f"at most {most:g}"] if most < math.inf else []
            bounds += [f"below {below:g}"] if below < math.inf else []
            self._refuse(name, " and ".join(["a finite number", *bounds]), value)
        return float(value)  # type: ignore[arg-type]

    def per_group(self, name: str, value: object, *, below: float = math.inf) -> list[float]:
        """Return one number from 0 on for every parameter group; a single one counts for all."""
        if isinstance(value, list | tuple):
            if len(value) != self._num_groups:
                self._refuse(name, f"one number, or one for each of {self._num_groups} parameter groups", value)
            return [self.number(name, each, least=0.0, below=below) for each in value]
        return [self.number(name, value, least=0.0, below=below)] * self._num_groups

    def pair(self, name: str, value: object, *, least: float, below: float) -> tuple[float, float]:
        """Return two numbers."""
        if not isinstance(value, list | tuple) or len(value) != 2:
            self._refuse(name, "two numbers", value)
        first, second = (self.number(name, each, least=least, below=below) for each in value)
        return first, second

    def count(self, name: str, value: object, *, least: int) -> int:
        """Return a whole number; 1e3, as JSON may write it, is one."""
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if not is_whole or isinstance(value, bool) or value < least:  # type: ignore[operator]
            self._refuse(name, f"a whole number, at least {least}", value)
        return int(value)  # type: ignore[call-overload,no-any-return]

    def flag(self, name: str, value: object) -> bool:
        """Return a bool; 0 and "false" are none."""
        if not isinstance(value, bool):
            self._refuse(name, "true or false", value)
        return value

    def choice(self, name: str, value: object, allowed: Sequence[str]) -> str:
        """Return one of some words."""
        if not isinstance(value, str) or value not in allowed:
            self._refuse(name, " or ".join(repr(word) for word in allowed), value)
        return value

    def whole_training(self, total: object, warmup: object) -> int:
        """Return ``total_steps``, which is not smaller than ``num_warmup_steps``."""
        total_steps = self.count("total_steps", total, least=1)
        warmup_steps = self.count("num_warmup_steps", warmup, least=1)
        if total_steps < warmup_steps:
            raise ConfigError(
                f"{self._owner}: total_steps is {total_steps}, but the warm-up alone takes {warmup_steps} "
                "(num_warmup_steps); lengthen the training or shorten the warm-up"
            )
        return total_steps

    def _refuse(self, name: str, expected: str, got: Any) -> NoReturn:
        raise ConfigError(f"{self._owner}: {name} must be {expected}, got {got!r}")
