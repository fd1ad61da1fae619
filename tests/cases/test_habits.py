"""What the code of a plain loop does to a model works as in torch, or raises and names what works. Never nothing."""

import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shardwise
from shardwise import ConfigError, LayoutError, Precision, StateError
from shardwise.comm.base import Mesh
from shardwise.testing.ranks import flat_rank, run_ranks

from .harness import (
    FP64_TOLERANCE,
    STAGES,
    Block,
    Net,
    Weight,
    adamw,
    all_stages,
    assert_all_close,
    assert_all_equal,
    check_training,
    clone_all,
    data,
    fill,
    is_sharded,
    make_net,
    net_loss,
    net_window,
    raises,
    sgd,
    shard,
)


def with_gradient(mesh: Mesh, stage: int, **options: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer after one backward."""
    model = shard(make_net(), mesh, stage, **options)
    optim = shardwise.shard_optimizer(sgd(model), model)
    net_window(model, flat_rank(mesh), 0)
    return model, optim


def half_of(names: Iterable[str]) -> list[Any]:
    """Every name at every stage; every name at two of them in the fast run."""
    return [
        pytest.param(name, stage, marks=[] if number % 2 == stage % 2 else [pytest.mark.matrix])
        for number, name in enumerate(names)
        for stage in STAGES
    ]


def refusal(call: Callable[[], Any]) -> str:
    """Return what our error says, "" if the call went through."""
    try:
        call()
    except (StateError, ConfigError) as error:
        return str(error)
    return ""


def assert_step_is_unharmed(model: Any, optim: Any) -> None:
    """The pending gradient is still the whole one, and the step applies it."""
    before, grads = shardwise.full_parameters(model), shardwise.full_gradients(model)
    assert set(grads) == set(before)
    optim.step()
    after = shardwise.full_parameters(model)
    for name, grad in grads.items():
        assert torch.allclose(after[name], before[name] - 0.1 * grad, rtol=1e-12, atol=1e-14), name


# Gradients in the plain places

GRADIENT_HABITS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_ foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "clip_grad_norm_ no foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clip_grad_norm_ inf": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, torch.inf),
    "clip_grad_norm_ one": lambda model: torch.nn.utils.clip_grad_norm_(model.head.weight, 1.0),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "clip_grad_value_ no foreach": lambda model: torch.nn.utils.clip_grad_value_(
        model.parameters(), 1.0, foreach=False
    ),
    "get_total_norm": lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "scale grad": lambda model: model.head.weight.grad.mul_(2.0),
    "scale grad in place": lambda model: model.head.weight.grad.__imul__(2.0),
    "set grad item": lambda model: model.head.weight.grad.__setitem__(0, 0.0),
    "read grad item": lambda model: model.head.weight.grad[0],
    "grad norm": lambda model: model.head.weight.grad.norm(),
    "grad float": lambda model: float(model.head.bias.grad.sum()),
    "grad is finite": lambda model: model.head.weight.grad.isfinite().all(),
    "grad clone": lambda model: model.head.weight.grad.clone(),
    "grad detach": lambda model: model.head.weight.grad.detach() * 1,
    "grad data": lambda model: model.head.weight.grad.data.mul_(2.0),
    "grad numpy": lambda model: model.head.weight.grad.numpy(),
    "grad list": lambda model: model.head.weight.grad.tolist(),
    "grad zero_": lambda model: model.head.weight.grad.zero_(),
    "grad arithmetic": lambda model: 2.0 * model.head.weight.grad,
    "grad with tensor": lambda model: torch.zeros(2, 6) + model.head.weight.grad,
    "grad stacked": lambda model: torch.stack([p.grad.norm() for p in model.parameters()]),
    "grad concatenated": lambda model: torch.cat([p.grad.flatten() for p in model.parameters()]),
    "grads foreach": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 2.0),
    "grad out": lambda model: torch.mul(torch.ones(2, 6), 2.0, out=model.head.weight.grad),
    "grad assigned": lambda model: setattr(model.head.weight, "grad", torch.zeros(2, 6, dtype=torch.float64)),
    "grad added": lambda model: setattr(model.head.weight, "grad", model.head.weight.grad + 1.0),
    "parameters_to_vector": lambda model: torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()]),
    "all_reduce by hand": lambda model: torch.distributed.all_reduce(model.head.weight.grad),
    "clip what the optimizer holds": lambda model: torch.nn.utils.clip_grad_norm_(
        [p for group in model._shardwise.optimizers[0].optimizer.param_groups for p in group["params"]], 1.0
    ),
    "copy into": lambda model: torch.zeros(2, 6, dtype=torch.float64).copy_(model.head.weight.grad),
}


@all_stages
def test_reading_or_editing_a_gradient_in_its_plain_place_raises(stage: int) -> None:
    """In a flat buffer there is no ``p.grad`` to use; each of these would do nothing, or work on a fake."""

    def body(mesh: Mesh) -> None:
        model, optim = with_gradient(mesh, stage)
        said = {habit: refusal(lambda use=use: use(model)) for habit, use in GRADIENT_HABITS.items()}  # type: ignore[misc]
        assert not [habit for habit, error in said.items() if "shardwise.clip_grad_norm_" not in error]
        assert_step_is_unharmed(model, optim)

    run_ranks(2, body)


@all_stages
def test_metadata_of_a_pending_gradient_passes(stage: int) -> None:
    """Counting, comparing with None and looking at shapes need no data."""

    def body(mesh: Mesh) -> None:
        model, optim = with_gradient(mesh, stage)
        for param in model.parameters():
            assert param.grad is not None
            assert param.grad.shape == param.shape
            assert param.grad.dtype == param.dtype
            assert param.grad.numel() == param.numel()
            assert "PendingGradient" in repr(param.grad)
        assert_step_is_unharmed(model, optim)
        optim.zero_grad()
        assert all(param.grad is None for param in model.parameters())

    run_ranks(2, body)


PLAIN = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)
KERNELS: tuple[dict[str, bool], ...] = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})


@all_stages
@pytest.mark.parametrize("built", ["before", "after"])
def test_step_of_an_optimizer_that_was_not_sharded_raises(stage: int, built: str) -> None:
    """C30a: it sees pending gradients, whatever kernel it uses; a sharded optimizer still works afterwards."""

    def forgotten(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            kind(model.parameters(), lr=0.1, **kernel)
            for kind in PLAIN
            for kernel in KERNELS
            if not (kind is torch.optim.RMSprop and "fused" in kernel)
        ]

    def body(mesh: Mesh) -> None:
        model = make_net()
        if built == "before":
            optims = forgotten(model)
        model = shard(model, mesh, stage)
        if built == "after":
            optims = forgotten(model)
        net_window(model, flat_rank(mesh), 0)
        before = shardwise.full_parameters(model)
        for optim in optims:
            with raises(StateError, match="shard_optimizer"):
                optim.step()
        assert_all_equal(shardwise.full_parameters(model), before)
        assert_step_is_unharmed(model, shardwise.shard_optimizer(sgd(model), model))

    run_ranks(2, body)


def zero_with(model: Any, optim: Any, way: str) -> None:
    match way:
        case "optim":
            optim.zero_grad()
        case "optim keep":
            optim.zero_grad(set_to_none=False)
        case "model":
            model.zero_grad()
        case "model keep":
            model.zero_grad(set_to_none=False)
        case "each":
            for param in model.parameters():
                param.grad = None
        case "delete":
            for param in model.parameters():
                del param.grad


@all_stages
@pytest.mark.parametrize("way", ["optim", "optim keep", "model", "model keep", "each", "delete"])
def test_every_way_to_zero_gradients_does_what_it_does_in_torch(stage: int, way: str) -> None:
    """Kept zeros still take part in a step (decay, momentum); removed gradients do not. Or it raises."""

    def run(model: Any, optim: Any, window: Callable[[Any, int], None]) -> None:
        window(model, 0)
        zero_with(model, optim, way)
        window(model, 1)
        optim.step()
        zero_with(model, optim, way)
        optim.step()  # after the gradients are gone, or zero
        window(model, 2)
        zero_with(model, optim, way)
        window(model, 3)
        optim.step()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.5)

    def plain_window(model: Any, step: int) -> None:
        for rank in range(2):
            (net_loss(model, rank, step) / 2).backward()

    plain = make_net()
    run(plain, optimizer(plain), plain_window)

    def body(mesh: Mesh) -> dict[str, Tensor] | None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(optimizer(model), model)
        error = refusal(lambda: run(model, optim, lambda m, step: net_window(m, flat_rank(mesh), step)))
        if error:  # p.grad.zero_() cannot reach the flat buffer
            assert way == "model keep", error
            assert "zero_grad" in error
            return None
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        if found is not None:
            assert_all_close(found, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


@all_stages
@pytest.mark.parametrize("registered", ["before shard", "after shard"])
def test_gradient_hooks_after_accumulation_see_the_gradient_or_raise(stage: int, registered: str) -> None:
    """The optimizer-in-backward idiom would step with no gradient, or with this rank's own."""

    def body(mesh: Mesh) -> None:
        model = make_net()
        seen: list[Tensor | None] = []

        def register() -> None:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))

        if registered == "before shard":
            register()
        error = refusal(lambda: shard(model, mesh, stage))
        if not error and registered == "after shard":
            error = refusal(register)
        if error:
            assert "accumulate" in error
            return
        net_window(model, flat_rank(mesh), 0)
        assert len(seen) == len(list(model.parameters()))
        assert all(grad is not None for grad in seen), "hooks saw no gradient and were not told"

    run_ranks(2, body)


