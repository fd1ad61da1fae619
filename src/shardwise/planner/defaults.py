"""Settings that other engines start from, so that a plan for them needs none: numbers only.

Source: DeepSpeed, runtime/zero/config.py, partition_parameters.py and coalesced_collectives.py.
"""

from dataclasses import dataclass

__all__ = ["BUCKET_DEFAULTS", "QUANTIZATION_DEFAULTS", "BucketDefaults", "QuantizationDefaults"]


@dataclass(frozen=True, kw_only=True)
class BucketDefaults:
    """DeepSpeed's defaults, in elements; ``zero_hpz_partition_size`` in ranks."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    zero_hpz_partition_size: int = 1


@dataclass(frozen=True, kw_only=True)
class QuantizationDefaults:
    """ZeRO++'s quantization in DeepSpeed, symmetric: bits per element, and weights that share a scale."""

    weight_bits: int = 8
    weight_group: int = 8000
    largest_weight_group: int = 16000
    grad_bits: int = 4


BUCKET_DEFAULTS = BucketDefaults()
QUANTIZATION_DEFAULTS = QuantizationDefaults()
