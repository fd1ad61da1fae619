"""Step time and bytes over a limited network: python benchmarks/wire.py --rates 1gbit 200mbit

Ranks run in network namespaces of their own (Linux, root, iproute2), which are removed afterwards. The bound is the
longer of the computation alone and the least time the bytes need on the wire.
"""

import sys

from common.harness import Report, arguments, compare, tasks_of
from common.network import NoNetworkError, network
from common.systems import SYSTEMS

UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}


def bits_per_second(rate: str) -> float:
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit]


def least_bytes_per_param(system: str, ranks: int, dtype: str) -> float:
    """Bytes one rank must send: 2 P (N-1)/N elements per step; 3 P where parameters are not kept (arXiv:1910.02054)."""
    width = 2 if dtype == "bf16" else 4
    full = system in ("fsdp2", "deepspeed3", "shardwise3")
    return (3 if full else 2) * width * (ranks - 1) / ranks


def main() -> None:
    args = arguments(
        "Step time and bytes over a limited network.",
        rates={"nargs": "+", "default": ["1gbit"], "help": "as tc writes them; none: only count bytes"},
    )
    report = Report("wire", "Step time on a limited network")
    systems = [system for system in SYSTEMS if system != "compute"]
    try:
        for rate in args.rates:
            for size in args.sizes:
                for ranks in args.ranks:
                    for dtype in args.dtypes:
                        measure(report, args, systems, rate, size, ranks, dtype)
    except NoNetworkError as error:
        print(f"not run: {error}")
        sys.exit(0)
    report.save(args.json)


def measure(report: Report, args, systems, rate: str, size: str, ranks: int, dtype: str) -> None:
    with network(ranks, None if rate == "none" else rate) as hosts:
        alone = compare(tasks_of(args, ["compute"], size, ranks, dtype)[:1], reps=args.reps) if not args.systems else []
        outcomes = compare(tasks_of(args, systems, size, ranks, dtype), reps=args.reps, network=hosts)
    report.add_outcomes(outcomes)
    rows = []
    for outcome in outcomes:
        least = least_bytes_per_param(outcome.task.system, ranks, dtype)
        num_params = outcome.rows[0][0]["num_params"]
        wire = 0.0 if rate == "none" else least * num_params * 8 / bits_per_second(rate)
        bound = max(wire, alone[0].seconds if alone else 0.0)
        rows.append(
            [
                outcome.task.label,
                f"{outcome.seconds:.3f}",
                f"{bound:.3f}" if bound else "-",
                f"{outcome.seconds / bound:.3f}" if bound else "-",
                f"{outcome.sent_bytes_per_param:.3f}",
                f"{least:.3f}",
                f"{outcome.sent_bytes_per_param / least:.3f}",
            ]
        )
    head = ["system", "step, s", "bound, s", "x bound", "sent bytes per parameter", "least", "x least"]
    report.add_table(f"{size}, {ranks} ranks, {dtype}, {rate}", head, rows)


main()
