"""What DeepSpeed's optimizer keeps at stages 1, 2 and 3, by the name of the parameter, from the parts of all ranks.

At stages 1 and 2 a group is one long vector, cut into one part per rank; at stage 3 each parameter is cut by itself,
the last part padded, and a group is one or more such vectors. ``deepspeed_other.py`` has the other layouts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.checkpoint.doors.deepspeed_files import FragmentAddress
from shardwise.checkpoint.doors.deepspeed_folder import DeepSpeedFiles, mapping_in
from shardwise.checkpoint.doors.incoming import shown
from shardwise.errors import CheckpointError

__all__ = ["Held", "HeldGroup", "HeldOptimizer", "groups_of", "list_in", "read_shards", "shape_tables", "states_of"]


@dataclass(kw_only=True)
class Held:
    """What is kept of one parameter; tensors as flat pieces that follow each other.

    Attributes:
        master: what the optimizer updates; empty if that is the model's own tensor.
        states: element-wise, by name.
        scalars: one value each, by name.
    """

    shape: tuple[int, ...]
    master: list[Tensor]
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HeldGroup:
    """A group of the optimizer."""

    params: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HeldOptimizer:
    """All that is kept; ``problem`` says why nothing could be taken over, if so."""

    params: Mapping[str, Held]
    groups: Sequence[HeldGroup]
    problem: str = ""


def read_shards(files: DeepSpeedFiles) -> HeldOptimizer:
    """Bring together what belongs to each parameter.

    Raises:
        CheckpointError: parts are missing, or are not of the lengths that the shapes say.
    """
    where, first = str(files.path), files.optim[0]
    is_3 = first.get("zero_stage", 1) == 3
    tables = shape_tables(files)
    vectors_key = "fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"
    masters = [list_in(state, vectors_key, where) for state in files.optim]
    inner = [state.get("optimizer_state_dict" if is_3 else "base_optimizer_state") for state in files.optim]
    if any(isinstance(state, list) for state in inner):
        raise CheckpointError(f"{where}: was saved with elastic_checkpoint, which is not read")
    states = [states_of(state, where) for state in inner]
    lengths = {len(flats) for flats in masters}
    if lengths != {len(tables)}:
        raise CheckpointError(f"{where}: has {len(tables)} tables of shapes for {sorted(lengths)} vectors")
    params: dict[str, Held] = {}
    for number, table in enumerate(tables):
        gaps = [0] * len(table) if is_3 else _gaps(first, number, len(table), where)
        cut = _Cut(table, gaps, len(files.optim), by_param=is_3, where=f"{where}: group {number}")
        of_ranks = [state.get(number, {}) for state in states]
        vectors: dict[str, list[Any]] = {"": [flats[number] for flats in masters]}
        scalars: dict[str, Any] = {}
        for key in of_ranks[0]:
            found = [state.get(key) for state in of_ranks]
            if isinstance(found[0], Tensor) and found[0].dim():
                vectors[str(key)] = found
            else:
                scalars[str(key)] = found[0]
        if not is_3:
            cut.check_addresses([state.get("param_slice_mappings") for state in files.optim], number, masters)
        pieces = {key: cut.pieces(key or "the parameters", parts) for key, parts in vectors.items()}
        for name, shape in table.items():
            own = {key: found[name] for key, found in pieces.items()}
            params[name] = Held(shape=shape, master=own.pop(""), states=own, scalars=dict(scalars))
    return HeldOptimizer(params=params, groups=groups_of(inner[0], [tuple(table) for table in tables], where))


def shape_tables(files: DeepSpeedFiles) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by name, one table per vector, checked.

    Raises:
        CheckpointError: they are malformed, or a parameter is in two tables.
    """
    where = f"{files.path}: param_shapes"
    tables = []
    for given in list_in(files.model[0], "param_shapes", str(files.path)):
        table = mapping_in(given, where)
        for name, shape in table.items():
            if not isinstance(shape, tuple | list) or any(type(n) is not int or n < 0 for n in shape):
                raise CheckpointError(f"{where}: the shape of {name[:200]} is malformed")
        tables.append({name: tuple(shape) for name, shape in table.items()})
    _refuse_twice([name for table in tables for name in table], where)
    return tables


def groups_of(top: Any, names: Sequence[tuple[str, ...]], where: str) -> list[HeldGroup]:
    """Return the groups of an optimizer, whose parameters are numbers of what ``names`` lists.

    Raises:
        CheckpointError: they are malformed.
    """
    found = []
    for group in list_in(top, "param_groups", where):
        numbers = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < len(names) for n in numbers):
            raise CheckpointError(f"{where}: a group of the optimizer has no parameters that are there")
        found.append(HeldGroup(params=tuple(name for n in numbers for name in names[n]), options=group))
    _refuse_twice([name for group in found for name in group.params], f"{where}: groups of the optimizer")
    return found


