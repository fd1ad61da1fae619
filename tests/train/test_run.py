"""A whole run on thread ranks: stages agree, plans hold, losses are the true means, files are whole."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from shardwise.comm.base import Mesh
from shardwise.errors import ConfigError
from shardwise.models.sizes import SIZES
from shardwise.testing.ranks import run_ranks
from shardwise.train import loop
from shardwise.train.loop import RunTask, planned_bytes, prepare, run_rank
from shardwise.train.measure import parameter_digest
from shardwise.train.model import Blueprint
from shardwise.train.output import prepare_output, write_weights
from shardwise.train.report import Evaluated, Finished, Message, Sampled, Started, StepDone
from shardwise.train.sample import sample_text
from shardwise.train.settings import load_settings
from shardwise.train.text import NOT_A_TARGET
from shardwise.train.tokens import ByteTokenizer

NUM_RANKS = 2


@pytest.fixture(autouse=True)
def build_without_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded construction works for one model at a time; threads build theirs at once. Processes test it."""
    monkeypatch.setattr(Blueprint, "build", lambda self, device: (self.construct(), "broadcast"))


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"line {number}: {'ab' * (number % 7)}\n" for number in range(300)))
    return str(path)


def documents_file(folder: Path) -> str:
    path = folder / "documents.jsonl"
    texts = ("x" + "yz" * (number * number % 23) for number in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def task_of(folder: Path, data: str, **options: Any) -> RunTask:
    config = {
        "stage": options.pop("stage", 3),
        "data": {"path": [data]},
        "model": {"name": "gpt-nano", "context": 16},
        "batch": options.pop("batch", {"micro": 2}),
        "train": {"steps": 4, "eval_every": 2, "eval_batches": 2, "sample_tokens": 3, "output": str(folder)},
    }
    config["train"] |= options.pop("train", {})
    return RunTask(settings=load_settings(config | options, num_ranks=NUM_RANKS))


def run(task: RunTask) -> tuple[list[Finished], list[Message]]:
    told: list[Message] = []
    finished = run_ranks(NUM_RANKS, lambda mesh: run_rank(task, mesh, told.append))
    return finished, told


def of_kind(told: Sequence[Message], kind: type) -> list[Any]:
    return [message for message in told if isinstance(message, kind)]


@pytest.mark.parametrize("kind", ["packed", "documents"])
def test_stages_train_to_the_same_digest_and_keep_the_planned_bytes(kind: str, tmp_path: Path) -> None:
    data = text_file(tmp_path) if kind == "packed" else documents_file(tmp_path)
    digests, memory = {}, []
    for stage in range(4):
        task = task_of(tmp_path / f"{stage}", data, stage=stage)
        finished, told = run(task)
        digests[stage] = {each.digest for each in finished}
        steps = of_kind(told, StepDone)
        assert all(step.measured_bytes == step.planned_bytes for step in steps)
        memory.append(sum(steps[-1].measured_bytes.values()))
        assert finished[0].held_out_loss < finished[0].first_held_out_loss
    assert len(set.union(*digests.values())) == 1
    assert memory == sorted(memory, reverse=True)
    assert len(set(memory)) == 4


def test_another_seed_gives_another_digest(tmp_path: Path) -> None:
    digests = set()
    for seed in (0, 1):
        task = task_of(tmp_path / f"{seed}", text_file(tmp_path), seed=seed, train={"steps": 1, "sample_tokens": 0})
        digests.add(run(task)[0][0].digest)
    assert len(digests) == 2


def test_messages_come_in_order_with_every_update(tmp_path: Path) -> None:
    finished, told = run(task_of(tmp_path / "run", text_file(tmp_path), train={"sample_every": 3}))
    kinds = [type(message).__name__ for message in told]
    step = "StepDone"
    assert kinds == [
        *("Started", "Evaluated", step, step, "Evaluated", step, "Sampled", step, "Evaluated", "Sampled", "Finished")
    ]
    assert [message.step for message in of_kind(told, StepDone)] == [1, 2, 3, 4]
    assert of_kind(told, Evaluated)[0].held_out_loss == pytest.approx(math.log(256), abs=0.2)
    started = of_kind(told, Started)[0]
    assert (started.packed, started.num_ranks, started.batch_size, started.context) == (True, 2, 4, 16)
    assert of_kind(told, Sampled)[-1].text == finished[0].sample
    assert finished[0].sample.startswith("\n")
    assert finished[0].tokens == 4 * 4 * 16


def test_metrics_have_one_object_per_update(tmp_path: Path) -> None:
    _, told = run(task_of(tmp_path / "run", text_file(tmp_path)))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    fields = ["step", "loss", "lr", "grad_norm", "tokens", "seconds", "skipped", "planned_bytes", "measured_bytes"]
    assert list(rows[0]) == [*fields, "peak_rss_bytes", "tokens_per_second"]
    assert [row.get("held_out_loss") for row in rows] == [
        *(None, of_kind(told, Evaluated)[1].held_out_loss, None, of_kind(told, Evaluated)[2].held_out_loss)
    ]
    for row, step in zip(rows, of_kind(told, StepDone), strict=True):
        assert row["loss"] == step.loss
        assert row["tokens_per_second"] == pytest.approx(step.tokens / step.seconds)
        assert sorted(row["measured_bytes"]) == ["grad", "master", "optim", "param"]
        assert 20 << 20 < row["peak_rss_bytes"] < 16 << 30


def test_files_of_a_finished_run_are_whole(tmp_path: Path) -> None:
    task = task_of(tmp_path / "run", text_file(tmp_path))
    finished, _ = run(task)
    names = sorted(path.name for path in task.folder.iterdir())
    assert names == ["checkpoints", "metrics.jsonl", "model.safetensors", "rank-0.log", "rank-1.log", "summary.json"]
    summary = json.loads((task.folder / "summary.json").read_text())
    assert summary["digest"] == finished[0].digest
    weights = safetensors.torch.load_file(task.folder / "model.safetensors")
    model = SIZES["gpt-nano"].build(vocab=256, context=16)
    model.load_state_dict(weights)
    assert parameter_digest(dict(model.named_parameters())) == finished[0].digest
    for rank in range(NUM_RANKS):
        log = (task.folder / f"rank-{rank}.log").read_text().splitlines()
        assert f"rank {rank} begins" in log[0]
        assert log[-1].endswith("done")


def plain_losses(task: RunTask, num_steps: int) -> list[float]:
    """Train an unsharded model on the micro-batches of all ranks at once; return the mean loss over all tokens."""
    parts, settings = prepare(task.settings), task.settings
    config, batch = settings.config, settings.batch
    model = parts.blueprint.construct()
    assert config.optimizer is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr)
    losses = []
    for step in range(num_steps):
        total, count = torch.zeros(()), 0
        for index in range(batch.accumulation):
            for rank in range(NUM_RANKS):
                inputs, targets = parts.text.training.micro_batch(
                    number=step * batch.accumulation + index, rank=rank, num_ranks=NUM_RANKS, size=batch.micro
                )
                logits = model(inputs).flatten(0, 1)
                total = total + functional.cross_entropy(logits, targets.flatten(), reduction="sum")
                count += int((targets != NOT_A_TARGET).sum())
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_documents_of_unlike_lengths_give_the_mean_over_tokens(stage: int, accumulation: int, tmp_path: Path) -> None:
    task = task_of(
        tmp_path / "run",
        documents_file(tmp_path),
        stage=stage,
        batch={"micro": 2, "accumulation": accumulation},
        clip_grad_norm=0.5,
        optimizer={"name": "sgd", "lr": 0.5},
        train={"steps": 3, "sample_tokens": 0},
    )
    _, told = run(task)
    steps = of_kind(told, StepDone)
    assert [step.loss for step in steps] == pytest.approx(plain_losses(task, 3), rel=1e-5)
    assert len({step.tokens for step in steps}) > 1  # uneven, or this would show nothing


