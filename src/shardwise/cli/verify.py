"""``shardwise verify``: whether every stage trains a user's model as one plain process does.

Owns the options; ``simulation/`` does the work, and what the two commands share is in ``simulate.py``.
"""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.simulate import check_json_path, optimizer_of, parse_names, parse_stages, show, write_json
from shardwise.simulation.calls import verify as run_verification
from shardwise.simulation.dtypes import PRECISIONS
from shardwise.simulation.subject import subject_called
from shardwise.simulation.tables import verification_facts, verification_tables

__all__ = ["verify"]


def verify(
    config: Annotated[
        str | None,
        typer.Argument(
            help="TOML or JSON as train takes it, a size such as gpt-nano, a Hugging Face folder, or mlp or gpt (small "
            "ones); left out: train's defaults.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as batch.micro=1; may be repeated."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2,
    stages: Annotated[str, typer.Option(help="Stages to run, in this order, separated by commas.")] = "0,1,2,3",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Some of fp64, fp32, bf16, fp16, separated by commas; left out: fp32, and that of the settings.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw or sgd; left out: that of the settings.", show_default=False)
    ] = None,
    may_stay: Annotated[
        list[str] | None,
        typer.Option("--may-stay", metavar="NAME", help="A trainable tensor that need not move; may be repeated."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Differences to show for each stage.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write all differences to this file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print problems and the verdict only.")] = False,
) -> None:
    """Train your model some steps plainly and at every stage, on ranks that are threads, and compare all tensors.

    The exit status is 1 if something differs by more than its tolerance, if stages differ in a bit, or if agreement
    would prove nothing, because nothing moved or all ranks saw the same text.
    """
    chosen = parse_stages(stages)
    precisions = None if precision is None else parse_names(precision, PRECISIONS, "'--precision'")
    check_json_path(json_file)
    subject = subject_called(config, overrides=overrides or (), num_ranks=ranks)
    result = run_verification(
        subject.make_model,
        subject.make_batch,
        ranks=ranks,
        stages=chosen,
        precisions=precisions or list(dict.fromkeys(["fp32", subject.precision or "fp32"])),
        steps=steps,
        optimizer=optimizer_of(subject, optimizer),
        loss=subject.loss,
        units=subject.units,
        max_norm=subject.max_norm,
        may_stay=may_stay or (),
        notes=subject.notes,
    )
    show(verification_tables(result, top=top), quiet=quiet)
    write_json(json_file, {"model": subject.name, **verification_facts(result)})
    if not result.ok:
        raise typer.Exit(1)
