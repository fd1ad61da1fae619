"""One of two ranks that train with real DeepSpeed, save and make one more update: RANK RENDEZVOUS OUT VARIANT...

A variant is ``STAGE-DTYPE``, with ``-universal`` behind it to convert the checkpoint to that format too. Rank 0 notes
whole masters at the save and after the next update. Started by ``test_doors_deepspeed.py``, which takes the model and
the batches from here.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_RANKS, NUM_STEPS, BATCH = 2, 3, 12


class Net(nn.Module):
    """Tied, frozen and uneven parameters, one of one element, and buffers of two kinds."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(11, 5)
            self.body = nn.Linear(5, 7)
            self.norm = nn.LayerNorm(7)
            self.frozen = nn.Linear(7, 5).requires_grad_(False)
            self.gain = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(5, 11, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.randn(5))
            self.register_buffer("count", torch.tensor(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        embedded = self.embed(tokens)
        hidden = torch.tanh(self.norm(self.body(embedded + self.table.to(embedded.dtype))))
        return self.head(self.gain * self.frozen(hidden))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    wide = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    narrow = [p for p in net.parameters() if p.dim() <= 1 and p.requires_grad]
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}], lr=3e-3)


def configuration(stage: int, dtype: str, num_ranks: int) -> dict[str, Any]:
    """Return the configuration of a run on so many ranks.

    Gradients are in the dtype that DeepSpeed takes without being told. What clipping rounds differs: DeepSpeed clips a
    copy in fp32. So bf16 has a limit that is not reached.
    """
    precision: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        precision["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    return {
        "train_micro_batch_size_per_gpu": BATCH // num_ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 100.0 if dtype == "bf16" else 0.5,
        "steps_per_print": 1_000_000,
        "data_types": {"grad_accum_dtype": dtype},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 3e-3}},
        "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        **precision,
    }


def train_step(engine: Any, step: int, rank: int, num_ranks: int) -> None:
    """Make one update with the share that a rank has of a batch."""
    tokens = torch.randint(11, (BATCH,), generator=torch.Generator().manual_seed(100 + step))
    targets = tokens.roll(1)
    share = slice(rank * BATCH // num_ranks, (rank + 1) * BATCH // num_ranks)
    engine.backward(nn.functional.cross_entropy(engine(tokens[share]).float(), targets[share]))
    engine.step()


def masters(engine: Any) -> dict[str, Tensor]:
    """Return parameters as the optimizer keeps them; collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    params = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    if engine.zero_optimization_stage() == 0:
        return {name: param.detach().clone() for name, param in params}
    return {name: safe_get_full_fp32_param(param).clone() for name, param in params}


def convert(folder: Path, tag: str) -> None:
    """Let DeepSpeed make its universal format of a checkpoint, beside it."""
    from deepspeed.checkpoint.ds_to_universal import main as run_conversion

    run_conversion(
        Namespace(
            input_folder=str(folder / tag),
            output_folder=str(folder / f"{tag}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def run(variant: str, rank: int, out: Path) -> None:
    """Train, save, go on."""
    import deepspeed

    stage, dtype, *universal = variant.split("-")
    net = Net()
    config = configuration(int(stage), dtype, NUM_RANKS)
    if stage == "3":
        config["zero_optimization"]["sub_group_size"] = 20  # several flat groups for one group of the optimizer
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer_of(net), config=config, dist_init_required=False)
    for step in range(NUM_STEPS):
        train_step(engine, step, rank, NUM_RANKS)
    engine.save_checkpoint(str(out / variant), client_state={"epoch": 4, "seen": (1, 2.5)})
    told: dict[str, Any] = {"saved": masters(engine)}
    train_step(engine, NUM_STEPS, rank, NUM_RANKS)
    told |= {"next": masters(engine), "lr": engine.get_lr()}
    if dtype == "fp16":
        told["scale"] = float(engine.optimizer.loss_scaler.cur_scale)
    if rank == 0:
        torch.save(told, out / f"{variant}.pt")
        if universal:
            convert(out / variant, f"global_step{NUM_STEPS}")


def main() -> None:
    """Run the variants, one after the other."""
    rank, rendezvous, out, *variants = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(NUM_RANKS), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=NUM_RANKS
    )
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch computes in fp16 on a CPU, only slowly
    for variant in variants:
        run(variant, int(rank), Path(out))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # all is written; threads that DeepSpeed leaves running can abort the end of the interpreter


if __name__ == "__main__":
    main()
