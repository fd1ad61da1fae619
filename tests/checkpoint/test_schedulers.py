"""States of schedulers: every one that torch has passes, at any point, and what a next step cannot use is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import shardwise
from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.checkpoint.schedulers import check_scheduler
from shardwise.errors import CheckpointError
from shardwise.optim.cycles import LRRangeTest
from shardwise.optim.warmups import WarmupLR

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
    "ours": lambda o: WarmupLR(o, num_warmup_steps=4),
    "ours after one of torch": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), WarmupLR(o, num_warmup_steps=4), LRRangeTest(o)], [2, 8]
    ),
    "ours deep within torch's": lambda o: schedulers.SequentialLR(
        o, [schedulers.SequentialLR(o, [LRRangeTest(o), WarmupLR(o)], [2]), WarmupLR(o)], [8]
    ),
    "numbers of numpy": lambda o: schedulers.StepLR(o, numpy.int64(3), numpy.float32(0.5)),  # type: ignore[arg-type]
    "milestones of numpy": lambda o: schedulers.MultiStepLR(o, numpy.array([3, 6])),  # type: ignore[arg-type]
}


def made(make: Make, num_steps: int = 0, num_groups: int = 2) -> Any:
    """Return a scheduler after some steps."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 + 0.2 * number} for number in range(num_groups)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = make(optimizer)
    for number in range(num_steps):
        optimizer.step()
        given = [0.5 * number] if isinstance(scheduler, schedulers.CosineAnnealingWarmRestarts) else []
        scheduler.step(*([1.0 + number] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else given))
    return scheduler


def kept(scheduler: Any) -> Any:
    """Return a state as a checkpoint gives it back."""
    return from_plain(json.loads(json.dumps(to_plain(scheduler.state_dict(), "scheduler"))))


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's own sequences step what has not begun
@pytest.mark.parametrize("num_steps", [1, 5, 12])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_every_scheduler_goes_on_and_goes_back(make: Make, num_steps: int) -> None:
    new, old = made(make), made(make, num_steps)
    check_scheduler(old, kept(new))
    check_scheduler(new, kept(old))
    new.load_state_dict(kept(old))
    assert new.get_last_lr() == old.get_last_lr()


CHANGED: dict[str, tuple[Make, Make]] = {
    "a length of 0": (lambda o: schedulers.LinearLR(o, total_iters=0), lambda o: schedulers.LinearLR(o)),
    "an infinite length": (lambda o: schedulers.StepLR(o, math.inf), lambda o: schedulers.StepLR(o, 3)),  # type: ignore[arg-type]
    "a float": (lambda o: schedulers.CosineAnnealingLR(o, 10.0), lambda o: schedulers.CosineAnnealingLR(o, 12)),  # type: ignore[arg-type]
    "least rates": (
        lambda o: schedulers.ReduceLROnPlateau(o, min_lr=[0.0, 0.1]),
        lambda o: schedulers.ReduceLROnPlateau(o),
    ),
    "three phases": (
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20, three_phase=True),
        lambda o: schedulers.OneCycleLR(o, 0.1, epochs=4, steps_per_epoch=5),
    ),
    "a truth that is a number": (
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, cycle_momentum=1),  # type: ignore[arg-type]
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
    ),
    "no milestones": (lambda o: schedulers.MultiStepLR(o, []), lambda o: schedulers.MultiStepLR(o, [2, 2, 5])),
}


@pytest.mark.parametrize(("one", "other"), CHANGED.values(), ids=CHANGED.keys())
def test_changed_options_are_those_of_the_checkpoint_as_torch_has_it(one: Make, other: Make) -> None:
    for old, new in ((made(one, 5), made(other)), (made(other, 5), made(one))):
        check_scheduler(new, kept(old))
        new.load_state_dict(kept(old))
        assert new.get_last_lr() == old.get_last_lr()


@pytest.mark.parametrize("name", ["lambda", "cosine", "warm restarts", "cyclic", "sequential", "least rates"])
def test_another_number_of_groups_is_refused_where_each_has_its_rate(name: str) -> None:
    make = CHANGED[name][0] if name in CHANGED else MAKERS[name]
    scheduler, state = made(MAKERS["plateau"] if name in CHANGED else make, num_groups=3), kept(made(make, 3))
    with pytest.raises(CheckpointError, match=r"is one of 2 groups \(.*\), not of 3"):
        check_scheduler(scheduler, state)


