"""What the heap of the C library grows to in a dry run: asked of the library itself, for memory that nobody touches.

Between blocks that live, freed ones leave holes into which the next ones do not always fit. How many depends on the
rules of the library, so its own rules are run.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["heap_bytes", "status_bytes"]

_ALIGNMENT = 64  # of torch on the CPU


def heap_bytes(changes: Iterable[tuple[int, int]]) -> int:
    """Replay the changes of a dry run in a new process; return by how many bytes its memory grew at most."""
    command = [sys.executable, "-I", __file__]  # without torch: a heap as empty as it can be
    done = subprocess.run(command, input=json.dumps(list(changes)), capture_output=True, text=True, check=True)
    return int(done.stdout)


def status_bytes(name: str) -> int:
    """Return a size of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _replay(changes: Iterable[tuple[int, int]]) -> int:
    library = ctypes.CDLL(None)
    library.free.argtypes = [ctypes.c_void_p]
    library.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    blocks: dict[int, int | None] = {}
    before = status_bytes("VmSize")
    for address, num_bytes in changes:
        if address < 0:
            library.mallopt(address, num_bytes)
            continue
        library.free(blocks.pop(address, None))
        if num_bytes:
            block = ctypes.c_void_p()
            library.posix_memalign(ctypes.byref(block), _ALIGNMENT, num_bytes)
            blocks[address] = block.value
    return status_bytes("VmPeak") - before


if __name__ == "__main__":
    sys.stdout.write(str(_replay(json.load(sys.stdin))))
