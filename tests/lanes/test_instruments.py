"""The instruments themselves: what each policy runs when, what is poisoned, what the checker calls unordered."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.comm.base import Key, Mesh, Verb, part
from shardwise.lanes import Lanes, Steps
from shardwise.memory import Kind
from shardwise.testing.lanes import Instruments, PoisonArena, Policy
from shardwise.testing.ranks import run_ranks

CPU = torch.device("cpu")


class Transfer:
    """A transfer that is posted when it is made and ends in ``wait``."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        log.append(f"post {name}")

    def wait(self) -> None:
        self._log.append(f"end {self._name}")


def transfer_job(log: list[str], name: str, target: Tensor | None = None) -> Callable[[], Steps]:
    def job() -> Steps:
        yield Transfer(log, name)
        if target is not None:
            target.fill_(7.0)

    return job


def lanes_of(policy: Policy, **options: int | bool | None) -> tuple[Lanes, Instruments]:
    probe = Instruments(policy, **options)  # type: ignore[arg-type]
    return probe.lanes(CPU), probe


@pytest.mark.parametrize(
    ("policy", "at_issue"), [("now", ["post a", "end a"]), ("posted", ["post a"]), ("late", [])], ids=str
)
def test_policy_says_how_much_of_a_job_runs_before_its_wait(policy: Policy, at_issue: list[str]) -> None:
    log: list[str] = []
    lanes, _ = lanes_of(policy)
    target = torch.zeros(3)
    handle = lanes.reduce.run(transfer_job(log, "a", target), writes=[target])
    assert log == at_issue
    assert bool(target.isnan().all()) == (policy != "now")
    handle.wait()
    assert log == ["post a", "end a"]
    assert target.tolist() == [7.0, 7.0, 7.0]
    handle.wait()
    assert log == ["post a", "end a"]


def test_jobs_of_a_lane_run_in_order_when_a_later_one_is_waited_for() -> None:
    log: list[str] = []
    lanes, _ = lanes_of("late")
    lanes.gather.run(transfer_job(log, "a"))
    lanes.reduce.run(transfer_job(log, "other"))
    handle = lanes.gather.run(transfer_job(log, "b"))
    handle.wait()
    assert log == ["post a", "end a", "post b", "end b"]


def test_posts_are_made_in_order_when_an_earlier_job_was_late() -> None:
    log: list[str] = []
    lanes, probe = lanes_of("late")
    lanes.gather.run(transfer_job(log, "a"))
    probe.policy = "posted"
    lanes.gather.run(transfer_job(log, "b"))
    assert log == ["post a", "post b"]


def test_flush_ends_posted_jobs_and_orders_nothing() -> None:
    log: list[str] = []
    lanes, probe = lanes_of("posted")
    tensor = torch.zeros(3)
    handle = lanes.gather.run(transfer_job(log, "a", tensor), writes=[tensor])
    probe.policy = "late"
    lanes.gather.run(transfer_job(log, "b"))
    lanes.gather.flush()
    assert log == ["post a", "end a"]
    with pytest.raises(AssertionError, match="unordered"):
        lanes.on_compute(reads=[tensor])
    handle.wait()
    lanes.on_compute(reads=[tensor])


def test_seeded_choices_repeat_and_are_of_all_kinds() -> None:
    def choices(seed: int) -> list[str]:
        probe = Instruments("seeded", seed=seed)
        return [probe.draw() for _ in range(30)]

    assert choices(3) == choices(3)
    assert choices(3) != choices(4)
    assert set(choices(3)) == {"now", "posted", "late"}


