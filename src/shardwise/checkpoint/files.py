"""Small files and names on the disk: written new, no link followed, brought there before anything depends on them."""

import os
from pathlib import Path

__all__ = ["sync_folder", "umask", "write_whole"]


def write_whole(path: Path, raw: bytes, *, to_disk: bool = True) -> None:
    """Write a new small file and bring it to the disk, at once or when the system likes."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
        stream.write(raw)
        stream.flush()
        if to_disk:
            os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Bring names in a directory to the disk."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def umask() -> int:
    """Return the mask of this process; asking the system itself would change it for a moment, for all threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077
