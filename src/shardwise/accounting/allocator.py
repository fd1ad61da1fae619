"""What the allocator of a device says: bytes it gave out, bytes it keeps, bytes it cannot give out.

CUDA only: the CPU's allocator has no such counters. See torch.cuda.memory_stats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Allocator", "Counters", "read_allocator"]

Counters = Callable[[torch.device], tuple[Mapping[str, Any], tuple[int, int]]]  # statistics; free and all bytes


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Measured by the allocator of one device; all kinds, ours and others'.

    Attributes:
        allocated_bytes: in blocks that tensors hold, rounded up to the allocator's sizes.
        requested_bytes: what the tensors asked for.
        reserved_bytes: taken from the device.
        fragmented_bytes: free pieces of blocks that are split, so that they cannot go back to the device; expandable
            segments are not counted.
        outside_bytes: in use on the device and not reserved here: NCCL, the context, other processes.
        num_retries: times that the allocator had to give back what it kept, to serve a request.
        num_device_allocations: times that it asked the device.
        num_shortages: requests that failed.
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    fragmented_bytes: int
    outside_bytes: int
    num_retries: int
    num_device_allocations: int
    num_shortages: int


def read_allocator(device: torch.device, counters: Counters | None = None) -> Allocator | None:
    """Return what the allocator of a device says, None where it says nothing.

    Args:
        device: where.
        counters: reads them; None: those of CUDA, on a CUDA device.
    """
    if counters is None:
        if device.type != "cuda":
            return None
        counters = _of_cuda
    stats, (free, total) = counters(device)
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    return Allocator(
        allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
        requested_bytes=int(stats.get("requested_bytes.all.current", 0)),
        reserved_bytes=reserved,
        fragmented_bytes=int(stats.get("inactive_split_bytes.all.current", 0)),
        outside_bytes=max(total - free - reserved, 0),
        num_retries=int(stats.get("num_alloc_retries", 0)),
        num_device_allocations=int(stats.get("num_device_alloc", 0)),
        num_shortages=int(stats.get("num_ooms", 0)),
    )


def _of_cuda(device: torch.device) -> tuple[Mapping[str, Any], tuple[int, int]]:
    return torch.cuda.memory_stats(device), torch.cuda.mem_get_info(device)
