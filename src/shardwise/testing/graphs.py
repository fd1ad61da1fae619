"""Small module graphs as plain data: what a property test draws, shrinks and prints, and a person pastes back.

A ``Graph`` is a tree of ``Leaf`` (parameters and arithmetic), ``Box`` (other nodes and something odd about how they are
called or what they return) and ``Again`` (a module that is there already). ``build`` makes the model; equal graphs give
models of equal names and values. Every leaf and box maps [rows, WIDTH] to [rows, WIDTH].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

__all__ = [
    "ACTIVATIONS",
    "BOX_KINDS",
    "LEAF_KINDS",
    "WIDTH",
    "Again",
    "Box",
    "BoxModule",
    "FaultError",
    "Faults",
    "Graph",
    "GraphModel",
    "Leaf",
    "LeafModule",
    "Node",
    "build",
    "run",
]

WIDTH = 5  # odd, so that slices cut rows
_OUTPUTS = 2
_GAIN = 1.25


@dataclass(frozen=True)
class Leaf:
    """Parameters and what is computed with them.

    Attributes:
        kind: one of ``LEAF_KINDS``.
        act: one of ``ACTIVATIONS``, applied to the result.
        dtype: "fp64" or "fp32" of parameters and arithmetic; input and output keep theirs.
        of: for "borrow": number of the matrix to borrow, among all of the model.
    """

    kind: str = "linear"
    act: str = "tanh"
    dtype: str = "fp64"
    of: int = 0


@dataclass(frozen=True)
class Box:
    """Nodes that run one after the other, in a way that depends on ``kind``, one of ``BOX_KINDS``."""

    kind: str
    inner: "tuple[Node, ...]"


@dataclass(frozen=True)
class Again:
    """A module that was built before, number ``of`` of them, once more."""

    of: int = 0


Node: TypeAlias = Leaf | Box | Again


@dataclass(frozen=True)
class Graph:
    """A whole model: ``nodes`` one after the other, then a linear head that always trains.

    Attributes:
        nodes: the body.
        ties: pairs of numbers of matrices that become one parameter, if they have one dtype.
        frozen: numbers of parameters that do not train at the start; the head's always do.
        grad_of_input: whether the input needs a gradient (always with a reentrant checkpoint).
    """

    nodes: tuple[Node, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    frozen: tuple[int, ...] = ()
    grad_of_input: bool = False

    def kinds(self) -> frozenset[str]:
        """Return the kinds of all nodes."""
        return frozenset(node.kind for node in _walk(self.nodes) if not isinstance(node, Again))

    def dtypes(self) -> frozenset[str]:
        """Return the dtypes of all leaves and of the head."""
        return frozenset({"fp64"} | {node.dtype for node in _walk(self.nodes) if isinstance(node, Leaf)})


def _walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if isinstance(node, Box):
            yield from _walk(node.inner)


class FaultError(Exception):
    """The error that a model raises because it was told to."""


@dataclass
class Faults:
    """When a model fails: at the n-th leaf call from now on, in forward or in the backward through it."""

    forward: int | None = None
    backward: int | None = None

    def pass_through(self, out: Tensor) -> Tensor:
        """Count a leaf call."""
        if self.forward is not None:
            self.forward -= 1
            if self.forward < 0:
                self.forward = None
                raise FaultError("told to fail in forward")
        if self.backward is not None:
            self.backward -= 1
            if self.backward < 0 and out.requires_grad:
                self.backward = None
                out.register_hook(_fail)  # type: ignore[no-untyped-call]
        return out


def _fail(_: Tensor) -> None:
    raise FaultError("told to fail in backward")


class LeafModule(nn.Module):
    """The module of a ``Leaf``."""

    def __init__(self, node: Leaf, faults: Faults) -> None:
        super().__init__()
        self.kind, self._act, self._faults = node.kind, ACTIVATIONS[node.act], faults
        self.dtype = {"fp64": torch.float64, "fp32": torch.float32}[node.dtype]
        self.lender: tuple[nn.Module, ...] = ()  # a tuple, so that the module it borrows from is not its child
        make, self._compute = _LEAVES[node.kind]
        for name, value in make().items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        self.to(self.dtype)
        if node.kind == "lora":
            cast(nn.Parameter, self.weight).requires_grad_(False)
        if node.kind == "grad_hook":
            cast(nn.Parameter, self.weight).register_hook(_halve)  # type: ignore[no-untyped-call]

    def forward(self, h: Tensor) -> Tensor:
        """Map [rows, WIDTH] to [rows, WIDTH]; the result is a tensor of its own that no operation has saved."""
        out = self._act(self._compute(self, h.to(self.dtype))).to(h.dtype) * _GAIN
        return self._faults.pass_through(out)


class BoxModule(nn.Module):
    """The module of a ``Box``."""

    def __init__(self, kind: str, inner: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.aux: Tensor | None = None
        if kind == "attributes":
            for number, module in enumerate(inner):
                self.add_module(f"part{number}", module)
        else:
            self.inner = nn.Sequential(*inner) if kind == "sequential" else nn.ModuleList(inner)
        if kind == "backward_hook":
            self.register_full_backward_hook(_see)
        if kind == "forward_hooks":
            self.register_forward_pre_hook(_shift_input)
            self.register_forward_hook(_scale_output)

    def parts(self) -> list[nn.Module]:
        """Return what is inside, repeated modules repeated."""
        holder = self if self.kind == "attributes" else self.inner
        return [module for module in holder._modules.values() if module is not None]

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        """Map [rows, WIDTH], or ``h=`` of that shape where the kind is "kwonly", to something ``run`` can read."""
        h = kwargs["batch"]["h"] if self.kind == "kwonly" else args[0]
        if self.kind in ("checkpoint", "reentrant"):
            for module in self.parts():
                h = _checkpoint(partial(run, module), h, reentrant=self.kind == "reentrant")
        elif self.kind in ("checkpoint_inside", "reentrant_inside"):
            h = _checkpoint(self.body, h, reentrant=self.kind == "reentrant_inside")
        elif self.kind == "no_grad":
            with torch.no_grad():
                teacher = self.body(h)
            h = h + teacher
        elif self.kind == "sequential" and all(_is_plain(module) for module in self.parts()):
            h = self.inner(h)
        elif self.kind == "twice":
            h = self.body(self.body(h))
        elif self.kind == "residual":
            h = h + self.body(h)
        else:
            h = self.body(h)
        if self.kind == "edit":
            h.mul_(0.5)
            h[:, :2].add_(0.125)
        if self.kind == "aux":
            self.aux = torch.log1p(h.square().mean()) * 0.25
        return _RETURNS.get(self.kind, _same)(h)

    def body(self, h: Tensor) -> Tensor:
        """Run what is inside."""
        for module in self.parts():
            h = run(module, h)
        return h


class GraphModel(nn.Module):
    """The module of a ``Graph``.

    Attributes:
        faults: makes the model fail.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.faults = Faults()
        built: list[nn.Module] = []
        self.layers = nn.ModuleList(_make(node, built, self.faults) for node in graph.nodes)
        self.head = nn.Linear(WIDTH, _OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor, *, skip: int | None = None) -> Tensor:
        """Map [rows, WIDTH] to [rows, 2], leaving out the layer of the number ``skip``."""
        self.forget_aux()
        h = x
        for number, layer in enumerate(self.layers):
            if number != skip:
                h = run(layer, h)
        out: Tensor = self.head(h)
        return out

    def forget_aux(self) -> None:
        """Let go of the losses that modules keep aside, and so of the graphs behind them."""
        for module in self.modules():
            if isinstance(module, BoxModule):
                module.aux = None

    def aux_loss(self) -> Tensor:
        """Return the sum of the losses that modules kept aside in the last forward."""
        found = [m.aux for m in self.modules() if isinstance(m, BoxModule) and m.aux is not None]
        return torch.stack([torch.zeros((), dtype=torch.float64), *found]).sum()


