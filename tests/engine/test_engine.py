"""The engine around the window: optimizers, schedulers, overflow, several engines, the loader, the end."""

import gc
import json
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import ConfigError, RankMismatchError, StateError
from shardwise.comm.base import Mesh
from shardwise.engine import Engine
from shardwise.managed import Managed
from shardwise.testing.ranks import run_ranks

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def net(seed: int = 0, width: int = 8) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    with torch.no_grad():
        for number, param in enumerate(layers.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + number)
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return layers


def rows(rank: int, step: int = 0, width: int = 8) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(out: Tensor) -> Tensor:
    return (out - 1).pow(2).mean()


def start(mesh: Mesh, model: nn.Module | None = None, *, config: Mapping[str, Any], **options: Any) -> Engine:
    engine, *_ = shardwise.initialize(model=model or net(), config=config, mesh=mesh, **options)
    return engine


ADAMW = {"name": "adamw", "lr": 0.01}


def assert_params(params: Mapping[str, Tensor], plain: nn.Module) -> None:
    for name, param in plain.named_parameters():
        torch.testing.assert_close(params[name], param.detach(), rtol=1e-5, atol=1e-6)


@all_stages
@pytest.mark.parametrize("source", ["config", "instance", "function"])
def test_loop_trains_like_plain_torch_whoever_makes_optimizer_and_scheduler(stage: int, source: str) -> None:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        model, options, config = net(), {}, {"stage": stage, "clip_grad_norm": 0.05}
        if source == "config":
            config |= {"optimizer": ADAMW, "scheduler": {"name": "warmup", "num_warmup_steps": 3, "shape": "linear"}}
        else:
            warm = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 3, 1.0))  # noqa: E731
            if source == "instance":
                options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
                options["lr_scheduler"] = warm(options["optimizer"])
            else:
                options["optimizer"] = lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0)
                options["lr_scheduler"] = warm
        engine = start(mesh, model, config=config, **options)
        for step in range(5):
            engine.backward(loss(engine(rows(mesh["data"].rank, step))))
            engine.step()
            assert engine.get_lr() == [pytest.approx(0.01 * min((step + (source != "config")) / 3, 1.0))]
        assert engine.get_global_grad_norm() > 0.05
        return shardwise.full_parameters(engine.module)

    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min((step if source != "config" else max(step - 1, 0)) / 3, 1.0)
        for rank in range(2):
            (loss(plain(rows(rank, step))) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for params in run_ranks(2, body):
        assert_params(params, plain)


@all_stages
def test_overflow_on_one_rank_skips_the_update_and_the_scheduler_on_all(stage: int) -> None:
    def body(mesh: Mesh) -> tuple[Any, ...]:
        config = {
            "stage": stage,
            "precision": {"param": "fp16"},
            "loss_scale": {"initial": 1024.0, "hysteresis": 1},
            "optimizer": ADAMW,
            "scheduler": {"name": "warmup", "min_lr": 0.005, "num_warmup_steps": 4, "shape": "linear"},
        }
        engine = start(mesh, config=config)
        seen = []
        for step in range(3):
            x = rows(mesh["data"].rank, step).half()
            if step == 1 and mesh["data"].rank == 1:
                x[0, 0] = torch.inf
            engine.backward(loss(engine(x)))
            before = shardwise.full_parameters(engine.module)
            engine.step()
            after = shardwise.full_parameters(engine.module)
            moved = any(not torch.equal(before[name], after[name]) for name in before)
            seen.append((engine.was_step_applied(), moved, engine.loss_scale, engine.lr_scheduler.last_epoch))
        return (*seen, engine.skipped_steps, engine.global_steps)

    first, second = run_ranks(2, body)
    assert first == second
    applied, skipped, again, num_skipped, num_steps = first
    assert (applied[:3], skipped[:3], again[:3]) == ((True, True, 1024.0), (False, False, 512.0), (True, True, 512.0))
    assert (skipped[3], again[3]) == (applied[3], applied[3] + 1)
    assert (num_skipped, num_steps) == (1, 3)


@all_stages
def test_generator_and_discriminator_have_engines_of_their_own(stage: int) -> None:
    def play(make: Any, backward: Any, params_of: Any) -> list[dict[str, Tensor]]:
        generator, discriminator = make(1), make(2)
        for step in range(3):
            fake = generator.forward(rows(7, step))
            backward(discriminator, loss(discriminator.forward(fake.detach())))
            discriminator.step()
            backward(generator, loss(discriminator.forward(generator.forward(rows(8, step)))))
            generator.step()  # the gradients that flowed into the discriminator wait there until its zero_grad
            discriminator.zero_grad()
        return [params_of(generator), params_of(discriminator)]

    class Plain:
        def __init__(self, seed: int) -> None:
            self.module = net(seed)
            self.forward = self.module.__call__
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
            self.zero_grad = self.optimizer.zero_grad

        def step(self) -> None:
            self.optimizer.step()
            self.zero_grad()

    expected = play(Plain, lambda _, value: value.backward(), lambda net: dict(net.module.named_parameters()))

    def body(mesh: Mesh) -> list[dict[str, Tensor]]:
        config = {"stage": stage, "optimizer": {"name": "sgd", "lr": 0.1}}
        engines: list[Engine] = []

        def make(seed: int) -> Engine:
            engines.append(start(mesh, net(seed), config=config))
            return engines[-1]

        result = play(make, Engine.backward, lambda engine: shardwise.full_parameters(engine.module))
        engines[0].destroy()
        engines[1].backward(loss(engines[1](rows(0))))
        engines[1].step()
        assert engines[1].global_steps == 4
        return result

    for result in run_ranks(2, body):
        for params, plain in zip(result, expected, strict=True):
            for name in plain:
                torch.testing.assert_close(params[name], plain[name].detach(), rtol=1e-5, atol=1e-6)


@all_stages
def test_trunk_that_is_unfrozen_for_a_while_trains_for_that_while(stage: int) -> None:
    def freeze(model: nn.Sequential, step: int) -> None:
        for param in model[0].parameters():
            param.requires_grad_(step == 2)

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = net()
        engine = start(mesh, model, config={"stage": stage, "optimizer": ADAMW})
        for step in range(4):
            freeze(model, step)
            engine.eval()
            with torch.no_grad():
                engine(rows(5))
            engine.train()
            engine.backward(loss(engine(rows(mesh["data"].rank, step))))
            engine.step()
        return shardwise.full_parameters(model)

    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
    for step in range(4):
        freeze(plain, step)
        for rank in range(2):
            (loss(plain(rows(rank, step))) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in run_ranks(2, body):
        assert_params(params, plain)


@all_stages
def test_passes_without_gradients_between_updates_leave_no_trace(stage: int) -> None:
    def body(mesh: Mesh, *, passes: bool) -> tuple[dict[str, Tensor], int]:
        engine = start(mesh, config={"stage": stage, "optimizer": ADAMW})
        for step in range(4):
            if passes:
                with torch.no_grad():
                    engine(rows(9)), engine(rows(9))
                engine(rows(9))  # a forward without a backward
                engine.eval()
                engine(rows(9))
            engine.backward(loss(engine(rows(mesh["data"].rank, step))))  # in eval mode, if there were passes
            engine.step()
            engine.train()
        return shardwise.full_parameters(engine.module), len(Managed.of(engine.module).runtime.last_walk.events)

    plain = run_ranks(2, lambda mesh: body(mesh, passes=False))
    traced = run_ranks(2, lambda mesh: body(mesh, passes=True))
    for (params, length), (others, other_length) in zip(plain, traced, strict=True):
        assert length == other_length
        assert all(torch.equal(params[name], others[name]) for name in params)


def test_optimizer_of_other_parameters_is_named_at_the_start() -> None:
    def body(mesh: Mesh) -> None:
        for held, expected in (
            (list(net().parameters()), "is no parameter of the sharded model"),
            (None, "would never change"),
        ):
            model = net()
            optimizer = torch.optim.SGD(held or [model[0].weight], lr=0.1)
            with pytest.raises(ConfigError, match=expected):
                start(mesh, model, config={}, optimizer=optimizer)

    run_ranks(1, body)


def test_optimizer_built_after_a_forward_trains_every_parameter() -> None:
    def body(mesh: Mesh) -> None:
        model = net()
        model(rows(0))
        engine = start(mesh, model, config={}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        before = shardwise.full_parameters(model)
        engine.backward(loss(engine(rows(0))))
        engine.step()
        after = shardwise.full_parameters(model)
        assert all(not torch.equal(before[name], after[name]) for name in before)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"optimizer": ADAMW}, {"optimizer": True}, "leave one out"),
        (
            {"optimizer": ADAMW, "scheduler": {"name": "warmup"}},
            {"lr_scheduler": lambda optimizer: None},
            "leave one out",
        ),
        ({}, {"lr_scheduler": lambda optimizer: None}, "there is a scheduler but no optimizer"),
    ],
)
def test_two_sources_of_one_thing_are_refused(config: Any, options: Any, message: str) -> None:
    def body(mesh: Mesh) -> None:
        model = net()
        if "optimizer" in options:
            options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=message):
            start(mesh, model, config=config, **options)
        start(mesh, model, config={})  # nothing was lost

    run_ranks(1, body)


