"""Training schedules as plain data, played by one plain process for all ranks, and by sharded ranks.

An operation is a frozen dataclass. ``Case`` is a graph, a setup and operations; its ``repr`` can be pasted into a test.
``check`` plays it both ways. What either side sees on the way (losses, outputs, gradients, norms, what raised) goes
to a log; the logs must agree, and so must the parameters at the end. The plain side holds one replica per rank: local
operations run on every replica, and what is collective in a sharded run works on the mean of the replicas' gradients.
"""

import contextlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh
from shardwise.comm.threads import ThreadComm
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.modules import find_units
from shardwise.testing.graphs import (
    WIDTH,
    BoxModule,
    FaultError,
    Graph,
    GraphModel,
    LeafModule,
    build,
    run,
)
from shardwise.testing.lanes import Instruments
from shardwise.testing.ranks import flat_rank, run_ranks

ROWS = 3
FP64_TOLERANCE = (1e-10, 1e-3)  # relative to the largest element; an element counts at least as much as the second
FP32_TOLERANCE = (1e-4, 1e-2)
REFUSED = "refused a stale graph"  # a sharded model may do that more often, as it counts changes by bucket
STALE_WORDS = re.compile("modified by an inplace operation|changed between forward and backward")
DIVERGED = 50.0  # sum of magnitudes of one parameter, far above what it starts with
NEVER_FROZEN = "head."

Seen: TypeAlias = Tensor | float | bool | str | None


class UnsuitableError(Exception):
    """The plain side cannot play this case: torch itself refuses it."""


@dataclass(frozen=True)
class Setup:
    """How the model is sharded.

    Attributes:
        ranks: number of ranks, or (2, 2) for a mesh of the axes "node" and "local".
        sharding: a stage; "mixed" for another stage for each parameter; or the axes of P, G and O, each as a string
            such as "node local".
        units: "auto", "leaves", "boxes", "all", or numbers of the modules that hold parameters.
        policy: "host" for real lanes and memory, else the policy of the instruments.
    """

    ranks: int | tuple[int, int] = 2
    sharding: int | str | tuple[str, str, str] = 3
    units: str | tuple[int, ...] = "auto"
    prefetch: int = 1
    reductions_in_flight: int = 2
    keep_last_unit: bool = True
    force_collectives: bool = False
    align: int = 64
    wide_masters: bool = False
    optimizer: str = "adamw"  # or "sgd", or "two" for one of matrices and one of the rest
    optimizer_first: bool = False
    policy: str = "late"

    @property
    def mesh(self) -> dict[str, int]:
        if isinstance(self.ranks, int):
            return {"data": self.ranks}
        return {"node": self.ranks[0], "local": self.ranks[1]}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    def unit_names(self, model: nn.Module) -> list[str] | None:
        """The names of the modules to make units; None lets the library choose."""
        named = [(n, m) for n, m in model.named_modules() if n and next(m.parameters(), None) is not None]
        named = [(n, m) for n, m in named if not isinstance(m, nn.ModuleList | nn.ModuleDict)]  # which are never called
        if isinstance(self.units, tuple):
            return sorted({named[number % len(named)][0] for number in self.units})
        kinds = {"auto": None, "leaves": LeafModule, "boxes": BoxModule, "all": (LeafModule, BoxModule)}[self.units]
        return None if kinds is None else [n for n, m in named if isinstance(m, kinds)]

    def make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        params = list(model.parameters())
        matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.125},
            {"params": rest, "lr": 0.015625},
        ]
        if self.optimizer == "two":
            return [adamw(groups[:1]), sgd(groups[1:])]
        return [adamw(groups) if self.optimizer == "adamw" else sgd(groups)]

    def shard_optimizers(self, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
        for optimizer in optimizers:
            shardwise.shard_optimizer(optimizer, model, partial=len(optimizers) > 1)

    def shard(self, model: nn.Module) -> Callable[[Mesh], nn.Module]:
        options: dict[str, Any] = {
            "units": self.unit_names(model),
            "prefetch": self.prefetch,
            "reductions_in_flight": self.reductions_in_flight,
            "keep_last_unit": self.keep_last_unit,
            "force_collectives": self.force_collectives,
            "align": self.align,
            "initial_values": "verify",
        }
        if isinstance(self.sharding, int):
            options["stage"] = self.sharding
        elif self.sharding == "mixed":
            options["sharding"] = lambda name, _: shardwise.stage_sharding(zlib.crc32(name.encode()) % 4)
        else:
            options["sharding"] = shardwise.Sharding(
                **{key: axes.split() for key, axes in zip(("param", "grad", "optim"), self.sharding, strict=True)}
            )
        if self.wide_masters:
            options["precision"] = shardwise.Precision(accumulate=torch.float64, master=torch.float64)
        if self.policy != "host":
            probe = Instruments(cast(Any, self.policy), seed=1)
            options |= {"lanes": probe.lanes, "arena": probe.arena}
        return lambda mesh: shardwise.shard(model, mesh, **options)


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.03125, momentum=0.5)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # A large epsilon: where a gradient is zero but for rounding, the step must not depend on the sign of that.
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.0)


