"""What each rank says before it goes down, so that the error of a peer can name the cause and not only the symptom.

Owns ``Board``, which needs a key-value store that the ranks share and nothing else of a network, and ``abort_mesh``
for whoever catches an error between two collectives. Read ``process_group.py`` for when a board is used.
"""

import time
from datetime import timedelta
from typing import Protocol, runtime_checkable

from shardwise.comm.base import Mesh

__all__ = ["Abortable", "Board", "Store", "abort_mesh"]

_CALL_SECONDS = 1.0  # a store whose host is gone must not keep an error from being raised


@runtime_checkable
class Abortable(Protocol):
    """A communicator that can wake its peers."""

    def abort(self, error: BaseException) -> None:
        """Tell the peers that this rank failed with ``error``, and wake those that wait for it."""


def abort_mesh(mesh: Mesh, error: BaseException) -> None:
    """Tell the peers on every axis that this rank failed; nothing can be sent over the mesh afterwards."""
    for comm in mesh.values():
        if isinstance(comm, Abortable):
            comm.abort(error)


class Store(Protocol):
    """The part of torch's stores that is used."""

    @property
    def timeout(self) -> timedelta:
        """How long one call may take."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Change it."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value, waiting for it."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read several values."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class Board:
    """What the ranks of one axis tell each other beside their collectives: announcements, and last words.

    Last words are best effort: neither ``write`` nor ``read`` raises because the store is gone too.
    """

    def __init__(self, store: Store, axis: str, rank: int, size: int) -> None:
        self._store = store
        self._axis = axis
        self._keys = {peer: f"shardwise/{axis}/event/{peer}" for peer in range(size)}
        self._rank = rank

    def write(self, words: str) -> None:
        """Leave this rank's last words."""
        before = self._store.timeout
        try:
            self._store.set_timeout(timedelta(seconds=_CALL_SECONDS))
            self._store.set(self._keys[self._rank], words)
            self._store.set_timeout(before)
        except RuntimeError:
            return

    def read(self, limit_seconds: float) -> str:
        """Collect the others' last words in one sentence, waiting a little for those that come late."""
        words: dict[int, str] = {}
        peers = [peer for peer in self._keys if peer != self._rank]
        deadline = time.monotonic() + limit_seconds
        before = self._store.timeout
        try:
            self._store.set_timeout(timedelta(seconds=_CALL_SECONDS))
            while len(words) < len(peers):
                for peer in peers:
                    if peer not in words and self._store.check([self._keys[peer]]):
                        words[peer] = self._store.get(self._keys[peer]).decode(errors="replace")
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
            self._store.set_timeout(before)
        except RuntimeError:
            pass
        silent = "did not answer (it was killed, or it is busy elsewhere)"
        return "; ".join(f"rank {peer} {words.get(peer, silent)}" for peer in peers)

    def announce(self, topic: str, text: str) -> None:
        """Leave a text under a topic."""
        self._store.set(self._place(topic, self._rank), text)

    def announced(self, topic: str, seconds: float) -> dict[int, str]:
        """Return the texts of a topic by rank: at once if all are there, else what came in time."""
        places = {rank: self._place(topic, rank) for rank in self._keys}
        deadline, pause = time.monotonic() + seconds, 0.001
        while not self._store.check([*places.values()]):  # one question for all ranks: there may be thousands
            if time.monotonic() >= deadline:
                places = {rank: place for rank, place in places.items() if self._store.check([place])}
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        texts = self._store.multi_get([*places.values()]) if places else []
        return {rank: text.decode() for rank, text in zip(places, texts, strict=True)}

    def forget(self, topic: str) -> None:
        """Take this rank's text away."""
        self._store.delete_key(self._place(topic, self._rank))

    def _place(self, topic: str, rank: int) -> str:
        return f"shardwise/{self._axis}/said/{topic}/{rank}"
