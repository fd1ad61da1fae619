"""``shardwise simulate``: ranks in one process, what each keeps and sends, beside plain training.

Owns the options; ``simulation/`` does the work. Read ``verify.py`` next.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from shardwise.errors import ConfigError
from shardwise.simulation.calls import BUILT_IN_OPTIMIZERS
from shardwise.simulation.calls import simulate as run_simulation
from shardwise.simulation.dtypes import PRECISIONS
from shardwise.simulation.subject import Subject, subject_called
from shardwise.simulation.tables import TEXT_WIDTH, simulation_facts, simulation_tables
from shardwise.simulation.work import MakeOptimizer

__all__ = ["check_json_path", "optimizer_of", "parse_names", "parse_stages", "show", "simulate", "write_json"]


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            help="mlp or gpt (small ones), a size such as gpt-nano, a Hugging Face folder, or a TOML or JSON file of "
            "settings as train takes it."
        ),
    ] = "gpt",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as batch.micro=1; may be repeated."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 4,
    stages: Annotated[str, typer.Option(help="Stages to run, in this order, separated by commas.")] = "0,1,2,3",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    precision: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16.")] = "fp32",
    optimizer: Annotated[
        str | None, typer.Option(help="adamw or sgd; left out: that of the settings.", show_default=False)
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank whose figures are printed; --json has all.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures to this file too.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")] = False,
) -> None:
    """Train on ranks that are threads of one process; show what each keeps and sends, stage by stage.

    The numbers are real: the exit status is 1 unless every stage ends as plain training of the same model does.
    """
    chosen = parse_stages(stages)
    parse_names(precision, PRECISIONS, "'--precision'", single=True)
    if rank >= ranks:
        raise typer.BadParameter(f"there are ranks 0 to {ranks - 1}, got {rank}", param_hint="'--rank'")
    check_json_path(json_file)
    subject = subject_called(model, overrides=overrides or (), num_ranks=ranks)
    result = run_simulation(
        subject.make_model,
        subject.make_batch,
        ranks=ranks,
        stages=chosen,
        steps=steps,
        precision=precision,
        optimizer=optimizer_of(subject, optimizer),
        loss=subject.loss,
        units=subject.units,
        max_norm=subject.max_norm,
        notes=subject.notes,
    )
    show(simulation_tables(result, rank=rank), quiet=quiet)
    write_json(json_file, {"model": subject.name, **simulation_facts(result)})
    if not result.equal:
        raise typer.Exit(1)


def parse_stages(text: str) -> list[int]:
    """Return the stages of a list such as "0,3"."""
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= {"0", "1", "2", "3"} or len(set(names)) != len(names):
        raise typer.BadParameter(f"expected some of 0,1,2,3, each once, got {text!r}", param_hint="'--stages'")
    return [int(name) for name in names]


def parse_names(text: str, known: Any, option: str, *, single: bool = False) -> list[str]:
    """Return the names of a list such as "fp32,bf16", of those that are known."""
    names = [text] if single else [name.strip() for name in text.split(",")]
    if not set(names) <= set(known) or len(set(names)) != len(names):
        wanted = "one" if single else "some"
        raise typer.BadParameter(f"expected {wanted} of {', '.join(known)}, got {text!r}", param_hint=option)
    return names


def optimizer_of(subject: Subject, wanted: str | None) -> str | MakeOptimizer:
    """Return the optimizer that the user names, or that of the settings, or AdamW."""
    if wanted is not None:
        parse_names(wanted, BUILT_IN_OPTIMIZERS, "'--optimizer'", single=True)
        return wanted
    return subject.make_optimizer or "adamw"


def check_json_path(path: Path | None) -> None:
    """Refuse a file that has no folder."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder '{path.parent}'", param_hint="'--json'")


def show(parts: Sequence[RenderableType], *, quiet: bool) -> None:
    """Print tables and lines, or with ``quiet`` only problems and the last line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TEXT_WIDTH)
    for part in parts:
        if not quiet or part is parts[-1] or (isinstance(part, str) and part.startswith("problem: ")):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))


def write_json(path: Path | None, facts: dict[str, Any]) -> None:
    """Write facts to a file if one is named."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {str(path)!r}: cannot be written: {error.strerror}") from error