def test_overflow_is_counted_and_written_without_nan(tmp_path: Path) -> None:
    task = task_of(
        tmp_path / "run",
        text_file(tmp_path),
        precision={"param": "fp16"},
        loss_scale={"initial": 2.0**40, "hysteresis": 1},
        train={"sample_tokens": 0},
    )
    finished, told = run(task)
    assert finished[0].skipped == 4
    assert [step.skipped for step in of_kind(told, StepDone)] == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (task.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["grad_norm"] is None for row in rows)
    assert "NaN" not in (task.folder / "metrics.jsonl").read_text()


def test_text_that_is_too_short_fails_alike_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 20)
    task = task_of(tmp_path / "run", str(tmp_path / "text.txt"))
    errors = run_ranks(NUM_RANKS, lambda mesh: run_rank(task, mesh, lambda _: None), return_exceptions=True)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "too few for one window of 16" in str(errors[0])
    assert "ConfigError" in (task.folder / "rank-1.log").read_text()


def test_ranks_with_unlike_text_are_told(tmp_path: Path) -> None:
    tasks = []
    for rank in range(NUM_RANKS):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "text.txt").write_text(f"{rank} and so on " * 50)
        tasks.append(task_of(tmp_path / "run", str(tmp_path / f"{rank}" / "text.txt")))

    def body(mesh: Mesh) -> Finished:
        return run_rank(tasks[mesh["data"].rank], mesh, lambda _: None)

    errors = run_ranks(NUM_RANKS, body, return_exceptions=True)
    assert all("ranks disagree on the text" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_large_sizes_are_planned_without_memory(name: str, tmp_path: Path) -> None:
    settings = load_settings(
        {"model": {"name": name}, "data": {"path": [text_file(tmp_path)]}, "stage": 3}, num_ranks=8
    )
    bytes_of_rank, num_params = planned_bytes(prepare(settings), settings, 0)
    size = SIZES[name]
    width = size.shape.hidden
    per_block = 12 * width**2 + 13 * width
    expected = size.shape.num_layers * per_block + (256 + size.context + 2) * width
    assert num_params == expected
    assert bytes_of_rank["optim"] == pytest.approx(num_params * 8 / 8, rel=0.01)


def test_shapes_of_gpt2_have_the_published_number_of_parameters() -> None:
    counts = []
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        with torch.device("meta"):
            model = SIZES[name].build(vocab=50257)
        counts.append(sum(param.numel() for param in model.parameters()))
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]


