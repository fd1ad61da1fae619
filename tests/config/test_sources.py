"""Files, dicts, ``--set`` and the choice of the dialect."""

import json
import os
from collections import OrderedDict, UserDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config.model import SGDConfig
from shardwise.config.read import MAX_FILE_BYTES
from shardwise.configure import load_config, read_config
from shardwise.errors import ConfigError


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, num_ranks=1, **options)
    return str(caught.value)


def test_toml_and_json_and_dict_mean_the_same(tmp_path: Path) -> None:
    config = {"stage": 2, "batch": {"micro": 3}, "optimizer": {"name": "sgd", "lr": 0.5}}
    toml, plain = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('stage = 2\nbatch.micro = 3\n[optimizer]\nname = "sgd"\nlr = 0.5\n', encoding="utf-8")
    plain.write_text(json.dumps(config), encoding="utf-8")
    found = [load_config(source, num_ranks=2) for source in (config, toml, plain, str(plain))]
    assert [resolved.config for resolved in found] == [found[0].config] * 4
    assert [resolved.origins["stage"] for resolved in found] == ["config", "a.toml", "a.json", "a.json"]


def test_json_with_another_suffix_and_a_mark_of_byte_order_is_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.conf"
    path.write_bytes(b"\xef\xbb\xbf" + b' {"stage": 1}')
    assert load_config(path, num_ranks=1).config.stage == 1


def test_dicts_of_any_kind_are_read_and_left_alone() -> None:
    inner = OrderedDict(micro=np.int64(3))
    config = UserDict({"batch": inner, "optimizer": UserDict(name="sgd", lr=np.float32(0.5))})
    resolved = load_config(config, num_ranks=1)
    assert resolved.batch.micro == 3
    assert type(resolved.batch.micro) is int
    assert resolved.config.optimizer is not None
    assert resolved.config.optimizer.lr == 0.5
    assert type(inner["micro"]) is np.int64


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{", "a.json: is not valid JSON"),
        ("a.json", b"// why\n{}", "comments are not JSON"),
        ("a.json", b"[1]", "a.json: expected an object {...}, got [1]"),
        ("a.json", b"\xff\xfe{}", "a.json: is not UTF-8"),
        ("a.json", b"[" * 100_000, "a.json: is not valid JSON"),
        ("a.json", b'{"a":' * 40 + b"1" + b"}" * 40, "is nested more than 32 deep"),
        ("a.json", b'{"clip_grad_norm": ' + b"9" * 5000 + b"}", "a.json: is not valid JSON"),
        ("a.json", b" " * (MAX_FILE_BYTES + 1), f"a.json: is larger than {MAX_FILE_BYTES} bytes"),
        ("a.json", b'{"clip_grad_norm": NaN}', "NaN is not a number that JSON has"),
        ("a.json", b'{"clip_grad_norm": -Infinity}', "-Infinity is not a number that JSON has"),
        ("a.json", b'{"clip_grad_norm": 1e999}', "the number 1e999 is too large"),
        ("a.json", b'{"stage": 1, "stage": 2}', "a.json: stage: is there twice"),
        ("a.json", b'{"batch": {"micro": 1, "micro": 2}}', "a.json: batch.micro: is there twice"),
        ("a.json", b'{"batch.micro": 1}', "a key has no dots"),
        ("a.json", b'{"": 1}', "a key has no dots and is not empty"),
        ("a.toml", b"stage = ", "a.toml: is not valid TOML"),
        ("a.toml", b"stage = 1\nstage = 2", "a.toml: is not valid TOML"),
        ("a.toml", b"seed = 2024-01-01", "seed: expected an integer, got a value of type date"),
        ("a.toml", b"clip_grad_norm = inf", "clip_grad_norm: expected a finite number, got Infinity"),
        ("a.yaml", b"stage: 3", "a.yaml: is it TOML or JSON? Call it *.toml or *.json"),
        ("a", b"", "is it TOML or JSON?"),
    ],
)
def test_file_that_is_no_configuration_is_refused_by_name(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert said in refusal(path)


def test_path_that_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert refusal(tmp_path).endswith("is a folder, expected a TOML or JSON file")
    assert refusal(tmp_path / "none.toml").endswith("none.toml: there is no such file")
    assert refusal(tmp_path / "pipe.json").endswith("is not a regular file")
    assert "cannot be read" in refusal("a\0b.json")
    assert "cannot be read" in refusal("x" * 5000)


@pytest.mark.parametrize("source", [3, [], b"a.json", {1, 2}])
def test_source_of_another_type_is_refused(source: object) -> None:
    assert "config: expected a path, a dict or None" in refusal(source)


def test_members_of_enumerations_count_as_their_values() -> None:
    class Kind(Enum):
        SGD = "sgd"
        TWO = 2

    resolved = load_config({"optimizer": {"name": Kind.SGD}, "stage": Kind.TWO}, num_ranks=1)
    assert resolved.config.optimizer == SGDConfig(name="sgd")
    assert resolved.config.stage == 2


def test_dict_that_holds_itself_is_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["batch"] = cycle
    assert "is nested more than 32 deep" in refusal(cycle)


def test_keys_that_are_no_strings_are_refused_with_their_place() -> None:
    assert "batch: keys are strings, got 3" in refusal({"batch": {3: 4}})


@pytest.mark.parametrize("key", ["\ud800", "stage\udcff", "\x1b[31mred", "a\0", "a\nb", "\u202egats"], ids=ascii)
@pytest.mark.parametrize("dialect", ["native", "deepspeed", None])
def test_key_that_cannot_be_printed_is_refused_and_shown_escaped(tmp_path: Path, key: str, dialect: Any) -> None:
    escaped = json.dumps(key)[1:-1]
    said = "a key has printable characters only"
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"batch": {key: 1}, key: 1}), encoding="ascii")
    for source in (path, {"batch": {key: 1}, key: 1}):
        text = refusal(source, dialect=dialect)
        assert f'"{escaped}": {said}' in text
        assert f'"batch.{escaped}": {said}' in text
        assert key not in text
    path.write_text(f'{{"{escaped}": 1, "{escaped}": 2}}', encoding="ascii")
    assert key not in refusal(path, dialect=dialect)
    for override in (f"{key}=1", f"batch.{key}=1", f"batch.{key}"):
        text = refusal({}, overrides=[override], dialect=dialect)
        assert key not in text
        assert escaped in text
    assert key not in refusal({}, overrides=[f'batch={{"{escaped}" = 3}}'], dialect=dialect)