@dataclass
class Pending:
    """A forward that waits for its backward."""

    loss: Tensor
    x: Tensor


@dataclass
class Worker:
    """One rank of either side."""

    case: "Case"
    rank: int
    model: GraphModel
    optimizers: list[torch.optim.Optimizer]
    unit_modules: list[nn.Module]  # those that may be called by themselves
    mesh: Mesh | None = None  # of a sharded one
    pending: list[Pending] = field(default_factory=list)
    log: list[tuple[str, Seen]] = field(default_factory=list)
    where: str = ""
    num_batches: int = 0

    def note(self, what: str, value: Seen) -> None:
        self.log.append((f"{self.where}: {what}", value.detach().clone() if isinstance(value, Tensor) else value))

    def batch(self, *, needs_grad: bool = False) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.rank + self.num_batches)
        rows = ROWS + self.num_batches % 2
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        self.num_batches += 1
        y = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
        graph = self.case.graph
        return x.requires_grad_(needs_grad and (graph.grad_of_input or graph_is_reentrant(graph))), y

    def forward(self, skip: int | None = None) -> Pending:
        x, y = self.batch(needs_grad=True)
        out = self.model(x, skip=skip)
        loss = torch.log1p((out - y).square()).mean() + self.model.aux_loss()
        self.note("loss", loss)
        return Pending(loss, x)

    def window(self, kind: str) -> AbstractContextManager[Any]:
        if self.mesh is None or kind == "sync":
            return contextlib.nullcontext()
        return shardwise.no_sync(self.model, reduce=kind == "reduce")

    def gathered(self, module: nn.Module, *, writes: bool) -> AbstractContextManager[Any]:
        return shardwise.unsharded(module, writes=writes) if self.mesh is not None else contextlib.nullcontext()

    def backward(self, loss: Tensor, window: str = "sync", **options: Any) -> None:
        self.note("needs grad", loss.requires_grad)
        if loss.requires_grad:
            with self.window(window):
                loss.backward(**options)

    def take(self, which: int) -> Pending | None:
        return self.pending.pop(which % len(self.pending)) if self.pending else None

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def chosen(self, which: int | None) -> list[torch.optim.Optimizer]:
        return self.optimizers if which is None else [self.optimizers[which % len(self.optimizers)]]

    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def body_params(self) -> list[nn.Parameter]:
        return [p for name, p in self.params().items() if not name.startswith(NEVER_FROZEN)]


def graph_is_reentrant(graph: Graph) -> bool:
    return bool(graph.kinds() & {"reentrant", "reentrant_inside"})


def graph_checkpoints(graph: Graph) -> bool:
    return graph_is_reentrant(graph) or bool(graph.kinds() & {"checkpoint", "checkpoint_inside"})


def mean_gradients(team: Sequence[Worker]) -> dict[str, Tensor]:
    """The mean over the replicas; a parameter without a gradient on any of them is missing."""
    means = {}
    for name, param in team[0].params().items():
        grads = [worker.params()[name].grad for worker in team]
        if any(grad is not None for grad in grads):
            total = torch.zeros_like(param)
            for grad in grads:
                if grad is not None:
                    total += grad
            means[name] = total / len(team)
    return means


def set_gradients(team: Sequence[Worker], grads: dict[str, Tensor]) -> None:
    for worker in team:
        for name, param in worker.params().items():
            param.grad = grads[name].clone() if name in grads else None


