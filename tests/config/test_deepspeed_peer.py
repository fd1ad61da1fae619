"""The table beside DeepSpeed itself, where 0.19.8 is installed, and beside our own table of schedules."""

import importlib
import itertools
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.check import native_keys
from shardwise.configure import load_config
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import deepspeed_keys
from shardwise.interop.deepspeed.keys import KEYS, SCHEDULERS
from shardwise.optim.schedules import SCHEDULES

FILES = Path(__file__).parent / "files"

peer = pytest.mark.needs_peer("deepspeed")
noisy = pytest.mark.filterwarnings("ignore")

SECTIONS = (
    ("zero_optimization", "deepspeed.runtime.zero.config.DeepSpeedZeroConfig"),
    ("fp16", "deepspeed.runtime.precision_config.DeepSpeedFP16Config"),
    ("bf16", "deepspeed.runtime.precision_config.DeepSpeedBF16Config"),
    ("comms_logger", "deepspeed.comm.config.CommsLoggerConfig"),
    ("compile", "deepspeed.compile.config.CompileConfig"),
    ("tensor_parallel", "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig"),
    ("hybrid_engine", "deepspeed.runtime.config.HybridEngineConfig"),
    ("tensorboard", "deepspeed.monitor.config.TensorBoardConfig"),
    ("wandb", "deepspeed.monitor.config.WandbConfig"),
    ("csv_monitor", "deepspeed.monitor.config.CSVConfig"),
    ("comet", "deepspeed.monitor.config.CometConfig"),
    ("timers.throughput", "deepspeed.utils.config.DeepSpeedThroughputTimerConfig"),
)
OBJECTS_OF_PYTHON = ("mpu", "tp_group")  # cannot be written in a file


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def fields(model: Any, section: str) -> Iterator[tuple[list[str], Any]]:
    """Yield the dotted spellings of every field of a pydantic model, and its default."""
    for name, info in model.model_fields.items():
        if name in OBJECTS_OF_PYTHON:
            continue
        parts = (info.annotation, *typing.get_args(info.annotation))
        inner = [part for part in parts if hasattr(part, "model_fields")]
        spelling = info.alias or name
        if inner:
            yield from fields(inner[0], f"{section}.{spelling}")
        else:
            yield [f"{section}.{one}" for one in {name, spelling}], info.default


@peer
@noisy
@pytest.mark.parametrize(("section", "model"), SECTIONS)
def test_every_field_of_deepspeed_is_in_the_table_and_its_default_is_accepted(section: str, model: str) -> None:
    found = list(fields(named(model), section))
    assert found
    assert [name for names, _ in found for name in names if name not in deepspeed_keys()] == []
    for names, default in found:
        row = KEYS.get(names[0]) or KEYS.get(names[-1])
        if row is None or not isinstance(default, bool | int | float | str | None):
            continue
        assert row.kind.accepts(default), (row.name, default)
        asks = row.fate in ("later", "refused") and not row.switch and ".zenflow." not in row.name
        assert not asks or row.is_quiet(default), (row.name, default)


@peer
@noisy
def test_batch_arithmetic_is_that_of_deepspeed() -> None:
    theirs_type = named("deepspeed.runtime.config.DeepSpeedConfig")
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    agreed = 0
    for num_ranks in (1, 2, 4):
        for numbers in itertools.product((None, 1, 2, 4, 7, 8, 12), (None, 1, 2, 3, 4), (None, 1, 2, 3)):
            theirs = theirs_type.__new__(theirs_type)
            theirs.world_size = num_ranks
            for key, value in zip(keys, numbers, strict=True):
                setattr(theirs, key, value)
            try:
                theirs._configure_train_batch_size()
            except AssertionError:
                expected = None
            else:
                expected = tuple(getattr(theirs, key) for key in keys)
            written = {key: value for key, value in zip(keys, numbers, strict=True) if value is not None}
            try:
                batch = load_config(written, num_ranks=num_ranks, dialect="deepspeed").batch
            except ConfigError:
                found = None
            else:
                found = (batch.size, batch.micro, batch.accumulation)
                agreed += 1
            assert found == expected, (num_ranks, written)
    assert agreed > 100


@peer
@noisy
@pytest.mark.parametrize("name", ["hf_zero2", "hf_zero3", "lightning_default"])
def test_files_mean_the_same_to_deepspeed(name: str) -> None:
    config = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
    if "train_batch_size" in config:
        config["train_batch_size"] //= 2  # the files are for two ranks
    theirs = named("deepspeed.runtime.config.DeepSpeedConfig")(config)
    resolved = load_config(config, num_ranks=1)
    ours = resolved.config
    assert ours.stage == theirs.zero_optimization_stage
    assert (ours.clip_grad_norm or 0.0) == theirs.gradient_clipping
    assert resolved.batch.size == theirs.train_batch_size
    assert resolved.batch.micro == theirs.train_micro_batch_size_per_gpu
    assert resolved.batch.accumulation == theirs.gradient_accumulation_steps
    assert ours.log_every == theirs.steps_per_print
    assert (ours.precision.param == "fp16") == theirs.float16_config.enabled
    assert (ours.precision.param == "bf16") == theirs.bfloat16_config.enabled
    if theirs.float16_config.enabled:
        scale = theirs.float16_config.dynamic_loss_scale_args()
        assert ours.loss_scale.initial == scale["init_scale"]
        assert ours.loss_scale.growth_interval == scale["scale_window"]
        assert ours.loss_scale.hysteresis == scale["delayed_shift"]
        assert ours.loss_scale.minimum == scale["min_scale"]
    if theirs.optimizer_params is not None:
        assert ours.optimizer is not None
        assert {key: getattr(ours.optimizer, key) for key in theirs.optimizer_params} == theirs.optimizer_params


def test_table_of_schedulers_agrees_with_the_schedules() -> None:
    assert {name: native for name, (native, _) in SCHEDULERS.items()} == {
        entry.deepspeed_name: native for native, entry in SCHEDULES.items()
    }
    for native, params in SCHEDULERS.values():
        table = {KEYS[f"scheduler.params.{name}"].to.removeprefix("scheduler."): name for name in params}
        assert table == dict(SCHEDULES[native].options)
        keys = [key for key in native_keys({"scheduler": {"name": native}}) if key.startswith("scheduler.")]
        assert {key.removeprefix("scheduler.") for key in keys} == {"name", *table}
