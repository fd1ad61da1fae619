"""One rank of a run: reads the text, builds the model, trains, evaluates, samples, and writes what came of it.

``run_rank`` works on any mesh; ``run_process`` is what a process of its own does around it. The loop goes through the
engine, as a user's would. What it tells is in ``report.py``; the folder of a run is in ``output.py``.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from shardwise.access import full_state_dict, iterate_full_parameters, measured_bytes
from shardwise.accounting.report import MemoryReport, memory_report
from shardwise.accounting.shortage import explain_memory
from shardwise.api import plan, unsharded
from shardwise.checkpoint.calls import wait_for_save
from shardwise.comm.base import Mesh, flat_rank
from shardwise.comm.process_group import mesh_from
from shardwise.config.resolve import Resolved
from shardwise.engine import Engine
from shardwise.errors import ConfigError
from shardwise.runtime.record import Agreement
from shardwise.start import OPTIMIZERS, initialize, precision_of
from shardwise.train.measure import digest_in_order, peak_rss_bytes, room_bytes
from shardwise.train.model import Blueprint, blueprint
from shardwise.train.output import METRICS, SUMMARY, keep_metrics, write_json, write_weights
from shardwise.train.progress import Progress, resume_run, save_run
from shardwise.train.recording import Recording, memory_of_before
from shardwise.train.report import Evaluated, Finished, Message, Resumed, Sampled, Started, StepDone, as_json
from shardwise.train.sample import sample_text
from shardwise.train.settings import engine_settings
from shardwise.train.text import NOT_A_TARGET, Source, Text, read_text
from shardwise.train.tokens import Tokenizer, load_tokenizer

__all__ = ["Parts", "RunTask", "planned_bytes", "prepare", "run_process", "run_rank"]

Tell = Callable[[Message], None]
SMALL_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """What every rank is given.

    Attributes:
        settings: of the run; the folder it names exists.
        device_type: "cpu" or "cuda".
        resume: directory of the checkpoint to go on from; None: begin anew.
        weights_only: take the weights of that checkpoint, and begin anew otherwise.
    """

    settings: Resolved
    device_type: str = "cpu"
    resume: Path | None = None
    weights_only: bool = False

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.settings.config.train.output).expanduser()


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a run is made of before anything is sharded."""

    tokenizer: Tokenizer
    blueprint: Blueprint
    text: Text


def prepare(settings: Resolved) -> Parts:
    """Read the text and the shape of the model.

    Raises:
        ConfigError: something that the settings name is missing or does not fit.
    """
    config = settings.config
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_token)
    model = blueprint(config.model, vocab=tokenizer.vocab, seed=config.seed)
    text = read_text(config.data, tokenizer, length=model.context, seed=config.seed)
    return Parts(tokenizer=tokenizer, blueprint=model, text=text)


def facts_of(parts: Parts, settings: Resolved, num_params: int, planned: dict[str, int]) -> Started:
    """Return what there is to say before the first update; ``planned`` are bytes by kind."""
    text = parts.text
    return Started(
        model=parts.blueprint.name,
        num_params=num_params,
        num_ranks=settings.num_ranks,
        zero_stage=settings.config.stage,
        batch_size=settings.batch.size,
        context=parts.blueprint.context,
        num_files=text.num_files,
        num_bytes=text.num_bytes,
        num_tokens=text.num_tokens,
        text_sha256=text.sha256,
        not_text=text.not_text,
        packed=text.packed,
        planned_bytes=planned,
        num_steps=settings.config.train.steps,
    )


def planned_bytes(parts: Parts, settings: Resolved, rank: int) -> tuple[dict[str, int], int]:
    """Return the planned bytes of a rank by kind, and the number of parameters of the whole model."""
    config = settings.config
    model = parts.blueprint.meta()
    assert config.optimizer is not None  # load_settings fills it in
    memory = plan(
        model,
        settings.num_ranks,
        stage=config.stage,
        units=parts.blueprint.units,
        precision=precision_of(config),
        optimizer=OPTIMIZERS[config.optimizer.name],
        optimizer_options=config.optimizer.model_dump(exclude={"name"}),
    )
    return memory.of_rank(rank), sum(param.numel() for param in model.parameters())


