"""What this machine has, and whether two ranks on it can talk: the facts behind ``shardwise doctor``.

Nothing is changed, nothing is sent over a network: the two ranks meet on the loopback interface.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm.base import Key, Mesh, Verb
from shardwise.launch.rendezvous import stay_on_loopback
from shardwise.testing.ranks import run_processes

__all__ = ["Finding", "examine"]

_REQUIRED = ("torch", "numpy", "safetensors", "pydantic", "typer", "rich", "xxhash")
_OPTIONAL = (
    ("transformers", "fine-tunes Hugging Face folders"),
    ("tokenizers", "reads tokenizer files"),
    ("deepspeed", "is compared with in tests"),
)
_OLDEST_TORCH = (2, 11)
_RANKS = 2
_NUMEL = 1024
_USUAL_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about the machine.

    Attributes:
        area: what it belongs to.
        name: what was looked at.
        works: whether it is there and does what it should.
        needed: whether training cannot work without it.
        detail: version, size or reason.
        figures: the same in numbers, bytes and counts.
    """

    area: str
    name: str
    works: bool
    needed: bool
    detail: str
    figures: Mapping[str, int | float]


def examine(folder: Path, *, timeout_seconds: float = 60.0) -> list[Finding]:
    """Look at versions, backends, cores, memory, disk, devices, ports, and let two ranks exchange a buffer.

    Args:
        folder: where training would write.
        timeout_seconds: for the two ranks.
    """
    return [
        *_versions(),
        *_backends(),
        _cores(),
        _memory(),
        _disk(folder),
        *_devices(),
        _port(0),
        _port(_USUAL_PORT),
        _ssh(),
        _two_ranks(all_gather_ranks, timeout_seconds),
    ]


def all_gather_ranks(mesh: Mesh) -> bool:
    """Return whether an all-gather brings every rank's part: what each of the two ranks does."""
    (comm,) = mesh.values()
    buffer = torch.full((comm.size * _NUMEL,), -1.0)
    buffer[comm.rank * _NUMEL : (comm.rank + 1) * _NUMEL] = comm.rank
    work = comm.all_gather(buffer, Key(comm.reserve(1), Verb.ACCESS, 0, "doctor"))
    if work is not None:
        work.wait()
    return bool(torch.equal(buffer, torch.arange(float(comm.size)).repeat_interleave(_NUMEL)))


def _finding(
    area: str, name: str, works: bool, detail: str, *, needed: bool = False, **figures: int | float
) -> Finding:
    return Finding(area=area, name=name, works=works, needed=needed, detail=detail, figures=figures)


def _versions() -> list[Finding]:
    found = [_finding("versions", "python", sys.version_info >= (3, 11), platform.python_version(), needed=True)]
    shardwise = _version("shardwise")
    found.append(_finding("versions", "shardwise", True, shardwise or "not installed, found on the path"))
    for name in _REQUIRED:
        version = _version(name)
        works = version is not None
        if name == "torch" and version is not None:
            works = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= _OLDEST_TORCH
        found.append(_finding("versions", name, works, version or "not installed", needed=True))
    for name, purpose in _OPTIONAL:
        version = _version(name)
        found.append(_finding("optional", name, version is not None, version or f"not installed; {purpose}"))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> list[Finding]:
    there = dist.is_available()
    gloo, nccl = there and dist.is_gloo_available(), there and dist.is_nccl_available()
    return [
        _finding("backends", "gloo", gloo, "for CPUs" if gloo else "not in this torch", needed=True),
        _finding("backends", "nccl", nccl, "for CUDA devices" if nccl else "not in this torch"),
    ]


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cgroup_cores()
    limit = "" if quota is None else f", limited to the time of {quota:g}"
    at_most = float(usable) if quota is None else min(quota, usable)
    return _finding("machine", "cores", True, f"{usable} of {present}{limit}", usable=at_most, present=present)


def _cgroup_cores() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> Finding:
    try:
        rows = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        sizes = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return _finding("machine", "memory", False, "cannot be read here")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        total, available = min(total, limit), min(available, limit)
    except (OSError, ValueError):
        pass
    detail = f"{_gib(available)} of {_gib(total)} available"
    return _finding("machine", "memory", True, detail, total_bytes=total, available_bytes=available)


def _disk(folder: Path) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return _finding("machine", "disk", False, f"{folder}: {error.strerror}", needed=True)
    detail = f"{_gib(usage.free)} of {_gib(usage.total)} free in {folder}"
    return _finding("machine", "disk", True, detail, total_bytes=usage.total, free_bytes=usage.free)


def _devices() -> list[Finding]:
    if not torch.cuda.is_available():
        return [_finding("devices", "cuda", False, "none: training runs on the CPU", count=0)]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = f"{properties.name}, {_gib(properties.total_memory)}"
        found.append(_finding("devices", f"cuda:{index}", True, detail, total_bytes=properties.total_memory))
    return found


def _port(port: int) -> Finding:
    name = f"port {port}" if port else "a free port"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = f"{error.strerror}" + ("; give several nodes another with --master-port" if port else "")
            return _finding("network", name, False, reason, needed=not port)
        found = int(probe.getsockname()[1])
    return _finding("network", name, True, f"127.0.0.1:{found}" if not port else "free; several nodes meet there")


def _ssh() -> Finding:
    path = shutil.which("ssh")
    return _finding("network", "ssh", path is not None, path or "not found; launch --hostfile needs it")


def _two_ranks(body: Callable[[Mesh], bool], timeout_seconds: float) -> Finding:
    name = f"{_RANKS} ranks over gloo"
    started = time.monotonic()
    try:
        stay_on_loopback()
        results = run_processes(_RANKS, body, timeout=timeout_seconds)
    except Exception as error:  # whatever it is, it is the answer
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        return _finding("training", name, False, f"{type(error).__name__}: {reason}"[:300], needed=True)
    seconds = time.monotonic() - started
    if results != [True] * _RANKS:
        return _finding("training", name, False, "the all-gather brought wrong values", needed=True, seconds=seconds)
    return _finding(
        "training", name, True, f"all-gather in {seconds:.1f} s, start included", needed=True, seconds=seconds
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
