"""ZeRO-Infinity: working memory of one operator, and the bandwidth that keeps a device busy.

Pure arithmetic over ``shapes``. Checkpoints and working activations are in ``activations.py``.
"""

from shardwise.planner.shapes import Shape

__all__ = [
    "checkpoint_intensity",
    "efficiency",
    "needed_bandwidth",
    "optimizer_intensity",
    "param_intensity",
    "working_bytes",
]


def working_bytes(shape: Shape, *, num_tiles: int = 1, bytes_per_param: float = 4) -> float:
    """Return the bytes of the largest operator of a block, hd x 4 hd, gathered with its gradient.

    Args:
        shape: hd.
        num_tiles: parts into which the operator is cut, one after the other.
        bytes_per_param: parameter and gradient, 2 + 2.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 4; tiling: section 5.1.3.
    """
    return bytes_per_param * shape.hidden * 4 * shape.hidden / num_tiles


def param_intensity(*, seq: int, batch: float) -> float:
    """Return the FLOPs per byte of parameters and gradients that are moved: seq bsz.

    Args:
        seq: tokens.
        batch: samples per rank.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 9.
    """
    return seq * batch


def optimizer_intensity(*, seq: int, batch: float) -> float:
    """Return the FLOPs per byte of optimizer state that is moved: seq bsz / 4.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 10.
    """
    return seq * batch / 4


def checkpoint_intensity(shape: Shape, *, interval: float = 1) -> float:
    """Return the FLOPs per byte of activation checkpoints that are moved: 24 hd ci.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 11.
    """
    return 24 * shape.hidden * interval


def efficiency(flops_per_byte: float, *, bytes_per_second: float, peak_flops: float) -> float:
    """Return the part of the peak that is left if no transfer hides behind compute.

    Args:
        flops_per_byte: ait, one of the intensities above.
        bytes_per_second: bw, per device.
        peak_flops: FLOP/s that the device reaches without transfers.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 6: ait bw / (ait bw + peak).
    """
    return flops_per_byte * bytes_per_second / (flops_per_byte * bytes_per_second + peak_flops)


def needed_bandwidth(flops_per_byte: float, *, efficiency: float, peak_flops: float) -> float:
    """Return the bytes per second and device at which that part of the peak is left: Eq. 6 solved for bw."""
    return efficiency / (1 - efficiency) * peak_flops / flops_per_byte
