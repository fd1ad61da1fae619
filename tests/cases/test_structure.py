"""Odd models and odd orders give what one plain process gives, at every stage (C14-C27)."""

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import Precision, StateError
from shardwise.comm.base import Mesh
from shardwise.comm.recording import record
from shardwise.memory import Kind
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import (
    STAGES,
    Block,
    Net,
    Weight,
    Window,
    adamw,
    all_stages,
    assert_all_close,
    assert_all_equal,
    assert_at_rest,
    check_training,
    clone_all,
    data,
    defer,
    fill,
    is_sharded,
    ledger_of,
    make_net,
    net_loss,
    net_window,
    raises,
    sgd,
    shard,
    train_plain,
    train_sharded,
)
from .zoo import CASES, Case, Empty, Tiny, chain, checkpointed, make_adapters

nested_checkpoints_may_warn = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

UNITS: dict[str, Any] = {
    "auto": None,
    "leaves": lambda module: not list(module.children()),
    "everything": lambda module: not isinstance(module, nn.ModuleList | nn.ModuleDict),
    "root only": lambda module: False,
}


def twice(window: Window) -> Window:
    """Two micro-batches, each of them reduced."""

    def run(model: nn.Module, rank: int, step: int) -> None:
        window(model, rank, 2 * step)
        window(model, rank, 2 * step + 1)

    return run


def deferred(window: Window, **options: bool) -> Window:
    """Two micro-batches, the first under ``no_sync``."""

    def run(model: nn.Module, rank: int, step: int) -> None:
        with defer(model, **options):
            window(model, rank, 2 * step)
        window(model, rank, 2 * step + 1)

    return run


ACCUMULATION: dict[str, Callable[[Window], Window]] = {
    "once": lambda window: window,
    "twice": twice,
    "deferred": deferred,
    "summed over G": lambda window: deferred(window, reduce=True),
}
RANKS: tuple[Any, ...] = (1, 2, 3, 4, {"node": 2, "local": 2})
VARIANTS = list(
    itertools.product(UNITS, ACCUMULATION, RANKS, (None, 1e-3), ((sgd, False), (adamw, True)))
)  # units, accumulation, ranks, clip, (optimizer, keep the last unit)


def sample(cases: list[Case], per_case: int) -> list[Any]:
    """Pick, for every case, variants and a stage each; the same ones in every run."""
    picked = []
    for case in cases:
        for number in range(per_case):
            code = zlib.crc32(f"{case} {number}".encode())
            picked.append(
                pytest.param(case, STAGES[code % 4], VARIANTS[code // 4 % len(VARIANTS)], id=f"{case}-{number}")
            )
    return picked


def check_variant(case: Case, stage: int, variant: Any) -> None:
    units, accumulation, num_ranks, clip, (optimizer, keep) = variant
    options = {"units": UNITS[units], "keep_last_unit": keep, "force_collectives": True} | case.options
    check_training(
        case.make,
        ACCUMULATION[accumulation](case.window),
        stage=stage,
        num_ranks=num_ranks,
        clip=clip,
        optimizer=optimizer,
        tolerance=max(case.tolerance, 1e-10),  # Adam divides by roots of sums that were rounded differently
        **options,
    )


def large_ones_marked(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=[pytest.mark.matrix] if case.large else []) for case in cases]


@all_stages
@pytest.mark.parametrize("case", large_ones_marked(CASES))
@nested_checkpoints_may_warn
def test_training_matches_one_process(case: Case, stage: int) -> None:
    check_training(case.make, case.window, stage=stage, steps=case.steps, tolerance=case.tolerance, **case.options)


@pytest.mark.parametrize(("case", "stage", "variant"), sample([case for case in CASES if not case.large][::2], 1))
@nested_checkpoints_may_warn
def test_training_matches_one_process_in_a_sampled_variant(case: Case, stage: int, variant: Any) -> None:
    check_variant(case, stage, variant)


@pytest.mark.matrix
@all_stages
@pytest.mark.parametrize("case", CASES, ids=str)
@nested_checkpoints_may_warn
def test_training_matches_one_process_in_many_variants(case: Case, stage: int) -> None:
    for variant in VARIANTS[zlib.crc32(f"{case} {stage}".encode()) % 40 :: 40]:
        check_variant(case, stage, variant)


NATIVE = ("mixed dtypes", "adapters", "submodule", "attention", "checkpoint", "deferred", "input gradient")


def in_dtype(case: Case, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """The model of a case whose inputs are cast to the dtype of its parameters."""

    def make() -> nn.Module:
        model = case.make()
        model.register_forward_pre_hook(
            lambda module, args: tuple(
                a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
            )
        )
        return model

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if number % 4 == 0 else [pytest.mark.matrix])
        for number, case in enumerate(case for case in CASES if not str(case).startswith(NATIVE))
    ],
)
def test_stages_agree_bit_by_bit_in_narrow_types(case: Case, dtype: torch.dtype) -> None:
    """The same sums in the same order at every stage; masters in fp32."""

    def run(stage: int) -> dict[str, Tensor]:
        options: dict[str, Any] = {"precision": Precision(param=dtype), "optimizer": adamw} | case.options
        ranks = run_ranks(
            2,
            lambda mesh: train_sharded(
                in_dtype(case, dtype), case.window, mesh, stage=stage, steps=case.steps, clip=1e-2, **options
            ),
        )
        assert_all_equal(ranks[1], ranks[0])
        return ranks[0]

    start = {name: param.detach().float() for name, param in case.make().named_parameters()}
    results = [run(stage) for stage in STAGES]
    assert any(not torch.equal(results[0][name], start[name]) for name in start), "vacuous: no parameter moves"
    for result in results[1:]:
        assert_all_equal(result, results[0])


