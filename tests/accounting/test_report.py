"""Planned beside measured: equal to the byte where both speak of the same; buffers hold what the ledger says."""

from typing import Any

import pytest
import torch

import shardwise
from shardwise.accounting.allocator import read_allocator
from shardwise.accounting.held import held_bytes, planned_bytes, sums_by_kind
from shardwise.accounting.report import report_of
from shardwise.comm.base import Mesh, flat_rank
from shardwise.errors import ConfigError
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.sharding import stage_sharding
from shardwise.testing.ranks import run_ranks
from tests.accounting.case import BF16, Model, Switch, Unit, Worker

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
both_precisions = pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])


@every_stage
@both_precisions
def test_buffers_hold_what_the_ledger_says_at_every_change(stage: int, precision: Any) -> None:
    def body(mesh: Mesh) -> int:
        worker = Worker(mesh, stage=stage, precision=precision)
        managed = Managed.of(worker.model)
        ledger = managed.runtime.means.arena.ledger
        owners: dict[tuple[Kind, str], int] = held_bytes(managed)
        num_changes = 0

        def look(kind: Kind, owner: str, num_bytes: int) -> None:
            nonlocal num_changes
            num_changes += 1
            owners[kind, owner] = owners.get((kind, owner), 0) + num_bytes
            held = {key: count for key, count in held_bytes(managed).items() if key[0] is not Kind.OPTIM}
            assert held == {key: count for key, count in owners.items() if count}
            assert sums_by_kind(held) == dict(ledger.now)

        ledger.on_change = look
        for step in range(2):
            with shardwise.no_sync(worker.model, reduce=step == 1):
                worker.backward(step)
            worker.step(step)
        return num_changes

    assert min(run_ranks(3, body)) > 10


@every_stage
@both_precisions
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_planned_is_measured_while_gradients_are_there(stage: int, precision: Any, optimizer: Any) -> None:
    def body(mesh: Mesh) -> Any:
        worker = Worker(mesh, stage=stage, precision=precision, optimizer=optimizer)
        worker.step()
        worker.backward()
        shardwise.clip_grad_norm_(worker.model, 1.0)
        return shardwise.memory_report(worker.model), shardwise.measured_bytes(worker.model)

    with torch.device("meta"):
        model = Model(Switch())
    plan = shardwise.plan(model, 3, stage=stage, units=Unit, precision=precision, optimizer=optimizer)
    for rank, (report, measured) in enumerate(run_ranks(3, body)):
        assert report.planned_bytes == plan.of_rank(rank) == measured
        assert {kind: report.measured_bytes[kind] for kind in measured} == measured
        assert {kind: report.measured_peak_bytes[kind] for kind in measured} == measured
        assert (report.rank, report.num_ranks, report.device) == (rank, 3, "cpu")
        assert report.measured_peak_together_bytes >= sum(measured.values()) - measured["optim"]


@pytest.mark.parametrize("other", [0, 1, 2, 3])
def test_a_plan_over_other_axes_is_that_of_a_model_sharded_so(other: int) -> None:
    def body(mesh: Mesh) -> Any:
        return planned_bytes(
            Managed.of(Worker(mesh, stage=1, optimizer=torch.optim.AdamW).model), stage_sharding(other)
        )

    with torch.device("meta"):
        model = Model(Switch())
    plan = shardwise.plan(model, {"node": 2, "local": 2}, stage=other, units=Unit)
    found = run_ranks({"node": 2, "local": 2}, body)
    assert found == [plan.of_rank(rank) for rank in range(4)]


def test_every_figure_says_planned_or_measured_and_what_it_leaves_out() -> None:
    def body(mesh: Mesh) -> str:
        worker = Worker(mesh, stage=3)
        worker.step()
        return str(shardwise.memory_report(worker.model))

    head, *lines = run_ranks(2, body)[1].splitlines()
    assert " ".join(head.split()) == "bytes of rank 1 of 2 planned at rest measured now measured peak"
    table = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(table)[:6] == [kind.value for kind in Kind]
    assert table["gathered"][0] == table["staging"][0] == "-"
    assert table["param"][0] == table["param"][1] == table["param"][2] != "0"
    assert table["grad"][:2] == [table["param"][0], "0"]
    assert lines[-2].startswith("planned leaves out: gathered parameters, staging, activations")
    assert lines[-1].startswith("measured leaves out: activations and temporaries")


def test_an_unknown_optimizer_has_no_planned_state() -> None:
    class Own(torch.optim.AdamW):
        pass

    def body(mesh: Mesh) -> Any:
        worker = Worker(mesh, optimizer=Own)
        worker.step()
        return shardwise.memory_report(worker.model)

    report = run_ranks(1, body)[0]
    assert report.planned_bytes["optim"] is None
    assert report.measured_bytes["optim"] > 0
    assert report.planned_bytes["param"] == report.measured_bytes["param"]


def test_an_engine_is_asked_like_its_model_and_a_plain_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a sharded model"):
        shardwise.memory_report(torch.nn.Linear(2, 2))
    engine, *_ = shardwise.initialize(
        model=Model(Switch()), config={"batch": {"micro": 1}, "optimizer": {"name": "adamw", "lr": 0.1}}
    )
    assert shardwise.memory_report(engine) == shardwise.memory_report(engine.module)


def test_the_allocator_of_a_device_is_read_where_it_has_counters() -> None:
    stats = {
        "allocated_bytes.all.current": 1000,
        "requested_bytes.all.current": 900,
        "reserved_bytes.all.current": 4000,
        "inactive_split_bytes.all.current": 512,
        "num_alloc_retries": 2,
        "num_device_alloc": 7,
        "num_ooms": 1,
    }

    def body(mesh: Mesh) -> str:
        worker = Worker(mesh)
        report = report_of(Managed.of(worker.model), lambda device: (stats, (3000, 10_000)))
        assert report.measured_by_allocator is not None
        assert report.measured_by_allocator.outside_bytes == 10_000 - 3000 - 4000
        return str(report)

    text = run_ranks(1, lambda mesh: (flat_rank(mesh), body(mesh)))[0][1]
    assert "allocated 1,000, requested 900, reserved 4,000, fragmented 512, outside of it 3,000; 2 retries" in text
    assert read_allocator(torch.device("cpu")) is None
