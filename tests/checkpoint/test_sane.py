"""Values with right hashes from which no optimizer could go on: refused before anything changes."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.doors.dcp import export_dcp, import_dcp
from shardwise.checkpoint.names import MANIFEST
from shardwise.comm.base import Comm
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError
from shardwise.optim.lion import Lion
from shardwise.testing.ranks import run_ranks

from .case import assert_same, build, state_of
from .damage import Files, read_files, seal, unseal, write_files

Make = Callable[[Any], torch.optim.Optimizer]
Tree = Any


class Small(nn.Module):
    """Parameters of several shapes, one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).tanh()) * self.scale


class Counting(torch.optim.SGD):
    """Counts its steps under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        counts: dict[Any, Any] = self.state
        counts["calls"] = counts.get("calls", 0) + 1
        return super().step(closure)


class Named(torch.optim.AdamW):
    """Another name for torch's own."""


def made(make: Make, mesh: Mapping[str, Comm] | None = None, stage: int = 2) -> tuple[nn.Module, Any]:
    return build(mesh or {"data": LocalComm()}, stage, make=lambda net: make(net.parameters()), model=Small)


def step(net: nn.Module, optimizer: Any) -> None:
    net(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path, make: Make) -> Files:
    net, optimizer = made(make)
    step(net, optimizer)
    shardwise.save_checkpoint(net, folder, tag="good")
    return read_files(folder / "good")


def edited(files: Files, edit: Callable[[Tree], Any]) -> Files:
    fields = unseal(files[MANIFEST])
    edit(fields)
    return {**files, MANIFEST: seal(fields)}


def refusal(folder: Path, files: Files, make: Make, *, fresh: bool) -> str:
    """Return why a checkpoint is refused, by a model that has made a step or by a new one; it stays as it was."""
    write_files(folder / "bad", files)
    net, optimizer = made(make)
    if not fresh:
        step(net, optimizer)
    before, options = state_of(net), copy.deepcopy([{**group, "params": 0} for group in optimizer.param_groups])
    with pytest.raises(CheckpointError) as caught:
        shardwise.load_checkpoint(net, folder, tag="bad")
    assert_same(state_of(net), before)
    assert [{**group, "params": 0} for group in optimizer.param_groups] == options
    step(net, optimizer)
    return str(caught.value)


def single(state: str, value: Any = 3.0, dtype: str = "float32") -> Callable[[Tree], None]:
    """Let one state of each parameter be one value."""

    def edit(fields: Tree) -> None:
        fields["stored"] = [item for item in fields["stored"] if item["state"] != state]
        for states in fields["values"]["optimizers"][0]["scalars"].values():
            states[state] = {"$scalar": [dtype, value]}

    return edit


def without(state: str) -> Callable[[Tree], None]:
    def edit(fields: Tree) -> None:
        fields["stored"] = [item for item in fields["stored"] if item["state"] != state]
        for states in fields["values"]["optimizers"][0]["scalars"].values():
            states.pop(state, None)

    return edit


def option(**values: Any) -> Callable[[Tree], None]:
    """Set options of the first group; None: take it away."""

    def edit(fields: Tree) -> None:
        options = fields["values"]["optimizers"][0]["groups"][0]["options"]
        options.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del options[name]

    return edit


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


MAKES: dict[str, tuple[Make, str, str]] = {  # a state of one element per element, one of one value
    "AdamW": (_adamw, "exp_avg", "step"),
    "fused": (lambda params: torch.optim.AdamW(params, fused=True), "exp_avg_sq", "step"),
    "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), "max_exp_avg_sq", "step"),
    "derived": (Named, "exp_avg", "step"),
    "NAdam": (torch.optim.NAdam, "exp_avg", "mu_product"),
    "RAdam": (torch.optim.RAdam, "exp_avg", "step"),
    "Adamax": (torch.optim.Adamax, "exp_inf", "step"),
    "Adadelta": (torch.optim.Adadelta, "acc_delta", "step"),
    "Adagrad": (torch.optim.Adagrad, "sum", "step"),
    "ASGD": (torch.optim.ASGD, "ax", "eta"),
    "Rprop": (torch.optim.Rprop, "step_size", "step"),
    "RMSprop": (lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True), "grad_avg", "step"),
}
WHOLE_ONLY: dict[str, tuple[Make, str]] = {
    "SGD": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "momentum_buffer"),
    "own step": (lambda params: Counting(params, lr=0.1, momentum=0.9), "momentum_buffer"),
    "Lion": (Lion, "exp_avg"),
}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("make", "state"),
    [each[:2] for each in MAKES.values()] + list(WHOLE_ONLY.values()),
    ids=[*MAKES, *WHOLE_ONLY],
)
def test_a_moment_of_one_value(make: Make, state: str, fresh: bool, tmp_path: Path) -> None:
    def edit(fields: Tree) -> None:
        scalars = fields["values"]["optimizers"][0]["scalars"]
        for item in fields["stored"]:
            if item["state"] == state:
                scalars.setdefault(item["name"], {})
        single(state)(fields)

    said = refusal(tmp_path, edited(saved(tmp_path, make), edit), make, fresh=fresh)
    assert f"{state} of first.weight" in said


