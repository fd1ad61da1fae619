"""What the command line simulates: a small built-in model, a size of the built-in GPT, a folder, or settings of a run.

Owns ``Subject`` and ``subject_called``. Settings are read as ``shardwise train`` reads them; text, model and optimizer
are those of that run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.api import shard, unshard_model
from shardwise.comm.fake import LocalComm
from shardwise.config.resolve import Resolved
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.models.sizes import MAIN_SIZES, SIZES
from shardwise.modules import Units
from shardwise.simulation.work import Loss, MakeBatch, MakeOptimizer, default_loss
from shardwise.start import build_optimizer
from shardwise.train.loop import prepare
from shardwise.train.model import Blueprint
from shardwise.train.settings import load_settings

__all__ = ["SMALL_MODELS", "Subject", "subject_called"]

SMALL_MODELS = ("mlp", "gpt")
CONFIG_SUFFIXES = (".toml", ".json")
_SMALL_GPT = GPTConfig(vocab=64, context=16, width=32, heads=2, depth=2)
_ROWS = 4  # of a small model's share


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """Arguments of ``simulate`` and ``verify``.

    Attributes:
        name: what the user called it.
        make_model: see ``simulate``.
        make_batch: see ``simulate``.
        loss: see ``simulate``.
        make_optimizer: that of the settings; None: there are none.
        units: see ``shard``.
        max_norm: see ``simulate``.
        precision: dtype of parameters that the settings name; None: they name none.
        notes: what of the settings is not part of a simulation.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: Loss
    make_optimizer: MakeOptimizer | None
    units: Units
    max_norm: float | None
    precision: str | None
    notes: tuple[str, ...]


def subject_called(name: str | None, *, overrides: Sequence[str] = (), num_ranks: int) -> Subject:
    """Return what a name stands for.

    Args:
        name: "mlp" or "gpt"; a size such as "gpt-mini"; a folder of a Hugging Face model; a TOML or JSON file with
            settings of ``shardwise train``; None: that command's defaults.
        overrides: "key=value" settings, for all but the small models.
        num_ranks: number of ranks.

    Raises:
        ConfigError: there is nothing of this name, or its settings are wrong.
    """
    if name in SMALL_MODELS:
        if overrides:
            raise ConfigError(f"--set changes settings of a training run, and {name!r} is a small model without any")
        return _small(name)
    if name is None or Path(name).suffix in CONFIG_SUFFIXES:
        return _of_settings(name, load_settings(name, overrides=overrides, num_ranks=num_ranks))
    if name not in SIZES and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"{name!r} is no small model ({', '.join(SMALL_MODELS)}), no size ({', '.join(MAIN_SIZES)}), no folder and "
            "no TOML or JSON file"
        )
    chosen = [f"model.name={name}", *overrides]
    return _of_settings(name, load_settings(None, overrides=chosen, num_ranks=num_ranks))


def _small(name: str) -> Subject:
    is_gpt = name == "gpt"
    return Subject(
        name=name,
        make_model=_small_gpt if is_gpt else _small_mlp,
        make_batch=_small_tokens if is_gpt else _small_rows,
        loss=default_loss,
        make_optimizer=None,
        units=Block if is_gpt else nn.Linear,
        max_norm=None,
        precision=None,
        notes=(),
    )


def _small_gpt() -> nn.Module:
    return GPT(_SMALL_GPT, generator=torch.Generator().manual_seed(0))


def _small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def _small_tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(_SMALL_GPT.vocab, (_ROWS, _SMALL_GPT.context + 1), generator=_generator(step, rank))
    return windows[:, :-1], windows[:, 1:]


def _small_rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = _generator(step, rank)
    return torch.randn(_ROWS, 16, generator=generator), torch.randn(_ROWS, 4, generator=generator)


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(step * 65_537 + rank)


def _of_settings(name: str | None, settings: Resolved) -> Subject:
    parts, config = prepare(settings), settings.config
    blueprint = parts.blueprint

    def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        return parts.text.training.micro_batch(
            number=step, rank=rank, num_ranks=settings.num_ranks, size=settings.batch.micro
        )

    return Subject(
        name=name or blueprint.name,
        make_model=lambda: _with_weights(blueprint),
        make_batch=make_batch,
        loss=lambda model, batch: blueprint.loss(model, *batch),
        make_optimizer=lambda model: build_optimizer(config, model.parameters()),
        units=blueprint.units,
        max_norm=config.clip_grad_norm or None,
        precision=config.precision.param,
        notes=(*settings.notes, *_left_out(settings)),
    )


def _with_weights(blueprint: Blueprint) -> nn.Module:
    """Return a plain module with the values that a run begins with."""
    if blueprint.weights is None:
        return blueprint.construct()
    model, values = blueprint.build(torch.device("cpu"))
    return unshard_model(shard(model, {"data": LocalComm()}, stage=0, units=blueprint.units, initial_values=values))


def _left_out(settings: Resolved) -> Iterator[str]:
    config = settings.config
    if config.scheduler is not None:
        assert config.optimizer is not None
        yield f"the rate stays at optimizer.lr = {config.optimizer.lr:g}: the scheduler is not run"
    if settings.batch.accumulation > 1:
        yield f"a step is one micro-batch of {settings.batch.micro} per rank, without accumulation"
    if config.loss_reduction == "sum":
        yield "the loss is the mean over each share, and shares count alike"
