"""Names of checkpoints and of their files: what may stand in a folder, and what a path may not do.

Checkpoint folders are not trusted: a name from a file never leads outside, and a link is never followed.
"""

import os
import re
import stat
from pathlib import Path

from shardwise.errors import CheckpointError, ConfigError

__all__ = ["LATEST", "MANIFEST", "check_tag", "is_tag", "open_inside", "rank_file", "read_small"]

MANIFEST, LATEST = "manifest.json", "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def is_tag(name: str) -> bool:
    """Whether a name may be a checkpoint's: 1 to 128 of A-Z a-z 0-9 . _ -, the first no dot or dash, and not taken."""
    return _TAG.fullmatch(name) is not None and name not in (LATEST, MANIFEST)


def check_tag(tag: str) -> str:
    """Return a tag that a user gave.

    Raises:
        ConfigError: it is no name for a folder of its own.
    """
    given: object = tag
    if not isinstance(given, str) or not is_tag(given):
        raise ConfigError(
            f"a checkpoint's tag is 1 to 128 of A-Z a-z 0-9 . _ -, does not begin with a dot or a dash and is not "
            f"{LATEST!r} or {MANIFEST!r}; got {tag!r}"
        )
    return tag


def open_inside(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that lies directly in a folder; neither of the two may be a link.

    Returns:
        A file descriptor, for the caller to close.

    Raises:
        CheckpointError: the name leads elsewhere, or there is no such regular file.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name or "\\" in name:
        raise CheckpointError(f"{folder}: {name!r} is no name of a file in this folder")
    try:
        at = os.open(folder, _DIRECTORY)
        try:
            # Looked at first: to open a device or a pipe may do something.
            is_file = stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
            found = os.open(name, flags | _PLAIN, dir_fd=at) if is_file else None
        finally:
            os.close(at)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: {error.strerror}") from None
    if found is not None and not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        found = None
    if found is None:
        raise CheckpointError(f"{folder / name}: is no regular file")
    return found


def read_small(folder: Path, name: str, most_bytes: int) -> bytes:
    """Return what is in a file of a folder.

    Raises:
        CheckpointError: as ``open_inside``, or the file is larger than ``most_bytes``.
    """
    with os.fdopen(open_inside(folder, name), "rb") as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        if num_bytes > most_bytes:
            raise CheckpointError(f"{folder / name}: has {num_bytes} bytes, more than the {most_bytes} such a file may")
        try:
            return stream.read(num_bytes)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror}") from None
