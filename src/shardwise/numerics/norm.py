"""Gradient norms, slice by slice: the same bits at every stage, and finite whenever the gradients are.

The norm of a slice is taken in fp32 over rows of 65,536 elements from the slice's start and combined in fp64: one
fp32 sum over 25 million elements is off by 1e-3. A row that overflows is taken again in fp64, scaled by its largest
element. Source: measured, docs/log.md.
"""

import math
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError

__all__ = ["check_norm_type", "combine_norms", "combine_rows", "fast_norms", "scaled_norm"]

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
    norms = torch.zeros(len(slices), dtype=torch.float64, device=device)
    for dtype in (torch.float32, torch.float64):
        mine = [i for i, flat in enumerate(slices) if flat.numel() and _sum_dtype(flat, norm_type) == dtype]
        if not mine:
            continue
        # One call for all last rows: in small models most slices have no other.
        last_rows = [slices[i][(slices[i].numel() - 1) // ROW_NUMEL * ROW_NUMEL :] for i in mine]
        found = torch.stack(torch._foreach_norm(last_rows, norm_type, dtype=dtype)).double()
        norms[mine] = found
        for position, i in enumerate(mine):
            earlier = slices[i].numel() - last_rows[position].numel()
            if earlier:
                rows = slices[i][:earlier].view(-1, ROW_NUMEL)
                row_norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype).double()
                norms[i] = torch.linalg.vector_norm(torch.cat([row_norms, found[position : position + 1]]), norm_type)
    return norms


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


def combine_rows(norms: NDArray[numpy.float64]) -> list[float]:
    """Return what ``combine_norms`` returns for each row of [num_rows, num_parts] L2 norms, all rows at once."""
    largest = norms.max(axis=1, initial=0.0)  # NaN wins
    scale = numpy.where((largest > 0) & numpy.isfinite(largest), largest, 1.0)
    totals = numpy.zeros(len(norms))
    with numpy.errstate(invalid="ignore", over="ignore"):  # rows with inf or NaN, which are their largest part
        for column in norms.T:
            part = column / scale
            totals += part * part
        combined = scale * numpy.sqrt(totals)
    plain: list[float] = numpy.where(scale == largest, combined, largest).tolist()
    return plain


def _sum_dtype(flat: Tensor, norm_type: float) -> torch.dtype:
    narrow = flat.dtype != torch.float64 and norm_type in (2.0, math.inf)  # a long sum of first powers loses digits
    return torch.float32 if narrow else torch.float64


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
