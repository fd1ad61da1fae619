"""A model with the settings around it, and what a case of them needs.

Settings are read as ``shardwise train`` reads them, so that what is planned is what a run of the written settings does:
its loss, optimizer, clipping, accumulation and overlap. The model is built without memory, the batch is empty.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.api import plan
from shardwise.config.resolve import Resolved
from shardwise.dryrun.run import dry_run
from shardwise.errors import ConfigError
from shardwise.models.sizes import MAIN_SIZES, SIZES
from shardwise.sizing.case import STATES, Case, Memory, Need
from shardwise.start import OPTIMIZERS, build_optimizer, precision_of
from shardwise.train.model import Blueprint, blueprint
from shardwise.train.settings import load_settings
from shardwise.train.tokens import load_tokenizer

__all__ = ["SizingSubject"]

CONFIG_SUFFIXES = (".toml", ".json")


class SizingSubject:
    """What the command line calls MODEL.

    Args:
        name: a built-in model, a folder of a Hugging Face model, or a TOML or JSON file of settings; None: what
            ``shardwise train`` takes without any.
        overrides: "key=value" settings.
        context: length of sequences, in tokens; None: that of the settings or the model.
        num_ranks: for settings whose batch fits some numbers of ranks only.

    Raises:
        ConfigError: there is nothing of this name, or its settings are wrong.
    """

    def __init__(
        self, name: str | None, *, overrides: Sequence[str] = (), context: int | None = None, num_ranks: int = 1
    ) -> None:
        self._num_ranks = num_ranks
        self.name = name or "settings"
        self._source = name if name is not None and Path(name).suffix in CONFIG_SUFFIXES else None
        chosen = [] if context is None else [f"model.context={context}"]
        if self._source is None and name is not None:
            if name not in SIZES and not Path(name).expanduser().is_dir():
                raise ConfigError(
                    f"{name!r} is no built-in model ({', '.join(MAIN_SIZES)}, ...), no folder, no TOML or JSON file, "
                    "and no number of parameters such as 7.5B"
                )
            chosen = [f"model.name={name}", *chosen]
            if name in SIZES and not any(text.startswith(("model.vocab=", "data.tokenizer=")) for text in overrides):
                chosen.append(f"model.vocab={SIZES[name].vocab}")
        self._overrides = [*chosen, *overrides]

    @cached_property
    def written(self) -> Resolved:
        """The settings without any case."""
        return load_settings(self._source, overrides=self._overrides, num_ranks=self._num_ranks)

    @property
    def fixes_batch(self) -> bool:
        """Whether the settings say how many samples an update has, over all ranks."""
        return not self.written.origins.get("batch.size", "from").startswith("from")

    @property
    def precision(self) -> str | None:
        """Dtype of parameters that the settings name."""
        return self.written.config.precision.param

    @property
    def context(self) -> int:
        """Length of sequences, in tokens."""
        return self._blueprint(self.written).context

    @property
    def depth(self) -> int | None:
        """Number of blocks of a built-in model."""
        config = self.written.config.model
        return None if config.name not in SIZES else config.depth or SIZES[config.name].shape.num_layers

    def settings(self, case: Case) -> Resolved:
        """Return the settings of a case, as a run would read them.

        Raises:
            ConfigError: they contradict each other, as a batch that the ranks do not divide.
        """
        chosen = [
            f"stage={case.stage}",
            f"model.activation_checkpointing={str(case.checkpointing).lower()}",
            *([] if case.micro is None else [f"batch.micro={case.micro}"]),
            *([] if case.precision is None else [f"precision.param={case.precision}"]),
            *([] if case.depth is None else [f"model.depth={case.depth}"]),
        ]
        return load_settings(self._source, overrides=[*self._overrides, *chosen], num_ranks=case.gpus)

    def need(self, case: Case, memory: Memory | None = None) -> Need:
        """Return what a case needs; of states that exceed the memory alone, only these.

        Raises:
            ConfigError: settings contradict each other, or the model cannot be run without data.
        """
        settings = self.settings(case)
        config, parts = settings.config, self._blueprint(settings)
        micro = settings.batch.micro
        case = replace(case, micro=micro)
        model = parts.meta()
        num_params = sum(param.numel() for param in model.parameters())
        assert config.optimizer is not None  # load_settings fills it in
        states = plan(
            model,
            case.gpus,
            stage=case.stage,
            units=parts.units,
            precision=precision_of(config),
            optimizer=OPTIMIZERS[config.optimizer.name],
            optimizer_options=config.optimizer.model_dump(exclude={"name"}),
        ).bytes_per_rank
        total = sum(states.values())
        if memory is not None and total > memory.bytes:
            return Need(
                case=case,
                states=total,
                peak=total,
                by_kind=states,
                moment="",
                num_params=num_params,
                flops=0,
                sent_bytes=0,
            )
        found = dry_run(
            parts.construct,
            lambda: _batch(micro, parts.context),
            lambda model, pair: _loss(parts, model, pair, sums=config.loss_reduction == "sum"),
            case.gpus,
            optimizer=lambda params: build_optimizer(config, params),
            max_norm=config.clip_grad_norm or None,
            accumulation=settings.batch.accumulation,
            stage=case.stage,
            units=parts.units,
            precision=precision_of(config),
            prefetch=config.overlap.prefetch,
            reductions_in_flight=config.overlap.reductions_in_flight,
            keep_last_unit=config.overlap.keep_last_unit,
        )
        event = found.peak.event
        return Need(
            case=case,
            states=sum(found.at_rest.get(kind, 0) for kind in STATES),
            peak=found.peak.bytes,
            by_kind=found.peak.by_kind,
            moment=" ".join((event.phase, *(unit for unit in event.units if unit))),
            num_params=num_params,
            flops=sum(found.flops.values()),
            sent_bytes=found.sent_bytes,
        )

    def _blueprint(self, settings: Resolved) -> Blueprint:
        config = settings.config
        vocab = load_tokenizer(config.data.tokenizer, config.data.end_token).vocab
        return blueprint(config.model, vocab=vocab, seed=config.seed)


def _batch(micro: int, context: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(micro, context, dtype=torch.long), torch.zeros(micro, context, dtype=torch.long)


def _loss(parts: Blueprint, model: nn.Module, pair: tuple[Tensor, Tensor], *, sums: bool) -> Tensor:
    return parts.loss(model, *pair, reduction="sum" if sums else "mean")
