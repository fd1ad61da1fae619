"""Every benchmark runs to its end on the smallest work and writes figures that ``render.py`` can read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("--reps", "1", "--warmup", "1", "--steps", "2")


def run(tmp_path: Path, script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run one script; return what it wrote and what it printed."""
    target = tmp_path / f"{script}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments, "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    return written, done.stdout


def rows(record: dict[str, Any]) -> list[list[str]]:
    assert len(record["tables"]) == 1
    found: list[list[str]] = record["tables"][0]["rows"]
    return found


def test_step_compares_systems_that_learn_alike(tmp_path: Path) -> None:
    record, _ = run(tmp_path, "step", *SHORT, "--sizes", "tiny", "--systems", "ddp", "shardwise3")
    assert [row[0] for row in rows(record)] == ["ddp", "shardwise3"]
    first, *others = (facts["losses"] for facts in record["facts"])
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-4)
    assert not [text for text in record["warnings"] if "losses differ" in text]


def test_host_cost_is_counted_per_block(tmp_path: Path) -> None:
    record, _ = run(
        tmp_path, "host", "--reps", "1", "--blocks", "2", "--worlds", "8", "--systems", "compute", "shardwise3"
    )
    plain, sharded = (facts["us_per_block"] for facts in record["facts"])
    assert all(value > 0 for value in plain)
    assert sharded[3] > plain[3]


def test_other_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from common.harness import Outcome, unlike_losses
    from common.task import Task

    def outcome(system: str, *losses: float) -> Outcome:
        return Outcome(task=Task(system=system, size="tiny"), rows=[[{"losses": list(losses)}] * 2])

    assert unlike_losses([outcome("compute", 9.0), outcome("ddp", 2.0), outcome("fsdp2", 2.001)]) == []
    assert unlike_losses([outcome("ddp", 2.0, 1.0), outcome("fsdp2", 2.0, 1.01)]) == ["fsdp2"]


@pytest.mark.matrix
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")
def test_memory_counts_live_bytes(tmp_path: Path) -> None:
    record, _ = run(tmp_path, "memory", *SHORT, "--sizes", "tiny", "--systems", "ddp", "shardwise3")
    live = {row[0]: float(row[1].replace(",", "")) for row in rows(record)}
    assert live["shardwise3"] > 0


@pytest.mark.matrix
@pytest.mark.needs_root
@pytest.mark.skipif(shutil.which("ip") is None or shutil.which("tc") is None, reason="needs iproute2")
def test_wire_counts_bytes_and_leaves_no_namespace(tmp_path: Path) -> None:
    probe = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        pytest.skip("needs a kernel with network namespaces")
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    record, printed = run(
        tmp_path, "wire", *SHORT, "--sizes", "tiny", "--rates", "1gbit", "--systems", "ddp", "shardwise1"
    )
    assert "not run" not in printed
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout == before
    sent = {facts["system"]: facts["sent_bytes_per_param"] for facts in record["facts"]}
    assert 4.0 < sent["shardwise1"] < 6.0  # of a tiny model: headers and records are a part


@pytest.mark.matrix
def test_the_others_run(tmp_path: Path) -> None:
    run(tmp_path, "optimizer", *SHORT, "--sizes", "tiny")
    record, _ = run(tmp_path, "prefetch", *SHORT, "--sizes", "tiny", "--depths", "0", "2", "--rate", "none")
    assert [row[0] for row in rows(record)] == ["0", "2"]
