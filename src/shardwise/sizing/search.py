"""The largest number for which something holds, with few questions. Pure."""

from collections.abc import Callable

__all__ = ["largest"]


def largest(holds: Callable[[int], bool], *, guess: int = 1, limit: int) -> int:
    """Return the largest number from 1 to ``limit`` for which ``holds``; 0 if there is none.

    Args:
        holds: true up to some number, and false beyond it.
        guess: where to begin; a good one needs two questions.
        limit: not asked beyond.
    """
    low, high = 0, limit + 1  # holds(low) is true, holds(high) false; neither end is asked
    probe, stride = min(max(guess, 1), limit), 1
    while low + 1 < high:
        if holds(probe):
            low, step = probe, stride
        else:
            high, step = probe, -stride
        inside = low < probe + step < high
        probe = probe + step if inside and (low == 0 or high == limit + 1) else (low + high) // 2
        stride *= 2
    return low
