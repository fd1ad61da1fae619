"""Bytes of activations, by the published formulas for a transformer in 16-bit precision.

Arguments are a ``Shape``, the sequence length and the micro-batch of one rank; results are bytes on one rank. Read
``recompute.py`` for what recomputation costs in time.
"""

import math

from shardwise.errors import ConfigError
from shardwise.planner.recompute import Recompute
from shardwise.planner.shapes import Shape

__all__ = [
    "attention_core_ratio",
    "block_bytes",
    "checkpoint_bytes",
    "checkpointed_peak_bytes",
    "layer_bytes",
    "layers_bytes",
    "rule_bytes",
    "rule_checkpointed_bytes",
    "selective_saving",
    "total_bytes",
]


def attention_core_ratio(shape: Shape, *, seq: int) -> float:
    """Return the activations of the core of attention over s b h: 5 a s / h.

    Raises:
        ConfigError: the shape has no number of heads.

    Source: Korthikanti et al., arXiv:2205.05198, Eq. 1.
    """
    return 5 * _heads(shape) * seq / shape.hidden


def layer_bytes(
    shape: Shape,
    *,
    seq: int,
    batch: int,
    recompute: Recompute = Recompute.NONE,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Return the bytes that one layer keeps for backward on one rank.

    Args:
        shape: h and a.
        seq: s, tokens.
        batch: b, samples of a micro-batch.
        recompute: what is not kept.
        tensor_ranks: t, tensor-parallel degree.
        sequence_parallel: norms, dropouts and inputs are cut over the same ranks, full recomputation's inputs too.

    Source: Korthikanti et al., arXiv:2205.05198, Eq. 1 to 4 and Table 2.
    """
    unit = seq * batch * shape.hidden
    if recompute is Recompute.FULL:
        return 2 * unit / (tensor_ranks if sequence_parallel else 1)
    core = 0.0 if recompute is Recompute.SELECTIVE else attention_core_ratio(shape, seq=seq) / tensor_ranks
    outside = 34 / tensor_ranks if sequence_parallel else 10 + 24 / tensor_ranks
    return unit * (outside + core)


def total_bytes(
    shape: Shape,
    *,
    seq: int,
    batch: int,
    recompute: Recompute = Recompute.NONE,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Return the bytes that all layers keep for backward on one rank: ``layer_bytes`` times L."""
    return shape.num_layers * layer_bytes(
        shape,
        seq=seq,
        batch=batch,
        recompute=recompute,
        tensor_ranks=tensor_ranks,
        sequence_parallel=sequence_parallel,
    )


def selective_saving(shape: Shape, *, seq: int) -> float:
    """Return the part of a layer's activations that selective recomputation does not keep.

    Source: Korthikanti et al., arXiv:2205.05198, section 5: (5 a s / h) / (34 + 5 a s / h).
    """
    core = attention_core_ratio(shape, seq=seq)
    return core / (34 + core)


def layers_bytes(num_layers: float, bytes_per_layer: float, *, partition_ranks: int = 1) -> float:
    """Return the bytes of the inputs of layers, cut over tensor-parallel ranks that hold the same (P_a).

    Source: ZeRO, arXiv:1910.02054, section 6.1.
    """
    return num_layers * bytes_per_layer / partition_ranks


def checkpoint_bytes(shape: Shape, *, seq: int, batch: int, interval: float = 1, partition_ranks: int = 1) -> float:
    """Return the bytes of the checkpoints alone: the input of every ``interval``-th block.

    Args:
        shape: h and L.
        seq: tokens.
        batch: samples on the ranks that are asked for: one rank's, or one host's.
        interval: blocks between two checkpoints, ci.
        partition_ranks: P_a: tensor-parallel ranks over which each checkpoint is cut.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 3: 2 bsz seq hd nl / ci.
    """
    one = layer_bytes(shape, seq=seq, batch=batch, recompute=Recompute.FULL)
    return layers_bytes(shape.num_layers / interval, one, partition_ranks=partition_ranks)


def checkpointed_peak_bytes(
    shape: Shape,
    *,
    seq: int,
    batch: int,
    interval: float = 1,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
    partition_ranks: int = 1,
) -> float:
    """Return the peak bytes with full recomputation: all checkpoints, and the layers between two of them.

    Args:
        shape: h, a and L.
        seq: tokens.
        batch: samples of a micro-batch.
        interval: blocks between two checkpoints, k.
        tensor_ranks: tensor-parallel degree.
        sequence_parallel: see ``layer_bytes``.
        partition_ranks: P_a: tensor-parallel ranks over which each checkpoint is cut.

    Source: Chen et al., arXiv:1604.06174 (n / k + k), with the bytes of Korthikanti et al., arXiv:2205.05198.
    """
    layer = layer_bytes(shape, seq=seq, batch=batch, tensor_ranks=tensor_ranks, sequence_parallel=sequence_parallel)
    kept = checkpoint_bytes(shape, seq=seq, batch=batch, interval=interval, partition_ranks=partition_ranks)
    return kept + interval * layer


def rule_bytes(shape: Shape, *, seq: int, batch: int) -> float:
    """Return the bytes by ZeRO's rule of thumb: 12 h b s L elements of 2 bytes.

    Source: ZeRO, arXiv:1910.02054, section 3.2, footnote.
    """
    return 2 * 12 * shape.hidden * batch * seq * shape.num_layers


def rule_checkpointed_bytes(shape: Shape, *, seq: int, batch: int) -> float:
    """Return what checkpointing leaves of ``rule_bytes``: one in sqrt(L).

    Source: ZeRO, arXiv:1910.02054, section 3.2.
    """
    return rule_bytes(shape, seq=seq, batch=batch) / math.sqrt(shape.num_layers)


def block_bytes(shape: Shape, *, seq: int, batch: float, num_blocks: float = 1) -> float:
    """Return the bytes of all activations of blocks: of ``ci`` between two checkpoints, or of all.

    Args:
        shape: hd and heads.
        seq: tokens.
        batch: samples on one rank; of a host, the result is the host's.
        num_blocks: ci, blocks that are live together.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 5, elements of 2 bytes: bsz seq ci (16 hd + 2 heads seq).
    """
    return 2 * batch * seq * num_blocks * (16 * shape.hidden + 2 * _heads(shape) * seq)


def _heads(shape: Shape) -> int:
    if not shape.num_heads:
        raise ConfigError(f"activations: the number of attention heads is needed, but is not known of {shape}")
    return shape.num_heads
