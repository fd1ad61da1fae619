"""Fine-tune a Hugging Face model: each rank reads its slice of the weights, no rank ever holds the whole model.

The model is a tiny one that is made on the spot. Put a folder of your own in its place: one with config.json and
safetensors files. Needs the extra "hf": pip install -e ".[hf]" in the clone.

torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

import shardwise
from shardwise.data import batch, load_stdlib

try:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
except ImportError as error:
    print(f'not run: {error}; pip install -e ".[hf]" in the clone installs what is missing')
    sys.exit(0)

parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face model on the source of Python's library.")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", type=Path, help="of a model that reads bytes; left out: a tiny one made on the spot")
arguments = parser.parse_args()


def make_model(folder: Path) -> None:
    """Write a model with random weights, as if it had been trained before."""
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


with tempfile.TemporaryDirectory() as temporary:
    folder = arguments.folder or Path(temporary)
    if arguments.folder is None:
        make_model(folder)  # every rank makes the same one
    shape = AutoConfig.from_pretrained(folder)
    with shardwise.deferred_init() as recipe:  # no memory for parameters yet
        model = AutoModelForCausalLM.from_config(shape)
    engine, *_ = shardwise.initialize(
        model=model,
        initial_values=recipe.with_weights(folder),
        config={
            "stage": 3,
            "clip_grad_norm": 1.0,
            "batch": {"micro": 4},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "scheduler": {"name": "warmup", "num_warmup_steps": 10, "shape": "linear"},
        },
    )

rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
tokens = load_stdlib(1_000_000).tokens
for step in range(arguments.steps):
    inputs, targets = batch(tokens, seed=0, step=step, rank=rank, batch_size=4, length=64)
    logits = engine(input_ids=inputs, use_cache=False).logits
    step_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    engine.backward(step_loss)
    engine.step()
    if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
        print(f"step {step:4d}  loss {step_loss.item():.4f}")
engine.destroy()
