"""``shardwise explain``: the report, the JSON file, the exit status."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.config.model import Config
from shardwise.config.words import leaves
from shardwise.configure import load_config
from shardwise.errors import ConfigError

FILES = Path(__file__).parents[1] / "config" / "files"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def facts(tmp_path: Path, *arguments: str | Path, exit_code: int = 0) -> dict[str, Any]:
    path = tmp_path / "facts.json"
    result = run(*arguments, "--json", path)
    assert result.exit_code == exit_code, result.output
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["hf_zero2", "hf_zero3", "lightning_default"])
def test_every_key_of_a_deepspeed_file_is_told(name: str, tmp_path: Path) -> None:
    path = FILES / f"{name}.json"
    written = leaves(json.loads(path.read_text(encoding="utf-8")))
    found = facts(tmp_path, path, "--ranks", "2")
    assert found["dialect"] == "deepspeed"
    assert {key["key"]: key["value"] for key in found["keys"] if not key["absent"]} == written
    assert found["problems"] == []
    assert not [key for key in found["keys"] if key["fate"] == "refused"]
    resolved = load_config(path, num_ranks=2)
    assert {key: fact["value"] for key, fact in found["effective"].items()} == leaves(resolved.config.model_dump())
    assert {key: fact["from"] for key, fact in found["effective"].items()} == resolved.origins
    assert found["notes"] == list(resolved.notes)
    output = run(path, "--ranks", "2").output
    for key in written:
        assert key in output
    for key in found["keys"]:
        if key["fate"] == "same":
            assert list(key["settings"].values()), key


def test_changed_defaults_are_told(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"train_batch_size": 4, "zero_optimization": zero}), encoding="utf-8")
    absent = {key["key"]: key["why"] for key in facts(tmp_path, path)["keys"] if key["absent"]}
    assert "1.0 as in DeepSpeed 0.19.8 (0.0 in 0.16.5)" in absent["gradient_clipping"]
    assert "true in DeepSpeed 0.19.8 (false in 0.16.5)" in absent["zero_optimization.offload_optimizer.pin_memory"]
    output = run(path).output
    assert "(absent)" in output
    assert "clip_grad_norm = 1.0" in output


def test_refused_key_is_told_and_the_exit_status_is_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = {"train_batch_size": 6, "tensorboard": {"enabled": True}, "zero_optimization": {"stage": 9}, "x": 1}
    path.write_text(json.dumps(config), encoding="utf-8")
    found = facts(tmp_path, path, "--ranks", "4", exit_code=1)
    assert {key["key"]: key["fate"] for key in found["keys"] if not key["absent"]} == {
        "train_batch_size": "refused",
        "tensorboard.enabled": "refused",
        "zero_optimization.stage": "refused",
        "x": "refused",
    }
    assert len(found["problems"]) == 4
    assert found["effective"] == {}
    result = run(path, "--ranks", "4")
    assert result.exit_code == 1
    assert "6 is not a multiple of gradient_accumulation_steps 1 * 4 ranks" in " ".join(result.output.split())


def test_offloading_depends_on_the_device() -> None:
    path = FILES / "hf_zero3.json"
    assert run(path, "--ranks", "2").exit_code == 0
    assert run(path, "--ranks", "2", "--device", "cuda").exit_code == 1


def test_native_file_is_explained_too(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('stage = 1\n[optimizer]\nname = "sgd"\n', encoding="utf-8")
    found = facts(tmp_path, path, "--set", "optimizer.lr=0.5")
    assert {key["key"]: key["fate"] for key in found["keys"]} == dict.fromkeys(
        ["stage", "optimizer.name", "optimizer.lr"], "same"
    )
    assert found["effective"]["optimizer.lr"] == {"value": 0.5, "from": "--set optimizer.lr"}
    assert found["effective"]["stage"] == {"value": 1, "from": "config.toml"}
    short, long = run(path).output, run(path, "--defaults").output
    assert "overlap.prefetch" not in short
    assert "overlap.prefetch" in long


def test_misspelt_native_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("stge = 1\nseed = 3\n", encoding="utf-8")
    found = facts(tmp_path, path, exit_code=1)
    assert {key["key"]: key["fate"] for key in found["keys"]} == {"stge": "refused", "seed": "same"}
    assert found["problems"] == ["stge: unknown key; did you mean stage?"]


def test_dialect_can_be_forced(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text("{}", encoding="utf-8")
    assert facts(tmp_path, path)["dialect"] == "native"
    assert facts(tmp_path, path, "--dialect", "deepspeed", exit_code=1)["dialect"] == "deepspeed"


def test_schema_is_printed() -> None:
    result = run("--schema")
    assert result.exit_code == 0
    assert set(json.loads(result.output)["properties"]) == set(Config.model_fields)


@pytest.mark.parametrize("path", ["", ".", "none/facts.json", "a.toml/facts.json"])
def test_facts_that_cannot_be_written_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("stage = 1\n", encoding="utf-8")
    result = run("a.toml", "--json", path)
    assert isinstance(result.exception, ConfigError), result.exception
    assert str(result.exception).startswith("--json ")
    assert result.output == ""


def test_device_that_nothing_trains_on_is_refused() -> None:
    result = run(FILES / "hf_zero3.json", "--device", "tpu")
    assert result.exit_code == 2
    assert "'tpu'" in result.output


def test_schema_of_a_file_is_an_error() -> None:
    result = run("--schema", FILES / "hf_zero3.json")
    assert isinstance(result.exception, ConfigError)
    assert "--schema" in str(result.exception)


def test_long_list_of_problems_is_cut_in_the_report_and_whole_in_the_facts(tmp_path: Path) -> None:
    path = tmp_path / "[red]keys.json"
    path.write_text(json.dumps({f"key{number}": number for number in range(53)}), encoding="utf-8")
    assert len(facts(tmp_path, path, exit_code=1)["problems"]) == 53
    output = run(path).output
    assert sum(line.startswith("refused key") for line in output.splitlines()) == 50
    assert "refused and 3 more" in output
    assert "[red]keys.json, key by key" in output


def test_no_file_is_an_error() -> None:
    assert isinstance(run().exception, ConfigError)


def test_what_cannot_be_read_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    program = "import sys; from shardwise.cli.main import main; sys.argv[0] = 'shardwise'; main()"
    command = [sys.executable, "-c", program, "explain", "none.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert "Traceback" not in done.stderr
