"""Run one function on every rank of a mesh and collect what it returns: ranks as threads, or as gloo processes.

Owns ``run_ranks``, ``run_processes`` and ``coordinates``. A rank is like a fresh process: gradients are on, one torch
thread, no random state is touched. Bring a ``torch.Generator`` for random numbers: threads share the global one.
"""

import contextlib
import gc
import importlib.util
import inspect
import itertools
import math
import multiprocessing
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

from shardwise.comm.base import Comm, Mesh, flat_rank
from shardwise.comm.board import abort_mesh
from shardwise.comm.process_group import gloo_mesh
from shardwise.comm.threads import Exchange, Match, ThreadComm
from shardwise.errors import ConfigError

__all__ = ["coordinates", "flat_rank", "run_processes", "run_ranks"]

T = TypeVar("T")


@overload
def run_ranks(
    num_ranks: int | Mapping[str, int],
    body: Callable[[Mesh], T],
    *,
    match: Match = "key",
    timeout: float = 60.0,
    return_exceptions: Literal[False] = False,
) -> list[T]: ...


@overload
def run_ranks(
    num_ranks: int | Mapping[str, int],
    body: Callable[[Mesh], T],
    *,
    match: Match = "key",
    timeout: float = 60.0,
    return_exceptions: Literal[True],
) -> list[T | BaseException]: ...


def run_ranks(
    num_ranks: int | Mapping[str, int],
    body: Callable[[Mesh], T],
    *,
    match: Match = "key",
    timeout: float = 60.0,
    return_exceptions: bool = False,
) -> Any:
    """Return ``[body(mesh) of rank 0, of rank 1, ...]``, each run in a thread: ``run_ranks(4, lambda mesh: 1)``.

    Args:
        num_ranks: ``n`` for ``{"data": n}``, or the shape of a mesh, outermost axis first: ``{"node": 2, "local": 2}``
            numbers its ranks row by row, and the communicator of an axis joins the ranks that differ only there.
        body: gets this rank's mesh, one communicator per axis (also of size 1).
        match: see ``Exchange``; ``"order"`` lets ranks that diverge exchange the wrong buffers, as NCCL would.
        timeout: seconds that one wait may last.
        return_exceptions: put a rank's exception in the list instead of raising the first one.

    Raises:
        Exception: what the first rank to fail raised, with a note that names the rank. Its peers are woken.
    """
    meshes = _thread_meshes(_shape(num_ranks), match, timeout)
    results: list[T | BaseException | None] = [None] * len(meshes)
    failed: list[int] = []  # in the order of time: only the first can have failed by itself
    lock = threading.Lock()
    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        exchanges = [comm.exchange for comm in meshes[rank].values()]
        ranks = [comm.rank for comm in meshes[rank].values()]
        try:
            torch.set_num_threads(1)
            results[rank] = body(dict[str, Comm](meshes[rank]))
        except BaseException as error:  # SystemExit too: its peers must not wait for it
            results[rank] = error
            with lock:
                failed.append(rank)
            for exchange, axis_rank in zip(exchanges, ranks, strict=True):
                exchange.abort(axis_rank, error)
        for exchange, axis_rank in zip(exchanges, ranks, strict=True):
            exchange.leave(axis_rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(len(meshes))
    ]
    with _collecting_here(threads):
        for thread in threads:
            thread.start()
    torch.set_num_threads(num_threads)
    if failed and not return_exceptions:
        error = results[failed[0]]
        assert isinstance(error, BaseException)
        error.add_note(f"raised on rank {failed[0]} of {len(meshes)}, at {coordinates(meshes[failed[0]])}")
        raise error
    return results


@contextlib.contextmanager
def _collecting_here(threads: Sequence[threading.Thread]) -> Iterator[None]:
    """Wait for threads, and let no thread but this one collect garbage meanwhile.

    torch holds the lock of a random generator while it makes the tensor that ``get_rng_state`` returns. A collection in
    there gives the interpreter away to the next thread, which waits for that lock with the interpreter in its hands.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        rounds = itertools.count(1)
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if enabled and thread.is_alive():
                    gc.collect(2 if next(rounds) % 50 == 0 else 1)
    finally:
        if enabled:
            gc.enable()


@overload
def run_processes(
    num_ranks: int | Mapping[str, int],
    body: Callable[[Mesh], T],
    *,
    timeout: float = 60.0,
    comm_timeout: float | None = None,
    return_exceptions: Literal[False] = False,
) -> list[T]: ...


@overload
def run_processes(
    num_ranks: int | Mapping[str, int],
    body: Callable[[Mesh], T],
    *,
    timeout: float = 60.0,
    comm_timeout: float | None = None,
    return_exceptions: Literal[True],
) -> list[T | BaseException]: ...


def run_processes(
    num_ranks: int | Mapping[str, int],
    body: Callable[[Mesh], T],
    *,
    timeout: float = 60.0,
    comm_timeout: float | None = None,
    return_exceptions: bool = False,
) -> Any:
    """Return what ``body(mesh)`` returns on each rank of a new gloo group: ``run_processes(2, body)``.

    Args:
        num_ranks: as for ``run_ranks``.
        body: a function at the top of a module; what it returns or raises must be picklable. It runs under the
            environment variables of the first call in this process.
        timeout: seconds after which the processes still alive are killed.
        comm_timeout: seconds that one wait may last; ``timeout`` if None.
        return_exceptions: put a rank's exception in the list instead of raising the first one.

    Raises:
        Exception: what the first rank to fail raised, with its traceback as a note.
        ChildProcessError: a rank died without a word, before any other failed.
        TimeoutError: a rank did not end in time.
    """
    shape = _shape(num_ranks)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwise.testing.ranks"])
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-ranks-") as folder:
        try:
            for rank in range(math.prod(shape.values())):
                ours, theirs = context.Pipe(duplex=False)
                job = _Job(
                    module=body.__module__,
                    file=inspect.getfile(body),
                    name=body.__qualname__,
                    shape=shape,
                    rank=rank,
                    rendezvous=Path(folder) / "rendezvous",
                    timeout=comm_timeout or timeout,
                )
                process = context.Process(target=_rank_main, args=(job, theirs), name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            endings = _collect(processes, pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    failed = {rank: ending for rank, ending in enumerate(endings) if ending.error is not None}
    if failed and not return_exceptions:
        first = min(failed, key=lambda rank: failed[rank].seconds)
        error = failed[first].error
        assert error is not None
        error.add_note(f"raised on rank {first} of {len(endings)}\n{failed[first].traceback}")
        raise error
    return [ending.result if ending.error is None else ending.error for ending in endings]


def coordinates(mesh: Mesh) -> dict[str, int]:
    """Return this rank's coordinate on each axis: ``{"node": 1, "local": 0}``."""
    return {axis: comm.rank for axis, comm in mesh.items()}


