"""The parts: slices of the tape, names of random states, the choice of what is drawn for nobody."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import shardwise
from shardwise import StateError
from shardwise.initial.recorder import Recorder
from shardwise.initial.replay import Replay
from shardwise.initial.states import GeneratorStates
from shardwise.initial.tape import Node, Ref, is_whole


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    try:
        with recorder:
            yield recorder
    finally:
        recorder.states.leave()


def names(recorder: Recorder, *tensors: torch.Tensor) -> list[str]:
    """Operations that decide what tensors hold at the end."""
    wanted = [ref.storage for tensor in tensors if (ref := recorder.ref(tensor)) is not None]
    ops = recorder.tape.ops
    return [ops[index].func.overloadpacket.__name__ for index in recorder.tape.slice(wanted, before=len(ops))]


def test_slice_leaves_out_what_was_overwritten() -> None:
    with recording() as recorder:
        w = torch.zeros(3)
        w.add_(1)
        w.normal_()
        w.mul_(2)
    assert names(recorder, w) == ["normal_", "mul_"]


def test_slice_keeps_what_is_overwritten_in_part_only() -> None:
    with recording() as recorder:
        w = torch.ones(3, 2)
        w[0].normal_()
        w.t().zero_()
        w[1].fill_(2)
        v = torch.ones(4)
        v[1:].zero_()
    assert names(recorder, w) == ["zero_", "fill_"]
    assert names(recorder, v) == ["ones", "zero_"]


def test_slice_follows_sources_as_they_were() -> None:
    with recording() as recorder:
        a = torch.ones(3)
        b = a.clone()
        a.normal_()
        c = a + b
        a.add_(1)
    assert names(recorder, c) == ["ones", "clone", "normal_", "add"]
    assert names(recorder, b) == ["ones", "clone"]


def test_copy_of_itself_overwrites_nothing() -> None:
    with recording() as recorder:
        a = torch.ones(3)
        a.copy_(a.view(3))
    assert names(recorder, a) == ["ones", "copy_"]


@pytest.mark.parametrize(
    ("size", "stride", "whole"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (4, 1), False), ((2, 2), (0, 1), False), ((), (), True)],
)
def test_wholeness_is_that_of_strides(size: tuple[int, ...], stride: tuple[int, ...], whole: bool) -> None:
    assert is_whole(Ref(0, 0, size, stride, torch.float32)) is whole


def test_marker_stands_for_its_node_also_when_it_is_brought_back() -> None:
    states, generator = GeneratorStates(), torch.Generator().manual_seed(4)
    start = generator.get_state()
    root = states.node(generator)
    first = Node(parent=root, op=0)
    states.advance(generator, first)
    kept = generator.get_state()
    states.advance(generator, Node(parent=first, op=1))
    assert generator.initial_seed() == 4
    generator.set_state(kept)
    assert states.node(generator) is first
    generator.manual_seed(4)
    assert states.node(generator) is root
    generator.set_state(kept)
    (seen,) = states.leave()
    assert seen.last is first
    assert torch.equal(generator.get_state(), start)


def test_marker_of_somebody_else_is_refused() -> None:
    generator = torch.Generator().manual_seed(4)
    other = GeneratorStates()
    other.advance(generator, Node(parent=other.node(generator), op=0))
    with pytest.raises(StateError, match="another deferred_init"):
        GeneratorStates().node(generator)


def test_states_that_are_needed_again_are_kept_and_others_are_not() -> None:
    with shardwise.deferred_init() as recipe:
        nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(20))
    tape = recipe._recorder.tape
    last = tape.slice([len(tape.num_bytes) - 1], before=len(tape.ops))
    replay = Replay(tape)
    needed = next(op for op in tape.ops if op.draws is not None and op.index > 5)
    replay.expect([[needed.index]])
    replay.compute([], before=0, part=last)
    assert len(replay._known) == 2  # the one that is needed, and the latest


def test_uninitialised_memory_is_zero_and_not_that_of_somebody() -> None:
    with shardwise.deferred_init() as recipe:
        net = nn.Module()
        net.w = nn.Parameter(torch.empty(1000))
        net.v = nn.Parameter(torch.empty(10, 10))
        net.v.data[0].normal_()
    recipe.materialize(net)
    assert not net.w.any()
    assert not net.v[1:].any()
    assert net.v[0].all()
