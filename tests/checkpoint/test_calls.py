"""``save_checkpoint`` and ``load_checkpoint``: arguments, names, what is refused, what is left as it was."""

import os
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.doors.torchfile import import_torch
from shardwise.checkpoint.folder import find_checkpoints, read_latest, read_manifest
from shardwise.comm.base import Comm, flat_rank
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError, ConfigError, RankMismatchError, StateError
from shardwise.faults import visits
from shardwise.testing.ranks import run_ranks

from .case import Odd, adamw, assert_same, build, state_of, train, tree

Body = Callable[[Mapping[str, Comm]], Any]
STAGES = pytest.mark.parametrize("stage", range(4))


def on_two(body: Body) -> list[Any]:
    return run_ranks(2, body)


def alone() -> Mapping[str, Comm]:
    return {"data": LocalComm()}


@STAGES
def test_saving_changes_nothing_even_before_the_first_step(stage: int, tmp_path: Path) -> None:
    def run(mesh: Mapping[str, Comm], *, saves: bool) -> Any:
        net, optimizer = build(mesh, stage)
        for step in range(3):
            if saves:
                before = random.getstate(), numpy.random.get_state()[2]
                shardwise.save_checkpoint(net, tmp_path, tag=f"s{step}")
                assert (random.getstate(), numpy.random.get_state()[2]) == before
            train(net, optimizer, mesh, range(step, step + 1))
        return state_of(net)

    for saved, plain in zip(
        on_two(lambda mesh: run(mesh, saves=True)), on_two(lambda mesh: run(mesh, saves=False)), strict=True
    ):
        assert_same(saved, plain)


@STAGES
def test_state_before_the_first_step_resumes(stage: int, tmp_path: Path) -> None:
    def save(mesh: Mapping[str, Comm]) -> Any:
        net, optimizer = build(mesh, stage)
        shardwise.save_checkpoint(net, tmp_path)
        train(net, optimizer, mesh, range(2))
        return state_of(net)

    def load(mesh: Mapping[str, Comm]) -> Any:
        net, optimizer = build(mesh, stage, seed=3)
        train(net, optimizer, mesh, range(1))  # state that must go
        loaded = shardwise.load_checkpoint(net, tmp_path)
        assert (loaded.tag, loaded.step, loaded.fresh, loaded.dropped) == ("step-0", 0, (), ())
        train(net, optimizer, mesh, range(2))
        return state_of(net)

    expected = on_two(save)
    for found, own in zip(on_two(load), expected, strict=True):
        assert_same(found, own)


def test_random_generators_of_each_rank_come_back(tmp_path: Path) -> None:
    net, _ = build(alone(), 0)
    shardwise.save_checkpoint(net, tmp_path)
    expected = torch.rand(3), random.random(), float(numpy.random.rand())
    torch.rand(5), random.random(), numpy.random.rand()
    shardwise.load_checkpoint(net, tmp_path, rng=False)
    assert not torch.equal(torch.rand(3), expected[0])
    shardwise.load_checkpoint(net, tmp_path)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), float(numpy.random.rand())) == expected[1:]


def test_buffers_are_those_of_each_rank_and_of_rank_0_elsewhere(tmp_path: Path) -> None:
    def save(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 1)
        net.table += flat_rank(mesh)
        shardwise.save_checkpoint(net, tmp_path)

    def load(mesh: Mapping[str, Comm]) -> list[float]:
        net, _ = build(mesh, 1)
        net.table.zero_()
        shardwise.load_checkpoint(net, tmp_path)
        return net.table.tolist()

    on_two(save)
    first = [float(n) for n in range(6)]
    second = [n + 1 for n in first]
    assert on_two(load) == [first, second]
    assert run_ranks(3, load) == [first, second, first]


def test_complex_buffers_and_extra_state(tmp_path: Path) -> None:
    class Other(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))
            self.seen: Any = {"a": (1, 2.5)}

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    net, _ = build(alone(), 0, model=Other)
    expected = net.phase.clone()
    shardwise.save_checkpoint(net, tmp_path)
    net.phase.zero_()
    net.seen = None
    shardwise.load_checkpoint(net, tmp_path)
    assert torch.equal(net.phase, expected)
    assert net.seen == {"a": (1, 2.5)}


