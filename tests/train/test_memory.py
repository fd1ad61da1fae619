"""A run says what it planned and what it measured, records its first updates, and explains a shortage of memory."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.nn import functional

from shardwise.cli.train_view import TrainView
from shardwise.memory import OutOfMemoryError
from shardwise.testing.ranks import run_ranks
from shardwise.trace.lines import read_lines
from shardwise.train.loop import RunTask, run_rank
from shardwise.train.model import Blueprint
from shardwise.train.output import prepare_output
from shardwise.train.report import Finished
from shardwise.train.settings import load_settings
from tests.accounting.case import CPU_WORDS

STATES = ("param", "master", "grad", "optim")


@pytest.fixture(autouse=True)
def build_without_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded construction works for one model at a time; threads build theirs at once."""
    monkeypatch.setattr(Blueprint, "build", lambda self, device: (self.construct(), "broadcast"))


def task_of(folder: Path, **train: Any) -> RunTask:
    text = folder.parent / "text.txt"
    text.write_text("".join(f"line {number}: {'ab' * (number % 7)}\n" for number in range(300)))
    config = {
        "data": {"path": [str(text)]},
        "model": {"name": "gpt-nano", "context": 16},
        "batch": {"micro": 2},
        "train": {"steps": 3, "eval_every": 2, "eval_batches": 1, "sample_tokens": 3, "output": str(folder)} | train,
    }
    return RunTask(settings=load_settings(config, num_ranks=2))


def run(task: RunTask) -> list[Finished]:
    return run_ranks(2, lambda mesh: run_rank(task, mesh, lambda message: None))


def test_the_end_has_planned_beside_measured(tmp_path: Path) -> None:
    finished = run(task_of(tmp_path / "run"))
    for rank, each in enumerate(finished):
        memory = each.memory
        assert memory is not None
        assert memory.rank == rank
        assert memory.planned_bytes == {kind: memory.measured_bytes[kind] for kind in STATES}
        assert memory.measured_peak_bytes["gathered"] > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    assert summary["planned_bytes"] == finished[0].memory.planned_bytes
    assert all(key.startswith(("planned", "measured")) for key in summary if key not in ("rank", "num_ranks", "device"))
    shown = {}
    for quiet in (False, True):
        stream = io.StringIO()
        with TrainView(Console(file=stream, width=250, highlight=False), line_every=1, quiet=quiet) as view:
            view.show(finished[0])
        shown[quiet] = stream.getvalue()
    assert str(finished[0].memory) in shown[False]
    assert "planned at rest" not in shown[True]


def test_the_first_updates_are_recorded_and_nothing_else_changes(tmp_path: Path) -> None:
    plain = run(task_of(tmp_path / "plain"))
    recorded = run(task_of(tmp_path / "recorded", timeline_steps=2, timeline_activations=True))
    assert recorded[0].digest == plain[0].digest
    assert not list((tmp_path / "plain").glob("*rank-*.json*"))
    for rank in range(2):
        head, *lines, foot = read_lines(tmp_path / "recorded" / f"timeline-rank-{rank}.jsonl")
        assert head["rank"] == rank
        assert {line["step"] for line in lines if line.get("operation") == "step"} == {1, 2}
        assert {line["kind"] for line in lines if line["what"] == "memory"} >= {"activation", "temporary", "grad"}
        assert foot["measured_peak"]["bytes"] > 0
        assert json.loads((tmp_path / "recorded" / f"trace-rank-{rank}.json").read_text())["traceEvents"]
    prepare_output(tmp_path / "recorded", "", overwrite=True)
    assert not [path for path in (tmp_path / "recorded").iterdir() if "rank-" in path.name]


def test_a_shortage_of_memory_is_explained_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(CPU_WORDS)

    monkeypatch.setattr(functional, "cross_entropy", short)
    task = task_of(tmp_path / "run", timeline_steps=1)
    found = run_ranks(2, lambda mesh: run_rank(task, mesh, lambda message: None), return_exceptions=True)
    assert isinstance(found[0], OutOfMemoryError)
    assert "largest owners (measured): " in str(found[0])
    assert "OutOfMemoryError" in (tmp_path / "run" / "rank-0.log").read_text()
