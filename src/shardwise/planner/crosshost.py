"""Traffic between hosts, which is slower than inside one: hybrid sharding, and ZeRO++'s compression.

May import ``communication``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.planner.communication import Collective

__all__ = [
    "HALF_PRECISION",
    "ZERO_PLUS_PLUS",
    "Compression",
    "StepTraffic",
    "all_to_all_bytes",
    "cross_host_elements",
    "cross_host_traffic",
    "hybrid_cross_host_elements",
    "traffic_reduction",
]


def cross_host_elements(collectives: Iterable[Collective], *, ranks_per_host: int) -> float:
    """Return the elements that one rank sends in collectives over more than one host.

    A collective that leaves a host counts whole; one inside a host counts nothing.

    Source: FSDP, arXiv:2304.11277, section 3.2.2: 3 M (W - 1) / W sharded, 2 M (W - 1) / W replicated.
    """
    return sum(c.times * c.elements for c in collectives if c.span > ranks_per_host)


def hybrid_cross_host_elements(numel: float, *, num_ranks: int, ranks_per_host: int) -> float:
    """Return what the FSDP paper says of hybrid sharding inside hosts: 2 M (W - 1) / (G W).

    A ring over the W / G hosts sends 2 M (W - G) / (G W): ``cross_host_elements``, at most 1 / G of it less.

    Source: FSDP, arXiv:2304.11277, section 3.2.2.
    """
    return 2 * numel * (num_ranks - 1) / (ranks_per_host * num_ranks)


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What ZeRO++ does to stage 3's collectives.

    Attributes:
        weight_bits: of gathered weights (qwZ).
        copy_in_host: backward gathers from a second copy inside the host (hpZ).
        grad_bits: of gradients on their way (qgZ).
        bits: of what is not compressed.

    Source: ZeRO++, arXiv:2306.10209, section 3.
    """

    weight_bits: float = 16
    copy_in_host: bool = False
    grad_bits: float = 16
    bits: float = 16


HALF_PRECISION = Compression()
ZERO_PLUS_PLUS = Compression(weight_bits=8, copy_in_host=True, grad_bits=4)


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """Bytes between hosts of one step of stage 3, by collective."""

    forward_gather: float
    backward_gather: float
    reduce_scatter: float

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.forward_gather + self.backward_gather + self.reduce_scatter


def cross_host_traffic(model_bytes: float, compression: Compression) -> StepTraffic:
    """Return the bytes between hosts of one step of stage 3, for many ranks.

    Args:
        model_bytes: M, of the parameters without compression.
        compression: bits on the wire.

    Source: ZeRO++, arXiv:2306.10209, section 3 (0.5 M + 0 + 0.25 M in place of 3 M).
    """
    weights = model_bytes * compression.weight_bits / compression.bits
    return StepTraffic(
        forward_gather=weights,
        backward_gather=0 if compression.copy_in_host else weights,
        reduce_scatter=model_bytes * compression.grad_bits / compression.bits,
    )


def traffic_reduction(compression: Compression) -> float:
    """Return how many times less goes between hosts.

    Source: ZeRO++, arXiv:2306.10209, abstract: 4x.
    """
    return cross_host_traffic(1, HALF_PRECISION).total / cross_host_traffic(1, compression).total


def all_to_all_bytes(
    model_bytes: float, *, ranks_per_host: int, compression_ratio: float, hierarchical: bool = True
) -> float:
    """Return the bytes that leave one host when gradients are reduced by all-to-all (qgZ).

    Args:
        model_bytes: M, of the gradients without compression.
        ranks_per_host: N.
        compression_ratio: Z.
        hierarchical: reduced inside the host first, so that its ranks do not each send everything.

    Source: ZeRO++, arXiv:2306.10209, section 3.3: M N / Z for one hop, M / Z for two.
    """
    return model_bytes * (1 if hierarchical else ranks_per_host) / compression_ratio
