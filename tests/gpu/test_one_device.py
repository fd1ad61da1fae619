"""The engine on one CUDA device. Skipped, with the reason, where there is none; ``make gpu-check`` runs it.

One NCCL rank whose collectives are forced, or two ranks as threads on one device. What is checked: the numbers, that
the host waits once per step, that the ledger is what torch allocated, and that every lane is waited for (each lane's
work is delayed while freed memory holds NaN; without its wait the delayed work is seen too late).
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.lanes import Handle, Job, Lane, Lanes, Steps, Tensors, make_lanes
from shardwise.managed import Managed
from shardwise.memory import Arena
from shardwise.testing.lanes import PoisonArena
from shardwise.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (make gpu-check)")

DEVICE = torch.device("cuda", 0)
DELAY_CYCLES = 5_000_000  # a few milliseconds
BLOCK_BYTES = 512  # torch rounds every allocation up to it
WIDTH = 256
STAGES = (0, 1, 2, 3)
FP32_RELATIVE = 1e-5
BF16_RELATIVE = 5e-2
all_stages = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module")
def nccl_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One rank whose collectives run although nothing has to move."""
    import torch.distributed as dist

    torch.backends.cuda.matmul.allow_tf32 = False
    rendezvous: Path = tmp_path_factory.mktemp("nccl") / "rendezvous"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1, device_id=DEVICE
    )
    yield {"data": ProcessGroupComm(None, "data", forced=True)}
    dist.destroy_process_group()


def make_model(device: torch.device = DEVICE) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.to(device)


def rows(step: int, rank: int = 0, device: torch.device = DEVICE, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(32, WIDTH, generator=generator).to(device, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).float().pow(2).mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_plain(num_micro_batches: int) -> dict[str, Tensor]:
    model = make_model()
    optimizer = optimizer_of(model)
    for step in range(3):
        for number in range(num_micro_batches):
            (loss_of(model, rows(step, number)) / num_micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def train(mesh: Mesh, stage: int, num_micro_batches: int = 1, **options: Any) -> dict[str, Tensor]:
    model = shardwise.shard(make_model(), mesh, stage=stage, force_collectives=True, **options)
    optimizer = shardwise.shard_optimizer(optimizer_of(model), model)
    for step in range(3):
        for number in range(num_micro_batches):
            (loss_of(model, rows(step, number)) / num_micro_batches).backward()
        assert float(shardwise.clip_grad_norm_(model, 0.01)) > 0.01
        optimizer.step()
        optimizer.zero_grad()
    found = shardwise.full_parameters(model)
    shardwise.unshard_model(model)
    return found


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max())
        assert error <= relative, f"{name} is off by {error:.3g} of its largest element"


@all_stages
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_forced_nccl_collectives_train_as_plain_torch(nccl_mesh: Mesh, stage: int, num_micro_batches: int) -> None:
    assert_close(train(nccl_mesh, stage, num_micro_batches), train_plain(num_micro_batches), FP32_RELATIVE)


@all_stages
def test_bf16_with_fp32_masters_moves_as_fp32_does(nccl_mesh: Mesh, stage: int) -> None:
    def move(model: nn.Module, optimizer: Any, clip: Callable[[], Any], dtype: torch.dtype) -> None:
        for step in range(3):
            loss_of(model, rows(step, dtype=dtype)).backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()

    start = {name: param.detach() for name, param in make_model().named_parameters()}
    plain = make_model()
    move(
        plain,
        torch.optim.SGD(plain.parameters(), lr=1.0),
        lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01),
        torch.float32,
    )
    precision = shardwise.Precision(param=torch.bfloat16)
    model = shardwise.shard(make_model(), nccl_mesh, stage=stage, force_collectives=True, precision=precision)
    optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    move(model, optimizer, lambda: shardwise.clip_grad_norm_(model, 0.01), torch.bfloat16)
    found = shardwise.full_parameters(model)
    shardwise.unshard_model(model)
    for name, param in plain.named_parameters():
        moved, wanted = found[name] - start[name], param.detach() - start[name]
        assert float((moved - wanted).norm() / wanted.norm()) <= BF16_RELATIVE, name


