"""States on the host or on disk: where the bytes lie, what crosses the link, and when it can be hidden.

May import ``states`` and ``compute``. ``infinity.py`` has the bandwidths that parameters outside the device need.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.planner.compute import train_flops
from shardwise.planner.states import HALF_GRADIENTS, Accounting, state_bytes
from shardwise.planner.ways import Ways

__all__ = [
    "PARTITIONS",
    "Tier",
    "Tiers",
    "device_reduction",
    "link_bytes",
    "link_seconds",
    "optimizer_disk_seconds",
    "optimizer_seconds",
    "tier_bytes",
    "tokens_to_hide",
]


class Tier(enum.Enum):
    """Where a state rests."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where each state rests; ``optim`` is the master, the optimizer's state and a gradient of its own."""

    param: Tier = Tier.DEVICE
    grad: Tier = Tier.DEVICE
    optim: Tier = Tier.DEVICE


# The four useful cuts of the data flow, ZeRO-Offload, arXiv:2101.06840, Table 1, and what ZeRO-Infinity adds.
PARTITIONS: Mapping[str, Tiers] = MappingProxyType(
    {
        "none": Tiers(),
        "gradients": Tiers(grad=Tier.HOST),
        "update": Tiers(optim=Tier.HOST),
        "gradients-and-update": Tiers(grad=Tier.HOST, optim=Tier.HOST),
        "all-host": Tiers(param=Tier.HOST, grad=Tier.HOST, optim=Tier.HOST),
        "all-disk": Tiers(param=Tier.DISK, grad=Tier.DISK, optim=Tier.DISK),
    }
)


def tier_bytes(num_params: float, accounting: Accounting, ways: Ways, tiers: Tiers) -> dict[Tier, float]:
    """Return the bytes that one rank's states take on each tier; a host or its disk holds those of all its ranks.

    Source: ZeRO-Offload, arXiv:2101.06840, section 3.4 and Table 1: 2 M on the device, 14 M on the host.
    """
    states = state_bytes(num_params, accounting, ways)
    held = dict.fromkeys(Tier, 0.0)
    held[tiers.param] += states.param
    held[tiers.grad] += states.grad
    held[tiers.optim] += states.optimizer
    return held


def device_reduction(tiers: Tiers, accounting: Accounting = HALF_GRADIENTS) -> float:
    """Return how many times less the device holds than with all states on it.

    Source: ZeRO-Offload, arXiv:2101.06840, Table 1: 1.14x, 4x, 8x (its row of 8x misprints 2 M as 4 M).
    """
    return accounting.total / tier_bytes(1, accounting, Ways(), tiers)[Tier.DEVICE]


def link_bytes(
    num_params: float,
    tiers: Tiers,
    accounting: Accounting = HALF_GRADIENTS,
    *,
    recompute: bool = False,
) -> float:
    """Return the bytes per step between the device and what lies behind its link, both directions together.

    Gradients cross where they or the optimizer rest elsewhere, new parameters where they and the optimizer do.
    Parameters that are away are read by forward, by backward, and by recomputation.

    Args:
        num_params: of this rank's part: divide by the ranks that share the work.
        tiers: where each state rests.
        accounting: bytes per parameter.
        recompute: forward runs a second time in backward.

    Source: ZeRO-Offload, arXiv:2101.06840, section 3.3: 4 M at least; ZeRO-Infinity, arXiv:2104.07857, section 4.1.
    """
    param_away, grad_away, optim_away = (tier is not Tier.DEVICE for tier in (tiers.param, tiers.grad, tiers.optim))
    reads = (3 if recompute else 2) if param_away else 0
    params = reads + (param_away != optim_away)
    grads = grad_away + (grad_away != optim_away)
    return num_params * (accounting.param * params + accounting.grad * grads)


def link_seconds(num_bytes: float, bytes_per_second: float) -> float:
    """Return the time of a transfer that bandwidth alone limits."""
    return num_bytes / bytes_per_second


def optimizer_seconds(num_params: float, params_per_second: float) -> float:
    """Return the time of an optimizer step on the host.

    Args:
        num_params: that this host updates.
        params_per_second: ``hardware.py`` has the range that was measured for Adam.

    Source: CMU 11-868, lecture 18, exercise 9; rates: ZeRO-Offload, arXiv:2101.06840, Table 4.
    """
    return num_params / params_per_second


def optimizer_disk_seconds(
    num_params: float, accounting: Accounting, *, read_bytes_per_second: float, write_bytes_per_second: float
) -> float:
    """Return the time in which an optimizer step reads its state from disk and writes it back, one after the other.

    Source: ZeRO-Infinity, arXiv:2104.07857, section 4.1: 2 x 16 bytes per parameter with fp32 gradients.
    """
    num_bytes = num_params * accounting.optimizer
    return num_bytes / read_bytes_per_second + num_bytes / write_bytes_per_second


def tokens_to_hide(
    tiers: Tiers,
    accounting: Accounting = HALF_GRADIENTS,
    *,
    bytes_per_second: float,
    params_per_second: float,
    peak_flops: float,
    utilization: float,
) -> float:
    """Return the tokens per rank and step whose compute takes as long as transfers and host optimizer together.

    Both costs and the compute grow with the number of parameters, so the answer does not depend on it.

    Args:
        tiers: where each state rests.
        accounting: bytes per parameter.
        bytes_per_second: of the link.
        params_per_second: of the optimizer on the host.
        peak_flops: FLOP/s of the device.
        utilization: part of the peak that the model reaches.

    Source: CMU 11-868, lecture 18, section 4.4.
    """
    seconds = link_seconds(link_bytes(1, tiers, accounting), bytes_per_second) + optimizer_seconds(1, params_per_second)
    return seconds * peak_flops * utilization / train_flops(1, 1)
