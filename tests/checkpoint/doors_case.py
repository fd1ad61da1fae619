"""A checkpoint for the tests of doors, and what they compare."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardwise
from shardwise.comm.base import Comm
from shardwise.testing.ranks import run_ranks

from .case import Odd, State, build, state_of, train

Facts = tuple[State, dict[str, Tensor]]


def save_odd(folder: Path, tag: str = "a", *, num_ranks: int = 2, stage: int = 3, steps: int = 2, **how: Any) -> Facts:
    """Train and save ``folder/tag``; return the whole state, and the whole state dict."""

    def body(mesh: Mapping[str, Comm]) -> Facts:
        net, optimizer = build(mesh, stage, **how)
        train(net, optimizer, mesh, range(steps))
        shardwise.save_checkpoint(net, folder, tag=tag)
        return state_of(net, buffers=False), shardwise.full_state_dict(net)

    return run_ranks(num_ranks, body)[0]


def load_odd(folder: Path, tag: str, *, num_ranks: int = 3, stage: int = 1, **options: Any) -> Facts:
    """Load ``folder/tag`` into a model of other values; return the same as ``save_odd``."""

    def body(mesh: Mapping[str, Comm]) -> Facts:
        net, _ = build(mesh, stage, seed=7)
        shardwise.load_checkpoint(net, folder, tag=tag, rng=False, **options)
        return state_of(net, buffers=False), shardwise.full_state_dict(net)

    return run_ranks(num_ranks, body)[0]


def plain_odd() -> Odd:
    """Return the model as its user wrote it, with values of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return Odd()


class Bomb:
    """Unpickled, it leaves a mark in the file system."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.mark), "w"))


def leaves_mark(raw: bytes, mark: Path) -> bool:
    """Whether an unguarded reader would run what a pickle says; for the tests of the tests."""
    pickle.loads(raw).close()
    done = mark.exists()
    mark.unlink()
    return done