def _shape(num_ranks: int | Mapping[str, int]) -> dict[str, int]:
    shape = {"data": num_ranks} if isinstance(num_ranks, int) else dict(num_ranks)
    if not shape or min(shape.values()) < 1:
        raise ConfigError(f"a mesh has at least one axis and one rank per axis, got {shape}")
    return shape


def _thread_meshes(shape: dict[str, int], match: Match, timeout: float) -> list[dict[str, ThreadComm]]:
    meshes: list[dict[str, ThreadComm]] = [{} for _ in range(math.prod(shape.values()))]
    places = list(itertools.product(*(range(size) for size in shape.values())))
    for dim, (axis, size) in enumerate(shape.items()):
        exchanges: dict[tuple[int, ...], Exchange] = {}  # one per line of ranks along the axis
        for mesh, place in zip(meshes, places, strict=True):
            line = place[:dim] + place[dim + 1 :]
            if line not in exchanges:
                exchanges[line] = Exchange(axis, size, match=match, timeout=timeout)
            mesh[axis] = ThreadComm(exchanges[line], place[dim])
    return meshes


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a process needs to know; the body by place, because a test module may not be importable by name."""

    module: str
    file: str
    name: str
    shape: dict[str, int]
    rank: int
    rendezvous: Path
    timeout: float

    def load_body(self) -> Callable[[Mesh], object]:
        with contextlib.suppress(ImportError):
            return _find(importlib.import_module(self.module), self.name)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return _find(module, self.name)


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How a rank ended."""

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float  # on the clock that all processes of a machine share


def _find(module: object, name: str) -> Callable[[Mesh], object]:
    found: Callable[[Mesh], object] = getattr(module, name)
    return found


def _rank_main(job: _Job, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        with gloo_mesh(job.shape, job.rank, job.rendezvous, timeout=job.timeout) as mesh:
            try:
                _tell(pipe, _Ending(result=job.load_body()(mesh), seconds=time.monotonic()))
            except BaseException as error:
                _tell(pipe, _Ending(error=error, traceback=traceback.format_exc(), seconds=time.monotonic()))
                abort_mesh(mesh, error)
    except BaseException as error:  # no group, or none any more; if there is a first message, this one is ignored
        _tell(pipe, _Ending(error=error, traceback=traceback.format_exc(), seconds=time.monotonic()))


def _tell(pipe: Connection, ending: _Ending) -> None:
    # torch would pass tensors as shared memory that dies with this process, one open file each.
    for kind in (torch.Tensor, torch.nn.Parameter, torch.storage.TypedStorage):
        reduction.register(kind, _by_value)
    try:
        pipe.send(ending)
    except OSError:
        raise
    except Exception as error:
        told = RuntimeError(f"a rank ended with what cannot be sent ({error}): {ending.result!r} {ending.error!r}")
        pipe.send(_Ending(error=told, traceback=ending.traceback, seconds=ending.seconds))


def _by_value(value: object) -> Any:
    return value.__reduce_ex__(2)


def _collect(processes: list[ForkServerProcess], pipes: list[Connection], deadline: float) -> list[_Ending]:
    endings: dict[int, _Ending] = {}
    while len(endings) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in endings}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                endings[rank] = pipe.recv()
            except EOFError:
                processes[rank].join()
                words = f"rank {rank} ended with exit code {processes[rank].exitcode} and no result"
                # It cannot have failed because of the others: they would have woken it with an error.
                endings[rank] = _Ending(error=ChildProcessError(words), seconds=0.0)
            except Exception as error:  # what was sent cannot be rebuilt here
                words = f"rank {rank} ended with what cannot be read ({type(error).__name__}: {error})"
                endings[rank] = _Ending(error=RuntimeError(words), seconds=time.monotonic())
        if not ready:
            late = TimeoutError(f"ranks {sorted(waiting.values())} did not end in time and were killed")
            endings |= {rank: _Ending(error=late, seconds=deadline) for rank in waiting.values()}
    for process in processes:
        process.join(timeout=max(0.0, min(deadline - time.monotonic(), 5.0)))
    return [endings[rank] for rank in range(len(pipes))]