@pytest.mark.parametrize(("make", "whole", "one"), MAKES.values(), ids=MAKES.keys())
def test_incomplete_states(make: Make, whole: str, one: str, tmp_path: Path) -> None:
    good = saved(tmp_path, make)
    for state in (whole, one):
        said = refusal(tmp_path, edited(good, without(state)), make, fresh=True)
        assert f"first.weight has no {state}" in said
    said = refusal(tmp_path, edited(good, single(one, 5, "int64")), make, fresh=True)
    assert f"{one} of first.weight" in said
    write_files(tmp_path / "good", good)
    net, optimizer = made(make)
    shardwise.load_checkpoint(net, tmp_path, tag="good")
    step(net, optimizer)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "negative rate": ({"lr": -1.0}, "Invalid learning rate"),
    "no number": ({"lr": {"$float": "nan"}}, "lr of group 0"),
    "infinite": ({"eps": {"$float": "inf"}}, "eps of group 0"),
    "betas": ({"betas": {"$tuple": [2.0, 5.0]}}, "Invalid beta"),
    "no rate": ({"lr": None}, "missing in the checkpoint: lr of group 0"),
    "state of an option": ({"amsgrad": True}, "first.weight has no max_exp_avg_sq"),
}


@pytest.mark.parametrize(("values", "told"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options_that_the_optimizer_would_refuse(values: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in refusal(tmp_path, edited(saved(tmp_path, _adamw), option(**values)), _adamw, fresh=False)


def test_a_rate_of_sgd_that_is_no_number(tmp_path: Path) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    assert "lr of group 0" in refusal(
        tmp_path, edited(saved(tmp_path, sgd), option(lr={"$float": "nan"})), sgd, fresh=True
    )


@pytest.mark.parametrize(
    "change", [{"weight_decay": False}, {"momentum": 0.0}, {"momentum": 0.9}, {"lr": torch.tensor(0.02)}]
)
def test_options_that_changed_on_the_way_load(change: dict[str, Any], tmp_path: Path) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.5 if change.get("momentum") == 0.0 else 0.0)

    def body(mesh: Mapping[str, Comm]) -> None:
        net, optimizer = made(sgd, mesh)
        step(net, optimizer)
        optimizer.param_groups[0].update(copy.deepcopy(change))
        shardwise.save_checkpoint(net, tmp_path, tag="a")
        other, again = made(sgd, mesh)
        shardwise.load_checkpoint(other, tmp_path, tag="a")
        for _ in range(2):
            step(net, optimizer)
            step(other, again)
        assert_same(state_of(other), state_of(net))

    run_ranks(2, body)


def test_state_under_other_keys_goes_back_too(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, optimizer = made(lambda params: Counting(params, lr=0.1, momentum=0.9), mesh)
        shardwise.save_checkpoint(net, tmp_path, tag="start")
        step(net, optimizer)
        shardwise.save_checkpoint(net, tmp_path, tag="one")
        step(net, optimizer)
        assert "momentum_buffer" in shardwise.full_optimizer_state(net)["first.weight"]
        shardwise.load_checkpoint(net, tmp_path, tag="one")
        assert optimizer.state["calls"] == 1
        shardwise.load_checkpoint(net, tmp_path, tag="start")
        assert "calls" not in optimizer.state

    run_ranks(2, body)


def test_optimizers_that_were_sharded_in_another_order(tmp_path: Path) -> None:
    base = Small()

    def body(mesh: Mapping[str, Comm]) -> None:
        def two(order: tuple[str, ...]) -> tuple[nn.Module, dict[str, Any]]:
            net = shardwise.shard(copy.deepcopy(base), dict(mesh), units=nn.Linear, stage=2)
            rates = {"first": 0.1, "second": 0.2}
            found = {}
            for name in order:
                own = torch.optim.AdamW(net.get_submodule(name).parameters(), lr=rates[name])
                found[name] = shardwise.shard_optimizer(own, net, partial=True)
            return net, found

        net, saved_by = two(("first", "second"))
        net(torch.ones(4, 3)).square().mean().backward()
        for optimizer in saved_by.values():
            optimizer.step()
        shardwise.save_checkpoint(net, tmp_path, tag="two")
        other, loaded_by = two(("second", "first"))
        for optimizer in loaded_by.values():
            optimizer.param_groups[0]["lr"] = 7.0
        loaded = shardwise.load_checkpoint(other, tmp_path)
        assert (loaded.fresh, loaded.dropped) == ((), ())
        assert_same(state_of(other), state_of(net))
        assert [loaded_by[name].param_groups[0]["lr"] for name in ("first", "second")] == [0.1, 0.2]

    run_ranks(2, body)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_in_inference_mode_can_be_trained(stage: int, fresh: bool, tmp_path: Path) -> None:
    base = Small()

    def body(mesh: Mapping[str, Comm]) -> None:
        def built() -> tuple[nn.Module, Any]:
            net = shardwise.shard(copy.deepcopy(base), dict(mesh), units=nn.Linear, stage=stage)
            own = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.05))
            return net, shardwise.shard_optimizer(own, net)

        net, optimizer = built()
        step(net, optimizer)
        shardwise.save_checkpoint(net, tmp_path, tag="a")
        other, again = built()
        if not fresh:
            step(other, again)
            step(other, again)
        with torch.inference_mode():
            shardwise.load_checkpoint(other, tmp_path, tag="a")
        assert not [value for states in again.state.values() for value in states.values() if value.is_inference()]
        for _ in range(2):
            step(net, optimizer)
            step(other, again)
        assert_same(state_of(other), state_of(net))
        shardwise.load_checkpoint(other, tmp_path, tag="a")

    run_ranks(2, body)


def test_a_factor_of_a_parameter_without_dimensions_comes_in_as_one_value(tmp_path: Path) -> None:
    net, optimizer = made(torch.optim.NAdam)
    step(net, optimizer)
    shardwise.save_checkpoint(net, tmp_path, tag="a")
    export_dcp(tmp_path / "a", tmp_path / "out")
    import_dcp(tmp_path / "out", tmp_path / "in", optimizer="NAdam")
    other, again = made(torch.optim.NAdam)
    shardwise.load_checkpoint(other, tmp_path / "in")
    for _ in range(2):
        step(net, optimizer)
        step(other, again)
    assert_same(state_of(other), state_of(net))