# Scalers


@all_stages
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_raises_instead_of_scaling_twice(stage: int, unscales: bool, dtype: torch.dtype) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(nn.Sequential(Weight(5, dtype)), mesh, stage)
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(1.0)).backward()
        before = shardwise.full_parameters(model)
        with raises(StateError, match="scale_loss"):
            if unscales:
                scaler.unscale_(optim)
            scaler.step(optim)
        assert_all_equal(shardwise.full_parameters(model), before)

    run_ranks(2, body)


@all_stages
def test_disabled_grad_scaler_changes_nothing(stage: int) -> None:
    """Scripts keep one code path and switch it off."""

    def body(mesh: Mesh) -> list[float]:
        model = shard(nn.Sequential(Weight(5)), mesh, stage)
        optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(1.0)).backward()
        scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        return shardwise.full_parameters(model)["0.w"].tolist()

    assert run_ranks(2, body) == [[-1.0] * 5] * 2


# State dicts and files


@all_stages
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_dict_is_whole_or_raises_and_files_hold_no_more_than_it(stage: int, dtype: torch.dtype) -> None:
    """A view of the flat buffer would save the whole buffer for every parameter."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(dtype=dtype, width=64), mesh, stage)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        expected = {name: value.to(dtype) for name, value in shardwise.full_parameters(model).items()}
        error = refusal(model.state_dict)
        assert bool(error) is (stage == 3)
        assert not error or "full_state_dict" in error
        state = shardwise.full_state_dict(model) if error else model.state_dict()
        assert_all_equal(clone_all(state), expected)
        file = io.BytesIO()
        torch.save(state, file)
        assert file.tell() < 1.5 * size + 20_000, f"{file.tell()} bytes for {size}"
        file.seek(0)
        assert_all_equal(torch.load(file), expected)
        plain = make_net(dtype=dtype, width=64)
        plain.load_state_dict(state)
        for tensors in (shardwise.full_state_dict(model), shardwise.full_parameters(model)):
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors.values())
        with shardwise.unsharded(model):
            inside = clone_all(model.state_dict())
        assert_all_equal(inside, expected)

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("when", ["new", "after a step"])
def test_load_state_dict_works_inside_unsharded_and_raises_outside(stage: int, dtype: torch.dtype, when: str) -> None:
    """Outside, values would miss the shards or the masters."""
    wanted = fill(Net(dtype=dtype), "loaded").state_dict()

    def body(mesh: Mesh) -> None:
        model = shard(make_net(dtype=dtype), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        if when == "after a step":
            net_loss(model, flat_rank(mesh), 0, dtype=dtype).backward()
            optim.step()
            optim.zero_grad()
        before = shardwise.full_parameters(model)
        for strict in (True, False):
            with raises(RuntimeError, match="unsharded"):
                model.load_state_dict(wanted, strict=strict)
        assert_all_equal(shardwise.full_parameters(model), before)
        with shardwise.unsharded(model):
            model.load_state_dict(wanted)
        found = shardwise.full_state_dict(model)
        assert_all_equal(found, wanted)
        masters = shardwise.full_parameters(model)
        assert all(torch.equal(masters[name].to(dtype), wanted[name]) for name in wanted)
        net_loss(model, flat_rank(mesh), 1, dtype=dtype).backward()
        optim.step()

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("inside", [True, False])
def test_load_state_dict_with_assign_raises_before_anything_is_trained(stage: int, inside: bool) -> None:
    """The new tensors are not in the flat buffer: nothing would train them."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        wanted = fill(Net(), "loaded").state_dict()
        with raises(StateError, match=r"assign=True|replaced|not managed"):
            if inside:
                with shardwise.unsharded(model):
                    model.load_state_dict(wanted, assign=True)
            else:
                model.load_state_dict(wanted, assign=True)
            net_window(model, flat_rank(mesh), 0)

    run_ranks(2, body)


