"""``shardwise checkpoint``: what it prints, its exit status, and that no error is a traceback."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from shardwise.cli import checkpoint as command
from shardwise.cli.main import app, main
from shardwise.errors import CheckpointError, ConfigError

from .case import assert_same, same_bits, tree
from .doors_case import load_odd, save_odd

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(*arguments: str | Path) -> Result:
    """Run the command; what it raises is what ``main`` prints."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def flip_last(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_list_tells_what_is_whole_and_what_is_the_latest(tmp_path: Path) -> None:
    save_odd(tmp_path / "run", "first", steps=1)
    save_odd(tmp_path / "run", "second", num_ranks=1, steps=2)
    save_odd(tmp_path / "run", "third", steps=3)
    cut = tmp_path / "run" / "first" / "rank-00001.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / "run" / "third" / "manifest.json").write_text("{}")
    result = run("ls", tmp_path / "run", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert any("second" in line and "whole" in line and "latest" not in line for line in lines)
    assert any("third (latest)" in line and "not whole" in line for line in lines)
    assert any(line.startswith("third: ") and "is no manifest" in line for line in lines)
    assert any(line.startswith("first: ") and "bytes, expected" in line for line in lines)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["latest"] == "third"
    rows = {row["tag"]: row for row in facts["checkpoints"]}
    assert [row["whole"] for row in rows.values()].count(True) == 1
    assert (rows["second"]["step"], rows["second"]["ranks"], rows["second"]["whole"]) == (2, 1, True)
    assert rows["second"]["bytes"] == (tmp_path / "run" / "second" / "rank-00000.safetensors").stat().st_size
    assert rows["third"]["step"] is None


def test_list_of_nothing_and_of_what_is_no_folder(tmp_path: Path) -> None:
    assert run("ls", tmp_path).output == f"{tmp_path}: no checkpoints\n"
    (tmp_path / "latest").write_text("gone\n")
    assert "latest names 'gone', which is not there" in run("ls", tmp_path).output
    with pytest.raises(CheckpointError, match="no such folder"):
        run("ls", tmp_path / "absent")
    save_odd(tmp_path / "run", num_ranks=1)
    with pytest.raises(ConfigError, match="name the folder that holds it"):
        run("ls", tmp_path / "run" / "a")


def test_verify_reads_everything_and_names_what_is_damaged(tmp_path: Path) -> None:
    save_odd(tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / "a"):
        output = run("verify", path).output
        assert output.startswith(f"{tmp_path / 'run' / 'a'}: whole: ")
        assert "in 2 files" in output
    flip_last(tmp_path / "run" / "a" / "rank-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: .* is damaged"):
        run("verify", tmp_path / "run", "--tag", "a")


@pytest.mark.parametrize("arguments", [["verify", "run"], ["verify", "absent"], ["diff", "run", "absent"]])
def test_errors_are_one_line_and_status_1(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_odd(tmp_path / "run", num_ranks=1)
    flip_last(tmp_path / "run" / "a" / "rank-00000.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shardwise", "checkpoint", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("CheckpointError: ")
    assert "Traceback" not in said


def test_diff_is_silent_about_layouts_and_tells_values(tmp_path: Path) -> None:
    save_odd(tmp_path / "two", num_ranks=2)
    shutil.copytree(tmp_path / "two", tmp_path / "copy")
    same = run("diff", tmp_path / "two", tmp_path / "copy" / "a")
    assert same.exit_code == 0
    assert "0 changed, 0 unlike" in same.output
    save_odd(tmp_path / "more", num_ranks=2, steps=3)
    unlike = run("diff", tmp_path / "two", tmp_path / "more")
    assert unlike.exit_code == 1
    assert "changed: param.cube: at most 0.0" in unlike.output
    assert "values: step: 2 and 3" in unlike.output
    assert "changed: param.frozen" not in unlike.output


def test_diff_tells_names_shapes_and_nan(tmp_path: Path) -> None:
    first = {"a": torch.zeros(2), "b": torch.zeros(3), "n": torch.tensor([1.0, float("inf")]), "only": torch.zeros(1)}
    second = {"a": torch.zeros(2), "b": torch.zeros(4), "n": torch.tensor([float("nan"), float("inf")])}
    for name, tensors in (("one", first), ("two", second)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        run("convert", tmp_path / f"{name}.safetensors", tmp_path / name, "--from", "huggingface")
    result = run("diff", tmp_path / "one", tmp_path / "two")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "only in the first: param.only",
        "unlike: param.b: F32 [3] and F32 [4]",
        "changed: param.n: at most nan",
        "1 tensors identical, 1 changed, 1 unlike",
    ]


def test_export_and_convert_and_back(tmp_path: Path) -> None:
    state, kept = save_odd(tmp_path / "run")
    run("export", tmp_path / "run", tmp_path / "hf", "--dtype", "bf16", "--max-shard-size", "1KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    found = {name: t for path in (tmp_path / "hf").glob("*.safetensors") for name, t in load_file(path).items()}
    assert same_bits(found["cube"], state["master cube"].bfloat16())
    run("export", tmp_path / "run", tmp_path / "m.pt", "--format", "torch")
    assert_same(torch.load(tmp_path / "m.pt", weights_only=True), kept)
    run("convert", tmp_path / "run", tmp_path / "dcp", "--from", "shardwise", "--to", "dcp")
    run("convert", tmp_path / "m.pt", tmp_path / "in", "--from", "torch", "--tag", "pt", "--buffer", "table")
    run("convert", tmp_path / "hf", tmp_path / "in", "--from", "huggingface", "--tag", "hf")
    run("convert", tmp_path / "dcp", tmp_path / "in", "--from", "dcp", "--tag", "dcp")
    listed = run("ls", tmp_path / "in").output
    assert "dcp (latest)" in listed
    assert_same(load_odd(tmp_path / "in", "dcp")[0], state)
    assert_same(load_odd(tmp_path / "in", "pt", weights_only=True)[1], kept)


def test_convert_from_another_format_to_dcp(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    run("convert", tmp_path / "model.safetensors", tmp_path / "dcp", "--from", "huggingface", "--to", "dcp")
    state = {"model": {"w": torch.zeros(4)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["model"]["w"], torch.arange(4.0))
    assert {path for path in tree(tmp_path) if "/" not in path} == {"model.safetensors", "dcp"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "x", "y", "--from", "dcp", "--to", "dcp"], "there is nothing to convert"),
        (
            ["convert", "x", "y", "--from", "torch", "--optimizer", "SGD"],
            "--optimizer has no meaning with --from torch",
        ),
        (["convert", "x", "y", "--from", "huggingface", "--no-verify"], "--no-verify has no meaning"),
        (["convert", "x", "y", "--from", "deepspeed", "--buffer", "b"], "--buffer has no meaning"),
        (["convert", "x", "y", "--from", "dcp", "--tied", "a"], "expected OTHER=NAME"),
        (["export", "run", "y", "--max-shard-size", "many"], "expected a size like 5GB"),
        (["export", "run", "y", "--max-shard-size", "0"], "expected a size like 5GB"),
        (["export", "run", "y", "--format", "torch", "--max-shard-size", "5GB"], "is one file"),
    ],
)
def test_wrong_options_are_refused_by_name(
    tmp_path: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_odd(tmp_path / "run", num_ranks=1)
    with pytest.raises(ConfigError, match=words):
        run(*arguments)
    assert not (tmp_path / "y").exists()


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "m.pt")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    dcp.save({"model": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path / "dcp")
    for source, origin in (("m.pt", "torch"), ("model.safetensors", "huggingface"), ("dcp", "dcp")):
        with pytest.raises(ConfigError, match=f"buffer 'nosuch': .*{source} has no such tensor"):
            run("convert", tmp_path / source, tmp_path / "in", "--from", origin, "--buffer", "nosuch")
    with pytest.raises(ConfigError, match=r"tied nosuch: .*dcp has no such tensor"):
        run("convert", tmp_path / "dcp", tmp_path / "in", "--from", "dcp", "--tied", "nosuch=w")
    assert not list((tmp_path / "in").glob("*"))


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2 << 30), ("700", 700), ("7B", 7)]
)
def test_sizes_are_understood(text: str, num_bytes: int) -> None:
    assert command._bytes(text) == num_bytes


def test_wrong_source_says_what_it_is(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="it holds an export of weights"):
        run("verify", tmp_path)
