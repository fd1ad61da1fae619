"""``shardwise train`` as a user runs it: options, local processes, a launcher's group, interrupts, failures."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.cli.train_view import TrainView
from shardwise.train.report import Evaluated, Finished, Sampled, Started, StepDone

pytestmark = pytest.mark.timeout(300)  # processes, on a machine that may be busy

PROGRAM = [sys.executable, "-m", "shardwise.cli", "train"]
SMALL = ("model.name=gpt-nano", "model.context=16", "train.eval_batches=1", "train.sample_tokens=4")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text("".join(f"line {number}\n" for number in range(500)))
    return path


def settings(text: Path, folder: Path, *more: str) -> list[str]:
    values = (*SMALL, f'data.path=["{text}"]', f"train.output={folder}", *more)
    return [word for value in values for word in ("--set", value)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run of two processes at stage 3."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    result = run(*settings(text, folder, "train.steps=12", "train.eval_every=4"))
    assert result.exit_code == 0, result.output
    return result, folder


def test_run_prints_what_it_trains_a_line_per_ten_updates_and_the_end(finished: tuple[Result, Path]) -> None:
    output = finished[0].output
    lines = output.splitlines()
    assert lines[0].startswith("model: gpt-nano, ")
    assert lines[0].endswith("stage 3 on 2 ranks")
    assert [line.split()[1] for line in lines if "  loss " in line] == ["1/12", "10/12", "12/12"]
    assert [line.split()[1] for line in lines if "  held-out loss " in line] == ["0", "4", "8", "12"]
    for part in ("  lr ", "  grad norm ", " tokens/s", "  memory ", "(planned ", "  rss ", "  skipped 0"):
        assert part in next(line for line in lines if "10/12" in line)
    assert "sample:\n  | \n" in output
    summary = json.loads((finished[1] / "summary.json").read_text())
    assert lines[-3:] == [
        f"held-out loss {summary['first_held_out_loss']:.4f} -> {summary['held_out_loss']:.4f}",
        f"parameters sha256 {summary['digest']}",
        f"weights {finished[1] / 'model.safetensors'}",
    ]
    assert summary["held_out_loss"] < summary["first_held_out_loss"] - 0.5
    assert "\x1b" not in output  # not a terminal


def test_run_leaves_metrics_settings_weights_and_a_log_per_rank(finished: tuple[Result, Path]) -> None:
    names = sorted(path.name for path in finished[1].iterdir())
    expected = "checkpoints metrics.jsonl model.safetensors rank-0.log rank-1.log settings.toml summary.json"
    assert names == expected.split()
    assert len((finished[1] / "metrics.jsonl").read_text().splitlines()) == 12
    assert "StepDone" in (finished[1] / "rank-1.log").read_text()


@pytest.mark.matrix
def test_settings_of_a_run_repeat_it_at_another_stage(finished: tuple[Result, Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    written = str(finished[1] / "settings.toml")
    result = run(written, "--stage", "0", "--quiet", "--set", f"train.output={again}")
    assert result.exit_code == 0, result.output
    digests = [json.loads((folder / "summary.json").read_text())["digest"] for folder in (finished[1], again)]
    assert digests[0] == digests[1]
    assert [line.split()[0] for line in result.output.splitlines()] == ["held-out", "parameters", "weights"]


def test_finished_run_is_refused_by_name(finished: tuple[Result, Path], text: Path) -> None:
    before = (finished[1] / "summary.json").read_text()
    result = run(*settings(text, finished[1]))
    assert result.exit_code == 1
    assert "holds a run already" in str(result.exception)
    assert "--overwrite" in str(result.exception)
    assert (finished[1] / "summary.json").read_text() == before


def test_print_config_is_toml_with_origins_and_starts_nothing(text: Path, tmp_path: Path) -> None:
    result = run("--print-config", "--ranks", "4", "--stage", "1", *settings(text, tmp_path / "run", "train.steps=7"))
    assert result.exit_code == 0
    values = tomllib.loads(result.output)
    assert (values["stage"], values["batch"]["size"], values["train"]["steps"]) == (1, 32, 7)
    assert "stage = 1  # --set stage" in result.output.splitlines()
    assert not (tmp_path / "run").exists()


def test_dry_run_plans_every_rank_and_starts_nothing(text: Path, tmp_path: Path) -> None:
    result = run("--dry-run", "--ranks", "3", *settings(text, tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "text: 1 files" in result.output
    assert [line.split()[4] for line in result.output.splitlines() if line.startswith("planned")] == ["0", "1", "2"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.stepz=3"], "did you mean train.steps?"),
        (["--set", "model.name=gpt9"], "is no size (gpt-nano, gpt-mini, gpt2"),
        (["--set", 'data.path=["no-such-folder"]'], "no file or folder 'no-such-folder'"),
        (["--set", "data.tokenizer=none.json"], "there is no file 'none.json'"),
        (["no-such-file.toml"], "there is no such file"),
        (["--set", "optimizer.lr=-1"], "optimizer.lr"),
        (["--ranks", "2", "--set", "batch.size=3"], "batch.size"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    result = run("--dry-run", *arguments)
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "ConfigError"
    assert message in str(result.exception)


@pytest.mark.parametrize(("option", "value"), [("--ranks", "0"), ("--stage", "4")])
def test_wrong_options_are_refused(option: str, value: str) -> None:
    assert run(option, value).exit_code == 2


def test_launcher_and_another_number_of_ranks_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("--ranks", "4")
    assert "a launcher has started 2 ranks" in str(result.exception)


def launcher_variables(port: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_process_of_a_launcher_joins_its_group(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launcher_variables(29_000 + os.getpid() % 2_000).items():
        monkeypatch.setenv(name, value)
    state = torch.get_rng_state()
    try:
        result = run("--quiet", *settings(text, tmp_path / "run", "train.steps=2"))
    finally:
        torch.set_rng_state(state)
    assert result.exit_code == 0, result.output
    assert not torch.distributed.is_initialized()
    assert sorted(path.name for path in (tmp_path / "run").glob("rank-*.log")) == ["rank-0.log"]
    assert len(result.output.splitlines()) == 3


@pytest.mark.matrix
def test_two_ranks_under_torchrun_end_as_local_ones_do(
    finished: tuple[Result, Path], text: Path, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = settings(text, tmp_path / "run", "train.steps=12", "train.eval_every=4")
    done = subprocess.run(
        [*torchrun, "-m", "shardwise.cli", "train", *options], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    digests = [json.loads((path / "summary.json").read_text())["digest"] for path in (finished[1], tmp_path / "run")]
    assert digests[0] == digests[1]
    assert done.stdout.count("parameters sha256") == 1


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: set[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


@pytest.fixture
def running(text: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run in a session of its own, in the middle of training."""
    options = settings(text, tmp_path / "run", "train.steps=1000000", "log_every=1")
    process = subprocess.Popen(
        [*PROGRAM, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "loss" in line and line.startswith("step      3"):
            break
    yield process
    process.kill()
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.matrix)]
)
def test_interrupt_ends_all_ranks_cleanly(
    number: signal.Signals, status: int, running: subprocess.Popen[str], tmp_path: Path
) -> None:
    ranks = children_of(running.pid)
    assert len(ranks) >= 2
    os.killpg(running.pid, number) if number == signal.SIGINT else running.send_signal(number)  # Ctrl-C reaches all
    _, errors = running.communicate(timeout=30)
    assert running.returncode == status
    assert "Traceback" not in errors
    assert f"ended by {number.name}; {tmp_path / 'run'} keeps what was written" in errors
    assert gone(ranks, 10)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 2
    for rank in range(2):
        last = (tmp_path / "run" / f"rank-{rank}.log").read_text().splitlines()[-1]
        assert last.endswith("Interrupted ended by SIGTERM")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_traceback_of_a_failing_rank_is_shown_last(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "rank-1.log").mkdir(parents=True)  # a folder: rank 1 cannot write its log
    start = time.monotonic()
    result = run(*settings(text, tmp_path / "run", "train.steps=100000"))
    assert result.exit_code == 1
    assert time.monotonic() - start < 60
    report = result.output[result.output.index("The first to fail, rank 1: Traceback") :]
    assert "IsADirectoryError" in report.splitlines()[-1]
    assert f"logs of the ranks: {tmp_path / 'run'}" in result.output


