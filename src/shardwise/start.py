"""``initialize``: from a model and a configuration to an engine, its optimizer, its loader and its scheduler."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from shardwise.api import InitialValues, shard, unshard_model
from shardwise.comm.base import Mesh, flat_rank, num_ranks
from shardwise.comm.process_group import mesh_from
from shardwise.config.model import Config
from shardwise.config.resolve import Resolved
from shardwise.configure import load_config
from shardwise.engine import Engine
from shardwise.environment import Environment
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.group import join_group, leave_group
from shardwise.loader import ShardedLoader
from shardwise.modules import Units
from shardwise.optim.lion import Lion
from shardwise.optim.schedules import build_scheduler
from shardwise.optim.shard import ShardedOptimizer, shard_optimizer
from shardwise.precision import LossScale, Precision
from shardwise.runtime.record import Agreement

__all__ = ["OPTIMIZERS", "build_optimizer", "initialize", "precision_of"]

_DTYPES = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
)
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = MappingProxyType(
    {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "lion": Lion,
    }
)

OptimizerSource = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
SchedulerSource = Any
ConfigSource = Mapping[str, Any] | str | Path | None


def initialize(
    *,
    model: nn.Module,
    optimizer: OptimizerSource = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerSource = None,
    config: ConfigSource = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: Any = None,
    units: Units = None,
    initial_values: InitialValues = "broadcast",
) -> tuple[Engine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Shard a model and make what trains it.

    Collective. Where a launcher has set RANK and WORLD_SIZE and no process group exists, one is made (and taken away
    by ``engine.destroy()``).

    Args:
        model: on one device, as for ``shardwise.shard``.
        optimizer: over the model's parameters, or a function that makes one of parameters or groups; None: the one the
            configuration names; without any the engine can only evaluate.
        model_parameters: parameters or groups for an optimizer that is made here; None: all that train.
        training_data: dataset of which a loader of micro-batches is made, each rank its part.
        lr_scheduler: over the optimizer, or a function that makes one of it; None: the one the configuration names.
        config: path of a TOML or JSON file, or a mapping: names of this library, or a DeepSpeed configuration.
        collate_fn: makes a micro-batch of samples.
        mesh: as for ``shardwise.shard``.
        units: as for ``shardwise.shard``.
        initial_values: as for ``shardwise.shard``.

    Returns:
        The engine, its optimizer, the loader and the scheduler; None for what there is not.

    Raises:
        ConfigError: lists everything that is wrong with the configuration; the same on every rank.
        RankMismatchError: ranks have unlike configurations or models.
    """
    device = _device_of(model, initial_values)
    owns_group = mesh is None and join_group(Environment.read(), device.type)
    try:
        whole = mesh_from(mesh)
        settings = _agreed_settings(config, whole, device)
        loader = _loader(training_data, collate_fn, settings, whole)
        engine = _build(
            model,
            (optimizer, model_parameters, lr_scheduler),
            settings,
            whole,
            owns_group=owns_group,
            units=units,
            initial_values=initial_values,
            loader=loader,
        )
    except BaseException:
        if owns_group:
            leave_group()
        raise
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _agreed_settings(config: ConfigSource, mesh: Mesh, device: torch.device) -> Resolved:
    """Load the configuration on every rank; raise on all if one cannot, or if they differ."""
    error: ShardwiseError | None = None
    settings: Resolved | None = None
    try:
        settings = load_config({} if config is None else config, num_ranks=num_ranks(mesh), device=device.type)
        lines = [f"{key} = {value}" for key, value in sorted(_flat(settings.config).items())]
    except ConfigError as failure:
        error, lines = failure, [f"error: {failure}"]
    Agreement(mesh, device).check_lines(lines, "the configuration")
    if error is not None or settings is None:
        raise error or ConfigError("no configuration")
    if flat_rank(mesh) == 0 and settings.notes:
        logging.getLogger("shardwise").warning("configuration:\n  %s", "\n  ".join(settings.notes))
    return settings


def _loader(
    dataset: Dataset[Any] | None, collate: Callable[[list[Any]], Any] | None, settings: Resolved, mesh: Mesh
) -> ShardedLoader | None:
    if dataset is None:
        if collate is not None:
            raise ConfigError("collate_fn has no effect without training_data: leave it out, or pass the dataset")
        return None
    return ShardedLoader(
        dataset,
        micro=settings.batch.micro,
        rank=flat_rank(mesh),
        num_ranks=num_ranks(mesh),
        seed=settings.config.seed,
        drop_last=settings.config.batch.drop_last,
        collate=collate,
    )


def _build(
    model: nn.Module,
    sources: tuple[OptimizerSource, Iterable[Any] | None, SchedulerSource],
    settings: Resolved,
    mesh: Mesh,
    *,
    owns_group: bool,
    units: Units,
    initial_values: InitialValues,
    loader: ShardedLoader | None,
) -> Engine:
    source, parameters, schedule = sources
    config = settings.config
    _check_sources(source, parameters, schedule, config)
    _check_loss_scale(model, settings)
    shard(
        model,
        mesh,
        stage=config.stage,
        units=units,
        precision=precision_of(config),
        initial_values=initial_values,
        prefetch=config.overlap.prefetch,
        reductions_in_flight=config.overlap.reductions_in_flight,
        keep_last_unit=config.overlap.keep_last_unit,
    )
    try:
        optimizer = _optimizer(model, source, parameters, config)
        sharded = None if optimizer is None else shard_optimizer(optimizer, model, on_nonfinite=config.on_nonfinite)
        scheduler = None if sharded is None else _scheduler(sharded, schedule, config)
    except BaseException:
        unshard_model(model)  # so that it can be tried again
        raise
    is_first = flat_rank(mesh) == 0
    return Engine(model, sharded, scheduler, settings, loader=loader, is_first=is_first, owns_group=owns_group)


