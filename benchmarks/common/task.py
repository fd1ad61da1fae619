"""The work that every system does alike: one GPT of a few sizes, fixed seeds, fixed batches per rank.

A ``Task`` says what one group of processes runs; it crosses to them as JSON.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.data import batch, load_stdlib
from shardwise.models.gpt import GPT, GPTConfig

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01
HELD_OUT = 16  # windows per rank that measure the held-out loss
_POOL = 4  # batches per rank, taken in turn


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of a model and of what one rank feeds it."""

    depth: int
    width: int
    heads: int
    vocab: int
    batch: int
    length: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(depth=2, width=64, heads=2, vocab=512, batch=2, length=32),
    "10M": Size(depth=8, width=256, heads=4, vocab=8192, batch=2, length=128),
    "53M": Size(depth=14, width=512, heads=8, vocab=8192, batch=1, length=128),
    "text": Size(depth=8, width=256, heads=4, vocab=256, batch=1, length=128),
    "124M": Size(depth=12, width=768, heads=12, vocab=25344, batch=1, length=128),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training job.

    Attributes:
        system: a name in ``systems.SYSTEMS``.
        size: a name in ``SIZES``.
        dtype: "fp32" or "bf16".
        device: "cpu" (gloo) or "cuda" (NCCL, one device per rank).
        warmup: steps before the clock starts.
        steps: steps that are timed.
        options: further arguments of ``shardwise.shard``; other systems take none.
        batch: sequences per rank and step; None: the size's own.
        target_loss: train on the standard library's source until the held-out loss, nats per byte, is no more.
    """

    system: str
    size: str
    ranks: int = 2
    dtype: str = "fp32"
    device: str = "cpu"
    warmup: int = 3
    steps: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    target_loss: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Task":
        return Task(**json.loads(text))

    @property
    def label(self) -> str:
        extra = "".join(f" {key}={value}" for key, value in self.options.items())
        return self.system + extra


def build_model(size: Size) -> GPT:
    """Return the model with the same weights in every process."""
    config = GPTConfig(vocab=size.vocab, context=size.length, width=size.width, heads=size.heads, depth=size.depth)
    return GPT(config, generator=torch.Generator().manual_seed(0))


def batches(task: Task, rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, each [batch, length], different on every rank."""
    size = SIZES[task.size]
    if task.target_loss is not None:
        yield from text_batches(task, rank, device)
    num = task.batch or size.batch
    generator = torch.Generator().manual_seed(1000 + rank)
    pool = [torch.randint(size.vocab, (num, size.length + 1), generator=generator).to(device) for _ in range(_POOL)]
    while True:
        for tokens in pool:
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def text_batches(task: Task, rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows of the text without its last tenth."""
    size, tokens = SIZES[task.size], load_stdlib().tokens
    kept = tokens[: len(tokens) * 9 // 10]
    for step in itertools.count():
        inputs, targets = batch(
            kept, seed=0, step=step, rank=rank, batch_size=task.batch or size.batch, length=size.length
        )
        yield inputs.to(device), targets.to(device)


def held_out(task: Task, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return fixed windows of the text's last tenth, other ones on every rank."""
    size, tokens = SIZES[task.size], load_stdlib().tokens
    inputs, targets = batch(
        tokens[len(tokens) * 9 // 10 :], seed=1, step=0, rank=rank, batch_size=HELD_OUT, length=size.length
    )
    return inputs.to(device), targets.to(device)
