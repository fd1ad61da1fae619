"""``shardwise doctor``: what is here, and whether training can work.

Owns the options and the table; read ``launch/machine.py`` for what is looked at.
"""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.launch.machine import Finding, examine

__all__ = ["doctor"]


def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the findings to this file too.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that the two ranks of the test may take.")] = 60.0,
) -> None:
    """Tell what works here: versions, backends, cores, memory, disk, devices, ports, and two ranks that talk.

    The exit status is 1 if training cannot work.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder '{json_file.parent}'", param_hint="'--json'")
    findings = examine(Path.cwd(), timeout_seconds=timeout)
    broken = [finding for finding in findings if finding.needed and not finding.works]
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    console.print(_table(findings))
    if json_file is not None:
        facts = {"works": not broken, "findings": [asdict(finding) for finding in findings]}
        json_file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if broken:
        typer.echo(f"training cannot work here: {', '.join(finding.name for finding in broken)}")
        raise typer.Exit(1)
    typer.echo("training works here")


def _table(findings: list[Finding]) -> Table:
    table = Table("", "", "", "", show_header=False)
    for area, group in groupby(findings, key=lambda finding: finding.area):
        for number, finding in enumerate(group):
            state = Text("yes", "green") if finding.works else Text("no", "red" if finding.needed else "yellow")
            table.add_row(area if number == 0 else "", finding.name, state, Text(finding.detail))
        table.add_section()
    return table
