"""A model that nobody refers to is gone, with its buffers: also after training, and without ``unshard_model``."""

import gc
import weakref

import pytest
import torch

import shardwise
from shardwise.comm.base import Mesh
from shardwise.managed import Managed
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import all_stages, make_net, net_loss, sgd, shard


@all_stages
@pytest.mark.parametrize("backward", [True, False])
def test_dropped_model_is_freed_with_its_buffers(stage: int, backward: bool) -> None:
    def body(mesh: Mesh) -> list[weakref.ref[object]]:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        loss = net_loss(model, flat_rank(mesh), 0)
        if backward:
            loss.backward()
            optim.step()
        buckets = [bucket for unit in Managed.of(model).runtime.units for bucket in unit.buckets]
        alive = [weakref.ref(thing) for thing in (model, *buckets, *(b.params.full.tensor for b in buckets))]
        assert all(ref() is not None for ref in alive)
        return alive

    found = [ref for alive in run_ranks(2, body) for ref in alive]
    gc.collect()
    assert len(found) > 4
    assert all(ref() is None for ref in found)


@all_stages
def test_forwards_without_a_backward_leave_no_tensors(stage: int) -> None:
    model = shardwise.shard(make_net(), stage=stage, force_collectives=True)
    counts = []
    for _ in range(3):
        for _ in range(5):
            net_loss(model, 0, 0)
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert counts[1] == counts[2]


def test_many_models_leave_no_bucket_behind() -> None:
    buckets: weakref.WeakSet[object] = weakref.WeakSet()

    def build() -> None:
        model = shardwise.shard(make_net(), stage=3, force_collectives=True)
        net_loss(model, 0, 0).backward()
        for unit in Managed.of(model).runtime.units:
            buckets.update(unit.buckets)

    for _ in range(5):
        build()
    gc.collect()
    assert len(buckets) == 0
