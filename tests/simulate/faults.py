"""A communicator that does one thing wrong, and the models of these tests."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm, Key, Mesh, Work
from shardwise.comm.recording import Log, RecordingComm
from shardwise.testing.models import make_odd_net, odd_batch, odd_loss


class SpoiledComm(RecordingComm):
    """Adds to one element of what this rank sends in its n-th reduction."""

    def __init__(self, comm: Comm, number: int, amount: float) -> None:
        super().__init__(comm, Log())
        self.left = number
        self.amount = amount

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, key: Key, *, wire: torch.dtype, sum: torch.dtype
    ) -> Work | None:
        self.left -= 1
        if self.left == -1:
            buffer[0] += self.amount
        return self.comm.reduce_scatter(buffer, out, key, wire=wire, sum=sum)


def spoil(*, rank: int = 1, number: int = 2, amount: float = 0.5) -> Callable[[Mesh], Mesh]:
    """Return what spoils one reduction of one rank."""

    def instrument(mesh: Mesh) -> Mesh:
        return {axis: SpoiledComm(comm, number, amount) if comm.rank == rank else comm for axis, comm in mesh.items()}

    return instrument


def mlp() -> nn.Module:
    """A small model that draws from torch's generator when it is built."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs [4, 8] and targets [4, 4]."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def odd(*oddities: str) -> Callable[[], nn.Module]:
    """Return what makes an ``OddNet`` in fp32."""
    return lambda: make_odd_net(*oddities, dtype=torch.float32)


def odd_rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of an ``OddNet``, [4, 6] each; all rows use all of it."""
    return odd_batch(step + 2, num_rows=4, dtype=torch.float32, seed=rank)


def odd_share_loss(model: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of an ``OddNet`` on a share, computed in at least fp32."""
    output, target = model(share[0]), share[1]
    if output.dtype.itemsize < 4:
        output, target = output.float(), target.float()
    return odd_loss(output, target)
