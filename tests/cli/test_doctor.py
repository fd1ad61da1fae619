import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.comm.base import Key, Mesh
from shardwise.comm.fake import FakeComm
from shardwise.launch import machine
from shardwise.launch.machine import Finding, all_gather_ranks, examine
from shardwise.testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def raise_on_one(mesh: Mesh) -> bool:
    if mesh["data"].rank == 1:
        raise ValueError("broken network")
    return all_gather_ranks(mesh)


def hang(mesh: Mesh) -> bool:
    time.sleep(60)
    return True


def say_no(mesh: Mesh) -> bool:
    return mesh["data"].rank == 0


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the processes where a test is about something else."""
    monkeypatch.setattr(machine, "run_processes", lambda num_ranks, body, timeout: [True] * num_ranks)


def test_healthy_machine_passes_with_two_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    result = run("--json", "facts.json")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "training works here"
    assert "2 ranks over gloo" in result.output
    facts = json.loads(Path("facts.json").read_text())
    assert facts["works"] is True
    found = {finding["name"]: finding for finding in facts["findings"]}
    assert found["torch"]["detail"] == torch.__version__
    assert found["python"]["detail"] == sys.version.split()[0]
    assert found["2 ranks over gloo"]["works"]
    assert 0 < found["2 ranks over gloo"]["figures"]["seconds"] < 60
    assert found["memory"]["figures"]["available_bytes"] <= found["memory"]["figures"]["total_bytes"]
    assert found["disk"]["figures"]["free_bytes"] > 0
    assert 0 < found["cores"]["figures"]["usable"] <= found["cores"]["figures"]["present"]
    assert {"gloo", "nccl", "ssh", "a free port", "port 29500", "transformers"} < found.keys()
    assert list(tmp_path.iterdir()) == [tmp_path / "facts.json"]  # nothing else is left behind


@pytest.mark.parametrize(
    ("body", "seconds", "reason"),
    [
        (raise_on_one, 60.0, "ValueError: broken network"),
        (hang, 1.5, "TimeoutError: ranks [0, 1] did not end in time"),
        (say_no, 60.0, "wrong values"),
    ],
)
def test_ranks_that_cannot_talk_are_found_out(body: Callable[[Mesh], bool], seconds: float, reason: str) -> None:
    finding = machine._two_ranks(body, seconds)
    assert finding.needed
    assert not finding.works
    assert reason in finding.detail


def test_all_gather_is_checked_by_value() -> None:
    class Lazy(FakeComm):
        """Moves nothing."""

        def all_gather(self, buffer: torch.Tensor, key: Key) -> None:
            return

    assert run_ranks(2, all_gather_ranks) == [True, True]
    assert all_gather_ranks({"data": Lazy(rank=0, size=2)}) is False


@pytest.mark.usefixtures("without_ranks")
@pytest.mark.parametrize("needed", [True, False])
def test_status_follows_what_is_needed(needed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = Finding(area="x", name="the thing", works=False, needed=needed, detail="is gone", figures={})
    monkeypatch.setattr(machine, "_ssh", lambda: broken)
    result = run("--quiet", "--json", str(tmp_path / "facts.json"))
    assert result.exit_code == int(needed)
    assert json.loads((tmp_path / "facts.json").read_text())["works"] is not needed
    verdict = "training cannot work here: the thing" if needed else "training works here"
    assert result.output.splitlines() == [verdict]


@pytest.mark.usefixtures("without_ranks")
def test_old_and_missing_packages_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {"torch": "2.9.1+cu128", "numpy": None, "transformers": "5.0.0"}
    real = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: versions[name] if name in versions else real(name))
    found = by_name(examine(tmp_path))
    assert (found["torch"].works, found["torch"].needed, found["torch"].detail) == (False, True, "2.9.1+cu128")
    assert (found["numpy"].works, found["numpy"].needed) == (False, True)
    assert found["transformers"].works
    assert found["pydantic"].works


@pytest.mark.usefixtures("without_ranks")
def test_taken_port_is_told_and_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setattr(machine, "_USUAL_PORT", busy.getsockname()[1])
        found = by_name(examine(tmp_path))[f"port {busy.getsockname()[1]}"]
    assert (found.works, found.needed) == (False, False)
    assert "--master-port" in found.detail


@pytest.mark.usefixtures("without_ranks")
def test_folder_that_cannot_be_written_stops_training(tmp_path: Path) -> None:
    found = by_name(examine(tmp_path / "missing"))["disk"]
    assert (found.works, found.needed) == (False, True)


@pytest.mark.parametrize(
    "arguments", [("--json", "no-such-folder/facts.json"), ("--timeout", "0"), ("--no-such-option",)]
)
def test_bad_option_is_refused(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_limits_of_a_container_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, Any] = {"/sys/fs/cgroup/cpu.max": "150000 100000\n"}
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **options: texts.get(str(self)) or real(self, **options))
    assert machine._cgroup_cores() == 1.5
    texts["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    assert machine._cgroup_cores() is None
