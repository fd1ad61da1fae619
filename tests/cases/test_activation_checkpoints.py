"""Regions that activation checkpoints compute again: once in a backward, as far as torch would, nothing kept."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.comm.base import Mesh
from shardwise.errors import StateError
from shardwise.testing.lanes import Instruments
from shardwise.testing.ranks import run_ranks

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

SIZE = 8
all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def checkpoint(function: Callable[..., T], *args: Any) -> T:
    out: T = torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return out


class Pair(nn.Module):
    """Two outputs that have no operation in common."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(2))
        self.num_calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        return self.parts[0](x), self.parts[1](x)


class Chosen(nn.Module):
    """A product, if this rank's data choose it."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, SIZE))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.used else x


class Region(nn.Sequential):
    """Layers of which nothing is kept."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x)  # type: ignore[no-any-return]


class Anything:
    """An argument of a region, which lives as long as the region may be computed again."""


class Blocks(nn.Module):
    """Two checkpointed regions of two units, one region in the other if ``nested``."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(4))
        self.nested = nested
        self.seen: list[weakref.ref[Anything]] = []

    def first(self, x: Tensor, argument: Anything) -> Tensor:
        self.seen.append(weakref.ref(argument))
        return self.blocks[1](self.blocks[0](x))  # type: ignore[no-any-return]

    def second(self, x: Tensor) -> Tensor:
        return self.blocks[3](self.blocks[2](x))  # type: ignore[no-any-return]

    def both(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, checkpoint(self.first, x, Anything()) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x) if self.nested else self.both(x)


def filled(model: M) -> M:
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
    return model


def sharded(model: M, mesh: Mesh, stage: int) -> M:
    result: M = shardwise.shard(filled(model), mesh, stage=stage, units=lambda m: isinstance(m, nn.Sequential))
    return result


def batch() -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(9)).requires_grad_()


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the operations that run."""
    names: list[str] = []

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Count():  # type: ignore[no-untyped-call]
        yield names


@all_stages
@pytest.mark.parametrize("nested", [False, True])
def test_retained_graph_is_computed_again_in_each_backward(stage: int, nested: bool) -> None:
    def body(mesh: Mesh) -> Tensor:
        x, model = batch(), sharded(Blocks(nested), mesh, stage)
        out = model(x).sum()
        with shardwise.no_sync(model):
            out.backward(retain_graph=True)
        out.backward()
        assert x.grad is not None
        return x.grad

    x, model = batch(), filled(Blocks(nested))
    (2 * model(x).sum()).backward()
    for grad in run_ranks(2, body):
        torch.testing.assert_close(grad, x.grad)


@all_stages
@pytest.mark.parametrize("backwards", ["one", "group"])
def test_region_with_two_outputs_is_computed_again_once(backwards: str, stage: int) -> None:
    def body(mesh: Mesh) -> int:
        x = batch()
        model = sharded(Pair(), mesh, stage)
        outputs = checkpoint(model, x)
        if backwards == "one":
            sum(out.sum() for out in outputs).backward()
        else:
            with torch_checkpoint.GraphExecGroup(), shardwise.no_sync(model):
                for out in outputs:
                    out.sum().backward()
        return model.num_calls

    assert run_ranks(2, body) == [2, 2]


@all_stages
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("alone", [False, True], ids=["beside_others", "in_a_region_of_its_own"])
def test_weights_that_one_rank_leaves_unused_in_a_region(alone: bool, prefetch: int, stage: int) -> None:
    def build(used: bool) -> Region:
        last = Region(Chosen(used)) if alone else Chosen(used)
        return filled(Region(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), last))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shardwise.shard(
            build(mesh["data"].rank == 0),
            mesh,
            stage=stage,
            units=lambda m: isinstance(m, nn.Linear | Chosen),
            prefetch=prefetch,
            reductions_in_flight=0,
        )
        model(batch()).sum().backward()
        return shardwise.full_gradients(model)

    models = build(used=True), build(used=False)
    for model in models:
        model(batch()).sum().backward()
    expected = [
        (a.grad + (torch.zeros_like(a) if b.grad is None else b.grad)) / 2
        for a, b in zip(*(model.parameters() for model in models), strict=True)
        if a.grad is not None
    ]
    for gradients in run_ranks(2, body, timeout=10):
        torch.testing.assert_close([*gradients.values()], expected)


