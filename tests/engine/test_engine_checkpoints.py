"""DeepSpeed's calls for saving and loading, and the place in the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise
from shardwise.checkpoint.folder import find_checkpoints
from shardwise.comm.base import Comm
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.loader import ShardedLoader
from shardwise.testing.ranks import run_ranks

CONFIG = {"optimizer": {"name": "adamw", "lr": 0.1}, "scheduler": {"name": "warmup", "max_lr": 0.1}}


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    model.register_parameter("tied", model[1].bias)
    return model


def engine_on(mesh: Mapping[str, Comm], **config: Any) -> Any:
    engine, *_ = shardwise.initialize(model=net(), mesh=mesh, config={**CONFIG, **config}, initial_values="broadcast")
    return engine


def update(engine: Any, count: int = 1) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 3)).square().sum())
        engine.step()


@pytest.mark.filterwarnings("ignore:ranks start from different values")
def test_names_counters_and_client_state(tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> Any:
        engine = engine_on(mesh, stage=3)
        update(engine, 2)
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3}) is True
        assert engine.save_checkpoint(tmp_path, tag="best", save_latest=False) is True
        update(engine)
        assert engine.save_checkpoint(tmp_path, tag="best", save_latest=False) is True
        expected = engine.get_lr(), shardwise.full_parameters(engine.module)
        other = engine_on(mesh, stage=1)
        path, client = other.load_checkpoint(tmp_path)
        assert (path, client) == (str(tmp_path / "global_step2"), {"epoch": 3})
        assert (other.global_steps, other.global_samples, other.micro_steps) == (2, 4, 2)
        update(other)
        assert other.get_lr() == expected[0]
        found = shardwise.full_parameters(other.module)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[1].items())
        path, client = other.load_checkpoint(tmp_path, tag="best")
        assert (path, client, other.global_steps) == (str(tmp_path / "best"), None, 3)

    run_ranks(2, body)
    assert {each.tag for each in find_checkpoints(tmp_path)} == {"best", "global_step2"}


def test_nothing_to_load_is_a_warning_as_in_deepspeed(tmp_path: Path) -> None:
    engine = engine_on({"data": LocalComm()})
    with pytest.warns(UserWarning, match="nothing was loaded"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        engine.load_checkpoint(tmp_path, tag="global_step1")
    with pytest.raises(ConfigError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    mesh = {"data": LocalComm()}
    engine = engine_on(mesh)
    update(engine, 3)
    engine.save_checkpoint(tmp_path)
    other = engine_on(mesh)
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.global_steps == 0
    assert not shardwise.full_optimizer_state(other.module)
    other.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (other.global_steps, other.lr_scheduler.last_epoch) == (3, 0)
    assert not shardwise.full_optimizer_state(other.module)
    engine.save_checkpoint(tmp_path, tag="trained", exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: 0\.bias"):
        other.load_checkpoint(tmp_path, tag="trained")
    other.load_checkpoint(tmp_path, tag="trained", load_module_strict=False)


def test_the_first_rate_after_a_load_is_that_of_the_schedule_of_now(tmp_path: Path) -> None:
    mesh = {"data": LocalComm()}
    schedule = {"name": "warmup_cosine", "total_steps": 6, "num_warmup_steps": 2}
    engine = engine_on(mesh, scheduler=schedule)
    update(engine, 4)
    engine.save_checkpoint(tmp_path)
    longer = engine_on(mesh, scheduler=schedule | {"total_steps": 12})
    longer.load_checkpoint(tmp_path)
    whole = engine_on(mesh, scheduler=schedule | {"total_steps": 12})
    update(whole, 4)
    assert longer.get_lr() == whole.get_lr() != engine.get_lr()
    assert longer.optimizer.param_groups[0]["lr"] == whole.get_lr()[0]


def test_a_save_inside_a_window_warns(tmp_path: Path) -> None:
    engine = engine_on({"data": LocalComm()}, batch={"micro": 2, "accumulation": 2})
    update(engine)
    with pytest.warns(UserWarning, match="1 of 2 micro-batches done"):
        engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert not engine.is_gradient_accumulation_boundary()


@pytest.mark.filterwarnings("ignore:ranks start from different values")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_16bit_model_is_a_plain_state_dict(name: str, tmp_path: Path) -> None:
    def body(mesh: Mapping[str, Comm]) -> Any:
        engine = engine_on(mesh, stage=3, precision={"param": "bf16"})
        assert engine.save_16bit_model(tmp_path, name) is True
        return shardwise.full_state_dict(engine.module)

    expected = run_ranks(2, body)[0]
    path = tmp_path / name
    found = torch.load(path, weights_only=True) if name.endswith("bin") else safetensors.torch.load_file(path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert set(expected) - set(found) == (set() if name.endswith("bin") else {"1.bias"})
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype is torch.bfloat16 for key in found)
    with pytest.raises(ConfigError, match="tag"):
        run_ranks(1, lambda mesh: engine_on(mesh).save_16bit_model(tmp_path, "../outside.bin"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_16bit_model_is_written_through_no_link(name: str, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    folder.mkdir()
    for link in (name, f".{name}.writing"):
        (folder / link).symlink_to(victim)
    assert engine_on({"data": LocalComm()}).save_16bit_model(folder, name)
    assert victim.read_text() == "precious"
    assert (folder / name).is_file()
    assert not (folder / name).is_symlink()


def test_a_save_in_the_background_ends_before_the_engine_does(tmp_path: Path) -> None:
    engine = engine_on({"data": LocalComm()})
    engine.save_checkpoint(tmp_path, background=True)
    engine.destroy()
    assert [each.tag for each in find_checkpoints(tmp_path)] == ["global_step0"]


def test_a_checkpoint_without_a_place_in_the_data_lets_the_loader_begin(tmp_path: Path) -> None:
    mesh = {"data": LocalComm()}
    engine_on(mesh).save_checkpoint(tmp_path)
    data = TensorDataset(torch.ones(4, 3))
    engine, _, loader, _ = shardwise.initialize(
        model=net(), mesh=mesh, config={**CONFIG, "batch": {"micro": 2}}, training_data=data
    )
    assert len(list(loader)) == 2
    with pytest.warns(UserWarning, match="the loader begins anew"):
        engine.load_checkpoint(tmp_path)
    assert loader.state_dict() == {"epoch": 1, "samples": 0}


def loader_of(rank: int, num_ranks: int, micro: int, *, drop_last: bool = False) -> ShardedLoader:
    data = TensorDataset(torch.arange(23))
    return ShardedLoader(data, micro=micro, rank=rank, num_ranks=num_ranks, seed=3, drop_last=drop_last)


def used(loaders: list[ShardedLoader], batches: int) -> list[int]:
    found = []
    for loader in loaders:
        for number, (batch,) in enumerate(loader, start=1):
            found += batch.tolist()
            if number == batches:
                break
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 2), (3, 1), (4, 1), (2, 1)])
def test_each_sample_is_used_once_in_an_epoch_that_goes_on_elsewhere(ranks: int, micro: int, drop_last: bool) -> None:
    first = [loader_of(rank, 2, 3, drop_last=drop_last) for rank in range(2)]
    done = used(first, 2)
    state = first[0].state_dict()
    assert state == first[1].state_dict() == {"epoch": 0, "samples": 12}
    second = [loader_of(rank, ranks, micro, drop_last=drop_last) for rank in range(ranks)]
    for loader in second:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    rest = used(second, 1000)
    assert len(set(done + rest)) >= 23 - (ranks * micro if drop_last else 0)
    assert len(done + rest) - len(set(done + rest)) < 2 * ranks
    assert {loader.state_dict()["epoch"] for loader in second} == {1}
    whole = [loader_of(rank, ranks, micro, drop_last=drop_last) for rank in range(ranks)]
    used(whole, 1000)
    assert used(whole, 1000) == used(second, 1000)


def test_the_end_of_an_epoch_is_the_begin_of_the_next() -> None:
    loader = loader_of(0, 1, 23)
    for _ in loader:
        assert loader.state_dict() == {"epoch": 1, "samples": 0}
    assert loader.state_dict() == {"epoch": 1, "samples": 0}
    for wrong in ({}, {"epoch": -1, "samples": 0}, {"epoch": 0, "samples": "1"}):
        with pytest.raises(StateError, match="no position"):
            loader.load_state_dict(wrong)


def test_an_iteration_that_gave_nothing_yet_has_used_nothing() -> None:
    loader, other = loader_of(0, 1, 4), loader_of(0, 1, 4)
    batches = iter(loader)
    state = loader.state_dict()
    assert state == {"epoch": 0, "samples": 0}
    other.load_state_dict(state)
    assert [batch.tolist() for (batch,) in batches] == [batch.tolist() for (batch,) in other]
    iter(loader)
    iter(loader)
    assert loader.state_dict() == {"epoch": 2, "samples": 0}


def test_iterating_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(loader_of(0, 2, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tensor", [False, True])
def test_torchs_scheduler_gives_its_rate_to_an_optimizer_that_begins_anew(tensor: bool, tmp_path: Path) -> None:
    def made() -> Any:
        model = net()
        rate = torch.tensor(0.1) if tensor else 0.1
        engine, *_ = shardwise.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=rate),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            mesh={"data": LocalComm()},
            config={},
        )
        return engine

    engine = made()
    update(engine, 3)
    engine.save_checkpoint(tmp_path)
    other = made()
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    for _ in range(2):
        assert other.get_lr() == engine.get_lr()
        update(engine)
        update(other)


def test_a_scheduler_that_tells_no_rates_is_named(tmp_path: Path) -> None:
    class Silent:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    def made() -> Any:
        model = net()
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = shardwise.initialize(
            model=model, optimizer=own, lr_scheduler=Silent(), mesh={"data": LocalComm()}, config={}
        )
        return engine

    made().save_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="Silent does not tell the rates"):
        made().load_checkpoint(tmp_path, load_optimizer_states=False)