class Op:
    """One operation. ``local`` runs on one rank of either side; a collective one differs by side."""

    def local(self, worker: Worker) -> None:
        raise NotImplementedError

    def plain(self, team: Sequence[Worker]) -> None:
        for worker in team:
            self.local(worker)

    def sharded(self, worker: Worker) -> None:
        self.local(worker)


@dataclass(frozen=True)
class Forward(Op):
    """A forward whose backward comes later, or never; ``skip`` leaves a layer out."""

    skip: int | None = None

    def local(self, worker: Worker) -> None:
        worker.pending.append(worker.forward(self.skip))


@dataclass(frozen=True)
class Backward(Op):
    """A backward of one of the pending forwards; with ``retain`` it stays pending."""

    which: int = 0
    window: str = "sync"
    retain: bool = False

    def local(self, worker: Worker) -> None:
        found = worker.take(self.which)
        if found is not None:
            worker.backward(found.loss, self.window, retain_graph=self.retain)
            if found.x.grad is not None:
                worker.note("gradient of the input", found.x.grad)
            if self.retain:
                worker.pending.append(found)


@dataclass(frozen=True)
class BackwardAll(Op):
    """One backward of the sum of all pending losses."""

    window: str = "sync"

    def local(self, worker: Worker) -> None:
        if worker.pending:
            worker.backward(torch.stack([found.loss for found in worker.pending]).sum(), self.window)
            worker.pending.clear()


@dataclass(frozen=True)
class AutogradGrad(Op):
    """``torch.autograd.grad`` of a pending loss by the input or by parameters: nothing accumulates."""

    which: int = 0
    of: str = "input"

    def local(self, worker: Worker) -> None:
        if graph_is_reentrant(worker.case.graph):
            return
        found = worker.take(self.which)
        if found is None or not found.loss.requires_grad:
            return
        named = {"x": found.x} if self.of == "input" else worker.params()
        wanted = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        if wanted:
            grads = torch.autograd.grad(found.loss, list(wanted.values()), allow_unused=True)
            for name, grad in zip(wanted, grads, strict=True):
                worker.note(f"autograd.grad of {name}", grad)


@dataclass(frozen=True)
class BackwardInputs(Op):
    """``backward(inputs=...)`` by some parameters only."""

    which: int = 0
    picks: tuple[int, ...] = (0,)
    window: str = "sync"

    def local(self, worker: Worker) -> None:
        if graph_is_reentrant(worker.case.graph):
            return
        found = worker.take(self.which)
        trainable = [param for param in worker.model.parameters() if param.requires_grad]
        inputs = list({id(p): p for p in (trainable[pick % len(trainable)] for pick in self.picks)}.values())
        if found is not None:
            worker.backward(found.loss, self.window, inputs=inputs)


@dataclass(frozen=True)
class Evaluate(Op):
    """A forward of which nothing is learned."""

    mode: str = "no_grad"

    def local(self, worker: Worker) -> None:
        x, _ = worker.batch()
        worker.model.eval()
        with torch.inference_mode() if self.mode == "inference" else torch.no_grad():
            worker.note("output", worker.model(x).clone())
        worker.model.train()


@dataclass(frozen=True)
class FailForward(Op):
    """A forward that fails at a leaf call; if it has so many."""

    at: int = 0
    mode: str = "grad"

    def local(self, worker: Worker) -> None:
        worker.model.faults.forward = self.at
        raised = False
        try:
            with torch.set_grad_enabled(self.mode == "grad"):
                worker.forward()
        except FaultError:
            raised = True
        worker.model.faults.forward = None
        worker.note("failed", raised)


@dataclass(frozen=True)
class FailBackward(Op):
    """A forward and a backward that fails at a leaf; then the gradients are forgotten, as they are incomplete."""

    at: int = 0
    window: str = "sync"

    def local(self, worker: Worker) -> None:
        worker.model.faults.backward = self.at
        raised = False
        try:
            found = worker.forward()
            worker.model.faults.backward = None
            worker.backward(found.loss, self.window)
        except FaultError:
            raised = True
        worker.model.faults.backward = None
        worker.note("failed", raised)
        worker.zero_grad()