def test_scheduler_of_another_optimizer_is_refused() -> None:
    def body(mesh: Mesh) -> None:
        model = net()
        mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
        with pytest.raises(ConfigError, match="belongs to another optimizer"):
            start(mesh, model, config={}, optimizer=mine, lr_scheduler=schedule)

    run_ranks(1, body)


def test_scheduler_that_the_caller_advances_too_is_warned_about() -> None:
    def body(mesh: Mesh) -> None:
        engine = start(mesh, config={"optimizer": ADAMW, "scheduler": {"name": "warmup"}})
        for step in range(2):
            engine.backward(loss(engine(rows(0))))
            if step == 0:
                engine.step()
                engine.lr_scheduler.step()
            else:
                with pytest.warns(UserWarning, match="advanced by somebody else"):
                    engine.step()

    run_ranks(1, body)


def test_engine_without_an_optimizer_evaluates_only() -> None:
    def body(mesh: Mesh) -> None:
        engine, optimizer, loader, scheduler = shardwise.initialize(model=net(), mesh=mesh, config={})
        assert (optimizer, loader, scheduler) == (None, None, None)
        with torch.no_grad():
            out = engine(rows(0))
        assert torch.equal(out, net()(rows(0)))
        for call in (lambda: engine.backward(loss(engine(rows(0)))), engine.step, engine.get_lr):
            with pytest.raises(StateError, match="the engine has no optimizer"):
                call()

    run_ranks(2, body)


