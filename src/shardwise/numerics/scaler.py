"""The state of a loss scale; the rule is ``precision.LossScale``."""

from torch import Tensor

from shardwise.errors import NonFiniteError, StateError
from shardwise.precision import LossScale

__all__ = ["LossScaler"]


class LossScaler:
    """Grows and shrinks one scale, the same on every rank because the verdict of each step is."""

    def __init__(self, rule: LossScale) -> None:
        self._rule = rule
        self.scale = rule.initial if rule.fixed is None else rule.fixed
        self._clean_steps = 0
        self._tolerance = rule.hysteresis
        self._loss_was_scaled = False

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale."""
        self._loss_was_scaled = True
        return loss * self.scale

    def check_scaled(self) -> None:
        """Check that the gradients come from a scaled loss.

        Raises:
            StateError: no loss was scaled since the last step.
        """
        if not self._loss_was_scaled:
            raise StateError(
                "fp16 gradients need a scaled loss: call shardwise.scale_loss(model, loss).backward(), or pass "
                "Precision(loss_scale=None) to train without a scale"
            )

    def after_step(self) -> None:
        """Count a step without overflow."""
        self._loss_was_scaled = False
        if self._rule.fixed is not None:
            return
        if self._rule.consecutive_hysteresis:
            self._tolerance = self._rule.hysteresis
        self._clean_steps += 1
        if self._clean_steps >= self._rule.growth_interval:
            self._clean_steps = 0
            self._tolerance = self._rule.hysteresis
            self.scale *= 2.0

    def after_overflow(self, where: str) -> None:
        """Count a skipped step; halve the scale once the tolerance is used up.

        Raises:
            NonFiniteError: the scale changes and is at its minimum already.
        """
        self._loss_was_scaled = False
        if self._rule.fixed is not None:
            return
        self._clean_steps = 0
        if self.scale <= self._rule.minimum:
            raise NonFiniteError(
                f"gradients overflow at the smallest loss scale {self.scale:g}; first non-finite: {where}. "
                "The loss itself is probably not finite."
            )
        self._tolerance -= 1
        if self._tolerance <= 0:
            self.scale = max(self.scale / 2.0, self._rule.minimum)
