"""Native settings: validation, batch arithmetic, contradictions, origins."""

from typing import Any

import pytest
import torch

from shardwise.config.model import AdamWConfig, Config
from shardwise.config.words import leaves
from shardwise.configure import json_schema, load_config
from shardwise.errors import ConfigError
from shardwise.optim.schedules import build_scheduler

SIZES = ("size", "micro", "accumulation")


def problems(config: object, num_ranks: int = 2, **options: Any) -> list[str]:
    """Return the lines of the error that a configuration gives."""
    with pytest.raises(ConfigError) as caught:
        load_config(config, num_ranks=num_ranks, dialect="native", **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "pydantic" not in text
    assert "http" not in text
    first, *rest = text.split("\n  - ")
    return rest or [first.removeprefix("config: ")]


def test_nothing_written_gives_the_defaults() -> None:
    resolved = load_config(None, num_ranks=3)
    assert resolved.config.model_copy(update={"batch": Config().batch}) == Config()
    assert vars(resolved.batch) == {"size": 3, "micro": 1, "accumulation": 1}
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.notes == ()


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("given", [SIZES, SIZES[:2], SIZES[1:], ("size", "accumulation"), ("size",), ("micro",)])
def test_batch_is_completed_from_what_is_given(given: tuple[str, ...], num_ranks: int) -> None:
    accumulation = 3 if "accumulation" in given or len(given) > 1 else 1
    whole = {"size": 4 * accumulation * num_ranks, "micro": 4, "accumulation": accumulation}
    resolved = load_config({"batch": {name: whole[name] for name in given}}, num_ranks=num_ranks)
    assert vars(resolved.batch) == whole
    assert {name: getattr(resolved.config.batch, name) for name in SIZES} == whole
    for name in SIZES:
        assert resolved.origins[f"batch.{name}"].startswith("config" if name in given else "from batch."), name


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"size": 7}, "batch.size: 7 is not a multiple of batch.accumulation 1 * 2 ranks = 2"),
        ({"size": 12, "micro": 4}, "batch.size: 12 is not a multiple of batch.micro 4 * 2 ranks = 8"),
        ({"size": 12, "accumulation": 4}, "batch.size: 12 is not a multiple of batch.accumulation 4 * 2 ranks = 8"),
        (
            {"size": 32, "micro": 4, "accumulation": 2},
            "batch.size: 32 is not batch.micro 4 * batch.accumulation 2 * 2 ranks = 16; it is right for 4 ranks",
        ),
        ({"accumulation": 2}, "batch.size: give it or batch.micro; neither is there"),
        ({"size": 0}, "batch.size: must be at least 1, got 0"),
        ({"micro": -4}, "batch.micro: must be at least 1, got -4"),
        ({"micro": 1.5}, "batch.micro: expected an integer, got 1.5"),
        ({"micro": True}, "batch.micro: expected an integer, got true"),
        ({"micro": "4"}, 'batch.micro: expected an integer, got "4"'),
        ({"sizes": 4}, "batch.sizes: unknown key; did you mean batch.size?"),
    ],
)
def test_batch_that_cannot_be_is_refused_with_the_numbers(batch: dict[str, Any], said: str) -> None:
    assert problems({"batch": batch}) == [said]


