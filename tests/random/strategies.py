"""How hypothesis draws a ``Case``: plain data throughout, so that a failing one shrinks and prints as what it is."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardwise.testing.graphs import ACTIVATIONS, BOX_KINDS, LEAF_KINDS, Again, Box, Graph, Leaf, Node

from . import schedules as s

SMALL = st.integers(0, 9)
WINDOWS = st.sampled_from(["sync", "defer", "reduce"])
RANK_DEPENDENT = "sometimes"  # a weight that the data of only some ranks uses
WAITS_UNLIKE = {"late": "host", "seeded": "now"}  # lanes that start nothing before a wait need ranks that wait alike


def leaves(*, mixed: bool, without: frozenset[str] = frozenset()) -> SearchStrategy[Node]:
    dtypes = st.sampled_from(["fp64", "fp32"]) if mixed else st.just("fp64")
    kinds = [kind for kind in LEAF_KINDS if kind not in without]
    return st.builds(Leaf, st.sampled_from(kinds), st.sampled_from(list(ACTIVATIONS)), dtypes, SMALL)


def nodes(*, mixed: bool, without: frozenset[str] = frozenset()) -> SearchStrategy[tuple[Node, ...]]:
    leaf = leaves(mixed=mixed, without=without)
    ends = st.one_of(leaf, leaf, leaf, leaf, st.builds(Again, SMALL))
    tree = st.recursive(
        ends,
        lambda inner: st.builds(
            Box,
            st.sampled_from([k for k in BOX_KINDS if k not in without]),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
        ),
        max_leaves=5,
    )
    return st.lists(tree, min_size=1, max_size=4).map(tuple)


@st.composite
def graphs(draw: st.DrawFn, without: frozenset[str] = frozenset()) -> Graph:
    mixed = draw(st.integers(0, 3)) == 3
    return Graph(
        draw(nodes(mixed=mixed, without=without)),
        ties=draw(st.lists(st.tuples(SMALL, SMALL), max_size=2).map(tuple)),
        frozen=draw(st.lists(SMALL, max_size=3).map(tuple)),
        grad_of_input=draw(st.booleans()),
    )


def shardings(two_axes: bool) -> SearchStrategy[int | str | tuple[str, str, str]]:
    stages = st.sampled_from([3, 2, 1, 0, "mixed"])
    if not two_axes:
        return stages
    axes = ["", "local", "node", "node local"]
    triples = [
        (p, g, o) for p in axes for g in axes for o in axes if set(p.split()) <= set(g.split()) <= set(o.split())
    ]
    return st.one_of(stages, st.sampled_from(triples))


@st.composite
def setups(draw: st.DrawFn) -> s.Setup:
    ranks = draw(st.sampled_from([2, 1, 3, (2, 2)]))
    return s.Setup(
        ranks=ranks,
        sharding=draw(shardings(ranks == (2, 2))),
        units=draw(
            st.one_of(
                st.sampled_from(["auto", "leaves", "boxes", "all"]),
                st.lists(st.integers(0, 15), max_size=5).map(tuple),
            )
        ),
        prefetch=draw(st.integers(0, 2)),
        reductions_in_flight=draw(st.integers(0, 2)),
        keep_last_unit=draw(st.booleans()),
        force_collectives=draw(st.booleans()),
        align=draw(st.sampled_from([64, 8, 1])),
        wide_masters=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "two"])),
        optimizer_first=draw(st.booleans()),
        policy=draw(st.sampled_from(["late", "seeded", "posted", "now", "host"])),
    )


def operations() -> SearchStrategy[s.Op]:
    which, at = st.integers(0, 3), st.integers(0, 6)
    skip, one = st.one_of(st.none(), st.integers(0, 3)), st.one_of(st.none(), st.integers(0, 1))
    return st.one_of(
        st.builds(s.Forward, skip),
        st.builds(s.Backward, which, WINDOWS, st.booleans()),
        st.builds(s.BackwardAll, WINDOWS),
        st.builds(s.Step, one),
        st.builds(s.AutogradGrad, which, st.sampled_from(["input", "parameters"])),
        st.builds(s.BackwardInputs, which, st.lists(SMALL, min_size=1, max_size=2).map(tuple), WINDOWS),
        st.builds(s.Evaluate, st.sampled_from(["no_grad", "inference"])),
        st.builds(s.FailForward, at, st.sampled_from(["grad", "no_grad"])),
        st.builds(s.FailBackward, at, WINDOWS),
        st.builds(s.ZeroGrad, st.sampled_from(["optimizer", "model", "zeros"]), one),
        st.builds(s.Toggle, SMALL),
        st.builds(s.Discard),
        st.builds(s.Part, which, WINDOWS),
        st.builds(s.Held, st.sampled_from(["plain", "penalty", "step"]), WINDOWS, st.one_of(st.none(), which)),
        st.builds(s.Stale),
        st.builds(s.Reshard),
        st.builds(s.Edit, st.one_of(st.none(), which)),
        st.builds(s.Clip, st.sampled_from([0.125, 0.01, 10.0]), st.sampled_from(["norm", "value"])),
        st.builds(s.SetRate, st.integers(0, 1)),
        st.builds(s.Read, st.sampled_from(["parameters", "gradients", "state"])),
    )


def schedules(max_windows: int, without: frozenset[str] = frozenset()) -> SearchStrategy[tuple[s.Op, ...]]:
    """Windows of operations, most of which end in a step; forwards come often, as most others need some."""
    forward, backward = st.builds(s.Forward), st.builds(s.Backward, st.just(0), WINDOWS)
    pair = st.tuples(forward, backward)
    other = st.builds(s.Backward, st.integers(0, 1), WINDOWS, st.booleans())
    two = st.tuples(forward, forward, other, backward)
    single = st.tuples(operations().filter(lambda op: type(op).__name__ not in without))
    groups = st.lists(st.one_of(single, single, single, pair, two), max_size=8)
    ends = st.sampled_from([(s.Step(), s.ZeroGrad()), (s.Clip(), s.Step(), s.ZeroGrad("model")), (s.Step(),), ()])
    windows = st.lists(st.tuples(groups, ends), max_size=max_windows)
    return windows.map(lambda found: tuple(op for ops, end in found for group in (*ops, end) for op in group))


@st.composite
def cases(draw: st.DrawFn, *, max_windows: int = 4, without: frozenset[str] = frozenset()) -> s.Case:
    graph, setup = draw(graphs(without)), draw(setups())
    if RANK_DEPENDENT in graph.kinds():
        # An output that needs no gradient where the weight is not used would not be seen in backward on that rank.
        graph = replace(graph, grad_of_input=True)
        setup = replace(setup, policy=WAITS_UNLIKE.get(setup.policy, setup.policy))
    return s.Case(graph, setup, draw(schedules(max_windows, without)))
