"""``shardwise checkpoint``: look at checkpoints, check them, compare them, carry them to other libraries and back.

Owns the options and the tables; the package ``checkpoint`` knows the answers, its ``doors`` the other formats.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.doors.compare import Comparison, compare
from shardwise.checkpoint.doors.huggingface import export_huggingface, import_huggingface
from shardwise.checkpoint.doors.outgoing import find_checkpoint
from shardwise.checkpoint.doors.torchfile import export_torch, import_torch
from shardwise.checkpoint.folder import Found, find_checkpoints, folder_of_run, read_latest
from shardwise.checkpoint.names import MANIFEST
from shardwise.checkpoint.owners import foreign
from shardwise.checkpoint.verify import verify_files
from shardwise.cli.quantities import parse_bytes
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["checkpoint_app"]

DTYPES = MappingProxyType({"as-stored": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32})
SHOWN = 50

checkpoint_app = typer.Typer(
    name="checkpoint", help="Look at checkpoints, check, compare, convert and export them.", no_args_is_help=True
)

Tag = Annotated[
    str | None,
    typer.Option("--tag", help="Which checkpoint of a folder; left out: what `latest` names.", show_default=False),
]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare hashes and checksums of what is read.")]
CheckpointPath = Annotated[Path, typer.Argument(help="A checkpoint, or a folder of checkpoints.", show_default=False)]


@checkpoint_app.command("ls")
def ls(
    folder: Annotated[Path, typer.Argument(help="The folder of a run's checkpoints.", show_default=False)],
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the list to this file too.")
    ] = None,
) -> None:
    """List the checkpoints of a folder, oldest first. Looks at manifests and lengths; `verify` reads everything."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if (folder / MANIFEST).exists():
        raise ConfigError(f"{folder}: is a checkpoint, name the folder that holds it, or use `verify`")
    folder = folder_of_run(folder)
    problem, latest = "", None
    try:
        latest = read_latest(folder)
    except CheckpointError as error:
        problem = str(error)
    rows = [_facts(found, latest) for found in find_checkpoints(folder)]
    if latest is not None and all(row["tag"] != latest for row in rows):
        problem = f"latest names {latest!r}, which is not there"
    if json_file is not None:
        facts = {"folder": str(folder), "latest": latest, "problem": problem, "checkpoints": rows}
        json_file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if rows:
        Console(highlight=False, soft_wrap=True).print(_list(rows))
    else:
        typer.echo(f"{folder}: no checkpoints")
    for text in (*(f"{row['tag']}: {row['problem']}" for row in rows if row["problem"]), problem):
        if text:
            typer.echo(text)


@checkpoint_app.command("verify")
def verify_checkpoint(path: CheckpointPath, tag: Tag = None) -> None:
    """Read a checkpoint whole and compare every hash; exit with 1 and name what is damaged or missing."""
    begin = time.perf_counter()
    found = find_checkpoint(path, tag)
    manifest = verify_files(found)
    seconds = time.perf_counter() - begin
    num_bytes = sum(file.bytes for file in manifest.files)
    typer.echo(
        f"{found}: whole: {len(manifest.stored)} tensors in {manifest.num_ranks} "
        f"file{'s' if manifest.num_ranks > 1 else ''}, {num_bytes:,} bytes read in {seconds:.2f} s"
    )
    if doubt := foreign(found, manifest):
        typer.echo(f"others could have changed it: {doubt}")


@checkpoint_app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A checkpoint, or a folder with `latest`.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
) -> None:
    """Tell what differs between two checkpoints, of whatever number of ranks; exit with 1 if anything does."""
    found = compare(find_checkpoint(first), find_checkpoint(second))
    console = Console(highlight=False, soft_wrap=True)
    for line in _differences(found):
        console.print(Text(line))
    if not found.identical:
        raise typer.Exit(1)


@checkpoint_app.command()
def export(
    path: CheckpointPath,
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="New directory, or new file of torch.", show_default=False)
    ],
    to: Annotated[Literal["huggingface", "torch"], typer.Option("--format", help="Whose format.")] = "huggingface",
    dtype: Annotated[
        Literal["as-stored", "bf16", "fp16", "fp32"],
        typer.Option(help="Of floating-point parameters. As stored: as the optimizer keeps them."),
    ] = "as-stored",
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of a Hugging Face file, like 5GB or 512MiB.", show_default="5GB")
    ] = None,
    tag: Tag = None,
    verify: Verify = True,
) -> None:
    """Write the weights of a checkpoint for other libraries."""
    found = find_checkpoint(path, tag)
    if to == "torch":
        if max_shard_size is not None:
            raise ConfigError("--max-shard-size: a state dict of torch is one file")
        export_torch(found, target, dtype=DTYPES[dtype], verify=verify)
    else:
        num_bytes = _bytes(max_shard_size or "5GB")
        export_huggingface(found, target, dtype=DTYPES[dtype], max_shard_bytes=num_bytes, verify=verify)
    typer.echo(f"{target}: written from {found}")


@dataclass(frozen=True, kw_only=True)
class _Options:
    tag: str | None
    buffers: tuple[str, ...]
    tied: Mapping[str, str]
    optimizer: str | None
    drop_unknown: bool
    no_verify: bool

    def only(self, source: str, *allowed: str) -> None:
        """Refuse options that a source does not take.

        Raises:
            ConfigError: one was given.
        """
        for name in ("buffers", "tied", "optimizer", "drop_unknown", "no_verify"):
            if getattr(self, name) and name not in allowed:
                option = {"buffers": "buffer"}.get(name, name).replace("_", "-")
                raise ConfigError(f"--{option} has no meaning with --from {source}")


