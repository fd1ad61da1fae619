"""Small models for tests: a net that can have every oddity a real model has, and one whose gradients are integers.

Owns ``OddNet`` and ``IntegerNet`` with batches for each. All numbers come from explicit generators, are drawn in fp64
and rounded afterwards, so that a model is the same on every rank, in every thread and, up to rounding, in every dtype.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = [
    "ODDITIES",
    "Block",
    "IntegerNet",
    "OddNet",
    "integer_batch",
    "make_integer_net",
    "make_odd_net",
    "odd_batch",
    "odd_loss",
]

ODDITIES = ("uneven", "tied", "frozen", "mixed", "unused", "reused")

_WIDTH = 16
_UNEVEN_WIDTH = 13
_FEATURES = 6  # of a row, in and out
_MARK = 4.0  # first feature of rows that use ``sometimes``


class Block(nn.Module):
    """A residual block of two linear maps, which may have unlike dtypes: ``h + down(tanh(up(norm(h))))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Map [rows, width] to [rows, width]."""
        hidden = torch.tanh(self.up(self.norm(h.to(self.norm.weight.dtype)).to(self.up.weight.dtype)))
        out: Tensor = h + self.down(hidden.to(self.down.weight.dtype)).to(h.dtype)
        return out


class _Readout(nn.Module):
    """Multiply by a matrix stored as an input map stores it, so that the two can be one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[1]))

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.weight + self.bias


class OddNet(nn.Module):
    """Three residual blocks between an input map and a readout, with any choice of oddities.

    - ``uneven``: a width of 13, a 0-dim, a one-element and an empty parameter: slices cut rows, most sizes are odd.
    - ``tied``: the readout is the input map's weight; the first and the last block share a matrix.
    - ``frozen``: the whole first block, a matrix of the second, the bias of the input map.
    - ``mixed``: a matrix and a norm are of another dtype, ``other_dtype``.
    - ``unused``: ``spare`` is never used; ``sometimes`` is used by the rows that ``odd_batch`` marks.
    - ``reused``: the first block runs twice in a row, the second again at the end under a second name.
    """

    def __init__(self, oddities: Iterable[str], *, dtype: torch.dtype, other_dtype: torch.dtype) -> None:
        super().__init__()
        self.oddities = frozenset(oddities)
        unknown = self.oddities - set(ODDITIES)
        if unknown:
            raise ValueError(f"oddities are {ODDITIES}, got {sorted(unknown)}")
        width = _UNEVEN_WIDTH if "uneven" in self.oddities else _WIDTH
        self.entry = nn.Linear(_FEATURES, width)
        blocks = [Block(width) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.readout = _Readout(nn.Parameter(torch.empty(width, _FEATURES)))
        if "tied" in self.oddities:
            self.readout.weight = self.entry.weight
            blocks[2].up.weight = blocks[0].up.weight
        if "uneven" in self.oddities:
            self.scale = nn.Parameter(torch.empty(()))
            self.shift = nn.Parameter(torch.empty(1))
            self.nothing = nn.Parameter(torch.empty(0, width))
        if "unused" in self.oddities:
            self.spare = nn.Linear(width, width)
            self.sometimes = nn.Linear(width, width)
        if "reused" in self.oddities:
            self.again = blocks[1]
        self.to(dtype)
        if "frozen" in self.oddities:
            blocks[0].requires_grad_(False)
            blocks[1].up.weight.requires_grad_(False)
            self.entry.bias.requires_grad_(False)
        if "mixed" in self.oddities:
            blocks[1].down.to(other_dtype)
            blocks[2].norm.to(other_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, 6] to [rows, 6]."""
        h = torch.tanh(self.entry(x))
        for block in self.blocks:
            h = block(h)
        if "reused" in self.oddities:
            h = self.again(self.blocks[0](self.blocks[0](h)))
        if "unused" in self.oddities:
            marked = x[:, :1] == _MARK
            if bool(marked.any()):
                h = h + torch.where(marked, torch.sin(self.sometimes(h)), 0.0)
        if "uneven" in self.oddities:
            h = h * self.scale + self.shift + self.nothing.sum()
        out: Tensor = self.readout(h)
        return out


def make_odd_net(*oddities: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> OddNet:
    """Return an ``OddNet`` of ``dtype``; with ``mixed``, its other dtype is fp32, or fp64 where ``dtype`` is fp32."""
    other = torch.float64 if dtype == torch.float32 else torch.float32
    model = OddNet(oddities, dtype=dtype, other_dtype=other)
    _draw(model, seed)
    return model


def odd_batch(
    step: int, *, num_rows: int = 24, dtype: torch.dtype = torch.float64, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a training step, [num_rows, 6] each.

    Step 0 marks the first three rows only (one rank, one micro-batch of a small run), step 1 none, later ones all.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    x = torch.randn(num_rows, _FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(num_rows, _FEATURES, generator=generator, dtype=torch.float64)
    num_marked = {0: 3, 1: 0}.get(step, num_rows)
    x[:num_marked, 0] = _MARK
    return x.to(dtype), y.to(dtype)


def odd_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows of a loss that is not quadratic."""
    return torch.log1p((output - target).square()).sum(dim=1).mean()


class IntegerNet(nn.Module):
    """A sum of linear maps: with ``integer_batch`` all gradients are integers, so that every sum of them is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(11, 7) for _ in range(3))
        self.shift = nn.Parameter(torch.empty(7))

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, 11] to [rows, 7]."""
        total: Tensor = self.shift + sum(layer(x) * (index + 1) for index, layer in enumerate(self.maps))
        return total


def make_integer_net(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> IntegerNet:
    """Return an ``IntegerNet`` with multiples of 1/64 as parameters."""
    model = IntegerNet().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-64, 65, param.shape, generator=generator) / 64)
    return model


def integer_batch(step: int, *, num_rows: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return inputs [num_rows, 11] and weights of the outputs [num_rows, 7] for ``(output * weight).sum() / num_rows``.

    Both are integers and the weights multiples of ``num_rows``: the sum over any equal share of the rows, divided by
    their number, has integer gradients, and so has the mean of the shares.
    """
    generator = torch.Generator().manual_seed(2000 + step)
    x = torch.randint(-4, 5, (num_rows, 11), generator=generator)
    weight = torch.randint(-3, 4, (num_rows, 7), generator=generator) * num_rows
    return x.to(dtype), weight.to(dtype)


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.copy_(values * 0.3 + (1.0 if param.dim() == 0 else 0.0))