def test_user_state_and_objects_come_back_exactly(tmp_path: Path) -> None:
    class Thing:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    net, _ = build(alone(), 0)
    thing = Thing()
    thing.state = {"pair": (1, [2.5, None]), 3: float("inf"), "nested": {"$tuple": 1, "x": True}, "$float": {"y": "z"}}
    user = {"lost": 0.1 + 0.2, "text": "a\n\u00e4", "none": None}
    shardwise.save_checkpoint(net, tmp_path, objects={"thing": thing}, user_state=user, step=7)
    kept, thing.state = thing.state, {}
    loaded = shardwise.load_checkpoint(net, tmp_path, objects={"thing": thing})
    assert thing.state == kept
    assert type(thing.state["pair"]) is tuple
    assert (loaded.user_state, loaded.step, loaded.tag) == (user, 7, "step-7")


@pytest.mark.parametrize("value", [torch.zeros(2), object(), {"deep": {1, 2}}, b"raw", 1j])
def test_what_json_cannot_say_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    net, _ = build(alone(), 0)
    with pytest.raises(ConfigError, match="user_state"):
        shardwise.save_checkpoint(net, tmp_path, user_state={"it": value})
    assert not tree(tmp_path)


@pytest.mark.parametrize(
    "tag", ["", "..", "../a", "a/b", "/a", ".hidden", "-a", "a b", "latest", "manifest.json", "a" * 129, "a\0b", "a\\b"]
)
def test_a_tag_is_a_name(tag: str, tmp_path: Path) -> None:
    net, _ = build(alone(), 0)
    with pytest.raises(ConfigError, match="tag"):
        shardwise.save_checkpoint(net, tmp_path / "in", tag=tag)
    shardwise.save_checkpoint(net, tmp_path / "in")
    with pytest.raises(CheckpointError, match="tag"):
        shardwise.load_checkpoint(net, tmp_path / "in", tag=tag)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_a_tag_that_exists_is_refused_or_replaced(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> list[str]:
        net, optimizer = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path, tag="a")
        train(net, optimizer, mesh, range(1))
        with pytest.raises(CheckpointError, match="exists already") as caught:
            shardwise.save_checkpoint(net, tmp_path, tag="a")
        shardwise.save_checkpoint(net, tmp_path, tag="a", overwrite=True)
        return [str(caught.value), str(read_manifest(tmp_path / "a").step)]

    first, second = on_two(body)
    assert first == second
    assert first[1] == "1"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest"}


def test_a_directory_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    net, _ = build(alone(), 0)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="left alone"):
        shardwise.save_checkpoint(net, tmp_path, tag="a", overwrite=True)
    assert tree(tmp_path) == {"a", "a/mine"}


@pytest.mark.parametrize(
    "unlike",
    [
        {"tag": ("a", "b")},
        {"background": (True, False)},
        {"when_pending": ("wait", "refuse")},
        {"exclude_frozen": (True, False)},
    ],
    ids=str,
)
def test_unlike_arguments_are_told_on_all_ranks(unlike: dict[str, Any], tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 2)
        own = {name: values[flat_rank(mesh)] for name, values in unlike.items()}
        with pytest.raises(RankMismatchError, match="unlike arguments") as caught:
            shardwise.save_checkpoint(net, tmp_path, **own)
        return str(caught.value)

    first, second = on_two(body)
    assert first == second
    assert not tree(tmp_path)


@pytest.mark.parametrize(
    ("own", "kind", "text"),
    [
        ({"folder": "x" * 300}, CheckpointError, "File name too long"),
        ({"folder": "~nouser/x"}, ConfigError, "home"),
        ({"folder": None}, ConfigError, "folder None"),
        ({"keep": "best"}, ConfigError, "keep holds tags"),
        ({"keep": 3}, CheckpointError, "not iterable"),
        ({"when_pending": "never"}, ConfigError, "when_pending"),
    ],
    ids=str,
)
@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all", "one"])
def test_a_wrong_argument_on_any_rank_is_the_same_error_on_all(
    own: dict[str, Any],
    kind: type[Exception],
    text: str,
    who: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 2)
        options = {"folder": "y"} | (own if flat_rank(mesh) in who else {})
        with pytest.raises(kind, match=text) as caught:
            shardwise.save_checkpoint(net, **options)
        return str(caught.value)

    first, second = on_two(body)
    assert first == second
    assert not tree(tmp_path)


