"""Views of masters and gradients that users hold between steps, each with a version of its own to notice edits.

An edit of a rank's part of a master would be known to that rank alone, or to nobody but the optimizer, so it is an
error; ``managed.py`` asks before each forward and step.
"""

import torch
from torch import Tensor

__all__ = ["Loans", "own_version"]


class Loans:
    """What was lent since the last look."""

    def __init__(self) -> None:
        self._lent: list[tuple[Tensor, int]] = []

    def lend(self, flat: Tensor) -> Tensor:
        """Return a view of a flat tensor whose edits are noticed."""
        view = own_version(flat)
        self._lent.append((view, view._version))
        return view

    def take_edits(self) -> bool:
        """Return whether anything lent was edited, and forget all."""
        lent, self._lent = self._lent, []
        return any(view._version != version for view, version in lent)


def own_version(flat: Tensor) -> Tensor:
    """Return a view of a flat tensor with a version counter that nothing else changes."""
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), flat.storage_offset(), flat.shape, flat.stride())
