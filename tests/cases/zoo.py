"""Odd models and odd windows, by name: what ``test_structure.py`` trains at every stage.

All in fp64, so that the reference is met to 1e-12, whatever the order of sums.
"""

import types
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .harness import FP32_TOLERANCE, FP64_TOLERANCE, Block, Net, Window, data, defer, fill, net_loss, net_window

FP64 = torch.float64
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A model, what its windows do, and how to shard it."""

    name: str
    make: Callable[[], nn.Module]
    window: Window = net_window
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = FP64_TOLERANCE
    steps: int = 2
    large: bool = False

    def __str__(self) -> str:
        return self.name


def linear(rows: int, columns: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, dtype=FP64)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=FP64))


class Chain(nn.Module):
    """Entry, given blocks in a ModuleList, head; ``call`` says how a block is called."""

    def __init__(self, *blocks: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.entry = linear(WIDTH, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = linear(2, WIDTH)
        self._call = call or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = self._call(block, x)
        return self.head(x)


def chain(
    *blocks: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor] | None = None, scale: float = 0.3
) -> Any:
    """Return a function that builds a filled ``Chain``."""
    return lambda: fill(Chain(*(block() for block in blocks), call=call), scale=scale)


# Shapes and memory


class Tiny(nn.Module):
    """Parameters of one element, of no dimension, and of no elements, around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter(1)
        self.temperature = parameter()
        self.nothing = parameter(0, WIDTH)
        self.layer = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        empty = F.linear(x, self.nothing).sum()
        return x + self.layer(x).tanh() * self.gain * self.temperature.exp() + empty


class Scalar(nn.Module):
    """A unit that is one number."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = parameter(*shape)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + self.value)


class Empty(nn.Module):
    """A unit without a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight).sum()


class Strided(nn.Module):
    """Parameters that are transposed, sliced, and reversed views."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.zeros(WIDTH, WIDTH + 1, dtype=FP64).t())
        self.sliced = nn.Parameter(torch.zeros(WIDTH, 3 * (WIDTH + 1), dtype=FP64)[:, ::3])
        self.permuted = nn.Parameter(torch.zeros(2, WIDTH, 3, dtype=FP64).permute(2, 0, 1))
        assert not any(p.is_contiguous() for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.transposed.t()).tanh() @ self.sliced.t() + x * self.permuted.sum((0, 1))


class Image(nn.Module):
    """Convolutions in channels-last memory, one of them three-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, dtype=FP64).to(memory_format=torch.channels_last)
        self.volume = nn.Conv3d(4, 2, 2, dtype=FP64).to(memory_format=torch.channels_last_3d)
        assert not self.conv.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.new_ones(x.shape[0], 2, WIDTH, 1) * x[:, None, :, None]
        seen = self.conv(pixels.to(memory_format=torch.channels_last)).tanh()
        deep = self.volume(torch.stack([seen, seen * 2], dim=2).expand(-1, -1, -1, -1, 2))
        return x + F.pad(deep.flatten(2).sum(2), (0, WIDTH - 2))


