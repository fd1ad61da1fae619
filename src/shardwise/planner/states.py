"""Bytes of parameters, gradients and optimizer state per rank, and the questions turned round.

An ``Accounting`` says what a parameter costs, ``Ways`` over how many ranks it is divided. ``memory.py`` has the same
bytes for a concrete model, padding included; these are for a number of parameters. Read ``finetune.py`` next.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from shardwise.errors import ConfigError
from shardwise.planner.ways import Ways
from shardwise.sharding import Sharding

__all__ = [
    "ACCOUNTINGS",
    "BOTH_GRADIENTS",
    "FLOAT_GRADIENTS",
    "HALF_GRADIENTS",
    "SINGLE_PRECISION",
    "Accounting",
    "StateBytes",
    "bytes_per_param",
    "fewest_ranks",
    "largest_model",
    "memory_reduction",
    "peak_param_bytes",
    "state_bytes",
    "weight_bytes",
]


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Bytes of each model state per parameter.

    Attributes:
        param: parameters that forward and backward use; cut like P.
        grad: gradients that rest from backward to the step; cut like G.
        master: parameters that the optimizer updates, where they are not ``param``; cut like O.
        optim: the optimizer's own state; cut like O.
        master_grad: a second gradient, in the master's dtype, that the optimizer reads; cut like O.

    Source: ZeRO, arXiv:1910.02054, section 3.1; its K is ``master + optim + master_grad``.
    """

    param: float = 2
    grad: float = 2
    master: float = 4
    optim: float = 8
    master_grad: float = 0

    @property
    def optimizer(self) -> float:
        """Bytes per parameter that are cut like the optimizer state: K of the ZeRO paper."""
        return self.master + self.optim + self.master_grad

    @property
    def total(self) -> float:
        """Bytes per parameter where nothing is cut."""
        return self.param + self.grad + self.optimizer

    @property
    def optimizer_share(self) -> float:
        """Part of all bytes that is cut like the optimizer state."""
        return self.optimizer / self.total

    def with_optimizer(self, state_words: float, *, bytes_per_word: float = 4) -> "Accounting":
        """Return this accounting with another optimizer: ``optimizers.py`` has the words."""
        return replace(self, optim=state_words * bytes_per_word)


