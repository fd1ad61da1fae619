"""``shardwise plan`` through typer's runner: tables, exit status, files, refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.train.settings import load_settings


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


ONE_ROW = ("--stages", "3", "--precision", "fp32", "--checkpointing", "off", "--seq", "16", "--micro-batch", "2")


def test_table_json_and_settings_say_the_same(tmp_path: Path) -> None:
    facts, settings = tmp_path / "plan.json", tmp_path / "settings.toml"
    result = plan("gpt-nano", "--gpus", "2", "--memory", "64MiB", *ONE_ROW, "--json", str(facts), "--write",
                  str(settings))  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(facts.read_text())
    (row,) = found["rows"]
    assert (row["verdict"], found["best"], found["plain_is_enough"]) == ("fits", 0, False)
    assert row["peak"] == sum(row["by_kind"].values())
    assert f"{row['peak'] / 2**20:,.2f}" in result.output
    assert "take stage 3 in fp32" in result.output
    assert "Planned, not measured" in result.output
    config = load_settings(settings, num_ranks=2).config
    assert (config.stage, config.batch.micro, config.model.name) == (3, 2, "gpt-nano")
    assert CliRunner().invoke(app, ["train", str(settings), "--ranks", "2", "--dry-run"]).exit_code == 0


def test_nothing_fits_is_status_one_and_writes_nothing(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    result = plan("gpt-nano", "--gpus", "2", "--memory", "100KB", *ONE_ROW, "--write", str(settings))
    assert result.exit_code == 1
    assert "nothing fits" in result.output
    assert "no: " in result.output
    assert not settings.exists()


def test_a_number_is_found(tmp_path: Path) -> None:
    facts = tmp_path / "plan.json"
    result = plan("gpt-nano", "--gpus", "auto", "--memory", "2MB", *ONE_ROW, "--json", str(facts))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(facts.read_text())["rows"]
    assert row["found"] == row["case"]["gpus"] >= 2
    assert "fewest GPUs" in result.output


def test_plain_data_parallel_is_named() -> None:
    result = plan("gpt-nano", "--gpus", "2", "--memory", "1GB", "--stages", "0", "--checkpointing", "off", "--seq", "8")
    assert "plain data parallel is enough" in result.output


def test_states_alone_never_say_fits(tmp_path: Path) -> None:
    facts = tmp_path / "states.json"
    result = plan("7.5B", "--gpus", "64", "--memory", "32GB", "--json", str(facts))
    assert result.exit_code == 0
    rows = json.loads(facts.read_text())["rows"]
    assert [row["bytes"] for row in rows if row["precision"] == "bf16"][3] == 7.5e9 * 18 / 64
    lines = [line for line in result.output.splitlines() if "fits" in line]
    assert lines == []
    assert "no activations" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt-nano", "--gpus", "2", "--memory", "much"), "expected a size"),
        (("", "--gpus", "2", "--memory", "1GB"), "name a model"),
        (("7B", "--gpus", "2", "--memory", "1GB", "--checkpointing", "banana"), "both, on or off"),
        (("gpt-nano", "--gpus", "2", "--memory", "1GB", "--set", "stage=1"), "say it with --stages"),
        (("gpt-nano", "--gpus", "2", "--memory", "1GB", "--depth", "3", "--set", "model.depth=5"), "with --depth"),
        (("gpt-nano", "--gpus", "2", "--memory", "24"), "say the unit: 24GiB"),
        (("gpt-nano", "--gpus", "0", "--memory", "1GB"), "expected a number from 1"),
        (("gpt-nano", "--gpus", "two", "--memory", "1GB"), "expected a number from 1"),
        (("gpt-nano", "--gpus", "2", "--memory", "1GB", "--stages", "4"), "expected some of 0,1,2,3"),
        (("gpt-nano", "--gpus", "2", "--memory", "1GB", "--precision", "int8"), "expected some of bf16"),
        (("gpt-nano", "--gpus", "2", "--memory", "1GB", "--checkpointing", "maybe"), "both, on or off"),
        (("gpt-nano", "--gpus", "2", "--memory", "1GB", "--write", "no/such/plan.toml"), "there is no folder"),
        (("7B", "--gpus", "2", "--memory", "1GB", "--micro-batch", "2"), "only states"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(arguments: tuple[str, ...], words: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_unknown_names_and_settings_are_refused() -> None:
    for arguments in (("gpt-5",), ("gpt-nano", "--set", "batch.mikro=3")):
        result = plan(*arguments, "--gpus", "2", "--memory", "1GB")
        assert result.exit_code == 1
        assert type(result.exception).__name__ == "ConfigError"
