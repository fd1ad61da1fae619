"""Gradient norms, slice by slice: the same bits at every stage, and finite whenever the gradients are.

The norm of a slice is taken in fp32 over rows of 65,536 elements from the slice's start and combined in fp64: one
fp32 sum over 25 million elements is off by 1e-3. A row that overflows is taken again in fp64, scaled by its largest
element. Source: measured, docs/log.md.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.errors import ConfigError

__all__ = ["check_norm_type", "combine_norms", "fast_norms", "scaled_norm"]

ROW_NUMEL = 65_536


def check_norm_type(norm_type: float) -> float:
    """Return the norm's order as a float.

    Raises:
        ConfigError: it is not a positive number.
    """
    order = float(norm_type)
    if math.isnan(order) or order <= 0:
        raise ConfigError(f"norm_type must be a positive number or inf, got {norm_type!r}")
    return order


def fast_norms(slices: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of each flat slice, [len(slices)] fp64, without waiting for the device.

    Args:
        slices: one-dimensional tensors of any floating dtype and length, 0 included.
        norm_type: order of the norm; ``inf`` gives the largest absolute value.
        device: where the result lies.

    A result that is not finite may stand for finite elements whose power overflows; see ``scaled_norm``.
    """
    return torch.stack(
        [torch.zeros((), dtype=torch.float64, device=device), *(_fast_norm(s, norm_type) for s in slices)]
    )[1:]


def combine_norms(norms: Sequence[float], norm_type: float = 2.0) -> float:
    """Return the norm of a vector from the norms of its parts, added in the order given.

    Finite parts give a finite result as long as it can be represented.
    """
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if largest in (0.0, math.inf) or norm_type == math.inf:
        return largest
    total = 0.0
    for norm in norms:
        total += (norm / largest) ** norm_type
    return largest * float(total ** (1.0 / norm_type))


def _fast_norm(flat: Tensor, norm_type: float) -> Tensor:
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    narrow = flat.dtype != torch.float64 and norm_type in (2.0, math.inf)  # a long sum of first powers loses digits
    dtype = torch.float32 if narrow else torch.float64
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW_NUMEL), norm_type, dim=1, dtype=dtype).double()
    if whole < flat.numel():
        tail = torch.linalg.vector_norm(flat[whole:], norm_type, dtype=dtype).double()
        rows = torch.cat([rows, tail.view(1)])
    total: Tensor = torch.linalg.vector_norm(rows, norm_type)
    return total


def scaled_norm(flat: Tensor, norm_type: float) -> float:
    """Return the norm in fp64, each row divided by its largest element first: finite whenever the elements are."""
    norms = []
    for start in range(0, flat.numel(), ROW_NUMEL):
        wide = flat[start : start + ROW_NUMEL].double()
        largest = float(wide.abs().amax())
        if not math.isfinite(largest) or largest == 0.0:
            norms.append(math.nan if bool(wide.isnan().any()) else largest)
            continue
        norms.append(largest * float(torch.linalg.vector_norm(wide / largest, norm_type)))
    return combine_norms(norms, norm_type)
