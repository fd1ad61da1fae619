"""A plain GPT: pre-norm blocks, learned positions, causal attention, GELU feed-forward.

Owns ``GPTConfig``, ``Block``, ``GPT`` and ``loss``. It imports torch and errors only, and knows nothing of sharding:
the demo shards it from outside, with ``Block`` as the unit. Read ``data.py`` next: it makes the tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError

__all__ = ["GPT", "Block", "GPTConfig", "loss"]

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a ``GPT``. The defaults have about 1.3 million parameters and read bytes.

    Attributes:
        vocab: number of distinct tokens.
        context: longest sequence, in tokens.
        width: length of the vector that stands for a token.
        heads: number of attention heads; divides ``width``.
        depth: number of blocks.
        tied: whether the head reuses the token embedding's weight.
        recompute: keep only the input of each block for backward (activation checkpointing).
    """

    vocab: int = 256
    context: int = 128
    width: int = 128
    heads: int = 4
    depth: int = 6
    tied: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab", "context", "width", "heads", "depth"):
            if getattr(self, field) < 1:
                raise ConfigError(f"GPTConfig: {field} must be at least 1, got {getattr(self, field)}")
        if self.width % self.heads:
            raise ConfigError(f"GPTConfig: heads must divide width, got width={self.width} and heads={self.heads}")


class Attention(nn.Module):
    """Causal self-attention with ``heads`` heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each token with the tokens before it.

        Args:
            x: [batch, length, width].

        Returns:
            [batch, length, width].
        """
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a feed-forward network four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the feed-forward network find.

        Args:
            x: [batch, length, width].

        Returns:
            [batch, length, width].
        """
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class GPT(nn.Module):
    """A decoder-only language model.

    Args:
        config: shape of the model.
        generator: CPU generator of the initial weights; None: a new one with seed 0. Equal generators give equal
            weights on every device. On the meta device nothing is drawn; inside ``shardwise.deferred_init`` it is
            remembered what to draw.
    """

    def __init__(self, config: GPTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
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
            raise ConfigError(f"GPT: got {length} tokens, but the context is {self.config.context}: cut the sequence")
        positions = torch.arange(length, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        recomputes = self.config.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Draw matrices from N(0, 0.02), zero biases; norms keep torch's ones and zeros.

        The last matrix of each residual branch is smaller by sqrt(2 * depth), so that the sum of all branches starts
        at the same scale for every depth. Source: GPT-2 (Radford et al. 2019), section 2.3.
        """
        branch_std = INIT_STD / math.sqrt(2 * self.config.depth)
        for name, param in self.named_parameters():
            if param.is_meta:
                continue
            if param.dim() == 2:
                std = branch_std if name.endswith(("attention.out.weight", "mlp.2.weight")) else INIT_STD
                drawn = torch.empty(param.shape, dtype=torch.float32, device="cpu")
                param.copy_(drawn.normal_(std=std, generator=generator))
            elif name.endswith("bias"):
                param.zero_()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token.

    Args:
        logits: [batch, length, vocab].
        targets: [batch, length], int64: the token that follows each input token.

    Returns:
        A scalar, of the logits' dtype.
    """
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
