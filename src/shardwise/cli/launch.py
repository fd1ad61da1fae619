"""``shardwise launch``: start a script on every rank, on this machine or on the hosts of a file.

Owns the options only, which are torchrun's; read ``launch/node.py`` and ``launch/hosts.py`` for what happens.
"""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from shardwise.errors import ConfigError
from shardwise.launch.hosts import forwarded_variables, host_command, parse_hostfile, run_hosts
from shardwise.launch.node import run_node
from shardwise.launch.options import LaunchOptions, count_processes, parse_ranks, parse_streams

__all__ = ["LAUNCH_SETTINGS", "launch"]

# What stands behind the script is the script's.
LAUNCH_SETTINGS = MappingProxyType({"allow_interspersed_args": False})
_NODE_OPTIONS = "--nproc-per-node, --nnodes, --node-rank, --standalone, --local-addr and --rdzv-*"


def launch(
    script: Annotated[str, typer.Argument(help="The script that every rank runs, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node", "--nproc_per_node", "-n", help="Ranks on this node: a number, auto, cpu or gpu.  [1]"
        ),
    ] = None,
    nnodes: Annotated[str | None, typer.Option(help="Number of nodes, or MIN:MAX.  [1]")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", "--node_rank", help="Number of this node.  [0]")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", "--master_addr", help="Address of node 0.  [127.0.0.1]")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option("--master-port", "--master_port", help="Port on it.  [a free one; 29500 on several nodes]"),
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="One node on a free port of 127.0.0.1, as without options.")
    ] = False,
    rdzv_backend: Annotated[
        str | None, typer.Option("--rdzv-backend", "--rdzv_backend", help="How nodes meet: static or c10d.  [static]")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="Where nodes meet: HOST:PORT.")
    ] = None,
    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", "--rdzv_id", help="Name of the job, equal on all nodes.")
    ] = None,
    rdzv_conf: Annotated[
        str | None, typer.Option("--rdzv-conf", "--rdzv_conf", help="More for the backend: KEY=VALUE,KEY=VALUE.")
    ] = None,
    local_addr: Annotated[
        str | None, typer.Option("--local-addr", "--local_addr", help="Address of this node.  [looked up]")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", "--max_restarts", help="How often all ranks start again after a failure.")
    ] = 0,
    monitor_interval: Annotated[
        float, typer.Option("--monitor-interval", "--monitor_interval", help="Seconds between looks at the ranks.")
    ] = 0.1,
    role: Annotated[str, typer.Option(help="A name for the ranks.")] = "default",
    module: Annotated[bool, typer.Option("--module", "-m", help="The script is a module, as for python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="The script is a program of its own.")
    ] = False,
    log_dir: Annotated[
        Path, typer.Option("--log-dir", "--log_dir", help="Each run makes a folder in it, with one log per rank.")
    ] = Path("logs"),
    redirects: Annotated[
        str,
        typer.Option(
            "--redirects", "-r", help="Streams that go to the logs only: 1 stdout, 2 stderr, 3 both; or RANK:N,..."
        ),
    ] = "0",
    tee: Annotated[
        str, typer.Option("--tee", "-t", help="Streams shown with the rank before each line; same notation.")
    ] = "0",
    local_ranks_filter: Annotated[
        str,
        typer.Option("--local-ranks-filter", "--local_ranks_filter", help="Show the output of these ranks only: 0,1."),
    ] = "",
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Start one launcher per host by ssh; lines of the form: host slots=N.", dir_okay=False),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="With --hostfile: a variable that the hosts get too.")
    ] = None,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Start a script on every rank, as torchrun does, with one log per rank.

    The options are torchrun's. When a rank fails, the others are ended, the traceback of the first one to fail is
    printed last, and its exit status becomes that of this program.
    """
    if no_python and module:
        raise ConfigError("--no-python and --module exclude each other")
    shown = {"-r": redirects, "-t": tee, "--local-ranks-filter": local_ranks_filter}
    streams = {"redirects": parse_streams(redirects, "--redirects"), "tee": parse_streams(tee, "--tee")}
    ranks_shown = parse_ranks(local_ranks_filter)
    script_words = [*(["-m"] if module else []), *(["--no-python"] if no_python else []), script, *(arguments or [])]
    node_options = (nproc_per_node, nnodes, node_rank, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, local_addr)
    if hostfile is not None:
        if standalone or any(option is not None for option in node_options):
            raise ConfigError(f"--hostfile says what runs where; leave out {_NODE_OPTIONS}")
        words = [*(word for option, value in shown.items() for word in (option, value) if value)]
        words += ["--log-dir", str(log_dir.absolute()), "--max-restarts", str(max_restarts), "--role", role]
        words += ["--monitor-interval", str(monitor_interval)]
        raise typer.Exit(_launch_hosts(hostfile, [*words, *script_words], master_addr, master_port, env or []))
    if env:
        raise ConfigError("--env is for --hostfile; the ranks of this machine have its environment")
    if standalone and any(option is not None for option in node_options[1:6]):
        raise ConfigError("--standalone is one node by itself; leave out --nnodes, --node-rank and --rdzv-*")
    min_nodes, max_nodes = _nodes(nnodes or "1")
    options = LaunchOptions(
        command=_command(script, arguments or [], module=module, no_python=no_python),
        num_local_ranks=count_processes(nproc_per_node or "1"),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank or 0,
        master_addr=master_addr or "127.0.0.1",
        master_port=master_port,
        rendezvous_backend=rdzv_backend or "static",
        rendezvous_endpoint=rdzv_endpoint or "",
        rendezvous_options=_pairs(rdzv_conf or ""),
        run_id=rdzv_id,
        local_addr=local_addr,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        role=role,
        log_dir=log_dir,
        local_ranks_shown=ranks_shown,
        **streams,
    )
    if end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    raise typer.Exit(run_node(options))


def _launch_hosts(
    hostfile: Path, words: list[str], master_addr: str | None, master_port: int | None, names: list[str]
) -> int:
    """Run this program on every host of the file."""
    try:
        text = hostfile.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {hostfile}: {error}") from error
    hosts = parse_hostfile(text, str(hostfile))
    variables = forwarded_variables(names)
    place = ["--nnodes", str(len(hosts)), "--master-addr", master_addr or hosts[0].name]
    place += ["--master-port", str(master_port or 29500), "--end-with-stdin"]
    commands = []
    for number, host in enumerate(hosts):
        program = [sys.executable, "-m", "shardwise.cli", "launch", "-n", str(host.num_slots), *place]
        remote = [*program, "--node-rank", str(number), *words]
        commands.append(host_command(host, remote, str(Path.cwd()), variables))
    return run_hosts(hosts, commands)


def _command(script: str, arguments: list[str], *, module: bool, no_python: bool) -> tuple[str, ...]:
    if no_python:
        program = shutil.which(script)
        if program is None:
            raise ConfigError(f"--no-python: there is no program {script!r} here or on the path")
        return (program, *arguments)
    if not module and not Path(script).exists():
        raise ConfigError(
            f"there is no script {script!r} in {Path.cwd()}; give a module with -m, a program with --no-python"
        )
    return (sys.executable, "-u", *(["-m"] if module else []), script, *arguments)


def _nodes(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(f"--nnodes: expected N or MIN:MAX, got {text!r}")
    return int(numbers[0]), int(numbers[-1])


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [pair.split("=", 1) for pair in text.split(",") if pair]
    if not all(len(pair) == 2 and pair[0] for pair in pairs):
        raise ConfigError(f"--rdzv-conf: expected KEY=VALUE,KEY=VALUE, got {text!r}")
    return tuple((key, value) for key, value in pairs)


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):  # not sys.stdin, whose lock this thread would hold to the very end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
