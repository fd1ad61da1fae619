"""Collectives over ``torch.distributed`` process groups: the only file that calls them.

Owns ``ProcessGroupComm`` and ``mesh_from``. On gloo every collective is made of paired sends and receives, each with
its own tag: half the bytes of gloo's own reduce-scatter, sums in rank order, and transfers that cannot meet the wrong
partner. Other backends (NCCL) run their own collectives on the current stream. Read ``board.py`` for errors of peers.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.base import Comm, Key, Mesh, Work, part, rank_order_mean
from shardwise.comm.board import Board, Store
from shardwise.comm.fake import LocalComm, reduce_alone
from shardwise.environment import Environment
from shardwise.errors import ConfigError, RankMismatchError

__all__ = ["ProcessGroupComm", "gloo_mesh", "mesh_from"]

# torch 2.13 renamed these two and warns for the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAX_BUCKETS = (1 << 12) - 1  # the last index is that of the tag that closes a group
_LAST_TAG = (1 << 31) - 1
_MAX_CHUNKS = 4
_MIN_CHUNK_BYTES = 1 << 20
_ANSWER_SECONDS = 2.0  # how long a rank that fails waits for what the others say


# [Note: waking the peers]
# A gloo receive blocks in C++ until data, the group's timeout or a closed connection. Aborting, shutting down or
# destroying a group does not close its connections while any ProcessGroup or Work object is still referenced, which
# nobody can guarantee in an exception handler (measured on torch 2.13: the peers sleep until their timeout). A receive
# that times out does close them, all those of the group at once. So the rank that fails writes its reason to the
# store, then receives with a tag that nobody sends and a timeout of 1 ms: its peers wake within 20 ms with "Connection
# closed by peer" and read the reason. The group object stays valid, so that the caller's own
# destroy_process_group() works, but it cannot communicate any more.


class ProcessGroupComm:
    """One axis of the mesh over a process group; a ``Comm``.

    Args:
        group: the ranks of the axis; None is the default group.
        axis: name for messages.
        timeout: seconds that one wait on gloo may last; None takes the group's.
        deterministic: on NCCL reduce by all-to-all and a sum in rank order: the same bytes, one more buffer, bitwise
            the result of gloo. Otherwise NCCL's own sum is taken where ``buffer``, ``wire`` and ``sum`` have one dtype.
        forced: run the collectives of an axis of one rank too, so that a test on one device tests them.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        axis: str = "data",
        *,
        timeout: float | None = None,
        deterministic: bool = False,
        forced: bool = False,
    ) -> None:
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise ConfigError(f"axis {axis!r}: call torch.distributed.init_process_group first, or pass a group")
            group = dist.group.WORLD
        if not isinstance(group, ProcessGroup):
            raise ConfigError(f"axis {axis!r}: this process is not a member of the process group")
        self.axis = axis
        self._group = group
        self._rank = group.rank()
        self._size = group.size()
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._deterministic = deterministic
        self._forced = forced
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
        self._store = group.get_group_store()
        self._board = Board(cast(Store, self._store), axis, self._rank, self._size)
        self._last_call: _Call | None = None
        self._closed: str | None = None  # why the group cannot communicate any more

    @property
    def rank(self) -> int:
        """This process's coordinate on the axis."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self._size

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` free bucket numbers, counted in the store for all users of the group."""
        return int(self._store.add(f"shardwise/reserved/{self._rank}", count)) - count

    @torch.no_grad()
    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        """Fill part ``r`` of ``buffer`` with rank ``r``'s part ``r``."""
        if not self._has_to_move(buffer):
            return None
        call = self._start("all_gather", key)
        paired = self._is_paired(buffer)
        own = part(buffer, self._rank, self._size)
        if not paired:
            self._native(call, lambda: _all_gather(buffer, own, group=self._group))
            return None
        sends, receives = [], []
        for to, source in self._partners():
            receives.append(self._receive(part(buffer, source, self._size), source, call))
            sends.append(self._send(own, to, call))
        return _PairedWork(self, call, [receives], sends)

    @torch.no_grad()
    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        """Write into ``out`` the mean over the ranks of their part ``self.rank``."""
        assert out.numel() * self._size == buffer.numel(), f"out holds {out.numel()} elements, a part does not"
        if not self._has_to_move(buffer):
            reduce_alone(buffer, out, wire=wire, sum=sum)
            return None
        call = self._start("reduce_scatter", key)
        if not self._is_paired(buffer):
            self._native(call, lambda: self._native_reduce_scatter(buffer, out, wire, sum))
            return None
        return self._paired_reduce_scatter(buffer.to(wire), out, call, sum)

    @torch.no_grad()
    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        """Fill ``buffer`` with rank ``source``'s."""
        if not self._has_to_move(buffer):
            return None
        call = self._start("broadcast", key)
        if not self._is_paired(buffer):
            self._native(call, lambda: dist.broadcast(buffer, group=self._group, group_src=source))
            return None
        if self._rank == source:
            return _PairedWork(self, call, [], [self._send(buffer, to, call) for to, _ in self._partners()])
        return _PairedWork(self, call, [[self._receive(buffer, source, call)]], [])

    def announce(self, topic: str, text: str) -> None:
        """Leave a text in the group's store."""
        self._board.announce(topic, text)

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return what the ranks announced under a topic."""
        return self._board.announced(topic, seconds)

    def forget(self, topic: str) -> None:
        """Take this rank's text away."""
        self._board.forget(topic)

    def abort(self, error: BaseException) -> None:
        """Tell the peers that this rank failed with ``error``, and wake those that wait for it.

        Nothing can be sent over the group afterwards. See [Note: waking the peers].
        """
        last = f" after {self._last_call}" if self._last_call else ""
        self._close(f"raised {type(error).__name__}{last}: {_first_sentence(error)}")

    def await_transfer(self, transfer: "_Transfer", call: "_Call") -> None:
        """Wait for one transfer; turn its failure into an error that names ranks and events."""
        self._raise_if_closed(call)
        try:
            if self._timeout is None:
                transfer.work.wait()
            else:
                transfer.work.wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(call, transfer.peer, error) from error

    # Paired transfers

    def _paired_reduce_scatter(self, outgoing: Tensor, out: Tensor, call: "_Call", sum: torch.dtype) -> Work:
        chunks = _chunks(out.numel(), outgoing.itemsize)
        staging = outgoing.new_empty((self._size - 1) * out.numel())
        own = part(outgoing, self._rank, self._size)
        parts = [
            own if peer == self._rank else part(staging, peer - (peer > self._rank), self._size - 1)
            for peer in range(self._size)
        ]
        sends, receives = [], []
        for index, chunk in enumerate(chunks):
            arriving = []
            for to, source in self._partners():
                arriving.append(self._receive(parts[source][chunk], source, call, index))
                sends.append(self._send(part(outgoing, to, self._size)[chunk], to, call, index))
            receives.append(arriving)

        def add(index: int) -> None:  # while later chunks are arriving
            rank_order_mean([each[chunks[index]] for each in parts], out[chunks[index]], sum=sum)

        return _PairedWork(self, call, receives, sends, add)

    def _partners(self) -> Iterator[tuple[int, int]]:
        """Yield whom to send to and whom to receive from, so that no rank is everybody's first."""
        for offset in range(1, self._size):
            yield (self._rank + offset) % self._size, (self._rank - offset) % self._size

    def _send(self, tensor: Tensor, peer: int, call: "_Call", chunk: int = 0) -> "_Transfer":
        try:
            return _Transfer(peer, self._group.send([tensor], peer, _tag(call.key, chunk)))
        except RuntimeError as error:
            raise self._failure(call, peer, error) from error

    def _receive(self, tensor: Tensor, peer: int, call: "_Call", chunk: int = 0) -> "_Transfer":
        try:
            return _Transfer(peer, self._group.recv([tensor], peer, _tag(call.key, chunk)))
        except RuntimeError as error:
            raise self._failure(call, peer, error) from error

    # The backend's own collectives: queued on the current stream, never waited for by the host

    def _native(self, call: "_Call", collective: Callable[[], object]) -> None:
        try:
            collective()
        except dist.DistError as error:  # not every RuntimeError: out of memory is one
            raise self._failure(call, None, error) from error

    def _native_reduce_scatter(self, buffer: Tensor, out: Tensor, wire: torch.dtype, sum: torch.dtype) -> None:
        if buffer.dtype == wire == sum and not self._deterministic:
            total = out if out.dtype == wire else out.new_empty(out.numel(), dtype=wire)
            _reduce_scatter(total, buffer, group=self._group)
            total.div_(self._size)
            if total is not out:
                out.copy_(total)
            return
        received = torch.empty_like(buffer, dtype=wire)
        dist.all_to_all_single(received, buffer.to(wire), group=self._group)
        rank_order_mean([part(received, peer, self._size) for peer in range(self._size)], out, sum=sum)

    # Checks and failures

    def _has_to_move(self, buffer: Tensor) -> bool:
        return buffer.numel() > 0 and (self._size > 1 or self._forced)

    def _is_paired(self, buffer: Tensor) -> bool:
        """Tell whether gloo carries this buffer, or a backend with collectives of its own."""
        device = buffer.device.type
        backend = self._backends.get(device)
        if backend is None or (backend == "gloo" and device != "cpu"):
            raise ConfigError(
                f"axis {self.axis!r}: its process group ({self._backends}) cannot move tensors on {device!r}. "
                'Start it with init_process_group("cpu:gloo,cuda:nccl"), or keep the model on a device it serves'
            )
        return backend == "gloo"

    def _start(self, operation: str, key: Key) -> "_Call":
        call = _Call(operation, key)
        self._raise_if_closed(call)
        self._last_call = call
        return call

    def _raise_if_closed(self, call: "_Call") -> None:
        if self._closed is not None:
            raise RankMismatchError(f"{self._name}: {call} cannot run, because this rank {self._closed} earlier")

    def _failure(self, call: "_Call", peer: int | None, error: RuntimeError) -> RankMismatchError:
        where = f"{call}, waiting for rank {peer}" if peer is not None else f"{call}"
        reason = f"failed in {where}: {_first_sentence(error)}"
        self._close(reason)
        return RankMismatchError(f"{self._name} {reason}. {self._board.read(_ANSWER_SECONDS)}")

    def _close(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._board.write(reason)
        if self._backends.get("cpu") == "gloo":
            for peer, _ in self._partners():
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], peer, _LAST_TAG).wait(timedelta(milliseconds=1))

    @property
    def _name(self) -> str:
        return f"axis {self.axis!r}: rank {self._rank} of {self._size}"


