"""The unsharded side: ordinary torch in one thread, and the same with whole tensors owned by one replica each.

Both compute the gradient of every share and add the shares in rank order, with the roundings of ``Precision``; no
collective and no flat buffer of the library is used. Read ``sharded.py`` for the other side.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.optim.families import supports_fused
from shardwise.precision import Precision, StateDtypes
from shardwise.simulation.work import Work
from shardwise.testing.compare import Trace

__all__ = ["PlainRun", "train_owned", "train_plain"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainRun:
    """What plain training left behind.

    Attributes:
        trace: everything that is compared.
        initial: parameters before the first step, in the optimizer's precision.
        trainable: names of parameters that train.
        no_gradient: trainable parameters that the loss never reached.
        drew: whether torch's generator moved while training.
    """

    trace: Trace
    initial: Mapping[str, Tensor]
    trainable: tuple[str, ...]
    no_gradient: tuple[str, ...]
    drew: bool


# [Note: one norm, one kernel]
# An optimizer that divides by the root of the second moment turns rounding noise into whole updates where a gradient is
# zero but for rounding, as that of a key's bias. So both sides use the same kernels on one thread, and the plain side
# clips by the norm that the ranks found. Its own norm is part of the comparison: a wrong one is told, and cannot hide.


def train_plain(work: Work, precision: Precision, clip_norms: Sequence[float] = ()) -> PlainRun:
    """Train one model; a step's gradient is the mean over the shares, computed one after the other.

    Args:
        work: what to train.
        precision: dtypes.
        clip_norms: by step, what to clip by; see [Note: one norm, one kernel].
    """
    with one_thread():
        return _train_plain(work, precision, clip_norms)


def _train_plain(work: Work, precision: Precision, clip_norms: Sequence[float]) -> PlainRun:
    replica = _Replica(work, precision)
    initial = {name: param.detach().clone() for name, param in replica.masters.items()}
    before = torch.get_rng_state()
    losses, norms, reached = [], [], set()
    for step in range(work.num_steps):
        loss, grads = _mean_gradients([replica] * work.num_ranks, work, step)
        losses.append(loss)
        reached |= set(grads)
        norms += _clip(grads, work.max_norm, clip_norms[step] if clip_norms else None)
        replica.step(grads)
    loss, grads = _mean_gradients([replica] * work.num_ranks, work, 0)
    drew = not torch.equal(before, torch.get_rng_state())
    trainable = [name for name, param in replica.masters.items() if param.requires_grad]
    return PlainRun(
        trace=Trace(
            losses=tuple(losses),
            norms=tuple(norms),
            gradients=grads,
            parameters={name: param.detach().clone() for name, param in replica.masters.items()},
            optimizer_state=replica.optimizer_state(),
            outputs=torch.tensor([loss], dtype=torch.float64),
        ),
        initial=initial,
        trainable=tuple(trainable),
        no_gradient=tuple(name for name in trainable if name not in reached),
        drew=drew,
    )


def train_owned(
    work: Work, precision: Precision, owners: Mapping[str, int], clip_norms: Sequence[float], *, owns_params: bool
) -> dict[str, Tensor]:
    """Train replicas, of which one owns each tensor: gradients are reduced to it, the parameter is broadcast from it.

    Args:
        work: what to train.
        precision: dtypes.
        owners: parameter's name to rank.
        clip_norms: as for ``train_plain``.
        owns_params: between steps only the owner has the parameter; the others hold NaN until it is broadcast.

    Returns:
        The parameters of their owners, in the optimizer's precision.
    """
    with one_thread():
        return _train_owned(work, precision, owners, clip_norms, owns_params)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch, as simulated ranks do: a kernel may add in another order with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_owned(
    work: Work, precision: Precision, owners: Mapping[str, int], clip_norms: Sequence[float], owns_params: bool
) -> dict[str, Tensor]:
    replicas = [_Replica(work, precision) for _ in range(work.num_ranks)]
    for step in range(work.num_steps):
        if owns_params:
            _broadcast(replicas, owners)
        _, grads = _mean_gradients(replicas, work, step)
        _clip(grads, work.max_norm, clip_norms[step] if clip_norms else None)
        for rank, replica in enumerate(replicas):
            replica.step({name: grad for name, grad in grads.items() if owners.get(name) == rank})
            if owns_params:
                replica.drop([name for name, owner in owners.items() if owner != rank])
        if not owns_params:
            _broadcast(replicas, owners)
    return {name: replicas[owners.get(name, 0)].masters[name].detach().clone() for name in replicas[0].masters}


class _Replica:
    """A working model in the parameters' dtype, and its masters with an ordinary optimizer."""

    def __init__(self, work: Work, precision: Precision) -> None:
        self._precision = precision
        self.working = work.new_model(precision.param)
        holder = work.new_model()
        for param in holder.parameters():
            if param.is_floating_point():
                dtype = precision.param or param.dtype
                param.data = param.data.to(self.dtypes(dtype).master if param.requires_grad else dtype)
        self.masters = dict(holder.named_parameters())
        self.params = dict(self.working.named_parameters())
        self.optimizer = work.make_optimizer(holder)
        for group in self.optimizer.param_groups:
            is_open = "fused" in group and group["fused"] is None and group["foreach"] is None
            if is_open and supports_fused(type(self.optimizer), torch.device("cpu")):
                group["fused"] = True  # [Note: one norm, one kernel]

    def dtypes(self, dtype: torch.dtype) -> StateDtypes:
        """Return the dtypes of each state for a parameter stored as ``dtype``."""
        return self._precision.of(dtype)

    def share_gradients(self, work: Work, step: int, rank: int) -> tuple[float, dict[str, Tensor]]:
        """Return the loss on a share and its gradients in the parameters' dtype, scaled."""
        loss = work.loss(self.working, work.share(step, rank, self._precision.param))
        (loss * self.scale()).backward()  # type: ignore[no-untyped-call]
        grads = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        self.working.zero_grad(set_to_none=True)
        return float(loss.detach()), grads

    def mean(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the mean of gradients, added in rank order; dtype of the master."""
        dtypes = self.dtypes(self.params[name].dtype)
        total = parts[0].to(dtypes.wire).to(dtypes.sum, copy=True)
        for part in parts[1:]:
            total.add_(part.to(dtypes.wire).to(dtypes.sum))
        return total.div_(len(parts)).to(dtypes.accumulate).div_(self.scale()).to(dtypes.master)

    def scale(self) -> float:
        """Return the loss scale; 1 unless parameters are fp16."""
        scale = self._precision.loss_scale
        is_fp16 = any(param.dtype == torch.float16 for param in self.params.values())
        return float(scale.fixed or scale.initial) if scale is not None and is_fp16 else 1.0

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Update the masters that have gradients, and the working model from them."""
        for name, master in self.masters.items():
            master.grad = grads.get(name)
        self.optimizer.step()
        for name in grads:
            self.params[name].copy_(self.masters[name])

    @torch.no_grad()
    def drop(self, names: Sequence[str]) -> None:
        """Lose the values of working parameters."""
        for name in names:
            if self.params[name].is_floating_point():
                self.params[name].fill_(float("nan"))

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the state by "parameter/state", without that of parameters that have no elements."""
        return {
            f"{name}/{key}": value
            for name, master in self.masters.items()
            for key, value in self.optimizer.state.get(master, {}).items()
            if isinstance(value, Tensor) and value.numel() and master.numel()
        }


def _mean_gradients(replicas: Sequence[_Replica], work: Work, step: int) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and the mean gradients; a share that does not reach a parameter counts as zeros."""
    shares = [replica.share_gradients(work, step, rank) for rank, replica in enumerate(replicas)]
    means = {}
    for name, param in replicas[0].params.items():
        if any(name in grads for _, grads in shares):
            parts = [grads[name] if name in grads else torch.zeros_like(param) for _, grads in shares]
            means[name] = replicas[0].mean(name, parts)
    return sum(loss for loss, _ in shares) / len(shares), means


def _clip(grads: Mapping[str, Tensor], max_norm: float | None, norm: float | None) -> list[float]:
    """Clip in place by ``norm`` if it is given; return the norm of the gradients in a list, empty if none is needed."""
    if max_norm is None:
        return []
    own = float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())
    factor = max_norm / ((own if norm is None else norm) + 1e-6)
    if factor < 1.0:
        for grad in grads.values():
            grad.mul_(factor)
    return [own]


@torch.no_grad()
def _broadcast(replicas: Sequence[_Replica], owners: Mapping[str, int]) -> None:
    for name, owner in owners.items():
        for replica in replicas:
            replica.params[name].copy_(replicas[owner].masters[name])
