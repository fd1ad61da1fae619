"""Communication and idle time of tensor and pipeline parallelism, which a plan may combine with ZeRO.

Pure arithmetic over ``shapes``.
"""

import math

from shardwise.planner.shapes import Shape

__all__ = [
    "bubble_share",
    "partitioned_activation_elements",
    "partitioned_activation_share",
    "tensor_parallel_elements",
]


def tensor_parallel_elements(
    shape: Shape, *, seq: int, batch: int, num_ranks: float = math.inf, recompute: bool = False
) -> float:
    """Return the elements that one rank sends per layer and micro-batch: 4 all-reduces of s b h, 6 with recomputation.

    Args:
        shape: h.
        seq: s, tokens.
        batch: b, samples of a micro-batch.
        num_ranks: t; inf is the limit of many ranks.
        recompute: forward runs a second time in backward.

    Source: Narayanan et al., arXiv:2104.04473, section 3.2: 8 b s h (t - 1) / t; ZeRO, arXiv:1910.02054, section 8.
    """
    return (6 if recompute else 4) * 2 * batch * seq * shape.hidden * (1 - 1 / num_ranks)


def partitioned_activation_elements(shape: Shape, *, seq: int, batch: int, num_ranks: float = math.inf) -> float:
    """Return the elements that one rank sends per layer to gather a partitioned checkpoint (P_a).

    Source: ZeRO, arXiv:1910.02054, section 8: one all-gather of s b h.
    """
    return batch * seq * shape.hidden * (1 - 1 / num_ranks)


def partitioned_activation_share() -> float:
    """Return what P_a adds to the traffic of tensor parallelism with recomputation, as a part of it: 1/12.

    Source: ZeRO, arXiv:1910.02054, section 8 (less than 10%).
    """
    one = Shape(num_layers=1, hidden=1)
    gathered = partitioned_activation_elements(one, seq=1, batch=1)
    return gathered / tensor_parallel_elements(one, seq=1, batch=1, recompute=True)


def bubble_share(num_pipeline_ranks: int, num_micro_batches: int, *, of_wall_time: bool = False) -> float:
    """Return the idle time of a pipeline as a part of the ideal time, or of the time that passes.

    Args:
        num_pipeline_ranks: p.
        num_micro_batches: m.
        of_wall_time: (p - 1) / (m + p - 1) in place of (p - 1) / m.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    idle = num_pipeline_ranks - 1
    return idle / (num_micro_batches + idle if of_wall_time else num_micro_batches)