@dataclass(frozen=True)
class ZeroGrad(Op):
    """Forget gradients: through the optimizer, through the model, or to zeros."""

    how: str = "optimizer"
    which: int | None = None

    def local(self, worker: Worker) -> None:
        if self.how == "model":
            worker.model.zero_grad()
        else:
            for optimizer in worker.chosen(self.which):
                optimizer.zero_grad(set_to_none=self.how == "optimizer")


@dataclass(frozen=True)
class Toggle(Op):
    """Freeze a parameter, or unfreeze it: then graphs of earlier forwards may be refused, so they are forgotten."""

    pick: int = 0
    keep_graphs: bool = False

    def local(self, worker: Worker) -> None:
        params = worker.body_params()
        if params:
            param = params[self.pick % len(params)]
            if not param.requires_grad and not self.keep_graphs:
                worker.pending.clear()
            param.requires_grad_(not param.requires_grad)


@dataclass(frozen=True)
class Discard(Op):
    """Forget the pending forwards."""

    def local(self, worker: Worker) -> None:
        worker.pending.clear()


def learns_on_every_rank(module: nn.Module) -> bool:
    """Whether some trainable weight is used whatever the data are."""
    leaves = [leaf for leaf in module.modules() if isinstance(leaf, LeafModule) and leaf.kind != "sometimes"]
    with torch._C.DisableTorchFunctionSubclass():
        return any(param.requires_grad for leaf in leaves for param in leaf.parameters())


@dataclass(frozen=True)
class Part(Op):
    """Forward and backward of one unit by itself, if it has a weight that every rank's data uses.

    A backward that reaches no parameter on one rank cannot be told there from one that shall reduce nothing.
    """

    which: int = 0
    window: str = "sync"

    def local(self, worker: Worker) -> None:
        if worker.unit_modules:
            module = worker.unit_modules[self.which % len(worker.unit_modules)]
            if not learns_on_every_rank(module):
                return
            h, _ = worker.batch()
            out = run(module, h.requires_grad_())
            worker.note("output of a part", out)
            worker.backward(torch.log1p(out.square()).mean(), self.window)


@dataclass(frozen=True)
class Held(Op):
    """Forward and backward while all parameters, or those of one unit, are gathered.

    "penalty" adds a gradient penalty to the loss, "step" steps before the parameters are given back.
    """

    how: str = "plain"
    window: str = "sync"
    part: int | None = None

    def plain(self, team: Sequence[Worker]) -> None:
        for worker in team:
            self._learn(worker)
        if self.how == "step":
            Step().plain(team)

    def sharded(self, worker: Worker) -> None:
        module: nn.Module = worker.model
        if self.part is not None and self.how != "penalty" and worker.unit_modules:
            module = worker.unit_modules[self.part % len(worker.unit_modules)]
        with shardwise.unsharded(module, writes=False):
            self._learn(worker)
            if self.how == "step":
                worker.pending.clear()
                for optimizer in worker.optimizers:
                    optimizer.step()

    def _learn(self, worker: Worker) -> None:
        found = worker.forward()
        loss = found.loss
        if self.how == "penalty" and not graph_checkpoints(worker.case.graph) and found.x.requires_grad:
            (grad,) = torch.autograd.grad(loss, found.x, create_graph=True)
            loss = loss + torch.log1p(grad.square().sum())
        worker.backward(loss, self.window)


@dataclass(frozen=True)
class Stale(Op):
    """A step between a forward and its backward: where torch refuses the backward, so must a sharded model."""

    def plain(self, team: Sequence[Worker]) -> None:
        found = [worker.forward() for worker in team]
        Step().plain(team)
        for worker, graph in zip(team, found, strict=True):
            self._backward(worker, graph.loss)

    def sharded(self, worker: Worker) -> None:
        found = worker.forward()
        Step().sharded(worker)
        self._backward(worker, found.loss)

    def _backward(self, worker: Worker, loss: Tensor) -> None:
        words = ""
        try:
            worker.backward(loss)
        except RuntimeError as error:
            words = str(error)
        assert not words or STALE_WORDS.search(words), f"refused for another reason: {words}"
        worker.note(REFUSED, bool(words))
        worker.zero_grad()


