"""A timeline is what happened: the ledger at every change, every collective, every unit; nothing once it is over."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.base import Mesh, flat_rank
from shardwise.comm.recording import RecordingComm, record
from shardwise.errors import ConfigError, StateError
from shardwise.managed import Managed
from shardwise.memory import Kind, OutOfMemoryError
from shardwise.testing.ranks import run_ranks
from shardwise.trace.chrome import chrome_trace, write_chrome_trace
from shardwise.trace.lines import Lines, read_lines
from tests.accounting.case import BF16, CPU_WORDS, Model, Switch, Unit, Worker, values

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ARENA = [kind.value for kind in Kind if kind is not Kind.OPTIM]
Line = dict[str, Any]


def lines_of(folder: Path, rank: int = 0) -> list[Line]:
    return list(read_lines(folder / f"timeline-rank-{rank}.jsonl"))


def of_arena(held: dict[str, int]) -> dict[str, int]:
    return {kind: held.get(kind, 0) for kind in ARENA}


def steps(worker: Worker, num_steps: int = 2) -> None:
    for step in range(num_steps):
        with shardwise.no_sync(worker.model, reduce=step == 1):
            worker.backward(step)
        worker.step(step)


def slices(lines: list[Line]) -> Iterator[tuple[Line, Line]]:
    ends = {line["slice"]: line for line in lines if line["what"] == "end"}
    for line in lines:
        if line["what"] == "begin":
            yield line, ends.pop(line["slice"], lines[-1])  # the last refresh is in flight
    assert not ends


@every_stage
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_bytes_are_those_of_the_ledger_at_every_change(stage: int, precision: Any, tmp_path: Path) -> None:
    def body(mesh: Mesh) -> Any:
        worker = Worker(mesh, stage=stage, precision=precision)
        ledger = Managed.of(worker.model).runtime.means.arena.ledger
        seen: list[dict[str, int]] = []
        with shardwise.timeline(worker.model, tmp_path):
            ledger.reset_peak()
            told: Any = ledger.on_change

            def look(kind: Kind, owner: str, num_bytes: int) -> None:
                told(kind, owner, num_bytes)
                seen.append({each.value: count for each, count in ledger.now.items()})

            ledger.on_change = look
            steps(worker)
        return seen, ledger.peak_total_bytes, shardwise.memory_report(worker.model)

    for rank, (seen, peak, report) in enumerate(run_ranks(3, body)):
        head, *lines, foot = lines_of(tmp_path, rank)
        memory = [line for line in lines if line["what"] == "memory"]
        arena = [line for line in memory if line["kind"] != "optim"]
        assert [of_arena(line["measured_bytes"]) for line in arena] == [of_arena(held) for held in seen]
        assert max(sum(of_arena(line["measured_bytes"]).values()) for line in (head, *arena)) == peak
        owners = {(kind, owner): count for kind, owner, count in head["measured_owners"]}
        most, best = sum(owners.values()), dict(owners)
        for line in memory:
            owners[line["kind"], line["owner"]] = (
                owners.get((line["kind"], line["owner"]), 0) + line["measured_change_bytes"]
            )
            sums = {kind: sum(n for (each, _), n in owners.items() if each == kind) for kind, _ in owners}
            assert {kind: count for kind, count in sums.items() if count} == line["measured_bytes"]
            if sum(owners.values()) > most:
                most, best = sum(owners.values()), dict(owners)
        assert min(owners.values()) >= 0
        found = foot["measured_peak"]
        assert found["bytes"] == most == sum(found["by_kind"].values())
        assert {(kind, owner): n for kind, owner, n in found["by_owner"]} == {k: n for k, n in best.items() if n}
        assert sums["optim"] == report.measured_bytes["optim"] > 0
        assert {owner for kind, owner in owners if kind == "optim"} <= set(head["units"])
        assert foot["planned_bytes"] == report.planned_bytes


@every_stage
def test_collectives_are_those_of_the_recording(stage: int, tmp_path: Path) -> None:
    def body(mesh: Mesh) -> Any:
        recorded, log = record(mesh)
        worker = Worker(recorded, stage=stage)
        log.clear()
        with shardwise.timeline(worker.model, tmp_path):
            steps(worker)
            known = list(log)
        worker.step()
        return known

    for rank, known in enumerate(run_ranks({"node": 2, "local": 2}, body)):
        lines = lines_of(tmp_path, rank)
        found = [pair for pair in slices(lines) if pair[0]["operation"] == "collective"]
        assert [
            (line["axis"], line["verb"], line["label"], line["collective"], line["sent_bytes"]) for line, _ in found
        ] == [(e.axis, e.verb.name.lower(), e.label, e.operation, e.sent_bytes) for e in known]
        assert all(0 <= end.get("waited_seconds", 0) <= end["seconds"] - line["seconds"] + 1e-6 for line, end in found)
        assert len({line["axis"] for line, _ in found}) == 2
        assert {line["verb"] for line, end in found if end["what"] != "end"} <= {"refresh"}
        assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_lines_say_step_phase_and_unit(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> None:
        worker = Worker(mesh, stage=3)
        with shardwise.timeline(worker.model, tmp_path):
            steps(worker)

    run_ranks(2, body)
    lines = lines_of(tmp_path)
    work = [pair for pair in slices(lines) if pair[0]["operation"] != "collective"]
    first = [(line["operation"], line.get("owner")) for line, _ in work if line["step"] == 1]
    forward = [("forward", name) for name in ("root", "blocks.0", "blocks.1", "blocks.2")]
    backward = [("backward", name) for name in (None, "root", "blocks.2", "blocks.1", "blocks.0")]
    assert first == [*forward, *backward] * 2 + [("step", None)]
    assert {line["step"] for line, _ in work} == {1, 2}
    times = {
        line["owner"]: (line["seconds"], end["seconds"])
        for line, end in work
        if line["operation"] == "backward" and "owner" in line
    }
    assert times["blocks.2"][1] < times["blocks.0"][0]
    inside = next(line for line, _ in work if line.get("owner") == "blocks.1")
    assert (inside["phase"], inside["units"]) == ("forward", ["root"])
    freed = [line for line in lines if line.get("owner") == "blocks.1" and line.get("measured_change_bytes", 0) < 0]
    assert (freed[0]["phase"], freed[0]["units"]) == ("forward", ["root", "blocks.1"])
    memory = [line for line in lines if line["what"] == "memory"]
    assert {line["phase"] for line in memory if line["kind"] == "grad"} == {"backward", "between", "step"} - {"step"}
    gathered = [line for line in memory if line["kind"] == "gathered" and line["measured_change_bytes"] > 0]
    assert {line["owner"] for line in gathered} == {"root", "blocks.0", "blocks.1", "blocks.2"}
    assert {line["phase"] for line in gathered} == {"forward", "backward"}
    assert [line["phase"] for line in memory if line["kind"] == "optim"] == ["step"] * 4
    for line, end in work:
        if line["operation"] in ("forward", "step"):
            inside_it = [each for each in memory if line["seconds"] < each["seconds"] < end["seconds"]]
            assert {each["phase"] for each in inside_it} <= {line["operation"]}


@every_stage
def test_the_chrome_trace_has_every_line_and_its_slices_nest(stage: int, tmp_path: Path) -> None:
    def body(mesh: Mesh) -> None:
        worker = Worker(mesh, stage=stage, precision=BF16)
        with shardwise.timeline(worker.model, tmp_path) as found:
            steps(worker)
        assert found.chrome_trace == tmp_path / f"trace-rank-{flat_rank(mesh)}.json"

    run_ranks(2, body)
    for rank in range(2):
        lines = lines_of(tmp_path, rank)
        events = json.loads((tmp_path / f"trace-rank-{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        whole = [event for event in events if event["ph"] == "X"]
        times = [(round(line["seconds"] * 1e6, 1), round(end["seconds"] * 1e6, 1)) for line, end in slices(lines)]
        assert sorted((e["ts"], e["dur"]) for e in whole) == sorted((one, round(two - one, 1)) for one, two in times)
        counters = [event for event in events if event["ph"] == "C"]
        held = [line["measured_bytes"] for line in lines if line["what"] in ("head", "memory")]
        assert [{k: n for k, n in event["args"].items() if n} for event in counters] == held
        for track in {event["tid"] for event in whole}:
            ends: list[float] = []
            for event in (each for each in whole if each["tid"] == track):
                end = round(event["ts"] + event["dur"], 1)
                while ends and ends[-1] <= event["ts"]:
                    ends.pop()
                assert not ends or end <= ends[-1]
                ends.append(end)
        named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert {event["tid"] for event in whole} == set(named)
        assert {e["cat"] for e in whole} == {"compute", "collectives"}
        assert all(named[event["tid"]].startswith(event["cat"]) for event in whole)


def test_overlapping_slices_go_on_tracks_of_their_own() -> None:
    def line(seconds: float, **values: Any) -> Line:
        return {"seconds": seconds, "step": 1, "phase": "", "units": [], **values}

    head = line(0, what="head", version=1, rank=3, measured_bytes={})
    begun = {"what": "begin", "operation": "collective", "verb": "reduce", "label": "x", "axis": "a", "sent_bytes": 1}
    lines = [head, line(1e-6, slice=1, **begun), line(2e-6, slice=2, **begun), line(3e-6, what="end", slice=1)]
    events = chrome_trace([*lines, line(5e-6, what="end", slice=2), line(6e-6, slice=3, **begun)])["traceEvents"]
    found = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [(101, 1.0, 2.0), (102, 2.0, 3.0), (101, 6.0, 0.0)]
    assert {e["pid"] for e in events} == {3}


def test_nothing_is_watched_when_it_is_over_and_nothing_changes(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> Any:
        watched, plain = Worker(mesh, stage=2), Worker(mesh, stage=2)
        managed = Managed.of(watched.model)
        runtime, comms = managed.runtime, dict(managed.mesh)
        hooks = len(watched.optimizer._optimizer_step_post_hooks)
        with shardwise.timeline(watched.model, tmp_path, activations=True):
            assert isinstance(managed.mesh["data"], RecordingComm)
            assert all(bucket.site.mesh is managed.mesh for unit in runtime.units for bucket in unit.buckets)
            steps(watched)
            with pytest.raises(StateError, match="recorded already"), shardwise.timeline(watched.model, tmp_path):
                pass
        assert (runtime.watch, runtime.means.arena.ledger.on_change) == (None, None)
        assert dict(managed.mesh) == comms
        assert managed.before_step == []
        assert len(watched.optimizer._optimizer_step_post_hooks) == hooks
        size = (tmp_path / f"timeline-rank-{flat_rank(mesh)}.jsonl").stat().st_size
        steps(plain)
        for worker in (watched, plain):
            worker.step(7)
        assert (tmp_path / f"timeline-rank-{flat_rank(mesh)}.jsonl").stat().st_size == size
        return [shardwise.full_parameters(worker.model) for worker in (watched, plain)]

    for watched, plain in run_ranks(2, body):
        assert all(torch.equal(watched[name], plain[name]) for name in plain)


@pytest.mark.parametrize("at", ["forward blocks.1", "backward blocks.1", "step"])
def test_a_failure_inside_is_explained_and_leaves_whole_files(at: str, tmp_path: Path) -> None:
    def body(mesh: Mesh) -> None:
        worker = Worker(mesh, stage=3)
        worker.step()
        worker.switch.error, worker.switch.at = RuntimeError(CPU_WORDS), at
        with pytest.raises(OutOfMemoryError, match="largest owners"), shardwise.timeline(worker.model, tmp_path):
            worker.step()
        worker.optimizer.zero_grad()
        with shardwise.timeline(worker.model, tmp_path / "again"):
            worker.step()

    run_ranks(1, body)
    for folder in (tmp_path, tmp_path / "again"):
        lines = lines_of(folder)
        assert len(list(slices(lines))) > 2
        assert lines[-1]["what"] == "foot"
        assert json.loads((folder / "trace-rank-0.json").read_text())["traceEvents"]


def test_an_iteration_that_fails_is_closed_by_the_next_one(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> None:
        worker = Worker(mesh, stage=3)
        with shardwise.timeline(worker.model, tmp_path):
            for at in ("forward blocks.1", "backward blocks.1", "step"):
                worker.switch.error, worker.switch.at = ValueError("no"), at
                with pytest.raises(ValueError, match="no"):
                    worker.step()
                worker.optimizer.zero_grad()
            worker.step()

    run_ranks(1, body)
    work = [(line, end) for line, end in slices(lines_of(tmp_path)) if line["operation"] != "collective"]
    roots = [end["seconds"] for line, end in work if line.get("owner") == "root" and line["operation"] == "forward"]
    assert len(roots) == 4
    for line, end in work:
        assert sum(line["seconds"] < begun["seconds"] < end["seconds"] for begun, _ in work) < 6


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> None:
        worker = Worker(mesh)
        with shardwise.timeline(worker.model, tmp_path):
            worker.step()

    run_ranks(1, body)
    whole = tmp_path / "timeline-rank-0.jsonl"
    text = whole.read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[: len(text) // 2])
    write_chrome_trace(cut, tmp_path / "cut.json")
    few, all_ = (json.loads((tmp_path / name).read_text())["traceEvents"] for name in ("cut.json", "trace-rank-0.json"))
    assert 0 < len(few) < len(all_)
    for wrong in ("", "{}\n", '{"what": "head", "version": 99}\n', text.replace("\n", "\nnonsense\n", 1)):
        cut.write_text(wrong)
        with pytest.raises(ConfigError, match="not a timeline of version 1"):
            list(read_lines(cut))


def test_the_allocator_is_asked_at_every_phase(tmp_path: Path) -> None:
    asked: list[int] = []

    def counters(device: torch.device) -> Any:
        asked.append(len(asked))
        return {"allocated_bytes.all.current": len(asked), "reserved_bytes.all.current": 5 * len(asked)}, (0, 0)

    def body(mesh: Mesh) -> None:
        worker = Worker(mesh)
        with shardwise.timeline(worker.model, tmp_path, counters=counters):
            worker.step()

    run_ranks(1, body)
    found = [line for line in lines_of(tmp_path) if line["what"] == "allocator"]
    work = [each for pair in slices(lines_of(tmp_path)) for each in pair if pair[0]["operation"] != "collective"]
    assert len(found) == len(work) > 10
    assert [line["measured_by_allocator"]["allocated_bytes"] for line in found] == [n + 1 for n in asked]
    events = json.loads((tmp_path / "trace-rank-0.json").read_text())["traceEvents"]
    assert [e["args"]["reserved_bytes"] for e in events if e["name"] == "measured by the allocator"] == [
        5 * (n + 1) for n in asked
    ]


def test_an_engine_is_recorded_and_wrong_places_are_refused(tmp_path: Path) -> None:
    model = Model(Switch())
    values(model)
    engine, *_ = shardwise.initialize(
        model=model, units=Unit, config={"batch": {"micro": 1}, "optimizer": {"name": "adamw", "lr": 0.1}}
    )
    with shardwise.timeline(engine, tmp_path):
        engine.backward(engine(torch.ones(2, 7)).square().mean())
        engine.step()
    assert [line["operation"] for line, _ in slices(lines_of(tmp_path)) if line["operation"] == "step"] == ["step"]
    with pytest.raises(ConfigError, match="not a sharded model"), shardwise.timeline(torch.nn.Linear(1, 1), tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="timeline: "), shardwise.timeline(engine, tmp_path / "file"):
        pass
    begin: Callable[[], Any] = lambda: shardwise.timeline(engine, tmp_path).__enter__()  # noqa: E731
    handle = model.blocks[0].register_forward_hook(lambda *_: begin())
    with pytest.raises(StateError, match="inside a forward"):
        engine(torch.ones(2, 7))
    handle.remove()


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines.jsonl")
    lines.write({"version": 1})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [lines.write({"number": "x" * 500}) for _ in range(500)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    lines.close()
    lines.write({"number": "late"})
    assert len(list(read_lines(tmp_path / "lines.jsonl"))) == 4001


def test_files_that_cannot_be_written_are_told_before_anything_runs(tmp_path: Path) -> None:
    first, second = (shardwise.shard(torch.nn.Linear(2, 2), None, stage=0) for _ in range(2))
    with (
        shardwise.timeline(first, tmp_path),
        pytest.raises(ConfigError, match="another one is written"),
        shardwise.timeline(second, tmp_path),
    ):
        pass
    with shardwise.timeline(second, tmp_path):  # the first is over
        second(torch.ones(1, 2)).sum().backward()
    for name in ("timeline-rank-0.jsonl", "trace-rank-0.json"):
        folder = tmp_path / f"of-{name}"
        (folder / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=f"timeline: .*{name}"), shardwise.timeline(second, folder):
            raise AssertionError("began")
