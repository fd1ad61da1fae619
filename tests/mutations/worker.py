"""A process that breaks the library on purpose: one mutation at a time, in a copy of the sources, then the fast tests.

Reads one job per line from stdin, as JSON: the path of the package, the mutation, the tests, a time limit in seconds.
Writes one line per job. torch is imported once; each job runs in a fork of its own, so a mutation that hangs or crashes
takes only its fork down. The library itself is never imported before the fork.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch


def preload() -> None:
    """Import what the first optimizer step imports. No backward: its threads do not survive a fork."""
    torch.set_num_threads(1)
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    torch.optim.AdamW([param]).step()
    assert not [name for name in sys.modules if name.partition(".")[0] == "shardwise"]


def apply(package: Path, target: Path, mutation: dict[str, Any]) -> None:
    """Copy the package and replace the one occurrence of the old text by the new one."""
    shutil.copytree(package, target)
    if mutation:
        path = target / mutation["file"]
        text = path.read_text()
        assert text.count(mutation["old"]) == 1, f"{mutation['old']!r} is {text.count(mutation['old'])} times in {path}"
        path.write_text(text.replace(mutation["old"], mutation["new"]))


def run_tests(job: dict[str, Any], folder: Path) -> int:
    """Run the tests against the mutated copy; in the fork."""
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    package = Path(job["package"])
    apply(package, folder / package.name, job["mutation"])
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    shardwise = __import__(package.name)
    assert Path(shardwise.__file__).is_relative_to(folder)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *job["tests"]]))


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait no longer than the limit, report."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-mutation-") as folder:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = run_tests(job, Path(folder))
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        ended, status = 0, 0
        while not ended and time.monotonic() - start < job["limit"]:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        log = (Path(folder) / "log").read_text(errors="replace") if (Path(folder) / "log").exists() else ""
    code = os.waitstatus_to_exitcode(status) if ended else None
    failed = [line for line in log.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"code": code, "seconds": time.monotonic() - start, "failed": failed, "log": log[-3000:]}


def main() -> None:
    """Serve jobs until stdin ends."""
    preload()
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
