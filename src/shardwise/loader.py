"""The data loader that ``initialize`` makes of a dataset: each rank its part, another order in every epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.errors import ConfigError

__all__ = ["ShardedLoader"]


class ShardedLoader(DataLoader[Any]):
    """Micro-batches of one data-parallel rank.

    The samples of an epoch are shuffled alike on all ranks and dealt out one by one; each new iteration is a new epoch.
    Without ``drop_last`` the last samples are filled up with some of the first, so that all ranks have equally many.

    Args:
        dataset: with a length; the same on all ranks.
        micro: samples per micro-batch.
        rank: data-parallel rank.
        num_ranks: data-parallel ranks.
        seed: of the order.
        drop_last: leave out what does not fill a micro-batch on all ranks.
        collate: makes a batch of samples; None: torch's.

    Raises:
        ConfigError: the dataset has no length, so nobody can deal it out.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro: int,
        rank: int,
        num_ranks: int,
        seed: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"training_data: {type(dataset).__name__} has no length, so its samples cannot be dealt out to ranks: "
                "build a DataLoader that yields this rank's part, and leave training_data out"
            )
        self._order: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=num_ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
        )
        self._next_epoch = 0
        super().__init__(dataset, batch_size=micro, sampler=self._order, drop_last=drop_last, collate_fn=collate)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch."""
        self._order.set_epoch(self._next_epoch)
        self._next_epoch += 1
        return super().__iter__()
