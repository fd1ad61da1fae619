"""Who else could have written a checkpoint: what belongs to another user, or may be changed by anyone."""

import os
import stat
from pathlib import Path

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.names import LATEST, MANIFEST

__all__ = ["foreign"]

_SHOWN = 4


def foreign(path: Path, manifest: Manifest) -> str:
    """Return what users other than this one and root could have changed of a checkpoint, or its folder; "" if nothing.

    In a directory with the sticky bit, such as /tmp, anyone may write, but nobody may replace what is not theirs.
    """
    files = [path / manifest.file_name(index) for index in range(manifest.num_ranks)]
    told = [
        text for each in (path.parent, path.parent / LATEST, path, path / MANIFEST, *files) if (text := _told(each))
    ]
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return "; ".join(told[:_SHOWN]) + more


def _told(path: Path) -> str:
    try:
        facts = path.stat() if path.is_dir() else path.lstat()
    except OSError:
        return ""  # whether it must be there is for others to say
    if facts.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {facts.st_uid}"
    sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
    return f"{path} may be written by anyone" if facts.st_mode & stat.S_IWOTH and not sticky else ""
