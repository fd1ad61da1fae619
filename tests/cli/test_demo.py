import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from shardwise.cli import demo as demo_module
from shardwise.cli.main import app
from shardwise.data import load_stdlib
from shardwise.launch.local import RanksFailedError
from shardwise.layout import ParamSpec, plan_layout
from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.train.measure import parameter_digest

pytestmark = pytest.mark.timeout(400)  # whole demos, on a machine that may be busy

NUM_RANKS, NUM_STEPS = 2, 3
KINDS = ["param", "master", "grad", "optim"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    """One short run of all stages: what it printed, and its JSON file."""
    path = tmp_path_factory.mktemp("demo") / "figures.json"
    result = run("--ranks", str(NUM_RANKS), "--steps", str(NUM_STEPS), "--json", str(path))
    assert result.exit_code == 0, result.output
    return result, json.loads(path.read_text(encoding="utf-8"))


def padded_numel(names: list[str], model: GPT) -> int:
    params = dict(model.named_parameters())
    specs = [ParamSpec(name=name, shape=tuple(params[name].shape), dtype=torch.float32) for name in names]
    return plan_layout(specs, NUM_RANKS).numel


@pytest.fixture(scope="module")
def unit_numels() -> list[int]:
    """Padded elements of the root's own parameters, then of each block."""
    with torch.device("meta"):
        model = GPT(GPTConfig())
    units: dict[str, list[str]] = {"": []}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            units[f"{name}."] = []
    for name, _ in model.named_parameters():
        units[max((prefix for prefix in units if name.startswith(prefix)), key=len)].append(name)
    return [padded_numel(names, model) for names in units.values()]


def test_json_has_exactly_the_promised_fields(finished: tuple[Result, dict[str, Any]]) -> None:
    _, facts = finished
    assert list(facts) == ["ranks", "model", "data", "stages", "identical"]
    assert facts["ranks"] == NUM_RANKS
    assert facts["model"] == {"params": sum(param.numel() for param in GPT(GPTConfig()).parameters())}
    corpus = load_stdlib()
    assert facts["data"] == {"files": corpus.num_files, "bytes": corpus.num_bytes, "sha256": corpus.sha256}
    assert [stage["stage"] for stage in facts["stages"]] == [0, 1, 2, 3]
    for stage in facts["stages"]:
        assert list(stage) == [
            "stage",
            "losses",
            "param_digest",
            "bytes_per_rank",
            "planned_bytes_per_rank",
            "sent_bytes_per_rank",
            "collectives",
            "peak_rss_bytes",
            "step_seconds",
            "tokens_per_second",
        ]
        assert list(stage["bytes_per_rank"]) == list(stage["planned_bytes_per_rank"]) == KINDS
        assert 50 * 2**20 < stage["peak_rss_bytes"] < 8 * 2**30
        assert stage["step_seconds"] > 0


def test_stages_end_with_the_same_parameters_and_losses(finished: tuple[Result, dict[str, Any]]) -> None:
    _, facts = finished
    assert facts["identical"] is True
    assert len({stage["param_digest"] for stage in facts["stages"]}) == 1
    assert len({tuple(stage["losses"]) for stage in facts["stages"]}) == 1


def test_loss_falls(finished: tuple[Result, dict[str, Any]]) -> None:
    losses = finished[1]["stages"][0]["losses"]
    assert len(losses) == NUM_STEPS
    assert losses[0] == pytest.approx(5.55, abs=0.2)  # ln 256
    assert losses[-1] < losses[0] - 0.3


def test_bytes_are_as_planned_and_shrink_with_the_stage(finished: tuple[Result, dict[str, Any]]) -> None:
    by_stage = [stage["bytes_per_rank"] for stage in finished[1]["stages"]]
    assert by_stage == [stage["planned_bytes_per_rank"] for stage in finished[1]["stages"]]
    for kind, split_from in (("optim", 1), ("grad", 2), ("param", 3)):
        full, split = by_stage[split_from - 1][kind], by_stage[split_from][kind]
        assert split == pytest.approx(full / NUM_RANKS, rel=0.01), kind
    assert all(sizes["master"] == 0 for sizes in by_stage)  # in fp32 a parameter is its own master


def test_sent_bytes_follow_the_formula(finished: tuple[Result, dict[str, Any]], unit_numels: list[int]) -> None:
    total = sum(unit_numels)
    kept = unit_numels[0] + unit_numels[-1]  # root and last block stay gathered from forward to backward
    gathered_or_reduced = [2 * total, 2 * total, 2 * total, 3 * total - kept]
    for stage, numel in zip(finished[1]["stages"], gathered_or_reduced, strict=True):
        expected = numel * (NUM_RANKS - 1) // NUM_RANKS * 4
        record = stage["sent_bytes_per_rank"] - expected  # sent once per step, for the norm
        assert 0 <= record <= 4096, stage["stage"]


def test_report_names_the_data_and_the_verdict(finished: tuple[Result, dict[str, Any]]) -> None:
    result, facts = finished
    data = facts["data"]
    assert f"data: {data['files']} files, {data['bytes']:,} bytes, sha256 {data['sha256']}" in result.output
    assert "identical at stages 0,1,2,3" in result.output
    assert "bytes per rank: as planned" in result.output
    assert f"stage 3  step {NUM_STEPS:4d}/{NUM_STEPS}" in result.output
    assert facts["stages"][0]["param_digest"][:10] in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--ranks", "0"), "--ranks"),
        (("--steps", "0"), "--steps"),
        (("--stages", "4"), "--stages"),
        (("--stages", "0,0"), "--stages"),
        (("--stages", ""), "--stages"),
        (("--json", "no-such-folder/figures.json"), "--json"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_bad_option_is_refused(arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def fake_stages(monkeypatch: pytest.MonkeyPatch, *, digests: Sequence[str], planned: int) -> None:
    """Replace the processes by results: one digest per stage, one planned byte count against a measured 0."""

    def run_stage(job: Any, tell_step: Any) -> Any:
        figures = demo_module._Figures(
            param_digest=digests[job.stage],
            bytes_at_rest=dict.fromkeys(KINDS, 0),
            sent_bytes=0,
            num_collectives=0,
            peak_rss_bytes=0,
            step_seconds=1.0,
        )
        return demo_module._StageResult(
            stage=job.stage,
            losses=[1.0],
            figures=[figures],
            planned_bytes=[dict.fromkeys(KINDS, planned)],
            tokens_per_second=1.0,
        )

    monkeypatch.setattr(demo_module, "_run_stage", run_stage)


@pytest.mark.parametrize(
    ("digests", "planned", "status"), [("aaaa", 0, 0), ("aaba", 0, 1), ("aaaa", 1, 1), ("aaba", 1, 1)]
)
def test_exit_status_tells_whether_stages_agree_and_plans_hold(
    digests: str, planned: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_stages(monkeypatch, digests=digests, planned=planned)
    result = run()
    assert result.exit_code == status
    assert ("DIFFERENT" in result.output) == (digests != "aaaa")
    assert ("NOT as planned" in result.output) == (planned != 0)


def test_json_is_written_when_stages_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_stages(monkeypatch, digests="abab", planned=0)
    assert run("--json", str(tmp_path / "figures.json")).exit_code == 1
    assert json.loads((tmp_path / "figures.json").read_text())["identical"] is False


def test_quiet_prints_the_verdict_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_stages(monkeypatch, digests="aaaa", planned=0)
    result = run("--quiet", "--stages", "3,0")
    assert result.output.splitlines() == [
        "parameters after 40 steps: identical at stages 3,0",
        "bytes per rank: as planned",
    ]


@pytest.fixture
def job(tmp_path: Path) -> demo_module._Job:
    return demo_module._Job(stage=0, num_ranks=2, num_steps=100_000, config=GPTConfig(), folder=str(tmp_path))


def test_traceback_of_a_failing_rank_is_shown(job: demo_module._Job) -> None:
    impossible = demo_module._Job(stage=9, num_ranks=2, num_steps=1, config=GPTConfig(), folder=job.folder)
    with pytest.raises(RanksFailedError, match=r"(?s)The first to fail, rank \d .*ConfigError: stage must"):
        list(demo_module._messages(impossible))
    assert not multiprocessing.active_children()


def test_death_of_a_rank_ends_the_others(job: demo_module._Job) -> None:
    messages = demo_module._messages(job)
    next(messages)
    victim, other = sorted(multiprocessing.active_children(), key=lambda process: process.name)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(RanksFailedError, match=r"The first to fail, rank \d .*died, exit code -9"):
        list(messages)
    assert not other.is_alive()


def children_of(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in tasks.read_text().split()} if tasks.exists() else set()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked for its exit code yet


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long demo in a process of its own, with its ranks started."""
    command = [sys.executable, "-c", "from shardwise.cli.main import main; main()"]
    process = subprocess.Popen(
        [*command, "demo", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # a killed process cannot remove its temporary folder
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("stage 0"):
            break
    yield process
    process.kill()
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_demo_leaves_no_process(running: subprocess.Popen[str], number: signal.Signals) -> None:
    ranks = children_of(running.pid)
    assert len(ranks) >= NUM_RANKS
    running.send_signal(number)
    output, _ = running.communicate(timeout=20)  # the pipe ends when the last process that holds it does
    assert running.returncode != 0
    assert "Traceback" not in output
    deadline = time.monotonic() + 10
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_digest_follows_names_not_order() -> None:
    first, second = torch.arange(3.0), torch.ones(2)
    expected = hashlib.sha256(first.numpy().tobytes() + second.numpy().tobytes()).hexdigest()
    assert parameter_digest({"b": second, "a": first}) == expected


def test_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"shardwise {version('shardwise')}\n"
