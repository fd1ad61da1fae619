"""Run one function on every rank of a mesh and collect what it returns: ranks as threads, or as gloo processes.

Owns ``run_ranks``, ``run_processes`` and ``coordinates``. A rank is like a fresh process: gradients are on, one torch
thread, no random state is touched. Bring a ``torch.Generator`` for random numbers: threads share the global one.
"""

import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

import torch

from shardwise.comm.base import Comm, Mesh
from shardwise.comm.threads import Exchange, Match, ThreadComm
from shardwise.errors import ConfigError

__all__ = ["coordinates", "flat_rank", "run_ranks"]

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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(num_threads)
    if failed and not return_exceptions:
        error = results[failed[0]]
        assert isinstance(error, BaseException)
        error.add_note(f"raised on rank {failed[0]} of {len(meshes)}, at {coordinates(meshes[failed[0]])}")
        raise error
    return results


def coordinates(mesh: Mesh) -> dict[str, int]:
    """Return this rank's coordinate on each axis: ``{"node": 1, "local": 0}``."""
    return {axis: comm.rank for axis, comm in mesh.items()}


def flat_rank(mesh: Mesh) -> int:
    """Return this rank's number in the whole mesh, row by row."""
    rank = 0
    for comm in mesh.values():
        rank = rank * comm.size + comm.rank
    return rank


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