# C14, C15: owning nothing


@all_stages
def test_ranks_that_own_nothing_train_and_hold_empty_state(stage: int) -> None:
    """C14: one element over four ranks."""

    def body(mesh: Mesh) -> tuple[float, int]:
        model = nn.Sequential(nn.ModuleDict({"deep": nn.Module()}))
        model[0]["deep"].gain = nn.Parameter(torch.ones(1))
        model.forward = lambda x: (model[0]["deep"].gain * x).sum()  # type: ignore[method-assign]
        model = shard(model, mesh, stage)
        optim = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5), model)
        for _ in range(2):
            model(1.0 + flat_rank(mesh)).backward()
            assert shardwise.full_gradients(model)["0.deep.gain"].item() == (1 + mesh["data"].size) / 2
            assert shardwise.clip_grad_norm_(model, 100.0).item() == (1 + mesh["data"].size) / 2
            optim.step()
            optim.zero_grad()
        optim.load_state_dict(optim.state_dict())
        assert shardwise.full_optimizer_state(model)["0.deep.gain"]["step"].item() == 2
        return shardwise.full_parameters(model)["0.deep.gain"].item(), shardwise.measured_bytes(model)["optim"]

    for num_ranks in (1, 4):
        ranks = run_ranks(num_ranks, body)
        assert ranks[0][0] < 0.1
        assert {value for value, _ in ranks} == {ranks[0][0]}
        assert [held for _, held in ranks] == ([8] * num_ranks if stage == 0 else [8] + [0] * (num_ranks - 1))


@all_stages
def test_empty_parameters_keep_their_shape_and_move_nothing(stage: int) -> None:
    """C15."""

    def body(mesh: Mesh) -> list[str]:
        recorded, log = record(mesh)
        model = shard(
            fill(nn.Sequential(Empty(), Block(), Empty(), Tiny())), recorded, stage, units=(Empty, Block, Tiny)
        )
        optim = shardwise.shard_optimizer(adamw(model), model)
        log.clear()
        model(data(2, 6, key=flat_rank(mesh))).sum().backward()
        optim.step()
        for tensors in (shardwise.full_parameters(model), shardwise.full_state_dict(model)):
            assert tensors["0.weight"].shape == tensors["3.nothing"].shape == (0, 6)
            assert tensors["3.gain"].shape == (1,)
            assert tensors["3.temperature"].shape == ()
        assert shardwise.full_gradients(model)["0.weight"].shape == (0, 6)
        assert [tuple(p.shape) for p in model[0].parameters()] == [(0, 6)]
        return [event.label for event in log]

    for labels in run_ranks(2, body):
        assert "1" in labels
        assert not {"0", "2"} & set(labels)


