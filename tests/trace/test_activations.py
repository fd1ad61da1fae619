"""With activations a timeline counts what a dry run counts: the same bytes at the peak, and all of it goes again."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.base import Mesh
from shardwise.dryrun.run import mirrors, rehearse
from shardwise.models.gpt import GPT, Block, GPTConfig
from shardwise.models.gpt import loss as gpt_loss
from shardwise.testing.ranks import run_ranks
from shardwise.trace.lines import read_lines
from tests.accounting.case import Worker

SHAPE = GPTConfig(vocab=97, context=48, width=32, heads=2, depth=3)


def batch() -> Any:
    both = torch.randint(97, (2, 3, 48), generator=torch.Generator().manual_seed(1))
    return both[0], both[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_peak_is_that_of_a_dry_run(stage: int, tmp_path: Path) -> None:
    """A dry run counts the step counters of the optimizer too, and knows the batch as such."""

    def loss(model: torch.nn.Module, data: Any) -> torch.Tensor:
        return gpt_loss(model(data[0]), data[1])

    mesh = mirrors(3, 1)
    dry = rehearse(lambda: GPT(SHAPE), batch, loss, mesh, compute=True, stage=stage, units=Block)
    model = shardwise.shard(GPT(SHAPE), mirrors(3, 1), stage=stage, units=Block)
    optimizer = shardwise.shard_optimizer(torch.optim.AdamW(model.parameters()), model, on_nonfinite="ignore")
    data = batch()

    def step() -> None:
        loss(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with shardwise.timeline(model, tmp_path, activations=True):
        step()
    *_, foot = read_lines(tmp_path / "timeline-rank-1.jsonl")
    peak = foot["measured_peak"]
    ours = {kind: count for kind, count in peak["by_kind"].items() if count}
    theirs = {kind: count for kind, count in dry.peak.by_kind.items() if kind not in ("batch", "buffer")}
    counters = theirs.pop("optim") - ours.pop("optim")
    assert 0 <= counters < 1000
    # Here the batch's views are the first that is seen of it, and the 4 bytes that begin a backward come before it.
    ours["activation"] -= sum(tensor.nbytes for tensor in data) + 4
    ours["temporary"] = ours.get("temporary", 0) + 4
    assert ours == theirs
    assert max(n for kind, _, n in peak["by_owner"] if kind == "activation") > 0


def test_everything_that_was_made_goes_again_and_states_are_counted_once(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> dict[str, int]:
        worker = Worker(mesh, stage=3)
        with shardwise.timeline(worker.model, tmp_path, activations=True):
            for _ in range(2):
                worker.step()
            gc.collect()
        return shardwise.measured_bytes(worker.model)

    measured = run_ranks(1, body)[0]
    lines = [line for line in read_lines(tmp_path / "timeline-rank-0.jsonl") if line["what"] == "memory"]
    made = [line for line in lines if line["kind"] in ("activation", "temporary")]
    assert {line["kind"] for line in made} == {"activation", "temporary"}
    assert {line["owner"] for line in made} >= {"root", "blocks.0", "blocks.1", "blocks.2"}
    came = [line for line in made if line["measured_change_bytes"] > 0]
    assert {line["phase"] for line in came if line["kind"] == "activation"} == {"forward", "between"}
    # The gradient of the loss is made before the backward comes to the model.
    assert {line["phase"] for line in came if line["kind"] == "temporary"} == {"between", "backward", "step"}
    assert any(line["operation"] == "aten.addmm.default" for line in made)
    last = lines[-1]["measured_bytes"]
    assert last["optim"] == measured["optim"]
    assert last.get("activation", 0) + last.get("temporary", 0) < 200  # what the step left: a norm


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_tensors_without_memory_of_their_own_are_left_out(tmp_path: Path) -> None:
    model = shardwise.shard(torch.nn.Linear(4, 4), None, stage=3)
    with shardwise.timeline(model, tmp_path, activations=True):
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (3,))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        meta = torch.ones(5, device="meta") * 2
        model((sparse.to_dense().sum() + nested.values().sum()) * torch.ones(2, 4)).sum().backward()
    assert meta.is_meta
    *_, foot = read_lines(tmp_path / "timeline-rank-0.jsonl")
    assert foot["measured_peak"]["by_kind"]["activation"] > 0
