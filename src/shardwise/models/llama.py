"""A plain LLaMA: pre-norm blocks, rotary positions, grouped causal attention, a gated feed-forward, no biases.

Owns ``LlamaConfig``, ``LlamaBlock`` and ``Llama``. Like ``gpt.py`` it imports torch and errors only, and knows nothing
of sharding.
Source: LLaMA, arXiv:2302.13971; grouped queries: Llama 2, arXiv:2307.09288; rotary positions: arXiv:2104.09864.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError

__all__ = ["Llama", "LlamaBlock", "LlamaConfig"]

INIT_STD = 0.02
NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a ``Llama``.

    Attributes:
        vocab: number of distinct tokens.
        context: longest sequence, in tokens.
        width: length of the vector that stands for a token.
        hidden: width inside the feed-forward network.
        heads: number of attention heads; divides ``width`` into even parts.
        kv_heads: number of heads of keys and values; divides ``heads``.
        depth: number of blocks.
        base: of the rotary positions' wave lengths.
        recompute: keep only the input of each block for backward (activation checkpointing).
    """

    vocab: int
    context: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    depth: int
    base: float = 10_000.0
    recompute: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab", "context", "width", "hidden", "heads", "kv_heads", "depth"):
            if getattr(self, field) < 1:
                raise ConfigError(f"LlamaConfig: {field} must be at least 1, got {getattr(self, field)}")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(f"LlamaConfig: need width / heads even and heads a multiple of kv_heads, got {self}")


class LlamaAttention(nn.Module):
    """Causal self-attention in which groups of heads share keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Mix each token with the tokens before it.

        Args:
            x: [batch, length, width].
            turns: [2, length, head width / 2]: cosines and sines of the positions.

        Returns:
            [batch, length, width].
        """
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )  # each [batch, its heads, length, head width]
        sharing = query.shape[1] // key.shape[1]
        if sharing > 1:
            key, value = (part.repeat_interleave(sharing, dim=1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(_turn(query, turns), _turn(key, turns), value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class LlamaMLP(nn.Module):
    """A feed-forward network with a gate (SwiGLU)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width] for the same."""
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class LlamaBlock(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Add what attention and the feed-forward network find; shapes as ``LlamaAttention.forward``."""
        x = x + self.attention(self.attention_norm(x), turns)
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Llama(nn.Module):
    """A decoder-only language model.

    Args:
        config: shape of the model.
        generator: as for ``GPT``.
    """

    def __init__(self, config: LlamaConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self._initialize(generator or torch.Generator().manual_seed(0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token after each token.

        Args:
            tokens: [batch, length], int64, length at most ``config.context``.

        Returns:
            Logits [batch, length, vocab], of the parameters' dtype.

        Raises:
            ConfigError: the sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ConfigError(f"Llama: got {length} tokens, but the context is {self.config.context}: cut the sequence")
        x = self.token_embedding(tokens)
        turns = self._turns(length, x)
        recomputes = self.config.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, turns, use_reentrant=False) if recomputes else block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _turns(self, length: int, like: Tensor) -> Tensor:
        """Return the cosines and sines of positions, computed in fp32, in the dtype and on the device of ``like``."""
        half = self.config.width // self.config.heads // 2
        exponents = torch.arange(half, device=like.device, dtype=torch.float32) / half
        angles = torch.outer(torch.arange(length, device=like.device).float(), self.config.base**-exponents)
        return torch.stack((angles.cos(), angles.sin())).to(like.dtype)

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Draw matrices from N(0, 0.02), those at the end of a residual branch smaller by sqrt(2 * depth)."""
        branch_std = INIT_STD / math.sqrt(2 * self.config.depth)
        for name, param in self.named_parameters():
            if param.dim() == 2 and not param.is_meta:
                std = branch_std if name.endswith(("attention.out.weight", "mlp.down.weight")) else INIT_STD
                drawn = torch.empty(param.shape, dtype=torch.float32, device="cpu")
                param.copy_(drawn.normal_(std=std, generator=generator))


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of elements (i, i + half) by its position's angle."""
    (cos, sin), (first, second) = turns, x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
