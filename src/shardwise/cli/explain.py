"""``shardwise explain``: what each key of a configuration file becomes here, and what is in effect.

Owns the options and the tables; ``configure.explain_config`` knows the answers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.config.resolve import Verdict, shortened
from shardwise.config.words import leaves, show
from shardwise.configure import Dialect, Explanation, explain_config, json_schema
from shardwise.errors import ConfigError

__all__ = ["explain"]

WIDTH_OF_FILES = 160
STYLES = MappingProxyType(
    {"same": "green", "mapped": "green", "off": "dim", "no effect": "yellow", "refused": "bold red"}
)


def explain(
    file: Annotated[
        Path | None, typer.Argument(help="TOML or JSON, native or of DeepSpeed.", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks, for the batch arithmetic.")] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Type of the device that trains.")] = "cpu",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    dialect: Annotated[
        Dialect | None, typer.Option(help="Whose names the keys are; left out: those that fit.", show_default=False)
    ] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="List settings at their default, too.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the same facts to this file.", show_default=False)
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of native settings and leave.")
    ] = False,
) -> None:
    """Show key by key what a configuration file means here; exit with 1 if something in it is refused."""
    if schema:
        if file is not None:
            raise ConfigError(
                f"--schema describes all native settings, not a file; leave out {str(file)!r} or --schema"
            )
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    if file is None:
        raise ConfigError("explain: name a file, or pass --schema")
    explanation = explain_config(file, overrides=overrides or (), num_ranks=ranks, dialect=dialect, device=device)
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(_facts(explanation), indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {str(json_path)!r}: cannot be written: {error.strerror}") from error
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_FILES)
    _report(explanation, console, with_defaults=defaults)
    if explanation.problems:
        raise typer.Exit(1)


def _report(explanation: Explanation, console: Console, *, with_defaults: bool) -> None:
    written = explanation.written
    effective = _effective(explanation)
    if explanation.verdicts:
        table = Table(title=f"{escape(written.source)}, key by key ({written.dialect} names)", title_justify="left")
        for column in ("key", "value", "here", "setting", "why"):
            keep_whole = column == "key" and console.width >= WIDTH_OF_FILES  # for grep
            table.add_column(column, overflow="fold", no_wrap=keep_whole)
        for verdict in explanation.verdicts:
            style = STYLES[verdict.fate]
            cells = (verdict.key, _value(verdict), verdict.fate, _setting(verdict, effective), verdict.why)
            table.add_row(*(escape(cell) for cell in cells), style=style)
        console.print(table)
    for note in explanation.resolved.notes if explanation.resolved is not None else written.notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}")
    for problem in shortened(explanation.problems):
        console.print(f"[bold red]refused[/bold red] {escape(problem)}")
    if explanation.resolved is not None:
        console.print(_effective_table(effective, explanation.resolved.num_ranks, with_defaults))


def _effective_table(effective: Mapping[str, tuple[Any, str]], num_ranks: int, with_defaults: bool) -> Table:
    table = Table(title=f"In effect on {num_ranks} rank{'s' if num_ranks > 1 else ''}", title_justify="left")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, (value, origin) in effective.items():
        if with_defaults or origin != "default":
            table.add_row(escape(key), escape(show(value)), escape(origin))
    if not with_defaults:
        table.caption = "Everything else is at its default: --defaults lists it."
    return table


def _effective(explanation: Explanation) -> dict[str, tuple[Any, str]]:
    """Return dotted key -> (value, origin) of what is in effect."""
    resolved = explanation.resolved
    if resolved is None:
        return {}
    values = leaves(resolved.config.model_dump())
    return {key: (values[key], origin) for key, origin in resolved.origins.items()}


def _value(verdict: Verdict) -> str:
    return "(absent)" if verdict.absent else show(verdict.value)


def _setting(verdict: Verdict, effective: Mapping[str, tuple[Any, str]]) -> str:
    """Return the native settings that a key set, with their values where they are known."""
    if verdict.fate not in ("same", "mapped") or not verdict.target:
        return ""
    keys = verdict.target.split(", ")
    return ", ".join(f"{key} = {show(effective[key][0])}" if key in effective else key for key in keys)


def _facts(explanation: Explanation) -> dict[str, Any]:
    """Return what ``--json`` writes."""
    effective = _effective(explanation)
    resolved = explanation.resolved
    return {
        "source": explanation.written.source,
        "dialect": explanation.written.dialect,
        "ranks": resolved.num_ranks if resolved is not None else None,
        "keys": [
            {
                "key": verdict.key,
                "value": verdict.value,
                "absent": verdict.absent,
                "fate": verdict.fate,
                "settings": {key: effective[key][0] for key in verdict.target.split(", ") if key in effective},
                "why": verdict.why,
            }
            for verdict in explanation.verdicts
        ],
        "effective": {key: {"value": value, "from": origin} for key, (value, origin) in effective.items()},
        "notes": list(resolved.notes if resolved is not None else explanation.written.notes),
        "problems": list(explanation.problems),
    }
