"""Ranks as threads: what a call means, and what an error says."""

import gc
import threading
import time
import weakref
from collections.abc import Mapping

import pytest
import torch

from shardwise.comm.base import Key, Mesh, Verb, Work, part
from shardwise.comm.threads import ThreadComm
from shardwise.errors import ConfigError, RankMismatchError
from shardwise.testing.ranks import coordinates, flat_rank, run_ranks

F32 = torch.float32


def key(index: int = 0, verb: Verb = Verb.UNSHARD, sequence: int = 0, label: str = "layers.0") -> Key:
    return Key(index, verb, sequence, label)


def wait(work: Work | None) -> None:
    assert work is not None
    work.wait()


def test_all_gather_fills_the_parts_of_the_others() -> None:
    def body(mesh: Mesh) -> torch.Tensor:
        comm = mesh["data"]
        buffer = torch.full((6,), -1.0)
        part(buffer, comm.rank, 3).copy_(torch.tensor([10.0, 11.0]) + 2 * comm.rank)
        work = comm.all_gather(buffer, key())
        assert (buffer == -1).sum() == 4  # nothing is received before the wait
        wait(work)
        return buffer

    for buffer in run_ranks(3, body):
        assert torch.equal(buffer, torch.arange(10.0, 16.0))


def test_snapshot_is_taken_at_the_call() -> None:
    def body(mesh: Mesh) -> float:
        comm = mesh["data"]
        buffer = torch.full((2,), float(comm.rank))
        work = comm.all_gather(buffer, key())
        part(buffer, comm.rank, 2).fill_(99)
        wait(work)
        return part(buffer, 1 - comm.rank, 2).item()

    assert run_ranks(2, body) == [1.0, 0.0]


def test_reduce_scatter_into_its_own_part_leaves_the_other_parts() -> None:
    def body(mesh: Mesh) -> torch.Tensor:
        comm = mesh["data"]
        buffer = torch.arange(4.0) * (comm.rank + 1)
        work = comm.reduce_scatter(buffer, part(buffer, comm.rank, 2), key(), wire=F32, sum=F32)
        wait(work)
        wait(work)  # idempotent
        return buffer

    first, second = run_ranks(2, body)
    assert first.tolist() == [0.0, 1.5, 2.0, 3.0]
    assert second.tolist() == [0.0, 2.0, 3.0, 4.5]


def test_mean_of_three_ranks_is_a_division() -> None:
    def body(mesh: Mesh) -> torch.Tensor:
        buffer, out = torch.full((3,), (0.0, 2.0, 3.0)[mesh["data"].rank]), torch.empty(1)
        wait(mesh["data"].reduce_scatter(buffer, out, key(), wire=F32, sum=F32))
        return out

    total = torch.tensor(5.0)
    assert total / 3 != total * torch.tensor(1 / 3)  # the reciprocal would round twice
    assert run_ranks(3, body) == [total / 3] * 3


def test_own_part_is_rounded_to_the_wire_too() -> None:
    fine = 1 + 2**-10  # no bfloat16

    def body(mesh: Mesh) -> float:
        out = torch.empty(1)
        wait(mesh["data"].reduce_scatter(torch.full((2,), fine), out, key(), wire=torch.bfloat16, sum=F32))
        return out.item()

    assert run_ranks(2, body) == [1.0, 1.0]


def test_broadcast_takes_the_buffer_of_the_source() -> None:
    def body(mesh: Mesh) -> list[float]:
        buffer = torch.tensor([mesh["data"].rank, 7.0, 8.0])  # 3 elements on 2 ranks
        wait(mesh["data"].broadcast(buffer, 1, key()))
        return buffer.tolist()

    assert run_ranks(2, body) == [[1.0, 7.0, 8.0]] * 2


