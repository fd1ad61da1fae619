"""One of two ranks that know torch only, with FSDP2: a process of its own, started by ``test_doors_dcp.py``.

First this library cannot be imported; later it can, for its reader and writer under plain ``dcp.load`` and
``dcp.save``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

NUM_RANKS = 2


class Net(nn.Module):
    """Tied, frozen and uneven parameters, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(11, 6)
            self.body = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))
            self.norm = nn.LayerNorm(6)
            self.norm.bias.requires_grad_(False)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.randn(6))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.embed(tokens) + self.table
        return self.head(self.norm(hidden + self.body(hidden)))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    wide = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    narrow = [p for p in net.parameters() if p.dim() <= 1 and p.requires_grad]
    return torch.optim.AdamW([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], lr=0.02)


def loss_of(net: nn.Module, step: int) -> Tensor:
    """Return the loss of a batch, the same on every rank."""
    tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(net(tokens), tokens.roll(1))


def full(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every parameter and moment, whole; collective."""
    names = {param: name for name, param in net.named_parameters()}
    found = {f"master {name}": param for param, name in names.items()}
    for param, states in optimizer.state.items():
        found |= {f"{key} of {names[param]}": value for key, value in states.items()}
    return {
        key: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for key, each in found.items()
    }


def fresh() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """Return a model of other values, its optimizer, and their state dict."""
    net = Net(seed=5)
    fully_shard(net, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    optimizer = optimizer_of(net)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    return net, optimizer, {"model": model_state, "optim": optimizer_state}


def take(net: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Tensor]:
    """Give a model its state; return it whole."""
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return full(net, optimizer)


def without_shardwise(folder: Path) -> dict[str, Any]:
    """Load what was converted, do a step, save with torch's own writer."""
    net, optimizer, state = fresh()
    dcp.load(state, checkpoint_id=folder / "converted")
    told: dict[str, Any] = {"loaded": take(net, optimizer, state)}
    told["lr"] = [group["lr"] for group in optimizer.param_groups]
    told["table"] = net.table.clone()
    loss_of(net, 100).backward()
    optimizer.step()
    optimizer.zero_grad()
    told["stepped"] = full(net, optimizer)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state, "epoch": 3}, checkpoint_id=folder / "theirs")
    assert not [name for name in sys.modules if name.startswith("shardwise.")]
    return told


def with_shardwise(folder: Path) -> dict[str, Any]:
    """Read our checkpoint as it is, into shards of both dimensions; write one of ours and read it again."""
    from shardwise.checkpoint.doors.dcp import ShardwiseStorageReader, ShardwiseStorageWriter

    net, optimizer, state = fresh()
    dcp.load(state, storage_reader=ShardwiseStorageReader(folder / "run" / "a"))
    told: dict[str, Any] = {"read": take(net, optimizer, state)}
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "epoch": 3}
    dcp.save(state, storage_writer=ShardwiseStorageWriter(folder / "written", step=4))
    net, optimizer, state = fresh()
    state["epoch"] = 0
    dcp.load(state, storage_reader=ShardwiseStorageReader(folder / "written"))
    told["again"], told["epoch"] = take(net, optimizer, state), state["epoch"]
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    columns = distribute_tensor(torch.zeros(11, 6), mesh, [Shard(1)])
    flat = {"embed.weight": columns}
    dcp.load(flat, storage_reader=ShardwiseStorageReader(folder / "run", flat=True))
    told["columns"] = columns.full_tensor()
    try:
        dcp.save({"w": columns}, storage_writer=ShardwiseStorageWriter(folder / "columns"))
    except dcp.CheckpointException as error:  # no subclass of Exception
        told["refused"] = str(error)
    return told


def main(folder: Path, rank: int) -> None:
    """Do both; rank 0 tells."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    sys.modules["shardwise"] = None  # type: ignore[assignment]
    told = without_shardwise(folder)
    del sys.modules["shardwise"]
    told |= with_shardwise(folder)
    if rank == 0:
        torch.save(told, folder / "told.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
