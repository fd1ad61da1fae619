"""What a checkpoint keeps beside parameters and moments; what it cannot keep or give back is refused by name."""

import json
import math
import shutil
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint.doors.compare import compare
from shardwise.checkpoint.doors.dcp import export_dcp, import_dcp
from shardwise.checkpoint.doors.huggingface import export_huggingface, import_huggingface
from shardwise.checkpoint.doors.torchfile import export_torch, import_torch
from shardwise.checkpoint.folder import find_checkpoints, newest_whole
from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.base import Comm
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError, ConfigError, RankMismatchError, StateError
from shardwise.testing.ranks import run_ranks

from .case import build


class Small(nn.Module):
    """Two layers and whatever a test puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows of two."""
        return self.second(self.first(rows).tanh())


def step(net: nn.Module, optimizer: Any) -> None:
    net(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(**options: Any) -> tuple[nn.Module, Any]:
    return build({"data": LocalComm()}, 3, model=Small, make=lambda net: torch.optim.Adam(net.parameters()), **options)


def test_buffers_that_only_one_rank_has_are_kept(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> list[str]:
        net, _ = build(mesh, 3, model=Small, make=lambda net: torch.optim.SGD(net.parameters()))
        rank = mesh["data"].rank
        net.register_buffer("both", torch.arange(3) + rank)
        if rank == 1:
            net.register_buffer("cache", torch.ones(4))
        shardwise.save_checkpoint(net, tmp_path, tag="one")
        net.both.zero_()
        loaded = shardwise.load_checkpoint(net, tmp_path, strict=False)
        assert torch.equal(net.both, torch.arange(3) + rank)
        return list(loaded.unexpected)

    assert run_ranks(2, body, timeout=20) == [["cache"], []]
    verify_files(tmp_path / "one")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_save_inside_unsharded_is_refused(stage: int, tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, stage)
        with shardwise.unsharded(net), pytest.raises(StateError, match="inside unsharded"):
            shardwise.save_checkpoint(net, tmp_path)

    run_ranks(2, body, timeout=20)
    assert not list(tmp_path.iterdir())


class Counting(torch.optim.SGD):
    """Counts its steps under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        """Count and step."""
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def test_state_under_other_keys_comes_back(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        return build({"data": LocalComm()}, 2, model=Small, make=lambda net: Counting(net.parameters(), lr=0.1))

    net, optimizer = made()
    for _ in range(3):
        step(net, optimizer)
    shardwise.save_checkpoint(net, tmp_path)
    net, optimizer = made()
    shardwise.load_checkpoint(net, tmp_path)
    assert optimizer.state["calls"] == 3
    optimizer.state[("a", 1)] = 2
    with pytest.raises(ConfigError, match=r"neither parameters nor texts: \[\('a', 1\)\]"):
        shardwise.save_checkpoint(net, tmp_path, tag="two")


def test_parameters_frozen_in_mid_run_may_be_left_out(tmp_path: Path) -> None:
    net, optimizer = alone()
    step(net, optimizer)
    net.first.weight.requires_grad_(False)
    step(net, optimizer)
    shardwise.save_checkpoint(net, tmp_path, exclude_frozen=True)
    net, _ = alone()
    with pytest.warns(UserWarning, match="first.weight are new to the optimizer"):
        loaded = shardwise.load_checkpoint(net, tmp_path, strict=False)
    assert loaded.missing == loaded.fresh == ("first.weight",)


def test_state_of_a_parameter_that_is_frozen_now_is_not_called_dropped(tmp_path: Path) -> None:
    net, optimizer = alone()
    step(net, optimizer)
    shardwise.save_checkpoint(net, tmp_path)
    net, _ = alone()
    net.first.weight.requires_grad_(False)
    assert shardwise.load_checkpoint(net, tmp_path).dropped == ()
    assert "first.weight" in shardwise.full_optimizer_state(net)


class WithBuffer(Small):
    """Has one buffer more."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("extra", buffer)


def with_buffer(buffer: Tensor) -> nn.Module:
    return build({"data": LocalComm()}, 3, model=lambda: WithBuffer(buffer))[0]


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (torch.ones(1).expand(3), torch.zeros(1).expand(3), "extra repeats its elements"),
        (torch.tensor([1.5]), torch.zeros(1, dtype=torch.uint8), "of another kind: extra F32 for torch.uint8"),
        (torch.tensor([300]), torch.zeros(1, dtype=torch.uint8), "of another kind: extra I64 for torch.uint8"),
        (torch.tensor([3]), torch.zeros(1), "of another kind: extra I64"),
    ],
)
def test_buffers_that_cannot_take_their_values_are_named(
    saved: Tensor, here: Tensor, text: str, tmp_path: Path
) -> None:
    shardwise.save_checkpoint(with_buffer(saved), tmp_path)
    net = with_buffer(here)
    before = {name: tensor.clone() for name, tensor in shardwise.full_state_dict(net).items()}
    with pytest.raises(CheckpointError, match=text):
        shardwise.load_checkpoint(net, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in shardwise.full_state_dict(net).items())


