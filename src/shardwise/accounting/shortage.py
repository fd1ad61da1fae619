"""When memory cannot be had: where it was, who holds what, and what would change it.

The arena's own failures come here by themselves, those of torch inside an engine too. In a loop of the user's own
``explain_memory`` catches torch's. Whatever is not about memory passes as it is.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Literal

import torch
from torch import nn

from shardwise.accounting.held import Held, held_bytes, links_of, managed_of, planned_bytes
from shardwise.accounting.report import MemoryReport, report_of
from shardwise.managed import Managed
from shardwise.memory import Kind, OutOfMemoryError, is_out_of_memory
from shardwise.sharding import ALL, Sharding

__all__ = ["Place", "explain_memory", "explainer", "locate", "raise_explained"]

Phase = Literal["forward", "backward", "step", ""]
_NUM_OWNERS = 6
_WORDS = MappingProxyType({"forward": "the forward", "backward": "the backward", "step": "the optimizer's step"})
_SPLITS = (
    ("stage=1", Sharding(optim=ALL)),
    ("stage=2", Sharding(grad=ALL, optim=ALL)),
    ("stage=3", Sharding(param=ALL, grad=ALL, optim=ALL)),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run was: "forward", "backward", "step" or "" (none of them), and the innermost unit, if one computed."""

    phase: Phase = ""
    unit: str | None = None

    def __str__(self) -> str:
        """Return words for a message."""
        what = f"in {_WORDS[self.phase]}" if self.phase else "outside of forward, backward and step"
        return what if self.unit is None else f"{what} of unit {self.unit}"


@contextmanager
def explain_memory(model: nn.Module) -> Iterator[None]:
    """Turn failures to get memory inside, wherever they come from, into one that says who holds what.

    Args:
        model: a sharded model, or an engine (whose own calls do it without).

    Raises:
        OutOfMemoryError: from torch's or Python's own error.
        ConfigError: the model is neither.
    """
    managed = managed_of(model)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise_explained(managed, error)
        raise


def raise_explained(managed: Managed, error: Exception) -> None:
    """Raise an error of ours from ``error`` if that is about memory and not ours already; return otherwise.

    Raises:
        OutOfMemoryError: with the traceback of ``error`` as its cause.
    """
    if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
        return
    first = (str(error).splitlines() or [type(error).__name__])[0]
    raise OutOfMemoryError(f"{first}\n{_explain(managed, error)}") from error


def explainer(managed: Managed) -> Callable[[], str]:
    """Return what the arena of a model asks when it gets no memory; it does not keep the model alive."""
    found = weakref.ref(managed)

    def explain() -> str:
        model = found()
        return "" if model is None else _explain(model, None)

    return explain


def locate(managed: Managed, error: BaseException | None) -> Place:
    """Find out where ``error`` was raised (None: where this is called) from the frames of the stack.

    The hooks of a failed forward have cleaned up by the time its error is caught, so the runtime does not know.
    """
    phase: Phase = ""
    unit: str | None = None
    names = {id(each.module): each.name or "root" for each in managed.units}
    for frame in _frames(error):
        code = frame.f_code.co_name
        if code == "_engine_run_backward":
            phase, unit = "backward", None
        elif code in ("step", "wrapper", "_call_impl"):  # of no other frame: reading locals keeps them alive
            own = frame.f_locals.get("self")
            if isinstance(own, torch.optim.Optimizer):
                phase, unit = "step", None
            elif code == "_call_impl" and id(own) in names:
                phase, unit = phase or "forward", names[id(own)]
    runtime = managed.runtime
    if runtime.in_backward and phase in ("", "backward"):
        reached = [each.name or "root" for each in runtime.units if any(use.reached for use in each.uses)]
        phase, unit = "backward", unit or (reached[-1] if reached else None)
    return Place(phase=phase, unit=unit)


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames of the stack here and of an error's traceback, outermost first."""
    stack: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    yield from reversed(stack)
    trace = None if error is None else error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _explain(managed: Managed, error: BaseException | None) -> str:
    try:
        place, report, held = locate(managed, error), report_of(managed), held_bytes(managed)
        advice = "\n".join(f"- {line}" for line in _advice(managed, place, report))
        return f"{place}\n{report}\n{_owners(held)}\n" + (f"what to change:\n{advice}" if advice else "")
    except (RuntimeError, MemoryError) as failed:  # there may be no memory to say it with
        return f"no report: {type(failed).__name__}"


def _owners(held: Held) -> str:
    largest = sorted(held.items(), key=lambda item: -item[1])[:_NUM_OWNERS]
    return "largest owners (measured): " + ", ".join(f"{kind} of {owner} {count:,}" for (kind, owner), count in largest)


def _advice(managed: Managed, place: Place, report: MemoryReport) -> Iterator[str]:
    """Yield what would need less memory; only what can be done here."""
    yield from _split_more(managed, report)
    if place.phase in ("forward", "backward"):
        yield "a smaller micro-batch, with more accumulation: activations are in none of these figures"
        if torch.is_grad_enabled() or place.phase == "backward":
            yield "activation checkpointing of the units (torch.utils.checkpoint), where it is not used yet"
        yield from _gather_less(managed, report)
    runtime = managed.runtime
    if place.phase == "backward" and managed.mesh and runtime.schedule.reductions_in_flight > 1:
        yield f"reductions_in_flight=1, not {runtime.schedule.reductions_in_flight}: each holds gradients whole"
    groups = [group for link in links_of(managed) for group in link.optimizer.param_groups]
    if place.phase == "step" and any(not g.get("fused") and g.get("foreach") is not False for g in groups):
        yield "fused=True or foreach=False for the optimizer: otherwise its temporaries are as large as the parameters"
    found = report.measured_by_allocator
    if found is not None and 20 * found.fragmented_bytes >= found.reserved_bytes > 0:
        yield "PYTORCH_ALLOC_CONF=expandable_segments:True: part of the reserved memory is in pieces"


def _split_more(managed: Managed, report: MemoryReport) -> Iterator[str]:
    if not managed.mesh:
        yield "more ranks: with stage=3 each holds its part of the model states; one rank holds all"
        return
    least = now = _total(report.planned_bytes)
    options = []
    for name, sharding in _SPLITS:
        planned = _total(planned_bytes(managed, sharding))
        if planned < least:
            least = planned
            options.append(f"{name} {planned:,}")
    if options:
        yield f"a higher stage: planned bytes of model states at rest are {now:,}, and with {', '.join(options)}"


def _gather_less(managed: Managed, report: MemoryReport) -> Iterator[str]:
    runtime = managed.runtime
    gathered = {
        unit.index: sum(b.params.full.num_bytes for b in unit.buckets if b.params.sharded_axes)
        for unit in runtime.units
    }
    largest = runtime.units[max(gathered, key=lambda index: gathered[index])]
    num_bytes, peak = gathered[largest.index], report.measured_peak_bytes[Kind.GATHERED]
    if num_bytes == 0:
        return
    is_divisible = sum(len(bucket.site.layout.slots) for bucket in largest.buckets) > 1
    if is_divisible and 4 * peak >= report.measured_peak_together_bytes:
        yield f"smaller units (units=): the largest, {largest.name or 'root'}, is gathered whole: {num_bytes:,} bytes"
    if runtime.schedule.prefetch > 0:
        yield f"prefetch=0, not {runtime.schedule.prefetch}: fewer units are gathered at once"


def _total(planned: dict[str, int | None]) -> int:
    return sum(count or 0 for count in planned.values())