def test_every_problem_is_in_one_error() -> None:
    found = problems(
        {
            "stge": 3,
            "gradient_clipping": 1.0,
            "clip_grad_norm": -1,
            "loss_reduction": "avg",
            "batch": {"size": 32, "micro": 3, "accumulation": 2, "drop_last": 1},
            "precision": {"param": "bf16"},
            "loss_scale": {"initial": 256.0},
            "optimizer": {"name": "sgd", "lr": "fast", "betas": [0.9, 0.99], "nesterov": True},
            "scheduler": {"name": "warmup_cosin"},
            "overlap": 3,
        }
    )
    assert found == [
        "loss_reduction: expected 'mean' or 'sum', got \"avg\"",
        "clip_grad_norm: must be at least 0, got -1",
        "batch.drop_last: expected true or false, got 1",
        'optimizer.lr: expected a number, got "fast"',
        "optimizer.betas: unknown key for optimizer sgd; another optimizer has it, sgd has not",
        'scheduler.name: no scheduler is called "warmup_cosin"; did you mean warmup_cosine? '
        "There are warmup, warmup_decay, warmup_cosine, lr_range_test, one_cycle",
        "overlap: expected a section, got 3",
        "stge: unknown key; did you mean stage?",
        found[8],
        "loss_scale.initial: only for fp16, but precision.param is bf16; remove one of them",
    ]
    assert found[8].startswith("gradient_clipping: unknown key; ")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"stage": True}, "stage: expected an integer, got true"),
        ({"stage": 2.0}, "stage: expected an integer, got 2.0"),
        ({"stage": 4}, "stage: must be at most 3, got 4"),
        ({"seed": 2**32}, "seed: must be less than 4294967296, got 4294967296"),
        ({"optimiser": {"name": "sgd"}}, "optimiser: unknown key; did you mean optimizer?"),
        ({"micro": 4}, "micro: unknown key; did you mean batch.micro?"),
        ({"train": {"stage": 2}}, "train.stage: unknown key; did you mean stage?"),
        ({"overlap": {"prefech": 2}}, "overlap.prefech: unknown key; did you mean overlap.prefetch?"),
        ({"optimizer": {}}, "optimizer.name: is missing; one of adam, adamw, sgd, adagrad, lion"),
        ({"optimizer": {"name": "torch.optim.Adam"}}, None),
        ({"optimizer": {"name": "adam", "betas": [0.9]}}, "optimizer.betas: needs 2 items, got 1"),
        ({"optimizer": {"name": "adam", "betas": [0.9, 1.0]}}, "optimizer.betas[1]: must be less than 1, got 1.0"),
        ({"optimizer": {"name": "adam", "eps": float("nan")}}, "optimizer.eps: expected a finite number, got NaN"),
        (
            {"optimizer": {"name": "sgd", "nesterov": True}},
            "optimizer.nesterov: needs a momentum above 0 and no dampening",
        ),
        ({"scheduler": {"name": "warmup_decay"}}, "scheduler.total_steps: is missing, and has no default"),
        ({"scheduler": {"name": "warmup", "min_lr": "x"}}, 'scheduler.min_lr: expected a number, got "x"'),
        ({"scheduler": {"name": "warmup", "min_lr": [1, "x"]}}, 'scheduler.min_lr[1]: expected a number, got "x"'),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm: expected a finite number, got Infinity"),
        ({"clip_grad_norm": 10**5000}, "clip_grad_norm: expected a number, got an integer of 16610 bits"),
        ({"optimizer": {"name": "adamw", "betas": 0.9}}, "optimizer.betas: expected a list, got 0.9"),
        ({"precision": {"param": "bfloat16"}}, None),
        ({"loss_scale": {"minimum": 4.0, "initial": 2.0}}, None),
        ({"loss_scale": {"fixed": 128.0, "hysteresis": 3}}, None),
    ],
)
def test_wrong_setting_is_named_in_plain_words(config: dict[str, Any], said: str | None) -> None:
    (found,) = problems(config)
    if said is not None:
        assert found == said
    else:
        section, inner = next(iter(config.items()))
        assert found.startswith(f"{section}.")
        assert any(name in found for name in inner)


def test_loss_scale_settings_need_no_precision_of_their_own() -> None:
    assert load_config({"loss_scale": {"initial": 256.0}}, num_ranks=1).config.loss_scale.initial == 256.0


def test_clipping_at_zero_is_off() -> None:
    resolved = load_config({"clip_grad_norm": 0.0}, num_ranks=1)
    assert resolved.config.clip_grad_norm is None
    assert resolved.origins["clip_grad_norm"] == "config"


def test_every_effective_value_has_an_origin() -> None:
    config = {"stage": 2, "batch": {"size": 8}, "optimizer": {"name": "adamw", "lr": 0.1}}
    resolved = load_config(config, num_ranks=2, overrides=["optimizer.eps=1e-6"])
    assert set(resolved.origins) == set(leaves(resolved.config.model_dump()))
    told = {key: origin for key, origin in resolved.origins.items() if origin != "default"}
    assert told == {
        "stage": "config",
        "batch.size": "config",
        "batch.micro": "from batch.size, 2 ranks",
        "batch.accumulation": "from batch.size, 2 ranks",
        "optimizer.name": "config",
        "optimizer.lr": "config",
        "optimizer.eps": "--set optimizer.eps",
    }