class Masked(Small):
    """Two layers and one buffer, or two equal ones; the layers in either order."""

    def __init__(self, *, shared: bool = True, swapped: bool = False, second: float = 0.0) -> None:
        super().__init__()
        mask = torch.arange(4.0)
        self.first.register_buffer("mask", mask)
        self.second.register_buffer("mask", mask if shared else mask + second)
        if swapped:
            self.first = self._modules.pop("first")


@pytest.mark.parametrize("saved", [{}, {"swapped": True}, {"shared": False}])
@pytest.mark.parametrize("here", [{}, {"swapped": True}, {"shared": False}])
def test_a_buffer_under_two_names_loads_under_either(
    saved: dict[str, bool], here: dict[str, bool], tmp_path: Path
) -> None:
    def made(options: dict[str, bool]) -> nn.Module:
        return build({"data": LocalComm()}, 3, model=lambda: Masked(**options))[0]

    net = made(saved)
    net.first.mask += 1
    if not saved.get("shared", True):
        net.second.mask += 1
    shardwise.save_checkpoint(net, tmp_path / "run")
    found = made(here)
    assert shardwise.load_checkpoint(found, tmp_path / "run").unexpected == ()
    assert torch.equal(found.first.mask, net.first.mask)
    assert torch.equal(found.second.mask, net.first.mask)

    path = tmp_path / "run" / "step-0"
    export_torch(path, tmp_path / "out.pt")
    Masked().load_state_dict(torch.load(tmp_path / "out.pt"))
    export_huggingface(path, tmp_path / "hf")
    export_dcp(path, tmp_path / "dcp")
    import_torch(tmp_path / "out.pt", tmp_path / "again", "torch")
    import_huggingface(tmp_path / "hf", tmp_path / "again", "hf")
    import_dcp(tmp_path / "dcp", tmp_path / "again", "dcp")
    for tag in ("torch", "hf", "dcp"):
        found = made(here)
        shardwise.load_checkpoint(found, tmp_path / "again", tag=tag, weights_only=True)
        assert torch.equal(found.second.mask, net.first.mask)


