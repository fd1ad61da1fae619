"""Whole tensors owned by one rank each: who owns what, and what travels. Arithmetic only.

This is how ZeRO-2 and ZeRO-3 are often drawn, and how torch's ``ZeroRedundancyOptimizer`` splits its state: gradients
are reduced to the owner of a tensor, parameters are broadcast from it. ``plain.py`` trains that way.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError

__all__ = ["OwnerTraffic", "greedy_owners", "owned_elements", "owner_traffic"]


@dataclass(frozen=True, kw_only=True)
class OwnerTraffic:
    """What one step sends where tensors have owners.

    Attributes:
        num_collectives: reduces to an owner and broadcasts from one; one message per tensor each.
        sent_elements: by rank, each element counted once per rank that it goes to.
    """

    num_collectives: int
    sent_elements: tuple[int, ...]


def greedy_owners(numels: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Give each tensor, the largest first, to the rank that owns least; return the owner of each.

    >>> greedy_owners([100, 60, 40], 2)
    (0, 1, 1)
    >>> greedy_owners([100, 30, 20], 2)
    (0, 1, 1)

    Args:
        numels: elements of each tensor.
        num_ranks: number of ranks.

    Raises:
        ConfigError: a number is out of range.

    Source: ``torch.distributed.optim.ZeroRedundancyOptimizer``, ``_partition_parameters``. Among equals the first
    tensor and the lowest rank come first.
    """
    if num_ranks < 1 or min(numels, default=0) < 0:
        raise ConfigError(f"owners need at least one rank and sizes >= 0, got {num_ranks} ranks, sizes {list(numels)}")
    owners = [0] * len(numels)
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + numels[index], rank))
    return tuple(owners)


def owned_elements(numels: Sequence[int], owners: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return how many elements each rank owns. Equal slices would give each ``sum(numels) / num_ranks``.

    >>> owned_elements([100, 60, 40], (0, 1, 1), 2)
    (100, 100)
    >>> owned_elements([100, 30, 20], (0, 1, 1), 2)
    (100, 50)
    """
    loads = [0] * num_ranks
    for numel, owner in zip(numels, owners, strict=True):
        loads[owner] += numel
    return tuple(loads)


def owner_traffic(
    numels: Sequence[int], owners: Sequence[int], num_ranks: int, *, reduced: Sequence[bool], num_broadcasts: int
) -> OwnerTraffic:
    """Return what one step sends.

    The sum over the ranks is that of slices: ``num_ranks - 1`` times the elements, for each reduction and broadcast.

    >>> owner_traffic([100, 30, 20], (0, 1, 1), 2, reduced=[True] * 3, num_broadcasts=1)
    OwnerTraffic(num_collectives=6, sent_elements=(150, 150))
    >>> owner_traffic([100, 30, 20], (0, 1, 1), 2, reduced=[True] * 3, num_broadcasts=2)
    OwnerTraffic(num_collectives=9, sent_elements=(250, 200))

    Args:
        numels: elements of each tensor.
        owners: owner of each tensor.
        num_ranks: number of ranks.
        reduced: whether each tensor has a gradient.
        num_broadcasts: per tensor and step: 1 after the update (stage 2), 2 for forward and backward (stage 3).
    """
    sent = [0] * num_ranks
    for numel, owner, has_grad in zip(numels, owners, reduced, strict=True):
        for rank in range(num_ranks):
            if rank == owner:
                sent[rank] += num_broadcasts * (num_ranks - 1) * numel
            elif has_grad:
                sent[rank] += numel
    num_collectives = num_broadcasts * len(numels) + sum(reduced) if num_ranks > 1 else 0
    return OwnerTraffic(num_collectives=num_collectives, sent_elements=tuple(sent))
