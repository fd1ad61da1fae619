"""The data loader that ``initialize`` makes of a dataset: each rank its part, another order in every epoch."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.errors import ConfigError, StateError

__all__ = ["ShardedLoader"]


class _Order(DistributedSampler[Any]):
    """The order of an epoch, begun after some samples."""

    num_done = 0  # samples of this rank, in this epoch

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.num_done, None)


class ShardedLoader(DataLoader[Any]):
    """Micro-batches of one data-parallel rank.

    The samples of an epoch are shuffled alike on all ranks and dealt out one by one; each new iteration is a new epoch.
    Without ``drop_last`` the last samples are filled up with some of the first, so that all ranks have equally many.

    ``state_dict`` is the position: micro-batches that were given out count as used. It may be loaded on another number
    of ranks or with another micro-batch; the next iteration then goes on with the rest of its epoch.

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
        self._order = _Order(dataset, num_replicas=num_ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last)
        self._epoch = 0  # of the next sample
        self._num_used = 0  # samples of it, over all ranks
        self._is_running = False  # whether the newest iteration is in this epoch
        self._num_iterations = 0
        super().__init__(
            dataset,
            batch_size=micro,
            sampler=self._order,
            drop_last=drop_last,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),  # or each iteration would draw from the global one
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch, or go on with the one that a loaded state was in."""
        if self._is_running:
            self._end_epoch()
        self._is_running = True
        self._order.set_epoch(self._epoch)
        self._order.num_done = self._num_used // self._order.num_replicas
        self._num_iterations += 1
        return self._counted(super().__iter__(), self._num_iterations)

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch of the next sample, and how many samples of it all ranks have used."""
        return {"epoch": self._epoch, "samples": self._num_used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration begin where ``state_dict`` was taken.

        Raises:
            StateError: it is no position.
        """
        epoch, samples = state.get("epoch"), state.get("samples")
        if type(epoch) is not int or type(samples) is not int or min(epoch, samples) < 0:
            raise StateError(f"loader.load_state_dict: {dict(state)} is no position in the data")
        self._epoch, self._num_used, self._is_running = epoch, samples, False
        self._num_iterations += 1

    def _end_epoch(self) -> None:
        self._epoch, self._num_used, self._is_running = self._epoch + 1, 0, False

    def _counted(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        micro, num_ranks = self.batch_size or 1, self._order.num_replicas
        for batch in batches:
            if number == self._num_iterations:  # else a newer iteration counts
                self._num_used += micro * num_ranks
                left = self._order.num_samples - self._num_used // num_ranks
                if left < (micro if self.drop_last else 1):
                    self._end_epoch()
            yield batch
        if number == self._num_iterations and self._is_running:
            self._end_epoch()
