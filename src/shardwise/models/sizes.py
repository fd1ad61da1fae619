"""Sizes of the built-in GPT by name, a fixed table."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.models.gpt import GPTConfig

__all__ = ["GPT_SIZES", "GPTSize"]


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """A shape, and settings that suit it.

    Attributes:
        width: length of the vector that stands for a token.
        heads: number of attention heads.
        depth: number of blocks.
        context: longest sequence, in tokens.
        tied: whether the head reuses the token embedding's weight.
        lr: peak learning rate of AdamW.
        micro: samples per forward on one rank.
    """

    width: int
    heads: int
    depth: int
    context: int
    tied: bool
    lr: float
    micro: int

    def config(self, *, vocab: int, context: int | None = None) -> GPTConfig:
        """Return the model's configuration for a vocabulary, and for a context if it is not the size's own."""
        return GPTConfig(
            vocab=vocab,
            context=context or self.context,
            width=self.width,
            heads=self.heads,
            depth=self.depth,
            tied=self.tied,
        )


# Two for bytes that train on a few cores. Shapes of GPT-2: Radford et al. 2019, table 2. Their rates: Brown et al.,
# arXiv:2005.14165, table 2.1, for models as large.
GPT_SIZES: Mapping[str, GPTSize] = MappingProxyType(
    {
        "gpt-nano": GPTSize(width=64, heads=2, depth=2, context=64, tied=False, lr=5e-3, micro=8),
        "gpt-mini": GPTSize(width=192, heads=6, depth=4, context=128, tied=False, lr=3e-3, micro=8),
        "gpt2": GPTSize(width=768, heads=12, depth=12, context=1024, tied=True, lr=6e-4, micro=1),
        "gpt2-medium": GPTSize(width=1024, heads=16, depth=24, context=1024, tied=True, lr=3e-4, micro=1),
        "gpt2-large": GPTSize(width=1280, heads=20, depth=36, context=1024, tied=True, lr=2.5e-4, micro=1),
        "gpt2-xl": GPTSize(width=1600, heads=25, depth=48, context=1024, tied=True, lr=2e-4, micro=1),
    }
)
