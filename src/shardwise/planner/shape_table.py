"""Published shapes by name: ``SHAPES["llama-3-8b"]``. A table; the counting is in ``shapes.py``.

The shapes of experiments are named after paper, printed label, layers and hidden size: ``zero-100b-125x8192``.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from shardwise.planner.shapes import Shape

__all__ = ["SHAPES"]


def _gpt(num_layers: int, hidden: int, num_heads: int, *, vocab: int = 50257, positions: int = 1024) -> Shape:
    return Shape(num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab=vocab, positions=positions)


def _llama(num_layers: int, hidden: int, num_heads: int, ffn: int, *, kv_heads: int = 0, vocab: int = 32000) -> Shape:
    return Shape(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        tied=False,
        bias=False,
    )


# Radford et al. 2019, table 2; Brown et al., arXiv:2005.14165, table 2.1; Devlin et al., arXiv:1810.04805 (token types
# and the pooler left out); LLaMA 2, arXiv:2307.09288; Llama 3, arXiv:2407.21783, table 3.
_MODELS = (
    ("gpt2", _gpt(12, 768, 12)),
    ("gpt2-medium", _gpt(24, 1024, 16)),
    ("gpt2-large", _gpt(36, 1280, 20)),
    ("gpt2-xl", _gpt(48, 1600, 25)),
    ("gpt3-175b", _gpt(96, 12288, 96, positions=2048)),
    ("bert-large", _gpt(24, 1024, 16, vocab=30522, positions=512)),
    ("llama-2-7b", _llama(32, 4096, 32, 11008)),
    ("llama-2-13b", _llama(40, 5120, 40, 13824)),
    ("llama-2-70b", _llama(80, 8192, 64, 28672, kv_heads=8)),
    ("llama-3-8b", _llama(32, 4096, 32, 14336, kv_heads=8, vocab=128256)),
    ("llama-3-70b", _llama(80, 8192, 64, 28672, kv_heads=8, vocab=128256)),
    ("llama-3-405b", _llama(126, 16384, 128, 53248, kv_heads=8, vocab=128256)),
)

# Layers and hidden size, where the source says no more than what 12 l h^2 needs.
_PLAIN = (
    # ZeRO, arXiv:1910.02054, tables 4 to 10; its table 4 prints hidden 4096 for 88 and 132 layers, table 5 has 6144.
    (
        "zero",
        "1.16b 24x1920, 1.38b 40x1536, 1.5b 34x1920, 1.5b 48x1600, 2.5b 54x1920, 4b 64x2304, 6b 52x3072, "
        "8b 72x3072, 10b 50x4096, 11b 54x4096, 12b 58x4096, 13b 62x4096, 40b 50x8192, 40b 88x6144, 50b 62x8192, "
        "60b 75x8192, 60b 132x6144, 80b 100x8192, 100b 125x8192, 120b 150x8192, 140b 175x8192, "
        "150b 187x8192, 170b 212x8192",
    ),
    # ZeRO-Offload, arXiv:2101.06840, table 3
    (
        "zero-offload",
        "1b 20x2048, 2b 40x2048, 4b 64x2304, 6b 53x3072, 8b 72x3072, 10b 50x4096, 11b 55x4096, "
        "12b 60x4096, 13b 65x4096, 15b 78x4096, 20b 25x8192, 40b 50x8192, 60b 75x8192, 70b 69x9216",
    ),
    # ZeRO-Infinity, arXiv:2104.07857, tables 1, 4 and 6; its 70b is a shape of 100b
    (
        "zero-infinity",
        "8b 10x8192, 10b 50x4096, 13b 64x4096, 20b 98x4096, 50b 62x8192, 70b 125x8192, 100b 125x8192, "
        "0.5t 124x18432, 1t 128x25600, 5t 174x49152, 10t 200x65536, 20t 205x90112",
    ),
)
# With heads: layers, hidden, heads.
_WITH_HEADS = (
    # ZeRO-Infinity, figure 2(a)
    (
        "zero-infinity-memory",
        "0.1t 80x10240x128, 0.5t 100x20480x160, 1t 128x25600x256, 10t 195x65536x512, 100t 315x163840x1024",
    ),
    # DeepSpeed post of 2022-07-26 on Azure, table 2
    ("azure", "175b 96x12288x96, 530b 105x20480x128, 1t 128x25600x160, 2t 160x32768x128"),
)
# The same with vocab 51200 and 2048 positions.
_MEGATRON = (
    # Narayanan et al., arXiv:2104.04473, table 1
    (
        "megatron",
        "1.7b 24x2304x24, 3.6b 30x3072x32, 7.5b 36x4096x32, 18.4b 40x6144x48, 39.1b 48x8192x64, "
        "76.1b 60x10240x80, 145.6b 80x12288x96, 310.1b 96x16384x128, 529.6b 105x20480x128, 1008.0b 128x25600x160",
    ),
    # Korthikanti et al., arXiv:2205.05198, table 3
    ("korthikanti", "22b 48x6144x64, 175b 96x12288x96, 530b 105x20480x128, 1t 128x25600x160"),
)


def _published() -> Iterator[tuple[str, Shape]]:
    for table, vocab, positions in ((_PLAIN, 0, 0), (_WITH_HEADS, 0, 0), (_MEGATRON, 51200, 2048)):
        for paper, rows in table:
            for row in rows.split(", "):
                label, sizes = row.split()
                num_layers, hidden, *heads = (int(size) for size in sizes.split("x"))
                num_heads = heads[0] if heads else 0
                shape = _gpt(num_layers, hidden, num_heads, vocab=vocab, positions=positions)
                yield f"{paper}-{label}-{num_layers}x{hidden}", shape


SHAPES: Mapping[str, Shape] = MappingProxyType({**dict(_MODELS), **dict(_published())})