# Moving and converting

NO_CHANGE: dict[str, Callable[[Any], Any]] = {
    "to device": lambda model: model.to("cpu"),
    "to dtype": lambda model: model.to(torch.float64),
    "to both": lambda model: model.to("cpu", torch.float64, non_blocking=True),
    "to tensor": lambda model: model.to(torch.zeros((), dtype=torch.float64)),
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "train": lambda model: model.train(),
    "eval and train": lambda model: model.eval().train(),
    "requires_grad_": lambda model: model.requires_grad_(True),
    "apply": lambda model: model.apply(lambda module: None),
    "zero_grad": lambda model: model.zero_grad(),
    "share_memory reading": lambda model: [p.is_shared() for p in model.parameters()],
    "count": lambda model: sum(p.numel() for p in model.parameters()),
    "repr": repr,
    "num trainable": lambda model: sum(p.requires_grad for p in model.parameters()),
    "devices": lambda model: {p.device for p in model.parameters()} | {next(model.parameters()).dtype},
    "pinned": lambda model: [p.is_pinned() for p in model.parameters()],
    "like": lambda model: [torch.zeros_like(p) for p in model.parameters()],
    "group by shape": lambda model: sorted(model.named_parameters(), key=lambda item: (item[1].dim(), item[0])),
    "in a dict": lambda model: {p: n for n, p in model.named_parameters()},
}


