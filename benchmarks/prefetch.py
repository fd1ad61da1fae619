"""Step time and peak memory at several prefetch depths: python benchmarks/prefetch.py --depths 0 1 2 4 --rate 1gbit

With a rate the ranks run in limited network namespaces (root), where waiting for a gather shows; else on the loopback.
"""

import contextlib
from collections.abc import Sequence

from common.harness import MIB, Outcome, Report, arguments, compare, heap_counter
from common.network import Network, NoNetworkError, network
from common.task import Task

BAR_WIDTH = 40


def main() -> None:
    args = arguments(
        "Step time and peak memory at several prefetch depths.",
        depths={"type": int, "nargs": "+", "default": [0, 1, 2, 4]},
        rate={"default": "1gbit", "help": "as tc writes it; none: the loopback"},
    )
    report = Report("prefetch", "Prefetch depth")
    with contextlib.ExitStack() as stack:
        hosts: Network | None = None
        for ranks in args.ranks:
            if args.rate != "none":
                try:
                    hosts = stack.enter_context(network(ranks, args.rate))
                except NoNetworkError as error:
                    print(f"no limited network ({error}): on the loopback")
            heap = stack.enter_context(heap_counter())
            for size in args.sizes:
                tasks = [
                    Task(
                        system="shardwise3",
                        size=size,
                        ranks=ranks,
                        warmup=args.warmup,
                        steps=args.steps,
                        options={"prefetch": depth},
                    )
                    for depth in args.depths
                ]
                outcomes = compare(tasks, reps=args.reps, network=hosts)
                counted = compare(tasks, reps=1, heap=heap) if heap else []
                report.add_outcomes(outcomes)
                where = args.rate if hosts else "loopback"
                draw(report, f"{size}, {ranks} ranks, stage 3, {where}", outcomes, counted)
    report.save(args.json)


def draw(report: Report, caption: str, outcomes: Sequence[Outcome], counted: Sequence[Outcome]) -> None:
    """Add one table with a bar per depth for the time and one for the peak."""
    longest = max(outcome.seconds for outcome in outcomes)
    peaks = [outcome.peak("heap_peak_bytes") for outcome in counted] or [o.peak("rss_peak_bytes") for o in outcomes]
    rows = [
        [
            str(outcome.task.options["prefetch"]),
            f"{outcome.seconds:.3f}",
            "#" * round(BAR_WIDTH * outcome.seconds / longest),
            f"{peak / MIB:,.0f}",
            "#" * round(BAR_WIDTH * peak / max(peaks)),
        ]
        for outcome, peak in zip(outcomes, peaks, strict=True)
    ]
    head = ["depth", "step, s", "", "live heap at peak, MiB" if counted else "resident at peak, MiB", ""]
    report.add_table(caption, head, rows)


main()
