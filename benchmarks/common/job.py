"""One rank of one task: python -m common.job RANK RENDEZVOUS_FILE TASK_JSON. Prints one line, RESULT and JSON."""

import ctypes
import gc
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if "cuda" in sys.argv[-1] else "cpu")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from common.systems import SYSTEMS, System, loss_of  # noqa: E402
from common.task import SIZES, Task, batches, build_model, held_out  # noqa: E402

EVALUATE_EVERY = 20  # steps
INTERFACE = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def status_bytes(key: str) -> int:
    """Return a size from /proc/self/status, such as VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def sent_bytes() -> int:
    """Return what the network interface has sent so far, headers included; of the whole loopback on ``lo``."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def machine_busy_seconds() -> float:
    """Return the CPU seconds that everything on this machine has used."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


class Heap:
    """Live heap blocks of 64 KiB and more, where ``heap.c`` is preloaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self.is_counted = hasattr(self._library, "heap_peak_bytes")
        if self.is_counted:
            self._library.heap_peak_bytes.restype = ctypes.c_long
            self._library.heap_live_bytes.restype = ctypes.c_long

    def live_bytes(self) -> int:
        return self._library.heap_live_bytes() if self.is_counted else 0

    def peak_bytes(self) -> int:
        return self._library.heap_peak_bytes() if self.is_counted else 0

    def reset_peak(self) -> None:
        if self.is_counted:
            self._library.heap_reset_peak()
        Path("/proc/self/clear_refs").write_text("5")  # the resident set's own peak too


def synchronize(task: Task) -> None:
    if task.device == "cuda":
        torch.cuda.synchronize()


def run(task: Task, rank: int) -> dict[str, Any]:
    """Train; return what one rank measured."""
    heap = Heap()
    device = torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")
    before_bytes, imported_bytes = heap.live_bytes(), status_bytes("VmRSS")
    model = build_model(SIZES[task.size]).to(device)
    num_params = sum(param.numel() for param in model.parameters())
    system = SYSTEMS[task.system](model, task)
    del model
    gc.collect()
    heap.reset_peak()
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    data = batches(task, rank, device)
    losses = [system.step(data).item() for _ in range(task.warmup)]
    dist.barrier()
    sent, busy, own = sent_bytes(), machine_busy_seconds(), time.process_time()
    seconds = []
    held_out_loss = math.inf
    for number in range(task.steps):
        synchronize(task)
        start = time.perf_counter()
        losses.append(system.step(data).item())
        synchronize(task)
        seconds.append(time.perf_counter() - start)
        if task.target_loss is not None and number % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            held_out_loss = evaluate(task, system, rank, device)
            if held_out_loss <= task.target_loss:
                break
    dist.barrier()
    result = {
        "num_params": num_params,
        "losses": losses,
        "held_out_loss": held_out_loss,
        "seconds": seconds,
        "sent_bytes_per_step": (sent_bytes() - sent) / len(seconds),
        "busy_seconds": machine_busy_seconds() - busy,
        "cpu_seconds": time.process_time() - own,
        "rss_imported_bytes": imported_bytes,
        "rss_peak_bytes": status_bytes("VmHWM"),
        "heap_peak_bytes": heap.peak_bytes() - before_bytes if heap.is_counted else None,
        "heap_end_bytes": heap.live_bytes() - before_bytes if heap.is_counted else None,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if task.device == "cuda" else None,
    }
    del system
    return result


@torch.no_grad()
def evaluate(task: Task, system: System, rank: int, device: torch.device) -> float:
    """Return the mean loss of all ranks' held-out windows, one window at a time so that memory stays low."""
    inputs, targets = held_out(task, rank, device)
    total = torch.zeros(1, device=device)
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        total += loss_of(system.model(x), y) / len(inputs)
    dist.all_reduce(total)
    return total.item() / task.ranks


def main() -> None:
    rank, rendezvous, task = int(sys.argv[1]), sys.argv[2], Task.from_json(sys.argv[3])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # DeepSpeed reads them although the group exists
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.ranks))
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if task.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=task.ranks)
    result = run(task, rank)
    rows: list[Any] = [None] * task.ranks
    dist.all_gather_object(rows, result)
    if rank == 0:
        sys.stdout.write("\nRESULT " + json.dumps(rows) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # some systems leave threads behind that do not end


if __name__ == "__main__":
    main()