@dataclass(frozen=True)
class Reshard(Op):
    """Make a plain model of it, and shard that; gradients and the optimizer's state are gone."""

    def plain(self, team: Sequence[Worker]) -> None:
        for worker in team:
            worker.pending.clear()
            worker.zero_grad()
            worker.optimizers = worker.case.setup.make_optimizers(worker.model)

    def sharded(self, worker: Worker) -> None:
        assert worker.mesh is not None
        worker.pending.clear()
        shardwise.unshard_model(worker.model)
        assert count_hooks(worker.model) == count_hooks(build(worker.case.graph)), "hooks left in the plain model"
        setup = worker.case.setup
        setup.shard(worker.model)(worker.mesh)
        worker.optimizers = setup.make_optimizers(worker.model)
        setup.shard_optimizers(worker.optimizers, worker.model)


@dataclass(frozen=True)
class Edit(Op):
    """Scale all parameters of the model, or of one unit; graphs of earlier forwards are stale then."""

    part: int | None = None
    factor: float = 0.875

    def local(self, worker: Worker) -> None:
        module: nn.Module = worker.model
        if self.part is not None and worker.unit_modules:
            module = worker.unit_modules[self.part % len(worker.unit_modules)]
        worker.pending.clear()
        with worker.gathered(module, writes=True), torch.no_grad():
            for param in module.parameters():
                param.mul_(self.factor)


@dataclass(frozen=True)
class Clip(Op):
    """Clip the norm, or the values, of the mean gradient."""

    limit: float = 0.125
    how: str = "norm"

    def plain(self, team: Sequence[Worker]) -> None:
        grads = mean_gradients(team)
        if self.how == "value":
            set_gradients(team, {name: grad.clamp(-self.limit, self.limit) for name, grad in grads.items()})
            return
        norm = torch.stack([grad.double().square().sum() for grad in grads.values()] or [torch.zeros(())]).sum().sqrt()
        factor = min(1.0, self.limit / (float(norm) + 1e-6))
        for worker in team:
            worker.note("norm", float(norm))
            for param in worker.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(factor)

    def sharded(self, worker: Worker) -> None:
        if self.how == "value":
            shardwise.clip_grad_value_(worker.model, self.limit)
        else:
            worker.note("norm", float(shardwise.clip_grad_norm_(worker.model, self.limit)))


@dataclass(frozen=True)
class SetRate(Op):
    """Change the learning rate of one group."""

    group: int = 0
    rate: float = 0.025

    def local(self, worker: Worker) -> None:
        groups = [group for optimizer in worker.optimizers for group in optimizer.param_groups]
        groups[self.group]["lr"] = self.rate


@dataclass(frozen=True)
class Step(Op):
    """A step of all optimizers or of one; graphs of earlier forwards are stale then."""

    which: int | None = None

    def plain(self, team: Sequence[Worker]) -> None:
        set_gradients(team, mean_gradients(team))
        for worker in team:
            worker.pending.clear()
            for optimizer in worker.chosen(self.which):
                optimizer.step()

    def sharded(self, worker: Worker) -> None:
        worker.pending.clear()
        for optimizer in worker.chosen(self.which):
            optimizer.step()
            assert optimizer.step_was_applied  # type: ignore[attr-defined]
        stay = sum(params.full.num_bytes for params in gathered(worker.model) if params.still_held is None)
        assert stay == 0, f"{worker.where}: {stay} bytes stay gathered after a step, and no graph holds them"
        ledger = ledger_of(worker.model)
        assert ledger[Kind.STAGING] == 0, f"{worker.where}: {ledger[Kind.STAGING]} bytes of staging after a step"


@dataclass(frozen=True)
class Read(Op):
    """Read the parameters, the mean gradients or the optimizer's state, whole."""

    what: str = "parameters"

    def plain(self, team: Sequence[Worker]) -> None:
        found: dict[str, Tensor] = {}
        if self.what == "gradients":
            found = mean_gradients(team)
        elif self.what == "parameters":
            found = {name: param.detach() for name, param in team[0].params().items()}
        else:
            for name, param in team[0].params().items():
                states = [optimizer.state.get(param, {}) for optimizer in team[0].optimizers]
                for key, value in (item for state in states for item in state.items()):
                    if isinstance(value, Tensor) and param.numel():
                        found[f"{key} of {name}"] = value
        for worker in team:
            self._note(worker, found)

    def sharded(self, worker: Worker) -> None:
        if self.what == "gradients":
            self._note(worker, shardwise.full_gradients(worker.model))
        elif self.what == "parameters":
            self._note(worker, shardwise.full_parameters(worker.model))
        else:
            states = shardwise.full_optimizer_state(worker.model)
            empty = {name for name, param in worker.params().items() if not param.numel()}
            found = {f"{k} of {n}": v for n, state in states.items() if n not in empty for k, v in state.items()}
            self._note(worker, found)

    def _note(self, worker: Worker, found: dict[str, Tensor]) -> None:
        worker.note(f"names of {self.what}", ", ".join(sorted(found)))
        for name in sorted(found):
            worker.note(name, found[name])


