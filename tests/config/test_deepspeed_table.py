"""Each key of DeepSpeed, one at a time: what it changes, or that it is refused, or that it says why it does nothing."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardwise.config.resolve import Resolved
from shardwise.configure import explain_config, load_config
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import deepspeed_keys
from shardwise.interop.deepspeed.keys import ALIASES, KEYS
from shardwise.interop.deepspeed.kinds import Kind

LIST = Path(__file__).parent / "deepspeed_keys.txt"


class Row(NamedTuple):
    key: str
    fate: str
    value: Any
    quiet: Any  # a list of one value, or empty


def rows() -> list[Row]:
    found = []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            key, fate, value, *quiet = (part.strip() for part in line.split(" | "))
            found.append(Row(key, fate, json.loads(value), [json.loads(part) for part in quiet]))
    return found


ROWS = tuple(rows())

# Another key that has to be there, so that the one under test means something.
NEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("optimizer.params.momentum", {"optimizer.type": "SGD"}),
    ("optimizer.params.dampening", {"optimizer.type": "SGD"}),
    ("optimizer.params.nesterov", {"optimizer.type": "SGD", "optimizer.params.momentum": 0.5}),
    ("optimizer.params.lr_decay", {"optimizer.type": "Adagrad"}),
    ("optimizer.params.initial_accumulator_value", {"optimizer.type": "Adagrad"}),
    ("optimizer.", {"optimizer.type": "Adam"}),
    ("scheduler.type", {}),
    *((f"scheduler.params.{name}", {
        "scheduler.type": "WarmupCosineLR", "scheduler.params.total_num_steps": 9000,
    }) for name in ("warmup_min_ratio", "cos_min_ratio")),
    ("scheduler.params.lr_range", {"scheduler.type": "LRRangeTest"}),
    ("scheduler.params.cycle", {
        "scheduler.type": "OneCycle", "scheduler.params.cycle_min_lr": 1e-3, "scheduler.params.cycle_max_lr": 1e-1,
    }),
    ("scheduler.params.decay", {
        "scheduler.type": "OneCycle", "scheduler.params.cycle_min_lr": 1e-3, "scheduler.params.cycle_max_lr": 1e-1,
        "scheduler.params.decay_step_size": 2,
    }),
    ("scheduler.", {"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 9000}),
    ("fp16.enabled", {}),
    ("fp16.", {"fp16.enabled": True}),
    ("bf16.enabled", {}),
    ("bf16.bf16_master_weights_and_grads", {"bf16.enabled": True, "bf16.bf16_optimizer_states": True}),
    ("bf16.bf16_optimizer_states", {"bf16.enabled": True, "bf16.bf16_master_weights_and_grads": True}),
    ("bf16.", {"bf16.enabled": True}),
    ("torch_autocast.dtype", {"torch_autocast.enabled": True}),
    ("torch_autocast.lower", {"torch_autocast.enabled": True}),
    ("data_types.", {"bf16.enabled": True}),
)  # fmt: skip
TOGETHER = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")  # neither goes alone


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


def context(key: str) -> dict[str, Any]:
    """Return the other keys of a file in which ``key`` means something."""
    needs = next((found for start, found in NEEDS if key.startswith(start)), {})
    batch = {"train_micro_batch_size_per_gpu": 2}
    if key.startswith("train_"):
        batch = {"gradient_accumulation_steps": 1}
    return {name: value for name, value in (batch | needs).items() if name != key}


def load(flat: dict[str, Any]) -> Resolved:
    return load_config(nested(flat), num_ranks=2, dialect="deepspeed")


def baseline(key: str) -> Resolved:
    others = context(key)
    if key.startswith("train_"):
        others["train_micro_batch_size_per_gpu"] = 1
    if key == "optimizer.type":
        others[key] = "SGD"
    if key == "scheduler.type":
        others[key] = "LRRangeTest"
    if key in ("scheduler.params.total_num_steps", "scheduler.params.cycle_max_lr"):
        others[key] = 1000
    if key == "scheduler.params.cycle_min_lr":
        others[key] = 0.05
    for name in TOGETHER:
        if key in TOGETHER:
            others.pop(name, None)
    return load(others)


def case(fates: tuple[str, ...], *, quiet: bool = False) -> pytest.MarkDecorator:
    chosen = [row for row in ROWS if row.fate in fates and (row.quiet or not quiet)]
    assert chosen
    return pytest.mark.parametrize("row", chosen, ids=[row.key for row in chosen])


def test_the_list_has_every_key_once() -> None:
    names = [row.key for row in ROWS]
    assert len(names) == len(set(names))
    assert set(KEYS) == {ALIASES.get(name, name) for name in names}
    assert set(names) <= set(deepspeed_keys())


def test_fates_agree_with_the_list() -> None:
    for row in ROWS:
        found = KEYS[ALIASES.get(row.key, row.key)]
        if row.fate == "tuning":
            assert found.switch, row.key
        else:
            assert found.fate == row.fate, row.key
            assert [found.is_quiet(value) for value in row.quiet] == [True] * len(row.quiet), row.key


@case(("same", "mapped"))
def test_key_with_a_meaning_changes_an_effective_setting(row: Row) -> None:
    if row.key == "optimizer.params.torch_adam":
        changed = load({"train_batch_size": 2, "optimizer.type": "AdamW", row.key: True})
        assert changed.config.optimizer is not None
        assert changed.config.optimizer.weight_decay == 0.01
        return
    if row.key == "data_types.param_dtype":  # only a check
        assert load({**context(row.key), row.key: "bfloat16"}) == baseline(row.key)
        with pytest.raises(ConfigError, match="does not agree"):
            load({**context(row.key), row.key: "fp16"})
        return
    before, after = baseline(row.key), load({**context(row.key), row.key: row.value})
    assert after.config != before.config
    assert any(origin == f"config: {row.key}" for origin in after.origins.values())


@case(("mapped",), quiet=True)
def test_quiet_value_of_a_mapped_key_changes_nothing(row: Row) -> None:
    quiet = load({**context(row.key), row.key: row.quiet[0]})
    assert quiet.config == load(context(row.key)).config


@case(("no effect",))
def test_key_without_effect_changes_nothing_and_says_why(row: Row) -> None:
    others = context(row.key)
    after = load({**others, row.key: row.value})
    assert after.config == load(others).config
    last = row.key.rpartition(".")[2]
    assert [note for note in after.notes if last in note and ": no effect here: " in note], after.notes


@case(("no effect",), quiet=True)
def test_quiet_value_of_a_key_without_effect_says_nothing(row: Row) -> None:
    others = context(row.key)
    assert load({**others, row.key: row.quiet[0]}).notes == load(others).notes


@case(("later", "refused"))
def test_key_that_asks_for_what_is_not_here_is_refused_by_name(row: Row) -> None:
    others = context(row.key)
    others.pop("torch_autocast.enabled", None)
    device = "cuda" if "offload" in row.key else "cpu"
    tree = nested({**others, row.key: row.value})
    if row.key.startswith("torch_autocast.") and row.key != "torch_autocast.enabled":
        tree["torch_autocast"]["enabled"] = True
        key = "torch_autocast.enabled"
    else:
        key = row.key
    with pytest.raises(ConfigError, match=rf"{key.replace('.', '[.]')}( = .*)?: .*\w\w"):
        load_config(tree, num_ranks=2, dialect="deepspeed", device=device)


@case(("later", "refused"), quiet=True)
def test_key_that_asks_for_nothing_is_accepted_in_silence(row: Row) -> None:
    others = context(row.key)
    others.pop("torch_autocast.enabled", None)
    quiet = load({**others, row.key: row.quiet[0]})
    assert quiet.config == load(others).config
    assert quiet.notes == load(others).notes


@case(("tuning",))
def test_key_that_tunes_a_feature_is_accepted_while_the_feature_is_off(row: Row) -> None:
    others = context(row.key)
    quiet = load({**others, row.key: row.value})
    assert quiet.config == load(others).config
    assert quiet.notes == load(others).notes
    explanation = explain_config(nested({**others, row.key: row.value}), dialect="deepspeed")
    (verdict,) = (verdict for verdict in explanation.verdicts if verdict.key == row.key)
    assert verdict.fate == "off"
    assert "which is off" in verdict.why


EVERYWHERE_WRONG = {"object": 3}, [{}], -1.5, ""


def kind_of(row: Row) -> Kind:
    return KEYS[ALIASES.get(row.key, row.key)].kind


TYPED = [row for row in ROWS if not kind_of(row).expected.startswith("anything")]  # the others: refused, or see below


@pytest.mark.parametrize("row", TYPED, ids=[row.key for row in TYPED])
def test_value_of_a_wrong_type_is_refused_by_name(row: Row) -> None:
    key = KEYS[ALIASES.get(row.key, row.key)]
    wrong = [value for value in EVERYWHERE_WRONG if not key.kind.accepts(value)]
    assert wrong
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"(?m)(^|- |: ){row.key.replace('.', '[.]')}( = .*)?: "):
            load({**context(row.key), row.key: value})


@pytest.mark.parametrize("value", [True, "10", 0, -1, 2.5, [3]])
def test_steps_per_print_of_a_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="steps_per_print: "):
        load({"train_batch_size": 2, "steps_per_print": value})


@pytest.mark.parametrize("row", ROWS, ids=[row.key for row in ROWS])
def test_unresolved_auto_is_refused_by_name(row: Row) -> None:
    if KEYS[ALIASES.get(row.key, row.key)].is_quiet("auto"):
        load({**context(row.key), row.key: "auto"})
        return
    with pytest.raises(ConfigError, match=rf"{row.key.replace('.', '[.]')}( = .*)?: "):
        load({**context(row.key), row.key: "auto"})
