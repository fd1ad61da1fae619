"""What somebody who watches a runtime is told: the moments of a step, as they pass. Nobody watches by default."""

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.runtime.unit import Unit

__all__ = ["Moment", "Watch"]


class Moment(Enum):
    """A point in the iteration; those of a unit come with it."""

    ROOT_BEGINS = "a forward begins outside a backward; what an earlier one left open failed"
    FORWARD_BEGINS = "a unit's forward, or its recomputation, begins"
    FORWARD_ENDS = "it ended or failed"
    BACKWARD_BEGINS = "the first event of a backward"
    UNIT_REACHED = "the gradients of a unit's outputs arrived"
    UNIT_PASSED = "a unit's gradients, and those of its inputs, are there"
    BACKWARD_ENDS = "all reductions are done and everything is freed"
    RESET = "a failed backward was cleaned up"


Watch = Callable[[Moment, "Unit | None"], None]
