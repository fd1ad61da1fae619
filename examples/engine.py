"""The same with an engine and a DeepSpeed configuration, the file beside this one.

torchrun --standalone --nproc-per-node 2 examples/engine.py
"""

import argparse
from pathlib import Path

import torch

import shardwise
from shardwise.data import batch, load_stdlib
from shardwise.models.gpt import GPT, Block, GPTConfig, loss

parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's library.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--config", type=Path, default=Path(__file__).with_name("engine.json"))
arguments = parser.parse_args()

tokens = load_stdlib().tokens
torch.manual_seed(0)  # all ranks start from the same values
engine, optimizer, _, scheduler = shardwise.initialize(
    model=GPT(GPTConfig()), config=arguments.config, units=Block
)  # joins the launcher's group
rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

for micro_step in range(arguments.steps * engine.gradient_accumulation_steps()):
    inputs, targets = batch(
        tokens,
        seed=0,
        step=micro_step,
        rank=rank,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        length=128,
    )
    step_loss = loss(engine(inputs), targets)
    engine.backward(step_loss)  # divided by the window
    engine.step()  # updates at the window's end
    if rank == 0 and micro_step % 20 == 0:
        print(f"micro-step {micro_step:4d}  loss {step_loss.item():.4f}")

if rank == 0:
    print(f"{engine.global_steps} updates, {engine.global_samples} samples, {engine.skipped_steps} skipped")
engine.destroy()
