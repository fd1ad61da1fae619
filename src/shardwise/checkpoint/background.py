"""A save that goes on while training does: in a thread, without collectives.

It reads the live state until that is about to change; what is not written then is copied (``blocks.Held``).

The thread meets those of the other ranks through the council of its own. While a save is pending, every optimizer
step asks all ranks how it stands, so an error reaches the same step everywhere. A process that ends finishes its
saves first.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
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
_FAREWELL_SECONDS = 5.0  # rank 0, which may hold the store, leaves last
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
        self._council = Council(managed.mesh, f"save-{job.save_id}")
        self._met = 0.0  # when this rank began to wait for its peers; 0: it does not
        self._thread = threading.Thread(target=self._run, name=f"save {job.options.tag}", daemon=True)
        managed.pending_save = self
        managed.runtime.before_change.append(self._secure)
        managed.before_step.append(self._ask)
        _leaving.pending.append(self)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self._job.options.target

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

    def _exchange(self, what: str, text: str) -> list[str]:
        self._met = time.monotonic()
        try:
            return self._council.round(f"save_checkpoint: {what}", text, seconds=_WRITE_SECONDS)
        finally:
            self._met = 0.0

    def _secure(self) -> None:
        """The state is about to change: copy what is not written yet, the last first, to meet the one that writes."""
        for held in reversed(self._held):
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
        _leaving.pending.remove(self)

    def finish(self) -> str:
        """Let a process that ends finish its save; return what went wrong.

        Its own part may take any time; for its peers it waits ``round_seconds()``.
        """
        begin, limit = time.monotonic(), round_seconds()
        while self._thread.is_alive():
            self._thread.join(_ASK_SECONDS)
            met = self._met
            if met and time.monotonic() - max(begin, met) > limit:
                return f"other ranks did not come within {limit:g} s"
        if not self._problem:
            self._say_farewell()
        return self._problem

    def _say_farewell(self) -> None:
        topic = f"save-{self._job.save_id}/over"
        for comm in self._managed.mesh.values():
            comm.announce(topic, "")
        if self._council.rank == 0:
            for comm in self._managed.mesh.values():
                comm.announced(topic, _FAREWELL_SECONDS)


class _Leaving:
    """What this process does about its pending saves when it ends well; one that failed waits for nobody."""

    def __init__(self) -> None:
        self.pending: list[PendingSave] = []
        self._has_failed = False
        # Not atexit: that is after executors take no more work. Executors are told in this way too, and later.
        threading._register_atexit(self._finish)  # type: ignore[attr-defined]
        atexit.register(self._exit)
        os.register_at_fork(after_in_child=self.pending.clear)

    def _finish(self) -> None:
        for each in [] if getattr(sys, "last_value", None) else list(self.pending):
            try:
                problem = each.finish()
            except BaseException as error:
                problem = describe(error) or type(error).__name__
            if problem:
                self._has_failed = True
                _tell(f"shardwise: the save in the background to {each.path} was not finished: {problem}")

    def _exit(self) -> None:
        """Turn the exit status; nothing milder can."""
        if self._has_failed:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(1)


def _tell(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


_leaving = _Leaving()
