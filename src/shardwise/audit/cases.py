"""The configurations of an audit: models, precisions, recomputation, numbers of ranks."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.modules import Units
from shardwise.train.model import recompute_blocks
from shardwise.train.tokens import optional_package

__all__ = ["AuditCase", "Material", "audit_cases", "is_sized", "material", "resident_cases"]

MICRO, LENGTH, VOCAB = 4, 64, 1024
_MODELS = ("gpt", "mlp", "hugging-face")
_LARGE = "large-gpt"


@dataclass(frozen=True, kw_only=True)
class AuditCase:
    """One configuration.

    Attributes:
        model: "gpt", "mlp" or "hugging-face"; "large-gpt" is large enough to see in the resident size.
        stage: ZeRO stage.
        precision: "fp32" or "bf16".
        checkpointing: whether blocks are computed again in backward.
        ranks: number of processes.
    """

    model: str
    stage: int
    precision: str
    checkpointing: bool
    ranks: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """What is trained.

    Attributes:
        make_model: builds the model.
        make_batch: makes a rank's share of a batch.
        loss: of the model on a batch.
        units: as for ``shard``.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    units: Units


def audit_cases(*, quick: bool = False) -> tuple[AuditCase, ...]:
    """Return what is trained under the profiler; ``quick`` takes a few of each kind."""
    return tuple(case for case in _all_cases() if not quick or _is_quick(case))


def resident_cases() -> tuple[AuditCase, ...]:
    """Return what is trained once more without the profiler, to see the resident size grow."""
    return tuple(
        AuditCase(model=_LARGE, stage=stage, precision=precision, checkpointing=False, ranks=2)
        for stage, precision in itertools.product(range(4), ("fp32", "bf16"))
    )


def is_sized(case: AuditCase) -> bool:
    """Whether a case is large enough to see in the resident size."""
    return case.model == _LARGE


def material(case: AuditCase) -> Material:
    """Return what a case trains."""
    if case.model == "mlp":
        return Material(make_model=lambda: _MLP(case.checkpointing), make_batch=_rows, loss=_square, units=_Layer)
    if case.model == "hugging-face":
        return Material(make_model=lambda: _llama(case.checkpointing), make_batch=_tokens, loss=_own_loss, units=None)
    large = is_sized(case)
    shape = GPTConfig(
        vocab=VOCAB,
        context=LENGTH,
        width=768 if large else 256,
        heads=8,
        depth=6 if large else 4,
        recompute=case.checkpointing,
    )
    return Material(make_model=lambda: GPT(shape), make_batch=_tokens, loss=_token_loss, units=Block)


def _all_cases() -> Iterator[AuditCase]:
    for model in _MODELS:
        if model == "hugging-face" and importlib.util.find_spec("transformers") is None:
            continue
        for ranks in (2, 4) if model == "gpt" else (2,):
            for stage, precision, again in itertools.product(range(4), ("fp32", "bf16"), (False, True)):
                yield AuditCase(model=model, stage=stage, precision=precision, checkpointing=again, ranks=ranks)


def _is_quick(case: AuditCase) -> bool:
    kinds = {(0, "bf16", False), (0, "bf16", True), (1, "fp32", True), (2, "fp32", False), (3, "bf16", True)}
    return case.ranks == 2 and (case.stage, case.precision, case.checkpointing) in kinds


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = rows + self.narrow(functional.silu(self.wide(rows)))
        return out


class _MLP(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width=320) for _ in range(5))
        self.head = nn.Linear(320, 10)
        self.recompute = recompute

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.head.weight.dtype)
        for layer in self.layers:
            rows = checkpoint(layer, rows, use_reentrant=False) if self.recompute else layer(rows)
        out: Tensor = self.head(rows)
        return out


def _llama(recompute: bool) -> nn.Module:
    transformers = optional_package("transformers", "the audit's Hugging Face model")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    if recompute:
        recompute_blocks(model)
    built: nn.Module = model
    return built


def _rows() -> Tensor:
    return torch.ones(512, 320)


def _square(model: nn.Module, rows: Tensor) -> Tensor:
    out: Tensor = model(rows).float().square().mean()
    return out


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.zeros(MICRO, LENGTH, dtype=torch.long), torch.zeros(MICRO, LENGTH, dtype=torch.long)


def _token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def _own_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
    return out
