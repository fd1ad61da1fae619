"""Rounds of texts between all ranks of a mesh, beside its collectives: who came, what each has to say.

A round waits a bounded time and then names the ranks that did not come; the network stays usable. It runs in any
thread, so a save in the background has a council of its own. Read ``board.py`` for where the texts lie.
"""

import json

from shardwise.comm.base import Mesh, flat_rank, num_ranks
from shardwise.environment import read_variables
from shardwise.errors import ConfigError, RankMismatchError

__all__ = ["Council", "round_seconds"]

VARIABLE = "SHARDWISE_ROLL_CALL_SECONDS"
DEFAULT_SECONDS = 300.0
_GRACE_SECONDS = 5.0  # the ranks of an outer axis wait for those that wait on an inner one


def round_seconds() -> float:
    """Return how long a collective call waits for ranks that have not made it.

    Raises:
        ConfigError: the environment names no positive number.
    """
    text = read_variables((VARIABLE,)).get(VARIABLE)
    if text is None:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{VARIABLE} must be a positive number of seconds, got {text!r}")
    return seconds


class Council:
    """The rounds of one purpose, numbered; all ranks hold them in the same order.

    Args:
        mesh: the ranks.
        name: tells the rounds of different councils on one mesh apart; the same on all ranks.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._mesh = mesh
        self._name = name
        self._number = 0
        self.rank = flat_rank(mesh)
        self.size = num_ranks(mesh)

    def round(self, call: str, text: str = "", *, seconds: float | None = None) -> list[str]:
        """Return every rank's text, in the order of the ranks in the mesh.

        Args:
            call: what the caller does, for messages; must be the same on all ranks.
            text: of this rank.
            seconds: how long to wait; None: ``round_seconds()``.

        Raises:
            RankMismatchError: names the ranks that did not come in time, or that called something else.
        """
        wait = round_seconds() if seconds is None else seconds
        topic = f"{self._name}/{self._number}"
        self._number += 1
        known = {str(self.rank): [call, text]}
        for depth, comm in enumerate(reversed(list(self._mesh.values()))):
            comm.announce(topic, json.dumps(known))
            for said in comm.announced(topic, wait + depth * _GRACE_SECONDS).values():
                known |= json.loads(said)
        if len(known) == 1:  # fake ranks, and one alone
            known = {str(rank): [call, text] for rank in range(self.size)} if self._is_fake(topic) else known
        self._check(call, known, wait)
        if self._number > 1:
            for comm in self._mesh.values():
                comm.forget(f"{self._name}/{self._number - 2}")  # who comes to this round has read the last one
        return [known[str(rank)][1] for rank in range(self.size)]

    def _is_fake(self, topic: str) -> bool:
        return all(len(comm.announced(topic, 0.0)) == comm.size for comm in self._mesh.values())

    def _check(self, call: str, known: dict[str, list[str]], wait: float) -> None:
        missing = [rank for rank in range(self.size) if str(rank) not in known]
        if missing:
            raise RankMismatchError(
                f"{call} is collective: every rank must call it, and {_ranks(missing)} did not within {wait:g} s. "
                f"Nothing was done. Call it on all ranks, not under `if rank == 0`; {VARIABLE} changes the limit"
            )
        unlike = {known[str(rank)][0]: rank for rank in reversed(range(self.size))}
        if len(unlike) > 1:
            said = ", ".join(f"rank {rank} called {name}" for name, rank in sorted(unlike.items(), key=lambda x: x[1]))
            raise RankMismatchError(f"ranks make different collective calls: {said}. Nothing was done")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
