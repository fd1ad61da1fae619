"""Dtypes of each state, and the settings that are refused."""

import dataclasses

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.precision import LossScale, Precision, StateDtypes

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (BF16, StateDtypes(param=BF16, wire=BF16, sum=F32, accumulate=F32, master=F32)),
        (F16, StateDtypes(param=F16, wire=F16, sum=F32, accumulate=F32, master=F32)),
        (F32, StateDtypes(param=F32, wire=F32, sum=F32, accumulate=F32, master=F32)),
        (F64, StateDtypes(param=F64, wire=F64, sum=F64, accumulate=F64, master=F64)),
    ],
)
def test_defaults_follow_the_dtype_of_the_parameter(dtype: torch.dtype, expected: StateDtypes) -> None:
    assert Precision().of(dtype) == expected


@pytest.mark.parametrize("field", ["wire", "sum", "accumulate", "master"])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_each_state_can_be_chosen_alone(field: str, dtype: torch.dtype) -> None:
    chosen = F16  # no default of any dtype above
    expected = dataclasses.replace(Precision().of(dtype), **{field: chosen})
    assert expected != Precision().of(dtype)
    assert Precision(**{field: chosen}).of(dtype) == expected


@pytest.mark.parametrize("field", ["param", "wire", "sum", "accumulate", "master"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "bfloat16", float])
def test_dtype_that_is_not_floating_is_refused(field: str, dtype: object) -> None:
    with pytest.raises(ConfigError, match=f"precision: {field} must be a floating-point torch dtype, got"):
        Precision(**{field: dtype})


def test_loss_scale_has_the_usual_defaults() -> None:
    assert Precision().loss_scale == LossScale(initial=65536.0, minimum=1.0, growth_interval=1000, hysteresis=2)
    assert Precision(loss_scale=None).loss_scale is None


@pytest.mark.parametrize(
    "settings",
    [
        {"minimum": 0.0},
        {"minimum": -1.0},
        {"initial": 1.0, "minimum": 2.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"initial": float("nan")},
    ],
)
def test_impossible_loss_scale_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="loss scale: need 0 < minimum <= initial"):
        LossScale(**settings)