@dataclass(frozen=True)
class Case:
    """A graph, how it is sharded, and what is done with it."""

    graph: Graph
    setup: Setup = Setup()
    ops: tuple[Op, ...] = ()

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """The operations, and an ordinary step at the end that must work after whatever came before."""
        return (*self.ops, Forward(), Backward(-1), Read("gradients"), Step(), ZeroGrad(), Read("parameters"))

    @property
    def tolerance(self) -> tuple[float, float]:
        return FP64_TOLERANCE if self.graph.dtypes() == {"fp64"} else FP32_TOLERANCE


def check(case: Case) -> None:
    """Play a case both ways and compare; an error carries the case as a note that can be pasted into a test."""
    try:
        _check(case)
    except UnsuitableError:
        raise
    except BaseException as error:
        error.add_note(f"the case: {case!r}")
        raise


def _check(case: Case) -> None:
    plain = play_plain(case)
    sharded = run_ranks(case.setup.mesh, lambda mesh: play_sharded(case, mesh), timeout=10)
    for rank, (worker, comms) in enumerate(sharded):
        assert all(comm.exchange.num_open == 0 for comm in comms), f"rank {rank}: collectives nobody waited for"
        compare_logs(worker.log, plain[rank].log, case.tolerance, f"rank {rank}")
        parameters = [value for where, value in worker.log if where.startswith(f"{worker.where}: ")]
        others = [value for where, value in sharded[0][0].log if where.startswith(f"{worker.where}: ")]
        for found, other in zip(parameters, others, strict=True):
            same = torch.equal(found, other) if isinstance(found, Tensor) else found == other
            assert same, f"rank {rank} ends with other parameters than rank 0"


def play_plain(case: Case) -> list[Worker]:
    """Play the plain side; make sure that it could show a mistake."""
    team = [make_worker(case, rank) for rank in range(case.setup.num_ranks)]
    start = {name: param.detach().clone() for name, param in team[0].params().items()}
    for number, op in enumerate(case.all_ops):
        for worker in team:
            worker.where = f"op {number}, {op}"
        try:
            op.plain(team)
        except FaultError:
            raise
        except (RuntimeError, UserWarning) as error:  # torch refuses, or warns that gradients are lost
            raise UnsuitableError(str(error)) from error
        if isinstance(op, Step) and any(float(p.detach().abs().sum()) > DIVERGED for p in team[0].model.parameters()):
            raise UnsuitableError("training diverges, and so do rounding errors")
        if isinstance(op, Backward) and number == len(case.ops) + 1 and len(team) > 1:
            grads = [worker.model.head.bias.grad for worker in team]
            assert not torch.equal(grads[0], grads[1]), "vacuous: the ranks' gradients are the same"  # type: ignore[arg-type]
    moved = [name for name, param in team[0].params().items() if not torch.equal(param, start[name])]
    assert "head.bias" in moved, "vacuous: nothing was trained"
    return team


