"""Time to quality: python benchmarks/quality.py --limit-mib 130 --target-loss 2.6

Every system trains one GPT on real text to one held-out loss, each with the largest batch whose measured peak of live
heap bytes stays under one limit: what the memory that sharding frees is worth. Evaluation is not in the seconds.
"""

import argparse
import sys
from pathlib import Path

from common.harness import MIB, Outcome, Report, compare, heap_counter, run_once
from common.task import SIZES, Task

SYSTEMS = ("ddp", "fsdp2", "shardwise0", "shardwise1", "shardwise2", "shardwise3")
BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)


def largest_batch(system: str, size: str, ranks: int, limit_mib: float, heap: Path) -> tuple[int, float] | None:
    """Return the largest batch that stays under the limit, and its peak in MiB; None if not even one does."""
    found = None
    low, high = 0, len(BATCHES) - 1
    while low <= high:
        middle = (low + high) // 2
        task = Task(system=system, size=size, ranks=ranks, warmup=2, steps=2, batch=BATCHES[middle])
        peak = Outcome(task=task, rows=[run_once(task, heap=heap)]).peak("heap_peak_bytes") / MIB
        print(f"  {system}: batch {BATCHES[middle]}, peak {peak:,.0f} MiB", flush=True)
        if peak <= limit_mib:
            found, low = (BATCHES[middle], peak), middle + 1
        else:
            high = middle - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to one held-out loss under one limit of memory.")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--size", default="text")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit-mib", type=float, default=130.0)
    parser.add_argument("--target-loss", type=float, default=2.6)
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report = Report("quality", "Time to quality")
    rows = []
    with heap_counter() as heap:
        if heap is None:
            sys.exit("the limit is on measured heap bytes: a C compiler is needed")
        for system in args.systems:
            found = largest_batch(system, args.size, args.ranks, args.limit_mib, heap)
            if found is None:
                rows.append([system, "-", f"over {args.limit_mib:.0f}", *["-"] * 5])
                continue
            batch, peak = found
            task = Task(
                system=system,
                size=args.size,
                ranks=args.ranks,
                warmup=0,
                steps=args.max_steps,
                batch=batch,
                target_loss=args.target_loss,
            )
            (outcome,) = compare([task], reps=1)
            run = outcome.rows[0]
            num_steps = len(run[0]["seconds"])
            seconds = max(sum(row["seconds"]) for row in run)
            tokens = num_steps * batch * args.ranks * SIZES[args.size].length
            sent = sum(row["sent_bytes_per_step"] for row in run) / args.ranks * num_steps / args.ranks
            rows.append(
                [
                    system,
                    str(batch),
                    f"{peak:,.0f}",
                    f"{run[0]['held_out_loss']:.3f}",
                    str(num_steps),
                    f"{seconds:.1f}",
                    f"{tokens / seconds:,.0f}",
                    f"{sent / MIB:,.0f}",
                ]
            )
            report.facts.append({"system": system, "batch": batch, "seconds": seconds, "steps": num_steps})
    head = [
        "system",
        "batch per rank",
        "peak heap, MiB",
        "held-out loss",
        "steps",
        "seconds",
        "tokens/s",
        "MiB sent per rank",
    ]
    caption = f"{args.size}, {args.ranks} ranks, at most {args.limit_mib:.0f} MiB, to a loss of {args.target_loss}"
    report.add_table(caption, head, rows)
    report.save(args.json)


main()