def test_updated_tensors_are_not_poisoned() -> None:
    lanes, _ = lanes_of("late")
    target = torch.ones(3)
    lanes.reduce.run(transfer_job([], "a"), updates=[target])
    assert target.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_released_memory_is_poisoned_and_counted_as_free(dtype: torch.dtype) -> None:
    arena = PoisonArena(CPU)
    slab = arena.slab(Kind.GATHERED, 4, dtype)
    slab.fill().zero_()
    address = slab.tensor.data_ptr()
    assert arena.ledger.now[Kind.GATHERED] == slab.num_bytes
    slab.release()
    assert arena.ledger.total_bytes == 0
    assert not bool((slab.tensor == 0).any())
    slab.fill()
    assert not bool((slab.tensor == 0).any())  # contents are undefined after fill, so nobody may count on them
    assert slab.tensor.data_ptr() == address


def test_fresh_memory_of_a_slab_is_poisoned() -> None:
    assert bool(PoisonArena(CPU).slab(Kind.GRAD, 4, torch.float32).fill().isnan().all())


def test_dropped_memory_is_poisoned() -> None:
    arena = PoisonArena(CPU)
    resting = arena.persistent(Kind.PARAM, 4, torch.float32)
    assert not bool(resting.isnan().any())
    arena.drop(Kind.PARAM, resting)
    assert bool(resting.isnan().all())
    assert arena.ledger.total_bytes == 0


class TestOrder:
    """Every pair of accesses, with and without a wait between them."""

    CONFLICTS = (("read", "write", True), ("write", "read", True), ("write", "write", True), ("read", "read", False))

    @staticmethod
    def issue(lanes: Lanes, lane: str, access: str, tensor: Tensor) -> Callable[[], None]:
        job = transfer_job([], lane)
        run = lanes.gather.run if lane == "gather" else lanes.reduce.run
        if access == "update":
            return run(job, updates=[tensor]).wait
        return (run(job, reads=[tensor]) if access == "read" else run(job, writes=[tensor])).wait

    @staticmethod
    def touch(lanes: Lanes, access: str, tensor: Tensor) -> None:
        lanes.on_compute(reads=[tensor] if access == "read" else [], writes=[tensor] if access == "write" else [])

    @pytest.mark.parametrize(("first", "second", "conflict"), [*CONFLICTS, ("update", "read", True)])
    def test_compute_after_a_job_needs_its_wait(self, first: str, second: str, conflict: bool) -> None:
        tensor = torch.zeros(8)
        lanes, _ = lanes_of("posted")
        wait = self.issue(lanes, "gather", first, tensor)
        if conflict:
            with pytest.raises(AssertionError, match=r"unordered: .* the gather job of"):
                self.touch(lanes, second, tensor)
        wait()
        self.touch(lanes, second, tensor)

    @pytest.mark.parametrize(("first", "second", "conflict"), CONFLICTS)
    @pytest.mark.parametrize("lane", ["gather", "reduce"])
    def test_a_job_after_a_job_needs_a_wait_in_between(
        self, first: str, second: str, conflict: bool, lane: str
    ) -> None:
        tensor = torch.zeros(8)
        lanes, _ = lanes_of("posted")
        wait = self.issue(lanes, "gather", first, tensor)
        if conflict:
            with pytest.raises(AssertionError, match=f"unordered: the {lane} job of .* the gather job of"):
                self.issue(lanes, lane, second, tensor)
        wait()
        self.issue(lanes, lane, second, tensor)

    def test_a_job_is_ordered_after_what_compute_did_before(self) -> None:
        tensor = torch.zeros(8)
        lanes, _ = lanes_of("posted")
        self.touch(lanes, "write", tensor)
        self.issue(lanes, "gather", "write", tensor)

    def test_a_later_wait_on_the_same_lane_is_enough(self) -> None:
        tensor = torch.zeros(8)
        lanes, probe = lanes_of("late")
        first = self.issue(lanes, "gather", "write", tensor)
        self.issue(lanes, "gather", "write", torch.zeros(8))()
        self.touch(lanes, "read", tensor)
        first()
        assert len(probe.waits) == 1  # the second was ordered already

    def test_a_wait_on_the_other_lane_is_not_enough(self) -> None:
        tensor = torch.zeros(8)
        lanes, _ = lanes_of("posted")
        self.issue(lanes, "gather", "write", tensor)
        self.issue(lanes, "reduce", "write", torch.zeros(8))()
        with pytest.raises(AssertionError, match="unordered"):
            self.touch(lanes, "read", tensor)

    def test_a_wait_on_an_earlier_job_is_not_enough(self) -> None:
        tensor = torch.zeros(8)
        lanes, _ = lanes_of("now")
        earlier = self.issue(lanes, "gather", "write", torch.zeros(8))
        self.issue(lanes, "gather", "write", tensor)
        earlier()
        with pytest.raises(AssertionError, match="unordered"):
            self.touch(lanes, "read", tensor)

    def test_parts_that_do_not_overlap_are_free(self) -> None:
        flat = torch.zeros(8)
        lanes, _ = lanes_of("posted")
        self.issue(lanes, "gather", "write", flat[:4])
        self.touch(lanes, "write", flat[4:])
        self.touch(lanes, "write", flat[4:].view(2, 2))
        with pytest.raises(AssertionError, match="bytes 12 to 16 "):
            self.touch(lanes, "read", flat[3:6])

    def test_views_with_storage_of_their_own_are_free(self) -> None:
        lanes, _ = lanes_of("posted")
        self.issue(lanes, "gather", "write", torch.zeros(8))
        self.touch(lanes, "write", torch.zeros(8))

    def test_freeing_and_filling_memory_count_as_writes(self) -> None:
        lanes, probe = lanes_of("posted")
        slab = probe.arena(CPU).slab(Kind.GATHERED, 8, torch.float32)
        wait = self.issue(lanes, "gather", "read", slab.fill())
        with pytest.raises(AssertionError, match=r"unordered: .*Slab.release.* writes"):
            slab.release()
        wait()
        slab.filled = True
        slab.release()
        self.issue(lanes, "gather", "read", slab.tensor)
        with pytest.raises(AssertionError, match=r"unordered: .*Slab.fill.* writes"):
            slab.fill()

    def test_nothing_is_checked_when_told_so(self) -> None:
        tensor = torch.zeros(8)
        lanes, _ = lanes_of("posted", check=False)
        self.issue(lanes, "gather", "write", tensor)
        self.touch(lanes, "read", tensor)


