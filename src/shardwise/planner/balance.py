"""How evenly tensors lie on ranks: equal slices of a flat space, or whole tensors.

Pure arithmetic; ``layout.py`` packs for real.
"""

from collections.abc import Sequence

__all__ = ["greedy_loads", "imbalance", "shard_numel"]


def shard_numel(numel: int, num_ranks: int) -> int:
    """Return the elements of one of equal slices, the last one padded."""
    return -(-numel // num_ranks)


def greedy_loads(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the elements per rank where whole tensors go, largest first, to the rank that has least.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer; CMU 11-868, lecture 18, section 3.2 and exercise 6.
    """
    loads = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


def imbalance(fullest: float, total: float, num_ranks: int) -> float:
    """Return the fullest rank's elements over the mean."""
    return fullest / (total / num_ranks)
