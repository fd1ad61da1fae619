"""Peak memory of training: live heap bytes and the resident set: python benchmarks/memory.py --sizes 53M

Live bytes are heap blocks of 64 KiB and more from any thread (``common/heap.c``), from after the model is built. On
CUDA (``--device cuda``) the allocator's own peak is shown. Times of these runs are not kept.
"""

from common.harness import MIB, Report, arguments, compare, heap_counter, tasks_of
from common.systems import SYSTEMS


def main() -> None:
    args = arguments("Peak memory beside the peers.")
    report = Report("memory", "Peak memory of one rank")
    with heap_counter() as heap:
        for size in args.sizes:
            for ranks in args.ranks:
                for dtype in args.dtypes:
                    tasks = tasks_of(args, list(SYSTEMS), size, ranks, dtype)
                    plain = compare(tasks, reps=args.reps)
                    counted = compare(tasks, reps=1, heap=heap) if heap else plain
                    report.add_outcomes(plain)
                    rows = []
                    for outcome, traced in zip(plain, counted, strict=True):
                        live = traced.peak("heap_peak_bytes") / MIB if heap else None
                        device = outcome.rows[0][0]["device_peak_bytes"]
                        rows.append(
                            [
                                outcome.task.label,
                                "-" if live is None else f"{live:,.0f}",
                                f"{outcome.peak('rss_peak_bytes') / MIB:,.0f}",
                                f"{outcome.rows[0][0]['rss_imported_bytes'] / MIB:,.0f}",
                                "-" if device is None else f"{device / MIB:,.0f}",
                            ]
                        )
                    head = ["system", "live heap at peak, MiB", "resident at peak, MiB", "of it imports", "device, MiB"]
                    report.add_table(f"{size}, {ranks} ranks, {dtype}, {args.device}", head, rows)
    report.save(args.json)


main()
