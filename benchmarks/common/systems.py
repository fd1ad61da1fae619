"""The systems that are compared. Each builder takes the model and returns a function that trains one batch.

All use AdamW with torch's fused kernel, no clipping, and one micro-batch per step. DeepSpeed is optional.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from common.task import LEARNING_RATE, SIZES, WEIGHT_DECAY, Task

Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[Batches], Tensor]


@dataclass(frozen=True, kw_only=True)
class System:
    """A model under one system: what to call for logits, and what trains one batch and returns its loss."""

    model: Callable[[Tensor], Tensor]
    step: Step
    owner: Any  # keeps the optimizer or engine alive


Builder = Callable[[nn.Module, Task], System]

DEEPSPEED_BUCKET_NUMEL = 5_000_000


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, context: Callable[[], Any]) -> Step:
    def step(batches: Batches) -> Tensor:
        inputs, targets = next(batches)
        with context():
            loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def autocast(task: Task) -> Callable[[], Any]:
    if task.dtype == "bf16":
        return partial(torch.autocast, task.device, dtype=torch.bfloat16)
    return contextlib.nullcontext


def build_compute(model: nn.Module, task: Task) -> System:
    """No communication at all: what the rest is measured against."""
    optimizer = adamw(model.parameters())
    return System(model=model, step=plain_loop(model, optimizer, autocast(task)), owner=optimizer)


def build_ddp(model: nn.Module, task: Task) -> System:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(wrapped.parameters())
    return System(model=wrapped, step=plain_loop(wrapped, optimizer, autocast(task)), owner=optimizer)


def build_ddp_zero1(model: nn.Module, task: Task) -> System:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    return System(model=wrapped, step=plain_loop(wrapped, optimizer, autocast(task)), owner=optimizer)


def build_fsdp2(model: nn.Module, task: Task, *, reshard: bool) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(task.device, (dist.get_world_size(),)),
        "reshard_after_forward": reshard,
    }
    if task.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = adamw(model.parameters())
    return System(model=model, step=plain_loop(model, optimizer, contextlib.nullcontext), owner=optimizer)


def build_deepspeed(model: nn.Module, task: Task, *, stage: int) -> System:
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": DEEPSPEED_BUCKET_NUMEL,
        "allgather_bucket_size": DEEPSPEED_BUCKET_NUMEL,
        "overlap_comm": True,
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = DEEPSPEED_BUCKET_NUMEL
    config = {
        "train_micro_batch_size_per_gpu": SIZES[task.size].batch,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # absent, it would be 1.0, which is other work
        "bf16": {"enabled": task.dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(batches: Batches) -> Tensor:
        inputs, targets = next(batches)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return System(model=engine, step=step, owner=engine)


def build_shardwise(model: nn.Module, task: Task, *, stage: int) -> System:
    precision = shardwise.Precision(param=torch.bfloat16) if task.dtype == "bf16" else None
    model = shardwise.shard(model, stage=stage, precision=precision, **task.options)
    optimizer = shardwise.shard_optimizer(adamw(model.parameters()), model)
    return System(model=model, step=plain_loop(model, optimizer, contextlib.nullcontext), owner=optimizer)


SYSTEMS: dict[str, Builder] = {
    "compute": build_compute,
    "ddp": build_ddp,
    "ddp_zero1": build_ddp_zero1,
    "fsdp2": partial(build_fsdp2, reshard=True),
    "fsdp2_zero2": partial(build_fsdp2, reshard=False),
    **{f"deepspeed{stage}": partial(build_deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"shardwise{stage}": partial(build_shardwise, stage=stage) for stage in range(4)},
}

# What a stage is compared with: systems that keep the same states whole.
PEERS = {
    "shardwise0": ("ddp",),
    "shardwise1": ("ddp", "ddp_zero1", "deepspeed1"),
    "shardwise2": ("ddp", "deepspeed2", "fsdp2_zero2"),
    "shardwise3": ("ddp", "fsdp2", "deepspeed3"),
}


def is_installed(system: str) -> bool:
    return not system.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None
