"""What a run is measured by: the digest of its parameters and the memory of its process."""

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["digest_in_order", "parameter_digest", "peak_rss_bytes", "room_bytes"]


def parameter_digest(params: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the fp32 values in the order of the names, in hexadecimal."""
    return digest_in_order(params[name] for name in sorted(params))


def digest_in_order(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of the fp32 values of tensors one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def room_bytes(device: torch.device) -> int:
    """Return by how many bytes this process once held more on a device, or on the host, than it holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return max(0, peak_rss_bytes() - _rss_bytes())


def peak_rss_bytes() -> int:
    """Return the largest resident set that this process had so far, in bytes."""
    # On Linux ru_maxrss also counts the parent's peak, which a child inherits when it starts; VmHWM does not.
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return _status_bytes("VmHWM") or largest


def _rss_bytes() -> int:
    """Return the resident set now; where the system does not tell, the largest so far."""
    return _status_bytes("VmRSS") or peak_rss_bytes()


def _status_bytes(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
