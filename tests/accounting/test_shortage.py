"""Memory that cannot be had: one error of ours with the place, the owners and the way out; no other is hidden."""

import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
from shardwise.accounting.allocator import Allocator
from shardwise.accounting.held import held_bytes, sums_by_kind
from shardwise.accounting.report import report_of
from shardwise.accounting.shortage import Place, _advice
from shardwise.comm.base import Mesh
from shardwise.managed import Managed
from shardwise.memory import Arena, Kind, OutOfMemoryError, is_out_of_memory
from shardwise.testing.ranks import run_ranks
from tests.accounting.case import BF16, CPU_WORDS, Model, Switch, Unit, Worker, values

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SHORT = f"{CPU_WORDS} 123456 bytes. Error code 12 (Cannot allocate memory)"
ERRORS: dict[str, Callable[[], Exception]] = {
    "cpu": lambda: RuntimeError(SHORT),
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "python": MemoryError,
}


class ShortArena(Arena):
    """Has no memory for the slab that is filled as the ``fails_at``-th from now, 0: has it always."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fails_at = self.num_filled = 0
        self.make: Callable[[], Exception] = lambda: RuntimeError(SHORT)

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        if num_bytes:
            self.num_filled += 1
            if self.num_filled == self.fails_at:
                raise self.make()
        super().resize(tensor, num_bytes)


def test_torchs_and_pythons_words_are_known_and_others_are_not() -> None:
    assert all(is_out_of_memory(make()) for make in ERRORS.values())
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not any(is_out_of_memory(each) for each in (RuntimeError("CUDA error"), ValueError(SHORT), OSError(12, "x")))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@every_stage
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", ["forward blocks.1", "backward blocks.1", "step"])
def test_a_failure_of_torch_becomes_ours_with_its_place(stage: int, error: str, at: str) -> None:
    def body(mesh: Mesh) -> BaseException:
        worker = Worker(mesh, stage=stage)
        worker.step()
        worker.switch.error, worker.switch.at = ERRORS[error](), at
        original = worker.switch.error
        with pytest.raises(OutOfMemoryError) as caught, shardwise.explain_memory(worker.model):
            worker.step()
        assert caught.value.__cause__ is original
        assert "switch.check" in "".join(traceback.format_exception(caught.value))
        worker.optimizer.zero_grad()
        worker.step()
        return caught.value

    phase, _, unit = at.partition(" ")
    where = {
        "forward": "in the forward of unit ",
        "backward": "in the backward of unit ",
        "step": "in the optimizer's step",
    }
    for found in run_ranks(1, body):
        assert isinstance(found, torch.OutOfMemoryError)
        assert isinstance(found, shardwise.ShardwiseError)
        first, second, *_ = str(found).splitlines()
        assert first == (str(ERRORS[error]()) or "MemoryError")
        assert second == where[phase] + unit


def test_the_place_is_found_without_any_explanation_around_other_models() -> None:
    def body(mesh: Mesh) -> None:
        outer, inner = Worker(mesh), Worker(mesh)
        inner.switch.error, inner.switch.at = RuntimeError(SHORT), "forward blocks.0"
        outer.model.register_forward_hook(lambda *_: inner.model(torch.ones(2, 7)))
        where = r"in the forward of unit blocks\.0"
        with pytest.raises(OutOfMemoryError, match=where), shardwise.explain_memory(inner.model):
            outer.model(torch.ones(2, 7))

    run_ranks(1, body)


def test_other_errors_pass_as_they_are() -> None:
    def body(mesh: Mesh) -> None:
        worker = Worker(mesh)
        for at in ("forward blocks.2", "backward blocks.0", "step"):
            for error in (RuntimeError("CUDA error: device-side assert"), ValueError("no"), KeyError("k")):
                worker.switch.error, worker.switch.at = error, at
                with pytest.raises(type(error)) as caught, shardwise.explain_memory(worker.model):
                    worker.step()
                assert caught.value is error
                assert caught.value.__cause__ is None
                worker.optimizer.zero_grad()
        with pytest.raises(KeyboardInterrupt), shardwise.explain_memory(worker.model):
            raise KeyboardInterrupt

    run_ranks(1, body)


@every_stage
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_a_failure_of_the_arena_is_ours_wherever_it_comes_and_training_goes_on(stage: int, precision: Any) -> None:
    """Each allocation of a step fails once; what follows trains as if nothing had been."""

    def body(mesh: Mesh) -> list[str]:
        worker, smooth = (
            Worker(mesh, stage=stage, precision=precision, arena=ShortArena, optimizer=torch.optim.AdamW, **alone)
            for _ in range(2)
        )
        managed = Managed.of(worker.model)
        arena: Any = managed.runtime.means.arena
        for each in (worker, smooth):
            each.step()
        arena.num_filled = 0
        for each in (worker, smooth):
            each.step(1)
        found = []
        for number in range(1, arena.num_filled + 1):
            arena.num_filled, arena.fails_at = 0, number
            with pytest.raises(OutOfMemoryError) as caught:
                worker.step(2)
            assert isinstance(caught.value.__cause__, RuntimeError)
            found.append(str(caught.value))
            arena.fails_at = 0
            worker.optimizer.zero_grad()
            with torch.no_grad():
                worker.model(torch.ones(1, 7))
            held = {key: count for key, count in held_bytes(managed).items() if key[0] is not Kind.OPTIM}
            assert sums_by_kind(held) == dict(arena.ledger.now)
            assert arena.ledger.now[Kind.GRAD] == arena.ledger.now[Kind.STAGING] == 0
        for each in (worker, smooth):
            each.step(2)
        trained, expected = (shardwise.full_parameters(each.model) for each in (worker, smooth))
        assert all(torch.equal(trained[name], expected[name]) for name in expected)
        return found

    alone = {"force_collectives": True}
    for found in run_ranks(1, body):
        assert len(found) >= 4
        for text in found:
            first, place, *_ = text.splitlines()
            assert re.fullmatch(r"[\d,]+ bytes \((gathered|grad|staging) of \S+\) cannot be had on cpu", first)
            assert re.match(r"in the (forward of unit|backward|optimizer's step)", place)
            assert "planned at rest" in text
            assert "largest owners (measured): " in text
        assert any("\nin the forward of unit blocks.1\n" in text for text in found) is (stage == 3)


def test_what_the_arena_cannot_have_while_a_model_is_sharded_is_told_too() -> None:
    def body(mesh: Mesh) -> None:
        class Short(ShortArena):
            def __init__(self, device: torch.device) -> None:
                super().__init__(device)
                self.fails_at = 2

        with pytest.raises(OutOfMemoryError, match=r"bytes \(gathered of blocks\.0\) cannot be had on cpu"):
            Worker(mesh, arena=Short)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:.*gradients.* discarded")
def test_an_engine_explains_by_itself() -> None:
    switch = Switch()
    model = Model(switch)
    values(model)
    engine, *_ = shardwise.initialize(
        model=model, units=Unit, config={"batch": {"micro": 1}, "optimizer": {"name": "adamw", "lr": 0.1}}
    )
    rows = torch.ones(2, 7)
    for at, where in (("forward blocks.2", "forward"), ("backward blocks.0", "backward")):
        switch.error, switch.at = RuntimeError(SHORT), at
        with pytest.raises(OutOfMemoryError, match=rf"in the {where} of unit {at.split()[1]}"):
            engine.backward(engine(rows).square().mean())
    engine.backward(engine(rows).square().mean())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.optimizer, "step", lambda: torch.empty(1 << 60))
        with pytest.raises(OutOfMemoryError, match="outside of forward, backward and step"):
            engine.step()
    engine.zero_grad()
    engine.backward(engine(rows).square().mean())
    engine.step()
    assert engine.global_steps == 1


def advice(mesh: Mesh, place: Place, **options: Any) -> str:
    worker = Worker(mesh, optimizer=torch.optim.AdamW, **options)
    worker.step()
    managed = Managed.of(worker.model)
    return "\n".join(_advice(managed, place, report_of(managed)))


def test_only_what_can_be_done_is_advised() -> None:
    backward, step = Place(phase="backward", unit="blocks.0"), Place(phase="step")

    def of(num_ranks: int, place: Place, **options: Any) -> str:
        return run_ranks(num_ranks, lambda mesh: advice(mesh, place, **options))[0]

    at_0, at_2, at_3 = (of(2, backward, stage=stage) for stage in (0, 2, 3))
    assert all(f"stage={number} " in at_0 for number in (1, 2, 3))
    assert "stage=2" not in at_2
    assert "stage=3 " in at_2
    assert "a higher stage" not in at_3
    assert "units=" in at_3
    assert "units=" not in at_2
    assert "prefetch=0, not 1" in at_3
    assert "prefetch" not in of(2, backward, stage=3, prefetch=0)
    assert "reductions_in_flight=1, not 2" in at_0
    assert "reductions_in_flight" not in of(2, backward, stage=0, reductions_in_flight=1)
    assert "checkpointing" in at_3
    assert "micro-batch" in at_3
    in_step = of(2, step, stage=3)
    assert not any(word in in_step for word in ("micro-batch", "checkpointing", "prefetch", "foreach"))  # it is fused
    alone = of(1, Place(phase="forward"))
    assert "more ranks" in alone
    assert "reductions" not in alone


def test_planned_bytes_of_the_advice_are_those_of_the_plan() -> None:
    text = run_ranks(2, lambda mesh: advice(mesh, Place(), stage=0))[0]
    with torch.device("meta"):
        model = Model(Switch())
    for number in (1, 2, 3):
        planned = sum(shardwise.plan(model, 2, stage=number, units=Unit).of_rank(0).values())
        assert f"stage={number} {planned:,}" in text


def test_pieces_of_reserved_memory_are_advised_against_where_there_are_many() -> None:
    def body(mesh: Mesh) -> list[bool]:
        managed = Managed.of(Worker(mesh).model)
        found = []
        for fragmented in (10, 2000):
            stats = {"reserved_bytes.all.current": 10_000, "inactive_split_bytes.all.current": fragmented}
            report = report_of(managed, lambda device, stats=stats: (stats, (0, 0)))
            assert isinstance(report.measured_by_allocator, Allocator)
            found.append("expandable_segments" in "\n".join(_advice(managed, Place(), report)))
        return found

    assert run_ranks(1, body) == [[False, True]]


REAL = """
import resource
import torch
import shardwise

