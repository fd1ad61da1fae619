"""Runs tasks in turn (A B C, A B C), each in fresh processes, and compares their medians.

``compare`` is what every benchmark calls; ``Outcome`` is what it gets for each task; ``Report`` prints tables and
writes JSON, which ``render.py`` turns into RESULTS.md.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from common.network import INTERFACE, Network
from common.systems import is_installed
from common.task import Task

FOLDER = Path(__file__).resolve().parents[1]
RESULTS = FOLDER / "results"
FOREIGN_LIMIT = 0.10  # share of the busy CPU time that was not ours, above which times are not to be trusted
_TIMEOUT_SECONDS = 600.0
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one task measured, over all its runs.

    Attributes:
        rows: one per run and rank, as ``job.run`` returns them.
    """

    task: Task
    rows: Sequence[Sequence[dict[str, Any]]]

    @property
    def seconds(self) -> float:
        """Median over the steps of all runs, each as long as on its slowest rank."""
        return statistics.median(
            max(times) for run in self.rows for times in zip(*(row["seconds"] for row in run), strict=True)
        )

    @property
    def losses(self) -> list[float]:
        """Mean over the ranks of each step's loss, of the first run."""
        return [statistics.fmean(step) for step in zip(*(row["losses"] for row in self.rows[0]), strict=True)]

    @property
    def foreign_share(self) -> float:
        """Largest share of the machine's busy CPU time that other programs had, over the runs."""
        shares = []
        for run in self.rows:
            own = sum(row["cpu_seconds"] for row in run)
            shares.append(1 - own / max(run[0]["busy_seconds"], own, 1e-9))
        return max(shares)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all ranks per step; steadier than the time on a busy machine."""
        return statistics.median(sum(row["cpu_seconds"] for row in run) for run in self.rows) / self.task.steps

    @property
    def sent_bytes_per_param(self) -> float:
        """Bytes that the busiest rank sends in one step, per parameter of the model."""
        run = self.rows[0]
        return max(row["sent_bytes_per_step"] for row in run) / run[0]["num_params"]

    def peak(self, key: str) -> float:
        """Largest value of a byte count over ranks, the smallest of the runs: the others had other things beside."""
        return min(max(row[key] for row in run) for run in self.rows)

    def facts(self) -> dict[str, Any]:
        """Return what the JSON file keeps."""
        return {
            "system": self.task.label,
            "size": self.task.size,
            "ranks": self.task.ranks,
            "dtype": self.task.dtype,
            "device": self.task.device,
            "num_params": self.rows[0][0]["num_params"],
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "foreign_share": self.foreign_share,
            "rss_peak_bytes": self.peak("rss_peak_bytes"),
            "heap_peak_bytes": self.peak("heap_peak_bytes") if self.rows[0][0]["heap_peak_bytes"] is not None else None,
            "device_peak_bytes": self.rows[0][0]["device_peak_bytes"],
            "sent_bytes_per_param": self.sent_bytes_per_param,
            "losses": self.losses,
        }


def environment() -> dict[str, str]:
    """Return the variables of a process that is measured: one thread, and the modules of this folder."""
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))


def result_of(text: str, who: str) -> Any:
    """Return what a measured process printed in its line of RESULT and JSON.

    Raises:
        RuntimeError: there is none; the text is the end of what it printed.
    """
    for line in text.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{who} failed:\n{text[-3000:]}")


def run_once(task: Task, network: Network | None = None, heap: Path | None = None) -> list[dict[str, Any]]:
    """Run a task in fresh processes and return what each rank measured.

    Raises:
        RuntimeError: it failed or ran too long; the text is the end of what rank 0 printed.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        env = dict(environment(), GLOO_SOCKET_IFNAME=INTERFACE if network else "lo")
        if heap is not None:
            env["LD_PRELOAD"] = str(heap)
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(task.ranks):
                command = [sys.executable, "-m", "common.job", str(rank), f"{folder}/rendezvous", task.to_json()]
                prefix = network.prefix(rank) if network else []
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen([*prefix, *command], env=env, text=True, stdout=out, stderr=subprocess.STDOUT)
                )
            text = processes[0].communicate(timeout=_TIMEOUT_SECONDS)[0]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{task.label} {task.size}: no answer after {_TIMEOUT_SECONDS:.0f} s") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    try:
                        process.wait(timeout=5)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
    rows: list[dict[str, Any]] = result_of(text, f"{task.label} {task.size}")
    return rows


