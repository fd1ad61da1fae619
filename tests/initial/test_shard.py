"""Models without memory, sharded: shards and masters hold what sharding the ordinary model gives, at every stage."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, Precision, RankMismatchError, Recipe
from shardwise.comm.base import Mesh
from shardwise.testing.models import make_odd_net
from shardwise.testing.ranks import flat_rank, run_ranks

from .zoo import CONSTRUCTORS

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

# Parameters whose dtype no bucket can train, or that are no leaves; the values are tested in test_values.py.
TRAINABLE = [name for name in CONSTRUCTORS if name not in ("copies", "numbers_from_outside")]
FEW = ("gpt_tied_with_generator", "lstm", "several_dtypes", "one_storage_for_several")

State = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _same_generator_afterwards() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def deferred(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Recipe]:
    torch.manual_seed(seed)
    with shardwise.deferred_init() as recipe:
        model = build()
    return model, recipe


def ordinary(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def state_of(model: nn.Module) -> State:
    """Masters, parameters and buffers whole, and this rank's shards."""
    return shardwise.full_parameters(model), shardwise.full_state_dict(model), shardwise.local_parameters(model)


def assert_equal_states(found: list[State], expected: list[State]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for own, other in zip(ours, theirs, strict=True):
            assert own.keys() == other.keys()
            for name, value in other.items():
                assert torch.equal(own[name], value), name
                assert own[name].dtype == value.dtype, name


def shard_all(
    models: list[nn.Module], num_ranks: int, values: list[object], **options: object
) -> tuple[list[State], list[nn.Module]]:
    def body(mesh: Mesh) -> State:
        rank = flat_rank(mesh)
        shardwise.shard(models[rank], mesh, initial_values=values[rank], **options)  # type: ignore[arg-type]
        return state_of(models[rank])

    return run_ranks(num_ranks, body), models


def compare(build: Callable[[], nn.Module], num_ranks: int, **options: object) -> list[nn.Module]:
    """Shard the ordinary and the deferred model; return the deferred ones."""
    plain = [ordinary(build) for _ in range(num_ranks)]
    pairs = [deferred(build) for _ in range(num_ranks)]
    expected, _ = shard_all(plain, num_ranks, ["verify"] * num_ranks, **options)
    found, models = shard_all([m for m, _ in pairs], num_ranks, [r for _, r in pairs], **options)
    assert_equal_states(found, expected)
    return models


@pytest.mark.parametrize("name", TRAINABLE)
def test_shards_equal_those_of_the_ordinary_model(name: str) -> None:
    compare(CONSTRUCTORS[name], 2)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", TRAINABLE)
def test_shards_equal_those_of_the_ordinary_model_everywhere(name: str, num_ranks: int, stage: int) -> None:
    compare(CONSTRUCTORS[name], num_ranks, stage=stage)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FEW)
def test_shards_equal_at_each_stage(name: str, num_ranks: int, stage: int) -> None:
    compare(CONSTRUCTORS[name], num_ranks, stage=stage)


@pytest.mark.parametrize("stage", range(4))
def test_masters_keep_the_precision_of_the_constructor(stage: int) -> None:
    models = compare(CONSTRUCTORS["gpt"], 2, stage=stage, precision=Precision(param=torch.bfloat16))
    assert all(param.dtype == torch.bfloat16 for param in models[0].parameters())