@all_stages
def test_what_changes_no_data_passes(stage: int) -> None:
    def window(model: Any, rank: int, step: int) -> None:
        for habit in NO_CHANGE.values():
            habit(model)
        net_window(model, rank, step)

    check_training(make_net, window, stage=stage)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "to dtype": lambda model: model.to(torch.float32),
    "to meta": lambda model: model.to("meta"),
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "type": lambda model: model.type(torch.float32),
    "one layer": lambda model: model.blocks[0].to(torch.float32),
    "channels last": lambda model: model.to(memory_format=torch.preserve_format, dtype=torch.float32),
    "share_memory": lambda model: model.share_memory(),
    "data": lambda model: setattr(model.head.weight, "data", torch.zeros(2, 6, dtype=torch.float64)),
    "data on parameter of a unit": lambda model: setattr(
        model.blocks[0].inner.weight, "data", torch.zeros(7, 6, dtype=torch.float64)
    ),
    "swap_tensors": lambda model: torch.utils.swap_tensors(
        model.head.weight, nn.Parameter(torch.zeros(2, 6, dtype=torch.float64))
    ),
    "set_": lambda model: model.head.weight.set_(torch.zeros(2, 6, dtype=model.head.weight.dtype)),
    "reset_parameters": lambda model: model.head.reset_parameters(),
    "init": lambda model: nn.init.normal_(model.head.weight, generator=torch.Generator()),
    "copy_": lambda model: model.head.weight.copy_(torch.zeros(2, 6, dtype=torch.float64)),
    "no_grad mul_": lambda model: model.head.weight.mul_(0.5),
    "setitem": lambda model: model.head.weight.__setitem__(0, 0.0),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "out": lambda model: torch.mul(torch.ones(2, 6), 2.0, out=model.head.weight),
    "detached": lambda model: model.head.weight.detach().mul_(0.5),
    "vector_to_parameters": lambda model: torch.nn.utils.vector_to_parameters(
        torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64), model.parameters()
    ),
    "weight decay by hand": lambda model: [p.data.mul_(0.9) for p in model.parameters()],
    "polyak by hand": lambda model: [p.lerp_(torch.zeros_like(p), 0.1) for p in model.parameters()],
}


def make_small() -> nn.Module:
    return make_net(num_blocks=1)