def build(graph: Graph) -> GraphModel:
    """Return the model of a graph, with values that depend on the parameters' names only."""
    model = GraphModel(graph)
    matrices = [m for m in model.modules() if isinstance(m, LeafModule) and m.kind in _MATRIX_KINDS]
    for first, second in graph.ties:
        if matrices:
            one, two = matrices[first % len(matrices)], matrices[second % len(matrices)]
            if one.dtype == two.dtype and one.weight.requires_grad == two.weight.requires_grad:
                two.weight = one.weight
    leaves = _leaves(graph.nodes)
    borrowers = [m for m in model.modules() if isinstance(m, LeafModule) and m.kind == "borrow"]
    for module, node in zip(borrowers, [leaf for leaf in leaves if leaf.kind == "borrow"], strict=True):
        same = [m for m in matrices if m.dtype == module.dtype]
        module.lender = (same[node.of % len(same)],) if same else (module,)
    body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    for number in graph.frozen:
        if body:
            body[number % len(body)].requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            value = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(value * 0.4 + (1.0 if param.numel() == 1 else 0.0))
    return model


def run(module: nn.Module, h: Tensor) -> Tensor:
    """Call a leaf or a box the way it wants to be called, and take [rows, WIDTH] out of what it returns."""
    out = module(batch={"none": None, "h": h}) if getattr(module, "kind", "") == "kwonly" else module(h)
    if isinstance(out, Tensor):
        return out
    if isinstance(out, _Record | _Slots):
        return out.h
    if isinstance(out, Mapping):
        return cast(Tensor, out["h"])
    if isinstance(out, tuple):
        first = out[0]
        return cast(Tensor, out[1][0] if first is None else first)
    if isinstance(out, list):
        return torch.cat(out, dim=1)
    return cast(Tensor, out())