@all_stages
def test_gradient_of_the_output_of_a_region_computes_nothing_again(stage: int) -> None:
    class Counted(nn.Sequential):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return torch.tanh(super().forward(x))  # type: ignore[no-untyped-call]

    def through(model: Counted) -> tuple[int, Tensor]:
        x = batch()
        out = checkpoint(model, x)
        loss = out.square().sum()
        for _ in range(3):
            torch.autograd.grad(loss, out, retain_graph=True)
        num_calls = model.num_calls
        torch.autograd.backward(loss)
        assert x.grad is not None
        return num_calls, x.grad

    expected = through(filled(Counted(nn.Linear(SIZE, SIZE))))
    for found in run_ranks(2, lambda mesh: through(sharded(Counted(nn.Linear(SIZE, SIZE)), mesh, stage))):
        assert found[0] == expected[0] == 1
        torch.testing.assert_close(found[1], expected[1])


@all_stages
def test_backward_inside_a_backward_through_the_same_region(stage: int) -> None:
    def through(model: Pair) -> Tensor:
        x = batch()
        first, second = checkpoint(model, x)
        extra: list[Tensor] = []
        loss, other = first.sum() + 2 * second.sum(), second.sum()
        first.register_hook(lambda grad: extra.extend(torch.autograd.grad(other, x, retain_graph=True)))
        loss.backward(retain_graph=True)
        assert x.grad is not None
        return torch.add(x.grad, extra[0])

    expected = through(filled(Pair()))
    for grad in run_ranks(2, lambda mesh: through(sharded(Pair(), mesh, stage))):
        torch.testing.assert_close(grad, expected)


@all_stages
def test_results_kept_from_the_forward_are_not_missed_in_the_recomputation(stage: int) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, SIZE).requires_grad_(False)
            self.layer = nn.Linear(SIZE, SIZE)
            self.kept: Tensor | None = None

        def region(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = self.table(torch.arange(4))
            return torch.tanh(self.layer(x + self.kept))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, x)

    def body(mesh: Mesh) -> Tensor:
        x = batch()
        units = lambda m: isinstance(m, nn.Embedding | nn.Linear)  # noqa: E731
        shardwise.shard(filled(Positions()), mesh, stage=stage, units=units)(x).sum().backward()
        assert x.grad is not None
        return x.grad

    x = batch()
    filled(Positions())(x).sum().backward()
    for grad in run_ranks(2, body):
        torch.testing.assert_close(grad, x.grad)


@all_stages
def test_recomputation_ends_where_torch_would_end_it(stage: int) -> None:
    def num_products(model: nn.Module) -> int:
        x = batch()
        out = checkpoint(lambda x: model(x) * 1.0, x)  # nothing after the last product is saved
        with counted() as names:
            out.sum().backward()
        return names.count("addmm")

    def chain() -> nn.Module:
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))

    def body(mesh: Mesh) -> int:
        return num_products(
            shardwise.shard(chain(), mesh, stage=stage, units=lambda module: isinstance(module, nn.Linear))
        )

    expected = num_products(chain())
    assert expected == 1  # of the second product only the input is needed
    assert run_ranks(1, body) == [expected]


@all_stages
@pytest.mark.parametrize("nested", [False, True])
def test_nothing_computed_again_outlives_the_backward(stage: int, nested: bool) -> None:
    def body(mesh: Mesh) -> int:
        model = sharded(Blocks(nested), mesh, stage)
        loss = model(batch()).sum()
        loss.backward()
        gc.collect()
        return sum(ref() is not None for ref in model.seen)  # while the loss keeps its graph

    assert run_ranks(2, body) == [0, 0]


