"""Lion: an optimizer that moves every element by the sign of a momentum.

Element-wise, so it works on fragments; torch 2.13 has none. Read ``families.py`` for what is known of optimizers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.options import OptionChecker

__all__ = ["Lion"]


class Lion(Optimizer):
    """Evolved sign momentum with decoupled weight decay.

    For parameter p, gradient g and momentum m::

        p <- p * (1 - lr * weight_decay) - lr * sign(betas[0] * m + (1 - betas[0]) * g)
        m <- betas[1] * m + (1 - betas[1]) * g

    The momentum ``exp_avg`` has the parameter's dtype; it is the only state, half of Adam's. Rates are 3 to 10 times
    smaller than Adam's, weight decays as much larger.

    Args:
        params: parameters, or groups of them, as for any torch optimizer.
        lr: size of a move.
        betas: weight of the momentum in the move, and its decay.
        weight_decay: decoupled, as in AdamW.

    Raises:
        ConfigError: a value is out of range.

    Source: arXiv:2302.06675, algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its options."""
        check = OptionChecker("Lion")
        options = {**self.defaults, **param_group}
        check.number("lr", float(options["lr"]) if isinstance(options["lr"], Tensor) else options["lr"], least=0.0)
        check.number("weight_decay", options["weight_decay"], least=0.0)
        check.pair("betas", options["betas"], least=0.0, below=1.0)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update; return the closure's loss, if there is one.

        Raises:
            ConfigError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [param for param in group["params"] if param.grad is not None]
            for param in moved:
                if param.grad.is_sparse:
                    raise ConfigError(
                        "Lion does not work on sparse gradients; use dense ones, or torch.optim.SparseAdam"
                    )
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            for params in _alike(moved):
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        grads = [param.grad for param in params if param.grad is not None]
        momenta = [self.state[param]["exp_avg"] for param in params]
        moves = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(moves, grads, alpha=1 - beta1)
        torch._foreach_sign_(moves)
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, moves, alpha=-lr)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, grads, alpha=1 - beta2)


def _alike(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group parameters by device and dtype: torch's foreach functions are fast on like tensors only."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        groups.setdefault((param.device, param.dtype), []).append(param)
    return list(groups.values())
