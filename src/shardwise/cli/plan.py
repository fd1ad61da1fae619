"""``shardwise plan``: which stage, precision and recomputation fit a memory; what it takes; settings that do it.

Owns the options; ``sizing/`` does the work.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console

from shardwise.cli.quantities import parse_bytes
from shardwise.cli.simulate import check_json_path, parse_names, parse_stages, show, write_json
from shardwise.errors import ConfigError
from shardwise.sizing.case import MARGIN, Case, Memory
from shardwise.sizing.choice import Choice, Question, ask
from shardwise.sizing.states import parse_num_params, state_rows
from shardwise.sizing.subject import SizingSubject
from shardwise.sizing.tables import choice_facts, choice_tables, state_facts, state_tables
from shardwise.train.settings import settings_as_toml

__all__ = ["plan"]

PRECISIONS = ("bf16", "fp32", "fp16")
CHECKPOINTING: Mapping[str, tuple[bool, ...]] = MappingProxyType(
    {"both": (False, True), "on": (True,), "off": (False,)}
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A built-in model such as gpt2-xl or llama-3-8b, a Hugging Face folder (no weights needed), a TOML or "
            "JSON file of settings as train takes it, or a number of parameters such as 7.5B."
        ),
    ],
    gpus: Annotated[str, typer.Option(metavar="N|auto", help="Number of GPUs; auto: the fewest that fit.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of one GPU, such as 24GiB or 80GB.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as batch.size=64; may be repeated."),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(min=1, help="Length of sequences, in tokens; left out: the model's.", show_default=False),
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Sequences per forward on one GPU; auto: the most that fit; left out: that of the settings.",
            show_default=False,
        ),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Blocks of a built-in model; auto: the largest model that fits; left out: its own.",
            show_default=False,
        ),
    ] = None,
    stages: Annotated[str, typer.Option(help="ZeRO stages to look at, separated by commas.")] = "0,1,2,3",
    precision: Annotated[
        str | None,
        typer.Option(help="bf16, fp16 or fp32, the preferred one first; left out: bf16,fp32.", show_default=False),
    ] = None,
    checkpointing: Annotated[
        str, typer.Option(metavar="both|on|off", help="Compute blocks again in backward (activation checkpointing).")
    ] = "both",
    margin: Annotated[float, typer.Option(min=0, max=0.99, help="Part of the memory that must stay free.")] = MARGIN,
    write: Annotated[
        Path | None,
        typer.Option("--write", dir_okay=False, help="Write settings of the row to take, for train and initialize."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures to this file too.")
    ] = None,
) -> None:
    """Say which stage, precision and recomputation fit, before anything runs: by dry runs of what train would do.

    Exit status 1: nothing fits.
    """
    check_json_path(json_file)
    if write is not None and not write.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder '{write.parent}'", param_hint="'--write'")
    device = Memory(bytes=_memory(memory), margin=margin)
    chosen = tuple(parse_stages(stages))
    if checkpointing not in CHECKPOINTING:
        raise typer.BadParameter(f"expected both, on or off, got {checkpointing!r}", param_hint="'--checkpointing'")
    if not model.strip():
        raise typer.BadParameter("name a model", param_hint="MODEL")
    num_params = parse_num_params(model)
    num_gpus = _number(gpus, "'--gpus'")
    if num_params is not None:
        if write is not None or overrides or seq or micro_batch or depth:
            raise typer.BadParameter("a number of parameters has no settings, only states", param_hint="MODEL")
        precisions = tuple(parse_names(precision or "bf16,fp32", PRECISIONS, "'--precision'"))
        rows = state_rows(num_params, device.bytes, num_gpus, stages=chosen, precisions=precisions)
        show(state_tables(num_params, device, num_gpus, rows), quiet=False)
        write_json(json_file, state_facts(num_params, device, rows))
        return
    _check_overrides(overrides or (), {"model.context": seq, "batch.micro": micro_batch, "model.depth": depth})
    subject = SizingSubject(model, overrides=overrides or (), context=seq, num_ranks=num_gpus or 1)
    named = precision or subject.precision or "bf16,fp32"
    question = Question(
        memory=device,
        gpus=num_gpus,
        micro="own" if micro_batch is None else _number(micro_batch, "'--micro-batch'"),
        depth="own" if depth is None else _number(depth, "'--depth'"),
        stages=chosen,
        precisions=tuple(parse_names(named, PRECISIONS, "'--precision'")),
        checkpointing=CHECKPOINTING[checkpointing],
    )
    choice = _ask(subject, question)
    show(choice_tables(subject, choice), quiet=False)
    write_json(json_file, choice_facts(subject, choice))
    if choice.best is None:
        raise typer.Exit(1)
    if write is not None:
        _write(subject, choice, write)


def _ask(subject: SizingSubject, question: Question) -> Choice:
    console = Console(stderr=True)
    with console.status("dry runs") as status:

        def tell(case: Case) -> None:
            words = f"stage {case.stage}, {case.precision}, {case.gpus} GPUs"
            words += "" if case.micro is None else f", micro-batch {case.micro}"
            words = f"dry run: {words}{', recompute' if case.checkpointing else ''}"
            if console.is_terminal:
                status.update(words)
            else:
                console.print(words, soft_wrap=True)

        return ask(subject, question, tell)


def _write(subject: SizingSubject, choice: Choice, path: Path) -> None:
    assert choice.best is not None
    settings = subject.settings(choice.best.need.case)
    head = f"# shardwise train {path.name} --ranks {choice.best.need.case.gpus}\n"
    try:
        path.write_text(head + settings_as_toml(settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {str(path)!r}: cannot be written: {error.strerror}") from error
    typer.echo(f"settings: {path}; shardwise train {path} --ranks {choice.best.need.case.gpus}")


def _check_overrides(overrides: Sequence[str], given: Mapping[str, object]) -> None:
    """Refuse settings that options or rows decide."""
    options = {"stage": "--stages", "precision.param": "--precision", "model.name": "MODEL"}
    options["model.activation_checkpointing"] = "--checkpointing"
    named = {"model.context": "--seq", "batch.micro": "--micro-batch", "model.depth": "--depth"}
    options |= {key: option for key, option in named.items() if given[key] is not None}
    for text in overrides:
        option = options.get(text.partition("=")[0].strip())
        if option is not None:
            raise typer.BadParameter(f"{text}: say it with {option}", param_hint="'--set'")


def _number(text: str, option: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise typer.BadParameter(f"expected a number from 1 to 1000000 or auto, got {text!r}", param_hint=option)
    return int(text)


def _memory(text: str) -> int:
    if text.strip().replace(".", "", 1).isdecimal():
        raise typer.BadParameter(f"say the unit: {text}GiB", param_hint="'--memory'")
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--memory'") from None
