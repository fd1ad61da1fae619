"""What a run fills in, what it leaves alone, and that printed settings repeat the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.model import Config
from shardwise.config.resolve import Resolved
from shardwise.errors import ConfigError
from shardwise.models.sizes import SIZES
from shardwise.train.settings import ORIGIN, engine_settings, load_settings, settings_as_toml


def load(source: Any = None, *overrides: str, num_ranks: int = 2) -> Resolved:
    return load_settings(source, overrides=overrides, num_ranks=num_ranks)


def test_nothing_written_gives_settings_that_train() -> None:
    settings = load()
    config = settings.config
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert (config.optimizer.name, config.optimizer.lr) == ("adamw", SIZES["gpt-mini"].lr)
    assert (config.scheduler.name, config.scheduler.total_steps) == ("warmup_cosine", config.train.steps)
    assert (config.clip_grad_norm, config.log_every, config.loss_reduction) == (1.0, 10, "mean")
    assert (settings.batch.micro, settings.batch.size) == (8, 16)
    for key in ("optimizer.lr", "scheduler.total_steps", "batch.micro", "clip_grad_norm", "log_every"):
        assert settings.origins[key] == ORIGIN


def test_every_written_setting_is_kept_and_knows_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("clip_grad_norm = 0.5\nlog_every = 3\n[batch]\nsize = 6\n[train]\nsteps = 40\n")
    settings = load(path, "optimizer.lr=0.125")
    config = settings.config
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert (config.clip_grad_norm, config.log_every, config.optimizer.lr) == (0.5, 3, 0.125)
    assert (settings.batch.micro, config.scheduler.total_steps) == (3, 40)
    assert settings.origins["clip_grad_norm"] == "own.toml"
    assert settings.origins["optimizer.lr"] == "--set optimizer.lr"
    assert settings.origins["optimizer.name"] == ORIGIN


def test_named_optimizer_stays_as_it_is_without_a_scheduler() -> None:
    config = load({"stage": 1, "optimizer": {"name": "sgd", "lr": 0.1}}).config
    assert config.optimizer is not None
    assert config.optimizer.model_dump(exclude_unset=True) == {"name": "sgd", "lr": 0.1}
    assert config.scheduler is None


@pytest.mark.parametrize("name", ["warmup_cosine", "warmup_decay"])
def test_schedule_without_a_length_has_that_of_the_run(name: str) -> None:
    written = {"optimizer": {"name": "sgd"}, "scheduler": {"name": name}, "train": {"steps": 60}}
    scheduler: Any = load(written).config.scheduler
    assert (scheduler.name, scheduler.total_steps, scheduler.num_warmup_steps) == (name, 60, 3)
    own = load(written, "scheduler.total_steps=90", "scheduler.num_warmup_steps=1")
    scheduler = own.config.scheduler
    assert (scheduler.total_steps, scheduler.num_warmup_steps) == (90, 1)


def test_deepspeed_file_keeps_its_meaning(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    written = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    path.write_text(json.dumps(written))
    settings = load(path, "train.steps=7")
    config = settings.config
    assert config.optimizer is not None
    assert (config.stage, settings.batch.size, config.train.steps) == (2, 12, 7)
    assert config.optimizer.lr == 0.01
    assert config.scheduler is None
    assert config.clip_grad_norm == 1.0  # DeepSpeed's own default


@pytest.mark.parametrize(
    ("name", "lr", "micro"), [("gpt2", 6e-4, 1), ("gpt-nano", SIZES["gpt-nano"].lr, 8), ("some/folder", 5e-5, 1)]
)
def test_rate_and_micro_batch_follow_the_model(name: str, lr: float, micro: int) -> None:
    settings = load(None, f'model.name="{name}"')
    assert settings.config.optimizer is not None
    assert (settings.config.optimizer.lr, settings.batch.micro) == (lr, micro)


@pytest.mark.parametrize(("file", "reduction"), [("a.jsonl", "sum"), ("a.txt", "mean")])
def test_losses_of_documents_are_summed_unless_it_is_said_otherwise(file: str, reduction: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("x")
    where = f"data.path={tmp_path / file}"
    assert load(None, where).config.loss_reduction == reduction
    assert load(None, where, "loss_reduction=mean").config.loss_reduction == "mean"


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"stage": 7, "optimizer": {"speed": 1}, "train": {"steps": "many"}, "batch": {"size": 3}})
    for part in ("stage", "optimizer.speed", "train.steps", "batch.size"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        None,
        {"stage": 1, "clip_grad_norm": 0.0, "optimizer": {"name": "sgd", "lr": 0.1}},
        {"precision": {"param": "fp16"}, "loss_scale": {"fixed": 8.0}},
        {"precision": {"param": "fp16"}, "loss_scale": {"initial": 8.0}},
        {"precision": {"param": "bf16"}, "batch": {"micro": 2, "accumulation": 3}},
        {"scheduler": {"name": "one_cycle", "min_lr": 0.1, "max_lr": 1.0}, "optimizer": {"name": "lion"}},
        {"data": {"path": ["a b", 'c"d', "e\\f", "\u00e4"]}, "train": {"sample_prompt": "x\ty\n"}},
    ],
)
def test_printed_settings_read_again_are_the_same(source: Any, tmp_path: Path) -> None:
    first = load(source)
    path = tmp_path / "settings.toml"
    path.write_text(settings_as_toml(first), encoding="utf-8")
    again = load(path)
    assert again.config.model_dump() == first.config.model_dump()


def test_printed_settings_tell_origins() -> None:
    text = settings_as_toml(load({"stage": 2, "log_every": 5}, "train.steps=9"))
    assert "stage = 2  # config" in text.splitlines()
    assert "steps = 9  # --set train.steps" in text.splitlines()
    assert 'name = "adamw"  # shardwise train' in text.splitlines()
    assert "# context: none  # default" in text.splitlines()


def test_engine_gets_every_setting_but_those_of_the_run() -> None:
    values = engine_settings(load({"stage": 2, "log_every": 5, "seed": 3, "train": {"steps": 9}}))
    assert values["stage"] == 2
    assert values["seed"] == 3
    assert values["scheduler"]["total_steps"] == 9
    assert not {"log_every", "train", "data", "model"} & set(values)
    assert set(values) <= set(Config.model_fields)
