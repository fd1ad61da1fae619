"""C42: a key nobody reads. One error that lists all, nothing ignored, the absent clipping told."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.configure import load_config
from shardwise.errors import ConfigError


def test_c42_every_mistake_of_a_deepspeed_file_is_in_one_error(tmp_path: Path) -> None:
    text = """{
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_cliping": 1.0,
        "gradient_clipping": -1.0,
        "zero_optimisation": {"stage": 2},
        "zero_optimization": {"stage": 2, "overlap_com": true, "reduce_bucket_size": "auto", "stage": 1},
        "fp16": {"enabled": true, "hysteresis": 1.5},
        "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": -0.1}},
        "steps_per_print": 0.5
    }"""
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    for num_ranks in (1, 2):  # the same on all ranks, whatever else they know
        messages = set()
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                load_config(path, num_ranks=num_ranks)
            messages.add(str(caught.value))
        (message,) = messages
        first, *found = message.split("\n  - ")
        assert first == f"ds_config.json: {len(found)} problems:"
        product = "train_batch_size: 32 is not train_micro_batch_size_per_gpu 3 * gradient_accumulation_steps 2 * "
        assert sorted(found) == sorted(
            [
                "zero_optimization.stage: is there twice",
                "gradient_cliping: unknown key; did you mean gradient_clipping?",
                "gradient_clipping: expected a number >= 0, got -1.0",
                "zero_optimisation: unknown key; did you mean zero_optimization?",
                "zero_optimization.overlap_com: unknown key; did you mean zero_optimization.overlap_comm?",
                'zero_optimization.reduce_bucket_size: "auto" is not resolved: the tool that you took this file from '
                "fills it in; write a value",
                "fp16.hysteresis: expected an integer >= 1, got 1.5",
                "fp16.enabled and bf16.enabled are both true; choose one of them",
                'optimizer.params.lr: "auto" is not resolved: the tool that you took this file from fills it in; '
                "write a value",
                "optimizer.params.weight_decay: expected a number >= 0, got -0.1",
                "steps_per_print: expected an integer, got 0.5",
                f"{product}{num_ranks} rank{'s' if num_ranks > 1 else ''} = {6 * num_ranks}",
            ]
        )


@pytest.mark.parametrize(
    "leave_out", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
)
def test_c42_two_of_three_batch_numbers_give_the_third(leave_out: str) -> None:
    numbers = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    written = {key: value for key, value in numbers.items() if key != leave_out}
    assert vars(load_config(written, num_ranks=2).batch) == {"size": 24, "micro": 3, "accumulation": 4}


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -2, 2.5, "auto", "8", True, None, [8], 10**400])
def test_c42_batch_number_that_is_none_is_refused_by_name(key: str, value: Any) -> None:
    config = {"train_batch_size": 8, key: value}
    with pytest.raises(ConfigError, match=f"config: {key}: ") as caught:
        load_config(config, num_ranks=2, dialect="deepspeed")
    assert "problems" not in str(caught.value)  # nothing follows from it


def test_c42_absent_clipping_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8}), encoding="utf-8")
    resolved = load_config(path, num_ranks=2)
    assert resolved.config.clip_grad_norm == 1.0
    assert [note for note in resolved.notes if note.startswith("gradient_clipping is absent: 1.0")]