@pytest.mark.parametrize("stage", range(4))
def test_deferred_model_trains_as_the_ordinary_one(stage: int) -> None:
    def train(build: Callable[[], nn.Module], mesh: Mesh, values: object) -> list[Tensor]:
        model = shardwise.shard(build(), mesh, stage=stage, initial_values=values)  # type: ignore[arg-type]
        optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
        losses = []
        for step in range(3):
            tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(step))
            loss = model(tokens).logsumexp(-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *shardwise.full_parameters(model).values()]

    build = CONSTRUCTORS["gpt"]
    plain = [ordinary(build) for _ in range(2)]
    pairs = [deferred(build) for _ in range(2)]
    expected = run_ranks(2, lambda mesh: train(lambda: plain[flat_rank(mesh)], mesh, "verify"))
    found = run_ranks(2, lambda mesh: train(lambda: pairs[flat_rank(mesh)][0], mesh, pairs[flat_rank(mesh)][1]))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_optimizer_built_before_sharding_updates_the_model() -> None:
    model, recipe = deferred(CONSTRUCTORS["gpt"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.shard(model, initial_values=recipe)
    sharded = shardwise.shard_optimizer(optimizer, model)
    before = {name: value.clone() for name, value in shardwise.full_parameters(model).items()}
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    sharded.step()
    assert any(not torch.equal(before[name], value) for name, value in shardwise.full_parameters(model).items())


def test_engine_takes_a_recipe() -> None:
    def run(model: nn.Module, values: object) -> dict[str, Tensor]:
        config = {"batch": {"size": 2}, "optimizer": {"name": "sgd", "lr": 0.1}}
        engine, *_ = shardwise.initialize(model=model, config=config, initial_values=values)  # type: ignore[arg-type]
        engine.backward(engine(torch.zeros(2, 4, dtype=torch.int64)).logsumexp(-1).mean())
        engine.step()
        found = shardwise.full_parameters(engine.module)
        engine.destroy()
        return found

    expected = run(ordinary(CONSTRUCTORS["gpt"]), "verify")
    found = run(*deferred(CONSTRUCTORS["gpt"]))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_generator_stands_where_ordinary_construction_leaves_it() -> None:
    ordinary(CONSTRUCTORS["convolutions_as_in_a_resnet"])
    after = torch.get_rng_state()
    model, recipe = deferred(CONSTRUCTORS["convolutions_as_in_a_resnet"])
    shardwise.shard(model, initial_values=recipe)
    assert torch.equal(torch.get_rng_state(), after)


def test_odd_net_with_all_oddities_equals_the_ordinary_one() -> None:
    def build() -> nn.Module:
        return make_odd_net("uneven", "tied", "frozen", "mixed", "unused", "reused")

    compare(build, 3)


def test_ranks_with_unlike_seeds_of_several_generators_take_those_of_rank_0() -> None:
    def build(seed: int) -> nn.Module:
        model = nn.Linear(4, 4)
        for number, param in enumerate(model.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(10 * seed + number))
        return model

    pairs = [deferred(lambda seed=seed: build(seed)) for seed in (3, 4)]  # type: ignore[misc]
    with pytest.warns(UserWarning, match="different random states; rank 0's are used"):
        found, _ = shard_all([model for model, _ in pairs], 2, [recipe for _, recipe in pairs])
    expected, _ = shard_all([build(3), build(3)], 2, ["verify"] * 2)
    assert_equal_states(found, expected)


@pytest.mark.parametrize("seeds", [(3, 4), (4, 3)])
def test_ranks_with_unlike_seeds_take_those_of_rank_0(seeds: tuple[int, int]) -> None:
    build = CONSTRUCTORS["convolutions_as_in_a_resnet"]
    expected, _ = shard_all([ordinary(build, seeds[0]) for _ in seeds], 2, ["verify"] * 2)
    pairs = [deferred(build, seed) for seed in seeds]
    with pytest.warns(UserWarning, match="different random states; rank 0's are used"):
        found, _ = shard_all([m for m, _ in pairs], 2, [r for _, r in pairs])
    assert_equal_states(found, expected)


def test_ranks_with_unlike_constructors_are_refused() -> None:
    pairs = [deferred(lambda scale=scale: _scaled(scale)) for scale in (1.0, 2.0)]

    def body(mesh: Mesh) -> None:
        model, recipe = pairs[flat_rank(mesh)]
        with pytest.raises(RankMismatchError, match=r"recorded construction.*mul"):
            shardwise.shard(model, mesh, initial_values=recipe)
        assert all(param.is_meta for param in model.parameters())

    run_ranks(2, body)


def _scaled(scale: float) -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight.data.mul_(scale)
    return net


def test_problem_of_one_rank_is_raised_on_all() -> None:
    pairs = [deferred(lambda: nn.Linear(2, 2)) for _ in range(2)]
    pairs[1][0].register_buffer("late", torch.empty(2, device="meta"))

    def body(mesh: Mesh) -> None:
        with pytest.raises(ConfigError, match="rank 1: late is on the meta device"):
            shardwise.shard(pairs[flat_rank(mesh)][0], mesh, initial_values=pairs[flat_rank(mesh)][1])

    run_ranks(2, body)


def test_unlike_values_of_ranks_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on unlike processors: the same operations from the same states give other bits."""
    from shardwise.initial.recipe import Recipe as Kind

    pairs = [deferred(lambda: nn.Linear(2, 2)) for _ in range(2)]
    real = Kind._values

    def wrong(self: Recipe, *args: object) -> object:
        for p, value in real(self, *args):  # type: ignore[arg-type]
            yield p, value + (1e-7 if self is pairs[1][1] and p.name == "bias" else 0)

    monkeypatch.setattr(Kind, "_values", wrong)

    def body(mesh: Mesh) -> None:
        with pytest.raises(RankMismatchError, match="different initial values of 1 parameters, first bias"):
            shardwise.shard(pairs[flat_rank(mesh)][0], mesh, initial_values=pairs[flat_rank(mesh)][1])
        assert pairs[flat_rank(mesh)][0].weight.shape == (0,)  # not freed memory that can be read

    run_ranks(2, body)


def test_recipe_of_another_model_is_refused() -> None:
    _, recipe = deferred(lambda: nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="made nothing of this model"):
        shardwise.shard(nn.Linear(2, 2), initial_values=recipe)


def test_meta_model_without_a_source_is_refused_with_advice() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"deferred_init\(\).*initial_values=recipe.*from_weights"):
        shardwise.shard(model)


@pytest.mark.parametrize("values", ["nonsense", None, 3, {}])
def test_wrong_initial_values_are_refused(values: object) -> None:
    with pytest.raises(ConfigError, match="initial_values must be"):
        shardwise.shard(nn.Linear(2, 2), initial_values=values)  # type: ignore[arg-type]


def test_plan_of_a_deferred_model_is_that_of_the_ordinary_one() -> None:
    model, _ = deferred(CONSTRUCTORS["gpt"])
    assert shardwise.plan(model, 4).bytes_per_rank == shardwise.plan(ordinary(CONSTRUCTORS["gpt"]), 4).bytes_per_rank


@pytest.mark.parametrize("stage", range(4))
def test_masters_and_shards_take_what_the_plan_says(stage: int) -> None:
    model, recipe = deferred(CONSTRUCTORS["bfloat16"])
    planned = shardwise.plan(model, 1, stage=stage).bytes_per_rank
    shardwise.shard(model, stage=stage, initial_values=recipe)
    measured = shardwise.measured_bytes(model)
    assert {kind: measured[kind] for kind in ("param", "master")} == {k: planned[k] for k in ("param", "master")}