@pytest.mark.parametrize("folder", ["~nouser/x", "x" * 300, "a\0b", None, 3], ids=str)
def test_a_folder_that_cannot_be_on_one_rank_is_an_error_of_a_load_on_all(folder: Any, tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 2)
        shardwise.save_checkpoint(net, tmp_path)
        with pytest.raises(CheckpointError, match="nothing was loaded"):
            shardwise.load_checkpoint(net, folder if flat_rank(mesh) else tmp_path)

    on_two(body)


def test_checkpoints_of_unlike_folders_are_told_apart(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 2)
        for name in ("a", "b"):
            shardwise.save_checkpoint(net, tmp_path / name, tag="last")
        with pytest.raises(RankMismatchError, match="unlike checkpoints") as caught:
            shardwise.load_checkpoint(net, tmp_path / "ab"[flat_rank(mesh)])
        return str(caught.value)

    first, second = on_two(body)
    assert first == second
    assert str(tmp_path / "a" / "last") in first
    assert str(tmp_path / "b" / "last") in first


def test_only_what_ranks_told_each_other_decides_whether_a_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.path.lexists
    calling = threading.local()

    def looks(path: Any) -> bool:
        return real(path) or (Path(path) == tmp_path / "a" and getattr(calling, "rank", 0) == 1)

    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 2)
        calling.rank = flat_rank(mesh)  # a file system that shows rank 1 something else
        with pytest.raises(CheckpointError, match="left alone") as caught:
            shardwise.save_checkpoint(net, tmp_path, tag="a")
        return str(caught.value)

    monkeypatch.setattr(os.path, "lexists", looks)
    first, second = on_two(body)
    assert first == second


def test_names_to_keep_have_no_order(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 2)
        shardwise.save_checkpoint(net, tmp_path, keep=("b", "a") if flat_rank(mesh) else ("a", "b"))

    on_two(body)


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "full_state_dict", "full_parameters"])
def test_a_call_by_some_ranks_only_names_the_others(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_ROLL_CALL_SECONDS", "0.5")

    def body(mesh: Mapping[str, Comm]) -> str:
        net, optimizer = build(mesh, 3)
        function = getattr(shardwise, call)
        if flat_rank(mesh) != 1:
            with pytest.raises(RankMismatchError, match=f"{call} is collective.* rank 1 did not") as caught:
                function(net, tmp_path) if "checkpoint" in call else function(net)
            answer = str(caught.value)
        else:
            answer = ""
        train(net, optimizer, mesh, range(1))  # the network still works
        return answer

    answers = run_ranks(3, body)
    assert answers[0] == answers[2]
    assert not list(tmp_path.iterdir())


def test_different_calls_that_meet_are_named(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 3)
        with pytest.raises(RankMismatchError, match="different collective calls") as caught:
            shardwise.save_checkpoint(net, tmp_path) if flat_rank(mesh) else shardwise.full_parameters(net)
        return str(caught.value)

    first, second = on_two(body)
    assert first == second
    assert "rank 0 called full_parameters, rank 1 called save_checkpoint" in first


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    class Another(Odd):
        def __init__(self) -> None:
            super().__init__(renamed=True)
            del self.cube
            self.register_buffer("table", torch.zeros(7))
            self.scale = nn.Parameter(torch.ones(1))
            self.mine = nn.Parameter(torch.ones(3))

    def save(mesh: Mapping[str, Comm]) -> None:
        net, optimizer = build(mesh, 3)
        train(net, optimizer, mesh, range(2))
        shardwise.save_checkpoint(net, tmp_path)

    def load(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 1, model=Another)
        before = state_of(net)
        with pytest.raises(CheckpointError) as caught:
            shardwise.load_checkpoint(net, tmp_path)
        assert_same(state_of(net), before)
        with pytest.raises(CheckpointError, match="another shape"):
            shardwise.load_checkpoint(net, tmp_path, strict=False)
        assert_same(state_of(net), before)
        return str(caught.value)

    on_two(save)
    first, second = on_two(load)
    assert first == second
    for text in (
        "missing in the checkpoint: other, mine",
        "not in the model: cube",
        "scale () for (1,)",
        "table (6,) for (7,)",
        "nothing was loaded",
    ):
        assert text in first


def test_a_partial_load_takes_what_both_have(tmp_path: Path) -> None:
    def save(mesh: Mapping[str, Comm]) -> Any:
        net, optimizer = build(mesh, 3)
        train(net, optimizer, mesh, range(2))
        shardwise.save_checkpoint(net, tmp_path)
        return state_of(net, buffers=False)

    def load(mesh: Mapping[str, Comm]) -> Any:
        net, _ = build(mesh, 2, model=lambda: Odd(renamed=True), seed=5)
        with (
            pytest.warns(UserWarning, match="other are new to the optimizer") if flat_rank(mesh) == 0 else nullcontext()
        ):
            loaded = shardwise.load_checkpoint(net, tmp_path, strict=False)
        assert (loaded.missing, loaded.unexpected, loaded.fresh) == (("other",), (), ("other",))
        found = state_of(net, buffers=False)
        assert torch.equal(found.pop("master other"), torch.zeros(2))
        found.pop("copy other")
        return found

    expected = on_two(save)[0]
    for found in run_ranks(3, load):
        assert_same(found, expected)


def test_weights_only_loads_no_optimizer(tmp_path: Path) -> None:
    net, optimizer = build(alone(), 0)
    train(net, optimizer, alone(), range(2))
    shardwise.save_checkpoint(net, tmp_path)
    other, _ = build(alone(), 0, seed=4, make=lambda net: torch.optim.SGD(net.parameters(), lr=0.3))
    with pytest.raises(CheckpointError, match="SGD here, AdamW in the checkpoint"):
        shardwise.load_checkpoint(other, tmp_path)
    shardwise.load_checkpoint(other, tmp_path, weights_only=True)
    expected = shardwise.full_parameters(net)
    assert_same(shardwise.full_parameters(other), expected)


def test_options_of_groups_follow_names(tmp_path: Path) -> None:
    net, optimizer = build(alone(), 0)
    optimizer.param_groups[0]["lr"] = 0.011
    optimizer.param_groups[1]["lr"] = 0.022
    train(net, optimizer, alone(), range(1))
    shardwise.save_checkpoint(net, tmp_path)

    def turned(net: nn.Module) -> torch.optim.Optimizer:
        groups = adamw(net).param_groups
        return torch.optim.AdamW([{"params": group["params"]} for group in reversed(groups)], lr=1.0)

    other, turned_optimizer = build(alone(), 0, make=turned)
    shardwise.load_checkpoint(other, tmp_path)
    assert [group["lr"] for group in turned_optimizer.param_groups] == [0.022, 0.011]
    assert [group["weight_decay"] for group in turned_optimizer.param_groups] == [0.0, 0.1]
    joined, _ = build(
        alone(), 0, make=lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1.0)
    )
    with pytest.raises(CheckpointError, match="joins saved groups"):
        shardwise.load_checkpoint(joined, tmp_path)


