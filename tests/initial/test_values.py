"""A recorded construction gives what ordinary construction gives, bit for bit, and leaves generators where it does."""

import copy
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, Recipe, StateError

from .zoo import CONSTRUCTORS, differences, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

every_constructor = pytest.mark.parametrize("name", CONSTRUCTORS)


@pytest.fixture(autouse=True)
def _same_generator_afterwards() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe]:
    with shardwise.deferred_init() as recipe:
        model = build()
    return model, recipe


@every_constructor
@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_generator_equal_those_of_ordinary_construction(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    expected = CONSTRUCTORS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    model, recipe = deferred(CONSTRUCTORS[name])
    assert any(tensor.is_meta for tensor in tensors_of(model).values())
    if name != "seeds_inside":
        assert torch.equal(torch.get_rng_state(), before)
    recipe.materialize(model)
    assert differences(model, expected) == []
    assert torch.equal(torch.get_rng_state(), after)


@every_constructor
def test_comparison_notices_one_bit(name: str) -> None:
    torch.manual_seed(0)
    first = CONSTRUCTORS[name]()
    torch.manual_seed(0)
    model, recipe = deferred(CONSTRUCTORS[name])
    recipe.materialize(model)
    param = next(p for p in model.parameters() if p.numel())
    memory = torch.empty(0, dtype=torch.uint8).set_(param.data.untyped_storage())
    memory[0] ^= 1
    assert differences(model, first)


def test_recording_draws_nothing_and_holds_nothing() -> None:
    model, _ = deferred(lambda: nn.Linear(1 << 20, 1 << 20))  # 4 TiB
    assert model.weight.is_meta
    assert model.weight.shape == (1 << 20, 1 << 20)


def test_explicit_generator_moves_when_values_are_computed() -> None:
    def build(generator: torch.Generator) -> nn.Module:
        net = nn.Linear(4, 4)
        nn.init.normal_(net.weight, generator=generator)
        return net

    plain, own = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    expected = build(plain)
    torch.manual_seed(0)
    start = own.get_state()
    model, recipe = deferred(lambda: build(own))
    assert torch.equal(own.get_state(), start)
    recipe.materialize(model)
    assert torch.equal(own.get_state(), plain.get_state())
    assert differences(model, expected) == []


@pytest.mark.parametrize("touch", ["seed", "draw"])
def test_generator_in_use_since_is_left_alone(touch: str) -> None:
    model, recipe = deferred(lambda: nn.Linear(4, 4))
    if touch == "seed":
        torch.manual_seed(7)
    else:
        torch.rand(3)
    state = torch.get_rng_state()
    recipe.materialize(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_values_are_drawn_once_for_live_and_once_for_dead_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.initial import replay

    def build() -> nn.Module:
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
        for linear in net:
            nn.init.normal_(linear.weight)
        return net

    model, recipe = deferred(build)
    drawn: list[object] = []
    real = replay._call_drawing
    monkeypatch.setattr(replay, "_call_drawing", lambda func, *rest: (drawn.append(func), real(func, *rest))[1])
    recipe.materialize(model)
    assert len(drawn) == 15  # weight, bias, weight again, each layer


def test_order_of_parameters_does_not_matter() -> None:
    """A parameter that is drawn late and needed early; states in between are kept, not drawn again and again."""

    def build() -> nn.Module:
        net = nn.Module()
        late = nn.Parameter(torch.empty(5))
        net.late = late
        net.others = nn.ParameterList(nn.Parameter(torch.randn(5)) for _ in range(6))
        late.data.normal_()
        net.sum = nn.Parameter(sum(p.data for p in net.others))  # type: ignore[arg-type]
        net.first = nn.Parameter(net.others[0].data * late.data)
        return net

    torch.manual_seed(2)
    expected = build()
    torch.manual_seed(2)
    model, recipe = deferred(build)
    assert differences(recipe.materialize(model), expected) == []


def test_draws_that_depend_on_draws_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.initial import replay

    depth = 30

    def build() -> nn.Module:
        net = nn.ParameterList(nn.Parameter(torch.bernoulli(torch.rand(3))) for _ in range(depth))
        net.append(nn.Parameter(net[0].data + torch.randn(3)))
        return net

    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    model, recipe = deferred(build)
    count = 0
    real = replay._call_drawing

    def counted(*args: object) -> object:
        nonlocal count
        count += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(replay, "_call_drawing", counted)
    assert differences(recipe.materialize(model), expected) == []
    assert count <= 5 * depth


def test_device_of_a_moved_model_is_remembered() -> None:
    """With a kind of device that torch names on every machine."""
    with shardwise.deferred_init() as recipe:
        model = nn.Linear(3, 3).to("xla:0")
        assert model.weight.device == torch.device("xla:0")
        assert not model.weight.is_cpu
        more = torch.zeros(3, device=model.weight.device)
        assert more.to("xla:0") is more
        assert (model.weight + more).device == torch.device("xla:0")
        assert (more.cpu() + torch.ones(3)).device == torch.device("cpu")
        with pytest.raises(ConfigError, match=r"draws on xla:0.*build the model on the CPU"):
            model.weight.data.normal_()
    assert recipe.device_of(model.weight, "weight") == torch.device("xla:0")


def test_gradient_hooks_of_the_constructor_stay() -> None:
    def build() -> nn.Module:
        net = nn.Linear(3, 3)
        net.weight.register_hook(lambda grad: grad * 2)
        return net

    model, recipe = deferred(build)
    recipe.materialize(model)
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((3, 3), 2.0))


def test_parameters_stay_the_same_objects_with_their_attributes() -> None:
    class Special(nn.Parameter):
        pass

    def build() -> nn.Module:
        net = nn.Linear(3, 3)
        net.bias = Special(torch.ones(3), requires_grad=False)
        net.weight.decay = 0.1
        net.again = [net.weight]
        return net

    model, recipe = deferred(build)
    weight, bias = model.weight, model.bias
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe.materialize(model)
    assert model.weight is weight is model.again[0] is optimizer.param_groups[0]["params"][0]
    assert weight.decay == 0.1
    assert type(bias) is Special
    assert not bias.requires_grad
    model(torch.ones(1, 3)).sum().backward()
    assert weight.grad is not None


# What cannot be recorded is refused by name


def _module(fill: Callable[[], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = nn.Linear(2, 2)
        fill()
        return net

    return build


OUTSIDE = torch.zeros(3)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "set_": (lambda: torch.ones(2).set_(torch.ones(3).untyped_storage()), "set_"),
    "resize_": (lambda: torch.ones(2).resize_(5), "resize_.*make a new tensor"),
    "batch norm": (lambda: nn.BatchNorm1d(3)(torch.randn(5, 3)), "native_batch_norm.*run no forward"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "conjugate": (lambda: torch.polar(torch.ones(3), torch.ones(3)).conj() + 1, "resolve_conj"),
    "meta factory": (lambda: torch.ones(3, device="meta"), "leave torch.device"),
    "meta context": (lambda: _in_meta_context(), "leave torch.device"),
    "meta move": (lambda: torch.ones(3).to("meta"), "leave torch.device"),
    "address": (lambda: torch.ones(3).data_ptr(), "no address"),
    "autocast product": (lambda: _under_autocast(lambda w: w @ w), "mm.*leave autocast out"),
    "autocast layer": (lambda: _under_autocast(lambda w: nn.Linear(3, 2)(w)), "leave autocast out"),
    "autocast factorisation": (lambda: _under_autocast(torch.linalg.qr), "qr.*leave autocast out"),
    "autocast undivided": (lambda: _under_autocast(torch.linalg.svdvals), "svdvals.*leave autocast out"),
    "torch.func": (lambda: torch.func.grad(lambda w: (w * w).sum())(torch.ones(3)), "torch.func's transforms"),
    "inference mode": (torch.inference_mode()(lambda: nn.Linear(3, 3)), "inference_mode.*use torch.no_grad"),
    "write outside": (lambda: OUTSIDE.copy_(torch.ones(3)), "copy_.*from outside"),
    "draw outside": (lambda: nn.init.normal_(OUTSIDE), "normal_.*from outside"),
    "draw into an array": (lambda: torch.from_numpy(np.zeros(3)).normal_(), "normal_.*from outside"),
}


def _under_autocast(operation: Callable[[Tensor], object]) -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return operation(torch.ones(3, 3))


def _in_meta_context() -> Tensor:
    with torch.device("meta"):
        return torch.ones(3)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_is_refused_by_name(what: str) -> None:
    operation, message = REFUSED[what]
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=message), shardwise.deferred_init():
        _module(operation)()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.ones(1).device.type == "cpu"  # the modes are off


def test_autocast_that_changes_nothing_is_followed() -> None:
    def build() -> nn.Module:
        with torch.autocast("cpu", torch.bfloat16):
            net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).half(), nn.LayerNorm(3))
            nn.init.kaiming_normal_(net[0].weight)
            net[0].bias = nn.Parameter(net[0].bias.data * 0.5 + torch.randn(3))
            net[2].weight = nn.Parameter(net[0].weight.data[0].clone())
        net.product = nn.Parameter(net[0].weight.data @ net[0].weight.data)
        return net

    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    model, recipe = deferred(build)
    assert differences(recipe.materialize(model), expected) == []


