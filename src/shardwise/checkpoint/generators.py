"""The random generators of this process: torch's, the device's, Python's and numpy's; read, checked, set."""

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.checkpoint.plain import Plain, from_plain, to_plain
from shardwise.errors import CheckpointError

__all__ = ["generator_states", "prepare_generators"]

_MERSENNE_WORDS = 624


def generator_states(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Plain]]:
    """Return the states as flat tensors by name, and what of them is no tensor."""
    version, numbers, gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "python": torch.tensor(numbers, dtype=torch.int64)}
    values: dict[str, Plain] = {"python": to_plain([version, gauss], "Python's generator")}
    own: Any = numpy.random.get_state(legacy=True)
    if own[0] == "MT19937":
        tensors["numpy"] = torch.from_numpy(own[1].astype(numpy.int64))
        values["numpy"] = to_plain([int(own[2]), int(own[3]), float(own[4])], "numpy's generator")
    if device.type != "cpu":
        tensors[device.type] = torch.get_device_module(device).get_rng_state(device)
    return tensors, values


def prepare_generators(
    tensors: Mapping[str, Tensor], values: Mapping[str, Plain], device: torch.device
) -> Callable[[], None]:
    """Check states that ``generator_states`` returned; return what sets the generators.

    Raises:
        CheckpointError: a generator would not take its state.
    """
    actions: list[Callable[[], None]] = []
    try:
        for name, tensor in tensors.items():
            actions.append(_setter(name, tensor, values, device))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the state of a random generator is malformed: {str(error)[:200]}") from None

    def act() -> None:
        for action in actions:
            action()

    return act


def _check_mersenne(state: bytes) -> None:
    """Check what torch does not: that its generator will draw from the 624 words of its state, not from beyond them."""
    left, following = int.from_bytes(state[8:12], sys.byteorder), int.from_bytes(state[16:24], sys.byteorder)
    if left + following > _MERSENNE_WORDS + 1:
        raise ValueError(f"torch's generator has {left} words left at {following}")


def _setter(name: str, tensor: Tensor, values: Mapping[str, Plain], device: torch.device) -> Callable[[], None]:
    if name == "torch":
        torch.Generator().set_state(tensor)
        _check_mersenne(tensor.numpy().tobytes())
        return lambda: torch.set_rng_state(tensor)
    if name == "python":
        version, gauss = from_plain(values["python"])
        state: Any = (version, tuple(tensor.tolist()), gauss)
        if gauss is not None and type(gauss) is not float:
            raise ValueError(f"Python's generator keeps {str(gauss)[:40]}")
        random.Random().setstate(state)
        return lambda: random.setstate(state)
    if name == "numpy":
        position, has_gauss, number = from_plain(values["numpy"])
        if not 0 <= position <= 624:
            raise ValueError(f"numpy's generator at {position}")
        legacy = ("MT19937", tensor.numpy().astype(numpy.uint32), position, has_gauss, number)
        numpy.random.RandomState().set_state(legacy)
        return lambda: numpy.random.set_state(legacy)
    if name == device.type:
        torch.Generator(device).set_state(tensor)
        return lambda: torch.get_device_module(device).set_rng_state(tensor, device)
    return lambda: None  # of a kind of device that is not here
