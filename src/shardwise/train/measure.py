"""What a run is measured by: the digest of its parameters and the memory of its process."""

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

__all__ = ["parameter_digest", "peak_rss_bytes"]


def parameter_digest(params: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the fp32 values in the order of the names, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(params[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def peak_rss_bytes() -> int:
    """Return the largest resident set that this process had so far, in bytes."""
    # On Linux ru_maxrss also counts the parent's peak, which a child inherits when it starts; VmHWM does not.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