# C21, C22: checkpoints


@all_stages
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_checkpointed_uses_are_reduced_once_and_leave_nothing_gathered(stage: int, reentrant: bool, uses: int) -> None:
    """C21: not one reduction per inner backward."""

    def body(mesh: Mesh) -> list[list[str]]:
        recorded, log = record(mesh)
        model = shard(chain(Block, Block, call=checkpointed(reentrant, uses))(), recorded, stage)
        found = []
        for step in range(2):
            log.clear()
            net_loss(model, flat_rank(mesh), step).backward()
            assert ledger_of(model)[Kind.GATHERED] == 0
            assert ledger_of(model)[Kind.STAGING] == 0
            shardwise.full_gradients(model)
            found.append(sorted(event.label for event in log if event.operation == "reduce_scatter"))
        return found

    assert run_ranks(2, body) == [[["blocks.0", "blocks.1", "root"]] * 2] * 2


@all_stages
@pytest.mark.parametrize(
    ("way", "base"),
    [
        ("no checkpoint", torch.bfloat16),
        ("plain", torch.float64),
        ("plain", torch.float32),
        ("reentrant", torch.float64),
        ("reentrant", torch.bfloat16),
    ],
)
def test_frozen_base_gets_no_gradient_memory_and_keeps_its_bits(stage: int, way: str, base: torch.dtype) -> None:
    """C22: adapters match the reference; a reentrant checkpoint is given an input that needs a gradient."""
    make = make_adapters(None if way == "no checkpoint" else checkpointed(way == "reentrant"), base_dtype=base)

    def window(model: nn.Module, rank: int, step: int) -> None:
        x = data(3, 4, key=(rank, step)).requires_grad_(way == "reentrant")
        model(x).square().mean().backward()

    expected = train_plain(make, window, optimizer=adamw)

    def body(mesh: Mesh) -> None:
        model = shard(make(), mesh, stage)
        optim = shardwise.shard_optimizer(adamw(model), model)
        before = clone_all(shardwise.full_state_dict(model))
        for step in range(2):
            window(model, flat_rank(mesh), step)
            grads = shardwise.full_gradients(model)
            assert set(grads) == {name for name, p in model.named_parameters() if p.requires_grad}
            optim.step()
            optim.zero_grad()
        after = shardwise.full_state_dict(model)
        assert_all_close(after, expected, 1e-10)
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert frozen
        assert_all_equal({name: after[name] for name in frozen}, {name: before[name] for name in frozen})
        assert not any(torch.equal(after[name], before[name]) for name in after if name not in frozen)
        states = shardwise.full_optimizer_state(model)
        assert set(states) == set(after) - set(frozen)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        held = shardwise.measured_bytes(model)
        assert held["grad"] == 0, "no gradients after zero_grad"
        assert held["optim"] <= 2 * 8 * trainable
        plan = shardwise.plan(make(), 2, stage=stage, align=1)
        padded = 8 * (trainable + 3)  # at most one element for each of the three units
        assert plan.bytes_per_rank["grad"] <= (padded if stage < 2 else padded / 2)

    run_ranks(2, body)


# C24: layers that come and go


def attach(model: Any) -> str:
    model.late = nn.Linear(2, 2)
    return r"late\.weight"


def attach_deep(model: Any) -> str:
    model.blocks[1].inner.adapter = nn.Linear(6, 2)
    return r"blocks\.1\.inner\.adapter\.weight"


def append(model: Any) -> str:
    model.blocks.append(Block())
    return r"blocks\.3\.inner\.weight"


def register(model: Any) -> str:
    model.blocks[0].register_parameter("gain", nn.Parameter(torch.ones(1)))
    return r"blocks\.0\.gain"


def replace(model: Any) -> str:
    model.blocks[2].outer = nn.Linear(7, 6, dtype=torch.float64)
    return r"blocks\.2\.outer\.weight"


