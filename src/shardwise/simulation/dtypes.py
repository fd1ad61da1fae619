"""The dtypes that a simulation can run in, by name, and how far each may end from plain training."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from shardwise.errors import ConfigError
from shardwise.precision import LossScale, Precision
from shardwise.testing.compare import FP32, FP64, Tolerance

__all__ = ["BF16", "FP16", "PRECISIONS", "NamedPrecision", "precision_called"]

_LOSS_SCALE = 1024.0  # a power of two: scaling is exact


@dataclass(frozen=True, kw_only=True)
class NamedPrecision:
    """Dtypes under a name, and how far a run in them may end from plain training.

    Attributes:
        name: as a user writes it.
        dtypes: for ``shard``; the plain side rounds at the same places.
        tolerance: largest difference, relative to the largest element of the tensor.
    """

    name: str
    dtypes: Precision
    tolerance: Tolerance


# Both sides round at the same places and mostly agree to the bit. Where one sum is off in its last bit, a parameter may
# round to its other neighbor, and what is computed with it moves by a fraction of 2^-8 (bf16) or 2^-11 (fp16).
BF16 = Tolerance(name="bf16", relative=1e-3)
FP16 = Tolerance(name="fp16", relative=1e-4)

PRECISIONS: Mapping[str, NamedPrecision] = MappingProxyType(
    {
        "fp64": NamedPrecision(name="fp64", dtypes=Precision(param=torch.float64), tolerance=FP64),
        "fp32": NamedPrecision(name="fp32", dtypes=Precision(param=torch.float32), tolerance=FP32),
        "bf16": NamedPrecision(name="bf16", dtypes=Precision(param=torch.bfloat16), tolerance=BF16),
        "fp16": NamedPrecision(
            name="fp16",
            dtypes=Precision(param=torch.float16, loss_scale=LossScale(fixed=_LOSS_SCALE)),
            tolerance=FP16,
        ),
    }
)


def precision_called(name: str) -> NamedPrecision:
    """Return the dtypes of a name.

    Raises:
        ConfigError: there is no such name.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision: expected one of {', '.join(PRECISIONS)}, got {name!r}")
    return PRECISIONS[name]
