"""Run in a process of its own: construct and shard a GPT at rank 0 of fake ranks, print what memory it took.

``python measure.py HOW WIDTH DEPTH VOCAB RANKS``; HOW is "deferred" or "ordinary". Prints JSON, all in bytes.
"""

import json
import sys
from pathlib import Path

import torch

import shardwise
from shardwise.comm.fake import FakeComm
from shardwise.models.gpt import GPT, GPTConfig


def peak_bytes() -> int:
    """Not ``ru_maxrss``: that begins with what the process that started this one had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def construct(how: str, config: GPTConfig, num_ranks: int) -> tuple[torch.nn.Module, shardwise.Recipe | str]:
    if how == "ordinary":
        return GPT(config), "broadcast"
    with shardwise.deferred_init() as recipe:
        model = GPT(config)
    return model, recipe


def main(how: str, width: int, depth: int, vocab: int, num_ranks: int) -> dict[str, int]:
    torch.set_num_threads(1)
    warm, values = construct(how, GPTConfig(width=8, heads=2, depth=1), num_ranks)
    shardwise.shard(warm, {"data": FakeComm(0, num_ranks)}, initial_values=values)
    baseline = peak_bytes()
    config = GPTConfig(width=width, heads=8, depth=depth, vocab=vocab, context=128, tied=True)
    model, values = construct(how, config, num_ranks)
    params = [param.numel() * 4 for param in model.parameters()]
    planned = shardwise.plan(model, num_ranks).buckets
    shards = sum(bucket.layout.shard_numel * 4 for bucket in planned)
    shardwise.shard(model, {"data": FakeComm(0, num_ranks)}, initial_values=values)
    return {
        "baseline": baseline,
        "peak": peak_bytes(),
        "model": sum(params),
        "largest": max(params),
        "shards": shards,
        "measured": shardwise.measured_bytes(model)["param"],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