def test_array_of_recorded_numbers_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"), shardwise.deferred_init():
        torch.ones(3).numpy()[0] = 2


def test_array_and_its_tensor_stay_one() -> None:
    array = np.zeros(3)
    with shardwise.deferred_init():
        torch.from_numpy(array).add_(1)
        torch.as_tensor(array).mul_(2)
        assert array.tolist() == [2.0, 2.0, 2.0]
        assert torch.tensor(array).is_cpu
        array += 1
        assert torch.from_numpy(array).sum().item() == 9.0


def test_outside_tensor_that_changes_is_noticed() -> None:
    outside = torch.ones(3)
    with shardwise.deferred_init() as recipe:
        model = nn.Linear(3, 3)
        model.bias.data.copy_(outside)
    outside.add_(1)
    with pytest.raises(ConfigError, match="changed afterwards"):
        recipe.materialize(model)


def test_nested_contexts_are_refused() -> None:
    state = torch.get_rng_state()

    def nested() -> None:
        with shardwise.deferred_init():
            nn.Linear(2, 2)
            with shardwise.deferred_init():
                nn.Linear(2, 2)

    with pytest.raises((StateError, ConfigError)):
        nested()
    assert torch.equal(torch.get_rng_state(), state)


def test_recording_in_two_threads_is_refused() -> None:
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with shardwise.deferred_init():
                nn.Linear(2, 2)
        except BaseException as error:
            errors.append(error)

    with shardwise.deferred_init():
        nn.Linear(2, 2)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert isinstance(errors[0], StateError)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "init": (lambda model: nn.init.ones_(model.weight), "parameter weight was changed after"),
    "load": (lambda model: model.load_state_dict(nn.Linear(3, 3).state_dict()), "changed after"),
    "convert": (lambda model: model.half(), "did not make it"),
    "new": (lambda model: setattr(model, "weight", nn.Parameter(torch.empty(3, 3, device="meta"))), "did not make"),
}


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_context_are_noticed(change: str) -> None:
    model, recipe = deferred(lambda: nn.Linear(3, 3))
    act, message = CHANGES[change]
    act(model)
    with pytest.raises(ConfigError, match=message):
        shardwise.shard(model, initial_values=recipe)