class MixedTypes(nn.Module):
    """Two dtypes in one unit, casts by hand, and an integer that cannot train."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        small = self.narrow(x.float()).double()
        return x + self.wide(small.tanh())[:, self.table]


# Names and sharing


class TiedLanguageModel(nn.Module):
    """Embedding and head are one weight; two hidden layers share theirs, and the second name comes from a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH, dtype=FP64)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.blocks[2].inner.weight = self.blocks[1].inner.weight
        self.head = linear(5, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def token_window(model: nn.Module, rank: int, step: int) -> None:
    tokens = torch.arange(7).mul(rank + 2 + step).remainder(5)
    F.cross_entropy(model(tokens), tokens.roll(1)).backward()


class SharedModules(nn.Module):
    """One block registered under three names, one of them inside another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = linear(WIDTH, 4)
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])
        self.again = self.blocks[0]
        self.holder = nn.ModuleList([Nested(), Nested()])
        self.holder[1].child = self.blocks[1]
        self.head = linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.blocks[0](self.entry(x)))
        for block in (*self.holder, self.blocks[1]):
            x = block(x)
        return self.head(x)


class Nested(nn.Module):
    """A unit around a unit, with a parameter of its own."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = parameter(WIDTH)
        self.child = child or Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * (1 + self.scale) + self.child(x * self.scale)


class SelfCalling(nn.Module):
    """A unit that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return x + self.layer(x if depth == 0 else self(x.tanh(), depth - 1))


# Weights used elsewhere


class External(nn.Module):
    """The parent uses a child's weight and another child's bias without calling them first."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = linear(WIDTH, 4)
        self.blocks = nn.ModuleList([linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)])
        self.head = linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * self.blocks[2].bias
        x = x + F.linear(x, self.blocks[0].weight).tanh()
        x = self.blocks[1](x) + self.blocks[2](x) * self.blocks[1].bias
        return self.head(x) + self.blocks[0](x)[:, :2]


class Penalty(nn.Module):
    """The forward adds the norm of all parameters, released ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + sum(p.square().sum() for p in self.parameters()) * 0.1


class Neighbour(nn.Module):
    """A unit that reads the weight of another unit, which it does not own."""

    def __init__(self, other: Block | None = None) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self._other = [other]  # hidden from the module tree

    def forward(self, x: Tensor) -> Tensor:
        other = self._other[0]
        return self.block(x) if other is None else self.block(x) + x @ other.outer.weight[:, :WIDTH]


def make_neighbours() -> nn.Module:
    first = Neighbour()
    return fill(Chain(first, Neighbour(first.block), Neighbour(first.block)))


class Detached(nn.Module):
    """A weight that is also used without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh() @ self.layer.weight.detach()


class NoGradient(torch.autograd.Function):
    """A product whose backward gives the weight no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.saved_tensors[0].t(), None


class PartlyUsed(nn.Module):
    """One weight gets None from a custom function, one is masked out, one is unused, one is used on some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.none = parameter(WIDTH, WIDTH)
        self.masked = parameter(WIDTH)
        self.unused = linear(WIDTH, WIDTH)
        self.sometimes = parameter(WIDTH)
        self.layer = linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + NoGradient.apply(self.layer(x), self.none)
        x = torch.where(torch.tensor([False]), x * self.masked, x)
        return x * self.sometimes if x.shape[0] == 4 else x


def partly_window(model: nn.Module, rank: int, step: int) -> None:
    """The batch has four rows in the second step only, on all ranks."""
    model(data(4 if step == 1 else 3, 4, key=(rank, step))).square().mean().backward()


class Branches(nn.Module):
    """One of several units computes, by the step; the others are unused on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.experts[step % 3](self.entry(x))


def branch_window(model: nn.Module, rank: int, step: int) -> None:
    model(data(3, 4, key=(rank, step)), step).square().mean().backward()


class RankUnused(nn.Module):
    """A parameter of the root that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(WIDTH)
        self.extra = parameter(2)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = self.net(x)
        return x + self.extra if extra else x


def rank_unused_window(model: nn.Module, rank: int, step: int) -> None:
    model(data(3, 4, key=(rank, step)), rank == 1).square().mean().backward()


# Modules of torch with ways of their own to reach their weights


class Recurrent(nn.Module):
    """LSTM and GRU keep a flat list of their weights; the second has two layers and both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, dtype=FP64)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, dtype=FP64)
        self.cell = nn.LSTMCell(WIDTH, WIDTH, dtype=FP64)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x[None])
        z, _ = self.gru(y.transpose(0, 1))
        return x + self.cell(z[:, 0])[0]


class Attention(nn.Module):
    """Attention and a whole encoder layer, which take a fused path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=FP64)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True, dtype=FP64)
        self.norm = nn.GroupNorm(2, WIDTH, dtype=FP64)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH, dtype=FP64)
        self.bag = nn.EmbeddingBag(3, WIDTH, mode="sum", dtype=FP64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x[None], x[None], x[None], need_weights=False)[0]
        y = self.layer(y)[0]
        return self.norm(self.bilinear(x, y)) + self.bag(torch.tensor([[0, 2]]))


