"""A rank that trains cases, and what is counted meanwhile: allocations by torch's profiler, the size by the kernel.

The loop is a user's own, not that of the dry run.
"""

import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.api import clip_grad_norm_, shard
from shardwise.audit.cases import AuditCase, material
from shardwise.audit.heap import status_bytes
from shardwise.audit.planning import MAX_NORM, options_of
from shardwise.audit.trace import MARK, Measured, replay
from shardwise.comm.base import Mesh
from shardwise.comm.process_group import mesh_from
from shardwise.memory import Arena, Kind, Slab
from shardwise.optim.shard import shard_optimizer

__all__ = ["ResidentTask", "TracedTask", "train_resident", "train_traced"]

NUM_STEPS = 3
Tell = Callable[[Measured | int], None]


@dataclass(frozen=True, kw_only=True)
class TracedTask:
    """Cases to train one after the other in one group."""

    cases: tuple[AuditCase, ...]


@dataclass(frozen=True, kw_only=True)
class ResidentTask:
    """One case to train in new processes."""

    case: AuditCase


def train_traced(task: TracedTask, rank: int, tell: Tell) -> None:
    """Train each case under the profiler; rank 0 tells the ``Measured``."""
    torch.set_num_threads(1)
    for case in task.cases:
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            _train(case, mesh_from(None), marks=True)
        if rank == 0:
            with tempfile.TemporaryDirectory(prefix="shardwise-audit-") as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                tell(replay(json.loads(path.read_text(encoding="utf-8"))["traceEvents"]))


def train_resident(task: ResidentTask, rank: int, tell: Tell) -> None:
    """Train a case; rank 0 tells by how many bytes its resident size grew at most."""
    torch.set_num_threads(1)
    _train(_smaller(task.case), mesh_from(None), marks=False)  # libraries, threads and sockets have their memory now
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    _train(task.case, mesh_from(None), marks=False)
    if rank == 0:
        tell(status_bytes("VmHWM") - before)


def _smaller(case: AuditCase) -> AuditCase:
    return AuditCase(**{**vars(case), "model": "gpt"})


def _train(case: AuditCase, mesh: Mesh, *, marks: bool) -> None:
    used = material(case)
    torch.manual_seed(0)
    model = used.make_model()
    options = options_of(case)
    shard(model, mesh, arena=_MarkingArena if marks else Arena, **options)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    batch = used.make_batch()
    for step in range(NUM_STEPS):
        is_last = marks and step == NUM_STEPS - 1
        if is_last:
            _mark("begin")
        used.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        if marks:
            for states in optimizer.state.values():
                for item in states.values():
                    if isinstance(item, Tensor):
                        _mark(f"{Kind.OPTIM.value} {item.untyped_storage().data_ptr()}")
        if is_last:
            _mark("rest")
        optimizer.zero_grad()
        if is_last:
            _mark("end")


def _mark(words: str) -> None:
    with record_function(f"{MARK} {words}"):
        pass


class _MarkingArena(Arena):
    """An arena that leaves a mark for each address it gives out; the bytes are read from the allocator's events."""

    def slab(self, kind: Kind, numel: int, dtype: torch.dtype, owner: str = "") -> Slab:
        """Return an empty slab of ``numel`` elements."""
        slab = super().slab(kind, numel, dtype, owner)
        slab.tensor.audit_kind = kind  # type: ignore[attr-defined]
        return slab

    def persistent(self, kind: Kind, numel: int, dtype: torch.dtype, owner: str = "") -> Tensor:
        """Return a flat tensor that rests until ``drop``."""
        tensor = super().persistent(kind, numel, dtype, owner)
        _mark(f"{kind.value} {tensor.untyped_storage().data_ptr()}")
        return tensor

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        """Change the memory behind a flat tensor."""
        super().resize(tensor, num_bytes)
        if num_bytes:
            _mark(f"{tensor.audit_kind.value} {tensor.untyped_storage().data_ptr()}")  # type: ignore[attr-defined]
