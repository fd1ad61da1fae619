"""The optimizer on shards beside torch's own on one flat tensor: python benchmarks/optimizer.py --sizes 53M

Both update as many elements, with torch's fused AdamW, in this process. A step on shards includes what surrounds it:
the norm of the gradients, the record of the step, the fragments' gradients.
"""

import statistics
import time
from collections.abc import Callable

import torch
from common.harness import Report, arguments
from common.systems import adamw
from common.task import SIZES, build_model

import shardwise
from shardwise.comm.fake import LocalComm


def shards(size: str, stage: int) -> Callable[[], float]:
    """Return a function that sets gradients, steps, and returns the seconds of the step."""
    torch.set_num_threads(1)
    model = shardwise.shard(build_model(SIZES[size]), {"data": LocalComm()}, stage=stage, force_collectives=True)
    optimizer = shardwise.shard_optimizer(adamw(model.parameters()), model)
    tokens = torch.zeros(1, SIZES[size].length, dtype=torch.int64)

    def step() -> float:
        model(tokens).float().square().mean().backward()
        start = time.perf_counter()
        optimizer.step()
        seconds = time.perf_counter() - start
        optimizer.zero_grad()
        return seconds

    return step


def flat(numel: int) -> Callable[[], float]:
    """Return the same for one plain tensor of as many elements."""
    param = torch.nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    optimizer = adamw([param])

    def step() -> float:
        param.grad = gradient
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return step


def main() -> None:
    args = arguments("The optimizer on shards beside torch's own.")
    report = Report("optimizer", "Optimizer step on shards")
    for size in args.sizes:
        numel = sum(param.numel() for param in build_model(SIZES[size]).parameters())
        systems = {"torch fused AdamW, one flat tensor": flat(numel)}
        systems |= {f"shardwise{stage}": shards(size, stage) for stage in range(4)}
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for turn in range(args.warmup + args.reps * args.steps):
            for name, step in systems.items():
                spent = step()
                if turn >= args.warmup:
                    seconds[name].append(spent)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        base = next(iter(medians.values()))
        rows = [
            [name, f"{value * 1e3:.1f}", f"{numel / value / 1e6:,.0f}", f"{base / value:.2f}"]
            for name, value in medians.items()
        ]
        head = ["system", "step, ms", "million parameters/s", "speed x torch's"]
        report.add_table(f"{size}, {numel:,} parameters on one rank, fp32, one thread", head, rows)
        report.facts += [{"system": name, "size": size, "seconds": value} for name, value in medians.items()]
    report.save(args.json)


main()