def test_two_buffers_of_unlike_values_are_not_one(tmp_path: Path) -> None:
    shardwise.save_checkpoint(
        build({"data": LocalComm()}, 3, model=lambda: Masked(shared=False, second=1))[0], tmp_path
    )
    net = build({"data": LocalComm()}, 3, model=Masked)[0]
    with pytest.raises(CheckpointError, match=r"unlike values in the checkpoint: first.mask and second.mask"):
        shardwise.load_checkpoint(net, tmp_path)
    assert shardwise.load_checkpoint(net, tmp_path, strict=False).unexpected == ()


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (torch.tensor([1 + 2j, 3 - 1j]), torch.zeros(2, dtype=torch.complex64).conj()),
        (torch._neg_view(torch.ones(3)), torch._neg_view(torch.zeros(3))),
        (torch.tensor([3], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)),
        (torch.tensor([0.5], dtype=torch.float64), torch.zeros(1)),
    ],
)
def test_buffers_take_values_of_like_kinds(saved: Tensor, here: Tensor, tmp_path: Path) -> None:
    shardwise.save_checkpoint(with_buffer(saved), tmp_path)
    net = with_buffer(here)
    shardwise.load_checkpoint(net, tmp_path)
    assert torch.equal(net.extra.resolve_conj(), saved.to(here.dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_buffers_leave_and_come_in_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[1 + 2j, 3 - 1j, 0]], dtype=dtype)
    shardwise.save_checkpoint(with_buffer(values), tmp_path / "run")
    path = tmp_path / "run" / "step-0"
    export_torch(path, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["extra"], values)
    import_torch(tmp_path / "out.pt", tmp_path / "again", "torch")
    export_dcp(path, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "again", "dcp")
    if dtype is torch.complex64:
        export_huggingface(path, tmp_path / "hf")
        import_huggingface(tmp_path / "hf", tmp_path / "again", "hf")
    else:
        with pytest.raises(CheckpointError, match="extra: safetensors has no such complex dtype"):
            export_huggingface(path, tmp_path / "hf")
    for found in find_checkpoints(tmp_path / "again"):
        net = with_buffer(torch.zeros(1, 3, dtype=dtype))
        shardwise.load_checkpoint(net, tmp_path / "again", tag=found.tag, weights_only=True)
        assert torch.equal(net.extra, values)


class Stating(Small):
    """Says an extra state."""

    seen = 7

    def get_extra_state(self) -> Any:
        """Return a number."""
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.seen = state["seen"]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [(Stating, Small, "extra state not in the model: the model"), (Small, Stating, "extra state missing")],
)
def test_extra_state_is_matched_by_name(first: Any, second: Any, text: str, tmp_path: Path) -> None:
    shardwise.save_checkpoint(build({"data": LocalComm()}, 3, model=first)[0], tmp_path)
    net, _ = build({"data": LocalComm()}, 3, model=second)
    with pytest.raises(CheckpointError, match=text):
        shardwise.load_checkpoint(net, tmp_path)
    shardwise.load_checkpoint(net, tmp_path, strict=False)


class Refusing:
    """Takes no state on one rank."""

    def __init__(self, number: int, *, refuses: bool) -> None:
        self.number = number
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it, or break half-way."""
        self.number = -1
        if self.refuses:
            raise ValueError("no")
        self.number = state["number"]


def test_an_object_that_refuses_its_state_is_left_as_it_was(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> int:
        net, _ = build(mesh, 3)
        kept = Refusing(3, refuses=False)
        shardwise.save_checkpoint(net, tmp_path, objects={"it": kept})
        other = Refusing(7, refuses=mesh["data"].rank == 1)
        with pytest.raises(CheckpointError, match="rank 1: a state was refused: ValueError: no"):
            shardwise.load_checkpoint(net, tmp_path, objects={"it": other})
        return other.number

    assert run_ranks(2, body, timeout=20) == [7, 7]


class Mute:
    """Has no state."""

    def state_dict(self) -> None:
        """Return nothing."""


def test_objects_without_a_state_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    net, _ = alone()
    with pytest.raises(ConfigError, match="it is a Mute without state_dict and load_state_dict"):
        shardwise.save_checkpoint(net, tmp_path, objects={"it": Mute()})
    with pytest.raises(ConfigError, match="is a object without"):
        shardwise.save_checkpoint(net, tmp_path, objects={"it": object()})


@pytest.mark.parametrize("owner", [0, 1])
def test_objects_of_one_rank_come_back_to_it(owner: int, tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> int:
        net, _ = build(mesh, 3)
        mine = {"it": Refusing(3, refuses=False)} if mesh["data"].rank == owner else {}
        shardwise.save_checkpoint(net, tmp_path, objects=mine)
        for item in mine.values():
            item.number = 0
        shardwise.load_checkpoint(net, tmp_path, objects=mine)
        with pytest.raises(CheckpointError, match=f"rank {1 - owner}: .*the checkpoint has no state of: it"):
            shardwise.load_checkpoint(net, tmp_path, objects={"it": Refusing(0, refuses=False)})
        return sum(item.number for item in mine.values())

    assert sorted(run_ranks(2, body, timeout=20)) == [0, 3]


class Free(torch.optim.Optimizer):
    """Takes options that its defaults do not show."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "clip": 1.0, "path": []})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def test_options_of_other_kinds_than_the_defaults_load_where_the_class_is_not_torchs(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        return build({"data": LocalComm()}, 3, model=Small, make=lambda net: Free(net.parameters()))

    net, optimizer = made()
    optimizer.param_groups[0] |= {"clip": None, "path": [1, 2]}
    shardwise.save_checkpoint(net, tmp_path)
    net, optimizer = made()
    shardwise.load_checkpoint(net, tmp_path)
    assert (optimizer.param_groups[0]["clip"], optimizer.param_groups[0]["path"]) == (None, [1, 2])


