"""ZeRO-2 and ZeRO-3 with whole tensors owned by one rank each, run with real numbers beside the slices of this library.

Owns ``OwnerRun`` and ``compare_owners``. The arithmetic is in ``owners.py``, the training in ``plain.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.simulation.differences import Difference, tensor_differences
from shardwise.simulation.dtypes import precision_called
from shardwise.simulation.owners import greedy_owners, owned_elements, owner_traffic
from shardwise.simulation.parity import Comparison, StageRun
from shardwise.simulation.plain import train_owned
from shardwise.simulation.work import Work, some_of

__all__ = ["OWNED_STAGES", "OwnerRun", "compare_owners"]

OWNED_STAGES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class OwnerRun:
    """Owners beside slices, at one stage. Elements are those of one step, the last one.

    Attributes:
        stage: 2: gradients and optimizer state have owners; 3: parameters too.
        owners: parameter's name to rank, by ``greedy_owners``.
        owned_elements: by rank.
        slice_elements: what each rank owns in slices; padding is not counted.
        sent_elements: by rank, with owners.
        slice_sent_elements: by rank, with slices; the record of the step is not counted.
        num_collectives: with owners: one message per tensor.
        slice_num_collectives: with slices: one message per bucket.
        differences: of the parameters after the last step from the plain run, the worst first.
    """

    stage: int
    owners: Mapping[str, int]
    owned_elements: tuple[int, ...]
    slice_elements: float
    sent_elements: tuple[int, ...]
    slice_sent_elements: tuple[int, ...]
    num_collectives: int
    slice_num_collectives: int
    differences: tuple[Difference, ...]

    @property
    def problem(self) -> str | None:
        """What is not as in plain training, or None."""
        wrong = [
            f"{difference.name} ({difference.relative:.2g})" for difference in self.differences if not difference.ok
        ]
        return f"stage {self.stage} with owners is not plain training: off are {some_of(wrong)}" if wrong else None


def compare_owners(work: Work, comparison: Comparison, run: StageRun) -> OwnerRun:
    """Train with owners at the stage of ``run`` and put both beside each other.

    At stage 3 parameters are broadcast before the forward and again before the backward. Here both use the values of
    the first broadcast, and the second one is counted only.
    """
    owns_params = run.stage == OWNED_STAGES[-1]
    params = {name: param for name, param in work.model.named_parameters() if owns_params or param.requires_grad}
    numels = [param.numel() for param in params.values()]
    ranks = greedy_owners(numels, work.num_ranks)
    owners = dict(zip(params, ranks, strict=True))
    traffic = owner_traffic(
        numels,
        ranks,
        work.num_ranks,
        reduced=[param.requires_grad for param in params.values()],
        num_broadcasts=2 if owns_params else 1,
    )
    plain = comparison.plain.trace
    found = train_owned(
        work,
        precision_called(comparison.precision).dtypes,
        owners,
        comparison.clip_norms,
        owns_params=owns_params,
    )
    differences = tensor_differences(found, plain.parameters, comparison.tolerance)
    last = [[sent for sent in steps[-1] if sent.verb != "record"] for steps in run.sent]
    return OwnerRun(
        stage=run.stage,
        owners=owners,
        owned_elements=owned_elements(numels, ranks, work.num_ranks),
        slice_elements=sum(numels) / work.num_ranks,
        sent_elements=traffic.sent_elements,
        slice_sent_elements=tuple(sum(sent.elements for sent in rank) for rank in last),
        num_collectives=traffic.num_collectives,
        slice_num_collectives=sum(sent.count for sent in last[0]),
        differences=tuple(sorted(differences, key=lambda difference: -difference.relative)),
    )
