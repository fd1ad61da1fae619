"""Measured runs compared: speed-ups, overheads, and how well more ranks pay.

Pure arithmetic. ``compute.py`` has the rates that a model predicts.
"""

__all__ = [
    "aggregate_rate",
    "rate_ratio",
    "relative_overhead",
    "scaling_efficiency",
    "speedup",
    "time_saved",
]


def speedup(before_seconds: float, after_seconds: float) -> float:
    """Return how many times faster the same work is done: 1 is no change."""
    return before_seconds / after_seconds


def rate_ratio(rate: float, base_rate: float) -> float:
    """Return how many times another rate is of the first: FLOP/s, tokens/s; 1 is no change."""
    return rate / base_rate


def relative_overhead(*seconds: float, base_seconds: float) -> float:
    """Return the time beyond the base, as a part of the base; below 0 if it is less.

    With the times exchanged it is the gain in throughput.

    Args:
        seconds: of the parts of the work, such as forward and backward.
        base_seconds: of all parts of the base.

    Source: Korthikanti et al., arXiv:2205.05198, Tables 4 and 5.
    """
    return sum(seconds) / base_seconds - 1


def time_saved(base_rate: float, rate: float) -> float:
    """Return the part of a step's time that a higher rate saves.

    Source: FSDP, arXiv:2304.11277, Figure 6(b).
    """
    return 1 - base_rate / rate


def aggregate_rate(rate_per_rank: float, num_ranks: float) -> float:
    """Return the rate of all ranks together, in the unit of one rank's: FLOP/s, bytes/s."""
    return rate_per_rank * num_ranks


def scaling_efficiency(base_rate: float, rate: float, *, times_ranks: float) -> float:
    """Return the growth of the total rate over that of the ranks: above 1 is superlinear.

    Args:
        base_rate: of all ranks of the smaller run.
        rate: of all ranks of the larger run.
        times_ranks: ranks of the larger run over those of the smaller.

    Source: ZeRO, arXiv:1910.02054, section 10.3; ZeRO-Infinity, arXiv:2104.07857, Figure 5(b).
    """
    return rate / base_rate / times_ranks
