"""One rank that trains with one of the two engines: PEER STAGE RANK NUM_RANKS RENDEZVOUS OUT. See its test."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from shardwise.models.gpt import GPT, GPTConfig, loss

NUM_STEPS, ACCUMULATION, MICRO, LENGTH, VOCAB = 20, 2, 2, 16, 64


def configuration(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3}},
        "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
    }


def micro_batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Text of a simple rule, so that there is something to learn: each token is the one before plus a stride."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    start = torch.randint(VOCAB, (MICRO, 1), generator=generator)
    stride = torch.randint(1, 4, (MICRO, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def start(peer: str, stage: int) -> Any:
    model = GPT(GPTConfig(vocab=VOCAB, context=LENGTH, width=32, heads=2, depth=2))
    if peer == "deepspeed":
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration(stage), dist_init_required=False
        )
    else:
        import shardwise

        engine, *_ = shardwise.initialize(model=model, config=configuration(stage))
    return engine


def main() -> None:
    peer, stage, rank, num_ranks, rendezvous, out = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(num_ranks)
    )
    engine = start(peer, int(stage))
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for index in range(ACCUMULATION):
            inputs, targets = micro_batch(step * ACCUMULATION + index, int(rank))
            step_loss = loss(engine(inputs), targets)
            engine.backward(step_loss)
            engine.step()
            losses.append(step_loss.item())
        norm = engine.get_global_grad_norm()  # DeepSpeed does not tell it at stage 0 in fp32
        norms.append(None if norm is None else float(norm))
    Path(out).write_text(json.dumps({"losses": losses, "norms": norms}))
    torch.distributed.destroy_process_group()
    if peer == "deepspeed":
        sys.stdout.flush()
        os._exit(0)  # all is written; threads that DeepSpeed leaves running can abort the end of the interpreter


main()