@pytest.mark.parametrize("how", ["shard", "materialize"])
def test_buffer_that_is_edited_after_the_context_is_noticed(how: str) -> None:
    model, recipe = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model[1].running_mean.fill_(7.0)
    with pytest.raises(ConfigError, match=r"buffer 1\.running_mean was changed after"):
        _use(recipe, model, how)


def _use(recipe: Recipe, model: nn.Module, how: str) -> None:
    if how == "shard":
        shardwise.shard(model, initial_values=recipe)
    else:
        recipe.materialize(model)


def _traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3))


USELESS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "script": (lambda: torch.jit.script(nn.Linear(3, 3)), "compiled by torch.jit|cannot leave"),
    "trace": (_traced, "compiled by torch.jit|cannot leave"),
    "script inside": (
        lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))),
        "1 was compiled by|1.weight is.*cannot leave",
    ),
    "lazy": (lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4)), "no shape yet"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("how", ["shard", "materialize"])
@pytest.mark.parametrize("what", USELESS)
def test_model_that_cannot_be_filled_is_refused_by_name(what: str, how: str) -> None:
    build, message = USELESS[what]
    with pytest.raises(ConfigError, match=message):
        _use(*reversed(deferred(build)), how)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["shard", "materialize"])
def test_recipe_of_another_model_is_refused_for_a_plain_one(how: str) -> None:
    _, recipe = deferred(lambda: nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="made nothing of this model, which has values"):
        _use(recipe, nn.Linear(3, 3), how)


