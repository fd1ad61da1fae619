"""What the ranks of a step send each other, in elements, messages and seconds.

The five verbs of the engine over ``Ways``: a collective that takes data from ``a`` slices to ``b`` moves
``numel (1/a - 1/b)`` elements per rank, whatever the stage. ``crosshost.py`` and ``parallel.py`` are its neighbours.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.planner.ways import Ways

__all__ = [
    "Collective",
    "relative_elements",
    "ring_seconds",
    "step_collectives",
    "step_elements",
    "step_elements_with_all_reduce",
    "step_messages",
    "step_seconds",
]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective of a step, over all units.

    Attributes:
        verb: of the engine: unshard, reduce_grads, finalize_grads, refresh_params.
        kind: all-gather, reduce-scatter or all-reduce.
        times: number of times per step.
        elements: sent by each rank each time.
        ranks: that take part in one ring.
        span: ranks that lie between the first and the last of a ring, both counted, if groups fill hosts first.
    """

    verb: str
    kind: str
    times: int
    elements: float
    ranks: float
    span: float

    @property
    def messages(self) -> float:
        """Messages of a ring that each rank sends each time, for one unit."""
        return (self.ranks - 1) * (2 if self.kind == "all-reduce" else 1)


def step_collectives(
    numel: float, ways: Ways, *, micro_steps: int = 1, kept_numel: float = 0
) -> tuple[Collective, ...]:
    """Return the collectives of one step, those over a single rank left out.

    Args:
        numel: Psi, parameters of the model.
        ways: slices of each state.
        micro_steps: number of forward and backward passes before the optimizer step.
        kept_numel: parameters that stay gathered from forward to backward: a last unit that is kept.

    Source: ZeRO, arXiv:1910.02054, section 7; exact form of a ring: Thakur et al. 2005, section 4.
    """
    param, grad, optim, data = (1 / ways.param, 1 / ways.grad, 1 / ways.optim, 1 / ways.data)
    backward = numel - kept_numel
    every = (
        _collective("unshard", "all-gather", micro_steps, numel, 1, param),
        _collective("unshard", "all-gather", micro_steps, backward, 1, param),
        _collective("reduce_grads", "reduce-scatter", micro_steps, numel, 1, grad),
        _collective("finalize_grads", "reduce-scatter", 1, numel, grad, optim),
        _collective("finalize_grads", "all-reduce", 1, 2 * numel, optim, data),
        _collective("refresh_params", "all-gather", 1, numel, param, optim),
    )
    return tuple(collective for collective in every if collective.elements > 0)


def step_elements(numel: float, ways: Ways, *, micro_steps: int = 1, kept_numel: float = 0) -> float:
    """Return the elements that one rank sends in a step: 2 Psi for stages 0 to 2 and many ranks, 3 Psi for stage 3.

    Args:
        numel: Psi, parameters of the model.
        ways: slices of each state.
        micro_steps: number of forward and backward passes before the optimizer step.
        kept_numel: parameters that stay gathered from forward to backward.

    Source: ZeRO, arXiv:1910.02054, section 7.
    """
    collectives = step_collectives(numel, ways, micro_steps=micro_steps, kept_numel=kept_numel)
    return sum(collective.times * collective.elements for collective in collectives)


def relative_elements(ways: Ways) -> float:
    """Return the elements of a step over those of plain data parallelism on as many ranks.

    Source: ZeRO, arXiv:1910.02054, section 7.2.2: 1.5 for P_os+g+p.
    """
    return step_elements(1, ways) / step_elements(1, Ways(data=ways.data))


def step_elements_with_all_reduce(numel: float, ways: Ways) -> float:
    """Return the elements that one rank sends if gradients are all-reduced though only an owner needs them: 3 Psi.

    Source: DeepSpeed post of 2020-03-17, ZeRO-1 before its partition-aware reduction.
    """
    replicated = step_elements(numel, Ways(data=ways.data))
    gathers = [collective for collective in step_collectives(numel, ways) if collective.kind == "all-gather"]
    return replicated + sum(collective.elements for collective in gathers)


def step_messages(collectives: Iterable[Collective], *, num_units: int = 1) -> float:
    """Return the messages that one rank sends in a step, if every collective is a ring over each unit.

    Source: Thakur et al. 2005, section 4: p - 1 rounds for all-gather and reduce-scatter.
    """
    return sum(collective.times * collective.messages for collective in collectives) * num_units


def step_seconds(
    collectives: Iterable[Collective],
    *,
    num_units: int,
    bytes_per_element: float,
    latency_seconds: float,
    bytes_per_second: float,
) -> float:
    """Return the time of a step's collectives one after the other: latency times messages, bytes over bandwidth.

    Args:
        collectives: of ``step_collectives``.
        num_units: each unit has its own collectives.
        bytes_per_element: of the dtype that travels.
        latency_seconds: alpha, of one message.
        bytes_per_second: 1 / beta, of one rank.

    Source: Thakur et al. 2005, section 3 (alpha-beta model).
    """
    chosen = tuple(collectives)
    num_bytes = bytes_per_element * sum(collective.times * collective.elements for collective in chosen)
    return ring_seconds(
        num_bytes,
        num_messages=step_messages(chosen, num_units=num_units),
        latency_seconds=latency_seconds,
        bytes_per_second=bytes_per_second,
    )


def ring_seconds(num_bytes: float, *, num_messages: float, latency_seconds: float, bytes_per_second: float) -> float:
    """Return the time in which one rank sends bytes in messages: n alpha + m beta.

    Source: Thakur et al. 2005, section 3.
    """
    return num_messages * latency_seconds + num_bytes / bytes_per_second


def _collective(verb: str, kind: str, times: int, numel: float, coarse: float, fine: float) -> Collective:
    """Make one between two levels, each given as the part of the whole that a rank holds; 0 for many ranks."""
    return Collective(
        verb=verb,
        kind=kind,
        times=times,
        elements=numel * (coarse - fine),
        ranks=coarse / fine if fine else math.inf,
        span=1 / fine if fine else math.inf,
    )