def test_retention_keeps_the_last_and_the_named(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 3)
        for step in range(6):
            shardwise.save_checkpoint(net, tmp_path, step=step, keep_last=2, keep=("step-1",))

    on_two(body)
    assert [each.tag for each in find_checkpoints(tmp_path)] == ["step-1", "step-4", "step-5"]
    assert read_latest(tmp_path) == "step-5"


def test_retention_keeps_what_latest_names(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> int:
        net, _ = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path, step=0)
        for step in (1, 2):
            shardwise.save_checkpoint(net, tmp_path, step=step, set_latest=False, keep_last=1)
        return shardwise.load_checkpoint(net, tmp_path, rng=False).step

    assert on_two(body) == [0, 0]
    assert [each.tag for each in find_checkpoints(tmp_path)] == ["step-0", "step-2"]


def test_retention_never_removes_the_only_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 3)
        shardwise.save_checkpoint(net, tmp_path, tag="good", step=0)
        if flat_rank(mesh) == 0:
            monkeypatch.setenv("SHARDWISE_FAULT", "save.after_first_file:1:2:flip")
        mesh["data"].announce("ready", "")
        mesh["data"].announced("ready", 10)
        with pytest.raises(CheckpointError, match="was saved, but older ones were not removed") as caught:
            shardwise.save_checkpoint(net, tmp_path, tag="bad", step=1, keep_last=1)
        return str(caught.value)

    visits.forget()
    monkeypatch.setenv("SHARDWISE_FAULT", "save.after_first_file:9:1:flip")
    first, second = on_two(body)
    assert first == second
    assert "damaged" in first
    assert {each.tag for each in find_checkpoints(tmp_path)} == {"good", "bad"}


