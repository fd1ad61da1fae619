"""Names for random states that nobody has computed yet.

[Note: markers] While a constructor is recorded nothing is drawn, so a generator cannot tell by itself that something
was, or that its user seeded it anew. After each recorded draw it is therefore given a *marker*: its own state with a
magic number and a count in the middle. A generator that holds a marker holds the state of that marker's node, also if
the user saved the marker and brought it back (``fork_rng``). Any other state was set by the user and is known.

A marker has 623 numbers left before the twister replaces its words, so a few draws that no recording sees (of another
thread) leave the words as they are and move the place in them, which is noticed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import ConfigError, StateError
from shardwise.initial.tape import Node

__all__ = ["GeneratorStates", "Seen"]

_MAGIC = (0x5A4E0D15, 0x3C0FFEE5, 0x19283746)
_NUM_WORDS = 624
_WORDS = slice(24, 24 + 8 * _NUM_WORDS)  # of the Mersenne twister: a long each, of which 32 bits count
_PLACE = slice(24 + 8 * 300, 24 + 8 * 304)  # four of them
_LEFT = slice(8, 12)  # an int: draws until the words are replaced
_NEXT = slice(16, 24)  # a long: the word that is drawn next
_DRAWN = (
    "deferred_init(): a random generator was drawn from where the recording sees nothing, in another thread: build the "
    "whole model in the thread of the context, and let other threads use generators of their own"
)


@dataclass(frozen=True, eq=False)
class Seen:
    """A generator after a recording.

    Attributes:
        last: the state in which ordinary construction would have left it.
        held: the state it was given at the end of the recording.
    """

    generator: torch.Generator
    last: Node
    held: Tensor

    def untouched(self) -> bool:
        """Whether nobody used or seeded the generator since."""
        return torch.equal(self.generator.get_state(), self.held)


class GeneratorStates:
    """The generators of one recording, and the nodes of their states."""

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}
        self._nodes: list[tuple[Tensor, Node]] = []  # markers, by count
        self._roots: list[Node] = []

    def node(self, generator: torch.Generator) -> Node:
        """Return the node of the state a generator is in."""
        self._generators[id(generator)] = generator
        state = generator.get_state()
        words = _words(state)
        if tuple(words[:3]) != _MAGIC:
            return self._root(state)
        count = words[3]
        if self._is_drawn(state, count):
            raise ConfigError(_DRAWN)
        if count >= len(self._nodes) or not torch.equal(self._nodes[count][0], state):
            raise StateError(
                "a random generator is recorded by another deferred_init() at this moment, in this or another thread, "
                "or was copied out of one: record one after the other"
            )
        return self._nodes[count][1]

    def advance(self, generator: torch.Generator, node: Node) -> None:
        """Let the generator be in the state of a node: give it a new marker."""
        state = generator.get_state()
        marker = torch.tensor([*_MAGIC, len(self._nodes)], dtype=torch.int64)
        state[_PLACE] = marker.view(torch.uint8)
        state[_LEFT] = torch.tensor([_NUM_WORDS], dtype=torch.int32).view(torch.uint8)
        state[_NEXT] = 0
        generator.set_state(state)
        if not torch.equal(generator.get_state(), state):
            raise ConfigError("this build of torch keeps random states in a form that deferred_init() does not know")
        self._nodes.append((state, node))

    def roots(self) -> list[Node]:
        """Return the known states from which the recording drew, in the order in which they were met."""
        return list(self._roots)

    def leave(self) -> list[Seen]:
        """Take the markers out of all generators: each goes back to the known state it started from.

        A generator that somebody else records now is left to them.

        Raises:
            ConfigError: a generator was drawn from unseen; raised when all went back.
        """
        seen = []
        problem = ""
        for generator in self._generators.values():
            try:
                node = self.node(generator)
            except StateError:
                continue
            except ConfigError as error:
                problem = str(error)
                node = self._nodes[_words(generator.get_state())[3]][1]
            known = node.root.state
            assert known is not None
            generator.set_state(known)
            seen.append(Seen(generator, node, known))
        if problem:
            raise ConfigError(problem)
        return seen

    def _is_drawn(self, state: Tensor, count: int) -> bool:
        """Whether a state is a marker of this recording, from which somebody drew."""
        if count >= len(self._nodes):
            return False
        marker = self._nodes[count][0]
        return torch.equal(marker[_WORDS], state[_WORDS]) and not torch.equal(marker, state)

    def _root(self, state: Tensor) -> Node:
        for root in reversed(self._roots):
            if root.state is not None and torch.equal(root.state, state):
                return root
        self._roots.append(Node(state=state))
        return self._roots[-1]


def _words(state: Tensor) -> list[int]:
    if state.numel() < _PLACE.stop:
        raise ConfigError("only generators of the CPU can be recorded: draw on the CPU, then move the model")
    return state[_PLACE].view(torch.int64).tolist()