def _make(node: Node, built: list[nn.Module], faults: Faults) -> nn.Module:
    module: nn.Module
    if isinstance(node, Again) and built:
        return built[node.of % len(built)]
    if isinstance(node, Box):
        module = BoxModule(node.kind, [_make(child, built, faults) for child in node.inner])
    else:
        module = LeafModule(node if isinstance(node, Leaf) else Leaf(), faults)
    built.append(module)
    return module


def _leaves(nodes: tuple[Node, ...]) -> list[Leaf]:
    return [node for node in _walk(nodes) if isinstance(node, Leaf)]


def _is_plain(module: nn.Module) -> bool:
    return getattr(module, "kind", "") not in (*_RETURNS, "kwonly")


def _checkpoint(function: Callable[[Tensor], Tensor], h: Tensor, *, reentrant: bool) -> Tensor:
    if reentrant and not (h.requires_grad and torch.is_grad_enabled()):
        return function(h)  # torch would warn that nothing gets a gradient
    # The random state is shared by all threads, and nothing here draws from it.
    return cast(Tensor, checkpoint(function, h, use_reentrant=reentrant, preserve_rng_state=False))


def _same(h: Tensor) -> Tensor:
    return h


def _halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def _see(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    """Be a backward hook, which makes torch wrap inputs and outputs."""


def _shift_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0.125,)


def _scale_output(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out * 0.75


@dataclass
class _Record:
    h: Tensor
    spare: Tensor | None = None


class _Slots:
    __slots__ = ("h",)

    def __init__(self, h: Tensor) -> None:
        self.h = h


_RETURNS: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "dict": lambda h: {"none": None, "h": h},
        "tuple": lambda h: (None, [h, None]),
        "dataclass": lambda h: _Record(h),
        "slots": _Slots,
        "closure": lambda h: lambda: h,
        "pieces": lambda h: [h[:, :2], h[:, 2:]],
        "spare": lambda h: (h, h.square().sum()),
        "view": lambda h: h.view(-1).view(h.shape),
    }
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "tanh": torch.tanh,
        "relu": torch.relu,
        "gelu": F.gelu,
        "none": _same,
    }
)

BOX_KINDS = (
    "list",
    "sequential",
    "attributes",
    "residual",
    "twice",
    "checkpoint",
    "reentrant",
    "checkpoint_inside",
    "reentrant_inside",
    "no_grad",
    "edit",
    "aux",
    "kwonly",
    "backward_hook",
    "forward_hooks",
    *_RETURNS,
)


class _Product(torch.autograd.Function):
    """``h @ weight`` whose backward reads the weight from an attribute of the context instead of a saved tensor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        ctx.weight = weight
        return h @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        return grad @ ctx.weight.t(), h.t() @ grad


class _Table(nn.Module):
    """Returns a view of its weight, as many rows as asked for; without a number, the weight itself."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(rows, WIDTH))

    def forward(self, num_rows: int | None = None) -> Tensor:
        return self.rows if num_rows is None else self.rows[:num_rows]