def test_one_rank_does_the_arithmetic_and_returns_no_work() -> None:
    def body(mesh: Mesh) -> tuple[list[float], list[float]]:
        comm = mesh["data"]
        buffer, out = torch.tensor([1 + 2**-10, 2.0]), torch.empty(2)
        assert comm.all_gather(buffer, key()) is None
        assert comm.broadcast(buffer, 0, key()) is None
        assert comm.reduce_scatter(buffer, out, key(), wire=F32, sum=F32) is None
        assert comm.reduce_scatter(buffer, buffer, key(), wire=torch.bfloat16, sum=F32) is None
        return out.tolist(), buffer.tolist()

    assert run_ranks(1, body) == [([1 + 2**-10, 2.0], [1.0, 2.0])]


def test_axes_of_a_mesh_join_the_ranks_that_differ_there() -> None:
    def body(mesh: Mesh) -> tuple[dict[str, int], int, list[list[float]]]:
        gathered = []
        for axis, comm in mesh.items():
            buffer = torch.zeros(comm.size)
            buffer[comm.rank] = flat_rank(mesh)
            if (work := comm.all_gather(buffer, key())) is not None:
                work.wait()
            gathered.append(buffer.tolist())
            assert list(mesh) == ["node", "local", "one"], axis
        return coordinates(mesh), flat_rank(mesh), gathered

    results = run_ranks({"node": 2, "local": 3, "one": 1}, body)
    assert [rank for _, rank, _ in results] == list(range(6))
    place, _, gathered = results[4]
    assert place == {"node": 1, "local": 1, "one": 0}
    assert gathered == [[1.0, 4.0], [3.0, 4.0, 5.0], [4.0]]


def test_calls_meet_by_key_whatever_their_order() -> None:
    def body(mesh: Mesh) -> list[float]:
        comm = mesh["data"]
        buffers = [torch.full((2,), 10.0 * index + comm.rank) for index in range(2)]
        order = [0, 1] if comm.rank == 0 else [1, 0]
        works = [comm.all_gather(buffers[index], key(index)) for index in order]
        for work in reversed(works):
            wait(work)
        return [buffer.tolist() for buffer in buffers]

    assert run_ranks(2, body) == [[[0.0, 1.0], [10.0, 11.0]]] * 2


def test_order_mode_exchanges_unlike_buffers_silently() -> None:
    def body(mesh: Mesh) -> list[float]:
        comm = mesh["data"]
        index = comm.rank  # rank 1 gathers another bucket
        buffer = torch.full((2,), 10.0 * index)
        wait(comm.all_gather(buffer, key(index)))
        return buffer.tolist()

    assert run_ranks(2, body, match="order") == [[0.0, 10.0]] * 2
    with pytest.raises(RankMismatchError):
        run_ranks(2, body, timeout=0.2)


def test_timeout_names_who_did_not_come_and_what_they_did_last() -> None:
    def body(mesh: Mesh) -> None:
        comm = mesh["data"]
        if comm.rank != 2:
            comm.all_gather(torch.zeros(3), key(7, label="layers.7"))
            if comm.rank == 1:
                time.sleep(0.6)
                return
            wait(comm.all_gather(torch.zeros(3), key(8, label="layers.8")))
        time.sleep(0.6)

    errors = run_ranks(3, body, timeout=0.2, return_exceptions=True)
    message = str(errors[0])
    assert isinstance(errors[0], RankMismatchError)
    for words in (
        "rank 0 of 3 waited 0.2 s in all_gather of UNSHARD 'layers.8' (index 8, call 0)",
        "ranks [1, 2] did not come",
        "rank 1 last posted UNSHARD 'layers.7' (index 7, call 0)",
        "rank 2 never posted anything",
    ):
        assert words in message


