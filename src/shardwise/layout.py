"""Pure maths: how the parameters of a bucket share one flat index space, cut into equal slices.

Owns ``ParamSpec``, ``Slot``, ``Fragment``, ``Layout`` and ``range_to_boxes``. Imports nothing but errors and
``torch.dtype``; it never touches a tensor. Read ``sharding.py`` next: it says which rank owns which slice.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.errors import LayoutError

__all__ = ["Fragment", "Layout", "ParamSpec", "Slot", "plan_layout", "range_to_boxes"]

DEFAULT_ALIGN = 64  # elements; see docs/design/0003-alignment.md


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """What the layout must know about one parameter; not the tensor itself.

    Attributes:
        name: fully qualified name, unique in the model.
        shape: shape of the (local) tensor.
        dtype: storage dtype.
        requires_grad: whether it trains.
        atom: number of elements that no slice boundary may cut (a quantization block); 1 cuts anywhere.
        aliases: other names of the same parameter (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    atom: int = 1
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The range ``[start, stop)`` of one parameter in the flat index space, in elements."""

    index: int
    param: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        """First element after the parameter."""
        return self.start + self.param.numel


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """The part of one parameter that lies in one range of the flat index space.

    ``flat_start`` counts from the start of the whole flat space, ``param_start`` from the first element of the
    parameter in row-major order; both parts are ``numel`` elements long.
    """

    slot: Slot
    flat_start: int
    param_start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Slots in one flat index space of ``numel = num_ranks * shard_numel`` elements.

    ``shard_numel`` is the length of the finest slice: what one of ``num_ranks`` ranks owns when the state is split
    over every data-parallel axis. It exists at every stage, because norms and sums are taken slice by slice.
    """

    slots: tuple[Slot, ...]
    num_ranks: int
    shard_numel: int
    align: int

    @property
    def numel(self) -> int:
        """Length of the flat space, padding included."""
        return self.num_ranks * self.shard_numel

    @property
    def used_numel(self) -> int:
        """Number of elements that belong to parameters."""
        return sum(slot.param.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.numel - self.used_numel

    def fragments(self, start: int, stop: int) -> Iterator[Fragment]:
        """Yield the non-empty parts of parameters inside ``[start, stop)``, in flat order."""
        for slot in self.slots:
            first, last = max(slot.start, start), min(slot.stop, stop)
            if first < last:
                yield Fragment(slot=slot, flat_start=first, param_start=first - slot.start, numel=last - first)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges ``[start, stop)`` of padding, in flat order."""
        gaps, position = [], 0
        for slot in self.slots:
            if slot.start > position:
                gaps.append((position, slot.start))
            position = max(position, slot.stop)
        if position < self.numel:
            gaps.append((position, self.numel))
        return tuple(gaps)

    @cached_property
    def digest(self) -> str:
        """Hash of everything two ranks must agree on: names, shapes, dtypes, places, slice length."""
        text = repr((self.num_ranks, self.shard_numel, self.align, self.slots))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_layout(params: Sequence[ParamSpec], num_ranks: int, *, align: int = DEFAULT_ALIGN) -> Layout:
    """Pack parameters into one flat index space cut into equal slices.

    Slots keep the given order. Slots and slices start at multiples of ``align`` and of every atom, so no slice
    boundary falls inside an atom.

    Args:
        params: in definition order, identical on every rank, all of one atom.
        num_ranks: number of ranks over all data-parallel axes, at every stage.
        align: in elements; 1 packs without gaps and reproduces published counts, at the price of fused optimizers
            rounding differently from stage to stage.

    Returns:
        A layout with ``numel == num_ranks * shard_numel``.

    Raises:
        LayoutError: a number is not positive, two parameters share a name, or atoms differ.

    Source: ZeRO, arXiv:1910.02054, section 5 (the partition P_p); atoms after veScale-FSDP, arXiv:2602.22437.
    """
    if num_ranks < 1 or align < 1:
        raise LayoutError(f"a layout needs num_ranks >= 1 and align >= 1, got {num_ranks} and {align}")
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise LayoutError(f"parameter names must be unique, these occur twice: {twice}")
    atoms = {param.atom for param in params} or {1}
    if len(atoms) > 1:
        raise LayoutError(
            f"one layout holds parameters of one atom, got atoms {sorted(atoms)}: use one bucket per atom"
        )
    atom = atoms.pop()
    if atom < 1:
        raise LayoutError(f"an atom is a number of elements >= 1, got {atom}")
    step = math.lcm(align, atom)
    slots, position = [], 0
    for index, param in enumerate(params):
        slots.append(Slot(index=index, param=param, start=position))
        position = _round_up(position + param.numel, step)
    end = slots[-1].stop if slots else 0
    return Layout(
        slots=tuple(slots),
        num_ranks=num_ranks,
        shard_numel=_round_up(-(-end // num_ranks), step),
        align=align,
    )


Box = tuple[tuple[int, ...], tuple[int, ...]]


def range_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cover the flat row-major range ``[start, stop)`` of a tensor with disjoint boxes, in flat order.

    Returns:
        Pairs ``(offset, size)``, one number per dimension each; at most ``2 * ndim - 1`` of them.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows [first, last) are whole
    if first > last:
        return _row_boxes(shape, last, start - last * inner, stop - last * inner)
    boxes = _row_boxes(shape, first - 1, start - (first - 1) * inner, inner) if start < first * inner else []
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last * inner < stop:
        boxes += _row_boxes(shape, last, 0, stop - last * inner)
    return boxes


def _row_boxes(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [((row, *offset), (1, *size)) for offset, size in range_to_boxes(shape[1:], start, stop)]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
