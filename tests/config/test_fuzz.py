"""Misspellings and wrong types: never accepted in silence, and never another error than ``ConfigError``."""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.config.check import native_keys
from shardwise.config.resolve import Resolved
from shardwise.configure import Dialect, load_config
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import deepspeed_keys

FUZZ = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
FEWER = settings(FUZZ, max_examples=40)
FILES = Path(__file__).parent / "files"

NATIVE: dict[str, Any] = {
    "stage": 2,
    "loss_reduction": "mean",
    "clip_grad_norm": 1.0,
    "on_nonfinite": "skip",
    "seed": 3,
    "log_every": 10,
    "batch": {"size": 16, "micro": 4, "accumulation": 2, "drop_last": True},
    "precision": {"param": "fp16", "wire": "fp32", "accumulate": "fp32", "master": "fp32"},
    "loss_scale": {"initial": 256.0, "growth_interval": 10, "hysteresis": 2, "minimum": 1.0},
    "optimizer": {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False},
    "scheduler": {"name": "warmup_cosine", "total_steps": 100, "num_warmup_steps": 10, "min_ratio": 0.1},
    "overlap": {"prefetch": 2, "reductions_in_flight": 1, "keep_last_unit": False},
    "model": {"name": "gpt-mini", "context": 128},
    "data": {"path": ["a.txt"], "field": "text", "held_out": 0.1},
    "train": {"steps": 10, "eval_every": 5, "output": "runs/x"},
}
DEEPSPEED: dict[str, Any] = json.loads((FILES / "hf_zero3.json").read_text(encoding="utf-8"))

Path_ = tuple[str, ...]


def paths(tree: dict[str, Any], above: Path_ = ()) -> Iterator[Path_]:
    """Yield the place of every key, those of sections too."""
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def edited(tree: dict[str, Any], place: Path_, edit: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    inner = tree
    for name in place[:-1]:
        inner = inner[name]
    edit(inner, place[-1])
    return tree


def load(config: object, dialect: Dialect | None) -> Resolved:
    return load_config(config, num_ranks=2, dialect=dialect)  # type: ignore[arg-type]


def known(dialect: Dialect) -> frozenset[str]:
    """Return every dotted key that may be written, sections included."""
    keys = native_keys() if dialect == "native" else deepspeed_keys()
    return frozenset(".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2))


BASES = (("native", NATIVE), ("deepspeed", DEEPSPEED))
both = pytest.mark.parametrize(("dialect", "base"), BASES, ids=["native", "deepspeed"])


@both
def test_base_is_valid_and_its_dialect_is_seen(dialect: Dialect, base: dict[str, Any]) -> None:
    assert load(base, None) == load(base, dialect)


@st.composite
def misspelt(draw: st.DrawFn, name: str) -> str:
    """Return a name with one or two letters dropped, doubled, swapped or replaced."""
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(name) - 1))
        kind = draw(st.sampled_from(["drop", "double", "swap", "replace", "upper"]))
        letter = name[at]
        if kind == "drop":
            name = name[:at] + name[at + 1 :]
        elif kind == "double":
            name = name[:at] + letter + name[at:]
        elif kind == "swap":
            name = name[:at] + name[at + 1 : at + 2] + letter + name[at + 2 :]
        elif kind == "replace":
            name = name[:at] + draw(st.sampled_from("abcxyz_-3")) + name[at + 1 :]
        else:
            name = name[:at] + letter.upper() + name[at + 1 :]
        if not name:
            return "x"
    return name


@both
@FUZZ
@given(data=st.data())
def test_misspelt_key_is_always_refused_by_its_name(
    dialect: Dialect, base: dict[str, Any], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from(sorted(paths(base))))
    wrong = data.draw(misspelt(place[-1]))
    written = ".".join((*place[:-1], wrong))
    if written in known(dialect):
        return

    def rename(inner: dict[str, Any], name: str) -> None:
        inner[wrong] = inner.pop(name)

    for forced in (dialect, None):
        with pytest.raises(ConfigError) as caught:
            load(edited(base, place, rename), forced)
        assert f"{written}: unknown key" in str(caught.value)


# Per type of value, what cannot stand in its place. Strings and lists of other types are tried too.
OTHERS: tuple[tuple[type, tuple[Any, ...]], ...] = (
    (bool, (0, 1, "true", "yes", [True], {}, 1.0)),
    (int, ("3", True, [3], {"a": 1}, 2.5, -(10**30), float("nan"), "auto", object())),
    (float, ("0.1", True, {"a": 1}, float("nan"), float("inf"), -1e30, "auto", object())),
    (str, (3, True, None, ["a"], {"a": 1}, b"bytes", object())),
    (list, (3, "ab", True, {"a": 1}, [{}], [None, 1])),
    (dict, (3, "a", True, [], [{}], 0.5, "auto")),
)


@both
@FUZZ
@given(data=st.data())
def test_value_of_a_wrong_type_is_always_refused_by_its_key(
    dialect: Dialect, base: dict[str, Any], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from(sorted(paths(base))))
    value: Any = base
    for name in place:
        value = value[name]
    wrong = data.draw(st.sampled_from(next(others for kind, others in OTHERS if isinstance(value, kind))))
    if wrong is None and place[-1] in ("param", "wire", "accumulate", "master"):
        return  # None is their default
    if wrong == "ab" and place[-1] == "path":
        return  # one path instead of a list
    if wrong == 2.5 and place[-1] in ("loss_scale", "min_loss_scale"):
        return  # numbers that happen to be whole
    changed = edited(base, place, lambda inner, name: inner.__setitem__(name, wrong))
    with pytest.raises(ConfigError) as caught:
        load(changed, dialect)
    assert ".".join(place) in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@both
@FEWER
@given(data=st.data())
def test_arbitrary_values_give_settings_or_a_config_error(
    dialect: Dialect, base: dict[str, Any], data: st.DataObject
) -> None:
    tree = copy.deepcopy(base)
    for place in data.draw(st.lists(st.sampled_from(sorted(paths(base))), min_size=1, max_size=4)):
        value = data.draw(VALUES)
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # an earlier edit took the section away
            tree = edited(tree, place, lambda inner, name, value=value: inner.__setitem__(name, value))  # type: ignore[misc]
    for forced in (dialect, None):
        with contextlib.suppress(ConfigError):
            batch = load(tree, forced).batch
            assert batch.size == batch.micro * batch.accumulation * 2


@FEWER
@given(st.dictionaries(st.sampled_from(sorted({*native_keys(), *deepspeed_keys()})) | st.text(max_size=8), VALUES))
def test_arbitrary_trees_give_settings_or_a_config_error(flat: dict[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner: Any = tree
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner[name] = value
    for dialect in (None, "native", "deepspeed"):
        with contextlib.suppress(ConfigError):
            load(tree, dialect)  # type: ignore[arg-type]


@FEWER
@given(st.text(max_size=60), st.sampled_from(["a.json", "a.toml", "a"]))
def test_arbitrary_files_give_settings_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        load(path, None)


@FUZZ
@given(st.text(max_size=30))
def test_arbitrary_overrides_give_settings_or_a_config_error(text: str) -> None:
    for base in (NATIVE, DEEPSPEED):
        with contextlib.suppress(ConfigError):
            load_config(base, num_ranks=2, overrides=[text])