@pytest.mark.parametrize(
    "value", [numpy.datetime64("2020-01-01"), numpy.timedelta64(1, "ns"), numpy.longdouble(1), "\udc80", {"\udc80": 1}]
)
def test_values_that_would_come_back_as_others_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="it"):
        to_plain(value, "it")


@pytest.mark.parametrize(
    "value", [numpy.float32(0.5), numpy.int8(3), numpy.bool_(True), numpy.array(4), {"[" * 70: [1]}]
)
def test_plain_values_come_back(value: Any) -> None:
    assert from_plain(to_plain(value, "it")) == value


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 1, 2: 5}),
        Counter("abca"),
        OrderedDict([("b", 1), ("a", OrderedDict([(1, Counter())]))]),
        *(defaultdict(kind, {"a": kind()}) for kind in (int, float, list, dict, str, bool, tuple)),
        defaultdict(None, {(1, math.inf): "x"}),
        {"$pairs": {"kind": "Counter", "pairs": [[1, 2]]}},
    ],
)
def test_dictionaries_keep_their_kind(value: Any) -> None:
    def kinds(item: Any) -> Any:
        inner = [kinds(each) for each in item.values()] if isinstance(item, dict) else None
        return type(item), getattr(item, "default_factory", None), inner

    found = from_plain(json.loads(json.dumps(to_plain(value, "it"))))
    assert (found, list(found), kinds(found)) == (value, list(value), kinds(value))


def test_a_dictionary_whose_default_only_code_makes_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"it\['a'\] is a defaultdict of .*<lambda>, which a checkpoint does not hold"
    ):
        to_plain({"a": defaultdict(lambda: 3)}, "it")


@pytest.mark.parametrize(
    "named",
    [
        {"kind": "dict"},
        {"kind": "eval"},
        {"kind": ["Counter"]},
        {"kind": "Counter", "factory": None},
        {"kind": "defaultdict"},
        {"kind": "defaultdict", "factory": "eval"},
        {"kind": "defaultdict", "factory": ["int"]},
        {"kind": "defaultdict", "factory": "int", "more": 1},
        {"kind": "Counter", "pairs": [[[1], 2]]},
        {"kind": "Counter", "pairs": {}},
    ],
)
def test_dictionaries_of_no_kind_are_malformed(named: Any) -> None:
    with pytest.raises(CheckpointError, match=r"malformed|of no kind"):
        from_plain({"$pairs": {"pairs": [], **named}})


def test_a_resumed_schedule_goes_through_its_milestones(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any, Any]:
        kinds = torch.optim.lr_scheduler
        net, optimizer = alone()
        inner = [kinds.LinearLR(optimizer, total_iters=3), kinds.MultiStepLR(optimizer, [2, 4])]
        return net, optimizer, kinds.SequentialLR(optimizer, inner, milestones=[3])

    def rates(net: nn.Module, optimizer: Any, scheduler: Any) -> list[float]:
        found = []
        for _ in range(6):
            step(net, optimizer)
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    net, optimizer, scheduler = made()
    for _ in range(2):
        step(net, optimizer)
        scheduler.step()
    shardwise.save_checkpoint(net, tmp_path, objects={"scheduler": scheduler})
    expected = rates(net, optimizer, scheduler)
    net, optimizer, scheduler = made()
    shardwise.load_checkpoint(net, tmp_path, objects={"scheduler": scheduler})
    assert rates(net, optimizer, scheduler) == expected


