"""``simulate``: what is kept and sent, and that the numbers are those of plain training."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.simulation.tables import simulation_facts

from .faults import mlp, odd, odd_rows, odd_share_loss, rows, spoil

KINDS = ["param", "master", "grad", "optim"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_equals_plain_training(precision: str, num_ranks: int) -> None:
    result = shardwise.simulate(mlp, rows, ranks=num_ranks, precision=precision, max_norm=0.5)
    assert result.problems == ()
    assert result.equal
    assert [run.stage for run in result.stages] == [0, 1, 2, 3]
    assert [run.stage for run in result.owners] == [2, 3]


@pytest.mark.parametrize("oddities", [("frozen", "reused"), ("uneven", "tied", "frozen")], ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_odd_models_equal_plain_training(oddities: tuple[str, ...], precision: str) -> None:
    result = shardwise.simulate(
        odd(*oddities), odd_rows, ranks=3, steps=2, precision=precision, optimizer="sgd", loss=odd_share_loss
    )
    assert result.problems == ()


def test_kept_bytes_shrink_with_the_stage() -> None:
    result = shardwise.simulate(mlp, rows, ranks=2, steps=1, align=1)
    numel = result.num_params
    assert numel == 8 * 16 + 16 + 16 * 4 + 4
    by_stage = [{kind: run.kept_bytes[0][kind] for kind in KINDS} for run in result.stages]
    whole, half = 4 * numel, 2 * numel
    assert by_stage == [
        {"param": whole, "master": 0, "grad": whole, "optim": 2 * whole},
        {"param": whole, "master": 0, "grad": whole, "optim": 2 * half},
        {"param": whole, "master": 0, "grad": half, "optim": 2 * half},
        {"param": half, "master": 0, "grad": half, "optim": 2 * half},
    ]
    assert all(run.as_planned for run in result.stages)


def test_sent_elements_follow_the_formula_in_every_step_on_every_rank() -> None:
    num_ranks, numel = 4, 212
    result = shardwise.simulate(mlp, rows, ranks=num_ranks, steps=2, align=1)
    for run in result.stages[:3]:
        for steps in run.sent:
            for step in steps:
                moved = {sent.verb: sent for sent in step if sent.verb != "record"}
                assert sum(sent.elements for sent in moved.values()) == 2 * numel * (num_ranks - 1) // num_ranks
                assert all(sent.bytes == 4 * sent.elements for sent in moved.values())
    verbs = [[sent.verb for sent in run.sent[0][0] if sent.verb != "record"] for run in result.stages]
    assert verbs == [
        ["finalize_scatter", "finalize_gather"],
        ["finalize_scatter", "refresh"],
        ["reduce", "refresh"],
        ["unshard", "reduce"],
    ]


class Vectors(nn.Module):
    """Tensors of the sizes that the lecture draws."""

    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.linspace(0.5, 1.0, numel)) for numel in numels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x.mean() * vector).square().sum() for vector in self.vectors)


@pytest.mark.parametrize(("numels", "owned"), [((100, 60, 40), (100, 100)), ((100, 30, 20), (100, 50))], ids=str)
def test_owners_send_as_much_in_more_messages_with_less_balance(numels: Any, owned: tuple[int, int]) -> None:
    result = shardwise.simulate(
        lambda: Vectors(*numels), rows, ranks=2, align=1, loss=lambda model, share: model(share[0]).reshape(())
    )
    assert result.problems == ()
    assert "align=1" in result.notes[0]
    stage_2 = result.owners[0]
    assert stage_2.owned_elements == owned
    assert stage_2.slice_elements == sum(numels) / 2
    assert sum(stage_2.sent_elements) == sum(stage_2.slice_sent_elements) == 2 * sum(numels)
    assert stage_2.num_collectives == 2 * len(numels) > stage_2.slice_num_collectives
    assert max(stage_2.sent_elements) >= max(stage_2.slice_sent_elements)
    stage_3 = result.owners[1]
    assert sum(stage_3.sent_elements) == 3 * sum(numels)


def test_owners_end_with_the_parameters_of_plain_training() -> None:
    result = shardwise.simulate(odd("uneven", "tied", "frozen"), odd_rows, ranks=3, loss=odd_share_loss, max_norm=0.1)
    assert result.problems == ()
    for run in result.owners:
        assert {difference.name for difference in run.differences} >= {"entry.weight", "blocks.1.down.weight"}
        assert all(difference.ok for difference in run.differences)
    assert "blocks.0.up.weight" in result.owners[1].owners
    assert "blocks.0.up.weight" not in result.owners[0].owners  # frozen: every rank keeps it at stage 2


def test_a_spoiled_reduction_is_noticed() -> None:
    result = shardwise.simulate(mlp, rows, ranks=2, instrument=spoil())
    assert not result.equal
    assert "is not plain training" in result.problems[0]
    assert "every stage equals plain training: NO" in str(result)


def test_print_shows_tables_that_fit() -> None:
    text = str(shardwise.simulate(mlp, rows, ranks=2, steps=1))
    assert "param bytes" in text
    assert "reduce_scatter" in text
    assert "owners" in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("every stage equals plain training: yes")


def test_facts_have_exactly_the_promised_fields() -> None:
    facts = simulation_facts(shardwise.simulate(mlp, rows, ranks=2, steps=2))
    assert list(facts) == [
        "ranks",
        "steps",
        "params",
        "precision",
        "plain_losses",
        "stages",
        "owners",
        "notes",
        "problems",
        "equal",
    ]
    for stage in facts["stages"]:
        assert list(stage) == [
            "stage",
            "losses",
            "largest_difference",
            "unlike_bits",
            "kept_bytes",
            "planned_bytes",
            "sent",
        ]
        assert len(stage["kept_bytes"]) == len(stage["sent"]) == 2
        assert all(list(kinds) == KINDS for kinds in stage["kept_bytes"])
        assert [len(steps) for steps in stage["sent"]] == [2, 2]
        for sent in itertools.chain.from_iterable(itertools.chain.from_iterable(stage["sent"])):
            assert list(sent) == ["verb", "collective", "count", "elements", "bytes"]
    for owner in facts["owners"]:
        assert list(owner) == [
            "stage",
            "owners",
            "owned_elements",
            "slice_elements",
            "sent_elements",
            "slice_sent_elements",
            "collectives",
            "slice_collectives",
            "largest_difference",
        ]


def test_torch_is_left_as_it_was() -> None:
    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    shardwise.simulate(mlp, rows, ranks=2, steps=1, stages=[3])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == num_threads


def test_batches_of_every_usual_kind_have_a_loss() -> None:
    def tokens(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        found = torch.randint(11, (2, 5), generator=generator)
        return found[:, :-1], found[:, 1:]

    embed = lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))  # noqa: E731
    assert shardwise.simulate(embed, tokens, ranks=2, steps=1).equal
    assert shardwise.simulate(mlp, lambda step, rank: rows(step, rank)[0], ranks=2, steps=1).equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks: expected a whole number"),
        ({"ranks": 2.0}, "ranks: expected a whole number"),
        ({"steps": 0}, "steps: expected a whole number"),
        ({"stages": [0, 4]}, "stages: expected some of 0, 1, 2, 3"),
        ({"stages": [1, 1]}, "stages: expected some of 0, 1, 2, 3"),
        ({"stages": []}, "stages: expected some of 0, 1, 2, 3"),
        ({"stages": 3}, "stages: expected some of 0, 1, 2, 3"),
        ({"precision": "int8"}, "precision: expected one of fp64, fp32, bf16, fp16"),
        ({"optimizer": "muon"}, "optimizer: expected one of adamw, sgd"),
        ({"max_norm": 0.0}, "max_norm: expected a number above 0"),
        (
            {"loss": lambda model, share: 1.0},
            "the loss must be a 0-dim .* tensor with a gradient, got float",
        ),
        ({"loss": lambda model, share: model(share[0])}, r"got \(4, 4\) torch.float32"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,  # a function's text holds its address
)
def test_wrong_arguments_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    def never(mesh: Any) -> Any:
        raise AssertionError("a rank ran")

    with pytest.raises(ConfigError, match=message):
        shardwise.simulate(mlp, rows, instrument=never, **options)


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ConfigError, match="must return a torch module, got int"):
        shardwise.simulate(lambda: 1, rows)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="without trainable parameters"):
        shardwise.simulate(nn.Tanh, rows)
    with pytest.raises(ConfigError, match="is on meta"):
        shardwise.simulate(lambda: mlp().to("meta"), rows)
    with pytest.raises(ConfigError, match="no loss is known for a batch of type str"):
        shardwise.simulate(mlp, lambda step, rank: "abc", steps=1)
