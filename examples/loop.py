"""A training loop of one's own: ZeRO stage 3 in four calls.

torchrun --standalone --nproc-per-node 2 examples/loop.py
"""

import argparse

import torch

import shardwise
from shardwise.data import batch, load_stdlib
from shardwise.models.gpt import GPT, Block, GPTConfig, loss

parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's library.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--stage", type=int, default=3)
arguments = parser.parse_args()

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
tokens = load_stdlib().tokens

torch.manual_seed(0)  # all ranks start from the same values
model = shardwise.shard(GPT(GPTConfig()), stage=arguments.stage, units=Block)
optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)

for step in range(arguments.steps):
    inputs, targets = batch(tokens, seed=0, step=step, rank=rank, batch_size=8, length=128)
    step_loss = loss(model(inputs), targets)
    step_loss.backward()
    norm = shardwise.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
        print(f"step {step:4d}  loss {step_loss.item():.4f}  grad norm {norm.item():.3f}")

state = shardwise.full_state_dict(model)  # on every rank; what state_dict() of the plain model holds
if rank == 0:
    print(f"{sum(tensor.numel() for tensor in state.values()):,} numbers in {len(state)} tensors")
torch.distributed.destroy_process_group()
