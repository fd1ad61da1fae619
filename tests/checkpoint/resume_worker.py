"""One rank of a run of the engine that saves, or goes on: a process of its own, started by ``test_resume.py``."""

import hashlib
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shardwise

STEPS = 8
CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"param": "bf16"}},
    "fp16": {"precision": {"param": "fp16"}, "loss_scale": {"initial": 2**30, "growth_interval": 2, "hysteresis": 1}},
}


class Net(nn.Module):
    """Dropout, tied weights, a buffer that follows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(17))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        self.seen += torch.bincount(tokens.flatten(), minlength=17)
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of parameters."""
    wide = [p for p in net.parameters() if p.dim() > 1]
    return [{"params": wide}, {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0}]


def digest(engine: Any) -> str:
    """Return a hash of everything that the rest of the run depends on."""
    sha = hashlib.sha256()
    states = shardwise.full_optimizer_state(engine.module)
    tensors = {**shardwise.full_parameters(engine.module), **{f"b {n}": b for n, b in engine.module.named_buffers()}}
    tensors |= {f"{key} of {name}": tensor for name, found in states.items() for key, tensor in found.items()}
    for name in sorted(tensors):
        sha.update(name.encode() + tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    numbers = [engine.get_lr(), engine.loss_scale, engine.lr_scheduler.state_dict()]
    numbers += [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]
    sha.update(json.dumps(numbers).encode() + torch.get_rng_state().numpy().tobytes())
    return sha.hexdigest()


def run(folder: Path, mode: str, kind: str, stage: int, window: int) -> dict[str, Any]:
    """Train: "whole" to the end; "first" to the middle, and save; "second" from there on.

    "often" saves after 2 and 4 updates and at the end, and begins with what is there.
    """
    torch.manual_seed(0)
    net = Net()
    data = TensorDataset(torch.randint(17, (22, 3), generator=torch.Generator().manual_seed(5)))
    config = {
        "stage": stage,
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
        "scheduler": {"name": "warmup_cosine", "total_steps": 10, "num_warmup_steps": 3},
        "batch": {"micro": 2, "accumulation": window},
        "clip_grad_norm": 1.0,
        **CONFIGS[kind],
    }
    engine, _, loader, _ = shardwise.initialize(
        model=net, model_parameters=groups(net), training_data=data, config=config, units=nn.Linear
    )
    torch.manual_seed(100 + dist.get_rank())
    client = None
    if mode.startswith("second") or (mode == "often" and (folder / "latest").exists()):
        path, client = engine.load_checkpoint(folder)
        assert path is not None
    last = STEPS // 2 if mode.startswith("first") else STEPS
    losses: list[float] = []
    while engine.global_steps < last:
        for (tokens,) in loader:
            loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if mode == "often" and engine.was_step_applied() and engine.global_steps in (2, 4, STEPS):
                engine.save_checkpoint(folder)
            if engine.global_steps >= last:
                break
    if mode.startswith("first"):
        engine.save_checkpoint(folder, client_state={"losses": losses}, background=mode == "first-background")
    result = {"losses": losses, "client": client, "digest": digest(engine), "skipped": engine.skipped_steps}
    engine.destroy()
    return result


if __name__ == "__main__":
    warnings.simplefilter("error")
    rank, world, rendezvous, where, chosen, dtype, zero, window = sys.argv[1:9]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=20),
    )
    answer = run(Path(where), chosen, dtype, int(zero), int(window))
    Path(f"{rendezvous}.{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
