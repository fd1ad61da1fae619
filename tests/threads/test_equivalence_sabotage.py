"""An engine that is wrong in one place must fail the very comparison that the matrix makes.

``SabotagedComm`` does every collective and then puts wrong numbers where the right ones are: this rank's own part
instead of a reduction's mean, what a slice was in the beginning instead of what was gathered, its own gradients
everywhere. Each fault is first counted in an honest run, which must pass, and then made at its first, a middle and its
last chance.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from shardwise import Sharding, stage_sharding
from shardwise.comm.base import Comm, Key, Mesh, Verb, Work, part
from shardwise.sharding import resolve
from shardwise.testing.compare import Case, MicroBatches, Trace, assert_equals_plain, train_plain, train_sharded
from shardwise.testing.ranks import flat_rank, run_ranks

STAGES = [stage_sharding(stage) for stage in range(4)]
STAGE_IDS = [f"stage{stage}" for stage in range(4)]
MESH = {"node": 2, "local": 2}
REDUCTIONS = (Verb.REDUCE, Verb.FINALIZE_SCATTER)
# What each stage gathers while it trains: reduced gradients, parameters after a step, parameters before a use.
GATHERS = [Verb.FINALIZE_GATHER, Verb.REFRESH, Verb.REFRESH, Verb.UNSHARD]
CHANCES = [0.0, 0.5, 1.0]
SAMPLED = (MicroBatches.REDUCED, MicroBatches.SUMMED)
CASE = Case(oddities=("uneven", "tied"), max_norm=1.0)

Fault = Literal["skip", "stale", "own", "own norm"]


class _Then:
    """Work followed by something else."""

    def __init__(self, work: Work | None, after: Callable[[], None]) -> None:
        self._work = work
        self._after: Callable[[], None] | None = after

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._after is not None:
            self._after()
        self._after = None


class SabotagedComm:
    """A ``Comm`` that commits one kind of fault.

    Args:
        comm: does the work.
        fault: "skip": one reduction leaves this rank's own part; "stale": one gather brings what the slices were when
            they were gathered first; "own": all reductions and gathers of gradients leave what this rank had; "own
            norm": the step's record has this rank's words for every rank.
        verbs: where "skip" and "stale" may happen.
        at: number of the one call, of those to ``verbs``, that is wrong; None is honest.

    Attributes:
        chances: numbers of the calls at which the fault changes what this rank sees.
        hits: number of faults that changed anything.
    """

    def __init__(self, comm: Comm, fault: Fault, verbs: tuple[Verb, ...], at: int | None) -> None:
        self._comm = comm
        self._fault = fault
        self._verbs = verbs
        self._at = at
        self._num_calls = 0
        self._first: dict[int, Tensor] = {}
        self.chances: list[int] = []
        self.hits = 0

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    def reserve(self, count: int) -> int:
        return self._comm.reserve(count)

    def broadcast(self, buffer: Tensor, source: int, key: Key) -> Work | None:
        return self._comm.broadcast(buffer, source, key)

    def announce(self, topic: str, text: str) -> None:
        self._comm.announce(topic, text)

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        return self._comm.announced(topic, seconds)

    def forget(self, topic: str) -> None:
        self._comm.forget(topic)

    def all_gather(self, buffer: Tensor, key: Key) -> Work | None:
        before, number = buffer.clone(), self._count(key)
        work = self._comm.all_gather(buffer, key)

        def after() -> None:
            if self._fault == "stale" and key.verb in self._verbs:
                wrong = self._first.setdefault(key.index, buffer.clone()).clone()
                part(wrong, self.rank, self.size).copy_(part(buffer, self.rank, self.size))
                self._commit(buffer, wrong, number)
            elif self._fault == "own" and key.verb is Verb.FINALIZE_GATHER:
                self._commit(buffer, before, number)
            elif self._fault == "own norm" and key.verb is Verb.RECORD and key.label.startswith("record of step"):
                self._commit(buffer, part(buffer, self.rank, self.size).repeat(self.size), number)

        return _Then(work, after)

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        own, number = part(buffer, self.rank, self.size).to(out.dtype, copy=True), self._count(key)
        work = self._comm.reduce_scatter(buffer, out, key, wire=wire, sum=sum)

        def after() -> None:
            if key.verb in REDUCTIONS and (self._fault == "own" or (self._fault == "skip" and key.verb in self._verbs)):
                self._commit(out, own, number)

        return _Then(work, after)

    def _count(self, key: Key) -> int:
        self._num_calls += key.verb in self._verbs
        return self._num_calls - 1

    def _commit(self, target: Tensor, wrong: Tensor, number: int) -> None:
        if torch.equal(target, wrong):
            return
        self.chances.append(number)
        if self._at == number or (self._at is not None and self._fault in ("own", "own norm")):
            target.copy_(wrong)
            self.hits += 1


class Saboteur:
    """Trains a case with a fault; keeps the wrapped communicators of each rank."""

    def __init__(self, case: Case, world: int | dict[str, int], sharding: Sharding) -> None:
        self.case = case
        self.world = world
        self.sharding = sharding
        self.plain = train_plain(case)
        self.comms: list[dict[str, SabotagedComm]] = []

    def train(
        self,
        fault: Fault,
        verbs: tuple[Verb, ...] = (),
        at: int | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        axes: tuple[str, ...] = ("data",),
    ) -> list[Trace]:
        """Train; ``ranks`` (None: all) commit the fault on ``axes``."""

        def body(mesh: Mesh) -> tuple[Trace, dict[str, SabotagedComm]]:
            wrong = ranks is None or flat_rank(mesh) in ranks
            comms = {
                axis: SabotagedComm(comm, fault, verbs, at if wrong and axis in axes else None)
                for axis, comm in mesh.items()
            }
            return train_sharded(self.case, comms, self.sharding), comms

        ended = run_ranks(self.world, body)
        self.comms = [comms for _, comms in ended]
        return [trace for trace, _ in ended]

    def train_honestly(self, fault: Fault, verbs: tuple[Verb, ...] = ()) -> None:
        """Train with the wrapper but without a fault: the comparison passes."""
        self.compare(self.train(fault, verbs))
        assert self.hits() == 0

    def compare(self, ranks: list[Trace]) -> None:
        """The comparison of the matrix."""
        assert_equals_plain(ranks, self.plain, self.case.tolerance)

    def must_fail(self, ranks: list[Trace], where: str) -> None:
        assert self.hits() > 0, f"{where}: nothing was sabotaged"
        with pytest.raises(AssertionError, match="is off by"):
            self.compare(ranks)

    def hits(self) -> int:
        return sum(comm.hits for comms in self.comms for comm in comms.values())

    def chances(self, rank: int, axis: str = "data") -> list[int]:
        return self.comms[rank][axis].chances


def pick(chances: list[int], place: float) -> int:
    return chances[round(place * (len(chances) - 1))]


@pytest.mark.parametrize("sharding", STAGES, ids=STAGE_IDS)
@pytest.mark.parametrize(
    "window",
    [
        pytest.param(window, marks=[] if window in SAMPLED else [pytest.mark.matrix], id=window.name)
        for window in MicroBatches
    ],
)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_skipped_reduction_fails_the_matrix(sharding: Sharding, window: MicroBatches, num_ranks: int) -> None:
    saboteur = Saboteur(replace(CASE, micro_batches=window), num_ranks, sharding)
    saboteur.train_honestly("skip", REDUCTIONS)
    chances = saboteur.chances(0)
    assert len(chances) >= 9  # a few buckets, three steps
    for place in CHANCES:
        at = pick(chances, place)
        saboteur.must_fail(saboteur.train("skip", REDUCTIONS, at), f"reduction {at} of {chances}")


@pytest.mark.parametrize("stage", range(4))
def test_stale_slice_on_one_rank_fails_the_matrix(stage: int) -> None:
    saboteur = Saboteur(replace(CASE, micro_batches=MicroBatches.LOCAL), 2, STAGES[stage])
    verbs = (GATHERS[stage],)
    saboteur.train_honestly("stale", verbs)
    chances = saboteur.chances(1)
    assert len(chances) >= 4
    for place in CHANCES:
        at = pick(chances, place)
        saboteur.must_fail(saboteur.train("stale", verbs, at, ranks=(1,)), f"{verbs[0].name} {at} of {chances}")


@pytest.mark.parametrize("sharding", STAGES, ids=STAGE_IDS)
@pytest.mark.parametrize("clips", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_ranks_that_use_only_their_own_gradients_fail_the_matrix(sharding: Sharding, clips: bool) -> None:
    saboteur = Saboteur(replace(CASE, max_norm=1.0 if clips else None), 2, sharding)
    saboteur.train_honestly("own")
    saboteur.must_fail(saboteur.train("own", at=0), "own gradients")
    saboteur.must_fail(saboteur.train("own", at=0, ranks=(1,)), "own gradients of one rank")


@pytest.mark.parametrize("sharding", STAGES, ids=STAGE_IDS)
def test_ranks_that_clip_by_their_own_norm_fail_the_matrix(sharding: Sharding) -> None:
    saboteur = Saboteur(CASE, 2, sharding)
    saboteur.train_honestly("own norm")
    saboteur.must_fail(saboteur.train("own norm", at=0), "own norm")


TRIPLES = [
    Sharding(
        param=[axis for axis, depth in depths.items() if depth >= 3],
        grad=[axis for axis, depth in depths.items() if depth >= 2],
        optim=[axis for axis, depth in depths.items() if depth >= 1],
    )
    for depths in ({"node": node, "local": local} for node in range(4) for local in range(4))
]


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(sharding, marks=[] if number in (3, 11) else [pytest.mark.matrix], id=f"triple{number}")
        for number, sharding in enumerate(TRIPLES)
    ],
)
@pytest.mark.parametrize("axis", list(MESH))
def test_reduction_skipped_on_one_axis_fails_the_matrix(sharding: Sharding, axis: str) -> None:
    saboteur = Saboteur(replace(CASE, micro_batches=MicroBatches.SUMMED), MESH, sharding)
    saboteur.train_honestly("skip", REDUCTIONS)
    chances = saboteur.chances(0, axis)
    assert axis in resolve(sharding, MESH).axes
    for place in (0.0, 1.0):
        at = pick(chances, place)
        saboteur.must_fail(saboteur.train("skip", REDUCTIONS, at, axes=(axis,)), f"reduction {at} of {chances}")