def states_of(top: Any, where: str) -> Mapping[int, Mapping[str, Any]]:
    """Return the state of an optimizer by the numbers of its parameters.

    Raises:
        CheckpointError: there is none.
    """
    found = top.get("state") if isinstance(top, Mapping) else None
    if not isinstance(found, Mapping) or not all(isinstance(state, Mapping) for state in found.values()):
        raise CheckpointError(f"{where}: has no state of an optimizer where a DeepSpeed checkpoint has it")
    return found


def list_in(top: Any, key: str, where: str) -> list[Any]:
    """Return a list that must be there.

    Raises:
        CheckpointError: it is not.
    """
    found = top.get(key) if isinstance(top, Mapping) else None
    if not isinstance(found, list | tuple):
        raise CheckpointError(f"{where}: has no list {key!r} where a DeepSpeed checkpoint has it")
    return list(found)


class _Cut:
    """How the parameters of a group lie in the vectors of the ranks.

    Args:
        table: shapes by name, in the order of the vector.
        gaps: elements that nobody uses behind each parameter.
        num_ranks: number of vectors.
        by_param: whether each parameter is cut by itself.
        where: for messages.
    """

    def __init__(
        self, table: Mapping[str, tuple[int, ...]], gaps: Sequence[int], num_ranks: int, *, by_param: bool, where: str
    ) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        self._num_ranks = num_ranks
        self._by_param = by_param
        self._where = where
        position = 0
        for (name, shape), gap in zip(table.items(), gaps, strict=True):
            numel = math.prod(shape)
            self._spans[name] = (position, numel)
            position += (-(-numel // num_ranks) if by_param else numel) + gap

    def pieces(self, what: str, parts: Sequence[Any]) -> dict[str, list[Tensor]]:
        """Return the pieces of each parameter.

        Raises:
            CheckpointError: the vectors are no vectors, or too short.
        """
        for rank, part in enumerate(parts):
            if not isinstance(part, Tensor) or part.dim() != 1 or part.dtype != parts[0].dtype:
                raise CheckpointError(f"{self._where}: {what} of rank {rank} is no vector of one value per element")
        if not self._by_param and len({part.numel() for part in parts[:-1]}) > 1:
            raise CheckpointError(f"{self._where}: {what}: the parts of the ranks are not equally long")
        found: dict[str, list[Tensor]] = {}
        for name, (start, numel) in self._spans.items():
            if self._by_param:
                ranges = self._ranges_by_param(start, numel)
            else:
                ranges = self._ranges(start, numel, len(parts[0]))
            found[name] = [parts[rank][first:last] for rank, first, last in ranges if rank < len(parts)]
            there = sum(piece.numel() for piece in found[name])
            if there != numel:
                raise CheckpointError(f"{self._where}: {what}: {there} of the {numel} elements of {name} are there")
        return found

    def check_addresses(self, told: Sequence[Any], number: int, masters: Sequence[Sequence[Any]]) -> None:
        """Check that each rank has the parts of parameters that its file says it has, where the files say so.

        Raises:
            CheckpointError: the files contradict the shapes.
        """
        length = len(masters[0][number])
        for rank, tables in enumerate(told):
            if not isinstance(tables, list) or number >= len(tables) or not isinstance(tables[number], Mapping):
                continue
            for name, address in tables[number].items():
                given = vars(address) if isinstance(address, FragmentAddress) else {}
                start, numel = self._spans.get(name, (0, -1))
                own = [(first, last - first) for at, first, last in self._ranges(start, numel, length) if at == rank]
                if (given.get("start"), given.get("numel")) not in own:
                    raise CheckpointError(
                        f"{self._where}: rank {rank} says that its part of {str(name)[:200]} lies at "
                        f"{given.get('start')}, {given.get('numel')} elements; by the shapes it does not"
                    )

    def _ranges(self, start: int, numel: int, length: int) -> list[tuple[int, int, int]]:
        """Return rank, first and last of each piece of a run of elements, in parts of equal length."""
        ranges, position = [], start
        while position < start + numel and position < length * self._num_ranks:
            rank = position // length
            last = min(start + numel, (rank + 1) * length)
            ranges.append((rank, position - rank * length, last - rank * length))
            position = last
        return ranges

    def _ranges_by_param(self, start: int, numel: int) -> list[tuple[int, int, int]]:
        """Return rank, first and last of each piece of a parameter that is cut by itself."""
        length = -(-numel // self._num_ranks)
        own = [min(length, max(0, numel - rank * length)) for rank in range(self._num_ranks)]
        return [(rank, start, start + count) for rank, count in enumerate(own) if count]


def _gaps(state: Mapping[str, Any], number: int, count: int, where: str) -> list[int]:
    """Return the padding behind each parameter of a group; older versions have none."""
    table = state.get("param_alignment_paddings")
    if table is None:
        return [0] * count
    gaps = table[number] if isinstance(table, list) and number < len(table) else None
    if not isinstance(gaps, list) or len(gaps) != count or any(type(n) is not int or n < 0 for n in gaps):
        raise CheckpointError(f"{where}: param_alignment_paddings of group {number} is malformed")
    return list(gaps)


def _refuse_twice(names: Sequence[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CheckpointError(f"{where}: {shown(twice)} is there twice")
