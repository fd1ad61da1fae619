"""``shardwise train --find-micro-batch``: the largest micro-batch that runs, measured, beside the planned one."""

from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from shardwise.cli.quantities import parse_bytes
from shardwise.config.resolve import Resolved
from shardwise.errors import ConfigError
from shardwise.sizing.case import Memory
from shardwise.sizing.choice import MOST, Question, ask
from shardwise.sizing.search import largest
from shardwise.sizing.subject import SizingSubject
from shardwise.train.probe import PROBE_SETTINGS, runs_within
from shardwise.train.settings import load_settings

__all__ = ["find"]

TIMEOUT_SECONDS = 600.0


def find(
    config: Path | None, overrides: Sequence[str], num_ranks: int, device_type: str, memory_text: str | None
) -> None:
    """Print the largest micro-batch that ran and the planned one.

    Raises:
        ConfigError: the settings fix the batch, there is no limit to find it in, or the run fails for another reason.
    """
    memory = _memory(memory_text, device_type)
    replaced = tuple(setting.partition("=")[0] for setting in (*PROBE_SETTINGS, "train.output=", "batch.micro="))
    overrides = [text for text in overrides if text.partition("=")[0].strip() not in replaced]
    subject = SizingSubject(None if config is None else str(config), overrides=overrides, num_ranks=num_ranks)
    written = load_settings(config, overrides=overrides, num_ranks=num_ranks, device=device_type)
    question = Question(
        memory=memory,
        gpus=num_ranks,
        micro=None,
        stages=(written.config.stage,),
        precisions=(written.config.precision.param,),
        checkpointing=(written.config.model.activation_checkpointing,),
    )
    planned = ask(subject, question).answers[0].found or 0
    typer.echo(f"planned: {planned} (dry runs; {memory.bytes:,} bytes per rank)")

    def runs(micro: int) -> bool:
        def settings(folder: str) -> Resolved:
            chosen = [*overrides, f"batch.micro={micro}", *PROBE_SETTINGS, f"train.output={folder}"]
            return load_settings(config, overrides=chosen, num_ranks=num_ranks, device=device_type)

        done = runs_within(
            settings,
            device_type=device_type,
            limit_bytes=memory.bytes if device_type == "cpu" else None,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        typer.echo(f"  {micro}: {'runs' if done else 'too much'}")
        return done

    found = largest(runs, guess=max(planned, 1), limit=MOST["micro"])
    typer.echo(f"largest micro-batch that ran: {found} (measured; 3 updates); planned: {planned}")
    if not found:
        raise typer.Exit(1)


def _memory(text: str | None, device_type: str) -> Memory:
    if text is not None:
        if device_type == "cuda":
            raise ConfigError("--memory: on CUDA the limit is the device's memory: leave it out")
        try:
            return Memory(bytes=parse_bytes(text), margin=0)
        except ValueError as error:
            raise ConfigError(f"--memory: {error}") from None
    if device_type == "cpu":
        raise ConfigError("--find-micro-batch: say how much memory one rank may take: --memory 2GiB")
    return Memory(bytes=torch.cuda.mem_get_info()[1], margin=0)
