"""What a model's module tree says: its parameters with all their names, its units, which unit holds which parameter.

Reads modules, changes nothing. ``api.py`` builds buckets from the result; the planner reads it on the meta device.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, LayoutError
from shardwise.guard import HOOK_ADVICE

__all__ = [
    "NamedParam",
    "UnitModule",
    "Units",
    "check_params",
    "collect_params",
    "find_units",
    "leave_meta",
    "place_params",
]

DeviceOf = Callable[[Tensor, str], torch.device]

Units = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | Sequence[str] | None

LARGE_LEAF_NUMEL = 1 << 20


@dataclass(frozen=True, kw_only=True)
class NamedParam:
    """One parameter of the model, with every name it has."""

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter


@dataclass(frozen=True, kw_only=True)
class UnitModule:
    """A module that becomes a unit; the root has the empty name."""

    name: str
    module: nn.Module


def collect_params(model: nn.Module) -> list[NamedParam]:
    """Return every distinct parameter in definition order; tied parameters appear once, with aliases."""
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return [NamedParam(name=names[key][0], aliases=tuple(names[key][1:]), param=param) for key, param in params.items()]


def check_params(params: Sequence[NamedParam], device_of: DeviceOf | None = None) -> torch.device:
    """Check that the parameters can be managed; return their device.

    Args:
        params: every parameter.
        device_of: where a parameter (and its name) will be, which may be on the meta device now; None: where it is.

    Raises:
        ConfigError: there are none, or they lie on several devices or on the meta device, are of a dtype that cannot
            train, or are uninitialised.
        LayoutError: two different parameters share memory.
    """
    if not params:
        raise ConfigError("the model has no parameters: there is nothing to shard")
    lazy = [p.name for p in params if isinstance(p.param, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ConfigError(f"parameters {lazy[:5]} have no shape yet: run one forward of the plain model first")
    devices: dict[torch.device, list[str]] = {}
    for p in params:
        device = p.param.device if device_of is None else device_of(p.param, p.name)
        devices.setdefault(device, []).append(p.name)
    if len(devices) > 1:
        listed = "; ".join(f"{device}: {names[0]} and {len(names) - 1} more" for device, names in devices.items())
        raise ConfigError(f"parameters lie on several devices ({listed}): move the model to one device before shard()")
    device = next(iter(devices))
    if device.type == "meta":
        raise ConfigError(
            "the model is on the meta device and has no values: build it inside `with shardwise.deferred_init() as "
            "recipe:` and pass initial_values=recipe, or pass initial_values=shardwise.from_weights(file), or "
            "materialise it first (model.to_empty, then initialise)"
        )
    for p in params:
        if p.param.requires_grad and not p.param.dtype.is_floating_point:
            raise ConfigError(f"parameter {p.name} has dtype {p.param.dtype}: only floating-point parameters can train")
        if p.param.dtype.is_complex:
            raise ConfigError(f"parameter {p.name} is complex, which flat buffers do not hold: use a real view of it")
        if p.param.layout is not torch.strided:
            raise ConfigError(f"parameter {p.name} has layout {p.param.layout}: only strided parameters can be sharded")
        if type(p.param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ConfigError(f"parameter {p.name} is a {type(p.param).__name__}: tensor subclasses cannot be sharded")
        if p.param.is_inference():
            raise ConfigError(
                f"parameter {p.name} is an inference tensor, which cannot train: build the model outside inference_mode"
            )
        if p.param.grad is not None:
            raise ConfigError(f"parameter {p.name} has a gradient already: call model.zero_grad() before shard()")
        if getattr(p.param, "_post_accumulate_grad_hooks", None):
            raise ConfigError(f"parameter {p.name}: {HOOK_ADVICE}")
        if not p.param.is_leaf:
            raise ConfigError(f"parameter {p.name} is not a leaf of autograd")
        if p.param.is_meta:
            _check_can_leave(p)
    _check_disjoint(params)
    return device


def leave_meta(param: nn.Parameter, data: Tensor) -> None:
    """Give a parameter on the meta device memory; the object stays, with its class, flags, attributes and hooks.

    Torch does not let ``param.data`` change the kind of device, so the object gets the inside of a new parameter, as in
    ``torch.utils.swap_tensors``. That function swaps class and attributes too and refuses weak references (an LSTM
    keeps some), which stay right here, because the object is the same.

    Args:
        param: a meta parameter that nothing else in C++ refers to.
        data: of the same shape.
    """
    hooks = param._backward_hooks
    torch._C._swap_tensor_impl(param, nn.Parameter(data, requires_grad=param.requires_grad))
    if hooks is not None:
        param._backward_hooks = hooks


def _check_can_leave(p: NamedParam) -> None:
    if p.param._use_count() > 1:  # type: ignore[attr-defined]
        raise ConfigError(
            f"parameter {p.name} is on the meta device and cannot leave it, because a view of it or a graph of "
            "autograd refers to it: drop that before shard()"
        )


def _check_disjoint(params: Sequence[NamedParam]) -> None:
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for p in params:
        if p.param.numel():
            start = int(p.param.storage_offset())
            last = start + sum(
                int((size - 1) * stride) for size, stride in zip(p.param.shape, p.param.stride(), strict=True)
            )
            ranges.setdefault(p.param.untyped_storage()._cdata, []).append(
                (start * p.param.element_size(), (last + 1) * p.param.element_size(), p.name)
            )
            if 0 in p.param.stride() and p.param.numel() > 1:
                raise LayoutError(f"parameter {p.name} is expanded: several of its elements are one number in memory")
    for pieces in ranges.values():
        pieces.sort()
        for (_, stop, first), (start, _, second) in pairwise(pieces):
            if start < stop:
                raise LayoutError(
                    f"parameters {first} and {second} are different Parameter objects over the same memory; tie them "
                    "by assigning one Parameter object to both modules"
                )


def find_units(model: nn.Module, units: Units = None) -> list[UnitModule]:
    """Return the unit modules in definition order, the root first.

    Args:
        model: the root.
        units: a class or tuple of classes, a predicate over modules, a list of module names, or None: the repeated
            children of ModuleList, Sequential and ModuleDict containers, and large leaf modules outside of them.

    Raises:
        ConfigError: a name is not in the model, or the selector finds nothing.
    """
    named = dict(model.named_modules())
    chosen: dict[str, nn.Module]
    if units is None:
        chosen = _repeated(model) or {}
        chosen |= _large_leaves(model, chosen)
    elif isinstance(units, type) or (isinstance(units, tuple) and all(isinstance(u, type) for u in units)):
        chosen = {name: module for name, module in named.items() if name and isinstance(module, cast(Any, units))}
        if not chosen and not isinstance(model, cast(Any, units)):
            raise ConfigError(f"units={units!r}: the model has no module of this class")
    elif callable(units):
        chosen = {name: module for name, module in named.items() if name and units(module)}
    else:
        if isinstance(units, str):
            raise ConfigError(f"units={units!r}: pass a list of module names, e.g. [{units!r}]")
        unknown = [name for name in units if name not in named]
        if unknown:
            raise ConfigError(f"units: the model has no modules named {unknown}")
        chosen = {name: module for name, module in named.items() if name and name in set(units)}
    idle = [name for name, module in chosen.items() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    if idle:
        raise ConfigError(f"units: {idle[:5]} are containers whose forward never runs; name the modules inside them")
    ordered = [UnitModule(name=name, module=module) for name, module in named.items() if name in chosen]
    return [UnitModule(name="", module=model), *(unit for unit in ordered if has_params(unit.module))]


def has_params(module: nn.Module) -> bool:
    """Return whether a module holds any parameter, its children's included."""
    return next(module.parameters(), None) is not None


