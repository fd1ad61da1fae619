"""``timeline``: record what a model's memory, network and compute do, while a context lasts."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.accounting.allocator import Counters
from shardwise.accounting.held import links_of, managed_of
from shardwise.accounting.shortage import explain_memory
from shardwise.comm.base import Comm, flat_rank
from shardwise.errors import ConfigError, StateError
from shardwise.managed import Managed
from shardwise.trace.activations import count_activations
from shardwise.trace.chrome import write_chrome_trace
from shardwise.trace.comm import TimedComm
from shardwise.trace.lines import Lines
from shardwise.trace.recorder import Recorder

__all__ = ["Timeline", "timeline"]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The files of one rank.

    Attributes:
        lines: JSON lines, written as it goes.
        chrome_trace: the same for https://ui.perfetto.dev, written at the end.
    """

    lines: Path
    chrome_trace: Path


@contextlib.contextmanager
def timeline(
    model: nn.Module, folder: str | Path, *, activations: bool = False, counters: Counters | None = None
) -> Iterator[Timeline]:
    """Record what happens inside: bytes by kind and unit, collectives, and what units and optimizers compute.

    Every rank writes its own files into the folder: ``timeline-rank-R.jsonl`` and ``trace-rank-R.json``. Not
    collective: any rank may record. Failures to get memory are explained, as in ``explain_memory``. Times are those of
    the host, so on CUDA a slice is when work was queued.

    Args:
        model: a sharded model, or an engine. Its optimizers are those that are sharded when it begins.
        folder: made if it is not there; files of the same rank are replaced.
        activations: count what forward, backward and step make, too, operator by operator. That is slow.
        counters: of the device's allocator, for tests; None: those of CUDA, on CUDA.

    Raises:
        ConfigError: the model is neither, or the folder cannot be made.
        StateError: the model is recorded already, or a forward or backward is running.
    """
    managed = managed_of(model)
    runtime = managed.runtime
    if runtime.watch is not None:
        raise StateError("timeline: this model is recorded already")
    if runtime.in_backward or any(unit.active for unit in runtime.units):
        raise StateError("timeline: it cannot begin inside a forward or backward")
    found = _files(Path(folder), flat_rank(managed.mesh))
    lines = Lines(found.lines)
    recorder = Recorder(managed, lines, counters)
    try:
        recorder.begin()
        counted = count_activations(managed, recorder) if activations else contextlib.nullcontext()
        with explain_memory(model), _watched(managed, recorder), counted:
            yield found
    finally:
        recorder.end()
        write_chrome_trace(found.lines, found.chrome_trace)


def _files(folder: Path, rank: int) -> Timeline:
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"trace-rank-{rank}.json"
        trace.open("a").close()  # what cannot be written is told now, not after the training inside
    except OSError as error:
        raise ConfigError(f"timeline: {error.filename or folder}: {error.strerror}") from None
    return Timeline(lines=folder / f"timeline-rank-{rank}.jsonl", chrome_trace=trace)


@contextlib.contextmanager
def _watched(managed: Managed, recorder: Recorder) -> Iterator[None]:
    """Let the recorder look at everything."""
    ledger = managed.runtime.means.arena.ledger
    with contextlib.ExitStack() as undo:

        def unwatch() -> None:
            managed.runtime.watch = ledger.on_change = None

        undo.callback(unwatch)
        managed.runtime.watch, ledger.on_change = recorder.moment, recorder.memory
        undo.callback(managed.wrap_comms(lambda axis, comm: _timed(axis, comm, recorder)))
        managed.before_step.insert(0, recorder.step_begins)
        undo.callback(lambda: managed.before_step.remove(recorder.step_begins))
        for link in links_of(managed):
            undo.callback(link.optimizer.register_step_post_hook(_after_step(recorder)).remove)
        yield


def _timed(axis: str, comm: Comm, recorder: Recorder) -> Comm:
    return TimedComm(comm, axis, recorder.collective)


def _after_step(recorder: Recorder) -> Callable[..., None]:
    def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.step_ends()

    return ended
