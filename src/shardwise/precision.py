"""Dtypes of each state, and the rule for the loss scale. Pure; read ``runtime/bucket.py`` for their use."""

from dataclasses import dataclass

import torch

from shardwise.errors import ConfigError

__all__ = ["LossScale", "Precision"]


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Loss scale for fp16: halve on overflow, double after ``growth_interval`` clean steps; or one that is fixed.

    Attributes:
        initial: first scale; a power of two, so that scaling is exact.
        minimum: the scale never falls below; a further overflow there raises.
        growth_interval: number of steps without overflow before the scale doubles.
        hysteresis: number of overflows to bear before the scale is halved.
        consecutive_hysteresis: a step without overflow restores the full hysteresis, not only growth does.
        fixed: a scale that never changes, in place of all the others; overflows only skip their step. None: dynamic.

    Source: Micikevicius et al., arXiv:1710.03740, section 3.2.
    """

    initial: float = 65536.0
    minimum: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    fixed: float | None = None

    def __post_init__(self) -> None:
        if self.fixed is not None and not 0 < self.fixed < float("inf"):
            raise ConfigError(f"loss scale: fixed must be a finite number above 0, got {self.fixed!r}")
        if not 0 < self.minimum <= self.initial or self.growth_interval < 1 or self.hysteresis < 1:
            raise ConfigError(f"loss scale: need 0 < minimum <= initial, growth_interval and hysteresis >= 1: {self}")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of parameters, of sums between ranks, of accumulated gradients and of masters.

    ``None`` stands for a default that depends on the dtype of each parameter.

    Attributes:
        param: cast floating-point parameters to it; None leaves each as it is.
        wire: dtype in which gradients travel between ranks; None: the parameter's.
        sum: dtype in which ranks' gradients are added; None: fp64 for fp64, else fp32.
        accumulate: dtype in which gradients rest and grow over micro-batches; None: fp32 for 16-bit parameters,
            else the parameter's.
        master: dtype the optimizer updates; None: fp32 for 16-bit parameters, else the parameter's, in which case
            parameter and master are the same memory.
        loss_scale: used when a trainable parameter is fp16; None switches scaling off.
    """

    param: torch.dtype | None = None
    wire: torch.dtype | None = None
    sum: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    master: torch.dtype | None = None
    loss_scale: LossScale | None = LossScale()

    def __post_init__(self) -> None:
        for field in ("param", "wire", "sum", "accumulate", "master"):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(f"precision: {field} must be a floating-point torch dtype, got {dtype!r}")

    def of(self, dtype: torch.dtype) -> "StateDtypes":
        """Return the dtypes of each state for a parameter stored as ``dtype``."""
        wide = torch.float32 if dtype.itemsize <= 2 else dtype
        return StateDtypes(
            param=dtype,
            wire=self.wire or dtype,
            sum=self.sum or (torch.float64 if dtype == torch.float64 else torch.float32),
            accumulate=self.accumulate or wide,
            master=self.master or wide,
        )


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """The dtypes of one bucket; see ``Precision`` for each field."""

    param: torch.dtype
    wire: torch.dtype
    sum: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