def attention_window(model: nn.Module, rank: int, step: int) -> None:
    model.eval()
    with torch.no_grad():
        expected = model(data(3, 4, key=0))
    with torch.inference_mode():
        assert torch.allclose(model(data(3, 4, key=0)), expected, atol=1e-10)
    model.train()
    assert torch.allclose(model(data(3, 4, key=0)), expected, atol=1e-10)
    net_window(model, rank, step)


def make_weight_norm() -> nn.Module:
    """Weights that are computed from two parameters whenever they are read."""
    net = Net(WIDTH)
    for block in net.blocks:
        nn.utils.parametrizations.weight_norm(block.inner)
        nn.utils.parametrize.register_parametrization(block.outer, "weight", Doubled())
    return fill(net)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


# Outputs and inputs


@dataclass
class Output:
    hidden: Tensor
    extra: Any = None


@dataclass(frozen=True)
class FrozenOutput:
    hidden: Tensor


@dataclass(slots=True)
class SlottedOutput:
    hidden: Tensor


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Pair(NamedTuple):
    hidden: Tensor
    nothing: None


class Attributes(UserDict[str, Tensor]):
    pass


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (t, t.detach()), lambda o: o[0]),
    "list with None": (lambda t: [None, t], lambda o: o[1]),
    "dict with None": (lambda t: {"x": t, "cache": None}, lambda o: o["x"]),
    "ordered dict": (lambda t: OrderedDict(x=t), lambda o: o["x"]),
    "user dict": (lambda t: Attributes(x=t), lambda o: o["x"]),
    "named tuple": (lambda t: Pair(t, None), lambda o: o.hidden),
    "dataclass": (lambda t: Output(t), lambda o: o.hidden),
    "frozen dataclass": (lambda t: FrozenOutput(t), lambda o: o.hidden),
    "slotted dataclass": (lambda t: SlottedOutput(t), lambda o: o.hidden),
    "slots": (Slots, lambda o: o.hidden),
    "namespace": (lambda t: types.SimpleNamespace(hidden=t), lambda o: o.hidden),
    "closure": (lambda t: lambda: t, lambda o: o()),
    "generator": (lambda t: (part for part in [t]), next),
    "nested": (lambda t: {"a": [Output(t, {"b": (None, t * 2)})]}, lambda o: o["a"][0].extra["b"][1] / 2),
    "nested dataclass": (lambda t: Output(t.detach(), Output(t)), lambda o: o.extra.hidden),
    "half used": (lambda t: (t[:, :3], t[:, 3:], t * 3), lambda o: torch.cat(o[:2], 1)),
}


class Packing(nn.Module):
    """A block whose output, and whose input after the first, is in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        pack, unpack = CONTAINERS[self.kind]
        return pack(self.block(x if isinstance(x, Tensor) else unpack(x)))


def packing(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Chain(*(Packing(kind) for _ in range(3)))
        unpack = CONTAINERS[kind][1]
        net.register_forward_hook(lambda module, args, output: output)
        net.head = Unpacking(net.head, unpack)
        return fill(net)

    return make


class Unpacking(nn.Module):
    def __init__(self, inner: nn.Module, unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.unpack = unpack

    def forward(self, x: Any) -> Tensor:
        return self.inner(self.unpack(x))


class KeywordOnly(nn.Module):
    """Nothing positional, a tensor inside an options object, a default."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, *, hidden: Tensor, options: dict[str, Any], flag: bool = False) -> dict[str, Tensor]:
        assert not flag
        return {"hidden": self.block(hidden) * options["inner"].hidden}