@all_stages
@pytest.mark.parametrize("habit", CHANGES)
def test_what_would_change_data_behind_the_shards_raises_or_is_kept(stage: int, habit: str) -> None:
    """Most raise at once, the rest at the next forward; where plain memory is edited in place, the edit counts.

    With a wider master an edit of the parameter itself would be lost at the next step at the latest: always an error.
    """

    def change(model: Any, dtype: torch.dtype) -> None:
        with torch.no_grad():
            CHANGES[habit](model)
        net_loss(model, 0, 1, dtype=dtype)

    def body(mesh: Mesh) -> None:
        narrow = shard(make_small(), mesh, stage, precision=Precision(param=torch.bfloat16))
        if habit != "bfloat16":
            error = refusal(lambda: change(narrow, torch.bfloat16))
            assert any(word in error for word in ("unsharded", "shard()")), error
        model = shard(make_small(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        net_window(model, flat_rank(mesh), 0)
        optim.step()
        optim.zero_grad()
        before = shardwise.full_parameters(model)
        error = refusal(lambda: change(model, torch.float64))
        if error:
            assert any(word in error for word in ("unsharded", "shard()"))
            return
        # It went through, so it must be true for every rank and for the optimizer.
        after = shardwise.full_parameters(model)
        assert not all(torch.equal(after[name], before[name]) for name in after), "the edit was lost"
        with shardwise.unsharded(model, writes=False):
            assert_all_equal(clone_all(dict(model.named_parameters())), after)

    run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("stepped", [False, True])
def test_parameters_read_between_step_and_next_use_are_the_new_ones_or_raise(stage: int, stepped: bool) -> None:
    """A refresh may be in flight after the step; a read waits for it."""

    def body(mesh: Mesh) -> None:
        model, optim = with_gradient(mesh, stage)
        if stepped:
            optim.step()
        if stage == 3:
            for read in (torch.clone, torch.sum, repr):
                with raises(StateError, match="unsharded"):
                    read(model.head.bias)
            return
        assert "Parameter" in repr(model.head.bias)
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
        total = sum(param.sum().item() for param in model.parameters())
        expected = shardwise.full_parameters(model)
        assert_all_equal(found, expected)
        assert total == sum(value.sum().item() for value in expected.values())

    run_ranks(2, body)


@all_stages
def test_a_penalty_computed_outside_the_forward_counts_or_raises(stage: int) -> None:
    """An L2 term over model.parameters() next to the loss: its gradient must not be lost."""

    def penalised(model: nn.Module, rank: int, step: int) -> Tensor:
        return net_loss(model, rank, step) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def window(model: nn.Module, rank: int, step: int) -> None:
        penalised(model, rank, step).backward()

    if stage < 3:
        check_training(make_net, window, stage=stage)
        return

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        with raises(StateError, match="unsharded"):
            penalised(model, flat_rank(mesh), 0)

    run_ranks(2, body)


# Schedulers, closures, several optimizers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optim: lr_scheduler.StepLR(optim, 1, gamma=0.5),
    "CosineAnnealingLR": lambda optim: lr_scheduler.CosineAnnealingLR(optim, T_max=4),
    "LambdaLR": lambda optim: lr_scheduler.LambdaLR(optim, [lambda s: 1 / (1 + s), lambda s: 1 / (1 + 2 * s)]),
    "OneCycleLR": lambda optim: lr_scheduler.OneCycleLR(optim, max_lr=[0.2, 0.1], total_steps=5),
    "LinearLR": lambda optim: lr_scheduler.LinearLR(optim, total_iters=3),
    "SequentialLR": lambda optim: lr_scheduler.SequentialLR(
        optim, [lr_scheduler.ConstantLR(optim), lr_scheduler.ExponentialLR(optim, 0.9)], [2]
    ),
    "CosineAnnealingWarmRestarts": lambda optim: lr_scheduler.CosineAnnealingWarmRestarts(optim, 2),
    "MultiStepLR": lambda optim: lr_scheduler.MultiStepLR(optim, [1, 3]),
    "ReduceLROnPlateau": lambda optim: lr_scheduler.ReduceLROnPlateau(optim, patience=0),
}


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, biases without decay; momentum for the cycling of OneCycleLR."""
    named = list(model.named_parameters())
    return torch.optim.SGD(
        [
            {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.05},
        ],
        lr=0.1,
        momentum=0.9,
    )


@pytest.mark.parametrize(("kind", "stage"), half_of(SCHEDULERS))
def test_schedulers_drive_groups_as_in_torch(kind: str, stage: int) -> None:
    """Built over the optimizer before (low stages) or after it was sharded: it is the same object."""

    def run(model: Any, optim: Any, schedule: Any, window: Callable[[Any, int], None]) -> list[list[float]]:
        rates = []
        for step in range(4):
            window(model, step)
            optim.step()
            optim.zero_grad()
            schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            rates.append([group["lr"] for group in optim.param_groups])
        return rates

    def plain_window(model: Any, step: int) -> None:
        for rank in range(2):
            (net_loss(model, rank, step) / 2).backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The epoch parameter")
        plain = make_net()
        optim = grouped(plain)
        expected = run(plain, optim, SCHEDULERS[kind](optim), plain_window)
        assert expected[0] != expected[-1]

        def body(mesh: Mesh) -> tuple[list[list[float]], dict[str, Tensor]]:
            model = shard(make_net(), mesh, stage)
            optim = grouped(model)
            schedule = SCHEDULERS[kind](optim) if stage < 2 else None
            optim = shardwise.shard_optimizer(optim, model)
            schedule = schedule or SCHEDULERS[kind](optim)
            rates = run(model, optim, schedule, lambda m, step: net_window(m, flat_rank(mesh), step))
            return rates, shardwise.full_parameters(model)

        ranks = run_ranks(2, body)
    for rates, params in ranks:
        assert rates == expected
        assert_all_close(params, clone_all(dict(plain.named_parameters())), FP64_TOLERANCE)


@all_stages
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda c: c.__name__)
def test_closures_run_once_before_the_update(stage: int, keyword: bool, kind: Any) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(kind(model.parameters(), lr=0.1), model)
        calls = []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                assert torch.is_grad_enabled()
                calls.append(step)
                optim.zero_grad()
                loss = net_loss(model, flat_rank(mesh), step)
                loss.backward()
                return loss

            loss = optim.step(closure=closure) if keyword else optim.step(closure)
            assert isinstance(loss, Tensor)
            assert loss.requires_grad
            assert optim.step_was_applied
        assert calls == [0, 1, 2]
        return shardwise.full_parameters(model)

    plain = make_net()
    optim = kind(plain.parameters(), lr=0.1)
    for step in range(3):
        optim.zero_grad()
        for rank in range(2):
            (net_loss(plain, rank, step) / 2).backward()
        optim.step()
    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), 1e-10)


@all_stages
@pytest.mark.parametrize("units", [None, lambda module: False], ids=["units", "one unit"])
def test_several_optimizers_over_one_model_step_their_own_parts(stage: int, units: Any) -> None:
    """Alternating and together, parts that share a bucket included; zero_grad of one leaves the other's gradients."""

    def build(model: Any) -> tuple[Any, Any]:
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        return torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.Adam(biases, lr=0.01)

    def run(model: Any, first: Any, second: Any, window: Callable[[Any, int], None]) -> None:
        for step in range(5):
            window(model, step)
            if step != 1:
                first.step()
                first.zero_grad()
            if step != 2:
                second.step()
                second.zero_grad()

    def plain_window(model: Any, step: int) -> None:
        for rank in range(2):
            (net_loss(model, rank, step) / 2).backward()

    plain = make_net()
    run(plain, *build(plain), plain_window)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage, units=units)
        first, second = build(model)
        first = shardwise.shard_optimizer(first, model, partial=True)
        second = shardwise.shard_optimizer(second, model, partial=True)
        run(model, first, second, lambda m, step: net_window(m, flat_rank(mesh), step))
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), 1e-10)


