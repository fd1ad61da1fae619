"""Train the same case plainly and sharded, and compare everything that training leaves behind.

Owns ``Case``, ``Trace``, ``train_plain``, ``train_sharded`` and the assertions, with the named tolerances. The plain
side is one process, an ordinary module and an ordinary optimizer on the whole batch of a step; nothing of the library
runs there. Read ``models.py`` for the nets, ``ranks.py`` for how ranks are started.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.access import full_gradients, full_optimizer_state, full_parameters
from shardwise.api import clip_grad_norm_, no_sync, shard
from shardwise.build import ShardingRule
from shardwise.comm.base import Mesh
from shardwise.optim.shard import shard_optimizer
from shardwise.precision import Precision
from shardwise.testing.models import integer_batch, make_integer_net, make_odd_net, odd_batch, odd_loss
from shardwise.testing.ranks import flat_rank

__all__ = [
    "EXACT",
    "FP32",
    "FP64",
    "Case",
    "MicroBatches",
    "Tolerance",
    "Trace",
    "assert_equals_plain",
    "assert_same_bits",
    "train_plain",
    "train_sharded",
]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a tensor may be off: the largest difference, relative to the largest element expected."""

    name: str
    relative: float


# Fixed by the design, for results that differ by the order of sums only. Never widened to let a test pass.
EXACT = Tolerance(name="exact", relative=0.0)
FP64 = Tolerance(name="fp64", relative=1e-12)
FP32 = Tolerance(name="fp32", relative=1e-5)


class MicroBatches(Enum):
    """How many backwards a step has on each rank, and which of them end a window."""

    ONE = "one backward"
    REDUCED = "two backwards, each ends a window"
    LOCAL = "two backwards, the first under no_sync"
    SUMMED = "two backwards, the first under no_sync(reduce=True)"

    @property
    def count(self) -> int:
        """Number of backwards per step."""
        return 1 if self is MicroBatches.ONE else 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how; the same for the plain and the sharded side.

    Attributes:
        oddities: of an ``OddNet``; None takes the ``IntegerNet``.
        dtype: of the model.
        data_dtype: of inputs and targets; None is ``dtype``.
        precision: for ``shard``; the plain side ignores it.
        optimizer: "adamw" or "sgd" (with momentum), both with weight decay where gradients need not stay integers.
        fused: choose torch's fused kernel on the plain side too, for results that must agree bit for bit.
        max_norm: clip to this norm; None does not clip.
        force_collectives: for ``shard``.
    """

    oddities: tuple[str, ...] | None = ()
    dtype: torch.dtype = torch.float64
    data_dtype: torch.dtype | None = None
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    fused: bool = False
    max_norm: float | None = None
    micro_batches: MicroBatches = MicroBatches.ONE
    num_steps: int = 3
    num_rows: int = 24
    force_collectives: bool = False

    @property
    def tolerance(self) -> Tolerance:
        """What the comparison with a plain process allows."""
        return FP64 if self.dtype == torch.float64 and "mixed" not in (self.oddities or ()) else FP32

    def make_model(self) -> nn.Module:
        """Return the model with its initial values."""
        if self.oddities is None:
            return make_integer_net(dtype=self.dtype)
        return make_odd_net(*self.oddities, dtype=self.dtype)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return what the model and the loss get in one step, over all ranks, of any number of steps."""
        make = integer_batch if self.oddities is None else odd_batch
        return make(step, num_rows=self.num_rows, dtype=self.data_dtype or self.dtype)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over rows of the loss."""
        return (output * target).sum() / len(target) if self.oddities is None else odd_loss(output, target)

    def make_optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """Return the optimizer over all parameters, frozen ones included."""
        if self.optimizer == "sgd":
            decay = 0.0 if self.oddities is None else 0.125
            return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5, weight_decay=decay, **options)
        assert self.optimizer == "adamw", self.optimizer
        return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, **options)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What training left behind, seen from one rank.

    Attributes:
        losses: mean loss of each step over this rank's rows.
        norms: total norm of each step before clipping; empty where nothing is clipped.
        gradients: of the last step, after clipping, of the parameters that got one.
        parameters: after the last step, in the optimizer's precision.
        optimizer_state: by "parameter/state"; without the step counters of parameters that have no elements.
        outputs: of the trained model on rows it has not seen.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Tensor]
    outputs: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return everything under one name each."""
        found = {"losses": torch.tensor(self.losses, dtype=torch.float64), "outputs": self.outputs}
        found["norms"] = torch.tensor(self.norms, dtype=torch.float64)
        for kind in ("gradients", "parameters", "optimizer_state"):
            found |= {f"{kind} {name}": tensor for name, tensor in getattr(self, kind).items()}
        return found


