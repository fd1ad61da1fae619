"""A save that goes on while training does: in a thread, without collectives.

It reads the live state until that is about to change; what is not written then is copied (``blocks.Held``).

The thread meets those of the other ranks through the council of its own. While a save is pending, every optimizer
step asks all ranks how it stands, so an error reaches the same step everywhere.
"""

import atexit
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.checkpoint.blocks import Held
from shardwise.checkpoint.manifest import WHOLE_COPIES
from shardwise.checkpoint.save import SaveJob, describe
from shardwise.comm.council import Council, round_seconds
from shardwise.errors import CheckpointError
from shardwise.managed import Managed

__all__ = ["PendingSave"]

_WRITE_SECONDS = 3600.0  # how long the threads of the ranks wait for the slowest disk
_ASK_SECONDS = 1.0
_RUNNING, _DONE, _FAILED = 0, 1, 2


class PendingSave:
    """A save in the background."""

    def __init__(self, managed: Managed, job: SaveJob) -> None:
        self._managed = managed
        self._held = [Held(part.flat) for part in job.contents.parts]
        parts = [replace(part, held=held) for part, held in zip(job.contents.parts, self._held, strict=True)]
        self._job = replace(job, contents=replace(job.contents, parts=tuple(parts)))
        for part, held in zip(parts, self._held, strict=True):
            if part.stored.kind in WHOLE_COPIES:  # a forward may change buffers
                held.secure()
        self._problem = ""
        self._reported = False
        council = Council(managed.mesh, f"save-{job.save_id}")
        self._exchange = lambda what, text: council.round(f"save_checkpoint: {what}", text, seconds=_WRITE_SECONDS)
        self._thread = threading.Thread(target=self._run, name=f"save {job.options.tag}", daemon=True)
        managed.pending_save = self
        managed.runtime.before_change.append(self._secure)
        managed.before_step.append(self._ask)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self._job.options.target

    def is_done(self) -> bool:
        """Whether this rank's part is over, well or not. No collective."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the save is over on all ranks. Collective.

        Raises:
            CheckpointError: it failed, on any rank; the same on all.
        """
        while not self._reported:
            self._thread.join(_ASK_SECONDS)  # the question is a collective, which notices a rank that died
            self._ask()
        return self.path

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._job.run(self._exchange)
        except BaseException as error:
            self._problem = describe(error) or type(error).__name__

    def _secure(self) -> None:
        """The state is about to change: copy what is not written yet."""
        for held in self._held:
            held.secure()

    def _ask(self) -> None:
        """Learn from all ranks how the save stands; forget it when it is over."""
        status = _RUNNING if self._thread.is_alive() else _FAILED if self._problem else _DONE
        agreement = self._managed.settler.agreement
        rows = agreement.words(torch.tensor([status], dtype=torch.int64), "a save in the background").view(-1).tolist()
        if _FAILED not in rows and _RUNNING in rows:
            return
        self._forget()
        if _FAILED in rows:
            said = agreement.texts(self._problem, "why a save failed")
            raise CheckpointError(next(text for text in said if text))

    def _forget(self) -> None:
        self._reported = True
        self._managed.pending_save = None
        self._managed.runtime.before_change.remove(self._secure)
        self._managed.before_step.remove(self._ask)
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Let a process that ends well finish its save; one that failed does not wait for its peers."""
        if getattr(sys, "last_value", None) is None:
            self._thread.join(round_seconds())
            if self._problem:
                warnings.warn(self._problem, stacklevel=1)
