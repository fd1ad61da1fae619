"""States of schedulers: every one that torch has passes, at any point, and what a next step cannot use is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.checkpoint.schedulers import check_scheduler
from shardwise.errors import CheckpointError

Make = Callable[[torch.optim.Optimizer], Any]


class Rate:
    """A rate whose state is an attribute."""

    def __init__(self) -> None:
        self.factor = 0.9

    def __call__(self, step: float) -> float:
        return self.factor**step


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    inner = [schedulers.ConstantLR(optimizer), schedulers.LinearLR(optimizer), schedulers.MultiStepLR(optimizer, [3])]
    return schedulers.SequentialLR(optimizer, inner, [2, 4])


MAKERS: dict[str, Make] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "lambda with a state": lambda o: schedulers.LambdaLR(o, [Rate(), Rate()]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: schedulers.StepLR(o, 3),
    "multistep": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "multistep without milestones": lambda o: schedulers.MultiStepLR(o, []),
    "constant": lambda o: schedulers.ConstantLR(o),
    "constant of no steps": lambda o: schedulers.ConstantLR(o, total_iters=0),
    "linear": lambda o: schedulers.LinearLR(o),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "sequential": sequential,
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), sequential(o)]),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
    "cyclic with a function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, scale_fn=Rate(), cycle_momentum=False),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "averaging": lambda o: SWALR(o, 0.05),
}


def made(make: Make, num_steps: int = 0) -> Any:
    """Return a scheduler of two groups after some steps."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for number in range(num_steps):
        optimizer.step()
        given = [0.5 * number] if isinstance(scheduler, schedulers.CosineAnnealingWarmRestarts) else []
        scheduler.step(*([1.0 + number] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else given))
    return scheduler


def kept(scheduler: Any) -> Any:
    """Return a state as a checkpoint gives it back."""
    return from_plain(json.loads(json.dumps(to_plain(scheduler.state_dict(), "scheduler"))))


@pytest.mark.parametrize("num_steps", [1, 5, 12])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_every_scheduler_goes_on_and_goes_back(make: Make, num_steps: int) -> None:
    new, old = made(make), made(make, num_steps)
    check_scheduler(old, kept(new))
    check_scheduler(new, kept(old))
    new.load_state_dict(kept(old))
    assert new.get_last_lr() == old.get_last_lr()


REFUSED: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "no position": ("step", lambda state: state.pop("last_epoch"), "no last_epoch"),
    "position that is a text": ("exponential", lambda state: state.update(last_epoch="2"), "last_epoch"),
    "position that is infinite": ("cosine", lambda state: state.update(last_epoch=float("inf")), "last_epoch"),
    "no length": ("cosine", lambda state: state.update(T_max=0), "T_max"),
    "rates that are texts": ("linear", lambda state: state.update(base_lrs=["0.1", "0.3"]), "base_lrs"),
    "no number": ("plateau", lambda state: state.update(factor=float("nan")), "factor"),
    "milestones that are a dictionary": ("multistep", lambda state: state.update(milestones={2: 1}), "milestones"),
    "milestones that are texts": (
        "multistep",
        lambda state: state.update(milestones=type(state["milestones"])("ab")),
        "milestones",
    ),
    "phases that lack a part": ("one cycle", lambda state: state["_schedule_phases"][0].pop("end_lr"), "_schedule_p"),
    "a method": ("chained", lambda state: state["_schedulers"][1]["_schedulers"][2].update(get_lr=3), "get_lr"),
    "a text within": ("chained", lambda state: state["_schedulers"][1]["_schedulers"][2].update(gamma="x"), "gamma"),
    "too few schedulers": ("sequential", lambda state: state["_schedulers"].pop(), "3 schedulers"),
    "schedulers that are a number": ("sequential", lambda state: state.update(_schedulers=3), "3 schedulers"),
    "schedulers that are numbers": ("sequential", lambda state: state.update(_schedulers=[1, 2, 3]), "dictionary"),
}


@pytest.mark.parametrize(("name", "damage", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_next_step_cannot_use_is_refused(name: str, damage: Callable[[Any], object], told: str) -> None:
    state = kept(made(MAKERS[name], 5))
    damage(state)
    with pytest.raises(CheckpointError, match=told):
        check_scheduler(made(MAKERS[name]), state)


def test_what_is_no_scheduler_of_torch_knows_itself() -> None:
    class Mine(schedulers.StepLR):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.history: Any = 0

    check_scheduler(made(lambda o: Mine(o, 3)), {"last_epoch": 3, "history": ["a"]})
    with pytest.raises(CheckpointError, match="last_epoch"):
        check_scheduler(made(lambda o: Mine(o, 3)), {"last_epoch": True})
    check_scheduler(object(), {"last_epoch": "any"})
