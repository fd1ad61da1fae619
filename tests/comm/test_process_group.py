"""Gloo processes agree with ranks as threads and with plain arithmetic, call for call and bit for bit.

Each world is started once and does everything; the tests look at parts of its results.
"""

import math
import random
import time
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from shardwise.comm import process_group
from shardwise.comm.base import Comm, Key, Mesh, Verb, Work, part
from shardwise.comm.fake import LocalComm
from shardwise.comm.process_group import MAX_BUCKETS, ProcessGroupComm, mesh_from
from shardwise.errors import ConfigError
from shardwise.testing.ranks import flat_rank, run_processes, run_ranks

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
WORLDS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("data", 2),),
    (("data", 3),),
    (("data", 4),),
    (("node", 2), ("local", 2)),
)
# buffer, wire, sum, out; None: into its own part of the buffer
CASES = (
    (F32, F32, F32, None),
    (F64, F64, F64, None),
    (BF16, BF16, F32, None),
    (BF16, BF16, BF16, F32),
    (F16, F16, F16, None),
    (F16, F32, F32, F32),
    (F32, BF16, F32, None),
    (F32, F32, F64, BF16),
)
# elements of a part: one, vector and tail, and several chunks whose edges are not round
NUMELS = (1, 67, 1501)
NATIVE_TOLERANCE = 4 * torch.finfo(torch.bfloat16).eps  # a sum in any order, rounded at every hop

Results = dict[str, Tensor]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=F64).to(dtype)


def finish(work: Work | None) -> None:
    if work is not None:
        work.wait()