def run_process(task: RunTask, rank: int, tell: Tell) -> None:
    """Do what a process of its own does: all it prints goes to its log. Its rank in the default group is ``rank``."""
    with (task.folder / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    run_rank(task, mesh_from(None), tell, seeds=True)


def run_rank(task: RunTask, mesh: Mesh, tell: Tell, *, seeds: bool = False) -> Finished:
    """Train as one rank of a mesh.

    Args:
        task: what to do.
        mesh: of the data-parallel ranks.
        tell: is told how it goes on rank 0.
        seeds: seed torch's generators of this process: alike on all ranks for what a model draws when it is built, and
            differently for what it draws in training (dropout).

    Returns:
        How it ended, the same on every rank but for seconds and memory.

    Raises:
        ConfigError: the text or the model does not fit, on any rank; the same on all.
        OutOfMemoryError: memory cannot be had on this rank.
    """
    rank = flat_rank(mesh)
    task.folder.mkdir(parents=True, exist_ok=True)
    with _Log(task.folder / f"rank-{rank}.log", rank) as log:
        seed = task.settings.config.seed
        if seeds:
            torch.manual_seed(seed)
        run = _Run(task, mesh, rank, log, tell)
        if seeds:
            torch.manual_seed(65_537 * (seed + 1) + rank)
        try:
            with explain_memory(run.model):
                return run.train()
        finally:
            run.close()


class _Log(AbstractContextManager["_Log"]):
    """One rank's log, a line with the time for each entry; it tells how the rank ended."""

    def __init__(self, path: Path, rank: int) -> None:
        self._stream = path.open("a", encoding="utf-8", buffering=1)
        self.write(f"rank {rank} begins, process {os.getpid()}")

    def write(self, text: str) -> None:
        """Add an entry."""
        self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell what ended the rank."""
        if isinstance(error, Exception):
            self.write("failed\n" + "".join(traceback.format_exception(error)))
        else:
            self.write("done" if error is None else f"{type(error).__name__} {error}")
        self._stream.close()


class _Clock:
    """Seconds since the start, and those of earlier processes of the run."""

    def __init__(self, before: float) -> None:
        self._start = time.perf_counter() - before

    def seconds(self) -> float:
        """Return the sum."""
        return time.perf_counter() - self._start


class _Run:
    """The state of one rank's run."""

    def __init__(self, task: RunTask, mesh: Mesh, rank: int, log: _Log, tell: Tell) -> None:
        self._task = task
        self._settings = task.settings
        self._config = task.settings.config
        self._rank = rank
        self._log = log
        self._tell_parent = tell
        self._device = torch.device(task.device_type)
        self._agreement = Agreement(mesh, self._device)
        self._parts = self._prepare()
        self._planned, num_params = planned_bytes(self._parts, self._settings, rank)
        model, values = self._parts.blueprint.build(self._device)
        self._engine: Engine
        self._engine, optimizer, _, _ = initialize(
            model=model,
            config=engine_settings(self._settings),
            mesh=mesh,
            units=self._parts.blueprint.units,
            initial_values=values,
        )
        self._measured: dict[str, int] = {}
        self._memory: MemoryReport | None = None
        assert optimizer is not None
        optimizer.register_step_post_hook(self._measure)
        self._sums = self._config.loss_reduction == "sum"
        self._metrics: TextIO | None = None
        self._progress = Progress()
        self._tell(facts_of(self._parts, self._settings, num_params, self._planned))
        if task.resume is not None:
            loaded = resume_run(self._engine, task.resume, weights_only=task.weights_only)
            self._progress = loaded.progress
            self._tell(
                Resumed(
                    path=str(task.resume),
                    step=self._progress.step,
                    num_ranks=loaded.num_ranks,
                    changed=loaded.changed,
                )
            )
        # The first micro-batch of this process, counted in those of its own size over its own ranks.
        self._first_batch = self._progress.samples // (self._settings.batch.micro * self._settings.num_ranks)
        self._first_step = self._progress.step + 1
        if rank == 0:
            keep_metrics(task.folder / METRICS, self._progress.step)
            self._metrics = (task.folder / METRICS).open("a", encoding="utf-8", buffering=1)

    @property
    def model(self) -> nn.Module:
        """The sharded model."""
        return self._engine.module

    def train(self) -> Finished:
        """Do the updates that are left, then evaluate, sample and write."""
        with Recording(self.model, self._task.folder, self._config.train) as recording:
            return self._train(recording)

    def _train(self, recording: Recording) -> Finished:
        options, progress = self._config.train, self._progress
        clock = _Clock(progress.seconds)
        if progress.step == 0:
            progress.first_held_out_loss = progress.held_out_loss = self._evaluate(0)
        for step in range(self._first_step, options.steps + 1):
            done = self._update(step)
            recording.step_done()
            progress.first_loss = done.loss if step == 1 else progress.first_loss
            progress.last_loss = done.loss
            progress.tokens += done.tokens
            progress.samples += self._settings.batch.size
            progress.step = step
            is_last = step == options.steps
            evaluates = is_last or (options.eval_every > 0 and step % options.eval_every == 0)
            samples = is_last or (options.sample_every > 0 and step % options.sample_every == 0)
            held_out = self._evaluate(step) if evaluates else None
            if evaluates:
                progress.held_out_loss = held_out
            self._write_metrics(done, held_out)
            if samples and options.sample_tokens:
                progress.sample = self._sample(step)
            progress.seconds = clock.seconds()
            if options.checkpoint_every and (is_last or step % options.checkpoint_every == 0):
                self._save()
        wait_for_save(self._engine.module)
        progress.seconds = clock.seconds()
        digest = digest_in_order(tensor for _, tensor in iterate_full_parameters(self._engine.module))
        finished = Finished(
            steps=progress.step,
            seconds=progress.seconds,
            tokens=progress.tokens,
            skipped=self._engine.skipped_steps,
            first_loss=progress.first_loss,
            last_loss=progress.last_loss,
            first_held_out_loss=progress.first_held_out_loss,
            held_out_loss=progress.held_out_loss,
            digest=digest,
            weights=str(self._write_weights()),
            sample=progress.sample,
            memory=self._memory,
        )
        if self._rank == 0:
            kept = {} if finished.memory else {"memory": memory_of_before(self._task.folder)}
            write_json(self._task.folder / SUMMARY, as_json(finished) | kept)
        self._tell(finished)
        return finished

    def close(self) -> None:
        """Let go of files."""
        if self._metrics is not None:
            self._metrics.close()

    def _prepare(self) -> Parts:
        """Read what every rank reads; fail on all ranks if one cannot, or if they read unlike text."""
        problem, parts = "", None
        try:
            parts = prepare(self._settings)
        except ConfigError as error:
            problem = str(error)
        said = [text for text in self._agreement.texts(problem, "the text and the model") if text]
        if said or parts is None:
            raise ConfigError(said[0])
        self._agreement.check_lines([f"sha256 {parts.text.sha256}", f"{parts.text.num_tokens} tokens"], "the text")
        return parts

    def _update(self, step: int) -> StepDone:
        start = time.perf_counter()
        batch = self._settings.batch
        rate = self._engine.get_lr()[0]
        losses: list[Tensor] = []
        count = 0
        for index in range(batch.accumulation):
            number = self._first_batch + (step - self._first_step) * batch.accumulation + index
            pair = self._parts.text.training.micro_batch(
                number=number, rank=self._rank, num_ranks=self._settings.num_ranks, size=batch.micro
            )
            loss, num_targets = self._loss(pair, "sum" if self._sums else "mean")
            self._engine.backward(loss, count=num_targets if self._sums else None)
            self._engine.step()
            losses.append(loss.detach())
            count += num_targets
        own_loss = float(torch.stack(losses).double().sum())
        total_loss, tokens = self._sum_over_ranks(own_loss, float(count))
        num_losses = tokens if self._sums else batch.accumulation * self._settings.num_ranks
        done = StepDone(
            step=step,
            loss=total_loss / num_losses,
            lr=rate,
            grad_norm=float(self._engine.get_global_grad_norm() or 0.0),
            tokens=int(tokens),
            seconds=time.perf_counter() - start,
            skipped=self._engine.skipped_steps,
            planned_bytes=self._planned,
            measured_bytes=self._measured,
            peak_rss_bytes=peak_rss_bytes(),
        )
        self._tell(done)
        return done

    def _loss(self, pair: tuple[Tensor, Tensor], reduction: str) -> tuple[Tensor, int]:
        """Return the cross-entropy in nats and the number of targets."""
        inputs, targets = (tensor.to(self._device) for tensor in pair)
        loss = self._parts.blueprint.loss(self._engine, inputs, targets, reduction=reduction)
        return loss, int((pair[1] != NOT_A_TARGET).sum())

    @torch.no_grad()
    def _evaluate(self, step: int) -> float | None:
        """Return the mean loss over held-out tokens of all ranks."""
        source: Source | None = self._parts.text.held_out
        if source is None:
            return None
        self._engine.eval()
        total, count = 0.0, 0
        num_ranks, each = self._settings.num_ranks, self._config.train.eval_batches
        for index in range(each):
            pair = source.spread(
                number=index * num_ranks + self._rank, count=each * num_ranks, size=self._settings.batch.micro
            )
            loss, num_targets = self._loss(pair, "sum")
            total, count = total + float(loss), count + num_targets
        self._engine.train()
        summed, tokens = self._sum_over_ranks(total, float(count))
        held_out_loss = summed / tokens
        self._tell(Evaluated(step=step, held_out_loss=held_out_loss))
        return held_out_loss

    def _sample(self, step: int) -> str:
        options, parts = self._config.train, self._parts
        usual = "\n    def " if self._config.data.path is None else "\n"
        model = self._engine.module
        model.eval()
        with unsharded(model, writes=False) if self._has_room_for_all() else nullcontext():
            text = sample_text(
                lambda tokens: parts.blueprint.logits(model, tokens),
                parts.tokenizer,
                prompt=usual if options.sample_prompt is None else options.sample_prompt,
                num_tokens=options.sample_tokens,
                context=parts.blueprint.context,
                temperature=options.sample_temperature,
                seed=self._config.seed,
                device=self._device,
            )
        model.train()
        self._tell(Sampled(step=step, text=text))
        return text

    def _has_room_for_all(self) -> bool:
        """Whether every rank can hold the whole model without needing more than training did: one gather for a sample.

        Otherwise each token gathers unit by unit, as a forward does.
        """
        whole = sum(p.numel() * p.element_size() for p in self._parts.blueprint.meta().parameters())
        (num_roomy,) = self._sum_over_ranks(float(max(room_bytes(self._device), SMALL_BYTES) >= whole))
        return num_roomy == self._settings.num_ranks

    def _save(self) -> None:
        options = self._config.train
        save_run(
            self._engine,
            self._task.folder,
            self._progress,
            keep_last=options.checkpoint_keep,
            background=options.checkpoint_background,
        )

    def _write_weights(self) -> Path:
        """Write the weights of all ranks, on rank 0."""
        state = full_state_dict(self._engine.module, rank0_only=True, offload_to_cpu=True)
        folder = self._task.folder
        if self._rank == 0:
            self._parts.blueprint.save_config(folder)
            return write_weights(folder, state, self._config.data.tokenizer)
        return folder / "model.safetensors"

    def _write_metrics(self, done: StepDone, held_out_loss: float | None) -> None:
        if self._metrics is not None:
            values = as_json(done)
            if held_out_loss is not None:
                values["held_out_loss"] = held_out_loss
            self._metrics.write(json.dumps(values, allow_nan=False) + "\n")

    def _measure(self, *_: Any) -> None:
        """Note the memory when all of it is there: after the optimizer moved, before the gradients go."""
        self._measured = measured_bytes(self._engine.module)
        if self._progress.step + 1 == self._config.train.steps:
            self._memory = memory_report(self._engine.module)

    def _sum_over_ranks(self, *values: float) -> list[float]:
        words = torch.tensor(values, dtype=torch.float64).view(torch.int64)
        rows = self._agreement.words(words, "losses").cpu().view(torch.float64)
        return [float(sum(column)) for column in zip(*rows.tolist(), strict=True)]  # in rank order, on every rank

    def _tell(self, message: Message) -> None:
        every = self._config.log_every or 1
        if not isinstance(message, StepDone) or message.step % every == 0 or message.step == 1:
            shown = {key: value for key, value in asdict(message).items() if key != "sample"}
            self._log.write(f"{type(message).__name__} {json.dumps(shown)}")
        if self._rank == 0:
            self._tell_parent(message)
