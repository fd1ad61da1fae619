"""``verify``: agreement is shown, broken runs are noticed by name, and what proves nothing fails."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.simulation.tables import verification_facts

from .faults import mlp, odd, odd_rows, odd_share_loss, rows, spoil


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_gpt_is_verified_in_all_precisions(num_ranks: int) -> None:
    def tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        found = torch.randint(32, (2, 9), generator=generator)
        return found[:, :-1], found[:, 1:]

    precisions = ["fp32", "bf16", "fp64", "fp16"] if num_ranks == 2 else ["fp32", "bf16"]
    result = shardwise.verify(
        lambda: GPT(GPTConfig(vocab=32, context=8, width=16, heads=2, depth=1)),
        tokens,
        ranks=num_ranks,
        stages=[0, 1, 2, 3] if num_ranks == 2 else [0, 3],
        precisions=precisions,
        max_norm=1.0,
    )
    assert result.problems == ()
    assert result.ok
    assert [comparison.precision for comparison in result.comparisons] == precisions
    assert all(update > 0 for comparison in result.comparisons for update in comparison.updates.values())


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_spoiled_reduction_fails_and_names_the_tensor(stage: int, precision: str) -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 4))  # noqa: E731
    fault = spoil(number=1, amount=256.0 if precision == "fp16" else 0.25)  # fp16 gradients are scaled
    result = shardwise.verify(model, rows, stages=[stage], precisions=[precision], optimizer="sgd", instrument=fault)
    assert not result.ok
    assert f"{precision}, stage {stage} is not plain training" in result.problems[0]
    assert "parameters 0.weight" in result.problems[0]
    assert "NOT SHOWN" in str(result)


def test_a_fault_of_one_stage_only_breaks_the_bits_between_stages() -> None:
    calls = []

    def instrument(mesh: Any) -> Any:
        calls.append(mesh["data"].rank)
        return spoil(amount=1e-9, number=0)(mesh) if len(calls) > 2 else mesh  # the second stage, far below tolerance

    result = shardwise.verify(mlp, rows, stages=[0, 3], precisions=["fp64"], optimizer="sgd", instrument=instrument)
    assert any("stage 3 and stage 0 must agree to the bit" in problem for problem in result.problems)


def test_a_lost_update_is_noticed() -> None:
    class Forgetful(torch.optim.SGD):
        """Updates whole tensors of the plain side only."""

        def step(self, closure: Any = None) -> None:
            if all(param.dim() != 1 for group in self.param_groups for param in group["params"] if param.numel() > 4):
                super().step(closure)

    result = shardwise.verify(mlp, rows, optimizer=lambda model: Forgetful(model.parameters(), lr=0.1), stages=[3])
    assert not result.ok


def test_tensors_that_never_move_fail_unless_they_may_stay() -> None:
    arguments: dict[str, Any] = {"ranks": 2, "steps": 2, "loss": odd_share_loss, "stages": [0, 3]}
    result = shardwise.verify(odd("unused"), odd_rows, **arguments)
    (problem,) = result.problems
    assert problem.startswith("fp32 proves nothing: trainable tensors never moved, no gradient reached them")
    assert "spare.weight, spare.bias" in problem
    assert shardwise.verify(odd("unused"), odd_rows, may_stay=["spare.weight", "spare.bias"], **arguments).ok
    with pytest.raises(ConfigError, match=r"may_stay: the model has no parameters \['nothing'\]"):
        shardwise.verify(mlp, rows, may_stay=["nothing"])


def test_equal_shares_prove_nothing() -> None:
    result = shardwise.verify(mlp, lambda step, rank: rows(step, 0), stages=[3])
    assert result.problems == ("fp32 proves nothing: ranks get the same share of the batch in steps 0, 1, 2",)


def test_updates_below_the_tolerance_prove_nothing() -> None:
    tiny = lambda model: torch.optim.SGD(model.parameters(), lr=1e-6)  # noqa: E731
    result = shardwise.verify(mlp, rows, stages=[3], optimizer=tiny)
    assert any("the largest update is" in problem for problem in result.problems)


def test_losses_that_are_not_finite_fail() -> None:
    wild = lambda model: torch.optim.SGD(model.parameters(), lr=1e30)  # noqa: E731
    result = shardwise.verify(mlp, rows, stages=[3], optimizer=wild)
    assert any("not finite" in problem for problem in result.problems)
    assert verification_facts(result)["ok"] is False


def test_dropout_is_off_and_named() -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))  # noqa: E731
    result = shardwise.verify(model, rows, stages=[0, 3])
    assert result.ok
    assert result.notes == ("dropout is off, masks of unlike shares cannot agree: 1.p",)


def test_a_model_that_draws_fails_with_the_reason() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(4)

    result = shardwise.verify(lambda: Noisy(8, 4), rows, stages=[0])
    assert any("draws random numbers in forward" in problem for problem in result.problems)


def test_batch_norm_is_noted_and_agrees_on_the_same_shares() -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))  # noqa: E731
    # The bias before the norm has a gradient of rounding noise: one thread and one kernel make it the same noise.
    result = shardwise.verify(model, rows, ranks=3)
    assert result.problems == ()
    assert "results depend on how the batch is shared" in result.notes[0]


def test_facts_have_exactly_the_promised_fields() -> None:
    facts = verification_facts(shardwise.verify(mlp, rows, steps=1))
    assert list(facts) == ["ranks", "steps", "params", "precisions", "notes", "problems", "ok"]
    (precision,) = facts["precisions"]
    assert list(precision) == ["precision", "allowed", "plain_losses", "updates", "stages"]
    assert precision["allowed"] == 1e-5
    assert list(precision["updates"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for stage in precision["stages"]:
        assert list(stage) == ["stage", "losses", "unlike_bits", "differences"]
        names = {difference["name"] for difference in stage["differences"]}
        assert {"losses", "outputs", "parameters 0.weight", "gradients 0.weight"} <= names
        assert "optimizer_state 0.weight/exp_avg" in names
        assert all(list(found) == ["name", "largest", "relative", "allowed"] for found in stage["differences"])


def test_precisions_are_a_list_of_known_names() -> None:
    with pytest.raises(ConfigError, match="precisions: expected a list of names"):
        shardwise.verify(mlp, rows, precisions="fp32")
    with pytest.raises(ConfigError, match="precision: expected one of"):
        shardwise.verify(mlp, rows, precisions=["fp8"])