def _inner_grad(m: Any, h: Tensor) -> Tensor:
    """Add a force: a gradient taken inside the forward, and treated as a constant."""
    with torch.enable_grad():
        place = h.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(place @ m.weight).sum(), place)
    out: Tensor = h @ m.weight + force
    return out


def _new(*shape: int) -> Tensor:
    return torch.empty(shape)


def _matrix(**others: Tensor) -> dict[str, Any]:
    return {"weight": _new(WIDTH, WIDTH), **others}


def _lora(m: Any, h: Tensor) -> Tensor:
    return cast(Tensor, h @ m.weight + h @ m.down @ m.up)


def _gated(m: Any, h: Tensor) -> Tensor:
    value, gate = m.both.chunk(2)
    return F.linear(h, value) * torch.sigmoid(F.linear(h, gate))


def _product(m: Any, h: Tensor) -> Tensor:
    return cast(Tensor, _Product.apply(h, m.weight))  # type: ignore[no-untyped-call]


def _borrow(m: Any, h: Tensor) -> Tensor:
    lender = m.lender[0]
    return cast(Tensor, h + m.bias if lender is m else F.linear(h, lender.weight) + m.bias)


_Make = Callable[[], dict[str, Any]]
_LEAVES: Mapping[str, tuple[_Make, Callable[[Any, Tensor], Tensor]]] = MappingProxyType(
    {
        "linear": (lambda: _matrix(bias=_new(WIDTH)), lambda m, h: F.linear(h, m.weight, m.bias)),
        "no_bias": (_matrix, lambda m, h: F.linear(h, m.weight)),
        "modules": (
            lambda: {"norm": nn.LayerNorm(WIDTH), "linear": nn.Linear(WIDTH, WIDTH)},
            lambda m, h: m.linear(m.norm(h)),
        ),
        "conv": (lambda: {"conv": nn.Conv1d(1, 1, 3, padding=1)}, lambda m, h: m.conv(h[:, None])[:, 0]),
        "norm": (lambda: {"norm": nn.LayerNorm(WIDTH)}, lambda m, h: m.norm(h)),
        "scale": (lambda: {"scale": _new()}, lambda m, h: h * m.scale),
        "odd": (lambda: {"one": _new(1), "nothing": _new(0, WIDTH)}, lambda m, h: h * m.one + m.nothing.sum()),
        "lora": (lambda: _matrix(down=_new(WIDTH, 2), up=_new(2, WIDTH)), _lora),
        "detached": (_matrix, lambda m, h: h @ m.weight + torch.tanh(h @ m.weight.detach())),
        "views": (_matrix, lambda m, h: h @ m.weight.view(-1)[: WIDTH * WIDTH].view(WIDTH, WIDTH).t() + m.weight[0]),
        "gated": (lambda: {"both": _new(2 * WIDTH, WIDTH)}, _gated),
        "transposed": (lambda: {"weight": _new(WIDTH, WIDTH).t()}, lambda m, h: h @ m.weight),
        "borrow": (lambda: {"bias": _new(WIDTH)}, _borrow),
        "unused": (_matrix, lambda m, h: h),
        "sometimes": (_matrix, lambda m, h: h @ m.weight if bool(h[0, 0] > 0) else h),
        "odd_rows": (_matrix, lambda m, h: h @ m.weight if len(h) % 2 else h),
        "masked": (_matrix, lambda m, h: torch.where(h > 0, h @ m.weight, h)),
        "grad_hook": (_matrix, lambda m, h: h @ m.weight),
        "function": (_matrix, _product),
        "embedding": (lambda: {"table": nn.Embedding(WIDTH + 1, WIDTH)}, lambda m, h: h + m.table((h > 0).sum(1))),
        "table": (lambda: {"table": _Table(8)}, lambda m, h: h + m.table(len(h))),
        "giver": (lambda: {"table": _Table(WIDTH)}, lambda m, h: F.linear(h, m.table())),
        "inner_grad": (_matrix, _inner_grad),
        "weight_norm": (
            lambda: {"normed": weight_norm(nn.Linear(WIDTH, WIDTH))},
            lambda m, h: m.normed(h),
        ),
    }
)
_MATRIX_KINDS = tuple(kind for kind, (make, _) in _LEAVES.items() if "weight" in make())
LEAF_KINDS = tuple(_LEAVES)