@all_stages
def test_two_optimizers_over_the_same_parameters_step_one_after_the_other(stage: int) -> None:
    """As in torch: both see the gradient, the second starts from what the first left."""

    def run(model: Any, first: Any, second: Any, window: Callable[[Any, int], None]) -> None:
        for step in range(3):
            window(model, step)
            first.step()
            if step != 1:
                second.step()
            (first if step == 0 else second).zero_grad()

    def plain_window(model: Any, step: int) -> None:
        for rank in range(2):
            (net_loss(model, rank, step) / 2).backward()

    plain = make_net()
    run(plain, sgd(plain), adamw(plain), plain_window)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = shard(make_net(), mesh, stage)
        first, second = shardwise.shard_optimizer(sgd(model), model), shardwise.shard_optimizer(adamw(model), model)
        run(model, first, second, lambda m, step: net_window(m, flat_rank(mesh), step))
        return shardwise.full_parameters(model)

    for found in run_ranks(2, body):
        assert_all_close(found, clone_all(dict(plain.named_parameters())), 1e-10)


class Muon(torch.optim.SGD):
    """Stands for any optimizer of this name outside torch."""


class Shampoo(torch.optim.SGD):
    pass


class MyLAMB(torch.optim.SGD):
    pass


class Lamb(MyLAMB):
    pass


