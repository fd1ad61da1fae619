"""The shape of a transformer, and how many parameters it has.

Pure counting. ``shape_table.py`` has published shapes by name; ``activations.py`` and ``compute.py`` read shapes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from shardwise.errors import ConfigError

__all__ = ["ParamCounts", "Shape", "block_params", "count_params", "megatron_params", "mlp_params", "mlp_tensors"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a decoder's numbers follow from. The defaults are GPT-2's; LLaMA is gated, untied, without biases.

    Attributes:
        num_layers: number of blocks.
        hidden: length of the vector that stands for a token, h.
        num_heads: attention heads, a; 0 where a source does not say.
        num_kv_heads: heads of keys and values; 0: as many as ``num_heads``.
        ffn: width inside the MLP; 0: 4 h.
        vocab: tokens, V; 0 leaves the embedding out.
        positions: learned position vectors; 0: none (rotary).
        gated: the MLP has three matrices, not two.
        tied: the head reuses the embedding's weight.
        bias: linear layers and norms have biases.

    Raises:
        ConfigError: a number is not positive, or heads do not divide.
    """

    num_layers: int
    hidden: int
    num_heads: int = 0
    num_kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    positions: int = 0
    gated: bool = False
    tied: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.hidden < 1:
            raise ConfigError(f"shape: num_layers and hidden must be at least 1, got {self}")
        heads_divide = self.num_heads == 0 or (self.num_heads > 0 and self.hidden % self.num_heads == 0)
        groups_divide = self.num_kv_heads == 0 or 0 < self.num_kv_heads <= self.num_heads
        if not heads_divide or not groups_divide or (self.num_kv_heads and self.num_heads % self.num_kv_heads):
            raise ConfigError(f"shape: num_heads must divide hidden, and num_kv_heads num_heads, got {self}")

    @property
    def kv_hidden(self) -> int:
        """Elements of all keys, or values, of a token."""
        return self.hidden * self.num_kv_heads // self.num_heads if self.num_kv_heads else self.hidden

    @property
    def ffn_hidden(self) -> int:
        """Width inside the MLP."""
        return self.ffn or 4 * self.hidden


@dataclass(frozen=True, kw_only=True)
class ParamCounts:
    """Parameters of a whole model by what they are; ``norms`` has their biases, ``biases`` those of linear layers."""

    attention: int
    mlp: int
    norms: int
    biases: int
    embedding: int
    positions: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def matrices(self) -> int:
        """Weights of matrices alone, embedding and head included."""
        return self.attention + self.mlp + self.embedding + self.head

    @property
    def without_embedding(self) -> int:
        """All but the token embedding: what takes 6 FLOPs per parameter and token when the head is its own."""
        return self.total - self.embedding


def count_params(shape: Shape) -> ParamCounts:
    """Count the parameters of a decoder: attention, MLP, two norms per layer, a last norm, embedding, head.

    Source: Radford et al. 2019 (GPT-2); LLaMA 2, arXiv:2307.09288; Llama 3, arXiv:2407.21783.
    """
    layers, hidden, kv, ffn = shape.num_layers, shape.hidden, shape.kv_hidden, shape.ffn_hidden
    num_wide = 2 if shape.gated else 1
    layer_biases = 2 * hidden + 2 * kv + num_wide * ffn + hidden
    return ParamCounts(
        attention=layers * (2 * hidden**2 + 2 * hidden * kv),
        mlp=layers * (num_wide + 1) * hidden * ffn,
        norms=(2 * layers + 1) * hidden * (2 if shape.bias else 1),
        biases=layers * layer_biases if shape.bias else 0,
        embedding=shape.vocab * hidden,
        positions=shape.positions * hidden,
        head=0 if shape.tied else shape.vocab * hidden,
    )


def block_params(shape: Shape) -> int:
    """Return the weights of the blocks' matrices by the rule of thumb, 12 l h^2.

    Source: ZeRO-Infinity, arXiv:2104.07857, Eq. 1.
    """
    return 12 * shape.num_layers * shape.hidden**2


def megatron_params(shape: Shape) -> float:
    """Return the parameters as Megatron counts them: the last norm is left out.

    Source: Narayanan et al., arXiv:2104.04473, Eq. 2: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h).
    """
    layers, hidden = shape.num_layers, shape.hidden
    embedding = (shape.vocab + shape.positions) / (12 * layers * hidden)
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + embedding)


def mlp_tensors(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the elements of each tensor of a chain of linear layers: a weight and a bias per layer, in order."""
    return tuple(numel for fan_in, fan_out in itertools.pairwise(widths) for numel in (fan_in * fan_out, fan_out))


def mlp_params(widths: Sequence[int]) -> int:
    """Return the parameters of a chain of linear layers with biases; two widths are one layer."""
    return sum(mlp_tensors(widths))
