"""``shardwise demo``: train one small GPT at several ZeRO stages on local processes, and compare.

Owns the options, what one rank does and the report. Each stage runs in fresh processes, so that its
peak memory is its own. It calls public functions only; read ``models/gpt.py`` and ``data.py`` for what it trains.
"""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shardwise
from shardwise.comm.process_group import mesh_from
from shardwise.comm.recording import record
from shardwise.data import Corpus, batch, load_stdlib
from shardwise.launch.local import LocalJob, RanksFailedError, Tell, run_local
from shardwise.models.gpt import GPT, Block, GPTConfig, loss
from shardwise.train.measure import parameter_digest, peak_rss_bytes

__all__ = ["demo"]

KINDS = ("param", "master", "grad", "optim")
LEARNING_RATE = 2e-3
MAX_NORM = 1.0
WINDOWS_PER_RANK = 8
SEED = 0
LINE_EVERY_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the processes of one stage must know."""

    stage: int
    num_ranks: int
    num_steps: int
    config: GPTConfig
    folder: str  # private and temporary, for the rendezvous file


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """What one rank reports at the end. Bytes and calls are those of the last step."""

    param_digest: str
    bytes_at_rest: dict[str, int]
    sent_bytes: int
    num_collectives: int
    peak_rss_bytes: int
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class _StageResult:
    """One stage; the losses are means over the ranks."""

    stage: int
    losses: list[float]
    figures: list[_Figures]  # of every rank
    planned_bytes: list[dict[str, int]]  # of every rank
    tokens_per_second: float

    @property
    def as_planned(self) -> bool:
        """Whether every rank keeps exactly the planned bytes."""
        return [figures.bytes_at_rest for figures in self.figures] == self.planned_bytes


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Number of local processes.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per stage.")] = 40,
    stages: Annotated[str, typer.Option(help="Stages to run, in this order, separated by commas.")] = "0,1,2,3",
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures to this file too.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")] = False,
) -> None:
    """Train a small language model on Python's own source at ZeRO stages 0, 1, 2 and 3, and compare.

    Every stage starts from the same weights and sees the same text. The exit status is 1 unless all stages end with
    the same parameters, bit for bit, and keep exactly the bytes that were planned.
    """
    chosen = _parse_stages(stages)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder '{json_file.parent}'", param_hint="'--json'")
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    config, corpus = GPTConfig(), load_stdlib()
    num_params = sum(param.numel() for param in _meta_model(config).parameters())
    console.print(f"model: GPT, {num_params:,} parameters, fp32, AdamW; {ranks} ranks, {steps} steps per stage")
    console.print(f"data: {corpus.num_files} files, {corpus.num_bytes:,} bytes, sha256 {corpus.sha256}")
    try:
        results = _run_stages(config, chosen, ranks, steps, console)
    except RanksFailedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    identical = len({figures.param_digest for result in results for figures in result.figures}) == 1
    console.print(_table(results))
    if json_file is not None:
        facts = _facts(ranks, num_params, corpus, results, identical)
        json_file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    as_planned = all(result.as_planned for result in results)
    typer.echo(f"parameters after {steps} steps: {'identical' if identical else 'DIFFERENT'} at stages {stages}")
    typer.echo(f"bytes per rank: {'as planned' if as_planned else 'NOT as planned'}")
    if not (identical and as_planned):
        raise typer.Exit(1)


def _parse_stages(text: str) -> list[int]:
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= {"0", "1", "2", "3"} or len(set(names)) != len(names):
        raise typer.BadParameter(f"expected some of 0,1,2,3, each once, got {text!r}", param_hint="'--stages'")
    return [int(name) for name in names]


def _meta_model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _run_stages(
    config: GPTConfig, stages: Sequence[int], num_ranks: int, num_steps: int, console: Console
) -> list[_StageResult]:
    results = []
    with _progress(console, num_steps) as progress, tempfile.TemporaryDirectory(prefix="shardwise-demo-") as folder:
        for stage in stages:
            job = _Job(stage=stage, num_ranks=num_ranks, num_steps=num_steps, config=config, folder=folder)
            results.append(_run_stage(job, progress))
    return results


# What one rank does


def _train(job: _Job, rank: int, tell: Tell) -> _Figures:
    """Train at one stage in this process, one of ``job.num_ranks`` of the default group."""
    corpus = load_stdlib()
    mesh, log = record(mesh_from(None))
    model = shardwise.shard(GPT(job.config), mesh, stage=job.stage, units=Block)
    optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), model)
    seconds: list[float] = []
    at_rest: dict[str, int] = {}
    for step in range(job.num_steps):
        inputs, targets = batch(
            corpus.tokens, seed=SEED, step=step, rank=rank, batch_size=WINDOWS_PER_RANK, length=job.config.context
        )
        log.clear()
        start = time.perf_counter()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()  # type: ignore[no-untyped-call]
        shardwise.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        if step == job.num_steps - 1:  # gradients still exist
            at_rest = shardwise.measured_bytes(model)
        optimizer.zero_grad()
        tell(step_loss.item())
    sent_bytes, num_collectives = log.sent_bytes(), log.num_calls()
    peak_bytes = peak_rss_bytes()  # before the parameters are gathered for the digest
    return _Figures(
        param_digest=parameter_digest(shardwise.full_parameters(model)),
        bytes_at_rest=at_rest,
        sent_bytes=sent_bytes,
        num_collectives=num_collectives,
        peak_rss_bytes=peak_bytes,
        step_seconds=statistics.median(seconds[1:] or seconds),  # the first one allocates
    )


# The processes


def _run_stage(job: _Job, tell_step: Callable[[int, int, float], None]) -> _StageResult:
    """Run one stage in fresh processes and check what each of them reports."""
    plan = shardwise.plan(
        _meta_model(job.config), num_ranks=job.num_ranks, stage=job.stage, units=Block, optimizer=torch.optim.AdamW
    )
    losses: list[list[float]] = [[] for _ in range(job.num_ranks)]
    figures: dict[int, _Figures] = {}
    means: list[float] = []
    with contextlib.closing(_messages(job)) as messages:
        for rank, message in messages:
            if isinstance(message, _Figures):
                figures[rank] = message
            else:
                losses[rank].append(message)
                if min(len(own) for own in losses) > len(means):
                    means.append(statistics.fmean(own[len(means)] for own in losses))
                    tell_step(job.stage, len(means), means[-1])
    num_tokens = job.num_ranks * WINDOWS_PER_RANK * job.config.context
    return _StageResult(
        stage=job.stage,
        losses=means,
        figures=[figures[rank] for rank in range(job.num_ranks)],
        planned_bytes=[plan.of_rank(rank) for rank in range(job.num_ranks)],
        tokens_per_second=num_tokens / figures[0].step_seconds,
    )


def _messages(job: _Job) -> Generator[tuple[int, float | _Figures], None, None]:
    """Start the ranks and yield what they send, until all have ended. Close it to stop them.

    Raises:
        RanksFailedError: a rank raised or died; the others are stopped.
    """
    return run_local(
        LocalJob(
            body=_train,
            task=job,
            num_ranks=job.num_ranks,
            rendezvous=f"{job.folder}/stage-{job.stage}",
            name=f"stage {job.stage}",
        )
    )


# The report


@contextlib.contextmanager
def _progress(console: Console, num_steps: int) -> Iterator[Callable[[int, int, float], None]]:
    """Give a function of (stage, number of steps done, loss): a bar per stage on a terminal, else some lines."""
    if not console.is_terminal:

        def print_line(stage: int, step: int, step_loss: float) -> None:
            if step % LINE_EVERY_STEPS == 0 or step in (1, num_steps):
                console.print(f"stage {stage}  step {step:4d}/{num_steps}  loss {step_loss:.4f}")

        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as bars:
        tasks = {}

        def advance(stage: int, step: int, step_loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"stage {stage}", total=num_steps, loss=step_loss)
            bars.update(tasks[stage], completed=step, loss=step_loss)

        yield advance


def _table(results: Sequence[_StageResult]) -> Table:
    table = Table(title="Rank 0 at each stage; bytes at rest and sent are those of the last step")
    table.add_column("")
    for result in results:
        table.add_column(f"stage {result.stage}", justify="right")

    def add_row(name: str, cell: Callable[[_StageResult, _Figures], str]) -> None:
        table.add_row(name, *(cell(result, result.figures[0]) for result in results))

    add_row("first loss", lambda result, _: f"{result.losses[0]:.4f}")
    add_row("last loss", lambda result, _: f"{result.losses[-1]:.4f}")
    add_row("params, sha256", lambda _, figures: figures.param_digest[:10])
    table.add_section()

    def add_kind(kind: str) -> None:
        add_row(f"{kind} bytes", lambda _, figures: f"{figures.bytes_at_rest[kind]:,}")
        add_row("  planned", lambda result, _: f"{result.planned_bytes[0][kind]:,}")

    for kind in KINDS:
        add_kind(kind)
    table.add_section()
    add_row("sent bytes", lambda _, figures: f"{figures.sent_bytes:,}")
    add_row("collectives", lambda _, figures: f"{figures.num_collectives:,}")
    add_row("peak RSS, MiB", lambda _, figures: f"{figures.peak_rss_bytes / 2**20:,.1f}")
    add_row("seconds per step", lambda _, figures: f"{figures.step_seconds:.3f}")
    add_row("tokens per second", lambda result, _: f"{result.tokens_per_second:,.0f}")
    return table


def _facts(
    num_ranks: int, num_params: int, corpus: Corpus, results: Sequence[_StageResult], identical: bool
) -> dict[str, object]:
    """Return what ``--json`` writes."""
    stages = []
    for result in results:
        figures = result.figures[0]
        stages.append(
            {
                "stage": result.stage,
                "losses": result.losses,
                "param_digest": figures.param_digest,
                "bytes_per_rank": figures.bytes_at_rest,
                "planned_bytes_per_rank": result.planned_bytes[0],
                "sent_bytes_per_rank": figures.sent_bytes,
                "collectives": figures.num_collectives,
                "peak_rss_bytes": figures.peak_rss_bytes,
                "step_seconds": figures.step_seconds,
                "tokens_per_second": result.tokens_per_second,
            }
        )
    return {
        "ranks": num_ranks,
        "model": {"params": num_params},
        "data": {"files": corpus.num_files, "bytes": corpus.num_bytes, "sha256": corpus.sha256},
        "stages": stages,
        "identical": identical,
    }