def _check_sources(source: Any, parameters: Any, schedule: SchedulerSource, config: Config) -> None:
    """Refuse what would leave a part of the configuration or an argument unused, or fail later."""
    if source is not None and not isinstance(source, torch.optim.Optimizer) and not callable(source):
        raise ConfigError(f"optimizer: pass one or a function that makes one (names go in config), got {source!r}")
    if schedule is not None and not callable(schedule) and not callable(getattr(schedule, "step", None)):
        raise ConfigError(f"lr_scheduler: pass a scheduler or a function that makes one, got {schedule!r}")
    if parameters is not None and source is None and config.optimizer is None:
        raise ConfigError("there are model_parameters but no optimizer: pass one, or name one in the configuration")
    if source is not None and config.optimizer is not None:
        raise ConfigError(
            f"the configuration names the optimizer {config.optimizer.name!r}, and initialize() got one: leave one out"
        )
    if schedule is not None and config.scheduler is not None:
        raise ConfigError(
            f"the configuration names the scheduler {config.scheduler.name!r}, and initialize() got one: leave one out"
        )
    if source is None and config.optimizer is None and (schedule is not None or config.scheduler is not None):
        raise ConfigError("there is a scheduler but no optimizer: pass one, or name one in the configuration")
    if isinstance(schedule, LRScheduler) and schedule.optimizer is not source:
        raise ConfigError("lr_scheduler belongs to another optimizer than the one passed to initialize()")


def _optimizer(
    model: nn.Module, source: OptimizerSource, parameters: Iterable[Any] | None, config: Config
) -> torch.optim.Optimizer | None:
    if isinstance(source, torch.optim.Optimizer):
        if parameters is not None:
            held = {id(param) for group in source.param_groups for param in group["params"]}
            if {id(param) for param in _each_parameter(parameters)} != held:
                raise ConfigError(
                    "model_parameters are not those of the optimizer passed with them: leave one of the two out"
                )
        return source
    trainable = [param for param in model.parameters() if param.requires_grad]
    wanted = trainable if parameters is None else list(parameters)
    if source is not None:
        return source(wanted)
    return None if config.optimizer is None else build_optimizer(config, wanted)


def build_optimizer(config: Config, params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration names, over parameters or groups."""
    assert config.optimizer is not None
    options = config.optimizer.model_dump(exclude={"name"})
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return OPTIMIZERS[config.optimizer.name](params, **options)


def _each_parameter(entries: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters of a list of parameters, names with parameters, or groups of either."""
    for entry in entries:
        group = entry["params"] if isinstance(entry, Mapping) else [entry]
        for item in [group] if isinstance(group, torch.Tensor) else group:
            yield item[1] if isinstance(item, tuple) else item


def _scheduler(optimizer: ShardedOptimizer, schedule: SchedulerSource, config: Config) -> Any:
    if schedule is None:
        if config.scheduler is None:
            return None
        return build_scheduler(config.scheduler.name, config.scheduler.model_dump(exclude={"name"}), optimizer)
    made = schedule(optimizer) if callable(schedule) and not isinstance(schedule, LRScheduler) else schedule
    if not callable(getattr(made, "step", None)):
        raise ConfigError(f"lr_scheduler: the function returned {made!r}, which has no step()")
    return made


def _check_loss_scale(model: nn.Module, settings: Resolved) -> None:
    """Refuse a loss scale where no parameter is fp16: it would never be used."""
    param = settings.config.precision.param
    is_fp16 = any(p.dtype == torch.float16 for p in model.parameters()) if param is None else param == "fp16"
    written = [key for key, origin in settings.origins.items() if key.startswith("loss_scale.") and origin != "default"]
    if written and not is_fp16:
        raise ConfigError(f"{', '.join(written)}: only fp16 parameters need a loss scale, and the model has none")


def precision_of(config: Config) -> Precision:
    """Return the dtypes that settings ask for."""
    names, scale = config.precision, config.loss_scale
    return Precision(
        param=None if names.param is None else _DTYPES[names.param],
        wire=None if names.wire is None else _DTYPES[names.wire],
        accumulate=None if names.accumulate is None else _DTYPES[names.accumulate],
        master=None if names.master is None else _DTYPES[names.master],
        loss_scale=LossScale(
            initial=scale.initial,
            minimum=scale.minimum,
            growth_interval=scale.growth_interval,
            hysteresis=scale.hysteresis,
            consecutive_hysteresis=scale.consecutive_hysteresis,
            fixed=scale.fixed,
        ),
    )


def _device_of(model: nn.Module, initial_values: InitialValues) -> torch.device:
    """Return where the model is, or will be if it is on the meta device."""
    for name, param in model.named_parameters():
        return param.device if isinstance(initial_values, str) else initial_values.device_of(param, name)
    return torch.device("cpu")


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return every setting by its dotted name."""
    values = section.model_dump() if hasattr(section, "model_dump") else section
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
