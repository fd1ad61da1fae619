"""What all learning-rate schedules have in common: a closed form of the number of updates made so far.

Over ``torch.optim.lr_scheduler.LRScheduler``, so several parameter groups and tensors as learning rates work as in
torch. The engine steps a schedule once per applied update. Read ``cycles.py`` and ``warmups.py`` next.
"""

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import StateError

__all__ = ["DEEPEST", "ClosedForm"]

_MOST = 1 << 62
DEEPEST = 64  # schedulers within torch's SequentialLR, which takes one from the count of those that have not begun

# [Note: step 0]
# Building a schedule sets the rate of the first update. The values are those of DeepSpeed 0.19.8, whose formulas have
# their origin one update later: it counts from -1, and at -1 the warm-ups answer with a constant of their own. Here
# ``step`` is the number of updates made so far, and ``index``, which is ``step - 1``, is DeepSpeed's count. So a
# warm-up makes its first two updates at the lowest rate.


class ClosedForm(LRScheduler):
    """A schedule whose rates depend on the number of updates alone.

    ``state_dict`` holds the position only, and is plain data; the options are those of construction, so that a
    changed configuration is not overruled by an old checkpoint.
    """

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the rate of every parameter group for the update made after ``step`` others."""
        raise NotImplementedError

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates at the present step."""
        return self.lrs_at(self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain numbers and strings."""
        return {
            "schedule": type(self).__name__,
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "last_lr": [float(lr) for lr in self.get_last_lr()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; ``set_rates`` gives the optimizer what follows from it.

        Raises:
            StateError: the state is that of another schedule or of another number of groups, or no position.
        """
        found, expected = state_dict.get("schedule"), type(self).__name__
        if found != expected:
            raise StateError(f"scheduler.load_state_dict: the state is of {found}, this scheduler is {expected}")
        for key in ("last_epoch", "step_count"):
            count = state_dict.get(key)
            if type(count) is not int or not -DEEPEST <= count < _MOST:
                raise StateError(f"scheduler.load_state_dict: {key} is {count!r:.80}, no count")
        last_lr = state_dict.get("last_lr")
        if not isinstance(last_lr, list | tuple) or not all(
            type(r) in (int, float) and abs(r) < _MOST for r in last_lr
        ):
            raise StateError(f"scheduler.load_state_dict: last_lr is {last_lr!r:.80}, no list of numbers")
        num_groups = len(self.optimizer.param_groups)
        if len(last_lr) != num_groups:
            raise StateError(
                f"scheduler.load_state_dict: the state has {len(last_lr)} parameter groups, the optimizer has "
                f"{num_groups}"
            )
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self._last_lr = list(last_lr)

    def set_rates(self) -> None:
        """Give the optimizer's groups what this schedule has for the present step, whatever they hold."""
        for group, rate in zip(self.optimizer.param_groups, self.lrs_at(max(self.last_epoch, 0)), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
