"""Into how many slices each state is cut: what every closed form of this package needs to know of a sharding.

May import ``sharding``. Read ``states.py`` next: it turns slices into bytes.
"""

import math
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.sharding import ALL, Placement, Sharding

__all__ = ["Ways"]


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Number of slices of each state, and number of data-parallel ranks.

    ``math.inf`` is the limit of many ranks that the papers' tables quote ("4x", "8x", "2 Psi").

    Attributes:
        param: slices of the parameters; each lies on ``data / param`` ranks.
        grad: slices of the gradients.
        optim: slices of masters and optimizer state.
        data: number of data-parallel ranks, N_d.

    Raises:
        ConfigError: the counts do not grow from ``param`` to ``data``.

    Source: ZeRO, arXiv:1910.02054, section 5; hybrid forms: MiCS, arXiv:2205.00119, FSDP, arXiv:2304.11277.
    """

    param: float = 1
    grad: float = 1
    optim: float = 1
    data: float = 1

    def __post_init__(self) -> None:
        if not 1 <= self.param <= self.grad <= self.optim <= self.data:
            raise ConfigError(f"ways: need 1 <= param <= grad <= optim <= data, got {self}")

    @classmethod
    def of(cls, placement: Placement) -> "Ways":
        """Count the slices of a sharding that lies over a mesh."""
        return cls(
            param=placement.ways(placement.num_param),
            grad=placement.ways(placement.num_grad),
            optim=placement.ways(placement.num_optim),
            data=placement.num_ranks,
        )

    @classmethod
    def over(cls, sharding: Sharding, num_ranks: float = math.inf) -> "Ways":
        """Count the slices where all data-parallel ranks lie on one axis.

        Raises:
            ConfigError: the sharding names axes; lay it over their mesh and use ``of``.
        """
        if sharding.optim - {ALL}:
            raise ConfigError(f"ways: {sharding} names axes: use Ways.of(resolve(sharding, mesh))")
        return cls(
            param=num_ranks if sharding.param else 1,
            grad=num_ranks if sharding.grad else 1,
            optim=num_ranks if sharding.optim else 1,
            data=num_ranks,
        )