@all_stages
def test_host_waits_for_the_record_of_the_step_only(nccl_mesh: Mesh, stage: int) -> None:
    model = shardwise.shard(make_model(), nccl_mesh, stage=stage, force_collectives=True)
    optimizer = shardwise.shard_optimizer(optimizer_of(model), model)
    settler = Managed.of(model).settler
    exchange: Callable[[Tensor], Tensor] = settler._exchange
    num_exchanges = 0

    def exchange_with_leave(words: Tensor) -> Tensor:
        nonlocal num_exchanges
        num_exchanges += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return exchange(words)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    settler._exchange = exchange_with_leave  # type: ignore[method-assign]
    batches = [rows(step) for step in range(3)]
    for step, x in enumerate(batches):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step creates state and streams
        try:
            loss_of(model, x).backward()
            shardwise.clip_grad_norm_(model, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert num_exchanges == len(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):  # or the mode would show nothing
            float(batches[0].sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    shardwise.unshard_model(model)


def allocated_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(DEVICE)


@all_stages
def test_ledger_is_what_torch_allocated(nccl_mesh: Mesh, stage: int) -> None:
    train(nccl_mesh, stage)  # workspaces of kernels and of NCCL are there from now on
    before = allocated_bytes()
    model = shardwise.shard(make_model(), nccl_mesh, stage=stage, force_collectives=True)
    optimizer = shardwise.shard_optimizer(optimizer_of(model), model)
    ledger = Managed.of(model).runtime.means.arena.ledger
    num_blocks = 4 * len(list(model.parameters()))  # states and counters of each, at most, and the slabs
    slack = num_blocks * BLOCK_BYTES
    assert 0 <= allocated_bytes() - before - ledger.total_bytes <= slack
    for step in range(2):
        ledger.reset_peak()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        loss_of(model, rows(step)).backward()
        optimizer.step()
        kinds = shardwise.measured_bytes(model)
        assert kinds["optim"] > 0
        assert 0 <= allocated_bytes() - before - sum(kinds.values()) <= slack
        optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated(DEVICE) - before >= ledger.peak_total_bytes
    assert 0 <= allocated_bytes() - before - ledger.total_bytes - kinds["optim"] <= slack
    shardwise.unshard_model(model)
    assert ledger.total_bytes == 0


# Lanes


@dataclass(frozen=True, kw_only=True)
class DelayedLane:
    """A side stream that is slow to start and slow to end its jobs."""

    lane: Lane

    def run(self, job: Job, *, reads: Tensors = (), writes: Tensors = (), updates: Tensors = ()) -> Handle:
        def slow() -> Steps:
            torch.cuda._sleep(DELAY_CYCLES)
            yield from job()
            torch.cuda._sleep(DELAY_CYCLES)

        return self.lane.run(slow, reads=reads, writes=writes, updates=updates)

    def flush(self) -> None:
        self.lane.flush()


def delayed_lanes(name: str) -> Callable[[torch.device], Lanes]:
    def make(device: torch.device) -> Lanes:
        lanes = make_lanes(device)
        gather = DelayedLane(lane=lanes.gather) if name == "gather" else lanes.gather
        reduce = DelayedLane(lane=lanes.reduce) if name == "reduce" else lanes.reduce
        return Lanes(gather=gather, reduce=reduce)

    return make


def test_wait_orders_the_compute_stream_after_a_side_stream() -> None:
    lane = make_lanes(DEVICE).gather
    target = torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()

    def job() -> Steps:
        torch.cuda._sleep(20 * DELAY_CYCLES)
        target.fill_(1)
        yield None

    handle = lane.run(job, writes=[target])
    early = target.clone()  # the negative control: without the wait the job is not seen
    handle.wait()
    late = target.clone()
    assert (early.item(), late.item()) == (0.0, 1.0)


def test_job_starts_after_what_compute_did_before_it_was_issued() -> None:
    lane = make_lanes(DEVICE).reduce
    source, target = torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * DELAY_CYCLES)
    source.fill_(1)

    def job() -> Steps:
        target.copy_(source)
        yield None

    lane.run(job, reads=[source], writes=[target]).host_wait()
    assert target.item() == 1.0


@all_stages
@pytest.mark.parametrize("delayed", ["gather", "reduce"])
def test_results_are_the_same_bits_with_a_slow_lane_and_poisoned_memory(
    nccl_mesh: Mesh, stage: int, delayed: str
) -> None:
    def arena(device: torch.device) -> Arena:
        return PoisonArena(device)

    quick = train(nccl_mesh, stage)
    slow = train(nccl_mesh, stage, lanes=delayed_lanes(delayed), arena=arena)
    for name, tensor in quick.items():
        assert torch.equal(slow[name], tensor), name


@all_stages
def test_two_ranks_as_threads_on_one_device_train_as_on_the_cpu(stage: int) -> None:
    def train_on(device: torch.device) -> Callable[[Mesh], dict[str, Tensor]]:
        def body(mesh: Mesh) -> dict[str, Tensor]:
            rank = mesh["data"].rank
            # One thread of autograd serves a device: the hooks of two ranks would wait for each other there.
            with torch.autograd.set_multithreading_enabled(False):
                model = shardwise.shard(make_model(device), mesh, stage=stage)
                optimizer = shardwise.shard_optimizer(optimizer_of(model), model)
                for step in range(2):
                    loss_of(model, rows(step, rank, device)).backward()
                    shardwise.clip_grad_norm_(model, 0.01)
                    optimizer.step()
                    optimizer.zero_grad()
                return {name: value.cpu() for name, value in shardwise.full_parameters(model).items()}

        return body

    wanted = run_ranks(2, train_on(torch.device("cpu")))[0]
    for found in run_ranks(2, train_on(DEVICE)):
        assert_close(found, wanted, 1e-4)