def compare(
    tasks: Sequence[Task], *, reps: int, network: Network | None = None, heap: Path | None = None
) -> list[Outcome]:
    """Run the tasks in turn, ``reps`` times; systems that are not installed are left out, with a line."""
    present = [task for task in tasks if is_installed(task.system)]
    for task in tasks:
        if task not in present:
            print(f"{task.label}: not installed, not run", flush=True)
    rows: dict[str, list[list[dict[str, Any]]]] = {task.to_json(): [] for task in present}
    for rep in range(reps):
        for task in present:
            run = run_once(task, network, heap)
            rows[task.to_json()].append(run)
            outcome = Outcome(task=task, rows=[run])
            print(
                f"  [{rep + 1}/{reps}] {task.size} x{task.ranks} {task.dtype} {task.label}: {outcome.seconds:.3f} s, "
                f"foreign CPU {outcome.foreign_share:.0%}",
                flush=True,
            )
    return [Outcome(task=task, rows=rows[task.to_json()]) for task in present]


def unlike_losses(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the systems whose losses are not the first one's, to 1e-3 of them (bf16: 2e-2).

    ``compute`` trains each rank alone, so it counts for nothing here.
    """
    together = [outcome for outcome in outcomes if outcome.task.system != "compute"]
    if not together:
        return []
    first = together[0]
    limit = 2e-2 if first.task.dtype == "bf16" else 1e-3
    return [
        other.task.label
        for other in together[1:]
        if any(abs(a - b) > limit * abs(b) for a, b in zip(other.losses, first.losses, strict=True))
    ]


@contextmanager
def heap_counter() -> Iterator[Path | None]:
    """Give the library that counts heap blocks, compiled for the length of a block; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("no C compiler: heap bytes are not counted")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-heap-") as folder:
        library = Path(folder) / "heap.so"
        source = FOLDER / "common" / "heap.c"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        yield library


@dataclass
class Report:
    """Tables of one benchmark, for people, for JSON, and for RESULTS.md."""

    name: str
    title: str
    tables: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def add_table(self, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table and keep it."""
        self.tables.append({"caption": caption, "head": list(head), "rows": [list(row) for row in rows]})
        widths = [max(len(str(cell)) for cell in column) for column in zip(head, *rows, strict=True)]
        print(f"\n{caption}")
        for row in [head, *rows]:
            print("  " + "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)))
        print(flush=True)

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Keep what was measured, and say what makes it doubtful."""
        self.facts += [outcome.facts() for outcome in outcomes]
        cell = f"{outcomes[0].task.size} x{outcomes[0].task.ranks} {outcomes[0].task.dtype}"
        unlike = unlike_losses(outcomes)
        if unlike:
            self.warn(f"{cell}: losses differ ({', '.join(unlike)}): that is not the same work")
        busy = [o for o in outcomes if o.foreign_share > FOREIGN_LIMIT]
        if busy:
            listed = ", ".join(f"{o.task.label} {o.foreign_share:.0%}" for o in busy)
            self.warn(f"{cell}: other programs used the machine ({listed} of its busy time): do not trust the times")

    def warn(self, text: str) -> None:
        """Print a warning and keep it."""
        self.warnings.append(text)
        print(f"WARNING: {text}", flush=True)

    def save(self, path: Path | None = None) -> None:
        """Write the JSON file that ``render.py`` reads."""
        target = path or RESULTS / f"{self.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "name": self.name,
            "title": self.title,
            "date": date.today().isoformat(),
            "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "machine": machine(),
            "tables": self.tables,
            "warnings": self.warnings,
            "facts": self.facts,
        }
        target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written: {target}")


def machine() -> str:
    """Describe the hardware and the versions, without names of hosts."""
    cpu = platform.processor() or platform.machine()
    with_info = Path("/proc/cpuinfo")
    if with_info.exists():
        names = [line.split(":", 1)[1].strip() for line in with_info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores of {cpu}, {memory:.0f} GiB{gpu}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def arguments(description: str, **extra: dict[str, Any]) -> argparse.Namespace:
    """Parse what every benchmark takes, and its own arguments (by name, with what ``add_argument`` takes)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", nargs="+", default=["53M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--systems", nargs="+", default=None, help="default: all that suit")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of shardwise.shard, as JSON")
    for name, options in extra.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args()


def tasks_of(args: argparse.Namespace, systems: Sequence[str], size: str, ranks: int, dtype: str) -> list[Task]:
    """Return one task per system, with the common arguments."""
    return [
        Task(
            system=system,
            size=size,
            ranks=ranks,
            dtype=dtype,
            device=args.device,
            warmup=args.warmup,
            steps=args.steps,
            options=args.options if system.startswith("shardwise") else {},
        )
        for system in args.systems or systems
    ]
