"""Events in, verbs out: the one place that decides when a unit is gathered, freed and reduced.

``hooks.py`` turns forward calls and autograd's callbacks into these events; a test may call them by hand. What to do
around a unit is asked of a pure ``Schedule``; the exchange before a step is in ``settle.py``.
"""

import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import inf

from torch import Tensor

from shardwise.comm.base import Mesh
from shardwise.errors import StateError
from shardwise.lanes import Lanes
from shardwise.memory import Arena
from shardwise.numerics.scaler import LossScaler
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.grads import GradBuffers
from shardwise.runtime.journal import Journal
from shardwise.runtime.unit import Unit, Use
from shardwise.runtime.watch import Moment, Watch
from shardwise.schedule import Schedule, TraceEvent, Walk

__all__ = ["Means", "Runtime", "Window"]


class Window(Enum):
    """What a backward does with its gradients."""

    DEFER = "keep them local"
    REDUCE = "sum them over the axes of G and go on"
    FINAL = "end the window: sum them over all ranks"


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a runtime works with: the network, the memory, the lanes, and the journal of its collectives."""

    mesh: Mesh
    arena: Arena
    lanes: Lanes
    journal: Journal


@dataclass
class _Backward:
    """One running backward: how far its reductions are, and whether it has anything to reduce."""

    reduces: bool  # a gradient came, or autograd said that one will: the same on all ranks, also where one is late
    next_reduction: int = 0  # position in the reduction order
    horizon: float = inf  # position in the trace: everything that began after it has gone backward


class Runtime:
    """Owns the units of one model and the state of the iteration.

    Attributes:
        window: what the next backward does with its gradients.
        factor: what the next backward's gradients are multiplied by as they arrive.
        num_steps: optimizer steps seen, skipped ones included.
        num_backwards: backwards that brought gradients.
        grads_version: changes whenever gradients do; results computed from them carry it.
        last_walk: the last root forward with grad mode.
        late_here: units that turned out late on this rank; the next record tells the others.
        before_change: called before masters or optimizer states change.
        watch: told of every moment, while somebody watches.
    """

    def __init__(self, units: Sequence[Unit], means: Means, schedule: Schedule, scaler: LossScaler | None) -> None:
        self.units = tuple(units)
        self.means = means
        self.scaler = scaler
        self.schedule = schedule
        self.window = Window.FINAL
        self.factor = 1.0
        self.num_steps = self.num_backwards = 0
        self.grads_version = 0
        self.late_here: frozenset[int] = frozenset()
        self.last_walk = Walk()
        self._trace: list[TraceEvent] | None = None
        self._backward: _Backward | None = None
        self.before_change: list[Callable[[], None]] = []
        self._reducing: deque[GradBuffers] = deque()
        self.watch: Watch | None = None

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running, or failed and was not cleaned up yet."""
        return self._backward is not None

    def trainable_buckets(self) -> list[Bucket]:
        """Return the buckets with gradients, in definition order."""
        return [bucket for unit in self.units for bucket in unit.trainable_buckets()]

    def begin_root(self, *, records: bool) -> None:
        """A root forward begins outside a backward; ``records`` says whether its order counts (grad mode is on)."""
        if self.in_backward:
            self.reset()
        for unit in self.units:
            unit.active = 0  # a pre-hook that failed left its mark
            unit.held = False
        self._trace = [] if records else None
        if self.watch is not None:
            self.watch(Moment.ROOT_BEGINS, None)

    def end_root(self, *, keeps: bool) -> None:
        """A root forward ended or failed: free what is not kept for a backward."""
        if self._trace is not None:
            events, self._trace = tuple(self._trace), None
            if events != self.last_walk.events:
                self.last_walk = Walk(events)
        kept = self.schedule.kept if keeps else frozenset()
        for unit in self.units:
            unit.held = False
            if unit.index not in kept:
                unit.reshard()

    def before_forward(self, unit: Unit) -> None:
        """A unit's forward begins: its parameters must be there."""
        if self.watch is not None:
            self.watch(Moment.FORWARD_BEGINS, unit)
        unit.active += 1
        unit.unshard()
        unit.wait()
        if self._trace is not None:
            self._trace.append(unit.begin)
        if not self.in_backward:
            self._prefetch(unit, backward=False)

    def after_forward(self, unit: Unit) -> None:
        """A unit's forward ended or failed. Nothing is freed while a backward runs: this was a recomputation."""
        unit.active -= 1
        if self._trace is not None:
            self._trace.append(unit.end)
        if not self.in_backward and (self._trace is None or unit.index not in self.schedule.kept):
            unit.reshard()
        if self.watch is not None:
            self.watch(Moment.FORWARD_ENDS, unit)

    def begin_backward(self, *, expects_grads: bool = False) -> None:
        """The first event of a backward; ``expects_grads`` says that it will bring gradients of parameters."""
        self._backward = _Backward(reduces=expects_grads)
        if self.watch is not None:
            self.watch(Moment.BACKWARD_BEGINS, None)

    def before_backward(self, unit: Unit) -> None:
        """The gradients of a unit's outputs arrived: gather it and wait for it, and gather the one before it.

        The wait is here, not at the first use: what an activation checkpoint inside the unit computes again may read
        weights in ways that nothing of ours sees (``torch.vmap``, ``torch.tensor``, torch functions switched off).

        Autograd runs the nodes that were made last first. So every unit that began after this one ended is through,
        also if this rank's data left some of its weights without a gradient: it is reduced now, as on the other ranks.
        """
        if self.watch is not None:
            self.watch(Moment.UNIT_REACHED, unit)
        if unit.index not in self.schedule.not_read_backward:
            unit.unshard()
        self._prefetch(unit, backward=True)
        backward = self._running()
        backward.horizon = min(backward.horizon, self.last_walk.last_end.get(unit.index, inf))
        self._reduce_passed()
        if unit.index not in self.schedule.not_read_backward:
            unit.wait()

    def use_done(self, unit: Unit, use: Use) -> None:
        """The input gradients of one use of a unit arrived."""
        unit.uses.discard(use)
        self._free_if_over(unit)

    def recompute_begins(self, unit: Unit) -> None:
        """A reentrant checkpoint computes a unit again, perhaps for a retained graph: gradients come once more."""
        unit.recomputes = max(unit.recomputes - 1, 0)
        unit.delivered.clear()

    def grad_ready(self, unit: Unit, number: int, slot: int, grad: Tensor | None) -> None:
        """Autograd finished one parameter's gradient (None: its function returned none)."""
        if grad is not None:
            bucket = unit.buckets[number]
            bucket.trainable_grads.accumulate(bucket.site.layout.slots[slot], grad, self.factor)
            self._running().reduces = True
        unit.delivered.add((number, slot))
        self._free_if_over(unit)

    def end_backward(self) -> None:
        """A backward ended: reduce what is left, wait for all reductions, free everything.

        A gradient that came after its unit was reduced (a weight that an earlier unit used too) waits, because only
        this rank may have it: ``finish_window`` takes it, and from then on the unit counts as late.
        """
        backward = self._running()
        if backward.reduces:
            backward.horizon = -inf
            self._reduce_passed()
            self.grads_version += 1
            self.num_backwards += 1
            if self.window is Window.FINAL:
                late = {u.index for u in self.units for b in u.trainable_buckets() if b.trainable_grads.has_written}
                self.late_here = self.late_here | late
        self._drain()
        for unit in self.units:
            unit.reset_backward()
            unit.reshard()
        self._backward = None
        if self.watch is not None:
            self.watch(Moment.BACKWARD_ENDS, None)

    def check_idle(self) -> None:
        """Check that no backward is under way.

        Raises:
            StateError: a backward is running or failed.
        """
        if self.in_backward:
            raise StateError(
                "a backward is running or ended with an error: its gradients are incomplete. Call zero_grad() and "
                "run forward and backward again before step() or a norm"
            )

    def finish_window(self, waiting: Container[Bucket]) -> None:
        """Reduce the buckets in which any rank has gradients that no reduction took; the same on all ranks."""
        window, self.window = self.window, Window.FINAL
        for index in self.schedule.reduction_order:
            self._reduce([bucket for bucket in self.units[index].trainable_buckets() if bucket in waiting])
        self.window = window
        self._drain()

    def announce_change(self) -> None:
        """Tell those who care that masters or optimizer states are about to change."""
        for call in tuple(self.before_change):
            call()

    def end_step(self, updated: Container[Bucket]) -> None:
        """An optimizer step ended: bring the updated buckets' parameters back, unit by unit, in forward order."""
        for unit in self.units:
            unit.uses.clear()  # graphs of before the update are stale
            unit.reshard()
        order = self.schedule.forward_order
        rest = (index for index in range(len(self.units)) if index not in order)
        for index in (*rest, *order):
            for bucket in self.units[index].trainable_buckets():
                if bucket in updated:
                    bucket.refresh_params()

    def empty_grads(self) -> None:
        """Forget all gradients."""
        self._drain()
        for bucket in self.trainable_buckets():
            bucket.trainable_grads.empty()
        self.grads_version += 1

    def reset(self, *, warn: bool = True) -> None:
        """Return to the state before the iteration after an error in backward: nothing gathered, no gradients."""
        if warn and any(bucket.trainable_grads.arrived for bucket in self.trainable_buckets()):
            warnings.warn(
                "the last backward ended with an error; the gradients collected since the last zero_grad are discarded",
                stacklevel=2,
            )
        for unit in self.units:
            unit.reset_backward()
            unit.uses.clear()
            unit.active = 0
        self.empty_grads()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.params.settle()
            unit.reshard()
        self._backward = None
        if self.watch is not None:
            self.watch(Moment.RESET, None)

    def _prefetch(self, unit: Unit, *, backward: bool) -> None:
        for index in self.schedule.ahead(unit.index, backward=backward):
            # One whose backward is over may be free on this rank alone: which gradients come may depend on its data.
            if not (backward and self.units[index].backward_is_over):
                self.units[index].unshard()

    def _free_if_over(self, unit: Unit) -> None:
        if unit.backward_is_over:
            unit.reshard()
        if self.watch is not None and unit.backward_is_over:
            self.watch(Moment.UNIT_PASSED, unit)

    def _reduce_passed(self) -> None:
        """Reduce, in the agreed order, the units that the running backward has passed.

        [Note: shared points] Reductions are issued here and at the end of a backward only, never when a gradient
        arrives: which gradients arrive may depend on a rank's data, and collectives must interleave alike on all ranks.
        """
        order, backward = self.schedule.reduction_order, self._running()
        while backward.reduces and backward.next_reduction < len(order):
            unit = self.units[order[backward.next_reduction]]
            if unit.trainable and self.last_walk.first_begin.get(unit.index, 0) <= backward.horizon:
                return
            backward.next_reduction += 1
            self._reduce(unit.trainable_buckets())

    @cached_property
    def _gathers_hop(self) -> bool:
        """Whether a gather has a second transfer that starts only when this rank waits for the first."""
        return any(bucket.site.placement.num_param > 1 for unit in self.units for bucket in unit.buckets)

    def _running(self) -> _Backward:
        if self._backward is None:
            raise StateError("a gradient arrived, but no backward was announced")
        return self._backward

    def _reduce(self, buckets: Iterable[Bucket]) -> None:
        if self.window is Window.DEFER:
            return
        for bucket in buckets:
            self._drain(self.schedule.reductions_in_flight - 1)
            if self.window is Window.FINAL:
                bucket.finalize_grads(1.0 / self.scaler.scale if self.scaler else 1.0)
            else:
                bucket.reduce_grads()
            self._reducing.append(bucket.trainable_grads)
            self._drain(self.schedule.reductions_in_flight)

    def _drain(self, most: int = 0) -> None:
        """Wait for the oldest reductions until at most ``most`` are in flight."""
        if len(self._reducing) > max(most, 0) and self._gathers_hop:
            self.means.lanes.gather.flush()  # peers may need this rank's second hop before they come to the reduction
        while len(self._reducing) > max(most, 0):
            self._reducing.popleft().wait()
