"""The order of collectives as one rolling number, so that ranks that diverge notice before they update.

Each verb adds its event. The digest travels with the step's record (``runtime/record.py``); when ranks differ there,
the last events of each are compared to name the first difference.
"""

from collections import deque

import xxhash

__all__ = ["Journal"]

KEPT_EVENTS = 64
_MASK = (1 << 63) - 1  # fits a signed 64-bit element of the record
_PRIME = 0x100000001B3


class Journal:
    """What this rank gathered and reduced, in order."""

    def __init__(self) -> None:
        self.digest = 0
        self.num_events = 0
        self.recent: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._codes: dict[str, int] = {}

    def add(self, event: str) -> None:
        """Append an event such as ``gathered layers.3``."""
        code = self._codes.get(event)
        if code is None:
            code = self._codes[event] = xxhash.xxh64_intdigest(event.encode())
        self.digest = ((self.digest * _PRIME) ^ code) & _MASK
        self.num_events += 1
        self.recent.append(event)
