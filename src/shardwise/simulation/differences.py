"""How far two runs are apart, tensor by tensor, and whether their agreement means anything.

Tolerances are those of ``testing/compare.py``. Read ``parity.py`` next, which makes the runs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.simulation.plain import PlainRun
from shardwise.simulation.work import Work, some_of
from shardwise.testing.compare import Tolerance, Trace

__all__ = ["FAR_ABOVE", "Difference", "compare_traces", "tensor_differences", "unlike_tensors", "updates", "vacuities"]

FAR_ABOVE = 10.0  # times the tolerance that the largest update must reach


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one tensor.

    Attributes:
        name: "parameters NAME", "gradients NAME", "optimizer_state NAME/STATE", "losses", "norms" or "outputs" (the
            loss after the last step).
        largest: absolute, in the tensor's own units; infinite where a value is not finite or only one side has it.
        relative: the same, relative to the largest element expected.
        allowed: largest relative difference that passes.
    """

    name: str
    largest: float
    relative: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the tensor is as expected."""
        return self.relative <= self.allowed


def compare_traces(ranks: Sequence[Trace], plain: Trace, tolerance: Tolerance) -> tuple[Difference, ...]:
    """Return the largest difference of every tensor over all ranks, the worst first; losses and outputs are means."""
    losses = tuple(sum(each) / len(ranks) for each in zip(*(trace.losses for trace in ranks), strict=True))
    outputs = torch.stack([trace.outputs for trace in ranks]).mean(dim=0)
    worst: dict[str, Difference] = {}
    for trace in ranks:
        with_means = replace(trace, losses=losses, outputs=outputs)
        for found in tensor_differences(with_means.tensors(), plain.tensors(), tolerance):
            if found.name not in worst or found.relative > worst[found.name].relative:
                worst[found.name] = found
    return tuple(sorted(worst.values(), key=lambda difference: -difference.relative))


def tensor_differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield the difference of every tensor that either side has; not of those without elements."""
    for name in {**wanted, **found}:
        if all(side[name].numel() == 0 for side in (found, wanted) if name in side):
            continue
        largest = relative = math.inf
        if name in found and name in wanted and found[name].shape == wanted[name].shape:
            largest, relative = _distance(found[name], wanted[name])
        yield Difference(name=name, largest=largest, relative=relative, allowed=tolerance.relative)


def unlike_tensors(ranks: Sequence[Trace], others: Sequence[Trace]) -> tuple[str, ...]:
    """Return the names of tensors that two runs do not have alike to the bit on every rank."""
    unlike: dict[str, None] = {}
    for trace, other in zip(ranks, others, strict=True):
        mine, theirs = trace.tensors(), other.tensors()
        for name in {**mine, **theirs}:
            if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                unlike[name] = None
    return tuple(unlike)


def updates(plain: PlainRun) -> dict[str, float]:
    """Return how far each trainable parameter moved, relative to its largest element after the last step."""
    return {
        name: _distance(plain.initial[name], tensor)[1]
        for name, tensor in plain.trace.parameters.items()
        if name in plain.trainable and tensor.numel()
    }


def vacuities(work: Work, plain: PlainRun, tolerance: Tolerance, may_stay: Sequence[str]) -> Iterator[str]:
    """Yield why an agreement would prove nothing; ``may_stay`` names parameters that need not move."""
    moved = updates(plain)
    still = [name for name, update in moved.items() if not update > 0 and name not in may_stay]
    if still:
        reason = "no gradient reached them" if set(still) <= set(plain.no_gradient) else "their gradient is zero"
        yield f"trainable tensors never moved, {reason}: {some_of(still)}"
    largest = max(moved.values(), default=0.0)
    if not largest >= FAR_ABOVE * tolerance.relative:
        yield (
            f"the largest update is {largest:.2g} of its tensor, {tolerance.name} lets {tolerance.relative:g} differ: "
            "take more steps or a larger rate"
        )
    repeated = work.repeated_shares()
    if repeated:
        yield f"ranks get the same share of the batch in steps {some_of([str(step) for step in repeated])}"
    bad = [step for step, loss in enumerate(plain.trace.losses) if not math.isfinite(loss)]
    if bad:
        yield f"the plain loss is not finite in steps {some_of([str(step) for step in bad])}"
    if plain.drew:
        yield "the model draws random numbers in forward, dropout aside: ranks cannot draw the same ones"


def _distance(tensor: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and relative to the largest element wanted."""
    if torch.equal(tensor, wanted) and bool(wanted.isfinite().all()):
        return 0.0, 0.0
    if not bool(tensor.isfinite().all() and wanted.isfinite().all()):
        return math.inf, math.inf
    largest = float((tensor.double() - wanted.double()).abs().max())
    return largest, largest / (float(wanted.abs().max()) or 1.0)
