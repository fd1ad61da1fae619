"""From a module tree to buckets: first a plan (pure, also of a meta-device model), then the memory.

``plan_buckets`` groups the parameters of each unit by (dtype, trainable, atom, sharding); the planner and the engine
read the same result. ``agree_on_values`` makes all ranks start from the same numbers.
"""

import platform
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from shardwise.comm.base import Mesh, broadcast, reserve
from shardwise.errors import ConfigError, RankMismatchError
from shardwise.layout import DEFAULT_ALIGN, ParamSpec, plan_layout
from shardwise.modules import NamedParam, UnitModule, place_params
from shardwise.numerics.fingerprint import fingerprint
from shardwise.planner.memory import BucketPlan
from shardwise.precision import Precision
from shardwise.runtime.record import Agreement
from shardwise.schedule import Schedule
from shardwise.sharding import MeshAxes, Sharding, resolve

__all__ = ["Member", "Settings", "ShardingRule", "agree_on_plan", "agree_on_values", "plan_buckets"]

ShardingRule = Sharding | Callable[[str, nn.Parameter], Sharding | None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for, the same on all ranks.

    Attributes:
        sharding: for every parameter, or a function of its name that may return None for ``default``.
        default: used where the function returns None.
        align: start of slots and slices, in elements.
        initial_values: "broadcast" rank 0's where ranks differ, or "verify" that they do not.
        prefetch: units to gather ahead.
        reductions_in_flight: buckets whose reduction may overlap with the backward.
        keep_last_unit: keep the unit used last gathered from forward to backward.
        force_collectives: keep axes of one rank, so that a single device runs the whole machinery.
    """

    sharding: ShardingRule
    default: Sharding
    precision: Precision
    align: int = DEFAULT_ALIGN
    initial_values: str = "broadcast"
    prefetch: int = 1
    reductions_in_flight: int = 2
    keep_last_unit: bool = True
    force_collectives: bool = False

    def schedule(self, num_units: int) -> Schedule:
        """Return the schedule before any order is agreed."""
        return Schedule(
            num_units=num_units,
            prefetch=self.prefetch,
            reductions_in_flight=self.reductions_in_flight,
            keep_last=self.keep_last_unit,
        )

    def axes(self, sizes: MeshAxes) -> MeshAxes:
        """Return the axes over which anything moves."""
        return sizes if self.force_collectives else {axis: size for axis, size in sizes.items() if size > 1}

    def sharding_of(self, name: str, param: nn.Parameter) -> Sharding:
        """Return one parameter's sharding."""
        if isinstance(self.sharding, Sharding):
            return self.sharding
        if not callable(cast(object, self.sharding)):
            raise ConfigError(f"sharding must be a Sharding or a function, got {self.sharding!r}")
        chosen = self.sharding(name, param)
        if chosen is not None and not isinstance(chosen, Sharding):
            raise ConfigError(f"sharding: the function returned {chosen!r} for {name}, expected a Sharding or None")
        return chosen or self.default


@dataclass(frozen=True, kw_only=True)
class Member:
    """A planned bucket and the parameters that fill it, in slot order."""

    plan: BucketPlan
    params: tuple[NamedParam, ...]


class _Key(NamedTuple):
    """What the parameters of one bucket have in common."""

    unit: int
    dtype: torch.dtype
    trainable: bool
    sharding: Sharding


def plan_buckets(
    model: nn.Module, params: Sequence[NamedParam], units: Sequence[UnitModule], sizes: MeshAxes, settings: Settings
) -> list[Member]:
    """Group the parameters into buckets and lay them out.

    Args:
        model: the root, whose tree says which unit holds a parameter.
        params: distinct parameters in definition order.
        units: unit modules, the root first.
        sizes: every data-parallel axis with its size, outermost first.
        settings: what the user asked for.
    """
    resolve(settings.default, sizes)
    places = place_params(model, params, units)
    groups: dict[_Key, list[NamedParam]] = {}
    for p in params:
        dtype = _stored_dtype(p.param, settings.precision)
        key = _Key(places[id(p.param)], dtype, p.param.requires_grad, settings.sharding_of(p.name, p.param))
        groups.setdefault(key, []).append(p)
    counts = Counter(key.unit for key in groups)
    return [
        _plan_bucket(key, members, _label(units[key.unit].name, members, alone=counts[key.unit] == 1), sizes, settings)
        for key, members in sorted(groups.items(), key=lambda item: item[0].unit)
    ]


def _label(unit: str, members: Sequence[NamedParam], *, alone: bool) -> str:
    return (unit or "root") if alone else f"{unit or 'root'} ({members[0].name}, ...)"


def _plan_bucket(key: _Key, members: Sequence[NamedParam], label: str, sizes: MeshAxes, settings: Settings) -> Member:
    resolve(key.sharding, sizes)  # names an unknown axis even where it has one rank
    axes = settings.axes(sizes)
    kept = {
        field: [axis for axis in getattr(key.sharding, field) if axis in axes or axis == "*"]
        for field in ("param", "grad", "optim")
    }
    placement = resolve(Sharding(**kept), axes)
    specs = [
        ParamSpec(
            name=p.name,
            shape=tuple(p.param.shape),
            dtype=key.dtype,
            requires_grad=p.param.requires_grad,
            aliases=p.aliases,
        )
        for p in members
    ]
    return Member(
        plan=BucketPlan(
            unit=key.unit,
            label=label,
            layout=plan_layout(specs, placement.num_ranks, align=settings.align),
            placement=placement,
            dtypes=settings.precision.of(key.dtype),
            trainable=key.trainable,
        ),
        params=tuple(members),
    )


def _stored_dtype(param: nn.Parameter, precision: Precision) -> torch.dtype:
    if precision.param is not None and param.dtype.is_floating_point:
        return precision.param
    return param.dtype


def agree_on_plan(agreement: Agreement, members: Sequence[Member], settings: Settings) -> None:
    """Check that all ranks plan the same, before anything is changed.

    Raises:
        RankMismatchError: names the first parameter, bucket or setting in which ranks differ.
    """
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}",
        f"precision {settings.precision}, align {settings.align}, initial values {settings.initial_values}, "
        f"prefetch {settings.prefetch}, reductions_in_flight {settings.reductions_in_flight}, "
        f"keep_last_unit {settings.keep_last_unit}",
    ]
    for member in members:
        plan = member.plan
        lines += [f"parameter {slot.param}" for slot in plan.layout.slots]
        lines.append(f"unit {plan.label}: {plan.placement}, {plan.layout.shard_numel} elements per slice")
    agreement.check_lines(lines, "the model or the settings")


def agree_on_values(mesh: Mesh, agreement: Agreement, params: Sequence[NamedParam], settings: Settings) -> None:
    """Make every rank start from rank 0's values.

    Raises:
        RankMismatchError: values differ and ``initial_values`` is "verify".
    """
    codes = torch.tensor([fingerprint(p.param.data) for p in params], dtype=torch.int64)
    rows = agreement.words(codes, "initial values").cpu()
    unlike = [p.name for p, column in zip(params, rows.T, strict=True) if len(set(column.tolist())) > 1]
    if not unlike:
        return
    listed = f"{len(unlike)} of {len(params)} parameters, first {unlike[0]}"
    if settings.initial_values == "verify":
        raise RankMismatchError(f"ranks start from different values: {listed}. Seed all ranks alike")
    warnings.warn(f"ranks start from different values ({listed}); rank 0's are used", stacklevel=5)
    index = reserve(mesh, 1)
    for sequence, p in enumerate(p for p in params if p.name in set(unlike)):
        flat = p.param.data.contiguous().view(-1)
        broadcast(mesh, flat, index, sequence, p.name)
        p.param.data.copy_(flat.view(p.param.shape))