def test_letters_of_all_languages_can_be_printed() -> None:
    assert "gr\u00f6\u00dfe: unknown key" in refusal({"gr\u00f6\u00dfe": 1})


def test_error_lists_fifty_problems_and_counts_the_others(tmp_path: Path) -> None:
    lines = refusal({f"key{number}": 1 for number in range(53)}, dialect="native").splitlines()
    assert lines[0] == "config: 53 problems:"
    assert len(lines) == 52
    assert lines[50].startswith("  - key49: unknown key")
    assert lines[51] == "  - and 3 more"
    assert len(refusal({f"key{number}": 1 for number in range(50)}, dialect="native").splitlines()) == 51


def test_overrides_in_one_string_are_refused() -> None:
    for overrides in ("stage=1", b"stage=1", 3, [3], None):
        assert "overrides: expected a list of strings such as" in refusal({}, overrides=overrides)
    assert load_config({}, num_ranks=1, overrides=("stage=1",)).config.stage == 1


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("stage=1", "stage", 1),
        ("optimizer.name=sgd", "optimizer.name", "sgd"),
        ('optimizer.name="sgd"', "optimizer.name", "sgd"),
        ("optimizer.lr = 1e-3", "optimizer.lr", 1e-3),
        ("data.path=['a', \"b\"]", "data.path", ["a", "b"]),
        ("train.output=2024-01-01", "train.output", "2024-01-01"),
        ("train.sample_prompt=a = b\nseed = 3", "train.sample_prompt", "a = b\nseed = 3"),
        ("batch.drop_last=true", "batch.drop_last", True),
        ("train.output=", "train.output", ""),
    ],
)
def test_override_is_toml_or_a_string(override: str, key: str, value: object) -> None:
    base = {"optimizer": {"name": "adam"}}
    resolved = load_config(base, num_ranks=1, overrides=[override])
    section, _, name = key.rpartition(".")
    holder = getattr(resolved.config, section) if section else resolved.config
    assert getattr(holder, name) == value
    assert resolved.origins[key] == f"--set {key}"


def test_override_of_a_section_is_merged() -> None:
    resolved = load_config({"batch": {"micro": 2}}, num_ranks=1, overrides=["batch={accumulation = 3}"])
    assert vars(resolved.batch) == {"size": 6, "micro": 2, "accumulation": 3}
    assert resolved.origins["batch.accumulation"] == "--set batch.accumulation"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stage"], "expected key=value"),
        (["=3"], "expected key=value"),
        (["a..b=3"], "expected key=value"),
        (["stage=1", "stage=1"], "--set stage: is given twice"),
        (["stage.x=1"], "--set stage.x: stage is not a section"),
        (["stge=1"], "stge: unknown key; did you mean stage?"),
        (["optimizer.lr=fast"], 'optimizer.lr: expected a number, got "fast"'),
        (["overlap=3"], "overlap: expected a section, got 3"),
    ],
)
def test_override_that_is_wrong_is_refused(overrides: list[str], said: str) -> None:
    base = {"stage": 2, "optimizer": {"name": "adam"}}
    assert said in refusal(base, overrides=overrides)