def replace_parameter(model: Any) -> str:
    model.head.weight = nn.Parameter(torch.zeros(2, 6, dtype=torch.float64))
    return r"head\.weight"


def tie(model: Any) -> str:
    model.blocks[0].inner.weight = model.blocks[1].inner.weight
    return r"blocks\.0\.inner"


def remove(model: Any) -> str:
    model.blocks[0].inner = nn.Identity()
    return r"blocks\.0"


def pop(model: Any) -> str:
    del model.blocks[1]
    return "blocks"


def delete(model: Any) -> str:
    del model.head.bias
    return "head"


def set_none(model: Any) -> str:
    model.head.bias = None
    return "head"


def reorder(model: Any) -> str:
    first, second = model.blocks[0], model.blocks[1]
    model.blocks[0], model.blocks[1] = second, first
    return "blocks"


CHANGES = [
    attach,
    attach_deep,
    append,
    register,
    replace,
    replace_parameter,
    tie,
    remove,
    pop,
    delete,
    set_none,
    reorder,
]


@all_stages
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_module_tree_is_an_error_at_the_next_forward(stage: int, change: Callable[[Any], str]) -> None:
    """C24: the unmanaged parameters are named; no layer trains alone, or not at all."""

    def body(mesh: Mesh) -> None:
        for trained in (False, True):
            model = shard(make_net(), mesh, stage, force_collectives=True)
            optim = shardwise.shard_optimizer(sgd(model), model)
            if trained:
                net_window(model, flat_rank(mesh), 0)
                optim.step()
                optim.zero_grad()
            words = change(model)
            for grad_enabled in (True, False):
                with torch.set_grad_enabled(grad_enabled), raises(StateError, match=words):
                    net_loss(model, flat_rank(mesh), 1)

    run_ranks(1, body)


@all_stages
def test_undoing_a_change_of_the_tree_makes_the_model_work_again(stage: int) -> None:
    def window(model: Any, rank: int, step: int) -> None:
        if is_sharded(model):
            model.late = nn.Linear(2, 2)
            with raises(StateError, match="late"):
                net_loss(model, rank, step)
            del model.late
        net_window(model, rank, step)

    check_training(make_net, window, stage=stage)


@all_stages
def test_buffers_and_plain_attributes_may_change(stage: int) -> None:
    """C24 sibling: only parameters and modules are managed."""

    def window(model: Any, rank: int, step: int) -> None:
        model.note = f"step {step}"
        model.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        model.mean = model.mean + 1
        net_window(model, rank, step)

    check_training(make_net, window, stage=stage)


# C25, C26: counts


@all_stages
@pytest.mark.parametrize("reverse", [False, True])
def test_two_forwards_then_two_backwards_count_twice(stage: int, reverse: bool) -> None:
    """C25: exact; the same with the last unit kept or freed, deferred or not."""

    def body(mesh: Mesh) -> None:
        for keep in (True, False):
            for context in (defer, lambda model: torch.enable_grad()):
                model = shard(nn.Sequential(Weight(3), Weight(70)), mesh, stage, keep_last_unit=keep)
                model.forward = lambda c, m=model: m[0](c) + m[1](c)  # type: ignore[method-assign]
                optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
                for _ in range(2):
                    with context(model):
                        losses = [model(constant * (1.0 + flat_rank(mesh))) for constant in (1.0, 10.0)]
                        for loss in reversed(losses) if reverse else losses:
                            loss.backward()
                    optim.step()
                    optim.zero_grad()
                assert {v for p in shardwise.full_parameters(model).values() for v in p.tolist()} == {-33.0}

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize(
    "zeroed", ["never", "model.zero_grad", "optimizer.zero_grad", "set_to_none=False", "grad=None"]
)
def test_second_backward_over_a_retained_graph_adds_unless_zeroed(stage: int, zeroed: str) -> None:
    """C26: integer gradients, 1 and 10."""

    def body(mesh: Mesh) -> set[float]:
        model = shard(nn.Sequential(Weight(3), Weight(70)), mesh, stage)
        model.forward = lambda c: model[0](c) + model[1](c)  # type: ignore[method-assign]
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        y = model(1.0 + flat_rank(mesh))
        y.backward(retain_graph=True)
        match zeroed:
            case "model.zero_grad":
                model.zero_grad()
            case "optimizer.zero_grad":
                optim.zero_grad()
            case "set_to_none=False":
                optim.zero_grad(set_to_none=False)
            case "grad=None":
                for param in model.parameters():
                    param.grad = None
        (10 * y).backward()
        optim.step()
        return {v for p in shardwise.full_parameters(model).values() for v in p.tolist()}

    assert run_ranks(2, body) == [{-16.5 if zeroed == "never" else -15.0}] * 2


