"""Saves again and again in a child that is killed at a random moment; then looks at what is there. A program.

The child is forked, so that a kill costs milliseconds. After every kill each visible checkpoint must be whole, what
``latest`` names must be there, and the next save must clear what was left.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import shardwise
from shardwise.checkpoint.folder import find_checkpoints, read_latest
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.fake import LocalComm

# Run as a program, it is in no package.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint.case import build


def save_on(folder: Path, number: int) -> None:
    """Save until the parent is gone, under new names and under old ones, and let old ones go."""
    parent = os.getppid()
    net, _ = build({"data": LocalComm()}, 1)
    while os.getppid() == parent:
        number += 1
        shardwise.save_checkpoint(net, folder, tag=f"t{number % 5}", step=number, overwrite=True, keep_last=2)


def look(folder: Path) -> int:
    """Check everything that a reader sees; return the newest step."""
    found = find_checkpoints(folder)
    for each in found:
        verify_files(each.path)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    assert names - {"latest"} == {each.tag for each in found}, names
    latest = read_latest(folder) if folder.is_dir() else None
    assert latest is None or latest in {each.tag for each in found}, (latest, names)
    return max((each.manifest.step for each in found if each.manifest), default=0)


def main(folder: Path, kills: int) -> None:
    """Kill, look, save, look."""
    torch.set_num_threads(1)
    rng, torn, step = random.Random(7), 0, 0
    net, _ = build({"data": LocalComm()}, 1)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            save_on(folder, step)
            os._exit(0)
        time.sleep(rng.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        newest = look(folder)
        assert newest >= step, (newest, step)
        torn += any(path.name.startswith(".") for path in folder.iterdir()) if folder.is_dir() else 0
        for path in folder.glob(".tmp-*"):
            os.utime(path, (1, 1))  # a directory that its maker has just made counts as its maker's for some seconds
        step = newest + 1
        shardwise.save_checkpoint(net, folder, tag=f"t{step % 5}", step=step, overwrite=True, keep_last=2)
        assert look(folder) == step
        left = [path.name for path in folder.rglob(".*")]
        assert not left, left
    print(json.dumps({"kills": kills, "in a save": torn}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
