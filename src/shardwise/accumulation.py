"""The accumulation window: how many micro-batches make one update, and where in it the loop stands."""

import math
from typing import Any

from torch import Tensor

from shardwise.config.resolve import Batch
from shardwise.errors import ConfigError, StateError

__all__ = ["AccumulationWindow", "checked_count", "is_divided_by"]


class AccumulationWindow:
    """Counts the micro-batches of one update.

    Attributes:
        batch: samples per update and micro-batch, and the window's length.
        num_steps: calls of ``step`` since the last update.
        num_backwards: backwards since the last ``step``.
        by_hand: what the caller said about the boundary; None: count.
    """

    def __init__(self, batch: Batch, num_ranks: int) -> None:
        self.batch = batch
        self.num_steps = 0
        self.num_backwards = 0
        self.by_hand: bool | None = None
        self._num_ranks = num_ranks

    @property
    def length(self) -> int:
        """Micro-batches per update."""
        return self.batch.accumulation

    @property
    def is_open(self) -> bool:
        """Whether anything happened since the last update."""
        return bool(self.num_steps or self.num_backwards)

    @property
    def ends_next(self) -> bool:
        """Whether the next ``step`` updates."""
        return self.num_steps + 1 >= self.length if self.by_hand is None else self.by_hand

    def advance(self, *, updated: bool) -> None:
        """Count one ``step``."""
        self.num_steps = 0 if updated else self.num_steps + 1
        self.num_backwards = 0

    def restart(self) -> None:
        """Forget the micro-batches since the last update."""
        self.num_steps = self.num_backwards = 0

    def resize(self, *, micro: int | None = None, length: int | None = None, size: int | None = None) -> None:
        """Change the micro-batch, the window's length, or the samples per update (which changes the length).

        Raises:
            ConfigError: not a positive whole number, or ``size`` is no multiple of the micro-batch times the ranks.
            StateError: inside a window.
        """
        for name, value in (("micro-batch", micro), ("window", length), ("batch", size)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"the {name} must be a positive whole number, got {value!r}")
        if self.is_open:
            raise StateError("the batch size can change between updates only, not inside an accumulation window")
        micro, length = micro or self.batch.micro, length or self.length
        if size is not None:
            per_step = micro * self._num_ranks
            if size % per_step:
                raise ConfigError(
                    f"the batch size {size} must be a multiple of micro-batch x ranks = {micro} x {self._num_ranks} = "
                    f"{per_step}"
                )
            length = size // per_step
        self.batch = Batch(size=micro * length * self._num_ranks, micro=micro, accumulation=length)


def checked_count(count: Any) -> float:
    """Return a count of samples or tokens as a number.

    Raises:
        ConfigError: it is no finite number >= 0.
    """
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    number = float(count) if is_number and not isinstance(count, bool) else math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"backward: count must be a number >= 0, got {count!r}")
    return number


def is_divided_by(loss: Tensor, window: int) -> bool:
    """Whether the last thing that was done to a loss is a division by the window (or a product with its inverse)."""
    node: Any = loss.grad_fn
    kind = type(node).__name__
    factor = getattr(node, "_saved_other", None) if kind.startswith(("DivBackward", "MulBackward")) else None
    if not isinstance(factor, Tensor) or factor.numel() != 1:
        return False
    value = float(factor)
    return value == window if kind.startswith("Div") else math.isclose(value, 1.0 / window)