def test_a_run_that_never_began_is_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prepare_output(folder, "stage = 1\n", overwrite=False)
    (folder / "rank-0.log").write_text("failed")
    prepare_output(folder, "stage = 2\n", overwrite=False)
    assert (folder / "settings.toml").read_text() == "stage = 2\n"
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds a run already"):
        prepare_output(folder, "stage = 3\n", overwrite=False)


def test_run_is_not_written_over_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prepare_output(folder, "stage = 1\n", overwrite=False)
    (folder / "rank-7.log").write_text("old")
    (folder / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds a run already \(settings\.toml\): pass --resume auto"):
        prepare_output(folder, "stage = 2\n", overwrite=False)
    assert (folder / "settings.toml").read_text() == "stage = 1\n"
    prepare_output(folder, "stage = 2\n", overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.md", "settings.toml"]
    assert (folder / "settings.toml").read_text() == "stage = 2\n"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"train\.output: .*file"):
        prepare_output(tmp_path / "file", "", overwrite=True)


def test_failed_write_leaves_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, {"a": torch.ones(2)}, "bytes")

    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_weights(tmp_path, {"a": torch.zeros(2)}, "bytes")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    shared = torch.ones(3)
    write_weights(tmp_path, {"a": shared, "b": shared, "c": torch.zeros(0), "d": torch.zeros(0)}, "bytes")
    assert sorted(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["a", "c", "d"]


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, "abcd"), (1.0, "abcd")])
def test_sample_follows_the_model_and_stops_at_the_end(temperature: float, expected: str) -> None:
    seen = []

    def next_byte(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        logits = torch.full((1, tokens.shape[1], 300), -100.0)
        last = int(tokens[0, -1])
        logits[0, -1, 0 if last == ord("d") else last + 1] = 100.0
        logits[0, -1, 299] = 1000.0  # no token of the tokenizer
        return logits

    text = sample_text(
        next_byte,
        ByteTokenizer(),
        prompt="ab",
        num_tokens=10,
        context=3,
        temperature=temperature,
        seed=0,
        device=torch.device("cpu"),
    )
    assert text == expected
    assert seen == [2, 3, 3]


def test_a_sample_without_room_for_the_whole_model_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathers: list[str] = []
    real = loop.unsharded

    def counted(model: nn.Module, *, writes: bool) -> Any:
        gathers.append("whole")
        return real(model, writes=writes)

    monkeypatch.setattr(loop, "unsharded", counted)
    samples = []
    for name, room in (("roomy", 1 << 40), ("full", 0)):
        monkeypatch.setattr(loop, "room_bytes", lambda device, room=room: room)
        monkeypatch.setattr(loop, "SMALL_BYTES", 0)
        finished, _ = run(task_of(tmp_path / name, text_file(tmp_path), train={"sample_tokens": 9}))
        samples.append(finished[0].sample)
    assert samples[0] == samples[1]
    assert len(gathers) == NUM_RANKS  # the roomy run's


def test_the_end_of_a_run_gathers_one_bucket_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    real = loop.full_state_dict

    def watched(model: nn.Module, **options: Any) -> Any:
        state = real(model, **options)
        kept.append(bool(state))
        return state

    monkeypatch.setattr(loop, "full_state_dict", watched)
    run(task_of(tmp_path / "run", text_file(tmp_path)))
    assert sorted(kept) == [False, True]