def keyword_call(block: nn.Module, x: Tensor) -> Tensor:
    view = torch.stack([x, x], dim=1)[:, 1]  # a view of a larger tensor
    return block(hidden=view, options={"inner": Output(x.sigmoid())})["hidden"]


class SideLoss(nn.Module):
    """Keeps a loss on itself, outside what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.router = linear(3, WIDTH)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.router(x).softmax(-1).square().mean()
        return self.block(x)


def side_window(model: nn.Module, rank: int, step: int) -> None:
    loss = net_loss(model, rank, step)
    (loss + sum(block.aux for block in model.blocks)).backward()


def inplace_call(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    y.add_(1.0)
    y[:, :2].mul_(2.0)
    y[0].view(-1).clamp_(-3.0, 3.0)
    return y


class ViewOutput(nn.Module):
    """Returns a view of what it computed; the caller writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, 2, WIDTH)[:, 1]


class PassThrough(nn.Module):
    """Returns its input beside its output, and one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.scale = parameter(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.block(x), self.scale


# Checkpoints and frozen parts


def checkpointed(reentrant: bool, uses: int = 1) -> Callable[[nn.Module, Tensor], Tensor]:
    def call(block: nn.Module, x: Tensor) -> Tensor:
        for _ in range(uses):
            x = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False)
        return x

    return call


class InnerCheckpoint(nn.Module):
    """Checkpoints a part of its own forward, once or more."""

    def __init__(self, reentrant: bool, uses: int = 1) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.scale = parameter(WIDTH)
        self.reentrant = reentrant
        self.uses = uses

    def part(self, x: Tensor) -> Tensor:
        return self.block.outer(self.block.inner(x).tanh()) * (1 + self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = x + checkpoint(self.part, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return x


class Adapter(nn.Module):
    """A frozen layer with a trainable low-rank path beside it."""

    def __init__(self, base_dtype: torch.dtype = FP64) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=base_dtype).requires_grad_(False)
        self.down = linear(2, WIDTH, bias=False)
        self.up = linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return x + (base + self.up(self.down(x))).tanh()


def make_adapters(
    call: Callable[[nn.Module, Tensor], Tensor] | None = None, base_dtype: torch.dtype = FP64, num_blocks: int = 3
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = fill(Chain(*(Adapter(base_dtype) for _ in range(num_blocks)), call=call))
        net.entry.requires_grad_(False)
        net.head.requires_grad_(False)
        return net

    return make


def make_frozen_trunk() -> nn.Module:
    net = fill(Net(WIDTH))
    net.entry.requires_grad_(False)
    net.blocks.requires_grad_(False)
    return net


def make_frozen_middle() -> nn.Module:
    net = fill(Net(WIDTH))
    net.blocks[1].requires_grad_(False)
    net.blocks[2].inner.bias.requires_grad_(False)
    return net


# Windows: orders of forward and backward


def two_forwards_window(model: nn.Module, rank: int, step: int) -> None:
    first, second = net_loss(model, rank, step, 0), net_loss(model, rank, step, 1)
    first.backward()
    second.backward()


def two_forwards_reversed_window(model: nn.Module, rank: int, step: int) -> None:
    losses = [net_loss(model, rank, step, micro) for micro in range(3)]
    for loss in reversed(losses):
        loss.backward()


def summed_losses_window(model: nn.Module, rank: int, step: int) -> None:
    sum(net_loss(model, rank, step, micro) for micro in range(3)).backward()


def retained_window(model: nn.Module, rank: int, step: int) -> None:
    y = model(data(3, 4, key=(rank, step)))
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()


def retained_thrice_window(model: nn.Module, rank: int, step: int) -> None:
    y = model(data(3, 4, key=(rank, step)))
    for power in (2, 3, 4):
        y.pow(power).mean().backward(retain_graph=power < 4)


def retained_zeroed_window(model: nn.Module, rank: int, step: int) -> None:
    y = model(data(3, 4, key=(rank, step)))
    y.square().mean().backward(retain_graph=True)
    model.zero_grad()
    y.abs().mean().backward()


def parts_window(model: nn.Module, rank: int, step: int) -> None:
    """Two losses that reach the parameters by one call with two roots."""
    y = model(data(3, 4, key=(rank, step)))
    torch.autograd.backward([y[:, 0].sum(), y[:, 1].square().sum()])


def dropped_forward_window(model: nn.Module, rank: int, step: int) -> None:
    """Forwards whose graphs are never used, before and between."""
    net_loss(model, rank, step, 5)
    net_window(model, rank, step)
    kept = net_loss(model, rank, step, 6)
    net_loss(model, rank, step, 7).backward()
    del kept


def evaluating_window(model: nn.Module, rank: int, step: int) -> None:
    """Other passes between a forward and its backward."""
    loss = net_loss(model, rank, step)
    with torch.no_grad():
        net_loss(model, rank, step, 1)
    model.eval()
    with torch.no_grad():
        model(data(1, 4, key=0))
    model.train()
    loss.backward()
    with torch.no_grad():
        net_loss(model, rank, step, 2)


def eval_mode_window(model: nn.Module, rank: int, step: int) -> None:
    model.eval()
    net_window(model, rank, step)
    model.train()


def input_gradient_window(model: nn.Module, rank: int, step: int) -> None:
    """The gradient of the input enters the loss of a second forward."""
    before = [p.grad is None for p in model.parameters()]
    x = data(3, 4, key=(rank, step)).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    assert grad.abs().sum() > 0
    assert [p.grad is None for p in model.parameters()] == before
    model(x.detach() + grad).square().mean().backward()


def leaf_input_window(model: nn.Module, rank: int, step: int) -> None:
    x = data(3, 4, key=(rank, step)).requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def submodule_window(model: nn.Module, rank: int, step: int) -> None:
    """A block is called by itself, outside the root, before the root and in one graph with it."""
    x = data(3, WIDTH, key=(rank, step))
    alone = model.blocks[1](x).square().mean()
    alone.backward()
    (net_loss(model, rank, step) + model.blocks[0](x).mean()).backward()


def deferred_window(model: nn.Module, rank: int, step: int) -> None:
    with defer(model):
        net_loss(model, rank, step, 0).backward()
        net_loss(model, rank, step, 1).backward()
    net_loss(model, rank, step, 2).backward()


def hooked_window(model: nn.Module, rank: int, step: int) -> None:
    """Hooks of the user on tensors, outputs and parameters change the gradient."""
    handles = [p.register_hook(lambda grad: grad * 2) for p in model.parameters()]
    handles.append(model.head.register_forward_hook(lambda module, args, output: output * 3))
    handles.append(model.blocks[0].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 5,)))
    net_window(model, rank, step)
    for handle in handles:
        handle.remove()


def unused_output_window(model: nn.Module, rank: int, step: int) -> None:
    """The loss depends on the last layer's bias only through a constant; the rest of the graph gets zeros."""
    y = model(data(3, 4, key=(rank, step)))
    (y * torch.tensor([0.0, 1.0 + rank], dtype=y.dtype)).sum().backward()


