"""Communicators without a network, and the one that records."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.comm.base import Comm, Key, Mesh, Verb, Work, part
from shardwise.comm.board import abort_mesh
from shardwise.comm.fake import FakeComm, LocalComm
from shardwise.comm.recording import Event, record
from shardwise.errors import ConfigError, RankMismatchError
from shardwise.testing.ranks import run_ranks

KEY = Key(0, Verb.REDUCE, 0, "layers.0")
HALF, F32 = torch.bfloat16, torch.float32


def finish(work: Work | None) -> None:
    if work is not None:
        work.wait()


def test_fake_rank_reduces_its_own_part_with_all_roundings() -> None:
    comm = FakeComm(rank=3, size=1024)
    buffer, out = torch.full((2048,), 1 + 2**-10), torch.empty(2)
    assert comm.reduce_scatter(buffer, out, KEY, wire=HALF, sum=F32) is None
    assert out.tolist() == [1.0, 1.0]
    assert (comm.rank, comm.size) == (3, 1024)


def test_fake_rank_leaves_what_others_would_send() -> None:
    comm = FakeComm(rank=1, size=2)
    buffer = torch.arange(4.0)
    assert comm.all_gather(buffer, KEY) is None
    assert comm.broadcast(buffer, 0, KEY) is None
    assert torch.equal(buffer, torch.arange(4.0))


@pytest.mark.parametrize("wire", [HALF, F32])
def test_fake_rank_works_on_fake_tensors(wire: torch.dtype) -> None:
    comm = FakeComm(rank=1, size=1 << 20)
    with FakeTensorMode():
        buffer = torch.empty(1 << 40)
        own = part(buffer, 1, comm.size)
        comm.all_gather(buffer, KEY)
        comm.reduce_scatter(buffer, own, KEY, wire=wire, sum=F32)
        comm.reduce_scatter(buffer, torch.empty_like(own), KEY, wire=wire, sum=F32)


def test_fake_rank_outside_its_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 of size 2"):
        FakeComm(2, 2)


def test_only_rank_of_an_axis_copies_exactly() -> None:
    buffer, out = torch.tensor([1 + 2**-20]), torch.empty(1)
    LocalComm().reduce_scatter(buffer, out, KEY, wire=F32, sum=F32)
    assert torch.equal(out, buffer)


def exercise(comm: Comm) -> None:
    buffer = torch.zeros(6)
    finish(comm.all_gather(buffer, Key(0, Verb.UNSHARD, 0, "layers.0")))
    finish(comm.reduce_scatter(buffer, part(buffer, comm.rank, comm.size), KEY, wire=HALF, sum=F32))
    finish(comm.broadcast(buffer, 0, Key(0, Verb.BROADCAST, 0, "layers.0")))


def test_recording_counts_what_this_rank_sends() -> None:
    def body(mesh: Mesh) -> list[Event]:
        recorded, log = record(mesh)
        exercise(recorded["data"])
        assert log.num_calls() == 3
        assert log.sent_bytes(Verb.REDUCE) == 8
        assert log.sent_bytes(axis="other") == 0
        assert log.bytes_by_verb() == {
            Verb.UNSHARD: 16,
            Verb.REDUCE: 8,
            Verb.BROADCAST: 48 if mesh["data"].rank == 0 else 0,
        }
        assert sum(log.elements_by_verb().values()) == log.sent_elements()
        return list(log)

    first, second, _ = run_ranks(3, body)
    assert first == [
        Event("data", Verb.UNSHARD, "layers.0", "all_gather", 16, 4),
        Event("data", Verb.REDUCE, "layers.0", "reduce_scatter", 8, 4),
        Event("data", Verb.BROADCAST, "layers.0", "broadcast", 48, 12),
    ]
    assert second[:2] == first[:2]


def test_recording_of_one_rank_counts_calls_and_no_bytes() -> None:
    recorded, log = record({"data": LocalComm()})
    exercise(recorded["data"])
    assert (log.num_calls(), log.sent_bytes()) == (3, 0)
    log.clear()
    assert len(log) == 0


def test_abort_wakes_the_peers_through_a_recorder() -> None:
    def body(mesh: Mesh) -> None:
        recorded, _ = record(mesh)
        if recorded["data"].rank == 1:
            abort_mesh(recorded, ValueError("bad batch"))
        else:
            exercise(recorded["data"])

    with pytest.raises(RankMismatchError, match="rank 1 failed with ValueError: bad batch"):
        run_ranks(2, body)