def test_nested_schedulers_keep_their_methods(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        net, optimizer = alone()
        inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.LinearLR(optimizer)]
        return net, torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])

    net, scheduler = made()
    scheduler._schedulers[1].__dict__["get_lr"] = 3
    shardwise.save_checkpoint(net, tmp_path, objects={"scheduler": scheduler})
    net, scheduler = made()
    with pytest.raises(CheckpointError, match="LinearLR would replace its"):
        shardwise.load_checkpoint(net, tmp_path, objects={"scheduler": scheduler})
    assert callable(scheduler._schedulers[1].get_lr)


def test_ranks_load_in_the_same_way(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path)
        with pytest.raises(RankMismatchError, match="unlike arguments"):
            shardwise.load_checkpoint(net, tmp_path, strict=mesh["data"].rank == 0)

    run_ranks(2, body, timeout=20)


def test_values_that_only_compare_equal_are_not_the_same(tmp_path: Path) -> None:
    states = ({"a": 1, "b": 0.0, "c": [0, 1, 2]}, {"a": True, "b": -0.0, "c": [0.0, 1.0, 2]})

    def body(mesh: Mapping[str, Comm]) -> Any:
        net, _ = build(mesh, 3, model=Small, make=lambda net: torch.optim.SGD(net.parameters()))
        kept = Refusing(states[mesh["data"].rank], refuses=False)  # type: ignore[arg-type]
        shardwise.save_checkpoint(net, tmp_path, tag="one", objects={"it": kept})
        kept.number = 0
        shardwise.load_checkpoint(net, tmp_path, objects={"it": kept})
        return kept.number

    assert list(map(repr, run_ranks(2, body, timeout=20))) == list(map(repr, states))
    net, _ = alone()
    for tag, state in zip("ab", states, strict=True):
        shardwise.save_checkpoint(net, tmp_path, tag=tag, user_state=state)
    assert compare(tmp_path / "a", tmp_path / "b").values == ("user",)


@pytest.mark.parametrize("damaged", [("b",), ("a", "b")])
def test_damage_is_no_difference_but_an_error(damaged: tuple[str, ...], tmp_path: Path) -> None:
    net, _ = alone()
    shardwise.save_checkpoint(net, tmp_path, tag="a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for tag in damaged:
        path = tmp_path / tag / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged: its hash is not"):
        compare(tmp_path / "a", tmp_path / "b")


def test_a_run_that_went_back_keeps_what_it_saved_last(tmp_path: Path) -> None:
    net, _ = alone()
    for number in (8, 9, 10):
        shardwise.save_checkpoint(net, tmp_path, step=number)
    for number in (5, 6):
        shardwise.save_checkpoint(net, tmp_path, step=number, keep_last=2)
    assert [found.tag for found in find_checkpoints(tmp_path)] == ["step-5", "step-6"]
    newest = newest_whole(tmp_path)
    assert newest is not None
    assert newest.tag == "step-6"


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("here", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(6)])
def test_a_buffer_of_unlike_shapes_is_refused_by_name(here: Tensor, value: int, tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 3, model=Small, make=lambda net: torch.optim.SGD(net.parameters()))
        net.register_buffer("mask", here + value if mesh["data"].rank else torch.zeros(2, 3))
        with pytest.raises(ConfigError, match=r"nothing was saved. mask: F32 \[2, 3\] on rank 0, .* on rank 1"):
            shardwise.save_checkpoint(net, tmp_path)

    run_ranks(2, body, timeout=20)
    assert not list(tmp_path.iterdir())


def test_what_only_another_rank_has_otherwise_is_a_difference(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 3)
        rank = mesh["data"].rank
        for tag, change in (("one", 0), ("two", rank)):
            net.count.fill_(5 + change)
            objects = {"it": Refusing(3 + change, refuses=False)}
            shardwise.save_checkpoint(net, tmp_path, tag=tag, objects=objects)

    run_ranks(2, body, timeout=20)
    same = compare(tmp_path / "one", tmp_path / "one")
    assert same.identical
    found = compare(tmp_path / "one", tmp_path / "two")
    assert (found.changed, found.values) == ({"buffer.count": 1.0}, ("objects of rank 1",))
