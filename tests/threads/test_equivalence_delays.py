"""Transfers that start and end late, at random and unlike on each rank, change no bit.

Every rank sleeps before it posts a transfer and before it takes one as done, so that ranks meet in ever other orders.
The settings that move transfers around (prefetch, reductions in flight, the kept unit) are drawn too.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Sharding, hybrid, stage_sharding
from shardwise.comm.base import Comm, Key, Mesh, Work
from shardwise.testing.compare import Case, MicroBatches, Trace, assert_same_bits, train_sharded
from shardwise.testing.models import ODDITIES
from shardwise.testing.ranks import run_ranks

LONGEST_SECONDS = 0.002
SHARDINGS: dict[str, tuple[int | dict[str, int], Sharding]] = {
    **{f"stage {stage} on {ranks}": (ranks, stage_sharding(stage)) for stage in range(4) for ranks in (2, 3)},
    "hybrid": ({"node": 2, "local": 2}, hybrid("local")),
    "unlike sets": ({"node": 2, "local": 2}, Sharding(grad="node", optim=["node", "local"])),
    "parameters inside a node": (
        {"node": 2, "local": 2},
        Sharding(param="local", grad=["node", "local"], optim=["node", "local"]),
    ),
}


class Late:
    """A transfer that is taken as done a while after it is."""

    def __init__(self, work: Work, draw: random.Random) -> None:
        self._work = work
        self._draw = draw

    def wait(self) -> None:
        time.sleep(self._draw.uniform(0, LONGEST_SECONDS))
        self._work.wait()


class LateComm:
    """A ``Comm`` whose calls start late and whose transfers end late."""

    def __init__(self, comm: Comm, draw: random.Random) -> None:
        self._comm = comm
        self._draw = draw
        self.rank, self.size = comm.rank, comm.size
        self.reserve = comm.reserve
        self.announce, self.announced, self.forget = comm.announce, comm.announced, comm.forget

    def _late(self, work: Work | None) -> Work | None:
        return None if work is None else Late(work, self._draw)

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        time.sleep(self._draw.uniform(0, LONGEST_SECONDS))
        return self._late(self._comm.all_gather(buffer, key))

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        time.sleep(self._draw.uniform(0, LONGEST_SECONDS))
        return self._late(self._comm.reduce_scatter(buffer, out, key, wire=wire, sum=sum))

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        return self._late(self._comm.broadcast(buffer, source, key))


def cases(seeds: range) -> Iterator[Any]:
    for seed in seeds:
        for name in SHARDINGS:
            marks = [pytest.mark.matrix] if seed else []
            yield pytest.param(name, seed, id=f"{name}-{seed}", marks=marks)


@pytest.mark.parametrize(("name", "seed"), list(cases(range(12))))
def test_late_transfers_change_no_bit(name: str, seed: int) -> None:
    ranks, sharding = SHARDINGS[name]
    draw = random.Random(f"{name} {seed}")
    case = Case(
        oddities=draw.choice([ODDITIES, ("tied",), ("frozen", "uneven")]),
        dtype=torch.float32,
        micro_batches=draw.choice(list(MicroBatches)),
        max_norm=draw.choice([None, 1.0]),
        num_rows=24,
    )
    options = {
        "prefetch": draw.choice([0, 1, 2, 5]),
        "reductions_in_flight": draw.choice([0, 1, 2, 9]),
        "keep_last_unit": draw.choice([True, False]),
    }

    def body(mesh: Mesh, *, late: bool) -> Trace:
        if not late:
            return train_sharded(case, mesh, sharding)
        own = [random.Random(f"{seed} {axis} {comm.rank}") for axis, comm in mesh.items()]
        slow = {axis: LateComm(comm, own[i]) for i, (axis, comm) in enumerate(mesh.items())}
        return train_sharded(case, slow, sharding, **options)

    plain = run_ranks(ranks, lambda mesh: body(mesh, late=False))
    late = run_ranks(ranks, lambda mesh: body(mesh, late=True))
    assert_same_bits(late, plain, f"{options}")
