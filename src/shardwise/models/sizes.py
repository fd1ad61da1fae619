"""Models that go by a name: shapes of the planner's table, built as a ``GPT`` or a ``Llama``."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.models.llama import Llama, LlamaBlock, LlamaConfig
from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import Shape

__all__ = ["MAIN_SIZES", "SIZES", "Size"]

GPT2_VOCAB = 50257


@dataclass(frozen=True, kw_only=True)
class Size:
    """A shape, and settings that suit it.

    Attributes:
        shape: of the model; a gated one is a ``Llama``, others are a ``GPT``.
        context: longest sequence, in tokens.
        lr: peak learning rate of AdamW.
        micro: samples per forward on one rank.
        base: of rotary positions.
    """

    shape: Shape
    context: int
    lr: float = 1e-4
    micro: int = 1
    base: float = 10_000.0

    @property
    def vocab(self) -> int:
        """Tokens of the published model; GPT-2's where its source does not say."""
        return self.shape.vocab or GPT2_VOCAB

    @property
    def heads(self) -> int:
        """Attention heads; where the source does not say, of 128 elements each, or 64."""
        hidden = self.shape.hidden
        return self.shape.num_heads or hidden // (128 if hidden % 128 == 0 else 64)

    @property
    def units(self) -> type[nn.Module]:
        """What to shard by."""
        return LlamaBlock if self.shape.gated else Block

    def build(
        self,
        *,
        vocab: int,
        context: int | None = None,
        depth: int | None = None,
        recompute: bool = False,
        generator: torch.Generator | None = None,
    ) -> nn.Module:
        """Return the model.

        Args:
            vocab: number of distinct tokens.
            context: longest sequence, in tokens; None: the size's own.
            depth: number of blocks; None: the shape's.
            recompute: see ``GPTConfig``.
            generator: see ``GPT``.
        """
        shape = self.shape
        context, depth = context or self.context, depth or shape.num_layers
        if not shape.gated:
            config = GPTConfig(
                vocab=vocab,
                context=context,
                width=shape.hidden,
                heads=self.heads,
                depth=depth,
                tied=shape.tied,
                recompute=recompute,
            )
            return GPT(config, generator=generator)
        gated = LlamaConfig(
            vocab=vocab,
            context=context,
            width=shape.hidden,
            hidden=shape.ffn_hidden,
            heads=self.heads,
            kv_heads=shape.num_kv_heads or self.heads,
            depth=depth,
            base=self.base,
            recompute=recompute,
        )
        return Llama(gated, generator=generator)


# Two for bytes that train on a few cores. Rates: Brown et al., arXiv:2005.14165, table 2.1, for models as large;
# LLaMA 2, arXiv:2307.09288, section 2.2; Llama 3, arXiv:2407.21783, tables 3 and 6.
_KNOWN: Mapping[str, Size] = MappingProxyType(
    {
        "gpt-nano": Size(
            shape=Shape(num_layers=2, hidden=64, num_heads=2, vocab=256, positions=64, tied=False),
            context=64,
            lr=5e-3,
            micro=8,
        ),
        "gpt-mini": Size(
            shape=Shape(num_layers=4, hidden=192, num_heads=6, vocab=256, positions=128, tied=False),
            context=128,
            lr=3e-3,
            micro=8,
        ),
        "gpt2": Size(shape=SHAPES["gpt2"], context=1024, lr=6e-4),
        "gpt2-medium": Size(shape=SHAPES["gpt2-medium"], context=1024, lr=3e-4),
        "gpt2-large": Size(shape=SHAPES["gpt2-large"], context=1024, lr=2.5e-4),
        "gpt2-xl": Size(shape=SHAPES["gpt2-xl"], context=1024, lr=2e-4),
        "gpt3-175b": Size(shape=SHAPES["gpt3-175b"], context=2048, lr=6e-5),
        "llama-2-7b": Size(shape=SHAPES["llama-2-7b"], context=4096, lr=3e-4),
        "llama-2-13b": Size(shape=SHAPES["llama-2-13b"], context=4096, lr=3e-4),
        "llama-2-70b": Size(shape=SHAPES["llama-2-70b"], context=4096, lr=1.5e-4),
        "llama-3-8b": Size(shape=SHAPES["llama-3-8b"], context=8192, lr=3e-4, base=500_000.0),
        "llama-3-70b": Size(shape=SHAPES["llama-3-70b"], context=8192, lr=1.5e-4, base=500_000.0),
        "llama-3-405b": Size(shape=SHAPES["llama-3-405b"], context=8192, lr=8e-5, base=500_000.0),
    }
)
MAIN_SIZES = tuple(_KNOWN)
# Shapes of experiments in papers too. BERT is no decoder.
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        **{
            name: Size(shape=shape, context=shape.positions or 1024)
            for name, shape in SHAPES.items()
            if name not in _KNOWN and not name.startswith("bert")
        },
        **_KNOWN,
    }
)
