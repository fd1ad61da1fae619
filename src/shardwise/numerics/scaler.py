"""The state of a loss scale; the rule is ``precision.LossScale``."""

from collections.abc import Mapping

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
        self._judged = -1  # the gradients that were judged last, by the number of backwards behind them

    def state(self) -> dict[str, float]:
        """Return what a later run needs to go on."""
        return {"scale": self.scale, "clean_steps": self._clean_steps, "tolerance": self._tolerance}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what ``state`` returned; a fixed scale stays what its rule says."""
        self._clean_steps, self._tolerance = int(state["clean_steps"]), int(state["tolerance"])
        if self._rule.fixed is None:
            self.scale = float(state["scale"])

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale."""
        self._loss_was_scaled = True
        return loss * self.scale

    def check_scaled(self, num_backwards: int) -> None:
        """Check that the gradients come from a scaled loss.

        Args:
            num_backwards: how many backwards there were; no more than at the last verdict means the same gradients.

        Raises:
            StateError: no loss was scaled since the last step.
        """
        if not self._loss_was_scaled and num_backwards != self._judged:
            raise StateError(
                "fp16 gradients need a scaled loss: call shardwise.scale_loss(model, loss).backward(), or pass "
                "Precision(loss_scale=None) to train without a scale"
            )

    def judge(self, num_backwards: int, overflow_in: str | None) -> None:
        """Follow the verdict of a step, once for the same gradients, however many optimizers use them.

        Args:
            num_backwards: how many backwards there were.
            overflow_in: where the first value is that is not finite; None: all are.

        Raises:
            NonFiniteError: the scale changes and is at its minimum already.
        """
        if num_backwards != self._judged:
            self._judged = num_backwards
            self._loss_was_scaled = False
            if overflow_in is None:
                self.after_step()
            else:
                self.after_overflow(overflow_in)

    def after_step(self) -> None:
        """Count a step without overflow."""
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
        """Count a skipped step; halve the scale once the tolerance is used up."""
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