@pytest.mark.matrix
def test_settings_that_fail_on_the_ranks_are_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("too short")
    result = run(*settings(tmp_path / "own.txt", tmp_path / "run"))
    assert type(result.exception).__name__ == "ConfigError"
    assert "too few for one window of 16" in str(result.exception)
    assert "Traceback" not in result.output


# What is shown


def messages() -> list[Any]:
    kinds = {"param": 1 << 20, "master": 0, "grad": 1 << 20, "optim": 2 << 20}
    started = Started(
        model="gpt-nano",
        num_params=7,
        num_ranks=1,
        zero_stage=2,
        batch_size=4,
        context=16,
        num_files=1,
        num_bytes=9,
        num_tokens=9,
        text_sha256="ab" * 32,
        not_text=("pic",),
        packed=True,
        planned_bytes=kinds,
        num_steps=2,
    )
    steps = [
        StepDone(
            step=step,
            loss=2.5,
            lr=0.001,
            grad_norm=0.5,
            tokens=100,
            seconds=0.5,
            skipped=step - 1,
            planned_bytes=kinds,
            measured_bytes=kinds,
            peak_rss_bytes=3 << 20,
        )
        for step in (1, 2)
    ]
    finished = Finished(
        steps=2,
        seconds=1.0,
        tokens=200,
        skipped=1,
        first_loss=2.5,
        last_loss=2.5,
        first_held_out_loss=3.0,
        held_out_loss=2.0,
        digest="d" * 64,
        weights="w",
        sample="def [red]x\x1b[0m\nend",
    )
    return [
        *(started, Evaluated(step=0, held_out_loss=3.0), steps[0], Sampled(step=1, text="ab")),
        *(steps[1], Sampled(step=2, text="cd"), finished),
    ]


