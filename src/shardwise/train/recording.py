"""What a run records of its memory: a timeline of its first updates, and planned beside measured at the end."""

import contextlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.config.model import TrainConfig
from shardwise.trace.calls import timeline
from shardwise.train.output import SUMMARY

__all__ = ["Recording", "memory_of_before"]


class Recording(contextlib.ExitStack):
    """The timeline of the first updates of a process, if the settings ask for it; a context around them.

    Args:
        model: the sharded model.
        folder: of the run.
        options: settings of the run.
    """

    def __init__(self, model: nn.Module, folder: Path, options: TrainConfig) -> None:
        super().__init__()
        self._num_left = options.timeline_steps
        if self._num_left:
            self.enter_context(timeline(model, folder, activations=options.timeline_activations))

    def step_done(self) -> None:
        """An update is over; after the last one that is asked for the files are written."""
        self._num_left -= 1
        if self._num_left == 0:
            self.close()


def memory_of_before(folder: Path) -> Any:
    """Return what the summary in a run's folder says about memory, for a run that had nothing left to do."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8")).get("memory")
    return None
