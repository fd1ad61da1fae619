"""Random small models under random schedules of operations end where one plain process ends.

A failure prints a ``Case`` as plain data: paste it into ``REGRESSIONS``. All that ever failed stays there.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, reject, settings
from torch import Tensor

import shardwise
from shardwise.testing.graphs import BOX_KINDS, LEAF_KINDS, Again, Box, Graph, Leaf

from .schedules import (
    AutogradGrad,
    Backward,
    BackwardInputs,
    Case,
    Clip,
    Edit,
    Evaluate,
    Forward,
    Part,
    Setup,
    Step,
    Toggle,
    UnsuitableError,
    ZeroGrad,
    check,
)
from .strategies import cases

STAGES = tuple(range(4))
WITHOUT_CHECKS = list(HealthCheck)  # a case takes as long as it takes, and torch refuses some

REGRESSIONS = {
    # autograd.grad by guarded parameters switched the guard off for all that ran in its backward
    "grad_by_parameters_recomputes": Case(
        Graph((Box("list", (Leaf(),)), Box("checkpoint", (Leaf(),)))),
        Setup(prefetch=0, keep_last_unit=False),
        (Forward(), AutogradGrad(0, "parameters")),
    ),
    # so did a backward by guarded parameters, which torch hands to their class since 2.13
    "backward_by_parameters_recomputes": Case(
        Graph((Box("checkpoint", (Leaf(),)), Box("checkpoint", (Leaf(),)))),
        Setup(policy="host"),
        (Forward(), BackwardInputs()),
    ),
    # the recomputation of the second use was taken for that of the first
    "both_checkpoints_of_one_unit": Case(
        Graph(
            (
                Box("list", (Again(0),)),
                Box("list", (Leaf(), Box("checkpoint", (Leaf(), Leaf("modules"))))),
                Box("list", (Box("reentrant", (Again(6),)), Box("checkpoint", (Again(6),)))),
            )
        ),
        Setup(prefetch=0, reductions_in_flight=0, keep_last_unit=False),
        (Part(2),),
    ),
    # ranks used unlike weights: the same gathers and reductions, interleaved differently
    "weights_used_on_some_ranks": Case(
        Graph((Leaf(), Leaf("sometimes"), Leaf(), Leaf("sometimes"), Leaf(), Leaf(), Leaf())),
        Setup(units="leaves", policy="host"),
        (Forward(), Backward(), Step()),
    ),
    "weights_used_on_some_ranks_one_reduction_in_flight": Case(
        Graph((Leaf(), Leaf("sometimes"), Leaf(), Leaf("sometimes"), Leaf(), Leaf(), Leaf())),
        Setup(units="leaves", policy="host", reductions_in_flight=1),
        (Forward(), Backward(), Step()),
    ),
    "weights_used_on_some_ranks_of_two_axes": Case(
        Graph((Leaf("sometimes"), Leaf("sometimes")), grad_of_input=True),
        Setup(ranks=(2, 2), units="leaves", policy="host"),
        (Forward(), Backward(), Step()),
    ),
    # one rank passed a unit of a checkpointed region before it computed the region, and gathered, again
    "weights_used_on_some_ranks_in_a_checkpoint": Case(
        Graph((Box("checkpoint_inside", (Leaf(), Leaf("lora"), Leaf("sometimes", act="none"))),), grad_of_input=True),
        Setup(prefetch=0, reductions_in_flight=0, keep_last_unit=False, policy="host"),
        (Forward(), Backward(), Step()),
    ),
    "weights_used_on_some_ranks_in_checkpoints_of_checkpoints": Case(
        Graph(
            (
                Leaf(),
                Box("checkpoint_inside", (Leaf(), Box("checkpoint", (Leaf(), Leaf("sometimes", act="none"))))),
                Box("checkpoint_inside", (Leaf("sometimes", act="none"), Leaf("sometimes", act="none"))),
            ),
            grad_of_input=True,
        ),
        Setup(ranks=3, units="leaves", prefetch=1, policy="host"),
        (Forward(), Forward(), Backward(1), Backward(), Step()),
    ),
    # a bucket made anew got the number of another one
    "unfreeze_at_one_rank": Case(Graph((Leaf(),), frozen=(1,)), Setup(ranks=1), (Toggle(1),)),
    "step_unfreeze_step": Case(Graph((Leaf(),), frozen=(0,)), Setup(), (Step(), Toggle(0), Forward(), Step())),
    "unfreeze_in_inference_mode": Case(Graph((Leaf(),), frozen=(0,)), Setup(), (Toggle(0), Evaluate("inference"))),
    # the part of a gradient that only other ranks brought was kept
    "model_zero_grad_of_a_weight_used_elsewhere": Case(
        Graph((Leaf(), Leaf("sometimes")), grad_of_input=True),
        Setup(ranks=(2, 2), sharding=0, policy="host"),
        (Forward(), Backward(), Step(), ZeroGrad("model")),
    ),
    # gradients that had nowhere to go in a window of reduce=True were taken for late ones, on the ranks that had them
    "sum_over_some_axes_in_a_unit_of_mixed_stages": Case(
        Graph(
            (
                Box("aux", (Leaf(),)),
                Box("dataclass", (Box("list", (Leaf("transposed"), Leaf("detached"), Leaf("sometimes"))),)),
            ),
            ties=((9, 0),),
        ),
        Setup(sharding="mixed", policy="host"),
        (Forward(), Backward(0, "reduce")),
    ),
    # a recomputation returned a view of a weight, and the unit stayed gathered
    "view_of_a_weight_from_a_recomputation": Case(
        Graph((Box("list", (Again(0), Leaf("table"))), Box("checkpoint", (Again(1),))), frozen=(3,)),
        Setup(units=(3,), prefetch=0, keep_last_unit=False),
    ),
    # a loss kept aside holds the graph in which a function holds a weight, until the next forward
    "function_behind_a_loss_kept_aside": Case(
        Graph((Box("aux", (Leaf(), Leaf("function"))),)),
        Setup(prefetch=0, reductions_in_flight=0, keep_last_unit=False),
    ),
    # torch's register_hook ends the process on such a view, unless its grad_fn was read before
    "output_is_a_view_edited_in_place": Case(Graph((Box("view", (Leaf(),)), Box("edit", (Again(1),))))),
    "step_without_backward": Case(Graph((Leaf(),), frozen=(0,)), Setup(), (Forward(), Step(), Forward(), Step())),
}


def play(case: Case) -> None:
    """Check a drawn case; leave it if torch itself refuses it."""
    event(f"ranks {case.setup.ranks}")
    event(f"sharding {case.setup.sharding}")
    try:
        check(case)
    except UnsuitableError as error:
        event(f"torch refuses: {str(error)[:60]}")
        reject()


@given(cases())
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=WITHOUT_CHECKS,
    phases=[Phase.generate, Phase.shrink],
)
def test_random_graphs_train_as_one_plain_process(case: Case) -> None:
    play(case)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@given(cases(max_windows=5))
@settings(
    max_examples=1500,
    deadline=None,
    database=None,
    suppress_health_check=WITHOUT_CHECKS,
    phases=[Phase.generate, Phase.shrink],
)
def test_many_random_graphs_train_as_one_plain_process(case: Case) -> None:
    play(case)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_case_that_once_failed_is_right(name: str) -> None:
    check(REGRESSIONS[name])


@pytest.mark.parametrize("stage", STAGES)
def test_graph_from_before_unfreezing_is_right_or_refused(stage: int) -> None:
    ops = (Forward(), Toggle(0, keep_graphs=True), Forward(), Backward(0))
    case = Case(Graph((Leaf(),), frozen=(0,), grad_of_input=True), Setup(sharding=stage), ops)
    if stage < 3:
        check(case)
    else:
        with pytest.raises(shardwise.StateError, match="changed between forward and backward"):
            check(case)


def test_check_notices_ranks_that_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(parts: list[Tensor], out: Tensor, *, sum: torch.dtype) -> None:
        out.copy_(parts[0])

    case = Case(Graph((Leaf(),)))
    check(case)
    monkeypatch.setattr("shardwise.comm.threads.rank_order_mean", own)
    with pytest.raises(AssertionError, match="off by"):
        check(case)


def test_check_notices_an_operation_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Graph((Leaf(),)), ops=(Edit(), Forward(), Backward(), Clip(), Step()))
    check(case)
    monkeypatch.setattr(Clip, "sharded", lambda op, worker: None)
    with pytest.raises(AssertionError, match="expected"):
        check(case)


ORDINARY = (Forward(), Backward(), Step(), Forward(), Forward(), Backward(1), Backward(0), Step())


@pytest.mark.parametrize("stage", STAGES)
def test_every_kind_of_leaf_trains_as_one_plain_process(stage: int) -> None:
    for kind in LEAF_KINDS:
        if kind != "sometimes":
            check(Case(Graph((Leaf(kind), Leaf(kind, "none"))), Setup(sharding=stage, units="leaves"), ORDINARY))


@pytest.mark.parametrize("stage", STAGES)
def test_every_kind_of_box_trains_as_one_plain_process(stage: int) -> None:
    for kind in BOX_KINDS:
        graph = Graph((Leaf(), Box(kind, (Leaf(), Leaf(act="relu")))))
        check(Case(graph, Setup(sharding=stage, units="all"), ORDINARY))
