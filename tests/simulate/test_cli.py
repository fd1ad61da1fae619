"""The commands ``simulate`` and ``verify`` through typer's runner."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli import simulate as simulate_module
from shardwise.cli.main import app
from shardwise.errors import ConfigError
from shardwise.simulation.calls import simulate

from .faults import spoil

TEXT = "".join(f"line {number} of a text that is long enough to be cut into windows\n" for number in range(200))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of settings for a tiny run on its own text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    lines = [
        "clip_grad_norm = 1.0",
        "[model]",
        'name = "gpt-nano"',
        "context = 16",
        "[data]",
        f'path = "{folder / "text.txt"}"',
        "[batch]",
        "micro = 2",
        "[optimizer]",
        'name = "adamw"',
        "lr = 0.01",
        "betas = [0.8, 0.9]",
    ]
    (folder / "settings.toml").write_text("\n".join(lines))
    return folder / "settings.toml"


def test_simulate_shows_tables_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run("simulate", "mlp", "--ranks", "3", "--steps", "2", "--rank", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "Kept and sent by rank 2" in result.output
    assert result.output.strip().endswith("every stage equals plain training: yes")
    facts: dict[str, Any] = json.loads(path.read_text())
    assert (facts["model"], facts["ranks"], facts["steps"], facts["equal"]) == ("mlp", 3, 2, True)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_simulate_takes_precision_stages_and_optimizer(optimizer: str) -> None:
    arguments = ("--ranks", "2", "--stages", "3,0", "--precision", "bf16", "--optimizer", optimizer, "--steps", "1")
    result = run("simulate", *arguments, "--quiet")
    assert result.exit_code == 0, result.output
    assert result.output == "every stage equals plain training: yes\n"


def test_simulate_exits_with_1_where_a_stage_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: Any, **options: Any) -> Any:
        return simulate(*arguments, instrument=spoil(), **options)

    monkeypatch.setattr(simulate_module, "run_simulation", spoiled)
    result = run("simulate", "mlp", "--ranks", "2", "--quiet")
    assert result.exit_code == 1
    assert "problem: fp32, stage 0 is not plain training" in result.output


def test_verify_takes_the_settings_of_train(settings: Path, tmp_path: Path) -> None:
    path = tmp_path / "differences.json"
    result = run("verify", str(settings), "--precision", "fp32,bf16", "--steps", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "every stage trains as one plain process: yes" in result.output
    facts = json.loads(path.read_text())
    assert facts["ok"] is True
    assert [each["precision"] for each in facts["precisions"]] == ["fp32", "bf16"]
    names = {found["name"] for found in facts["precisions"][0]["stages"][3]["differences"]}
    assert {"norms", "parameters blocks.1.attention.qkv.weight"} <= names


def test_verify_runs_in_the_dtype_of_the_settings_too(settings: Path, tmp_path: Path) -> None:
    path = tmp_path / "differences.json"
    changes = ("--set", "precision.param=bf16", "--set", "scheduler.name=warmup", "--stages", "3", "--steps", "1")
    result = run("verify", str(settings), *changes, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "note: the rate stays at optimizer.lr = 0.01" in result.output
    assert [each["precision"] for each in json.loads(path.read_text())["precisions"]] == ["fp32", "bf16"]


def test_verify_exits_with_1_where_nothing_is_proved() -> None:
    result = run("verify", "mlp", "--precision", "bf16", "--steps", "1", "--stages", "0", "--may-stay", "0.weight")
    assert result.exit_code == 0, result.output
    still = ("--set", "optimizer.name=sgd", "--set", "optimizer.lr=0", "--set", "batch.micro=1")
    result = run("verify", "gpt-nano", *still, "--stages", "0", "--steps", "1", "--quiet")
    assert result.exit_code == 1
    assert "proves nothing: trainable tensors never moved, their gradient" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--stages", "0,4"), "expected some of 0,1,2,3"),
        (("simulate", "--ranks", "0"), "--ranks"),
        (("simulate", "--steps", "0"), "--steps"),
        (("simulate", "--rank", "4"), "ranks 0 to 3"),
        (("simulate", "--precision", "fp8"), "expected one of fp64, fp32"),
        (("simulate", "--optimizer", "muon"), "expected one of adamw, sgd"),
        (("simulate", "--json", "nowhere/file.json"), "there is no folder"),
        (("verify", "--precision", "fp32,fp32"), "expected some of fp64, fp32"),
        (("verify", "--stages", ""), "expected some of 0,1,2,3"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "nowhere"), "'nowhere' is no small model"),
        (("verify", "nowhere.toml"), "nowhere.toml"),
        (("simulate", "mlp", "--set", "batch.micro=1"), "a small model without any"),
        (("verify", "gpt-nano", "--set", "batch.mikro=1"), "batch.mikro"),
    ],
    ids=str,
)
def test_unknown_models_and_settings_are_config_errors(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
