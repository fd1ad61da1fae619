"""Initial values from weights: mappings, safetensors files and folders, read by every rank or by rank 0 alone."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, Precision, RankMismatchError, Recipe
from shardwise.comm.base import Mesh
from shardwise.testing.ranks import flat_rank, run_processes, run_ranks

SOURCES = ("mapping", "file", "folder", "index")
MODELS = ("meta", "ordinary", "recipe")


@pytest.fixture(autouse=True)
def _same_generator_afterwards() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


class Net(nn.Module):
    """Tied weights, a persistent buffer, and, if asked for, one that no file holds."""

    def __init__(self, *, unsaved: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(3))
        if unsaved:
            self.register_buffer("mask", torch.rand(4), persistent=False)


def weights(**options: object) -> dict[str, Tensor]:
    torch.manual_seed(11)
    state = {name: value.clone() for name, value in Net(**options).state_dict().items()}  # type: ignore[arg-type]
    state["head.weight"] = state["embedding.weight"]
    return state


def one_name_each(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "head.weight"}


def source(kind: str, folder: Path, state: Mapping[str, Tensor]) -> object:
    if kind == "mapping":
        return state
    plain = one_name_each(state)
    if kind in ("file", "folder"):
        save_file(plain, folder / "model.safetensors")
        return folder / "model.safetensors" if kind == "file" else str(folder)
    halves = {"a.safetensors": dict(list(plain.items())[:3]), "b.safetensors": dict(list(plain.items())[3:])}
    for name, part in halves.items():
        save_file(part, folder / name)
    places = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def build(kind: str, given: object, **options: object) -> tuple[nn.Module, object]:
    """Return a model and what to pass as its initial values."""
    rank0_only = bool(options.pop("rank0_only", False))
    if kind == "recipe":
        torch.manual_seed(1)
        with shardwise.deferred_init() as recipe:
            model = Net(**options)  # type: ignore[arg-type]
        return model, recipe.with_weights(given, rank0_only=rank0_only)  # type: ignore[arg-type]
    with torch.device(kind if kind == "meta" else "cpu"):
        model = Net(**options)  # type: ignore[arg-type]
    return model, shardwise.from_weights(given, rank0_only=rank0_only)  # type: ignore[arg-type]


def assert_holds(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    found = shardwise.full_state_dict(model)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("start", MODELS)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_model_holds_the_weights(kind: str, start: str, rank0_only: bool, tmp_path: Path) -> None:
    state = weights()
    given = source(kind, tmp_path, state)
    made = [build(start, given if rank == 0 or not rank0_only else "nowhere", rank0_only=rank0_only) for rank in (0, 1)]

    def body(mesh: Mesh) -> None:
        model, values = made[flat_rank(mesh)]
        weight = model.head.weight
        shardwise.shard(model, mesh, initial_values=values)  # type: ignore[arg-type]
        assert model.head.weight is weight is model.embedding.weight
        assert_holds(model, state)

    run_ranks(2, body)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_model_holds_the_weights_at_each_stage(stage: int, num_ranks: int, rank0_only: bool) -> None:
    state = weights()
    made = [build("meta", state, rank0_only=rank0_only) for _ in range(num_ranks)]

    def body(mesh: Mesh) -> None:
        model, values = made[flat_rank(mesh)]
        assert_holds(shardwise.shard(model, mesh, stage=stage, initial_values=values), state)  # type: ignore[arg-type]

    run_ranks(num_ranks, body)


def test_rank_0_of_a_mesh_of_two_axes_reaches_all() -> None:
    state = weights()
    made = [build("meta", state if rank == 0 else {}, rank0_only=True) for rank in range(4)]

    def body(mesh: Mesh) -> None:
        model, values = made[flat_rank(mesh)]
        assert_holds(shardwise.shard(model, mesh, initial_values=values), state)  # type: ignore[arg-type]

    run_ranks({"node": 2, "local": 2}, body)


def test_values_are_rounded_to_the_model_and_masters_keep_them() -> None:
    state = weights()
    low, values = build("meta", state, dtype=torch.bfloat16)
    shardwise.shard(low, initial_values=values)  # type: ignore[arg-type]
    rounded = {name: value.to(torch.bfloat16) if name != "scale" else value for name, value in state.items()}
    assert_holds(low, rounded)
    wide, values = build("meta", state)
    shardwise.shard(wide, precision=Precision(param=torch.bfloat16), initial_values=values)  # type: ignore[arg-type]
    masters = shardwise.full_parameters(wide)
    assert all(torch.equal(masters[name], state[name]) for name in masters)


def test_recipe_gives_what_the_weights_lack() -> None:
    torch.manual_seed(1)
    expected = Net(unsaved=True).mask
    model, values = build("recipe", weights(), unsaved=True)
    shardwise.shard(model, initial_values=values)  # type: ignore[arg-type]
    assert torch.equal(model.mask, expected)
    assert_holds(model, weights())


def test_buffer_that_no_file_holds_needs_a_recipe() -> None:
    model, values = build("meta", weights(), unsaved=True)
    with pytest.raises(ConfigError, match=r"mask on the meta device.*with_weights"):
        shardwise.shard(model, initial_values=values)  # type: ignore[arg-type]


def test_buffers_of_an_ordinary_model_stay_the_same_objects() -> None:
    model, values = build("ordinary", weights(), unsaved=True)
    scale, mask = model.scale, model.mask.clone()
    shardwise.shard(model, initial_values=values)  # type: ignore[arg-type]
    assert model.scale is scale
    assert torch.equal(scale, weights()["scale"])
    assert torch.equal(model.mask, mask)


def changed(**changes: Tensor | None) -> Callable[[], dict[str, Tensor]]:
    def make() -> dict[str, Tensor]:
        state = {**one_name_each(weights()), **{key.replace("__", "."): value for key, value in changes.items()}}
        return {name: value for name, value in state.items() if value is not None}

    return make


class _Unreadable(dict[str, Tensor]):
    """Whose medium is gone."""

    def items(self) -> object:  # type: ignore[override]
        raise RuntimeError("disk gone")

    def __repr__(self) -> str:
        raise RuntimeError("its values cannot be shown")


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "missing parameter": (changed(blocks__1__bias=None), r"missing: blocks\.1\.bias"),
    "missing buffer": (changed(scale=None), "missing: scale"),
    "missing tied": (changed(embedding__weight=None), r"missing: embedding\.weight"),
    "unknown": (changed(block__1__bias=torch.ones(5)), r"not in the model: block\.1\.bias"),
    "shape": (changed(blocks__0__bias=torch.ones(6)), r"another shape: blocks\.0\.bias \(6,\) for \(5,\)"),
    "kind": (changed(scale=torch.ones(3, dtype=torch.int64)), "whole numbers in one.*: scale"),
    "untied": (changed(head__weight=torch.ones(7, 5)), r"different values: embedding\.weight and head\.weight"),
    "all at once": (
        changed(scale=None, x=torch.ones(1), blocks__0__bias=torch.ones(6)),
        "missing: scale; not in the model: x; of another shape",
    ),
    "not a tensor": (lambda: {"scale": 3}, "holds a int under 'scale'"),
    "meta tensor": (lambda: {"scale": torch.ones(3, device="meta")}, "expected a tensor with values"),
    "no file": (lambda: "nowhere.safetensors", "nowhere"),
    "sparse": (lambda: {"scale": torch.ones(3).to_sparse()}, "a torch.sparse_coo tensor under 'scale'.*to_dense"),
    "mapping that fails": (lambda: _Unreadable(weights()), r"from_weights\(_Unreadable\): RuntimeError.*disk gone"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("start", MODELS)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_what_does_not_fit_is_one_error_on_all_ranks(what: str, start: str, rank0_only: bool) -> None:
    make, message = WRONG[what]
    made = [build(start, make(), rank0_only=rank0_only) for _ in range(2)]

    def body(mesh: Mesh) -> str:
        model, values = made[flat_rank(mesh)]
        before = [(param.is_meta, param.shape) for param in model.parameters()]
        with pytest.raises(ConfigError, match=message) as caught:
            shardwise.shard(model, mesh, initial_values=values)  # type: ignore[arg-type]
        assert [(param.is_meta, param.shape) for param in model.parameters()] == before
        assert all(type(param) is nn.Parameter for param in model.parameters())
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second


def test_unlike_files_of_ranks_are_found_out() -> None:
    other = {**one_name_each(weights()), "blocks.0.bias": torch.ones(5)}
    made = [build("meta", one_name_each(weights())), build("meta", other)]

    def body(mesh: Mesh) -> None:
        model, values = made[flat_rank(mesh)]
        with pytest.raises(RankMismatchError, match=r"first blocks\.0\.bias"):
            shardwise.shard(model, mesh, initial_values=values)  # type: ignore[arg-type]

    run_ranks(2, body)


def _index(folder: Path, text: str) -> Path:
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty folder": (lambda folder: folder, "neither model.safetensors nor"),
    "no JSON": (lambda folder: _index(folder, "{"), "JSONDecodeError"),
    "deeper than Python": (lambda folder: _index(folder, "[" * 100_000), "RecursionError"),
    "no map": (lambda folder: _index(folder, "[]"), "no weight_map"),
    "outside": (lambda folder: _index(folder, '{"weight_map": {"a": "../x.safetensors"}}'), "not in the folder"),
    "absolute": (lambda folder: _index(folder, '{"weight_map": {"a": "/x.safetensors"}}'), "not in the folder"),
    "no such file": (lambda folder: _index(folder, '{"weight_map": {"a": "x.safetensors"}}'), "x.safetensors"),
    "not safetensors": (lambda folder: _write(folder / "model.safetensors", b"rubbish rubbish"), "SafetensorError"),
    "index of other names": (lambda folder: _other_names(folder), "differ in a, b"),
    "a tensor in two files": (lambda folder: _misplaced(folder, first="ab", second="b"), "differ in b of 'x.saf"),
    "tensors in the other's file": (lambda folder: _misplaced(folder, first="b", second="a"), "differ in a, b of"),
}


def _write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def _other_names(folder: Path) -> Path:
    save_file({"a": torch.ones(1)}, folder / "x.safetensors")
    return _index(folder, '{"weight_map": {"b": "x.safetensors"}}')


def _misplaced(folder: Path, *, first: str, second: str) -> Path:
    save_file({name: torch.zeros(1) for name in first}, folder / "x.safetensors")
    save_file({name: torch.ones(1) for name in second}, folder / "y.safetensors")
    return _index(folder, '{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}')


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused(what: str, tmp_path: Path) -> None:
    make, message = BROKEN[what]
    model, values = build("meta", make(tmp_path))
    with pytest.raises(ConfigError, match=message):
        shardwise.shard(model, initial_values=values)  # type: ignore[arg-type]


def test_source_of_a_wrong_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mapping or a path, got int"):
        shardwise.from_weights(3)  # type: ignore[arg-type]


def test_nothing_is_drawn_for_what_the_weights_hold() -> None:
    state = weights()
    before = torch.get_rng_state()
    with shardwise.deferred_init() as recipe:
        model = Net()
    assert isinstance(recipe, Recipe)
    shardwise.shard(model, initial_values=recipe.with_weights(state))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_tensor_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry that is read next finds the one before already gone."""
    import weakref

    from shardwise.initial import weights as module

    alive: list[weakref.ref[Tensor]] = []
    most = 0
    real = module._held

    def held(name: object, tensor: Tensor) -> object:
        entry = real(name, tensor)

        def read() -> Tensor:
            nonlocal most
            value = tensor.clone()
            alive.append(weakref.ref(value))
            most = max(most, sum(ref() is not None for ref in alive))
            return value

        return module._Entry(shape=entry.shape, floating=entry.floating, read=read)

    monkeypatch.setattr(module, "_held", held)
    model, values = build("meta", one_name_each(weights()))
    shardwise.shard(model, initial_values=values)  # type: ignore[arg-type]
    assert len(alive) == len(one_name_each(weights()))
    assert most == 1


def _process(mesh: Mesh) -> dict[str, Tensor]:
    """Weights that only rank 0 has, over a recipe that draws the rest; see below."""
    state = weights() if flat_rank(mesh) == 0 else {}
    model, values = build("recipe", state, unsaved=True, rank0_only=True)
    shardwise.shard(model, mesh, initial_values=values)  # type: ignore[arg-type]
    return {**shardwise.full_state_dict(model), "mask": model.mask}


@pytest.mark.matrix
def test_processes_hold_the_weights_of_rank_0() -> None:
    expected = weights()
    torch.manual_seed(1)
    expected["mask"] = Net(unsaved=True).mask
    for found in run_processes(2, _process):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