def _repeated(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Find repeated children of containers, top down; inside a found unit nothing further is looked for."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if has_params(child)]
    found: dict[str, nn.Module] = {}
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        counts = Counter(type(child) for _, child in children)
        containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        found = {n: c for n, c in children if counts[type(c)] > 1 and type(c) not in containers[::2]}
    for name, child in children:
        if name not in found:
            found |= _repeated(child, f"{name}.")
    return found


def _large_leaves(model: nn.Module, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inside = {id(module) for unit in found.values() for module in unit.modules()}
    smallest = min((sum(p.numel() for p in unit.parameters()) for unit in found.values()), default=LARGE_LEAF_NUMEL)
    return {
        name: module
        for name, module in model.named_modules()
        if name
        and id(module) not in inside
        and next(module.children(), None) is None
        and sum(p.numel() for p in module.parameters()) >= min(smallest, LARGE_LEAF_NUMEL) > 0
    }


def place_params(model: nn.Module, params: Iterable[NamedParam], units: Sequence[UnitModule]) -> dict[int, int]:
    """Return, by ``id`` of the parameter, the number of the innermost unit that contains all its users.

    A tied weight, or a module shared by two units, belongs to the unit around both.
    """
    numbers = {id(unit.module): number for number, unit in enumerate(units)}
    chains: dict[int, list[int]] = {}

    def visit(module: nn.Module, chain: list[int]) -> None:
        number = numbers.get(id(module))
        if number is not None:
            chain = [*chain, number]
        for param in module._parameters.values():
            if param is not None:
                known = chains.get(id(param))
                chains[id(param)] = chain if known is None else [unit for unit in known if unit in chain]
        for child in module._modules.values():
            if child is not None:
                visit(child, chain)

    visit(model, [])
    return {id(p.param): chains[id(p.param)][-1] for p in params}
