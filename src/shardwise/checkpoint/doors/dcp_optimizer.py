"""An optimizer's state as torch writes it, nested or flat, to ours: by name, one entry per key."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwise.checkpoint.contents import NOT_KEPT
from shardwise.checkpoint.doors.dcp_metadata import DcpFacts
from shardwise.checkpoint.doors.dcp_names import Note
from shardwise.checkpoint.doors.incoming import Incoming, facts_of, plain_or_refuse, shown
from shardwise.checkpoint.manifest import Group, OptimizerFacts
from shardwise.checkpoint.plain import Plain
from shardwise.errors import CheckpointError

__all__ = ["ReadOptimizer"]

_STEP = "step"
_ONE_VALUE = frozenset({_STEP, "mu_product", "eta", "mu"})  # of torch's optimizers, whatever the parameter's shape
_MOST_STEPS = 1 << 53
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})


class ReadOptimizer:
    """Collects one entry after the other.

    Args:
        incoming: the checkpoint in the making, with its parameters.
        tensor: reads a tensor by its key.
        value: reads what is no tensor.
        facts: which keys there are.
    """

    def __init__(
        self, incoming: Incoming, tensor: Callable[[str], Tensor], value: Callable[[str], Any], facts: DcpFacts
    ) -> None:
        self._incoming = incoming
        self._tensor = tensor
        self._value = value
        self._facts = facts
        self._scalars: dict[str, dict[str, Plain]] = {}
        self._states: set[str] = set()
        self._by_number: dict[int, dict[str, Any]] = {}
        self._by_name: dict[str, dict[str, Any]] = {}
        self.num_steps = 0

    def add(self, name: str, key: str) -> None:
        """Take over the entry of a key, whose name is what follows ``optim.``.

        Raises:
            CheckpointError: it belongs to no parameter, or a checkpoint does not hold it.
        """
        section, _, rest = name.partition(".")
        if section == "state":
            self._add_state(rest, key)
        elif section == "param_groups":
            self._add_option(rest, key)
        else:
            raise CheckpointError(f"{self._incoming.source}: {key}: is neither state nor group of an optimizer")

    def finish(self, class_name: str | None, note: Note | None) -> tuple[OptimizerFacts, ...]:
        """Return the optimizers.

        Raises:
            CheckpointError: groups are incomplete, or nothing tells the class.
        """
        groups = self._groups()
        if not groups:
            if self._states or self._scalars:
                raise CheckpointError(f"{self._incoming.source}: has state of an optimizer without its groups")
            return ()
        plan = [*note.optimizers] if note else [(class_name or self._class_name(groups), len(groups))]
        if sum(count for _, count in plan) != len(groups):
            raise CheckpointError(f"{self._incoming.source}: has {len(groups)} groups, its note tells of {plan}")
        result, position = [], 0
        for number, (name, count) in enumerate(plan):
            own = groups[position : position + count]
            position += count
            params = {param for group in own for param in group.params}
            self._incoming.assign_states(params, number)
            scalars = {param: states for param, states in self._scalars.items() if param in params}
            source = str(self._incoming.source)
            facts = facts_of(OptimizerFacts, source, class_name=name, groups=tuple(own), scalars=scalars)
            result.append(facts)
        return tuple(result)

    def _add_state(self, rest: str, key: str) -> None:
        name, state = self._split(rest)
        if name is None:
            raise CheckpointError(f"{self._incoming.source}: {key}: belongs to no parameter of the model")
        self._states.add(state)
        where = f"{self._incoming.source}: {key}"
        if key in self._facts.tensors:
            tensor = self._tensor(key)
            if tensor.dim() or (state not in _ONE_VALUE and self._incoming.params[name].shape == ()):
                self._incoming.add_state(name, state, tensor)
                return
            found: Any = tensor
        else:
            found = self._value(key)
        if state == _STEP and isinstance(found, int | float | Tensor) and 0 <= found < _MOST_STEPS:
            self.num_steps = max(self.num_steps, int(found))
        self._scalars.setdefault(name, {})[state] = plain_or_refuse(found, where)

    def _add_option(self, rest: str, key: str) -> None:
        value = self._tensor(key) if key in self._facts.tensors else self._value(key)
        name, option = self._split(rest)
        path = self._facts.paths.get(key, ())
        if name is None or any(type(part) is int for part in path):
            number, _, option = rest.partition(".")
            if not (number.isascii() and number.isdigit()) or not option:
                raise CheckpointError(f"{self._incoming.source}: {key}: belongs to no group")
            self._by_number.setdefault(int(number), {})[option] = value
        else:
            self._by_name.setdefault(name, {})[option] = value

    def _groups(self) -> list[Group]:
        """Return the groups; where options stand by parameter, those with the same options form one."""
        given = [self._by_number[number] for number in sorted(self._by_number)]
        joined: dict[str, dict[str, Any]] = {}
        for name, options in self._by_name.items():
            group = joined.setdefault(repr(sorted(options.items())), dict(options) | {"params": []})
            group["params"].append(name)
        return [self._group(options) for options in (*given, *joined.values())]

    def _group(self, options: Mapping[str, Any]) -> Group:
        source, params = self._incoming.source, options.get("params")
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise CheckpointError(f"{source}: a group of the optimizer does not name its parameters")
        unknown = [name for name in params if name not in self._incoming.params]
        if unknown:
            raise CheckpointError(f"{source}: a group of the optimizer names {shown(unknown)}: not in the model")
        kept = {
            key: plain_or_refuse(value, f"{source}: option {key!r}")
            for key, value in options.items()
            if key not in NOT_KEPT
        }
        return facts_of(Group, str(source), params=tuple(params), options=kept)

    def _split(self, text: str) -> tuple[str | None, str]:
        """Split ``name.rest`` after the longest name of a parameter."""
        position = text.rfind(".")
        while position > 0:
            if text[:position] in self._incoming.params:
                return text[:position], text[position + 1 :]
            position = text.rfind(".", 0, position)
        return None, text

    def _class_name(self, groups: list[Group]) -> str:
        options = groups[0].options
        if self._states >= _MOMENTS and "decoupled_weight_decay" in options:
            return "AdamW" if options["decoupled_weight_decay"] is True else "Adam"
        if self._states <= {"momentum_buffer"} and {"momentum", "nesterov"} <= options.keys():
            return "SGD"
        raise CheckpointError(
            f"{self._incoming.source}: nothing tells the class of the optimizer, whose state is "
            f"{sorted(self._states) or 'empty'}: name it"
        )