def mesh_from(mesh: Mesh | DeviceMesh | ProcessGroup | None) -> dict[str, Comm]:
    """Make the mesh of communicators that the runtime works on.

    Args:
        mesh: a mapping of axis names to communicators is taken as it is; of a torch ``DeviceMesh`` (or a slice of one,
            ``mesh["dp"]``) every named axis; a process group is the one axis ``"data"``; None is the default group or,
            if ``torch.distributed`` is not initialised, this process alone.

    Raises:
        ConfigError: the axes have no names, or this process is in none of them; or there is no default group although
            a launcher started several processes.
    """
    if mesh is None:
        if dist.is_available() and dist.is_initialized():
            return {"data": ProcessGroupComm()}
        world_size = Environment.read().world_size
        if world_size is not None and world_size > 1:
            raise ConfigError(
                f"a launcher started {world_size} processes, but they have no process group, so each would train "
                "alone: call torch.distributed.init_process_group() first, or use shardwise.initialize"
            )
        return {"data": LocalComm()}
    if isinstance(mesh, ProcessGroup):
        return {"data": ProcessGroupComm(mesh)}
    if isinstance(mesh, Mapping):
        return dict(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"a mesh is None, a process group, a DeviceMesh or a mapping of Comm, got {type(mesh).__name__}"
        )
    if not mesh.mesh_dim_names:
        raise ConfigError('the axes of a DeviceMesh need names: init_device_mesh(..., mesh_dim_names=("data",))')
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in the DeviceMesh {mesh}")
    return {axis: ProcessGroupComm(mesh.get_group(axis), axis) for axis in mesh.mesh_dim_names}


