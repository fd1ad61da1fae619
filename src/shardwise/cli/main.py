"""The ``shardwise`` program: one typer application, one command per file of this folder.

Owns the options of the program as a whole; a command's options are in its own file. Read ``demo.py`` next.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from shardwise.cli.checkpoint import checkpoint_app
from shardwise.cli.demo import demo
from shardwise.cli.doctor import doctor
from shardwise.cli.explain import explain
from shardwise.cli.launch import LAUNCH_SETTINGS, launch
from shardwise.cli.plan import plan
from shardwise.cli.simulate import simulate
from shardwise.cli.train import train
from shardwise.cli.verify import verify
from shardwise.errors import ShardwiseError

__all__ = ["app", "main"]

app = typer.Typer(
    name="shardwise",
    help="ZeRO stages 0 to 3 for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {version('shardwise')}")
        raise typer.Exit


@app.callback()
def _program(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass  # a callback makes typer keep the commands' names, also when there is only one command


app.command()(demo)
app.command(context_settings=dict(LAUNCH_SETTINGS))(launch)
app.command()(explain)
app.command()(train)
app.command()(plan)
app.command()(simulate)
app.command()(verify)
app.command()(doctor)
app.add_typer(checkpoint_app)


def main() -> None:
    """Run the program on the arguments of the process."""
    try:
        app()
    except ShardwiseError as error:  # raised on purpose: the message says what to do, a traceback adds nothing
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