def call_all(comm: Comm, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Make every collective of ``CASES``; ``rank`` seeds this rank's values."""
    for index, (case, numel) in enumerate(product(CASES, NUMELS)):
        dtype, wire, total, out_dtype = case
        buffer = values(rank, numel * comm.size, dtype)
        own = part(buffer, comm.rank, comm.size)
        out = own if out_dtype is None else torch.empty(numel, dtype=out_dtype)
        finish(comm.reduce_scatter(buffer, out, Key(index, Verb.REDUCE, 0, "a"), wire=wire, sum=total))
        yield f"reduced {case} {numel}", out.clone()
        yield f"buffer after {case} {numel}", buffer.clone()
        own.copy_(out)
        finish(comm.all_gather(buffer, Key(index, Verb.UNSHARD, 0, "a")))
        yield f"gathered {case} {numel}", buffer.clone()
        finish(comm.broadcast(buffer, comm.size - 1, Key(index, Verb.BROADCAST, 0, "a")))
        yield f"broadcast {case} {numel}", buffer


class NativeComm(ProcessGroupComm):
    """Takes the path of other backends: their collectives instead of paired transfers."""

    def _is_paired(self, buffer: Tensor) -> bool:
        return False


def call_shuffled(comm: Comm, num_rounds: int = 8, num_buckets: int = 5) -> Tensor:
    """Issue and wait in an order that differs on every rank; return how many results are wrong."""
    chance = random.Random(comm.rank)
    wrong = torch.tensor(0)
    for sequence in range(num_rounds):
        calls = [(verb, index) for verb in (Verb.UNSHARD, Verb.REDUCE) for index in range(num_buckets)]
        chance.shuffle(calls)
        pending = []
        for verb, index in calls:
            key = Key(index, verb, sequence, "a")
            buffer = torch.full((4 * comm.size,), float(100 * sequence + 10 * index + comm.rank))
            if verb is Verb.UNSHARD:
                work = comm.all_gather(buffer, key)
                ranks = torch.arange(float(comm.size)).repeat_interleave(4)
                pending.append((work, buffer, 100 * sequence + 10 * index + ranks))
            else:
                own = part(buffer, comm.rank, comm.size)
                work = comm.reduce_scatter(buffer, own, key, wire=F32, sum=F32)
                pending.append((work, own, torch.tensor(100 * sequence + 10 * index + (comm.size - 1) / 2).expand(4)))
            time.sleep(chance.choice((0, 0, 0.0005)))
        chance.shuffle(pending)
        for work, found, expected in pending:
            finish(work)
            wrong += not torch.equal(found, expected)
    return wrong


def refusal(comm: Comm, buffer: Tensor, index: int = 0) -> str:
    try:
        comm.all_gather(buffer, Key(index, Verb.ACCESS, 0, "layers.0"))
    except ConfigError as error:
        return str(error)
    return "taken"


def everything(mesh: Mesh) -> Results:
    results: Results = {}
    for axis, comm in mesh.items():
        results |= {f"{axis}: {name}": value for name, value in call_all(comm, flat_rank(mesh))}
        results[f"{axis}: wrong"] = call_shuffled(comm)
    return results


def everything_and_native(mesh: Mesh) -> tuple[Results, Results, dict[str, str]]:
    """Run ``everything``, the same calls by native collectives, and calls that must be refused."""
    process_group._MIN_CHUNK_BYTES = 1 << 10
    results = everything(mesh)
    native: Results = {}
    refused: dict[str, str] = {}
    if list(mesh) == ["data"]:
        for deterministic in (True, False):
            comm = NativeComm(None, "data", deterministic=deterministic)
            native |= {f"{deterministic}: {name}": value for name, value in call_all(comm, comm.rank)}
        comm = ProcessGroupComm()
        refused["meta"] = refusal(comm, torch.empty(2 * comm.size, device="meta"))
        with FakeTensorMode():
            refused["cuda"] = refusal(comm, torch.empty(2 * comm.size, device="cuda"))
        refused["bucket"] = refusal(comm, torch.empty(2 * comm.size), index=MAX_BUCKETS)
        refused["empty"] = refusal(comm, torch.empty(0))
        refused["axes"] = " ".join(mesh_from(None))
    else:
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        refused["axes"] = " ".join(mesh_from(device_mesh)) + ", " + " ".join(mesh_from(device_mesh["tp"]))
        alone = mesh_from(device_mesh["tp"].get_group())["data"]
        refused["group"] = f"{alone.rank == flat_rank(mesh) % 2} {alone.size}"
        try:
            mesh_from(init_device_mesh("cpu", (4,)))
        except ConfigError as error:
            refused["names"] = str(error)
    return results, native, refused


def forced_alone(mesh: Mesh) -> list[Results]:
    kinds = (ProcessGroupComm(), ProcessGroupComm(forced=True), NativeComm(forced=True), mesh["data"])
    return [dict(call_all(comm, 0)) for comm in kinds]


@cache
def on_processes(world: tuple[tuple[str, int], ...]) -> list[tuple[Results, Results, dict[str, str]]]:
    return run_processes(dict(world), everything_and_native, timeout=60)


def name_of(world: tuple[tuple[str, int], ...]) -> str:
    return "x".join(str(size) for _, size in world)


def same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_processes_agree_with_threads_bitwise(world: tuple[tuple[str, int], ...]) -> None:
    threads = run_ranks(dict(world), everything)
    assert len(threads) == math.prod(size for _, size in world)
    for rank, (by_process, _, _) in enumerate(on_processes(world)):
        assert list(by_process) == list(threads[rank])
        unlike = [name for name, value in by_process.items() if not same(value, threads[rank][name])]
        assert unlike == []


@pytest.mark.parametrize("world", WORLDS[:3], ids=name_of)
def test_results_are_those_of_plain_arithmetic(world: tuple[tuple[str, int], ...]) -> None:
    (_, size) = world[0]
    for rank, (results, _, _) in enumerate(on_processes(world)):
        for case, numel in product(CASES, NUMELS):
            dtype, wire, sum_dtype, out_dtype = case
            full = [values(peer, numel * size, dtype) for peer in range(size)]
            total = torch.zeros(numel * size, dtype=sum_dtype)
            for each in full:
                total = total + each.to(wire).to(sum_dtype)
            mean = (total / size).to(out_dtype or dtype)
            assert torch.equal(results[f"data: reduced {case} {numel}"], part(mean, rank, size))
            assert same(results[f"data: gathered {case} {numel}"], mean.to(dtype))
            if out_dtype is None:
                part(full[rank], rank, size).copy_(part(mean, rank, size))
            assert same(results[f"data: buffer after {case} {numel}"], full[rank])


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_any_order_of_calls_and_waits_is_right(world: tuple[tuple[str, int], ...]) -> None:
    for results, _, _ in on_processes(world):
        assert [results[f"{axis}: wrong"].item() for axis, _ in world] == [0] * len(world)


@pytest.mark.parametrize("world", WORLDS[:3], ids=name_of)
def test_native_collectives_agree_bitwise_when_deterministic(world: tuple[tuple[str, int], ...]) -> None:
    for results, native, _ in on_processes(world):
        for name, value in native.items():
            deterministic, _, call = name.partition(": ")
            expected = results[f"data: {call}"]
            if deterministic == "True":
                assert same(value, expected), name
            else:
                torch.testing.assert_close(value, expected, rtol=NATIVE_TOLERANCE, atol=NATIVE_TOLERANCE)


def test_forced_collectives_of_one_rank_change_nothing() -> None:
    ((plain, *others),) = run_processes(1, forced_alone)
    for other in others:
        assert all(same(value, plain[name]) for name, value in other.items())


def test_what_cannot_be_moved_is_refused_with_advice() -> None:
    for _, _, refused in on_processes(WORLDS[0]):
        assert "cannot move tensors on 'meta'" in refused["meta"]
        assert "cannot move tensors on 'cuda'" in refused["cuda"]
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in refused["cuda"]
        assert "bucket 4095" in refused["bucket"]
        assert "use larger units" in refused["bucket"]
        assert refused["empty"] == "taken"


def test_device_mesh_becomes_one_communicator_per_named_axis() -> None:
    for _, _, refused in on_processes(WORLDS[3]):
        assert refused["axes"] == "dp tp, tp"
        assert refused["group"] == "True 2"
        assert "mesh_dim_names" in refused["names"]
    assert on_processes(WORLDS[0])[0][2]["axes"] == "data"


def test_mesh_without_torch_distributed_is_this_process_alone() -> None:
    (axis, comm), *others = mesh_from(None).items()
    assert (axis, type(comm), others) == ("data", LocalComm, [])
    with pytest.raises(ConfigError, match="init_process_group"):
        ProcessGroupComm()


def test_mapping_is_a_mesh_as_it_is() -> None:
    mesh: Mapping[str, Comm] = {"data": LocalComm()}
    assert mesh_from(mesh) == mesh
    with pytest.raises(ConfigError, match="int"):
        mesh_from(4)  # type: ignore[arg-type]


def test_ranks_of_a_launcher_without_a_group_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each would train alone"):
        mesh_from(None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert mesh_from(None)["data"].size == 1