# C27: freezing while training


def train_with_flags(model: Any, optim: Any, window: Callable[[Any, int], None]) -> dict[str, Any]:
    """Steps 0-1 train the head, then a no_grad pass, step 2 unfreezes a block, step 3 freezes it again, step 4 all."""
    states: dict[str, Any] = {}
    for step in range(6):
        if step == 2:
            with torch.no_grad():
                net_loss(model, 0, 99)
            model.blocks[2].requires_grad_(True)
        if step == 3:
            model.blocks[2].requires_grad_(False)
        if step == 4:
            model.requires_grad_(True)
        if step == 5:
            model.head.bias.requires_grad_(False)
            model.entry.requires_grad_(False)
        window(model, step)
        optim.step()
        optim.zero_grad()
        states[f"step {step}"] = clone_all(
            shardwise.full_parameters(model) if is_sharded(model) else dict(model.named_parameters())
        )
    return states


def make_trunk() -> nn.Module:
    net = fill(Net())
    net.entry.requires_grad_(False)
    net.blocks.requires_grad_(False)
    return net


@all_stages
@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
def test_freezing_and_unfreezing_while_training_matches_torch(
    stage: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """C27: through all phases, with the state of exactly the toggled block coming and staying."""

    def plain_window(model: Any, step: int) -> None:
        for rank in range(2):
            (net_loss(model, rank, step) / 2).backward()

    plain = make_trunk()
    expected = train_with_flags(plain, optimizer(plain), plain_window)
    assert not torch.equal(expected["step 2"]["blocks.2.inner.weight"], expected["step 1"]["blocks.2.inner.weight"])
    assert torch.equal(expected["step 3"]["blocks.2.inner.weight"], expected["step 2"]["blocks.2.inner.weight"])
    assert not torch.equal(expected["step 4"]["entry.weight"], expected["step 3"]["entry.weight"])

    def body(mesh: Mesh) -> dict[str, Any]:
        model = shard(make_trunk(), mesh, stage)
        optim = shardwise.shard_optimizer(optimizer(model), model)
        found = train_with_flags(model, optim, lambda m, step: net_loss(m, flat_rank(mesh), step).backward())
        assert_at_rest(model)
        return found

    for found in run_ranks(2, body):
        for step, params in expected.items():
            assert_all_close(found[step], params, 1e-10)


@all_stages
def test_unfreezing_what_no_group_holds_raises_and_a_new_group_helps(stage: int) -> None:
    """C27: it would never be trained; nothing happens silently."""

    def body(mesh: Mesh) -> None:
        model = shard(make_trunk(), mesh, stage)
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), model)
        net_window(model, flat_rank(mesh), 0)
        optim.step()
        optim.zero_grad()
        model.blocks[2].requires_grad_(True)
        with raises(shardwise.ConfigError, match=r"blocks\.2\.inner\.weight.*add_param_group"):
            net_loss(model, flat_rank(mesh), 1)
        before = shardwise.full_parameters(model)
        optim.add_param_group({"params": model.blocks[2].parameters()})
        net_window(model, flat_rank(mesh), 1)
        optim.step()
        after = shardwise.full_parameters(model)
        changed = {name.rpartition(".")[0] for name in after if not torch.equal(after[name], before[name])}
        assert changed == {"head", "blocks.2.inner", "blocks.2.outer"}

    run_ranks(2, body)