class Inside(nn.Module):
    """A unit with a region in it: a backward reads its weights as they are, not as they were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x)


def by_backward(loss: Tensor, params: list[nn.Parameter]) -> None:
    loss.backward(inputs=params)  # type: ignore[no-untyped-call]


def by_several(loss: Tensor, params: list[nn.Parameter]) -> None:
    other = torch.zeros((), requires_grad=True)
    torch.autograd.backward([loss, other], [torch.ones(()), torch.ones(())], inputs=[*params, other])


@all_stages
@pytest.mark.parametrize("run", [by_backward, by_several])
@pytest.mark.parametrize("picks", [(0,), (2, 3), (0, 1, 2, 3)])
def test_backward_by_parameters_computes_regions_with_whole_weights(
    stage: int, run: Callable[[Tensor, list[nn.Parameter]], None], picks: tuple[int, ...]
) -> None:
    def grads_of(model: nn.Module) -> None:
        params = list(model.parameters())
        run(model(batch()).sum(), [params[pick] for pick in picks])

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = filled(nn.Sequential(Inside(), Inside()))
        model = shardwise.shard(model, mesh, stage=stage, units=lambda module: isinstance(module, Inside))
        grads_of(model)
        return shardwise.full_gradients(model)

    plain = filled(nn.Sequential(Inside(), Inside()))
    grads_of(plain)
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    assert len(expected) == len(picks)
    for found in run_ranks(2, body):
        torch.testing.assert_close({name: grad for name, grad in found.items() if name in expected}, expected)
        assert all(found[name] is None or not found[name].any() for name in found if name not in expected)


class Reading(nn.Module):
    """A unit with a region that reads its weight in some way."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, SIZE))
        self.bias = nn.Parameter(torch.zeros(SIZE))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(lambda x: self.read(x, self.weight), x)) + self.bias + x


def by_product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def by_vmap(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.vmap(lambda column: x @ column, in_dims=1, out_dims=1)(weight)
    return out


def _scripted(function: Callable[..., Tensor], *examples: Tensor) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(function, examples)  # type: ignore[no-any-return]


SCRIPTED = _scripted(by_product, torch.ones(4, SIZE), torch.ones(SIZE, SIZE))


def by_script(x: Tensor, weight: Tensor) -> Tensor:
    return SCRIPTED(x, weight).sin()  # where torch ends the recomputation: it cannot inside a script


def by_copy(x: Tensor, weight: Tensor) -> Tensor:
    return x @ torch.tensor(weight) + x @ x.new_tensor(weight)


def size(weight: Tensor) -> Tensor:
    """A function of the user's that torch has one of the same name of."""
    if torch.overrides.has_torch_function_unary(weight):
        return torch.overrides.handle_torch_function(size, (weight,), weight)  # type: ignore[no-any-return]
    return weight.sin() + weight.new_tensor(weight.tolist())


def by_own_function(x: Tensor, weight: Tensor) -> Tensor:
    return x @ size(weight)


class Loss(Tensor):
    """A subclass, of which torch switches its functions off while a method of it runs."""


def as_loss(loss: Tensor) -> Tensor:
    return loss.as_subclass(Loss)


class Slots:
    __slots__ = "hidden"

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted(Reading):
    """Its result is in a slot."""

    def forward(self, x: Tensor) -> Any:
        return Slots(super().forward(x))


class Unpacking(nn.Sequential):
    """Goes on with what is in the slots."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x).hidden
        return x


@all_stages
def test_region_in_a_unit_whose_output_is_in_a_slot_reads_whole_weights(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor | None]:
        late = Instruments("late")
        model = filled(Unpacking(Slotted(by_vmap), Slotted(by_vmap)))
        model = shardwise.shard(model, mesh, stage=stage, units=Slotted, lanes=late.lanes, arena=late.arena)
        model(batch()).sum().backward()
        return shardwise.full_gradients(model)

    plain = filled(Unpacking(Slotted(by_vmap), Slotted(by_vmap)))
    plain(batch()).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@all_stages
@pytest.mark.parametrize("end", [lambda loss: loss, as_loss], ids=["tensor", "subclass"])
@pytest.mark.parametrize("read", [by_product, by_vmap, by_script, by_copy, by_own_function])
def test_region_in_a_unit_reads_whole_weights_in_any_way(
    stage: int, read: Callable[[Tensor, Tensor], Tensor], end: Callable[[Tensor], Tensor]
) -> None:
    def made() -> nn.Module:
        return filled(nn.Sequential(nn.Linear(SIZE, SIZE), Reading(read), nn.Linear(SIZE, SIZE), Reading(read)))

    def body(mesh: Mesh) -> dict[str, Tensor]:
        late = Instruments("late")  # gathers come when they are waited for, and what is freed is NaN
        units: Any = (Reading, nn.Linear)
        model = shardwise.shard(made(), mesh, stage=stage, units=units, lanes=late.lanes, arena=late.arena)
        end(model(batch()).sum()).backward()  # type: ignore[no-untyped-call]
        return {name: grad for name, grad in shardwise.full_gradients(model).items() if grad is not None}

    plain = made()
    plain(batch()).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    assert any(grad.any() for grad in expected.values())
    for found in run_ranks(2, body):
        shared = {name: grad for name, grad in found.items() if name in expected or grad.any()}
        torch.testing.assert_close(shared, expected)


class Pulled(nn.Module):
    """Its root's forward runs a backward by a weight of another unit, whose gradients are that weight again."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.first, self.second, self.by = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), by

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = leaf.sin() * weight
        if self.by == "materialized":
            other = self.first.bias
            pulled, zeros = torch.autograd.grad(out.sum(), [leaf, other], allow_unused=True, materialize_grads=True)
            pulled = pulled + zeros
        elif self.by == "outputs":
            pulled, _ = torch.autograd.grad([out, weight], [leaf, weight], [weight, weight])
        else:
            pulled, _ = torch.autograd.grad(out, [leaf, weight], grad_outputs=weight)
        return self.second(self.first(x) + pulled)  # type: ignore[no-any-return]


@all_stages
@pytest.mark.parametrize("by", ["outputs", "inputs", "materialized"])
def test_weights_among_the_gradients_of_a_backward_are_values(stage: int, by: str) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor | None]:
        model = shardwise.shard(filled(Pulled(by)), mesh, stage=stage, units=nn.Linear)
        model(batch()[:1].expand(SIZE, SIZE)).sum().backward()
        if stage == 3:
            bias, out = model.second.bias, batch()[0] * 2
            with pytest.raises(StateError, match=r"second\.bias is sharded: grad\(\) needs the whole parameter"):
                torch.autograd.grad([out], [bias], [bias])
            with pytest.raises(StateError, match=r"second\.bias is sharded: backward\(\) needs the whole parameter"):
                torch.autograd.backward([out], [bias], inputs=[bias])
        return shardwise.full_gradients(model)

    plain = filled(Pulled(by))
    plain(batch()[:1].expand(SIZE, SIZE)).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected)


