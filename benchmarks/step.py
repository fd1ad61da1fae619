"""Step time over the loopback, beside the peers: python benchmarks/step.py --sizes 53M --ranks 2 4 --dtypes fp32 bf16

On CUDA (``--device cuda``) the ranks take one device each and NCCL.
"""

from common.harness import MIB, Report, arguments, compare, tasks_of
from common.systems import PEERS, SYSTEMS


def main() -> None:
    args = arguments("Step time beside the peers, over the loopback.")
    report = Report("step", "Step time, loopback")
    for size in args.sizes:
        for ranks in args.ranks:
            for dtype in args.dtypes:
                outcomes = compare(tasks_of(args, list(SYSTEMS), size, ranks, dtype), reps=args.reps)
                report.add_outcomes(outcomes)
                seconds = {outcome.task.system: outcome.seconds for outcome in outcomes}
                rows = [
                    [
                        outcome.task.label,
                        f"{outcome.seconds:.3f}",
                        f"{outcome.seconds / seconds['ddp']:.2f}" if "ddp" in seconds else "-",
                        ", ".join(
                            f"{outcome.seconds / seconds[peer]:.2f} x {peer}"
                            for peer in PEERS.get(outcome.task.system, ())
                            if peer in seconds and peer != "ddp"
                        ),
                        f"{outcome.cpu_seconds:.2f}",
                        f"{outcome.peak('rss_peak_bytes') / MIB:,.0f}",
                    ]
                    for outcome in outcomes
                ]
                head = ["system", "step, s", "x DDP", "to its peers", "CPU s of all ranks", "peak resident, MiB"]
                report.add_table(f"{size}, {ranks} ranks, {dtype}, {args.device}", head, rows)
    report.save(args.json)


main()