def test_overrides_of_a_deepspeed_file_take_its_names_and_native_ones() -> None:
    source = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
    overrides = ["zero_optimization.stage=3", "optimizer.params.lr=0.5", "train.steps=7", "overlap.prefetch=2"]
    resolved = load_config(source, num_ranks=1, overrides=overrides)
    assert resolved.config.stage == 3
    assert resolved.config.train.steps == 7
    assert resolved.config.overlap.prefetch == 2
    assert resolved.config.optimizer is not None
    assert resolved.config.optimizer.lr == 0.5
    assert resolved.origins["stage"] == "--set zero_optimization.stage"
    assert resolved.origins["optimizer.lr"] == "--set optimizer.params.lr"
    assert resolved.origins["train.steps"] == "--set train.steps"
    assert "optimizer.momentum: unknown key for optimizer adamw" in refusal(
        source, overrides=["optimizer.momentum=0.5"]
    )
    assert "config: clip_grad_norm: must be at least 0" in refusal(source, overrides=["clip_grad_norm=-1"])
    betas = {**source, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}
    wrong = refusal(betas, overrides=["optimizer.name=sgd"])
    assert wrong == "config: optimizer.params.betas: not a setting of sgd"
    merged = load_config(source, num_ranks=1, overrides=["zero_optimization={stage=2, overlap_comm=true}"])
    assert merged.config.stage == 2
    assert merged.origins["stage"] == "--set zero_optimization.stage"
    assert "zero_optimization.stag: unknown key" in refusal(source, overrides=["zero_optimization.stag=3"])


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({}, "native"),
        ({"stage": 2}, "native"),
        ({"stge": 2}, "native"),
        ({"optimizer": {"name": "adam"}}, "native"),
        ({"optimizer": {"lr": 0.1}}, "native"),
        ({"optimizer": {"type": "Adam"}}, "deepspeed"),
        ({"scheduler": {"params": {}}}, "deepspeed"),
        ({"train_batch_size": 2, "stage": 3, "bf16": {}}, "deepspeed"),
        ({"zero_optimisation": {"stage": 2}}, "deepspeed"),
        ({"gradient_cliping": 1.0}, "deepspeed"),
        ({"zero_optimization": {}, "optimizer": {"name": "adam"}}, "deepspeed"),
        ({"batch": {}, "optimizer": {"type": "adam"}}, "native"),
        ({"x": 1, "y": 2}, "native"),
    ],
    ids=str,
)
def test_dialect_is_that_whose_names_fit(config: dict[str, Any], dialect: str) -> None:
    assert read_config(config).dialect == dialect


def test_dialect_can_be_forced(tmp_path: Path) -> None:
    assert "train_batch_size: give it" in refusal({}, dialect="deepspeed")
    assert "train_batch_size: unknown key" in refusal({"train_batch_size": 2}, dialect="native")
    assert "dialect: expected native or deepspeed" in refusal({}, dialect="torch")
    path = tmp_path / "ds.toml"
    path.write_text("train_batch_size = 4", encoding="utf-8")
    assert load_config(path, num_ranks=1, dialect="deepspeed").batch.size == 4
    assert "train_batch_size: unknown key" in refusal(path)


NATIVE_IN_FOREIGN = "a native name, where DeepSpeed's are read: the two cannot be mixed"
FOREIGN_IN_NATIVE = "a name of DeepSpeed's, where native ones are read: the two cannot be mixed"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"stage": 2, "zero_optimization": {"stage": 2}}, f"zero_optimization: unknown key; {FOREIGN_IN_NATIVE}"),
        (
            {"stage": 2, "gradient_clipping": 1.0},
            f"gradient_clipping: unknown key; {FOREIGN_IN_NATIVE}; write clip_grad_norm",
        ),
        (
            {"stage": 2, "seed": 1, "train_batch_size": 2},
            f"train_batch_size: unknown key; {FOREIGN_IN_NATIVE}; write batch.size",
        ),
        (
            {"train_batch_size": 2, "zero_optimization": {}, "clip_grad_norm": 2.0},
            f"clip_grad_norm: unknown key; {NATIVE_IN_FOREIGN}; write gradient_clipping",
        ),
        (
            {"train_batch_size": 2, "zero_optimization": {}, "overlap": {"prefetch": 2}},
            f"overlap: unknown key; {NATIVE_IN_FOREIGN}",
        ),
        (
            {"train_batch_size": 2, "zero_optimization": {}, "stage": 2},
            "stage: unknown key; did you mean zero_optimization.stage?",
        ),
        ({"train_batch_size": 2, "zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_opt"),
    ],
    ids=str,
)
def test_names_of_the_other_dialect_are_told_apart_from_misspelt_ones(config: dict[str, Any], said: str) -> None:
    assert said in refusal(config)
    assert ("did you mean" in said) == ("did you mean" in refusal(config))