def test_config_object_is_a_source_like_any_other() -> None:
    config = Config(stage=1, optimizer=AdamWConfig(name="adamw", lr=0.5))
    resolved = load_config(config, num_ranks=1)
    assert resolved.config.stage == 1
    assert resolved.config.optimizer == config.optimizer
    assert {resolved.origins[key] for key in ("stage", "optimizer.lr")} == {"config"}
    assert resolved.origins["seed"] == "default"


def test_hardly_meant_combinations_are_remarked() -> None:
    cycle = {"name": "one_cycle", "min_lr": 0.1, "max_lr": 0.2, "decay_rate": 0.5}
    (note,) = load_config({"scheduler": cycle}, num_ranks=1).notes
    assert "scheduler.decay_rate has no effect" in note


CYCLE = {"name": "one_cycle", "min_lr": 0.1, "max_lr": 0.2}
TOO_LARGE = "must be at most 9223372036854775807, got an integer of 1329 bits"


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({**CYCLE, "min_lr": 0.3}, "scheduler.min_lr: 0.3 is above scheduler.max_lr 0.2"),
        ({**CYCLE, "min_lr": [0.1, 0.3]}, "scheduler.min_lr: [0.1, 0.3] is above scheduler.max_lr 0.2"),
        ({**CYCLE, "max_lr": [0.2, 0.05]}, "scheduler.min_lr: 0.1 is above scheduler.max_lr [0.2, 0.05]"),
        ({**CYCLE, "min_lr": []}, "scheduler.min_lr: needs at least 1 item, got 0"),
        ({**CYCLE, "max_momentum": []}, "scheduler.max_momentum: needs at least 1 item, got 0"),
        ({**CYCLE, "num_fall_steps": 10**400}, f"scheduler.num_fall_steps: {TOO_LARGE}"),
        (
            {**CYCLE, "momentum_decay_rate": float("nan")},
            "scheduler.momentum_decay_rate: expected a finite number, got NaN",
        ),
        ({"name": "lr_range_test", "growth": -0.5}, "scheduler.growth: must be at least 0, got -0.5"),
        *(
            (
                {"name": name, "total_steps": 10, "num_warmup_steps": 11},
                "scheduler.total_steps: 10 is less than scheduler.num_warmup_steps 11",
            )
            for name in ("warmup_decay", "warmup_cosine")
        ),
    ],
)
def test_schedule_that_cannot_be_built_is_refused_by_the_configuration(schedule: dict[str, Any], said: str) -> None:
    assert problems({"scheduler": schedule}) == [said]


@pytest.mark.parametrize(
    "schedule",
    [
        {**CYCLE, "min_lr": 0.2},
        {**CYCLE, "min_lr": [0.2], "max_lr": [0.2]},
        {**CYCLE, "momentum_decay_rate": -0.5, "decay_interval": 1},
        {**CYCLE, "num_fall_steps": 0, "fall_stairs": 0},
        {"name": "lr_range_test", "growth": 0.0},
        {"name": "warmup_decay", "total_steps": 10, "num_warmup_steps": 10},
    ],
    ids=str,
)
def test_schedule_at_its_limits_is_accepted_and_built(schedule: dict[str, Any]) -> None:
    assert load_config({"scheduler": schedule}, num_ranks=1).config.scheduler is not None
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    options = {key: value for key, value in schedule.items() if key != "name"}
    assert build_scheduler(schedule["name"], options, optimizer).last_epoch == 0


@pytest.mark.parametrize("key", ["batch.micro", "batch.size", "batch.accumulation", "overlap.prefetch", "train.steps"])
def test_number_beyond_all_integers_of_a_machine_is_refused(key: str) -> None:
    section, _, name = key.partition(".")
    rest = {"micro": 1} if key == "batch.accumulation" else {}
    assert problems({section: {name: 10**400, **rest}}, num_ranks=1) == [f"{key}: {TOO_LARGE}"]
    assert load_config({section: {name: 2**63 - 1, **rest}}, num_ranks=1).origins[key] == "config"


@pytest.mark.parametrize("num_ranks", [0, -1, 2.0, True, "2"])
def test_number_of_ranks_has_to_be_one(num_ranks: Any) -> None:
    with pytest.raises(ConfigError, match="num_ranks: expected an integer >= 1"):
        load_config(None, num_ranks=num_ranks)


def test_schema_describes_every_setting() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["stage"]["description"] == "ZeRO stage."
    sections = [section for section in schema["$defs"].values() if "properties" in section]
    assert len(sections) >= 17
    for section in sections:
        assert section["additionalProperties"] is False