def test_configurations_that_differ_between_ranks_are_named_on_all() -> None:
    def body(mesh: Mesh) -> None:
        start(mesh, config={"optimizer": {"name": "sgd", "lr": 0.1 * (1 + mesh["data"].rank)}})

    errors = run_ranks(2, body, return_exceptions=True)
    for error in errors:
        assert isinstance(error, RankMismatchError)
        assert "rank 0: optimizer.lr = 0.1; rank 1: optimizer.lr = 0.2" in str(error)


def test_configuration_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"stage": 1}))

    def body(mesh: Mesh) -> None:
        start(mesh, config=good if mesh["data"].rank == 0 else tmp_path / "missing.json")

    errors = run_ranks(2, body, return_exceptions=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    assert all("missing.json" in str(error) for error in errors)


def test_wrong_configuration_is_one_error_on_all_ranks_and_the_model_stays_plain() -> None:
    models = [net(), net()]

    def body(mesh: Mesh) -> None:
        start(mesh, models[mesh["data"].rank], config={"stagge": 2, "clip_grad_norm": -1})

    errors = run_ranks(2, body, return_exceptions=True)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "stagge" in str(error)
        assert "clip_grad_norm" in str(error)
    for model in models:
        assert all(type(param) is nn.Parameter for param in model.parameters())


def test_loader_deals_the_samples_out_and_shuffles_anew_in_every_epoch() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12))

    def body(mesh: Mesh) -> list[list[int]]:
        _, _, loader, _ = shardwise.initialize(
            model=net(), mesh=mesh, config={"batch": {"micro": 2}, "seed": 3}, training_data=data
        )
        assert [len(batch) for (batch,) in loader] == [2, 2, 2]
        return [[int(i) for (batch,) in loader for i in batch] for _ in range(2)]

    first, second = run_ranks(2, body)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(12))
    assert first[0] != first[1]


def test_dataset_without_a_length_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from range(3)

    def body(mesh: Mesh) -> None:
        with pytest.raises(ConfigError, match="has no length"):
            shardwise.initialize(model=net(), mesh=mesh, config={}, training_data=Stream())

    run_ranks(1, body)


def test_attributes_that_the_engine_does_not_have_are_the_models() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.label = "mine"

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    def body(mesh: Mesh) -> None:
        engine = start(mesh, Net(), config={})
        assert engine.label == "mine"
        assert engine.layers is engine.module.layers
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            _ = engine.nothing_of_that_name

    run_ranks(1, body)


@all_stages
def test_destroyed_engines_leave_no_memory_and_no_hooks(stage: int) -> None:
    def body(mesh: Mesh) -> None:
        alive = []
        for _ in range(20):
            model = net()
            engine = start(mesh, model, config={"stage": stage, "optimizer": ADAMW})
            engine.backward(loss(engine(rows(mesh["data"].rank))))
            engine.step()
            ledger = Managed.of(model).runtime.means.arena.ledger
            engine.destroy()
            engine.destroy()  # a second time does nothing
            assert not any(ledger.now.values())
            assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())
            assert not engine.optimizer.state
            for call in (partial(engine, rows(0)), engine.step, engine.zero_grad):
                with pytest.raises(StateError, match="was destroyed"):
                    call()
            alive.append(weakref.ref(engine))
        del engine, model, call, ledger
        gc.collect()
        assert not any(reference() for reference in alive)

    run_ranks(2, body)


def test_destroyed_model_is_not_sharded_again() -> None:
    def body(mesh: Mesh) -> None:
        model = net()
        start(mesh, model, config={}).destroy()
        with pytest.raises(StateError, match="was destroyed and has no parameters"):
            start(mesh, model, config={})
        with pytest.raises(ConfigError, match="not a sharded model"):
            shardwise.full_state_dict(model)

    run_ranks(1, body)


