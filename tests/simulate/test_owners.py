"""The arithmetic of owners: the examples of CMU 11-868, lecture 18, and torch's own partition."""

import doctest
import warnings

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.simulation import owners
from shardwise.simulation.owners import greedy_owners, owned_elements, owner_traffic


def test_examples_of_the_docstrings_hold() -> None:
    result = doctest.testmod(owners)
    assert result.attempted >= 6
    assert result.failed == 0


@pytest.mark.parametrize(
    ("numels", "owned"), [((100, 60, 40), (100, 100)), ((100, 30, 20), (100, 50))], ids=["balanced", "unbalanced"]
)
def test_greedy_partition_of_the_lecture_on_two_ranks(numels: tuple[int, ...], owned: tuple[int, int]) -> None:
    assert owned_elements(numels, greedy_owners(numels, 2), 2) == owned


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_owners_send_in_sum_what_slices_send(num_ranks: int) -> None:
    numels = [100, 30, 20, 7]
    for num_broadcasts in (1, 2):
        traffic = owner_traffic(
            numels,
            greedy_owners(numels, num_ranks),
            num_ranks,
            reduced=[True] * len(numels),
            num_broadcasts=num_broadcasts,
        )
        assert sum(traffic.sent_elements) == (1 + num_broadcasts) * (num_ranks - 1) * sum(numels)


def test_frozen_tensors_are_broadcast_and_not_reduced() -> None:
    traffic = owner_traffic([8, 4], (0, 1), 2, reduced=[False, True], num_broadcasts=2)
    assert traffic.sent_elements == (2 * 8 + 4, 2 * 4)
    assert traffic.num_collectives == 5


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_partition_is_that_of_the_zero_redundancy_optimizer(num_ranks: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    generator = torch.Generator().manual_seed(0)
    numels = [*torch.randint(0, 50, (40,), generator=generator).tolist(), 7, 7, 7]
    params = [torch.empty(numel) for numel in numels]
    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)  # its __init__ wants a process group
    vars(optimizer).update(world_size=num_ranks, param_groups=[{"params": params}], _partition_parameters_cache=[])
    parts = optimizer._partition_parameters()
    theirs = {id(param): rank for rank, groups in enumerate(parts) for group in groups for param in group["params"]}
    assert [theirs[id(param)] for param in params] == list(greedy_owners(numels, num_ranks))


def test_no_ranks_and_negative_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one rank"):
        greedy_owners([1], 0)
    with pytest.raises(ConfigError, match="sizes >= 0"):
        greedy_owners([-1], 1)
