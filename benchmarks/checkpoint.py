"""Saving and loading about 1 GiB of state beside the raw disk and the peers: python benchmarks/checkpoint.py

Two ranks hold fp32 parameters and two moments. Every save ends with the bytes on the disk, every load begins with the
files out of the page cache; ours hashes both ways. Raw is O_DIRECT, without hash or copy. DeepSpeed is optional.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.harness import MIB, Report, environment, result_of
from common.systems import is_installed

SYSTEMS = ("raw", "shardwise", "torch.save", "safetensors", "dcp", "deepspeed")
_TIMEOUT_SECONDS = 300.0


def run_once(system: str, ranks: int, mib: int, parent: Path) -> list[dict[str, Any]]:
    """Run one system in fresh processes and a fresh folder."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=parent) as name:
        folder = Path(name) / "saved"
        folder.mkdir()
        processes = []
        try:
            for rank in range(ranks):
                words = map(str, (rank, ranks, f"{name}/rendezvous", folder, system, mib))
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "common.checkpoint_job", *words],
                        env=dict(environment(), GLOO_SOCKET_IFNAME="lo"),
                        text=True,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
            text = processes[0].communicate(timeout=_TIMEOUT_SECONDS)[0]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    rows: list[dict[str, Any]] = result_of(text, system)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints beside the raw disk and the peers.")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024, help="of state, over all ranks")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    present = [s for s in args.systems if s != "deepspeed" or is_installed("deepspeed3")]
    for system in set(args.systems) - set(present):
        print(f"{system}: not installed, not run")
    report = Report("checkpoint", "Checkpoints")
    runs: dict[str, list[list[dict[str, Any]]]] = {system: [] for system in present}
    for rep in range(args.reps):
        for system in present:
            run = run_once(system, args.ranks, args.mib, args.folder)
            runs[system].append(run)
            times = {key: max(row[key] for row in run) for key in ("save", "load")}
            print(
                f"  [{rep + 1}/{args.reps}] {system}: save {times['save']:.2f} s, load {times['load']:.2f} s",
                flush=True,
            )

    def per_gib(system: str, key: str) -> float:
        scale = statistics.median(sum(row["bytes"] for row in run) for run in runs[system]) / (1024 * MIB)
        return statistics.median(max(row[key] for row in run) for run in runs[system]) / scale

    def ratio(system: str, key: str) -> str:
        return f"{per_gib(system, key) / per_gib('raw', key):.2f}" if "raw" in runs else "-"

    rows = []
    for system in present:
        saved = sum(row["bytes"] for row in runs[system][0]) / MIB
        figures = [f"{per_gib(system, 'save'):.2f}", ratio(system, "save")]
        figures += [f"{per_gib(system, 'load'):.2f}", ratio(system, "load")]
        rows.append([system, f"{saved:,.0f}", *figures])
    head = ["system", "MiB", "save, s per GiB", "to raw", "load, s per GiB", "to raw"]
    report.add_table(f"{args.mib} MiB of state on {args.ranks} ranks, medians of {args.reps}", head, rows)
    if "shardwise" in runs:
        save = per_gib("shardwise", "save")
        extra = max(row["load_extra_bytes"] for row in runs["shardwise"][0]) / MIB
        step = statistics.median(max(row["step"] for row in run) for run in runs["shardwise"])
        more = [
            [what, f"{per_gib('shardwise', key):.3f} s per GiB", f"{per_gib('shardwise', key) / save:.1%} of a save"]
            for what, key in (
                ("background save: the call", "call"),
                (f"background save: the call and what an update {step:.1f} s later has to copy aside", "stall"),
                ("the same, and what that step takes longer because the save shares its cores", "lost"),
                ("background save: the call and an update right after it, which copies the most", "call and copy"),
            )
        ]
        more += [
            ["verify", f"{per_gib('shardwise', 'verify'):.2f} s per GiB", ""],
            ["load without hashes", f"{per_gib('shardwise', 'unverified load'):.2f} s per GiB", ""],
            ["resident memory that a load adds at most", f"{extra:,.0f} MiB", ""],
        ]
        report.add_table("shardwise, further", ["what", "measured", ""], more)
    report.facts += [{"system": system, "runs": runs[system]} for system in present]
    report.save(args.json)


main()
