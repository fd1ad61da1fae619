"""The key rows of the equivalence matrix on gloo processes, which agree with ranks as threads call for call.

One start of the processes trains all rows of one world. Each rank writes down its collectives; a run on threads must
have made the same ones in the same order, with the same bits at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from shardwise import Precision, Sharding, hybrid, stage_sharding
from shardwise.comm.base import Mesh, Verb
from shardwise.comm.recording import Event, record
from shardwise.comm.threads import ThreadComm
from shardwise.testing.compare import (
    Case,
    MicroBatches,
    Trace,
    assert_equals_plain,
    assert_same_bits,
    train_plain,
    train_sharded,
)
from shardwise.testing.models import ODDITIES
from shardwise.testing.ranks import run_processes, run_ranks

WORLDS: dict[str, dict[str, int]] = {
    "two ranks": {"data": 2},
    "three ranks": {"data": 3},
    "mesh": {"node": 2, "local": 2},
}
IN_TURN = ["two ranks", "three ranks", pytest.param("mesh", marks=pytest.mark.matrix)]
STAGES = {f"stage {stage}": stage_sharding(stage) for stage in range(4)}
NESTED = {
    "hybrid": hybrid("local"),
    "parameters inside a node": Sharding(param="local", grad=["node", "local"], optim=["node", "local"]),
    "unlike sets": Sharding(grad="node", optim=["node", "local"]),
}
KEY_ROW = Case(oddities=("tied", "frozen", "uneven"), micro_batches=MicroBatches.LOCAL, max_norm=1.0)
CASES = {
    "fp64": KEY_ROW,
    "all oddities in fp32": replace(
        KEY_ROW, oddities=ODDITIES, dtype=torch.float32, micro_batches=MicroBatches.SUMMED, optimizer="sgd"
    ),
    "bf16": replace(
        KEY_ROW,
        dtype=torch.float32,
        data_dtype=torch.bfloat16,
        precision=Precision(param=torch.bfloat16),
        micro_batches=MicroBatches.REDUCED,
    ),
}


@dataclass(frozen=True)
class Run:
    """What one rank did in one row."""

    trace: Trace
    events: list[Event]
    is_thread: bool


def train_rows(mesh: Mesh) -> dict[tuple[str, str], Run]:
    """Train every row of this world on this rank."""
    runs = {}
    for case_name, case in CASES.items():
        for name, sharding in (STAGES if len(mesh) == 1 else NESTED).items():
            recorded, log = record(mesh)
            trace = train_sharded(case, recorded, sharding)
            is_thread = all(isinstance(comm, ThreadComm) for comm in mesh.values())
            runs[case_name, name] = Run(trace, list(log), is_thread)
    return runs


@cache
def on_threads(world: str) -> list[dict[tuple[str, str], Run]]:
    return run_ranks(WORLDS[world], train_rows)


@cache
def on_processes(world: str) -> list[dict[tuple[str, str], Run]]:
    return run_processes(WORLDS[world], train_rows, timeout=100.0)


def traces(ranks: list[dict[tuple[str, str], Run]], case: str, sharding: str) -> list[Trace]:
    return [runs[case, sharding].trace for runs in ranks]


def shardings(world: str) -> Mapping[str, Sharding]:
    return STAGES if len(WORLDS[world]) == 1 else NESTED


@pytest.mark.parametrize("world", IN_TURN)
def test_processes_make_the_same_calls_as_threads(world: str) -> None:
    for rank, (threads, processes) in enumerate(zip(on_threads(world), on_processes(world), strict=True)):
        assert threads.keys() == processes.keys()
        for row, run in processes.items():
            assert (run.is_thread, threads[row].is_thread) == (False, True)
            pairs = zip(threads[row].events, run.events, strict=False)
            unlike = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
            assert not unlike, f"rank {rank}, {row}, first unlike call: {unlike[0]}"
            assert len(run.events) == len(threads[row].events), f"rank {rank}, {row}"
            assert sum(event.sent_elements for event in run.events if event.verb is not Verb.RECORD) > 0


@pytest.mark.parametrize("world", IN_TURN)
def test_processes_end_with_the_same_bits_as_threads(world: str) -> None:
    for case in CASES:
        for name in shardings(world):
            found = traces(on_processes(world), case, name)
            assert_same_bits(found, traces(on_threads(world), case, name), f"{case}, {name}")


@pytest.mark.parametrize("world", IN_TURN)
@pytest.mark.parametrize("case", ["fp64", "all oddities in fp32"])
def test_processes_equal_a_plain_process(world: str, case: str) -> None:
    plain = train_plain(CASES[case])
    assert min(plain.norms) > 2.0
    for name in shardings(world):
        found = traces(on_processes(world), case, name)
        assert_equals_plain(found, plain, CASES[case].tolerance, name)


@pytest.mark.parametrize("world", ["two ranks", "three ranks"])
@pytest.mark.parametrize("case", CASES)
def test_stages_on_processes_agree_bit_for_bit(world: str, case: str) -> None:
    found = [traces(on_processes(world), case, f"stage {stage}") for stage in range(4)]
    assert_same_bits(found[1], found[0], "stages 0 and 1")
    assert_same_bits(found[3], found[2], "stages 2 and 3")
    if CASES[case].micro_batches is not MicroBatches.SUMMED:
        assert_same_bits(found[2], found[0], "stages 0 and 2")
    masters = found[0][0].parameters["blocks.2.down.weight"]
    assert masters.dtype == CASES[case].dtype
    assert found[0][0].outputs.dtype == (CASES[case].data_dtype or CASES[case].dtype)


def test_stages_make_the_calls_that_their_names_stand_for() -> None:
    for runs in on_processes("two ranks"):
        verbs = {name: {event.verb for event in runs["fp64", name].events} for name in STAGES}
        always = {Verb.RECORD, Verb.ACCESS}
        assert verbs["stage 0"] == {Verb.RECORD, Verb.FINALIZE_SCATTER, Verb.FINALIZE_GATHER}
        assert verbs["stage 1"] == always | {Verb.FINALIZE_SCATTER, Verb.REFRESH}
        assert verbs["stage 2"] == always | {Verb.REDUCE, Verb.REFRESH}
        assert verbs["stage 3"] == always | {Verb.REDUCE, Verb.UNSHARD}