class CustomLars(Lamb):
    """Inherits from a refused one."""


REFUSED = [
    lambda p: Muon(p, lr=0.1),
    lambda p: Shampoo(p, lr=0.1),
    lambda p: Lamb(p, lr=0.1),
    lambda p: CustomLars(p, lr=0.1),
    lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.LBFGS(p),
    lambda p: torch.optim.SparseAdam(p),
]


@all_stages
def test_optimizers_that_need_more_than_elements_are_refused_by_name(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        for build in REFUSED:
            optim = build(list(model.parameters()))
            name = next(c.__name__ for c in type(optim).__mro__ if c.__name__ != "CustomLars")
            with raises(ConfigError, match=name):
                shardwise.shard_optimizer(optim, model)
        shardwise.shard_optimizer(adamw(model), model)

    run_ranks(1, body)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, maximize=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam with a tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize(("kind", "stage"), half_of(ELEMENTWISE))
def test_elementwise_optimizers_step_as_in_torch(kind: str, stage: int) -> None:
    check_training(
        make_net,
        net_window,
        stage=stage,
        steps=3,
        optimizer=lambda model: ELEMENTWISE[kind](model.parameters()),
        tolerance=1e-9,
    )


@all_stages
def test_optimizer_with_state_from_earlier_steps_is_refused(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = make_net()
        optim = adamw(model)
        net_window(model, 0, 0)
        optim.step()
        optim.zero_grad()
        model = shard(model, mesh, stage)
        with raises(ConfigError, match="before its first step"):
            shardwise.shard_optimizer(optim, model)
        fresh = shardwise.shard_optimizer(adamw(model), model)
        with raises(ConfigError, match="sharded already"):
            shardwise.shard_optimizer(fresh, model)

    run_ranks(2, body)


# Calling a model in other ways


def functional_window(model: nn.Module, rank: int, step: int) -> None:
    x = data(3, 4, key=(rank, step))
    torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean().backward()


def forward_window(model: nn.Module, rank: int, step: int) -> None:
    model.forward(data(3, 4, key=(rank, step))).square().mean().backward()


@all_stages
@pytest.mark.parametrize("window", [functional_window, forward_window])
def test_calls_past_the_module_work_or_raise(stage: int, window: Any) -> None:
    """``functional_call`` with the model's own parameters is a plain call; ``model.forward`` skips the root's hooks."""
    if window is functional_window or stage < 3:
        check_training(make_net, window, stage=stage)
        return

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        with raises(StateError, match="call the module"):
            window(model, 0, 0)

    run_ranks(2, body)


@all_stages
def test_functional_calls_with_other_tensors_raise(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        others = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
        with raises(StateError, match=r"not managed|replaced"):
            torch.func.functional_call(model, others, (data(3, 4, key=0),))
        net_window(model, flat_rank(mesh), 0)  # the swap was undone

    run_ranks(2, body)


@all_stages
def test_embeddings_that_renormalise_their_weight_in_forward_raise(stage: int) -> None:
    """``max_norm`` edits the weight in place: lost at stage 3, different on every rank elsewhere."""

    def body(mesh: Mesh) -> None:
        model = shard(fill(nn.Sequential(nn.Embedding(5, 3, max_norm=0.1))), mesh, stage)
        with raises(StateError, match="changed in place"):
            model(torch.tensor([1, 2]))

    run_ranks(2, body)


# Sharding what cannot be sharded


@all_stages
def test_a_second_wrap_of_a_model_or_a_part_raises(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        for target in (model, nn.Sequential(model), model.blocks[0], nn.ModuleList([model.blocks[1]])):
            with raises((StateError, ConfigError), match="sharded already|belong to another sharded model"):
                shard(target, mesh, stage)
        net_window(model, flat_rank(mesh), 0)
        assert len(shardwise.full_gradients(model)) == len(list(model.parameters()))

    run_ranks(2, body)


class MySubclass(torch.Tensor):
    __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: func(*args, **(kwargs or {})))


def unshardable(kind: str) -> nn.Module:
    net = make_net()
    match kind:
        case "empty":
            return nn.Sequential(nn.ReLU())
        case "meta":
            return net.to("meta")
        case "mixed devices":
            net.head.to("meta")
        case "lazy":
            net.lazy = nn.LazyLinear(3)
        case "complex":
            net.turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        case "sparse":
            net.sparse = nn.Parameter(torch.eye(3).to_sparse())
        case "gradient":
            net_window(net, 0, 0)
        case "expanded":
            net.wide = nn.Parameter(torch.zeros(1).expand(4))
        case "same memory":
            net.twin = nn.Parameter(net.head.weight.detach())
        case "overlapping memory":
            base = torch.zeros(10)
            net.left, net.right = nn.Parameter(base[:6]), nn.Parameter(base[4:])
    return net


UNSHARDABLE = {
    "empty": (ConfigError, "no parameters"),
    "meta": (ConfigError, "meta"),
    "mixed devices": (ConfigError, "several devices"),
    "lazy": (ConfigError, "lazy.*no shape yet"),
    "complex": (ConfigError, "turn.*complex"),
    "sparse": (ConfigError, "sparse"),
    "gradient": (ConfigError, "zero_grad"),
    "expanded": (LayoutError, "wide"),
    "same memory": (LayoutError, r"head\.weight and twin|twin and head\.weight"),
    "overlapping memory": (LayoutError, "left and right"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", UNSHARDABLE)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_that_cannot_be_sharded_are_refused_and_left_as_they_were(stage: int, kind: str) -> None:
    error, words = UNSHARDABLE[kind]

    def body(mesh: Mesh) -> None:
        model = unshardable(kind)
        kinds = [type(param) for param in model.parameters()]
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        with raises(error, match=words):
            shard(model, mesh, stage)
        assert not is_sharded(model)
        assert [type(param) for param in model.parameters()] == kinds
        assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks

    run_ranks(2, body)


@all_stages
def test_sparse_gradients_raise_with_the_parameters_name(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        model = shard(fill(nn.Sequential(nn.Embedding(5, 3, sparse=True))), mesh, stage)
        with raises(StateError, match=r"0\.weight.*sparse"):
            model(torch.tensor([1, 2])).sum().backward()

    run_ranks(2, body)


@all_stages
def test_stepping_between_forward_and_backward_raises(stage: int) -> None:
    """Torch notices through version counters, which writes into a flat buffer do not touch."""

    def body(mesh: Mesh) -> None:
        model = shard(make_net(), mesh, stage)
        optim = shardwise.shard_optimizer(sgd(model), model)
        loss = net_loss(model, flat_rank(mesh), 0)
        net_window(model, flat_rank(mesh), 1)
        optim.step()
        optim.zero_grad()
        with raises(RuntimeError, match=r"changed between forward and backward|modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net_window(model, flat_rank(mesh), 2)
        optim.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, body)


@all_stages
@pytest.mark.parametrize("change", ["input", "output", "hidden"])
def test_changes_in_place_that_autograd_needs_undone_still_raise(stage: int, change: str) -> None:
    """Hooks on saved tensors switch autograd's own check off; ours takes its place."""

    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x).exp()

    def run(model: nn.Module) -> None:
        x = data(2, 6, key=0)
        y = model(x)
        if change == "input":
            x.add_(1.0)
        elif change == "output":
            y.add_(1.0)
        else:
            y.detach().mul_(2.0)
        y.sum().backward()

    with raises(RuntimeError, match="modified by an inplace operation"):
        run(fill(Exponential()))

    def body(mesh: Mesh) -> None:
        model = shard(fill(Exponential()), mesh, stage)
        with raises(RuntimeError, match="modified by an inplace operation"):
            run(model)

    run_ranks(2, body)


@all_stages
def test_editing_a_parameter_inside_its_own_forward_raises(stage: int) -> None:
    """Weight normalisation by hand would be lost when the unit is freed, and differ from the master."""

    class Normalising(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inner.weight.div_(self.inner.weight.norm())
            return super().forward(x)

    def body(mesh: Mesh) -> None:
        model = shard(fill(nn.Sequential(Normalising(), Normalising())), mesh, stage)
        with raises(StateError, match=r"changed in place|unsharded"):
            model(data(2, 6, key=0))

    run_ranks(2, body)