@STAGES
def test_saving_in_a_forward_and_after_an_interrupted_one(stage: int, tmp_path: Path) -> None:
    class Saves(Odd):
        action: Callable[[], None] | None = None

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(tokens)
            if self.action is not None:
                self.action()
            return hidden

    def interrupt() -> None:
        raise KeyboardInterrupt

    def run(mesh: Mapping[str, Comm], *, saves: bool) -> Any:
        net, optimizer = build(mesh, stage, model=Saves)
        if saves:
            net.action = lambda: shardwise.save_checkpoint(net, tmp_path, tag="in", overwrite=True) and None
        train(net, optimizer, mesh, range(2))
        if saves:
            net.action = interrupt
            with pytest.raises(KeyboardInterrupt):
                train(net, optimizer, mesh, range(1))
            shardwise.save_checkpoint(net, tmp_path, tag="after")
            net.count -= 1
        net.action = None
        train(net, optimizer, mesh, range(2, 3))
        return state_of(net, buffers=False)

    saved, plain = (on_two(lambda mesh, flag=flag: run(mesh, saves=flag)) for flag in (True, False))  # type: ignore[misc]
    for found, expected in zip(saved, plain, strict=True):
        assert_same(found, expected)


def test_in_a_backward_and_inside_unsharded_is_refused(tmp_path: Path) -> None:
    net, _ = build(alone(), 3)
    net.drop.eval()
    with shardwise.unsharded(net), pytest.raises(StateError, match="inside unsharded"):
        shardwise.load_checkpoint(net, tmp_path)
    told: list[str] = []

    def hook(grad: torch.Tensor) -> None:
        for call in (shardwise.save_checkpoint, shardwise.load_checkpoint):
            with pytest.raises(StateError, match="inside a backward") as caught:
                call(net, tmp_path)
            told.append(str(caught.value))

    out = net(torch.tensor([1, 2]))
    out.register_hook(hook)
    out.sum().backward()
    assert len(told) == 2


def test_files_belong_to_everybody_whom_the_mask_allows(tmp_path: Path) -> None:
    net, _ = build(alone(), 0)
    before = os.umask(0o027)
    try:
        shardwise.save_checkpoint(net, tmp_path, tag="a")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()} == {0o640}


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    import safetensors.torch

    net, _ = build(alone(), 0)
    shardwise.save_checkpoint(net, tmp_path, tag="a")
    found = safetensors.torch.load_file(tmp_path / "a" / "rank-00000.safetensors")
    for name, tensor in shardwise.full_parameters(net).items():
        if tensor.numel():
            assert torch.equal(found[f"param.{name}"], tensor)


def test_too_small_a_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.calls.free_bytes", lambda folder: 1000)
    net, _ = build(alone(), 0)
    with pytest.raises(CheckpointError, match="1,000 are free"):
        shardwise.save_checkpoint(net, tmp_path)
    assert not tree(tmp_path)


def test_two_optimizers_keep_their_own_state(tmp_path: Path) -> None:
    def make(mesh: Mapping[str, Comm], seed: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        net = shardwise.shard(net, dict(mesh), stage=3, units=nn.Linear, initial_values="broadcast")
        first = shardwise.shard_optimizer(torch.optim.AdamW(net[0].parameters(), lr=0.1), net, partial=True)
        second = shardwise.shard_optimizer(torch.optim.SGD(net[1].parameters(), 0.1, 0.9), net, partial=True)
        return net, first, second

    def step(net: nn.Module, *optimizers: Any) -> None:
        net(torch.ones(2, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    net, *optimizers = make(alone(), 0)
    step(net, *optimizers)
    shardwise.save_checkpoint(net, tmp_path)
    step(net, *optimizers)
    other, *others = make(alone(), 1)
    shardwise.load_checkpoint(other, tmp_path)
    step(other, *others)
    assert_same(state_of(other), state_of(net))


def test_a_buffer_that_was_imported_as_a_parameter_is_found(tmp_path: Path) -> None:
    net, _ = build(alone(), 0)
    net.table += 3
    state = shardwise.full_state_dict(net)
    torch.save(state, tmp_path / "weights.pt")
    import_torch(tmp_path / "weights.pt", tmp_path / "in", tag="a")
    other, _ = build(alone(), 0, seed=8)
    loaded = shardwise.load_checkpoint(other, tmp_path / "in", weights_only=True)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert torch.equal(other.table, net.table)
    assert_same(shardwise.full_parameters(other), shardwise.full_parameters(net))