@contextlib.contextmanager
def gloo_mesh(shape: Mapping[str, int], rank: int, rendezvous: Path, *, timeout: float) -> Iterator[dict[str, Comm]]:
    """Join a new default gloo group that meets in a file, and leave it at the end.

    Args:
        shape: ranks per axis, outermost first.
        rank: number of this process in the mesh, row by row.
        rendezvous: a path that does not exist yet, the same for all.
        timeout: seconds that a wait may last.
    """
    sizes = tuple(shape.values())
    world_size = int(torch.tensor(sizes).prod())
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=limit)
    try:
        if len(sizes) == 1:
            yield {axis: ProcessGroupComm(None, axis) for axis in shape}
        else:
            yield mesh_from(init_device_mesh("cpu", sizes, mesh_dim_names=tuple(shape)))
        # A rank that leaves early resets connections with data on them. If peers failed, they say so themselves.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Call:
    operation: str
    key: Key

    def __str__(self) -> str:
        key = self.key
        return f"{self.operation} of {key.verb.name} {key.label!r} (index {key.index}, call {key.sequence})"


@dataclass(frozen=True)
class _Transfer:
    peer: int
    work: dist.Work


class _PairedWork:
    """Receives by chunk, each followed by its arithmetic, then sends."""

    def __init__(
        self,
        comm: ProcessGroupComm,
        call: _Call,
        receives: list[list[_Transfer]],
        sends: list[_Transfer],
        add: Callable[[int], None] | None = None,
    ) -> None:
        self._comm = comm
        self._call = call
        self._receives = receives
        self._sends = sends
        self._add = add  # holds the staging buffers

    @torch.no_grad()
    def wait(self) -> None:
        """Block until everything has arrived and left; a second call does nothing."""
        for index, transfers in enumerate(self._receives):
            for transfer in transfers:
                self._comm.await_transfer(transfer, self._call)
            if self._add is not None:
                self._add(index)
        for transfer in self._sends:
            self._comm.await_transfer(transfer, self._call)
        self._receives, self._sends, self._add = [], [], None


def _tag(key: Key, chunk: int) -> int:
    """Pack the identity of a transfer into the 31 bits that gloo takes: index 12, verb 3, sequence 10, chunk 6."""
    if not 0 <= key.index < MAX_BUCKETS:
        raise ConfigError(
            f"{key.label!r} is bucket {key.index}, but transfers can tell {MAX_BUCKETS} buckets apart: use larger units"
        )
    return key.index << 19 | int(key.verb) << 16 | (key.sequence & 0x3FF) << 6 | chunk


def _chunks(numel: int, itemsize: int) -> list[slice]:
    num_chunks = min(_MAX_CHUNKS, max(1, numel * itemsize // _MIN_CHUNK_BYTES))
    edges = [numel * index // num_chunks for index in range(num_chunks + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _first_sentence(error: BaseException) -> str:
    """Shorten gloo's text: no path of its source, no advice about logs."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error))
    return text.split(". This is")[0].split("\n")[0][:400]