torch.set_num_threads(1)

def step(model, optimizer, rows):
    model(torch.ones(rows, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def runs_short(stage, rows):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    model = shardwise.shard(model, stage=stage, units=torch.nn.Linear, force_collectives=True)
    optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    step(model, optimizer, 4)
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), -1))
    try:
        with shardwise.explain_memory(model):
            step(model, optimizer, rows)
            torch.empty(1 << 30)
    except shardwise.OutOfMemoryError as error:
        print(str(error).splitlines()[1], "checkpointing" in str(error), str(error.__cause__)[:40])
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    step(model, optimizer, 4)
    print("went on")

for stage in range(4):
    for rows in (1 << 16, 4):
        runs_short(stage, rows)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")
def test_a_process_that_really_has_no_memory_tells_and_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cause = "[enforce fail at alloc_cpu.cpp"
    places = ("in the forward of unit True", "outside of forward, backward and step False")
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["went on"] * 8
    assert [re.sub(r"unit \d", "unit", line.partition(f" {cause}")[0]) for line in lines[::2]] == list(places) * 4
    assert all(cause in line for line in lines[::2])


REAL_ARENA = """
import resource
import torch
import shardwise

torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(2)))
model = shardwise.shard(model, stage=3, units=torch.nn.Linear, force_collectives=True)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), -1))
try:
    model(torch.ones(1, 4096))
except torch.OutOfMemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(model(torch.ones(1, 4096)).shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")
def test_a_gather_that_really_has_no_memory_tells_without_any_context() -> None:
    done = subprocess.run([sys.executable, "-c", REAL_ARENA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, place, *_, last = done.stdout.splitlines()
    assert first == f"{4 * (4096 * 4096 + 4096):,} bytes (gathered of 0) cannot be had on cpu"
    assert place == "in the forward of unit 0"
    assert last == "torch.Size([1, 4096])"