def test_second_materialize_is_refused() -> None:
    model, recipe = deferred(lambda: nn.Linear(3, 3))
    recipe.materialize(model)
    with pytest.raises(ConfigError, match="which has values"):
        recipe.materialize(model)


@pytest.mark.parametrize("filled_in_between", [False, True])
def test_second_context_begins_where_the_generator_stands(filled_in_between: bool) -> None:
    """As documented: at the same state as the first one, unless the first model was filled in between."""
    torch.manual_seed(0)
    expected = [nn.Linear(3, 3), nn.Linear(3, 3)]
    torch.manual_seed(0)
    first, recipe = deferred(lambda: nn.Linear(3, 3))
    if filled_in_between:
        recipe.materialize(first)
    second, other = deferred(lambda: nn.Linear(3, 3))
    other.materialize(second)
    assert torch.equal(second.weight, expected[filled_in_between].weight)


def test_one_context_serves_two_models() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 3), nn.Linear(3, 3)
    torch.manual_seed(0)
    with shardwise.deferred_init() as recipe:
        models = nn.Linear(3, 3), nn.Linear(3, 3)
    for model, plain in zip(models, expected, strict=True):
        assert differences(recipe.materialize(model), plain) == []


# What another thread draws, the recording does not see


def _in_thread(act: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("last", [False, True])
def test_layer_of_another_thread_is_refused(last: bool) -> None:
    state = torch.get_rng_state()

    def build() -> nn.Module:
        layers = [nn.Linear(3, 3), _in_thread(lambda: nn.Linear(3, 3))]
        if not last:
            layers.append(nn.Linear(3, 3))
        return nn.Sequential(*layers)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="another thread"):
        deferred(build)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("how", ["shard", "materialize"])
@pytest.mark.parametrize("main_draws_first", [False, True])
@pytest.mark.parametrize("size", [3, 100])  # 100 x 100 numbers replace the words of the generator
def test_layer_of_another_thread_is_refused_wherever_it_is_drawn(how: str, main_draws_first: bool, size: int) -> None:
    def build() -> nn.Module:
        first = nn.Linear(3, 3) if main_draws_first else nn.LayerNorm(3)
        return nn.Sequential(first, _in_thread(lambda: nn.Linear(size, size)))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="another thread"):
        _use(*reversed(deferred(build)), how)  # type: ignore[arg-type]


def test_models_of_other_threads_do_not_matter() -> None:
    with shardwise.deferred_init() as recipe:
        _in_thread(lambda: nn.LayerNorm(3))
        model = nn.Linear(3, 3)
    recipe.materialize(model)
    assert not model.weight.is_meta


def test_deep_copy_after_the_context_is_noticed() -> None:
    model, recipe = deferred(lambda: nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="did not make it"):
        shardwise.shard(copy.deepcopy(model), initial_values=recipe)


def test_recipe_of_a_running_context_is_refused() -> None:
    with shardwise.deferred_init() as recipe:
        model = nn.Linear(3, 3)
        with pytest.raises(StateError, match="leave the deferred_init"):
            recipe.materialize(model)


def test_parameter_that_a_graph_holds_is_refused() -> None:
    model, recipe = deferred(lambda: nn.Linear(3, 3))
    model.view = model.weight.view(-1)
    with pytest.raises(ConfigError, match="weight is on the meta device and cannot leave it"):
        shardwise.shard(model, initial_values=recipe)
    del model.view
    shardwise.shard(model, initial_values=recipe)