def test_skipped_wait_leaves_the_job_undone_until_a_later_wait() -> None:
    log: list[str] = []
    lanes, probe = lanes_of("late", skip=1)
    lanes.gather.run(transfer_job(log, "a")).wait()
    skipped = lanes.gather.run(transfer_job(log, "b"))
    skipped.wait()
    assert log == ["post a", "end a"]
    lanes.gather.run(transfer_job(log, "c")).wait()
    assert log[2:] == ["post b", "end b", "post c", "end c"]
    assert len(probe.waits) == 3


@pytest.mark.parametrize("policy", ["posted", "now", "late", "seeded"])
def test_every_wait_ends_when_ranks_wait_in_the_same_order(policy: Policy) -> None:
    def body(mesh: Mesh) -> float:
        comm = mesh["data"]
        lanes = Instruments(policy, seed=5).lanes(CPU)
        buffers = [torch.full((2,), float(comm.rank + 1)) for _ in range(8)]

        def gather(index: int) -> Callable[[], Steps]:
            def job() -> Steps:  # two transfers: the second is posted when the first has ended
                yield comm.all_gather(buffers[index], Key(index, Verb.UNSHARD, 0, "u"))
                yield comm.all_gather(buffers[index], Key(index, Verb.UNSHARD, 1, "u"))

            return job

        handles = [
            (lanes.gather if index % 3 else lanes.reduce).run(gather(index), updates=[buffers[index]])
            for index in range(8)
        ]
        for index in (2, 6, 5, 7):
            handles[index].wait()
        return sum(float(part(buffer, 1 - comm.rank, 2)) for buffer in buffers)

    assert run_ranks(2, body, timeout=5) == [16.0, 8.0]
