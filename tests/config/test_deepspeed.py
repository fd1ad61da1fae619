"""DeepSpeed's files as they are: three shapes from the field, its defaults, and settings that several keys make."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.model import (
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OneCycleConfig,
    SGDConfig,
    WarmupConfig,
    WarmupDecayConfig,
)
from shardwise.config.resolve import Resolved
from shardwise.configure import load_config
from shardwise.errors import ConfigError

FILES = Path(__file__).parent / "files"


def load(config: dict[str, Any], *, device: str = "cpu") -> Resolved:
    return load_config({"train_batch_size": 8} | config, num_ranks=2, dialect="deepspeed", device=device)


def problems(config: dict[str, Any], *, device: str = "cpu", batch: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(
            ({"train_batch_size": 8} if batch else {}) | config, num_ranks=2, dialect="deepspeed", device=device
        )
    first, *rest = str(caught.value).split("\n  - ")
    return rest or [first.removeprefix("config: ")]


# Shapes from the field


def test_stage_2_file_of_the_hugging_face_documentation_loads() -> None:
    resolved = load_config(FILES / "hf_zero2.json", num_ranks=2)
    config = resolved.config
    assert (config.stage, config.clip_grad_norm, config.log_every) == (2, 1.0, 2000)
    assert vars(resolved.batch) == {"size": 16, "micro": 4, "accumulation": 2}
    assert config.precision.param == "bf16"
    assert config.optimizer == AdamWConfig(name="adamw", lr=3e-5, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01)
    assert config.scheduler == WarmupConfig(name="warmup", min_lr=0, max_lr=3e-5, num_warmup_steps=500)
    assert resolved.origins["stage"] == "hf_zero2.json: zero_optimization.stage"
    assert [note for note in resolved.notes if "on the CPU" in note]
    assert [note for note in resolved.notes if "reduce_bucket_size" in note]


def test_stage_3_file_of_the_hugging_face_documentation_loads() -> None:
    resolved = load_config(FILES / "hf_zero3.json", num_ranks=2)
    config = resolved.config
    assert (config.stage, config.clip_grad_norm) == (3, 0.5)
    assert config.precision.param == "fp16"
    scale = config.loss_scale
    assert (scale.fixed, scale.initial, scale.growth_interval, scale.hysteresis) == (None, 65536.0, 1000, 2)
    assert isinstance(config.scheduler, WarmupDecayConfig)
    assert (config.scheduler.total_steps, config.scheduler.num_warmup_steps) == (10000, 100)


def test_default_of_lightning_loads() -> None:
    resolved = load_config(FILES / "lightning_default.json", num_ranks=2)
    assert (resolved.config.stage, resolved.config.clip_grad_norm) == (2, None)
    assert vars(resolved.batch) == {"size": 2, "micro": 1, "accumulation": 1}
    assert resolved.config.optimizer is None
    assert [note for note in resolved.notes if "aio.{block_size" in note]


@pytest.mark.parametrize("name", ["hf_zero2", "hf_zero3", "lightning_default"])
def test_dict_of_a_file_means_the_same_as_the_file(name: str) -> None:
    path = FILES / f"{name}.json"
    from_dict = load_config(json.loads(path.read_text(encoding="utf-8")), num_ranks=2)
    assert from_dict.config == load_config(path, num_ranks=2).config


def test_unresolved_auto_lists_every_key_that_has_it() -> None:
    text = (FILES / "hf_zero3.json").read_text(encoding="utf-8")
    config = json.loads(text)
    autos = ["zero_optimization.reduce_bucket_size", "optimizer.params.lr", "scheduler.params.total_num_steps"]
    autos += ["gradient_clipping", "train_batch_size", "fp16.enabled", "train_micro_batch_size_per_gpu"]
    for key in autos:
        *sections, name = key.split(".")
        inner = config
        for section in sections:
            inner = inner[section]
        inner[name] = "auto"
    found = problems(config, batch=False)
    assert sorted(line.partition(":")[0] for line in found) == sorted(autos)
    assert all('"auto" is not resolved' in line for line in found)


# Defaults of 0.19.8


def test_absent_clipping_is_one_and_says_so() -> None:
    resolved = load({})
    assert resolved.config.clip_grad_norm == 1.0
    assert resolved.origins["clip_grad_norm"] == "DeepSpeed's default of gradient_clipping"
    assert [note for note in resolved.notes if note.startswith("gradient_clipping is absent: 1.0")]
    assert not [note for note in load({"gradient_clipping": 1.0}).notes if "absent: 1.0" in note]


def test_absent_stage_is_zero() -> None:
    assert load({}).config.stage == 0
    assert load({"zero_optimization": {}}).config.stage == 0


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({}, "train_batch_size: give it or train_micro_batch_size_per_gpu; neither is there"),
        (
            {"gradient_accumulation_steps": 2},
            "train_batch_size: give it or train_micro_batch_size_per_gpu; neither is there",
        ),
        (
            {"train_batch_size": 9, "gradient_accumulation_steps": 2},
            "train_batch_size: 9 is not a multiple of gradient_accumulation_steps 2 * 2 ranks = 4",
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
            "train_batch_size: 8 is not train_micro_batch_size_per_gpu 3 * gradient_accumulation_steps 1 * 2 ranks = 6",
        ),
        ({"train_batch_size": -8}, "train_batch_size: expected an integer >= 1, got -8"),
        ({"train_batch_size": 8.5}, "train_batch_size: expected an integer >= 1, got 8.5"),
    ],
)
def test_batch_that_cannot_be_is_refused_in_deepspeed_names(batch: dict[str, Any], said: str) -> None:
    assert problems(batch, batch=False) == [said]


def test_batch_needs_one_number_only() -> None:
    assert vars(load_config({"train_batch_size": 8}, num_ranks=2).batch) == {"size": 8, "micro": 4, "accumulation": 1}
    micro_only = load_config({"train_micro_batch_size_per_gpu": 3}, num_ranks=2)
    assert vars(micro_only.batch) == {"size": 6, "micro": 3, "accumulation": 1}


# Optimizers and schedulers


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAM", "AdamW", "adamw"])
@pytest.mark.parametrize("torch_adam", [False, True])
def test_adam_is_adamw_unless_told_otherwise(name: str, torch_adam: bool) -> None:
    params = {"lr": 0.1, "weight_decay": 0.0, "torch_adam": torch_adam}
    assert load({"optimizer": {"type": name, "params": params}}).config.optimizer == AdamWConfig(name="adamw", lr=0.1)
    coupled = load({"optimizer": {"type": name, "params": params | {"adam_w_mode": False}}})
    if name.lower() == "adam":
        assert coupled.config.optimizer == AdamConfig(name="adam", lr=0.1)
    else:
        assert coupled.config.optimizer == AdamWConfig(name="adamw", lr=0.1)
        assert [note for note in coupled.notes if "adam_w_mode: no effect" in note]


def test_weight_decay_default_follows_the_implementation() -> None:
    for kind, torch_adam, decay in (("Adam", True, 0.01), ("AdamW", True, 0.01), ("AdamW", False, 0.0)):
        resolved = load({"optimizer": {"type": kind, "params": {"torch_adam": torch_adam}}})
        assert resolved.config.optimizer is not None
        assert resolved.config.optimizer.weight_decay == decay
    coupled = load({"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}})
    assert coupled.config.optimizer == AdamConfig(name="adam")


def test_defaults_of_lion_and_sgd_are_those_of_deepspeed() -> None:
    assert load({"optimizer": {"type": "Lion"}}).config.optimizer == LionConfig(
        name="lion", lr=1e-3, betas=[0.9, 0.999]
    )
    assert load({"optimizer": {"type": "SGD"}}).config.optimizer == SGDConfig(name="sgd", lr=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"type": "Lamb"}, 'optimizer.type: "Lamb" is not in this version; There are'),
        ({"type": "muon"}, 'optimizer.type: "muon" is not in this version'),
        ({"type": "OneBitAdam"}, 'optimizer.type: "OneBitAdam" is not in this version'),
        ({"type": "AdmaW"}, 'optimizer.type: "AdmaW" is no optimizer here; did you mean AdamW?'),
        ({"type": "torch.optim.AdamW"}, 'optimizer.type: "torch.optim.AdamW" is no optimizer here'),
        ({"type": "os.system"}, 'optimizer.type: "os.system" is no optimizer here'),
        ({"params": {"lr": 0.1}}, "optimizer.type: is missing; one of Adam, AdamW"),
        ({"type": None}, "optimizer.type: expected a string, got null"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.99]}}, "optimizer.params.betas: is no parameter of SGD"),
        ({"type": "Adam", "params": {"lr": -1}}, "optimizer.params.lr: expected a number >= 0, got -1"),
        ({"type": "Adam", "params": {"betas": [0.9, 1.5]}}, "optimizer.params.betas[1]: must be less than 1, got 1.5"),
        ({"type": "Adam", "params": {"lr": "1e-3"}}, 'optimizer.params.lr: expected a number >= 0, got "1e-3"'),
        ({"type": "Adam", "lr": 1e-3}, "optimizer.lr: unknown key; did you mean optimizer.params.lr?"),
        ({"type": "Adam", "params": {"learning_rate": 1}}, "optimizer.params.learning_rate: unknown key"),
        ({"type": "Adam", "params": {"max_grad_norm": 1.0}}, "write gradient_clipping at the top"),
        ({"type": "Adam", "params": 3}, "optimizer.params: expected a section, got 3"),
    ],
)
def test_optimizer_that_cannot_be_is_refused(optimizer: dict[str, Any], said: str) -> None:
    (found,) = problems({"optimizer": optimizer})
    assert said in found


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"type": "warmuplr"}, 'scheduler.type: "warmuplr" is no scheduler here; did you mean WarmupLR?'),
        ({"type": "StepLR"}, 'scheduler.type: "StepLR" is no scheduler here'),
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: is missing, and has no default"),
        ({"type": "WarmupCosineLR", "params": {}}, "scheduler.params.total_num_steps: is missing"),
        ({"type": "WarmupLR", "params": {"cycle_min_lr": 1}}, "cycle_min_lr: is no parameter of WarmupLR"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "warmup_num_steps: expected an integer >= 1, got 0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "warmup_type: expected one of log, linear"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}, "scheduler.params.cycle_max_lr: is missing"),
        ({"params": {}}, "scheduler.type: is missing; one of WarmupLR"),
    ],
)
def test_scheduler_that_cannot_be_is_refused(scheduler: dict[str, Any], said: str) -> None:
    (found,) = problems({"scheduler": scheduler})
    assert said in found


def test_highest_rate_of_a_warm_up_has_the_default_of_its_class() -> None:
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}
    scheduler = load({"scheduler": decay}).config.scheduler
    assert isinstance(scheduler, WarmupDecayConfig)
    assert scheduler.max_lr == 1e-3
    decay["params"]["warmup_max_lr"] = None  # type: ignore[index]
    scheduler = load({"scheduler": decay}).config.scheduler
    assert isinstance(scheduler, WarmupDecayConfig)
    assert scheduler.max_lr is None
    scheduler = load({"scheduler": {"type": "WarmupLR"}}).config.scheduler
    assert isinstance(scheduler, WarmupConfig)
    assert scheduler.max_lr is None


def test_rates_per_group_are_kept() -> None:
    params = {"warmup_min_lr": [0, 1e-5], "warmup_max_lr": [1e-3, 1e-2]}
    scheduler = load({"scheduler": {"type": "WarmupLR", "params": params}}).config.scheduler
    assert isinstance(scheduler, WarmupConfig)
    assert (scheduler.min_lr, scheduler.max_lr) == ([0, 1e-5], [1e-3, 1e-2])


# Precision


def test_loss_scale_of_a_file_without_fp16_means_nothing() -> None:
    fp16 = {"enabled": False, "loss_scale": 128, "initial_scale_power": 4, "min_loss_scale": 2}
    resolved = load({"fp16": fp16, "bf16": {"enabled": True}})
    assert resolved.config.loss_scale == load({}).config.loss_scale
    assert resolved.config.precision.param == "bf16"


def test_fixed_loss_scale_leaves_the_dynamic_settings_out() -> None:
    resolved = load({"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 50, "hysteresis": 3}})
    assert resolved.config.loss_scale.fixed == 128.0
    assert resolved.config.loss_scale.growth_interval == 1000
    (note,) = (note for note in resolved.notes if "is fixed" in note)
    assert note.startswith("fp16.{loss_scale_window, hysteresis}")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "fp16.enabled and bfloat16.enabled are both true"),
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
            "bfloat16.enabled: the same setting as bf16.enabled",
        ),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale: must be more than 0, got 0"),
        ({"fp16": {"enabled": True, "initial_scale_power": 500}}, "expected an integer from 0 to 127, got 500"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
            "fp16.min_loss_scale: 8.0 is above",
        ),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale: expected a number >= 0, got -1"),
        ({"fp16": {"enabled": "true"}}, 'fp16.enabled: expected true or false, got "true"'),
        ({"fp16": True}, "fp16: expected a section, got true"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states: only together with"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype: expected one of fp32, fp16, bf16"),
        ({"communication_data_type": "fp8"}, "communication_data_type: expected one of fp32, fp16, bf16"),
    ],
)
def test_precision_that_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    (found,) = problems(config)
    assert said in found


def test_accumulation_dtype_that_differs_is_told() -> None:
    assert [note for note in load({"bf16": {"enabled": True}}).notes if "grad_accum_dtype is absent" in note]
    assert not [note for note in load({}).notes if "grad_accum_dtype" in note]
    given = load({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "torch.float32"}})
    assert given.config.precision.accumulate == "fp32"
    assert not [note for note in given.notes if "grad_accum_dtype" in note]


# Offloading


HOST = (
    {"offload_optimizer": {"device": "cpu"}},
    {"offload_param": {"device": "cpu", "pin_memory": True}},
    {"cpu_offload": True},
    {"cpu_offload_param": True},
)


@pytest.mark.parametrize("zero", HOST, ids=str)
def test_offloading_to_the_host_is_accepted_on_the_cpu_only(zero: dict[str, Any]) -> None:
    key = next(iter(zero))
    resolved = load({"zero_optimization": {"stage": 3} | zero})
    assert resolved.config == load({"zero_optimization": {"stage": 3}}).config
    assert [note for note in resolved.notes if key in note and "training is on the CPU" in note]
    (found,) = problems({"zero_optimization": {"stage": 3} | zero}, device="cuda")
    assert found.startswith(f"zero_optimization.{key}")
    assert "not in this version" in found


def test_offloading_to_nvme_is_refused_everywhere() -> None:
    for device in ("cpu", "cuda"):
        (found,) = problems({"zero_optimization": {"offload_param": {"device": "nvme"}}}, device=device)
        assert found.startswith('zero_optimization.offload_param.device = "nvme": not in this version')


def test_changed_default_of_pinned_memory_is_told() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert [note for note in load({"zero_optimization": zero}).notes if "pin_memory is absent: true" in note]
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    assert not [note for note in load({"zero_optimization": zero}).notes if "pin_memory is absent" in note]


@pytest.mark.parametrize("key", ["offload_param", "offload_optimizer", "zenflow"])
def test_section_that_is_null_is_absent(key: str) -> None:
    assert load({"zero_optimization": {key: None}}, device="cuda").config == load({}).config


# Wrong keys


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown key; did you mean gradient_clipping?"),
        ({"comms_config": {}}, "comms_config: unknown key; did you mean comms_logger?"),
        ({"monitor_config": {}}, "monitor_config: unknown key; did you mean csv_monitor?"),
        ({"stage": 3}, "stage: unknown key; did you mean zero_optimization.stage?"),
        ({"lr": 3}, "lr: unknown key; did you mean optimizer.params.lr?"),
        (
            {"zero_optimization": {"stge": 2}},
            "zero_optimization.stge: unknown key; did you mean zero_optimization.stage?",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "did you mean zero_optimization.offload_param.device?",
        ),
        ({"zero_optimization": True}, 'zero_optimization: expected a section, got true; write {"stage": 1}'),
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage: must be at most 3, got 5"),
        ({"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}}, "the same setting as"),
        ({"optimizer": None}, "optimizer: expected a section, got null"),
    ],
    ids=str,
)
def test_wrong_key_is_named_with_the_nearest_valid_one(config: dict[str, Any], said: str) -> None:
    (found,) = problems(config)
    assert said in found


@pytest.mark.parametrize("rate", [-0.5, 0, 0.5])
def test_one_cycle_takes_what_deepspeed_takes(rate: float) -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": 0, "decay_step_size": 1}
    schedule = {"type": "OneCycle", "params": {**params, "decay_mom_rate": rate}}
    config = load_config({"train_batch_size": 1, "scheduler": schedule}, num_ranks=1).config
    assert isinstance(config.scheduler, OneCycleConfig)
    assert (config.scheduler.num_fall_steps, config.scheduler.momentum_decay_rate) == (0, rate)


def test_growth_of_a_range_test_below_zero_is_refused() -> None:
    schedule = {"type": "LRRangeTest", "params": {"lr_range_test_step_rate": -0.5}}
    with pytest.raises(ConfigError, match=r"lr_range_test_step_rate: expected a number >= 0, got -0.5"):
        load_config({"train_batch_size": 1, "scheduler": schedule}, num_ranks=1)
