"""Whole tensors out of shards and edits into them: ``unsharded``, ``full_*``, ``local_*`` against the reference."""

import copy
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, Precision, StateError
from shardwise.comm.base import Mesh
from shardwise.comm.recording import record
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import (
    FP64_TOLERANCE,
    Net,
    adamw,
    all_stages,
    assert_all_close,
    assert_all_equal,
    assert_at_rest,
    clone_all,
    data,
    fill,
    make_net,
    net_loss,
    net_window,
    plain_gradients,
    raises,
    set_mean_gradients,
    sgd,
    shard,
)
from .zoo import TiedLanguageModel, Tiny, token_window

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


def plain_run(steps: int, num_ranks: int, optimizer: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """A plain model after some steps, with the gradients of one more."""
    model = make_net()
    optim = optimizer(model)
    for step in range(steps + 1):
        set_mean_gradients(model, plain_gradients(model, net_window, num_ranks, step))
        if step < steps:
            optim.step()
    return model, optim


def sharded_run(mesh: Mesh, stage: int, steps: int, optimizer: Callable[[nn.Module], Any], **options: Any) -> Any:
    model = shard(make_net(), mesh, stage, **options)
    optim = shardwise.shard_optimizer(optimizer(model), model)
    for step in range(steps):
        net_window(model, flat_rank(mesh), step)
        optim.step()
        optim.zero_grad()
    net_window(model, flat_rank(mesh), steps)
    return model, optim


@all_stages
@RANKS
def test_full_accessors_match_the_reference(stage: int, num_ranks: int) -> None:
    plain, plain_optim = plain_run(2, num_ranks, adamw)
    params = clone_all(dict(plain.named_parameters()))
    grads = {name: p.grad for name, p in plain.named_parameters()}
    states = {name: plain_optim.state[p] for name, p in plain.named_parameters()}

    def body(mesh: Mesh) -> None:
        model, _ = sharded_run(mesh, stage, 2, adamw)
        for _ in range(2):  # asking changes nothing
            assert_all_close(shardwise.full_parameters(model), params, 1e-10)
            assert_all_close(shardwise.full_state_dict(model), params, 1e-10)
            assert_all_close(shardwise.full_gradients(model), grads, 1e-10)
            found = shardwise.full_optimizer_state(model)
            assert found.keys() == states.keys()
            for name, state in states.items():
                assert_all_close(
                    {key: value.double() for key, value in found[name].items()},
                    {key: value.double() for key, value in state.items()},
                    1e-9,
                )
        for tensors in (shardwise.full_parameters(model), shardwise.full_state_dict(model)):
            assert list(tensors) == list(params)
            assert not any(value.requires_grad for value in tensors.values())
        first, second = shardwise.full_parameters(model), shardwise.full_parameters(model)
        first["head.bias"].zero_()  # copies
        assert_all_close(second, params, 1e-10)
        assert_all_close(shardwise.full_parameters(model), params, 1e-10)

    run_ranks(num_ranks, body)


@all_stages
@RANKS
def test_local_accessors_are_the_parts_of_the_full_ones(stage: int, num_ranks: int) -> None:
    def body(mesh: Mesh) -> Any:
        model, _ = sharded_run(mesh, stage, 2, adamw)
        full = shardwise.full_parameters(model), shardwise.full_gradients(model)
        local = shardwise.local_parameters(model), shardwise.local_gradients(model)
        states = shardwise.local_optimizer_state(model)
        assert states.keys() == local[0].keys()
        for name, state in states.items():
            assert state["exp_avg"].shape == local[0][name].shape
        full_states = shardwise.full_optimizer_state(model)
        moments = {name: state["exp_avg"] for name, state in full_states.items()}
        return [
            ({n: t.clone() for n, t in part.items()}, whole)
            for part, whole in zip(
                (*local, {n: s["exp_avg"] for n, s in states.items()}), (*full, moments), strict=True
            )
        ]

    ranks = run_ranks(num_ranks, body)
    for kind in range(3):
        whole = ranks[0][kind][1]
        for name, value in whole.items():
            pieces = [ranks[rank][kind][0].get(name, value.new_empty(0)) for rank in range(num_ranks)]
            assert all(piece.dim() == 1 for piece in pieces)
            if stage == 0:
                assert all(torch.equal(piece, value.flatten()) for piece in pieces), name
            else:
                assert torch.equal(torch.cat(pieces), value.flatten()), name


@all_stages
@pytest.mark.parametrize("asked", ["full_gradients", "local_gradients", "clip_grad_norm_"])
def test_looking_at_gradients_ends_an_open_window_once(stage: int, asked: str) -> None:
    """Deferred micro-batches are reduced by the question; later backwards still add up."""
    look = {
        "full_gradients": shardwise.full_gradients,
        "local_gradients": shardwise.local_gradients,
        "clip_grad_norm_": lambda model: shardwise.clip_grad_norm_(model, 1e9),
    }[asked]

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        for step in range(3):
            with shardwise.no_sync(model):
                net_window(model, flat_rank(mesh), step)
            look(model)
        optim.step()
        return shardwise.full_parameters(model)

    plain = make_net()
    for step in range(3):
        for rank in range(2):
            (net_loss(plain, rank, step) / 2).backward()
    sgd(plain).step()
    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


@all_stages
def test_gradients_before_any_backward_and_after_zero_grad_are_absent(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(adamw(model), model)
        assert shardwise.full_gradients(model) == shardwise.local_gradients(model) == {}
        assert shardwise.full_optimizer_state(model) == shardwise.local_optimizer_state(model) == {}
        net_window(model, flat_rank(mesh), 0)
        assert set(shardwise.full_gradients(model)) == set(shardwise.full_parameters(model))
        optim.zero_grad()
        assert shardwise.full_gradients(model) == shardwise.local_gradients(model) == {}
        before = shardwise.full_parameters(model)
        optim.step()  # nothing to do, as in torch
        assert_all_equal(shardwise.full_parameters(model), before)
        assert shardwise.full_optimizer_state(model) == {}

    run_ranks(2, body)


@all_stages
def test_accessors_know_all_names_shapes_and_buffers(stage: int) -> None:
    """Tied names once among parameters and all in the state dict, with shared memory; empty and 0-dim shapes."""

    class Model(TiedLanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.tiny = Tiny()
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def body(mesh: Mesh) -> None:
        plain = fill(Model())
        expected = plain.state_dict()
        model = shard(fill(Model()), mesh, stage)
        state = shardwise.full_state_dict(model)
        assert list(state) == list(expected)
        assert_all_equal(state, clone_all(expected))
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        assert state["blocks.2.inner.weight"].data_ptr() == state["blocks.1.inner.weight"].data_ptr()
        assert list(shardwise.full_parameters(model)) == [name for name, _ in plain.named_parameters()]
        plain.load_state_dict(state)

    run_ranks(2, body)


EDITS: dict[str, Callable[[Any], None]] = {
    "copy_": lambda model: model.head.weight.copy_(torch.full((2, 6), 0.5)),
    "mul_ all": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "data": lambda model: model.blocks[1].inner.weight.data.add_(1.0),
    "setitem": lambda model: model.entry.weight.__setitem__((slice(None), 0), 2.0),
    "init": lambda model: nn.init.constant_(model.blocks[0].outer.bias, 0.25),
    "load_state_dict": lambda model: model.load_state_dict(fill(Net(), "loaded").state_dict()),
    "view": lambda model: model.head.weight.view(-1)[3:7].fill_(1.5),
}


@all_stages
@pytest.mark.parametrize("edit", EDITS)
def test_edits_inside_unsharded_count_as_in_torch(stage: int, edit: str) -> None:
    """Moments stay, the next forward and the next step start from the edited values."""

    def plain_step(model: Any, optim: Any, step: int) -> None:
        set_mean_gradients(model, plain_gradients(model, net_window, 2, step))
        optim.step()
        optim.zero_grad()

    plain = make_net()
    optim = adamw(plain)
    plain_step(plain, optim, 0)
    with torch.no_grad():
        EDITS[edit](plain)
    edited = clone_all(dict(plain.named_parameters()))
    plain_step(plain, optim, 1)
    expected = clone_all(dict(plain.named_parameters()))

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(adamw(model), model)
        net_window(model, flat_rank(mesh), 0)
        optim.step()
        optim.zero_grad()
        before = shardwise.full_parameters(model)
        with torch.no_grad(), shardwise.unsharded(model) as inner:
            assert inner is model
            EDITS[edit](model)
        assert_at_rest(model)
        found = shardwise.full_parameters(model)
        assert not all(torch.equal(found[name], before[name]) for name in found)
        assert_all_close(found, edited, 1e-10)
        net_window(model, flat_rank(mesh), 1)
        optim.step()
        assert_all_close(shardwise.full_parameters(model), expected, 1e-10)

    run_ranks(2, body)


@all_stages
def test_unsharded_of_a_part_gathers_and_edits_that_part(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        before = shardwise.full_parameters(model)
        with torch.no_grad(), shardwise.unsharded(model.blocks[1]) as block:
            assert torch.equal(block.inner.weight, before["blocks.1.inner.weight"])
            block.inner.weight.mul_(2.0)
            if stage == 3:
                with raises(StateError, match=r"blocks\.0\.inner\.weight"):
                    model.blocks[0].inner.weight.sum()
        with torch.no_grad(), shardwise.unsharded(model.blocks[2].outer) as layer:
            layer.bias.zero_()
        after = shardwise.full_parameters(model)
        assert torch.equal(after["blocks.1.inner.weight"], 2 * before["blocks.1.inner.weight"])
        assert not after["blocks.2.outer.bias"].any()
        rest = [n for n in before if n not in ("blocks.1.inner.weight", "blocks.2.outer.bias")]
        assert_all_equal({n: after[n] for n in rest}, {n: before[n] for n in rest})
        assert_at_rest(model)
        with raises(ConfigError, match="not part of a sharded model"), shardwise.unsharded(nn.Linear(2, 2)):
            pass

    run_ranks(2, body)


@all_stages
def test_unsharded_nests_and_forwards_work_inside(stage: int) -> None:
    """Train, evaluate and edit inside; nothing is freed before the outermost context ends."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        with shardwise.unsharded(model, writes=False):
            with shardwise.unsharded(model.blocks[0], writes=False):
                net_window(model, flat_rank(mesh), 0)
            total = sum(p.sum() for p in model.parameters()).item()
            assert total == sum(p.sum() for p in make_net().parameters()).item()
            with torch.no_grad():
                model(data(2, 4, key=0))
            assert model.blocks[0].inner.weight.sum().isfinite()
        optim.step()
        assert_at_rest(model)
        return shardwise.full_parameters(model)

    plain = make_net()
    for rank in range(2):
        (net_loss(plain, rank, 0) / 2).backward()
    sgd(plain).step()
    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


@all_stages
def test_unsharded_inside_a_forward_raises(stage: int) -> None:
    class Peeking(Net):
        def forward(self, x: Tensor) -> Tensor:
            with shardwise.unsharded(self):
                return super().forward(x)

    def body(mesh: Mesh) -> None:
        model = shard(fill(Peeking()), mesh, stage)
        with raises(StateError, match="inside a forward"):
            net_loss(model, 0, 0)
        with raises(StateError, match="inside a forward"):
            model.eval()(data(1, 4, key=0))

    run_ranks(2, body)


@all_stages
def test_edits_that_differ_between_ranks_end_up_alike(stage: int) -> None:
    """The owner of an element wins; no rank keeps a model of its own."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage, align=1)
        with torch.no_grad(), shardwise.unsharded(model):
            for param in model.parameters():
                param.fill_(float(flat_rank(mesh)))
        found = shardwise.full_parameters(model)
        with shardwise.unsharded(model, writes=False):
            assert_all_equal(clone_all(dict(model.named_parameters())), found)
        return found

    ranks = run_ranks(3, body)
    assert_all_equal(ranks[1], ranks[0])
    assert_all_equal(ranks[2], ranks[0])
    assert {v for t in ranks[0].values() for v in t.flatten().tolist()} == {0.0, 1.0, 2.0}


@all_stages
def test_masters_of_unedited_elements_keep_their_bits(stage: int) -> None:
    """A visit without edits, or an edit elsewhere, does not round fp32 masters to bf16."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(torch.float32), mesh, stage, precision=Precision(param=torch.bfloat16))
        before = shardwise.full_parameters(model)
        assert any(not torch.equal(v, v.bfloat16().float()) for v in before.values())
        with torch.no_grad(), shardwise.unsharded(model):
            model.head.bias[0] = 3.0
        after = shardwise.full_parameters(model)
        assert after["head.bias"][0] == 3.0
        assert after["head.bias"][1] == before["head.bias"][1]
        before.pop("head.bias"), after.pop("head.bias")
        assert_all_equal(after, before)

    run_ranks(2, body)


@all_stages
def test_a_visit_that_promises_not_to_write_moves_nothing_at_its_end(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        recorded, log = record(mesh)
        model = shard(make_net(), recorded, stage)
        with shardwise.unsharded(model, writes=False):
            log.clear()
        assert len(log) == 0
        with shardwise.unsharded(model):
            log.clear()
        assert len(log) > 0

    run_ranks(2, body)


@all_stages
def test_a_backward_across_an_edit_raises(stage: int) -> None:
    """The graph was made with other weights."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        loss = net_loss(model, flat_rank(mesh), 0)
        with torch.no_grad(), shardwise.unsharded(model):
            model.head.weight.mul_(2.0)
        with raises(RuntimeError, match=r"changed between forward and backward|inplace operation"):
            loss.backward()

    run_ranks(2, body)


@all_stages
def test_optimizer_state_dict_returns_to_the_same_rank_and_layout_only(stage: int) -> None:
    """Load what was saved, go on as if nothing had happened; foreign state is refused by name."""

    def body(mesh: Mesh) -> None:
        model, optim = sharded_run(mesh, stage, 2, adamw)
        state = copy.deepcopy(optim.state_dict())  # its tensors are live, as in torch
        values = shardwise.full_parameters(model)
        optim.step()
        expected = shardwise.full_parameters(model)
        other = shard(make_net(), mesh, stage)
        other_optim = shardwise.shard_optimizer(adamw(other), other)
        with torch.no_grad(), shardwise.unsharded(other):
            for name, param in other.named_parameters():
                param.copy_(values[name])
        other_optim.load_state_dict(state)
        net_window(other, flat_rank(mesh), 2)
        other_optim.step()
        assert_all_equal(shardwise.full_parameters(other), expected)
        plain = adamw(make_net())
        small = shard(fill(Net(num_blocks=1)), mesh, stage)
        small_optim = shardwise.shard_optimizer(adamw(small), small)
        with raises(StateError, match="layout"):
            other_optim.load_state_dict(plain.state_dict())
        with raises(StateError, match="layout"):
            small_optim.load_state_dict(state)

    run_ranks(2, body)


def test_token_window_is_not_vacuous() -> None:
    model = fill(TiedLanguageModel())
    token_window(model, 0, 0)
    assert model.embed.weight.grad.any()


@all_stages
@RANKS
def test_parameters_one_after_the_other_are_the_full_ones(stage: int, num_ranks: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        full = shardwise.full_parameters(model)
        seen = []
        buckets: list[weakref.ref[Tensor]] = []
        for name, tensor in shardwise.iterate_full_parameters(model):
            alike = torch.equal(tensor, full[name])  # not inside the assert, which would keep the tensor
            assert alike
            buckets.append(weakref.ref(tensor._base))  # type: ignore[type-var]
            seen.append(name)
            del tensor
            alive = {id(ref) for ref in buckets if ref() is not None}
            assert len(alive) == 1
        assert seen == sorted(full)

    run_ranks(num_ranks, body)


@all_stages
def test_a_state_dict_for_rank_0_only_is_whole_there_and_nowhere_else(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(fill(TiedLanguageModel()), mesh, stage)
        full = shardwise.full_state_dict(model)
        found = shardwise.full_state_dict(model, rank0_only=True, offload_to_cpu=True)
        if flat_rank(mesh):
            assert found == {}
        else:
            assert_all_equal(found, full)
            assert list(found) == list(full)
            assert all(tensor.device.type == "cpu" for tensor in found.values())

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_that_numpy_looks_at_stays_and_training_goes_on(stage: int, num_ranks: int) -> None:
    def train(mesh: Mesh, *, looks: bool) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(adamw(model), model)
        seen = []
        for step in range(3):
            net_window(model, flat_rank(mesh), step)
            if looks:
                seen += [grad.numpy() for grad in shardwise.local_gradients(model).values()]
            optim.step()
            optim.zero_grad()
            if looks:
                with shardwise.unsharded(model, writes=False):
                    seen += [param.detach().numpy() for param in model.parameters()]
        full = shardwise.full_parameters(model)
        if looks:
            seen += [part.numpy() for part in shardwise.local_parameters(model).values()]
        shardwise.unshard_model(model)
        assert_all_equal({name: p.detach() for name, p in model.named_parameters()}, full)
        return full

    plain = run_ranks(num_ranks, partial(train, looks=False))[0]
    with warnings.catch_warnings(record=True) as warned:  # before the threads begin: filters are everyone's
        warnings.simplefilter("always")
        looked = run_ranks(num_ranks, partial(train, looks=True))
    assert_all_equal(looked[0], plain)
    texts = [str(each.message) for each in warned]
    assert texts
    assert all("through numpy" in text for text in texts)
    assert all(texts.count(text) <= num_ranks for text in texts)