def train_plain(case: Case, *, num_micro_batches: int = 1) -> Trace:
    """Train in this process, with plain torch: the reference.

    Args:
        case: what to train.
        num_micro_batches: split the rows of a step into this many backwards, for comparisons bit for bit.
    """
    model = case.make_model()
    optimizer = case.make_optimizer(model, **({"fused": True} if case.fused else {}))
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(case.num_steps):
        losses.append(0.0)
        for x, y in _shares(case.batch(step), num_micro_batches):
            loss = case.loss(model(x), y)
            (loss / num_micro_batches).backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(loss.detach()) / num_micro_batches
        if case.max_norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    state = {
        f"{name}/{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor) and p.numel()
    }
    return Trace(
        losses=tuple(losses),
        norms=tuple(norms),
        gradients=gradients,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        optimizer_state=state,
        outputs=_evaluate(case, model),
    )


def train_sharded(case: Case, mesh: Mesh, sharding: ShardingRule, **options: Any) -> Trace:
    """Train on this rank with the library: the same rows, split over ranks and micro-batches.

    Args:
        case: what to train.
        mesh: this rank's communicators.
        sharding: for ``shard``.
        options: further arguments of ``shard``.
    """
    model = shard(
        case.make_model(),
        mesh,
        sharding=sharding,
        precision=case.precision,
        initial_values="verify",
        force_collectives=case.force_collectives,
        **options,
    )
    optimizer = shard_optimizer(case.make_optimizer(model), model)
    rank, num_ranks = flat_rank(mesh), 1
    for comm in mesh.values():
        num_ranks *= comm.size
    count = case.micro_batches.count
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(case.num_steps):
        own = list(_shares(case.batch(step), num_ranks))[rank]
        losses.append(0.0)
        for number, (x, y) in enumerate(_shares(own, count)):
            with _window(case.micro_batches, model, last=number == count - 1):
                loss = case.loss(model(x), y)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(loss.detach()) / count
        if case.max_norm is not None:
            norms.append(float(clip_grad_norm_(model, case.max_norm)))
        if step == case.num_steps - 1:  # not in every step: reading gradients ends windows, as a step does
            gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    outputs = _evaluate(case, model)
    parameters = full_parameters(model)
    state = {
        f"{name}/{key}": value
        for name, found in full_optimizer_state(model).items()
        for key, value in found.items()
        if parameters[name].numel()
    }
    return Trace(
        losses=tuple(losses),
        norms=tuple(norms),
        gradients=gradients,
        parameters=parameters,
        optimizer_state=state,
        outputs=outputs,
    )


def assert_equals_plain(ranks: Sequence[Trace], plain: Trace, tolerance: Tolerance, where: str = "") -> None:
    """Check that every rank of a sharded run ended where a plain process did; losses on the mean over the ranks.

    Raises:
        AssertionError: says what differs most and by how much.
    """
    losses = tuple(sum(each) / len(ranks) for each in zip(*(trace.losses for trace in ranks), strict=True))
    for rank, trace in enumerate(ranks):
        _assert_close(replace(trace, losses=losses), plain, tolerance, f"{where} rank {rank} against a plain process")


def assert_same_bits(ranks: Sequence[Trace], others: Sequence[Trace], where: str = "") -> None:
    """Check that two sharded runs agree bit for bit on every rank.

    Raises:
        AssertionError: says what differs most and by how much.
    """
    assert len(ranks) == len(others), f"{where}: {len(ranks)} ranks against {len(others)}"
    for rank, (trace, other) in enumerate(zip(ranks, others, strict=True)):
        _assert_close(trace, other, EXACT, f"{where} rank {rank}")


def _assert_close(trace: Trace, expected: Trace, tolerance: Tolerance, where: str) -> None:
    found, wanted = trace.tensors(), expected.tensors()
    assert found.keys() == wanted.keys(), f"{where}: only on one side: {sorted(found.keys() ^ wanted.keys())}"
    for name, tensor in found.items():
        other = wanted[name]
        assert tensor.shape == other.shape, f"{where}: {name} is {tuple(tensor.shape)}, expected {tuple(other.shape)}"
        if torch.equal(tensor, other):
            continue
        assert bool(tensor.isfinite().all()), f"{where}: {name} is not finite"
        largest = float(other.abs().max())
        error, allowed = float((tensor.double() - other.double()).abs().max()) / (largest or 1.0), tolerance.relative
        assert error <= allowed, f"{where}: {name} is off by {error:.3g} of its largest, {tolerance.name} is {allowed}"


def _window(micro_batches: MicroBatches, model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    if last or micro_batches in (MicroBatches.ONE, MicroBatches.REDUCED):
        return contextlib.nullcontext()
    return no_sync(model, reduce=micro_batches is MicroBatches.SUMMED)


def _shares(batch: tuple[Tensor, Tensor], count: int) -> list[tuple[Tensor, Tensor]]:
    x, y = batch
    assert len(x) % count == 0, f"{len(x)} rows cannot be shared equally by {count}"
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def _evaluate(case: Case, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(case.batch(99)[0]).clone()  # type: ignore[no-any-return]
