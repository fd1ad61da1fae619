"""What sharding asks of glibc's allocator: no page faults in a steady step, and no harm to what else a process does."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.memory import Arena, Kind

MIB = 1 << 20
glibc_only = pytest.mark.skipif(sys.platform != "linux", reason="mallopt and /proc")


def asked(monkeypatch: pytest.MonkeyPatch, *slab_bytes: int, device: str = "cpu") -> dict[int, int]:
    """The calls of mallopt, by parameter, for an arena with slabs of these sizes."""
    calls: dict[int, int] = {}

    def mallopt(parameter: int, value: int) -> int:
        calls[parameter] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    arena = Arena(torch.device(device))
    for size in slab_bytes:
        arena.slab(Kind.GRAD, size // 4, torch.float32)
    assert arena.keep_freed_pages() is (device == "cpu")
    return calls


def test_limits_are_those_of_the_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, 8 * MIB, 4 * MIB, 8 * MIB) == {-3: 8 * MIB + 4096, -1: 20 * MIB}


@pytest.mark.parametrize(("sizes", "mapped", "kept"), [((), 1 << 17, 1 << 18), ((4096,), 1 << 17, 1 << 18)])
def test_small_models_leave_the_defaults(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], mapped: int, kept: int
) -> None:
    assert asked(monkeypatch, *sizes) == {-3: mapped, -1: kept}


def test_limits_stay_in_what_mallopt_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, *[40 * MIB] * 60) == {-3: 32 * MIB, -1: (1 << 31) - 1}


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, device="meta") == {}


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("the allocator was asked"))
    assert not Arena(torch.device("cpu")).keep_freed_pages()


def test_other_libraries_than_glibc_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not Arena(torch.device("cpu")).keep_freed_pages()


def in_a_process(script: str) -> Any:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    return float(done.stdout)


@glibc_only
def test_steady_steps_fault_few_pages() -> None:
    script = """
import resource, torch, shardwise
torch.manual_seed(0)
model = shardwise.shard(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))), stage=1)
optimizer = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-9), model)
def step():
    model(torch.ones(2, 1024)).sum().backward(); optimizer.step(); optimizer.zero_grad()
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""
    pages = 12 * 1024 * 1024 * 4 / 4096  # of the gradients
    assert in_a_process(script) < pages / 10


@glibc_only
def test_growing_tensors_beside_a_small_model_do_not_pile_up() -> None:
    script = """
import torch, shardwise
from shardwise.train.measure import peak_rss_bytes
shardwise.shard(torch.nn.Linear(64, 64))
start, grown, small = peak_rss_bytes(), [torch.zeros(1024) for _ in range(4)], []
for number in range(600):
    grown = [torch.cat([tensor, torch.zeros(4096)]) for tensor in grown]
    small.append(torch.zeros(512))
live = sum(tensor.nbytes for tensor in grown + small)
print((peak_rss_bytes() - start) / live)
"""
    assert in_a_process(script) < 4