SHAPES = [
    Case("tiny parameters", chain(Tiny, Tiny)),
    Case("one number per unit", chain(Scalar, lambda: Scalar(1), lambda: Scalar(1, 1))),
    Case("units without elements", chain(Empty, Block, Empty)),
    Case("strided parameters", chain(Strided, Strided)),
    Case("channels last", chain(Image, Image)),
    Case("mixed dtypes", chain(MixedTypes, MixedTypes), tolerance=FP32_TOLERANCE),
]
NAMES = [
    Case("tied weights", lambda: fill(TiedLanguageModel()), token_window),
    Case("shared modules", lambda: fill(SharedModules())),
    Case("nested units", chain(Nested, Nested), options={"units": (Nested, Block)}),
    Case("doubly nested units", chain(lambda: Nested(Nested()), Nested), options={"units": (Nested, Block)}),
    Case("self-calling unit", chain(SelfCalling, SelfCalling)),
    Case("same block twice in a row", chain(Block, Block, call=lambda block, x: block(block(x)))),
]
USES = [
    Case("external weights", lambda: fill(External())),
    Case("penalty over all parameters", lambda: fill(Penalty())),
    Case("weights of a neighbour", make_neighbours),
    Case("detached weights", chain(Detached, Detached)),
    Case("partly used", chain(PartlyUsed, PartlyUsed), partly_window, steps=3),
    Case("branches by step", lambda: fill(Branches()), branch_window, steps=4),
    Case("used on one rank", lambda: fill(RankUnused()), rank_unused_window),
    Case("side loss", chain(SideLoss, SideLoss), side_window),
]
MODULES = [
    Case("recurrent", chain(Recurrent, Recurrent)),
    Case("attention", chain(Attention, Attention), attention_window),
    Case("weight norm", make_weight_norm),
]
OUTPUTS = [Case(f"output in {kind}", packing(kind)) for kind in CONTAINERS] + [
    Case("keyword only", chain(KeywordOnly, KeywordOnly, call=keyword_call)),
    Case("outputs changed in place", chain(Block, Block, Block, call=inplace_call)),
    Case("view outputs changed in place", chain(ViewOutput, ViewOutput, call=inplace_call)),
    Case("input and parameter returned", chain(PassThrough, PassThrough, call=lambda b, x: sum(b(x)))),
    Case("output dropped", chain(Block, Block, call=lambda b, x: (b(x), x * 2)[1])),
]
CHECKPOINTS = [
    Case(f"checkpoint {'reentrant' if reentrant else 'plain'} {place} {uses}", make, large=uses == 3)
    for reentrant in (True, False)
    for uses in (1, 2, 3)
    for place, make in (
        ("around", chain(Block, Block, call=checkpointed(reentrant, uses))),
        ("inside", chain(*[lambda r=reentrant, u=uses: InnerCheckpoint(r, u)] * 2)),
        (
            "around inside",
            chain(
                *[lambda r=reentrant, u=uses: InnerCheckpoint(r, u)] * 2, call=checkpointed(reentrant, uses), scale=0.1
            ),
        ),
    )
]
FROZEN = [
    Case("frozen trunk", make_frozen_trunk),
    Case("frozen middle", make_frozen_middle),
    Case("adapters", make_adapters()),
    Case("adapters reused", make_adapters(lambda block, x: block(block(x)))),
    Case("adapters checkpointed", make_adapters(checkpointed(False))),
    Case("adapters reused and checkpointed", make_adapters(checkpointed(False, 2))),
    Case("adapters on a bf16 base", make_adapters(base_dtype=torch.bfloat16)),
    Case("adapters on a checkpointed bf16 base", make_adapters(checkpointed(False), torch.bfloat16)),
]
ORDERS = [
    Case(
        window.__name__.removesuffix("_window").replace("_", " "),
        lambda: fill(Net(WIDTH)),
        window,
        # A block that is called by itself must be a unit, or be made of units.
        {"units": Block} if window is submodule_window else {},
    )
    for window in (
        two_forwards_window,
        two_forwards_reversed_window,
        summed_losses_window,
        retained_window,
        retained_thrice_window,
        retained_zeroed_window,
        parts_window,
        dropped_forward_window,
        evaluating_window,
        eval_mode_window,
        input_gradient_window,
        leaf_input_window,
        submodule_window,
        deferred_window,
        hooked_window,
        unused_output_window,
    )
]
CASES = [*SHAPES, *NAMES, *USES, *MODULES, *OUTPUTS, *CHECKPOINTS, *FROZEN, *ORDERS]