def shown(*, terminal: bool, quiet: bool = False, no_color: bool | None = None) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, highlight=False, no_color=no_color)
    with TrainView(console, line_every=1, quiet=quiet) as view:
        for message in messages():
            view.show(message)
    return stream.getvalue()


def test_lines_tell_rate_memory_and_skipped_steps() -> None:
    lines = shown(terminal=False).splitlines()
    step = "loss 2.5000  lr 0.001  grad norm 0.5  200 tokens/s  memory 4.0 MiB (planned 4.0)  rss 3 MiB  skipped"
    assert [line for line in lines if "tokens/s  memory" in line] == [
        f"step      {n}/2  {step} {n - 1}" for n in (1, 2)
    ]
    assert "text: 1 files, 9 bytes, 9 tokens, sha256 abababababab, 1 files left out that are not text" in lines
    assert "sample after 1 updates:" in lines
    assert "  | cd" not in lines  # that of the last update comes with the end
    assert "  | def [red]x\ufffd[0m" in lines  # neither markup nor a terminal's codes


def test_quiet_shows_the_end_only() -> None:
    expected = ["held-out loss 3.0000 -> 2.0000", f"parameters sha256 {'d' * 64}", "weights w"]
    assert shown(terminal=False, quiet=True).splitlines() == expected
    assert shown(terminal=True, quiet=True).splitlines() == expected


def test_panel_is_for_terminals_and_colours_can_be_refused() -> None:
    assert "\u256d\u2500 shardwise train" in shown(terminal=True)
    assert "\u256d" not in shown(terminal=False)
    colour = re.compile(r"\x1b\[(?:\d+;)*3[1-8]")
    assert colour.search(shown(terminal=True))
    assert not colour.search(shown(terminal=True, no_color=True))