@pytest.mark.parametrize(
    "name", ["multiplicative", "step", "multistep", "exponential", "linear", "plateau", "averaging"]
)
def test_another_number_of_groups_is_taken_where_rates_follow_from_rates(name: str) -> None:
    scheduler, state = made(MAKERS[name], num_groups=3), kept(made(MAKERS[name], 5))
    check_scheduler(scheduler, state)
    scheduler.load_state_dict(state)
    for number in range(12):
        scheduler.optimizer.step()
        scheduler.step(*([1.0 + number] if name == "plateau" else []))


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
    "too many milestones": ("sequential", lambda state: state["_milestones"].append(9), "other milestones"),
    "milestones that are a number": ("sequential", lambda state: state.update(_milestones=9), "_milestones"),
    "counts that are texts": ("multistep", lambda state: state["milestones"].__setitem__(6, "x"), "milestones"),
    "counts without end": ("multistep", lambda state: state["milestones"].__setitem__(6, 3 * 10**7), "milestones"),
    "no phases": ("one cycle", lambda state: state.update(_schedule_phases=[]), "_schedule_phases"),
    "a phase of nothing": ("one cycle", lambda state: state["_schedule_phases"][0].update(end_lr="x"), "_schedule_p"),
    "an endless phase": (
        "one cycle",
        lambda state: state["_schedule_phases"][0].update(end_step=-math.inf),
        "_schedule_phases",
    ),
    "another curve": ("one cycle", lambda state: state.update(_anneal_func_type="x"), "_anneal_func_type"),
    "a rate without end": ("cosine", lambda state: state.update(eta_min=math.inf), "eta_min"),
    "a rate that is a truth": ("cosine", lambda state: state.update(eta_min=torch.tensor(True)), "eta_min"),
    "a last rate without end": ("step", lambda state: state.update(_last_lr=[math.inf, 0.1]), "_last_lr"),
    "no base rates": ("cosine", lambda state: state.update(base_lrs=[]), "base_lrs"),
    "a cycle of no rise": ("cyclic", lambda state: state.update(step_ratio=0), "step_ratio"),
    "momentum that is no option": ("cyclic with a function", lambda state: state.update(cycle_momentum=True), "cycle"),
    "another optimizer's momentum": ("one cycle", lambda state: state.update(use_beta1=True), "use_beta1"),
    "schedulers that are numbers": ("sequential", lambda state: state.update(_schedulers=[1, 2, 3]), "dictionary"),
}


@pytest.mark.parametrize(("name", "damage", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_next_step_cannot_use_is_refused(name: str, damage: Callable[[Any], object], told: str) -> None:
    state = kept(made(MAKERS[name], 5))
    damage(state)
    with pytest.raises(CheckpointError, match=told):
        check_scheduler(made(MAKERS[name]), state)


class Remembering(schedulers.StepLR):
    """A scheduler of a user's that loads as torch does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 3)
        self.history: Any = 0


class Telling(schedulers.StepLR):
    """A scheduler of a user's that tells what it likes."""

    kind: Any = float

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 3)
        self.kind = "a"

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.last_epoch, "kind": "b"}


class OfItsOwn(schedulers.LRScheduler):
    """A scheduler of a user's with a state of its own, which holds a class and itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.made, self.outer = dict, self

    def get_lr(self) -> list[Any]:
        return [rate * 0.9**self.last_epoch for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["step"]


def test_classes_of_users_know_themselves() -> None:
    check_scheduler(made(Remembering), {"last_epoch": 3, "history": ["a"]})
    for key, value in (("last_epoch", True), ("_last_lr", ["x"]), ("_last_lr", None)):
        with pytest.raises(CheckpointError, match=key):
            check_scheduler(made(Remembering), {"last_epoch": 3, key: value})
    check_scheduler(made(Telling), kept(made(Telling, 3)))
    with pytest.raises(CheckpointError, match="get_lr"):
        check_scheduler(made(Telling), {"get_lr": 3})
    check_scheduler(made(OfItsOwn), kept(made(OfItsOwn, 3)))
    inside: Make = lambda o: schedulers.SequentialLR(o, [OfItsOwn(o), Remembering(o)], [2])  # noqa: E731
    check_scheduler(made(inside), kept(made(inside, 3)))
    check_scheduler(object(), {"last_epoch": "any"})


class Refusing:
    """An object that takes no state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("not today")


def test_a_refused_load_leaves_schedulers_within_schedulers_as_they_were(tmp_path: Path) -> None:
    def build(num_steps: int) -> tuple[nn.Module, Any, Rate]:
        net = shardwise.shard(nn.Linear(2, 2), {}, stage=0)
        optimizer = shardwise.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        rate = Rate()
        inner = [schedulers.LambdaLR(optimizer, rate), WarmupLR(optimizer, num_warmup_steps=4), OfItsOwn(optimizer)]
        scheduler = schedulers.SequentialLR(optimizer, inner, [2, 4])
        for _ in range(num_steps):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        return net, scheduler, rate

    net, scheduler, rate = build(3)
    rate.more = 5  # type: ignore[attr-defined]
    shardwise.save_checkpoint(net, tmp_path, objects={"scheduler": scheduler, "other": Refusing()})
    net, scheduler, rate = build(1)
    before = scheduler.state_dict(), dict(vars(rate))
    with pytest.raises(CheckpointError, match="not today"):
        shardwise.load_checkpoint(net, tmp_path, objects={"scheduler": scheduler, "other": Refusing()})
    assert (scheduler.state_dict(), vars(rate)) == before
    shardwise.save_checkpoint(net, tmp_path / "b", objects={"scheduler": scheduler})
    net, scheduler, rate = build(0)
    shardwise.load_checkpoint(net, tmp_path / "b", objects={"scheduler": scheduler})
    assert scheduler.state_dict() == before[0]