def test_error_of_a_peer_wakes_the_others_at_once() -> None:
    def body(mesh: Mesh) -> None:
        if mesh["data"].rank == 1:
            raise ZeroDivisionError("router")
        wait(mesh["data"].all_gather(torch.zeros(3), key()))

    start = time.monotonic()
    errors = run_ranks(3, body, return_exceptions=True)
    assert time.monotonic() - start < 5  # of a timeout of 60 s
    assert [type(error) for error in errors] == [RankMismatchError, ZeroDivisionError, RankMismatchError]
    assert "rank 1 failed with ZeroDivisionError: router" in str(errors[0])
    with pytest.raises(ZeroDivisionError) as caught:
        run_ranks(3, body)
    assert caught.value.__notes__ == ["raised on rank 1 of 3, at {'data': 1}"]


def test_error_reaches_ranks_that_share_no_axis() -> None:
    def body(mesh: Mesh) -> None:
        if flat_rank(mesh) == 0:
            raise ZeroDivisionError
        for comm in mesh.values():
            wait(comm.all_gather(torch.zeros(2), key()))

    with pytest.raises(ZeroDivisionError):
        run_ranks({"node": 2, "local": 2}, body)


def test_rank_that_ended_is_named_without_waiting_for_the_timeout() -> None:
    def body(mesh: Mesh) -> None:
        if mesh["data"].rank == 0:
            wait(mesh["data"].all_gather(torch.zeros(2), key()))

    with pytest.raises(RankMismatchError, match="rank 1 has ended without it"):
        run_ranks(2, body)


def test_unlike_calls_under_one_key_are_named() -> None:
    def lengths(mesh: Mesh) -> None:
        wait(mesh["data"].all_gather(torch.zeros(2 + 2 * mesh["data"].rank), key()))

    def dtypes(mesh: Mesh) -> None:
        dtype = (torch.float32, torch.bfloat16)[mesh["data"].rank]
        wait(mesh["data"].all_gather(torch.zeros(2, dtype=dtype), key()))

    def operations(mesh: Mesh) -> None:
        buffer = torch.zeros(2)
        if mesh["data"].rank == 0:
            wait(mesh["data"].all_gather(buffer, key()))
        else:
            wait(mesh["data"].broadcast(buffer, 0, key()))

    for body, found in ((lengths, "4 elements"), (dtypes, "torch.bfloat16"), (operations, "broadcast from rank 0")):
        with pytest.raises(RankMismatchError, match=f"unlike calls meet.*{found}"):
            run_ranks(2, body)


def test_key_serves_once() -> None:
    def body(mesh: Mesh) -> None:
        mesh["data"].all_gather(torch.zeros(2), key())
        mesh["data"].all_gather(torch.zeros(2), key())

    with pytest.raises(RankMismatchError, match="twice"):
        run_ranks(2, body)


def test_exchange_is_empty_when_all_have_waited() -> None:
    def body(mesh: Mesh) -> ThreadComm:
        comm = mesh["data"]
        assert isinstance(comm, ThreadComm)
        for sequence in range(3):
            wait(comm.all_gather(torch.zeros(2), key(sequence=sequence)))
        return comm

    assert [comm.exchange.num_open for comm in run_ranks(2, body)] == [0, 0]


def test_rank_is_like_a_fresh_process() -> None:
    def body(mesh: Mesh) -> tuple[int, bool]:
        return torch.get_num_threads(), torch.is_grad_enabled()

    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        assert run_ranks(2, body) == [(1, True)] * 2
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("shape", [0, {}, {"node": 2, "local": 0}])
def test_mesh_without_ranks_is_refused(shape: int | Mapping[str, int]) -> None:
    with pytest.raises(ConfigError):
        run_ranks(shape, flat_rank)


def test_ranks_leave_the_collection_of_garbage_to_the_thread_that_waits() -> None:
    """torch deadlocks if two threads ask for the state of a generator and garbage is collected meanwhile."""

    class Ring:
        def __init__(self) -> None:
            self.itself = self

    def body(mesh: Mesh) -> tuple[bool, bool]:
        gone = threading.Event()
        weakref.finalize(Ring(), gone.set)
        return gc.isenabled(), gone.wait(30)

    assert gc.isenabled()
    assert run_ranks(2, body) == [(False, True)] * 2
    assert gc.isenabled()
