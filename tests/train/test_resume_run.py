"""A run that ended early goes on: by the same command, on another number of ranks, at another stage."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.checkpoint.folder import find_checkpoints, read_manifest
from shardwise.cli.main import app
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.progress import find_resume
from shardwise.train.settings import load_settings
from tests.checkpoint.doors_case import save_odd

command = importlib.import_module("shardwise.cli.train")
pytestmark = pytest.mark.timeout(300)  # processes, on a machine that may be busy

SMALL = ("model.name=gpt-nano", "model.context=16", "train.eval_batches=1", "train.sample_tokens=4")


@pytest.fixture(params=["packed", pytest.param("documents", marks=pytest.mark.matrix)])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    lines = [f"line {number} {'ab' * (number % 7)}" for number in range(400)]
    if request.param == "packed":
        path = tmp_path / "own.txt"
        path.write_text("\n".join(lines))
    else:
        path = tmp_path / "own.jsonl"
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def run(text: Path, folder: Path, *arguments: str, more: tuple[str, ...] = ()) -> Result:
    steps = ("train.steps=9", "train.checkpoint_every=2", "train.eval_every=3", "batch.size=4")
    given = (*SMALL, *steps, f'data.path=["{text}"]', f"train.output={folder}", *more)
    values = {value.partition("=")[0]: value for value in given}.values()
    return CliRunner().invoke(app, ["train", *[w for v in values for w in ("--set", v)], *arguments])


def facts(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the summary and the metrics without what depends on the clock and the place."""
    summary = json.loads((folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "lr", "grad_norm", "tokens", "held_out_loss")
    rows = [{key: row[key] for key in kept if key in row} for row in metrics]
    return {key: value for key, value in summary.items() if key not in ("seconds", "weights", "memory")}, rows


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(text, whole).exit_code == 0
    monkeypatch.setenv("SHARDWISE_FAULT", "save.before_rename:0:3:kill")
    assert run(text, killed).exit_code != 0
    monkeypatch.delenv("SHARDWISE_FAULT")
    names = set(os.listdir(killed / "checkpoints"))
    assert {"latest", "step-2", "step-4"} < names
    assert [name.startswith(".tmp-step-6-") for name in names - {"latest", "step-2", "step-4"}] == [True]
    again = run(text, killed, "--resume", "auto", "--stage", "1")
    assert again.exit_code == 0, again.output
    assert f"resumed after 4 updates from {killed}/checkpoints/step-4, saved by 2 ranks" in again.output
    assert facts(killed) == facts(whole)
    assert set(os.listdir(killed / "checkpoints")) == {"latest", "step-8", "step-9"}
    memory = json.loads((killed / "summary.json").read_text())["memory"]
    assert memory["planned_bytes"] == {kind: memory["measured_bytes"][kind] for kind in memory["planned_bytes"]}
    done = run(text, killed, "--resume", "auto", "--quiet")
    assert done.exit_code == 0, done.output
    assert facts(killed) == facts(whole)
    assert json.loads((killed / "summary.json").read_text())["memory"] == memory


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("".join(f"line {number}\n" for number in range(400)))
    folder = tmp_path / "run"
    assert run(text, folder, "--ranks", "1", "--stage", "0", more=("train.steps=4",)).exit_code == 0
    again = run(text, folder, "--ranks", "2", "--resume", "last", more=("train.checkpoint_background=true",))
    assert again.exit_code == 0, again.output
    assert "saved by 1 rank\n" in again.output
    assert [row["step"] for row in facts(folder)[1]] == list(range(1, 10))
    assert [each.tag for each in find_checkpoints(folder / "checkpoints")] == ["step-8", "step-9"]
    new = tmp_path / "new"
    weights = run(
        text, new, "--resume", str(folder), "--weights-only", more=("train.steps=2", "train.checkpoint_every=0")
    )
    assert weights.exit_code == 0, weights.output
    assert facts(new)[0]["first_held_out_loss"] == facts(folder)[0]["held_out_loss"]
    assert not (new / "checkpoints").exists()


def test_what_cannot_be_resumed_is_told(tmp_path: Path) -> None:
    assert find_resume("none", tmp_path) is None
    assert find_resume("auto", tmp_path) is None
    with pytest.raises(ConfigError, match="has no checkpoint"):
        find_resume("last", tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        find_resume(str(tmp_path / "nowhere"), tmp_path)
    export = tmp_path / "export"
    export.mkdir()
    (export / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"export of weights.*--weights-only"):
        find_resume(str(export), tmp_path)
    folder = tmp_path / "run"
    text = tmp_path / "own.txt"
    text.write_text("".join(f"line {number}\n" for number in range(400)))
    begun = run(text, folder, "--resume", "auto", "--quiet", more=("train.steps=2",))
    assert begun.exit_code == 0
    assert f"{folder} has no checkpoint: the run begins anew" in begun.output
    refused = run(text, folder)
    assert refused.exit_code != 0
    assert "--resume auto" in str(refused.output) + str(refused.exception)
    larger = run(text, folder, "--resume", "auto", more=("model.width=128", "model.heads=4"))
    assert larger.exit_code != 0
    assert (folder / "checkpoints" / "step-2").exists()
    assert run(text, folder, "--overwrite", more=("train.steps=1", "train.checkpoint_every=0")).exit_code == 0
    assert not (folder / "checkpoints").exists()


def test_changed_settings_of_the_optimizer_count_and_are_told(tmp_path: Path) -> None:
    text, folder = tmp_path / "own.txt", tmp_path / "run"
    text.write_text("".join(f"line {number}\n" for number in range(400)))
    plain = ("optimizer.name=adamw", "optimizer.lr=1e-3", "train.eval_every=0")
    assert run(text, folder, "--ranks", "1", more=(*plain, "train.steps=2")).exit_code == 0
    new = (*plain, "optimizer.lr=1e-6", "optimizer.weight_decay=0.5", "train.steps=3")
    again = run(text, folder, "--ranks", "1", "--resume", "auto", "--quiet", more=new)
    assert again.exit_code == 0, again.output
    assert "changed since the checkpoint: " in again.output
    assert "optimizer.lr 0.001 -> 1e-06" in again.output
    assert "optimizer.weight_decay 0.0 -> 0.5" in again.output
    assert [row["lr"] for row in facts(folder)[1]] == [1e-3, 1e-3, 1e-6]
    saved = read_manifest(folder / "checkpoints" / "step-3").values.optimizers[0].groups[0].options
    assert (saved["lr"], saved["weight_decay"]) == (1e-6, 0.5)
    refused = run(text, folder, "--ranks", "1", "--resume", "auto", more=(*new, "optimizer.amsgrad=true"))
    assert "optimizer.amsgrad: the checkpoint has False" in str(refused.exception)


def test_resume_paths_are_resolved_and_what_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save_odd(folder, "a", num_ranks=1, steps=1)
    save_odd(folder, "b", num_ranks=1, steps=2)
    monkeypatch.chdir(folder / "a")
    assert find_resume(".", tmp_path) == folder / "a"
    assert find_resume("..", tmp_path) == folder / "b"
    assert find_resume("last", tmp_path) == folder / "b"
    with pytest.raises(ConfigError, match=r"--weights-only: .* would be replaced"):
        command._prepare(
            command.RunTask(
                settings=load_settings(None, overrides=[f"train.output={tmp_path}"], num_ranks=1),
                resume=folder / "b",
                weights_only=True,
            ),
            overwrite=False,
        )
    (folder / "b" / "manifest.json").unlink()
    for wanted in ("auto", "last", str(folder)):
        with pytest.raises(CheckpointError, match=r"latest names 'b'.* whole: a.*--resume .*checkpoints/a"):
            find_resume(wanted, tmp_path)
    (folder / "latest").unlink()
    assert find_resume("auto", tmp_path) == folder / "a"