def play_sharded(case: Case, mesh: Mesh) -> tuple[Worker, list[ThreadComm]]:
    """Play one sharded rank; make sure that it leaves nothing behind."""
    worker = make_worker(case, flat_rank(mesh), mesh)
    bytes_before, hooks_before = dict(ledger_of(worker.model)), count_hooks(worker.model)
    counts_before = unit_counts(worker.model)
    for number, op in enumerate(case.all_ops):
        worker.where = f"op {number}, {op}"
        try:
            op.sharded(worker)
        except BaseException as error:
            error.add_note(f"in {worker.where}")
            raise
    worker.model.forget_aux()  # a loss kept aside keeps its graph, and a function in there may keep a weight
    for unit in Managed.of(worker.model).runtime.units:
        unit.reshard()  # as the next forward would
    bytes_after, hooks_after = dict(ledger_of(worker.model)), count_hooks(worker.model)
    if not any(isinstance(op, Toggle) for op in case.ops):  # which makes buckets anew, with other paddings
        assert bytes_after == bytes_before, f"bytes at rest changed from {bytes_before} to {bytes_after}"
        assert hooks_after == hooks_before, f"the number of hooks changed from {hooks_before} to {hooks_after}"
    left = {kind: bytes_after[kind] for kind in (Kind.GRAD, Kind.GATHERED, Kind.STAGING) if bytes_after[kind]}
    assert not left, f"bytes left at the end: {left}"
    assert hooks_after[0] == hooks_before[0], f"module hooks grew from {hooks_before[0]} to {hooks_after[0]}"
    counts_after = unit_counts(worker.model)
    assert counts_after == counts_before, f"units are in use: {counts_after}, were {counts_before}"
    return worker, [cast(ThreadComm, comm) for comm in mesh.values()]


def make_worker(case: Case, rank: int, mesh: Mesh | None = None) -> Worker:
    model, setup = build(case.graph), case.setup
    units = find_units(model, setup.unit_names(model))
    callable_units = [u.module for u in units if u.name and isinstance(u.module, LeafModule | BoxModule)]
    optimizers = setup.make_optimizers(model) if mesh is None or setup.optimizer_first else None
    if mesh is not None:
        setup.shard(model)(mesh)
        optimizers = optimizers or setup.make_optimizers(model)
        setup.shard_optimizers(optimizers, model)
    assert optimizers is not None
    return Worker(case, rank, model, optimizers, callable_units, mesh)


def compare_logs(
    found: list[tuple[str, Seen]], expected: list[tuple[str, Seen]], tolerance: tuple[float, float], where: str
) -> None:
    for (what, value), (name, wanted) in zip(found, expected, strict=False):
        assert what == name, f"{where}: saw {what!r}, expected {name!r}"
        if isinstance(wanted, Tensor):
            assert isinstance(value, Tensor), f"{where}, {name}: {value}, expected {wanted}"
            assert value.shape == wanted.shape, f"{where}, {name}: {tuple(value.shape)}, expected {tuple(wanted.shape)}"
            if wanted.numel():
                error = float((value.double() - wanted.double()).abs().max())
                scale = max(float(wanted.double().abs().max()), tolerance[1])
                assert error <= tolerance[0] * scale, f"{where}, {name}: off by {error:.3g}, largest {scale:.3g}"
        elif isinstance(wanted, float):
            assert isinstance(value, float)
            limit = tolerance[0] * max(abs(wanted), tolerance[1])
            assert abs(value - wanted) <= limit, f"{where}, {name}: {value}, expected {wanted}"
        elif not (REFUSED in name and value is True):
            assert value == wanted, f"{where}, {name}: {value}, expected {wanted}"
    assert len(found) == len(expected), f"{where}: {len(found)} things seen, expected {len(expected)}"


def runtime_of(model: nn.Module) -> Any:
    return cast(Any, model)._shardwise.runtime


def ledger_of(model: nn.Module) -> Any:
    return runtime_of(model).means.arena.ledger.now


def gathered(model: nn.Module) -> list[Any]:
    """Parameters of the buckets that are freed and have memory now."""
    params = [bucket.params for unit in runtime_of(model).units for bucket in unit.buckets]
    return [each for each in params if each.sharded_axes and each.full.filled]


def count_hooks(model: nn.Module) -> tuple[int, int]:
    """Hooks of the modules, and hooks of the parameters."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    of_modules = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    return of_modules, sum(_num_hooks(param) for param in model.parameters())


def unit_counts(model: nn.Module) -> list[dict[str, object]]:
    """The counts of every unit, and the sizes of what it collects while it is in use."""
    follows_flags = ("buckets", "awaited", "after_edit", "after_unpin")
    return [
        {
            key: len(value) if isinstance(value, Sized) else value
            for key, value in vars(unit).items()
            if key not in follows_flags
        }
        for unit in runtime_of(model).units
    ]


def _num_hooks(param: nn.Parameter) -> int:
    return sum(len(hooks) for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks) if hooks)


def iterate_kinds(case: Case) -> Iterator[str]:
    """What a case has, for statistics."""
    yield from case.graph.kinds()
    yield from (type(op).__name__ for op in case.ops)
