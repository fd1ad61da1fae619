"""``simulate`` and ``verify``: a user's model on ranks that are threads of this process, beside plain training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardwise.comm.base import Mesh
from shardwise.errors import ConfigError
from shardwise.layout import DEFAULT_ALIGN
from shardwise.modules import Units
from shardwise.simulation.differences import vacuities
from shardwise.simulation.dtypes import NamedPrecision, precision_called
from shardwise.simulation.owner_view import OWNED_STAGES, OwnerRun, compare_owners
from shardwise.simulation.parity import Comparison, StageRun, compare_stages
from shardwise.simulation.work import (
    Loss,
    MakeBatch,
    MakeOptimizer,
    Work,
    check_loss,
    prepare_work,
)

__all__ = ["BUILT_IN_OPTIMIZERS", "Simulation", "Verification", "simulate", "verify"]

BUILT_IN_OPTIMIZERS: Mapping[str, MakeOptimizer] = MappingProxyType(
    {
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
)
ALL_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What ``simulate`` found; ``print`` shows it as tables.

    Attributes:
        ranks: number of ranks.
        steps: number of optimizer steps.
        num_params: elements of all parameters.
        comparison: the plain run and the stages.
        owners: the same stages with whole tensors owned by one rank each.
        notes: what was changed for the comparison, or cannot be compared.
        problems: what is not as it must be, in words.
    """

    ranks: int
    steps: int
    num_params: int
    comparison: Comparison
    owners: tuple[OwnerRun, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every stage trained as one plain process does, and as the other stages to the bit."""
        return not self.problems

    @property
    def stages(self) -> tuple[StageRun, ...]:
        """What each stage did."""
        return self.comparison.stages

    def __str__(self) -> str:
        """Return the tables as text."""
        from shardwise.simulation.tables import as_text, simulation_tables  # only who prints pays for rich

        return as_text(simulation_tables(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class Verification:
    """What ``verify`` found; ``print`` shows it as tables.

    Attributes:
        ranks: number of ranks.
        steps: number of optimizer steps.
        num_params: elements of all parameters.
        comparisons: one for each precision.
        notes: what was changed for the comparison, or cannot be compared.
        problems: what is not as it must be, or why an agreement would prove nothing, in words.
    """

    ranks: int
    steps: int
    num_params: int
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything agrees and the agreement means something."""
        return not self.problems

    def __str__(self) -> str:
        """Return the tables as text."""
        from shardwise.simulation.tables import as_text, verification_tables

        return as_text(verification_tables(self))


def simulate(
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    *,
    ranks: int = 4,
    stages: Sequence[int] = ALL_STAGES,
    steps: int = 3,
    precision: str = "fp32",
    optimizer: str | MakeOptimizer = "adamw",
    loss: Loss | None = None,
    units: Units = None,
    align: int = DEFAULT_ALIGN,
    max_norm: float | None = None,
    owners: bool = True,
    notes: Sequence[str] = (),
    instrument: Callable[[Mesh], Mesh] | None = None,
) -> Simulation:
    """Train a model at every stage on ranks that are threads of this process; say what each keeps and sends.

    The numbers are real. Gradients of the ranks' shares are averaged; the plain run does the same in one thread.

    Args:
        make_model: returns the module, on the CPU; called once, under a fixed seed.
        make_batch: returns the share of a rank in a step, both from 0 on; called once for each, in this thread.
        ranks: number of ranks.
        stages: which stages to run, each once.
        steps: number of optimizer steps.
        precision: dtype of parameters: "fp64", "fp32", "bf16" or "fp16", the last two with fp32 masters.
        optimizer: "adamw" (rate 0.01), "sgd" (rate 0.1, momentum 0.9), or a function of the model that makes one.
        loss: of the model on a share, 0-dim; None: as suits the batch, see ``simulation.work.default_loss``.
        units: as for ``shard``.
        align: as for ``shard``, in elements.
        max_norm: clip the mean gradient to this norm; None does not clip.
        owners: run stages 2 and 3 with whole tensors owned by one rank each, too.
        notes: further notes for the report.
        instrument: wraps the communicators of a rank (tests put faults here).

    Raises:
        ConfigError: an argument is wrong; before anything runs.
    """
    chosen = _checked_stages(stages)
    named = precision_called(precision)
    work = _work(make_model, make_batch, ranks, steps, optimizer, loss, units, align, max_norm, notes)
    check_loss(work, named.dtypes.param)
    comparison = compare_stages(work, named, chosen, instrument=instrument)
    owned = [run for run in comparison.stages if owners and run.stage in OWNED_STAGES]
    owner_runs = tuple(compare_owners(work, comparison, run) for run in owned)
    problems = [*comparison.problems, *(run.problem for run in owner_runs if run.problem)]
    return Simulation(
        ranks=ranks,
        steps=steps,
        num_params=work.num_params,
        comparison=comparison,
        owners=owner_runs,
        notes=work.notes,
        problems=tuple(problems),
    )


def verify(
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    *,
    ranks: int = 2,
    stages: Sequence[int] = ALL_STAGES,
    precisions: Sequence[str] = ("fp32",),
    steps: int = 3,
    optimizer: str | MakeOptimizer = "adamw",
    loss: Loss | None = None,
    units: Units = None,
    align: int = DEFAULT_ALIGN,
    max_norm: float | None = None,
    may_stay: Sequence[str] = (),
    notes: Sequence[str] = (),
    instrument: Callable[[Mesh], Mesh] | None = None,
) -> Verification:
    """Check on a user's model that every stage trains as one plain process does; say what differs most.

    Parameters, gradients, optimizer state, losses and norms are compared: with the plain run within the tolerance of
    the precision (fp64 1e-12, fp32 1e-5, bf16 1e-3, fp16 1e-4 of a tensor's largest element), among the stages to the
    bit. It fails as well where agreement would prove nothing: a trainable tensor never moved, ranks got the same
    share, the largest update is not far above the tolerance, a loss is not finite.

    Args:
        make_model: as for ``simulate``.
        make_batch: as for ``simulate``.
        ranks: number of ranks.
        stages: which stages to run, each once.
        precisions: which dtypes to run in, each once.
        steps: number of optimizer steps.
        optimizer: as for ``simulate``.
        loss: as for ``simulate``.
        units: as for ``shard``.
        align: as for ``shard``, in elements.
        max_norm: clip the mean gradient to this norm; None does not clip.
        may_stay: names of trainable parameters that need not move.
        notes: further notes for the report.
        instrument: wraps the communicators of a rank (tests put faults here).

    Raises:
        ConfigError: an argument is wrong; before anything runs.
    """
    chosen = _checked_stages(stages)
    named = _checked_precisions(precisions)
    work = _work(make_model, make_batch, ranks, steps, optimizer, loss, units, align, max_norm, notes)
    unknown = sorted(set(may_stay) - {name for name, _ in work.model.named_parameters()})
    if unknown:
        raise ConfigError(f"may_stay: the model has no parameters {unknown}")
    for precision in named:
        check_loss(work, precision.dtypes.param)
    comparisons = tuple(compare_stages(work, precision, chosen, instrument=instrument) for precision in named)
    problems = [problem for comparison in comparisons for problem in comparison.problems]
    for comparison in comparisons:
        found = vacuities(work, comparison.plain, comparison.tolerance, may_stay)
        problems += [f"{comparison.precision} proves nothing: {reason}" for reason in found]
    return Verification(
        ranks=ranks,
        steps=steps,
        num_params=work.num_params,
        comparisons=comparisons,
        notes=work.notes,
        problems=tuple(problems),
    )


def _work(
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    ranks: int,
    steps: int,
    optimizer: str | MakeOptimizer,
    loss: Loss | None,
    units: Units,
    align: int,
    max_norm: float | None,
    notes: Sequence[str],
) -> Work:
    if isinstance(optimizer, str) and optimizer not in BUILT_IN_OPTIMIZERS:
        names = ", ".join(BUILT_IN_OPTIMIZERS)
        raise ConfigError(f"optimizer: expected one of {names}, or a function of the model, got {optimizer!r}")
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm: expected a number above 0 or None, got {max_norm!r}")
    return prepare_work(
        make_model,
        make_batch,
        num_ranks=ranks,
        num_steps=steps,
        loss=loss,
        make_optimizer=BUILT_IN_OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        units=units,
        align=align,
        max_norm=max_norm,
        notes=notes,
    )


def _checked_stages(stages: Any) -> tuple[int, ...]:
    chosen = tuple(stages) if isinstance(stages, Sequence) else ()
    if not chosen or not set(chosen) <= set(ALL_STAGES) or len(set(chosen)) != len(chosen):
        raise ConfigError(f"stages: expected some of 0, 1, 2, 3, each once, got {stages!r}")
    return chosen


def _checked_precisions(names: Sequence[str]) -> tuple[NamedPrecision, ...]:
    if isinstance(names, str) or not names or len(set(names)) != len(names):
        raise ConfigError(f"precisions: expected a list of names, each once, got {names!r}")
    return tuple(precision_called(name) for name in names)