@checkpoint_app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="What is read.", show_default=False)],
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="Folder of checkpoints; with --to dcp a new directory.", show_default=False),
    ],
    origin: Annotated[
        Literal["deepspeed", "dcp", "huggingface", "torch", "shardwise"],
        typer.Option("--from", help="Whose format SRC is.", show_default=False),
    ],
    to: Annotated[Literal["shardwise", "dcp"], typer.Option("--to", help="Whose format DST will be.")] = "shardwise",
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            help="Name of the new checkpoint, left out: its step; with --from shardwise and deepspeed: which one of "
            "SRC, left out: what `latest` names.",
            show_default=False,
        ),
    ] = None,
    buffer: Annotated[list[str] | None, typer.Option(help="Name of a tensor that is a buffer; repeatable.")] = None,
    tied: Annotated[
        list[str] | None, typer.Option(metavar="OTHER=NAME", help="Another name of a tied weight; repeatable.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Class of the optimizer, where its state does not tell.", show_default=False)
    ] = None,
    drop_unknown: Annotated[
        bool, typer.Option("--drop-unknown", help="Leave out what is neither model nor optimizer.")
    ] = False,
    verify: Verify = True,
) -> None:
    """Carry a checkpoint from one format to another. Nothing in SRC is run."""
    options = _Options(
        tag=tag,
        buffers=tuple(buffer or ()),
        tied=_pairs(tied or ()),
        optimizer=optimizer,
        drop_unknown=drop_unknown,
        no_verify=not verify,
    )
    if origin == to:
        raise ConfigError(f"--from {origin} --to {to}: there is nothing to convert")
    if to == "shardwise":
        written = _importer(origin, source, options)(target)
    else:
        written = _to_dcp(origin, source, target, options)
    typer.echo(f"{written}: written from {source}")


def _importer(origin: str, source: Path, options: _Options) -> Callable[[Path], Path]:
    """Return what makes a checkpoint in a folder."""
    match origin:
        case "huggingface":
            options.only(origin, "buffers")
            return lambda folder: import_huggingface(source, folder, options.tag, buffers=options.buffers)
        case "torch":
            options.only(origin, "buffers", "no_verify")
            check = not options.no_verify
            return lambda folder: import_torch(source, folder, options.tag, buffers=options.buffers, verify=check)
        case "dcp":
            from shardwise.checkpoint.doors.dcp import import_dcp  # loads much of torch

            options.only(origin, "buffers", "tied", "optimizer", "drop_unknown", "no_verify")
            return lambda folder: import_dcp(
                source,
                folder,
                options.tag,
                buffers=options.buffers,
                tied=options.tied,
                optimizer=options.optimizer,
                drop_unknown=options.drop_unknown,
                verify=not options.no_verify,
            )
        case _:
            options.only(origin)
            from shardwise.checkpoint.doors.deepspeed import import_deepspeed

            return lambda folder: import_deepspeed(source, folder, options.tag)


def _to_dcp(origin: str, source: Path, target: Path, options: _Options) -> Path:
    from shardwise.checkpoint.doors.dcp import export_dcp

    if origin == "shardwise":
        options.only(origin, "no_verify")
        return export_dcp(find_checkpoint(source, options.tag), target, verify=not options.no_verify)
    run = _importer(origin, source, options)
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".convert-") as between:
        return export_dcp(run(Path(between)), target)


def _pairs(texts: "list[str] | tuple[()]") -> dict[str, str]:
    pairs = {}
    for text in texts:
        other, equals, name = text.partition("=")
        if not (other and equals and name):
            raise ConfigError(f"--tied {text!r}: expected OTHER=NAME")
        pairs[other] = name
    return pairs


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from None


def _facts(found: Found, latest: str | None) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "tag": found.tag,
        "latest": found.tag == latest,
        "step": manifest.step if manifest else None,
        "time": manifest.time if manifest else None,
        "ranks": manifest.num_ranks if manifest else None,
        "bytes": sum(file.bytes for file in manifest.files) if manifest else None,
        "whole": not found.problem,
        "problem": found.problem,
    }


def _list(rows: list[dict[str, Any]]) -> Table:
    table = Table("tag", "step", "time (UTC)", "ranks", "bytes", "state")
    for row in rows:
        tag = Text(row["tag"] + (" (latest)" if row["latest"] else ""))
        cells = ["" if row[key] is None else str(row[key]) for key in ("step", "time", "ranks")]
        num_bytes = "" if row["bytes"] is None else f"{row['bytes']:,}"
        state = Text("whole", "green") if row["whole"] else Text("not whole", "red")
        table.add_row(tag, Text(cells[0]), Text(cells[1][:19].replace("T", " ")), Text(cells[2]), num_bytes, state)
    return table


def _differences(found: Comparison) -> list[str]:
    lines = [
        *(f"only in the first: {key}" for key in found.only_first),
        *(f"only in the second: {key}" for key in found.only_second),
        *(f"unlike: {key}: {text}" for key, text in found.unlike.items()),
        *(f"changed: {key}: at most {largest:.6g}" for key, largest in found.changed.items()),
    ]
    if len(lines) > SHOWN:
        lines = [*lines[:SHOWN], f"and {len(lines) - SHOWN} more tensors"]
    lines += [f"values: {text}" for text in found.values]
    num_changed = len(found.changed)
    return [*lines, f"{found.num_identical} tensors identical, {num_changed} changed, {len(found.unlike)} unlike"]
