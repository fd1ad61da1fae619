"""One rank that saves and loads: python -m common.checkpoint_job RANK RANKS RENDEZVOUS FOLDER SYSTEM MIB.

Everything is timed from one barrier to the next, with the bytes on the disk at the end of a save and out of the page
cache before a load. Prints one line, RESULT and JSON.
"""

import gc
import json
import mmap
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore")

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import shardwise  # noqa: E402
from common.job import status_bytes  # noqa: E402
from common.systems import adamw  # noqa: E402
from shardwise.checkpoint.background import PendingSave  # noqa: E402

WIDTH = 2112
BYTES_PER_PARAM = 12  # fp32 parameter and two moments
BLOCK = 8 << 20
BATCH = 64  # of the step beside which a save goes on: about a second of computation per rank
Action = Callable[[], Any]


def timed(action: Action) -> float:
    """Return the seconds from all ranks at the start to all at the end."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def files_of(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def settle(folder: Path) -> None:
    """Bring what a system left in the page cache to the disk; each rank takes its share of the files."""
    for index, path in enumerate(files_of(folder)):
        if index % dist.get_world_size() == dist.get_rank():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def forget(folder: Path) -> None:
    """Let the page cache drop the files."""
    dist.barrier()
    for path in files_of(folder):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def make_model(mib: int) -> nn.Sequential:
    """Return layers whose parameters and moments have about so many MiB in all."""
    layers = max(2, round(mib * 2**20 / BYTES_PER_PARAM / WIDTH**2))
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def train_once(forward: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, batch: int = 1) -> None:
    forward(torch.ones(batch, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's share of parameters and moments, as tensors of their own."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name, param in model.named_parameters():
        flat = param.detach().view(-1)
        part = flat[flat.numel() * rank // ranks : flat.numel() * (rank + 1) // ranks]
        found |= {f"{kind}.{name}": part.clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
    return found


def raw(folder: Path, mib: int) -> dict[str, float]:
    """Write and read as many bytes with O_DIRECT, block by block, from memory that does not change."""
    path = folder / f"raw-{dist.get_rank()}"
    count = mib * 2**20 // dist.get_world_size() // BLOCK
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))

    def write() -> None:
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        for index in range(count):
            os.pwrite(file, block, index * BLOCK)
        os.fsync(file)
        os.close(file)

    def read() -> None:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for index in range(count):
            os.preadv(file, [block], index * BLOCK)
        os.close(file)

    return {"save": timed(write), "load": timed(read), "bytes": count * BLOCK}


def shardwise_system(folder: Path, mib: int) -> dict[str, float]:
    model = shardwise.shard(make_model(mib), stage=3, units=nn.Linear)
    optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    train_once(model, optimizer)
    result = {"save": timed(lambda: shardwise.save_checkpoint(model, folder, tag="a"))}
    result["bytes"] = (folder / "a" / f"rank-{dist.get_rank():05d}.safetensors").stat().st_size
    step = statistics.median(timed(lambda: train_once(model, optimizer, BATCH)) for _ in range(3))
    copies: list[float] = []
    time_copies(copies)
    calls, longer = [], []
    for tag in ("b", "c", "d"):
        calls.append(timed(lambda tag=tag: shardwise.save_checkpoint(model, folder, tag=tag, background=True)))
        longer.append(timed(lambda: train_once(model, optimizer, BATCH)) - step)
        shardwise.wait_for_save(model)
    result |= {"step": step, "call": statistics.median(calls)}
    result |= {"stall": result["call"] + max(copies, default=0.0), "lost": result["call"] + statistics.median(longer)}
    result["call and copy"] = timed(lambda: (save_again(model, folder), optimizer.step()))
    shardwise.wait_for_save(model)
    from shardwise.checkpoint.verify import verify_files

    forget(folder)
    result["verify"] = timed(lambda: verify_files(folder / "a", dist.get_rank(), dist.get_world_size()))
    forget(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    result["load"] = timed(lambda: shardwise.load_checkpoint(model, folder, tag="a", rng=False))
    result["load_extra_bytes"] = status_bytes("VmHWM") - before
    forget(folder)
    result["unverified load"] = timed(
        lambda: shardwise.load_checkpoint(model, folder, tag="b", rng=False, verify=False)
    )
    return result


def time_copies(seconds: list[float]) -> None:
    """Note how long each save in the background holds an update up, to copy aside what is not written yet."""
    copy_aside = PendingSave._secure

    def timed_copy(save: PendingSave) -> None:
        start = time.perf_counter()
        copy_aside(save)
        seconds.append(time.perf_counter() - start)

    PendingSave._secure = timed_copy  # type: ignore[method-assign]


def save_again(model: nn.Module, folder: Path) -> None:
    shardwise.save_checkpoint(model, folder, tag="e", background=True)


def torch_save(folder: Path, mib: int) -> dict[str, float]:
    tensors, path = own_tensors(make_model(mib)), folder / f"{dist.get_rank()}.pt"
    result = {"save": timed(lambda: (torch.save(tensors, path), dist.barrier(), settle(folder)))}
    result["bytes"] = path.stat().st_size
    forget(folder)

    def load() -> None:
        found = torch.load(path, weights_only=True)
        for name, tensor in tensors.items():
            tensor.copy_(found[name])

    return result | {"load": timed(load)}


def safetensors_save(folder: Path, mib: int) -> dict[str, float]:
    tensors, path = own_tensors(make_model(mib)), folder / f"{dist.get_rank()}.safetensors"
    result = {"save": timed(lambda: (safetensors.torch.save_file(tensors, path), dist.barrier(), settle(folder)))}
    result["bytes"] = path.stat().st_size
    forget(folder)

    def load() -> None:
        with safetensors.safe_open(path, framework="pt") as file:
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))

    return result | {"load": timed(load)}


def dcp(folder: Path, mib: int) -> dict[str, float]:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(mib)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    train_once(model, optimizer)

    def save() -> None:
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optim": states}, checkpoint_id=folder)
        settle(folder)

    def load() -> None:
        weights, states = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optim": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    result = {"save": timed(save)}
    result["bytes"] = sum(path.stat().st_size for path in files_of(folder)) / dist.get_world_size()
    forget(folder)
    return result | {"load": timed(load)}


def deepspeed_system(folder: Path, mib: int) -> dict[str, float]:
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = make_model(mib)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    result = {"save": timed(lambda: (engine.save_checkpoint(str(folder), tag="a"), settle(folder)))}
    result["bytes"] = sum(path.stat().st_size for path in files_of(folder)) / dist.get_world_size()
    forget(folder)
    return result | {"load": timed(lambda: engine.load_checkpoint(str(folder), tag="a"))}


SYSTEMS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "raw": raw,
    "shardwise": shardwise_system,
    "torch.save": torch_save,
    "safetensors": safetensors_save,
    "dcp": dcp,
    "deepspeed": deepspeed_system,
}


def main() -> None:
    rank, ranks, rendezvous, folder, system, mib = sys.argv[1:7]
    torch.set_num_threads(1)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(ranks))
    result = SYSTEMS[system](Path(folder), int(mib))
    rows: list[Any] = [None] * int(ranks)
    dist.all_gather_object(rows, result)
    if rank == "0":
        sys.stdout.write("\nRESULT " + json.dumps(rows) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
