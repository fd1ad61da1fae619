"""``shardwise train``: train a language model on text, on local processes or as one rank of a launcher's group.

Owns the options, the processes and the exit status. What a rank does is in ``train/loop.py``, what is shown in
``train_view.py``.
"""

import contextlib
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from shardwise.cli.find import find
from shardwise.cli.train_view import TrainView, kinds_and_bytes, text_facts
from shardwise.comm.process_group import mesh_from
from shardwise.config.resolve import Resolved
from shardwise.environment import Environment
from shardwise.errors import ConfigError
from shardwise.launch.group import join_group, leave_group
from shardwise.launch.local import Interrupted, LocalJob, RanksFailedError, catch_signals, run_local
from shardwise.runtime.record import Agreement
from shardwise.train.loop import RunTask, facts_of, planned_bytes, prepare, run_process, run_rank
from shardwise.train.output import CHECKPOINTS, SUMMARY, prepare_output
from shardwise.train.progress import find_resume
from shardwise.train.settings import load_settings, settings_as_toml

__all__ = ["train"]

DEFAULT_RANKS = 2
COLLECTIVE_SECONDS = 1800.0


def train(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML or JSON, native or of DeepSpeed; left out: all defaults.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as train.steps=50; may be repeated."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of local processes.  [2]", show_default=False)
    ] = None,
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.  [3]", show_default=False)] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the run that the output folder holds.")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|last|PATH|none",
            help="Go on from a checkpoint: the latest of the output folder if there is one (auto), the latest (last), "
            "or one elsewhere; on any number of ranks, at any stage.",
        ),
    ] = "none",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="With --resume: take the weights only, and begin anew otherwise.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting with its origin, and leave.")
    ] = False,
    find_micro_batch: Annotated[
        bool,
        typer.Option(
            "--find-micro-batch",
            help="Find the largest micro-batch that runs, print it beside the planned one, and leave.",
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --find-micro-batch: of one rank, such as 2GiB; left out on CUDA: the device's.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the planned memory, and leave.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the end only.")] = False,
) -> None:
    """Train a language model on text: with no arguments a small one on Python's own library source, in some minutes.

    Under a launcher (shardwise launch -m shardwise.cli train, torchrun) the process joins its group; otherwise it
    starts local ones. Ctrl-C and SIGTERM end all of them.
    """
    environment = Environment.read()
    num_ranks = _num_ranks(environment, ranks)
    chosen = [*(overrides or []), *([] if stage is None else [f"stage={stage}"])]
    here = "cuda" if torch.cuda.is_available() else "cpu"
    settings = load_settings(config, overrides=chosen, num_ranks=num_ranks, device=here)
    device_type = _device_type(settings, environment)
    if memory is not None and not find_micro_batch:
        raise typer.BadParameter("limits the runs of --find-micro-batch only", param_hint="'--memory'")
    if print_config:
        typer.echo(settings_as_toml(settings), nl=False)
        return
    console = Console(highlight=False, soft_wrap=True)
    is_first = environment.rank in (None, 0)
    for note in settings.notes if is_first else ():
        typer.echo(f"note: {note}", err=True)
    if find_micro_batch:
        if environment.rank is not None:
            raise ConfigError("--find-micro-batch starts processes of its own: use it without a launcher")
        find(config, chosen, num_ranks, device_type, memory)
        return
    if dry_run:
        if is_first:
            _show_plan(settings, console)
        return
    task = RunTask(
        settings=settings,
        device_type=device_type,
        resume=find_resume(resume, Path(settings.config.train.output).expanduser()),
        weights_only=weights_only,
    )
    if resume == "auto" and task.resume is None and is_first:
        typer.echo(f"note: {task.folder} has no checkpoint: the run begins anew", err=True)
    overwrite = overwrite or (resume == "auto" and task.resume is None and not (task.folder / SUMMARY).exists())
    with TrainView(console, line_every=settings.config.log_every or 1, quiet=quiet or not is_first) as view:
        try:
            with catch_signals(signal.SIGINT, signal.SIGTERM):
                if environment.rank is None:
                    _run_here(task, view, overwrite=overwrite)
                else:
                    _run_joined(task, environment, view, overwrite=overwrite)
        except Interrupted as interrupted:
            status, reason = interrupted.exit_status, str(interrupted)
        else:
            return
    if is_first:
        typer.echo(f"{reason}; {task.folder} keeps what was written", err=True)
    raise typer.Exit(status)


def _run_here(task: RunTask, view: TrainView, *, overwrite: bool) -> None:
    """Start local processes and show what rank 0 tells."""
    _prepare(task, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="shardwise-train-") as folder:
        job = LocalJob(
            body=run_process,
            task=task,
            num_ranks=task.settings.num_ranks,
            rendezvous=f"{folder}/rendezvous",
            timeout_seconds=COLLECTIVE_SECONDS,
            device_type=task.device_type,
        )
        with contextlib.closing(run_local(job)) as messages:
            try:
                for rank, message in messages:
                    if rank == 0 and message is not None:
                        view.show(message)
            except RanksFailedError as error:
                view.__exit__(None, None, None)
                if error.config_error is not None:
                    raise ConfigError(error.config_error) from None
                typer.echo(f"logs of the ranks: {task.folder}\n{error}", err=True, nl=False)
                raise typer.Exit(1) from None


def _run_joined(task: RunTask, environment: Environment, view: TrainView, *, overwrite: bool) -> None:
    """Be one rank of the group that a launcher prepared."""
    owns_group = join_group(environment, task.device_type, COLLECTIVE_SECONDS)
    try:
        mesh = mesh_from(None)
        problem = ""
        if environment.rank == 0:
            try:
                _prepare(task, overwrite=overwrite)
            except ConfigError as error:
                problem = str(error)
        said = Agreement(mesh, torch.device(task.device_type)).texts(problem, "the output folder")
        if said[0]:
            raise ConfigError(said[0])
        run_rank(task, mesh, view.show, seeds=True)
    finally:
        if owns_group:
            leave_group()


def _prepare(task: RunTask, *, overwrite: bool) -> None:
    """Make the output folder; a run that goes on in its own folder keeps what it wrote.

    Raises:
        ConfigError: the folder holds a run that does not go on, or the weights to begin with would be removed.
    """
    is_own = task.resume is not None and (task.folder / CHECKPOINTS).resolve() == task.resume.parent.resolve()
    if is_own and task.weights_only:
        raise ConfigError(
            f"--weights-only: {task.folder} holds the run whose weights are taken, and it would be replaced: take "
            "another folder: --set train.output=FOLDER --resume " + str(task.resume)
        )
    prepare_output(task.folder, settings_as_toml(task.settings), overwrite=overwrite, resumes=is_own)


def _show_plan(settings: Resolved, console: Console) -> None:
    parts = prepare(settings)
    plans = [planned_bytes(parts, settings, rank) for rank in range(settings.num_ranks)]
    batch = settings.batch
    console.print(f"model: {parts.blueprint.name}, {plans[0][1]:,} parameters, context {parts.blueprint.context}")
    console.print(text_facts(facts_of(parts, settings, plans[0][1], plans[0][0])))
    console.print(
        f"batch: {batch.size} sequences per update = {batch.micro} per forward x {batch.accumulation} accumulated x "
        f"{settings.num_ranks} ranks"
    )
    for rank, (planned, _) in enumerate(plans):
        console.print(f"planned bytes of rank {rank} at stage {settings.config.stage}: {kinds_and_bytes(planned)}")


def _num_ranks(environment: Environment, wanted: int | None) -> int:
    if environment.world_size is None:
        return wanted or DEFAULT_RANKS
    if wanted not in (None, environment.world_size):
        raise ConfigError(
            f"--ranks {wanted}: a launcher has started {environment.world_size} ranks (WORLD_SIZE); leave --ranks out"
        )
    return environment.world_size


def _device_type(settings: Resolved, environment: Environment) -> str:
    wanted = settings.config.train.device
    num_local = environment.local_world_size or settings.num_ranks
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda" if num_devices >= num_local else "cpu"
    if wanted == "cuda" and num_devices < num_local:
        raise ConfigError(f"train.device: cuda needs a device for each of {num_local} local ranks, found {num_devices}")
    return wanted
