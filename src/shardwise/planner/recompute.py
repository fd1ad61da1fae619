"""Activation checkpointing: what it saves is in ``activations.py``, what it costs is here.

Pure arithmetic over ``shapes``.
"""

import enum
import math

from shardwise.planner.shapes import Shape

__all__ = ["Recompute", "best_interval", "live_blocks", "recompute_share", "selective_flops_share"]


class Recompute(enum.Enum):
    """What backward computes a second time.

    NONE: nothing. SELECTIVE: the core of attention, from scores to their product with values. FULL: whole blocks.

    Source: Korthikanti et al., arXiv:2205.05198, section 5.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def best_interval(num_blocks: float) -> float:
    """Return the number of blocks per checkpoint that leaves fewest activations: k = sqrt(n).

    Source: Chen et al., arXiv:1604.06174; CMU 11-868, lecture 18, exercise 7: the least n / k + k.
    """
    return math.sqrt(num_blocks)


def live_blocks(num_blocks: float, interval: float) -> float:
    """Return the peak activations, in blocks: n / k checkpoints, and k blocks that are computed again.

    Source: Chen et al., arXiv:1604.06174, with a checkpoint as large as a block.
    """
    return num_blocks / interval + interval


def recompute_share(*, forward: float = 1, backward: float = 2) -> float:
    """Return the compute that full recomputation adds, as a part of the step without it: 1/3.

    Args:
        forward: compute of forward.
        backward: compute of backward, in the same unit.

    Source: ZeRO, arXiv:1910.02054, section 3.2.
    """
    return forward / (forward + backward)


def selective_flops_share(shape: Shape, *, seq: int) -> float:
    """Return the FLOPs that selective recomputation adds, as a part of the step's: s / 6 h, to leading order.

    Source: Korthikanti et al., arXiv:2205.05198, section 5.
    """
    return seq / (6 * shape.hidden)