class Forces(nn.Module):
    """A region in which backwards run through units, as forces are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inside(), Pair()])

    def forces(self, layer: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(sum(out.sum() for out in [*layer(place)]), place)
        return force

    def region(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = sum([*layer(x)]) + self.forces(layer, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, self.layers[0](x))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Units that reentrant checkpoints compute again, one of them twice, with a region inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Reading(by_vmap), Reading(by_vmap), Reading(by_vmap)])

    def forward(self, x: Tensor) -> Tensor:
        for pick in (0, 1, 0, 2):
            x = torch_checkpoint.checkpoint(self.layers[pick], x, use_reentrant=True)
        return x


@all_stages
@pytest.mark.parametrize("kind", [Forces, Twice])
@pytest.mark.parametrize("retain", [False, True])
def test_backwards_and_reentrant_checkpoints_around_regions_in_units(
    stage: int, kind: type[nn.Module], retain: bool
) -> None:
    def grads_of(model: nn.Module) -> Tensor:
        x = batch()
        loss = model(x).square().sum()
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        return x.grad

    def body(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor | None]]:
        late = Instruments("late")
        units: Any = (Reading, Inside, Pair)
        model = shardwise.shard(filled(kind()), mesh, stage=stage, units=units, lanes=late.lanes, arena=late.arena)
        return grads_of(model), shardwise.full_gradients(model)

    plain = filled(kind())
    expected = grads_of(plain), {name: param.grad for name, param in plain.named_parameters()}
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected)


class Borrowing(nn.Module):
    """Its root reads a weight of a unit through a function named as one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ size(self.layer.weight))  # type: ignore[no-any-return]


@all_stages
def test_function_of_the_user_named_as_one_of_torch_reads_a_whole_weight(stage: int) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor | None]:
        late = Instruments("late")
        model = shardwise.shard(
            filled(Borrowing()), mesh, stage=stage, units=nn.Linear, lanes=late.lanes, arena=late.arena
        )
        if stage == 3:
            with pytest.raises(StateError, match=r"layer\.weight is sharded: size\(\) needs the whole parameter"):
                size(model.layer.weight)
        model(batch()).sum().backward()
        return shardwise.full_gradients(model)

    plain = filled(Borrowing())
    plain(batch()).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected)
