"""Host cost of one system under a network that moves nothing: python -m common.host_job JSON. Prints RESULT and JSON.

The tensors are so narrow that the step is Python and dispatch; the world may have any number of ranks.
"""

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import shardwise  # noqa: E402
from common.systems import adamw, loss_of  # noqa: E402
from shardwise.comm.base import Key, part  # noqa: E402
from shardwise.comm.fake import FakeComm  # noqa: E402
from shardwise.models.gpt import GPT, Block, GPTConfig  # noqa: E402

VOCAB, LENGTH, WIDTH = 64, 8, 16
WARMUP = 5


class EqualRanksComm(FakeComm):
    """All other ranks have what this one has, so that what is gathered is finite."""

    def all_gather(self, buffer: Tensor, key: Key) -> None:
        buffer.view(self.size, -1).copy_(part(buffer, self.rank, self.size).clone().expand(self.size, -1))


def build(system: str, blocks: int, ranks: int) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """Return the model to call, and what updates and clears it."""
    model: nn.Module = GPT(GPTConfig(vocab=VOCAB, context=LENGTH, width=WIDTH, heads=1, depth=blocks))
    if system.startswith("shardwise"):
        model = shardwise.shard(model, {"data": EqualRanksComm(0, ranks)}, stage=int(system[-1]), units=Block)
        return model, updating(shardwise.shard_optimizer(adamw(model.parameters()), model))
    if system == "compute":
        return model, updating(adamw(model.parameters()))
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    if system == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, _no_reduction)  # the fake backend returns nothing that DDP could read
        return wrapped, updating(adamw(wrapped.parameters()))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=system == "fsdp2")
    return model, updating(adamw(model.parameters()))


def _no_reduction(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def updating(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model, update = build(task["system"], task["blocks"], task["ranks"])
    tokens = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> tuple[float, float, float]:
        start = time.perf_counter()
        loss = loss_of(model(tokens), tokens)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        update()
        return forward - start, backward - forward, time.perf_counter() - backward

    for _ in range(WARMUP):
        step()
    parts = list(zip(*(step() for _ in range(task["steps"])), strict=True))
    whole = [sum(times) for times in zip(*parts, strict=True)]
    result = [statistics.median(part) * 1e6 / task["blocks"] for part in [*parts, whole]]
    sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)


main()