def test_log_line_is_written_by_the_first_rank_every_so_many_updates(capsys: pytest.CaptureFixture[str]) -> None:
    def body(mesh: Mesh) -> None:
        engine = start(mesh, config={"optimizer": ADAMW, "log_every": 2})
        for _ in range(4):
            engine.backward(loss(engine(rows(0))))
            engine.step()

    run_ranks(2, body)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4"]
    assert "lr 0.01" in lines[0]


@pytest.mark.parametrize("name", ["hf_zero2", "hf_zero3", "lightning_default"])
def test_deepspeed_files_from_the_field_train_unchanged_on_two_ranks(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(__file__).parents[1] / "config" / "files" / f"{name}.json"
    written = json.loads(file.read_text())

    def body(mesh: Mesh) -> dict[str, Tensor]:
        model = net()
        own = {} if "optimizer" in written else {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
        engine, *_ = shardwise.initialize(model=model, config=file, mesh=mesh, **own)
        assert engine.zero_optimization_stage() == written["zero_optimization"]["stage"]
        before = shardwise.full_parameters(model)
        dtype = next(model.parameters()).dtype
        for step in range(8 * engine.gradient_accumulation_steps()):
            engine.backward(loss(engine(rows(mesh["data"].rank, step).to(dtype))))
            engine.step()
        assert engine.global_steps == 8
        assert engine.skipped_steps <= (3 if dtype == torch.float16 else 0)  # until the loss scale fits
        after = shardwise.full_parameters(model)
        assert all(not torch.equal(before[key], after[key]) for key in before)
        return after

    first, second = run_ranks(2, body)
    assert all(torch.equal(first[key], second[key]) for key in first)
    told = [record.getMessage() for record in caplog.records if record.name == "shardwise"]
    assert len(told) == 1  # one message, on one rank, with every key that has no effect here
    assert "overlap_comm" in told[0] or "contiguous_gradients" in told[0]


def test_exception_of_the_scheduler_comes_after_the_window_is_over() -> None:
    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        """Its step needs a metric."""

    def body(mesh: Mesh) -> None:
        engine = start(
            mesh,
            config={"optimizer": ADAMW, "batch": {"micro": 1, "accumulation": 2}},
            lr_scheduler=lambda optimizer: Plateau(optimizer),
        )
        steps = []
        for step in range(4):
            engine.backward(loss(engine(rows(0, step))))
            if step % 2 == 0:
                engine.step()
            elif step == 1:
                with pytest.raises(TypeError):
                    engine.step()
            else:
                engine.step({"metrics": 1.0})
            steps.append((engine.global_steps, engine.micro_steps))
        assert steps == [(0, 1), (1, 2), (1, 3), (2, 4)]

    run_ranks(1, body)


def test_arguments_without_effect_are_refused() -> None:
    def body(mesh: Mesh) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for options, message in (
            ({"model_parameters": model.parameters()}, "model_parameters but no optimizer"),
            ({"collate_fn": list}, "collate_fn has no effect"),
            ({"optimizer": optimizer, "model_parameters": [model[0].weight]}, "not those of the optimizer"),
            ({"optimizer": "adam"}, "optimizer: pass one or a function"),
            ({"optimizer": optimizer, "lr_scheduler": "cosine"}, "lr_scheduler: pass a scheduler"),
            ({"optimizer": optimizer, "lr_scheduler": lambda optimizer: None}, "has no step"),
            ({"config": {"loss_scale": {"fixed": 1024.0}}}, "only fp16 parameters need a loss scale"),
        ):
            with pytest.raises(ConfigError, match=message):
                start(mesh, model, **({"config": {}} | options))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = start(mesh, model, config={}, optimizer=optimizer)  # the model is plain after each
        with pytest.raises(StateError, match="lr_kwargs are for a scheduler"):
            engine.step({"metrics": 1.0})

    run_ranks(1, body)


@pytest.mark.parametrize("form", ["list", "group", "tensor", "named"])
@pytest.mark.parametrize("given", [True, False])
def test_model_parameters_may_have_any_form_that_torch_takes(form: str, given: bool) -> None:
    def body(mesh: Mesh) -> None:
        model = net()
        parameters: Any = {
            "list": list(model.parameters()),
            "group": [{"params": list(model.parameters())}],
            "tensor": [{"params": param} for param in model.parameters()],
            "named": model.named_parameters(),
        }[form]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if given else None
        config = {} if given else {"optimizer": ADAMW}
        engine = start(mesh, model, config=config, optimizer=optimizer, model_parameters=parameters)
        engine.backward(loss(engine(rows(0))))
        engine.step()
        assert engine.was_step_applied()

    run_ranks(1, body)