# ZeRO, section 3.1; ZeRO-Offload, arXiv:2101.06840, section 2: 2 + 2 + 4 + 4 + 4.
HALF_GRADIENTS = Accounting()
# Gradients rest and accumulate in fp32, and the optimizer reads those: 2 + 4 + 4 + 4 + 4.
FLOAT_GRADIENTS = Accounting(grad=4)
# ZeRO-Infinity, arXiv:2104.07857, section 3; CMU 11-868, lecture 18, section 1.2: 2 + 2 + 4 + 4 + 4 + 4.
BOTH_GRADIENTS = Accounting(master_grad=4)
# No half precision: the parameters are the masters, 4 + 4 + 4 + 4.
SINGLE_PRECISION = Accounting(param=4, grad=4, master=0)
ACCOUNTINGS: Mapping[str, Accounting] = MappingProxyType(
    {
        "half-gradients": HALF_GRADIENTS,
        "float-gradients": FLOAT_GRADIENTS,
        "both-gradients": BOTH_GRADIENTS,
        "single-precision": SINGLE_PRECISION,
    }
)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one rank, by the kinds of ``Accounting``; ``param_copy`` is a second copy of parameters (hpZ)."""

    param: float
    grad: float
    master: float
    optim: float
    master_grad: float
    param_copy: float = 0

    @property
    def optimizer(self) -> float:
        """Bytes that are cut like the optimizer state."""
        return self.master + self.optim + self.master_grad

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return math.fsum(getattr(self, field.name) for field in fields(self))


def state_bytes(
    num_params: float, accounting: Accounting, ways: Ways, *, copy_ways: float = math.inf, num_model_ranks: int = 1
) -> StateBytes:
    """Return the bytes of the model states on one rank.

    Args:
        num_params: Psi, of the whole model.
        accounting: bytes per parameter.
        ways: slices of each state. Hybrid sharding and MiCS are fewer slices than data-parallel ranks.
        copy_ways: hpZ: number of ranks, those of a host, over which a second copy of the parameters is cut.
        num_model_ranks: tensor-parallel times pipeline-parallel degree, N_m.

    Source: ZeRO, arXiv:1910.02054, Figure 1 and section 5; hpZ: ZeRO++, arXiv:2306.10209, section 3.2.
    """
    local = num_params / num_model_ranks
    return StateBytes(
        param=accounting.param * local / ways.param,
        grad=accounting.grad * local / ways.grad,
        master=accounting.master * local / ways.optim,
        optim=accounting.optim * local / ways.optim,
        master_grad=accounting.master_grad * local / ways.optim,
        param_copy=accounting.param * local / copy_ways,
    )


def largest_model(memory_bytes: float, accounting: Accounting, ways: Ways, *, num_model_ranks: int = 1) -> float:
    """Return the number of parameters whose states fill the memory of every rank.

    Args:
        memory_bytes: per rank, for the states alone.
        accounting: bytes per parameter.
        ways: slices of each state.
        num_model_ranks: tensor-parallel times pipeline-parallel degree, N_m.

    Source: ZeRO, arXiv:1910.02054, Table 2 (theoretical).
    """
    return memory_bytes / state_bytes(1, accounting, ways, num_model_ranks=num_model_ranks).total


def fewest_ranks(num_params: float, memory_bytes: float, accounting: Accounting, sharding: Sharding) -> int | None:
    """Return the least number of data-parallel ranks on which the states fit; None if no number is enough.

    Source: solves the sums of ``state_bytes`` for N_d.
    """
    fixed = state_bytes(num_params, accounting, Ways.over(sharding)).total
    whole = accounting.total * num_params
    if whole <= memory_bytes:
        return 1
    return None if fixed >= memory_bytes else math.ceil((whole - fixed) / (memory_bytes - fixed))


def memory_reduction(accounting: Accounting, ways: Ways) -> float:
    """Return how many times less a rank holds than with everything replicated.

    Source: ZeRO, arXiv:1910.02054, section 5: 4x, 8x and N_d for many ranks.
    """
    return accounting.total / state_bytes(1, accounting, ways).total


def peak_param_bytes(
    num_params: float, ways: Ways, *, largest_unit: float, rest_bytes: float = 4, gathered_bytes: float = 2
) -> float:
    """Return the peak bytes of parameters on one rank: all shards, and one unit gathered.

    Args:
        num_params: of the whole model.
        ways: slices of each state.
        largest_unit: parameters of the largest unit.
        rest_bytes: per parameter of a shard at rest (K_full).
        gathered_bytes: per parameter of a gathered unit (K_low).

    Source: FSDP, arXiv:2304.11277, section 4.4: K_full Psi / F + K_low max psi_i.
    """
    return rest_bytes * num_params / ways.param + gathered_bytes * largest_unit


def weight_bytes(num_params: float, *, bits: float = 16, group: int = 0, scale_bits: int = 32) -> float:
    """Return the bytes of weights alone, quantized or not.

    Args:
        num_params: number of weights.
        bits: per weight.
        group: number of weights that share one scale; 0 for no scales.
        scale_bits: per scale.

    Source: QLoRA, arXiv:2305.14314, section 2 (block-wise quantization).
    """
    if group < 0:
        raise ConfigError(f"weight_bytes: group must be 0 (no scales) or the number of weights per scale, got {group}")
    num_scales = math.ceil(num_params / group) if group else 0
    return (num_params * bits + num_scales * scale_bits) / 8


def bytes_per_param(total_bytes: float, num_params: float) -> float:
    """Return the bytes per parameter of a file or a memory, to be compared with an accounting.

    Source: Narayanan et al., arXiv:2104.04473, section 5.10 (a checkpoint of 13.8 TB).
    """
    return total_bytes / num_params
