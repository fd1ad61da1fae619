"""FLOPs of training a transformer, the time they take, and how much of a device's peak that is.

Pure arithmetic over ``shapes`` and ``recompute``. ``rates.py`` compares measured runs.
"""

from shardwise.planner.recompute import Recompute
from shardwise.planner.shapes import Shape

__all__ = [
    "accumulated_scale",
    "compute_seconds",
    "global_batch",
    "megatron_flops",
    "num_steps",
    "scaled_seconds",
    "train_flops",
    "train_flops_with_attention",
    "training_seconds",
    "utilization",
]


def train_flops(num_params: float, tokens: float, *, recompute: bool = False) -> float:
    """Return the FLOPs of training: 6 per parameter and token, 8 with full recomputation.

    Source: Kaplan et al., arXiv:2001.08361, section 2.1; ZeRO-Infinity, arXiv:2104.07857, Eq. 7 and 8 (2 x 4).
    """
    return (8 if recompute else 6) * num_params * tokens


def train_flops_with_attention(num_params: float, shape: Shape, *, seq: int, tokens: float) -> float:
    """Return the FLOPs of training, scores of attention included: 6 N + 12 L h s per token.

    Args:
        num_params: N, without the token embedding.
        shape: L and h.
        seq: s, tokens of a sample.
        tokens: of all samples.

    Source: PaLM, arXiv:2204.02311, appendix B.
    """
    return (6 * num_params + 12 * shape.num_layers * shape.hidden * seq) * tokens


def megatron_flops(shape: Shape, *, batch: float, seq: int, recompute: Recompute = Recompute.NONE) -> float:
    """Return the FLOPs of one step of a GPT, head included: 72 B s l h^2 (1 + s / 6 h + V / 12 l h).

    Full recomputation makes it 96 (1 + s / 6 h + V / 16 l h); selective doubles the scores' term to s / 3 h.

    Args:
        shape: l, h and V.
        batch: B, samples of a step over all ranks.
        seq: s, tokens.
        recompute: what backward computes again; NONE gives the model's FLOPs, the others the hardware's.

    Source: Narayanan et al., arXiv:2104.04473, Eq. 3; Korthikanti et al., arXiv:2205.05198, appendix A.
    """
    layers, hidden = shape.num_layers, shape.hidden
    passes = 4 if recompute is Recompute.FULL else 3  # a backward is two forwards
    scores = seq / ((3 if recompute is Recompute.SELECTIVE else 6) * hidden)
    head = shape.vocab / (4 * passes * layers * hidden)
    return 24 * passes * batch * seq * layers * hidden**2 * (1 + scores + head)


def utilization(flops: float, seconds: float, *, num_ranks: float = 1, peak_flops: float = 1) -> float:
    """Return the FLOP/s per rank over the peak: MFU for the model's FLOPs, HFU for the hardware's.

    Args:
        flops: of the work on all ranks.
        seconds: that the work took.
        num_ranks: that did it.
        peak_flops: FLOP/s of one device; 1 gives FLOP/s per rank.

    Source: PaLM, arXiv:2204.02311, section 4.1; Korthikanti et al., arXiv:2205.05198, section 6.3.
    """
    return flops / (seconds * num_ranks * peak_flops)


def compute_seconds(flops: float, *, peak_flops: float, utilization: float = 1, num_ranks: float = 1) -> float:
    """Return the time of some work: ``utilization`` solved for the seconds."""
    return flops / (num_ranks * peak_flops * utilization)


def num_steps(tokens: float, *, batch: float, seq: int) -> float:
    """Return the number of steps in which a batch of samples consumes the tokens."""
    return tokens / (batch * seq)


def training_seconds(step_flops: float, steps: float, *, num_ranks: int, flops_per_second: float) -> float:
    """Return the time of a whole training at a rate that was measured.

    Args:
        step_flops: FLOPs of one step over all ranks.
        steps: number of steps.
        num_ranks: that share the work.
        flops_per_second: of one rank.

    Source: Narayanan et al., arXiv:2104.04473, Eq. 4: 8 T P / (n X).
    """
    return compute_seconds(step_flops * steps, peak_flops=flops_per_second, num_ranks=num_ranks)


def scaled_seconds(seconds: float, times_flops: float) -> float:
    """Return the time of a training with that many times the FLOPs at the same rate.

    Source: ZeRO, arXiv:1910.02054, section 9.
    """
    return seconds * times_flops


def global_batch(num_ranks: int, micro_batch: int, accumulation_steps: int = 1) -> int:
    """Return the samples of one optimizer step over all data-parallel ranks.

    Source: CMU 11-868, lecture 18, exercise 11.
    """
    return num_ranks * micro_batch * accumulation_steps


def accumulated_scale(accumulation_steps: int, *, divided_by_hand: bool = False) -> float:
    """Return the scale of an accumulated gradient: 1, or 1 / a if the user divides each loss by their number, too.

    The engine averages over micro-steps already.

    Source: CMU 11-868, lecture 18, exercise 11.
    """
    return 1 / accumulation_steps if divided_by_hand else 1
