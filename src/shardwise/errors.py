"""One hierarchy of errors, so that a caller can catch everything this library raises on purpose.

    ShardwiseError
     +- ConfigError(ValueError)           wrong or contradictory settings
     +- LayoutError(ValueError)           parameters cannot be packed as asked
     +- StateError(RuntimeError)          a call at a time when it cannot be right
     +- RankMismatchError(RuntimeError)   ranks disagree on model, layout, order or step
     +- NonFiniteError(ArithmeticError)   an infinite or NaN gradient under on_nonfinite="raise"
     +- CheckpointError(RuntimeError)     missing, damaged or unlike checkpoint
     +- OffloadError(OSError)             file or pinned-memory failure

``OutOfMemoryError`` is torch's error too, so it is in ``memory.py``: this layer knows dtypes only.

A message says what, where (unit, parameter, rank), what was expected and found, and what to do.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "LayoutError",
    "NonFiniteError",
    "OffloadError",
    "RankMismatchError",
    "ShardwiseError",
    "StateError",
]


class ShardwiseError(Exception):
    """Base class of every error that this library raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """Settings are wrong or contradict each other."""


class LayoutError(ShardwiseError, ValueError):
    """Parameters cannot be packed into a flat index space as asked."""


class StateError(ShardwiseError, RuntimeError):
    """A call came at a time when it could not give the right answer."""


class RankMismatchError(ShardwiseError, RuntimeError):
    """Ranks disagree on the model, the layout, the order of collectives or the step."""


class NonFiniteError(ShardwiseError, ArithmeticError):
    """A gradient is infinite or NaN and ``on_nonfinite`` is ``"raise"``."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint is incomplete, damaged, or does not describe this model."""


class OffloadError(ShardwiseError, OSError):
    """Host or file storage of a resting shard failed."""
