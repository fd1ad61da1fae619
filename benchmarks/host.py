"""Host cost per block and step: python benchmarks/host.py --blocks 12 48 192 --worlds 8 64 1024

Microseconds of Python and dispatch per block, over those of the plain loop, with a network that moves nothing.
"""

import json
import statistics
import subprocess
import sys

from common.harness import Report, arguments, environment, result_of

SYSTEMS = ("compute", "ddp", "fsdp2", "shardwise0", "shardwise1", "shardwise2", "shardwise3")
_TIMEOUT_SECONDS = 300.0


def measure(system: str, blocks: int, ranks: int, steps: int) -> list[float]:
    """Return microseconds per block: forward, backward, optimizer, whole step."""
    task = json.dumps({"system": system, "blocks": blocks, "ranks": ranks, "steps": steps})
    done = subprocess.run(
        [sys.executable, "-m", "common.host_job", task],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    result: list[float] = result_of(done.stdout + done.stderr, system)
    return result


def main() -> None:
    args = arguments(
        "Host cost per block and step.",
        blocks={"type": int, "nargs": "+", "default": [48]},
        worlds={"type": int, "nargs": "+", "default": [64], "help": "ranks of the fake network"},
    )
    report = Report("host", "Host cost per block and step")
    for blocks in args.blocks:
        for ranks in args.worlds:
            systems = args.systems or SYSTEMS
            runs: dict[str, list[list[float]]] = {system: [] for system in systems}
            for _ in range(args.reps):
                for system in systems:
                    runs[system].append(measure(system, blocks, ranks, max(args.steps, 20)))
            medians = {system: [statistics.median(c) for c in zip(*rows, strict=True)] for system, rows in runs.items()}
            plain = medians.get("compute", [0.0] * 4)
            rows = [
                [system, *(f"{value:,.0f}" for value in values), f"{values[3] - plain[3]:,.0f}"]
                for system, values in medians.items()
            ]
            head = ["system", "forward, us", "backward, us", "optimizer, us", "step, us", "over the plain loop, us"]
            report.add_table(f"per block: {blocks} blocks, {ranks} ranks", head, rows)
            report.facts += [
                {"system": s, "blocks": blocks, "ranks": ranks, "us_per_block": m} for s, m in medians.items()
            ]
    report.save(args.json)


main()
