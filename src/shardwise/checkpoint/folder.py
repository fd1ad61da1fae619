"""The folder that holds the checkpoints of a run: what is whole, which is the latest, what may go.

A checkpoint becomes visible by one rename. What begins with a dot is not visible: ``.tmp-`` is being written, or was
when its process died; ``.gone-`` is being removed. Both are cleared by the next save, if their process is dead.
Nothing in such a folder is trusted, not even what says whose a directory is.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files import sync_folder, umask, write_whole
from shardwise.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from shardwise.checkpoint.names import LATEST, MANIFEST, is_tag, read_small
from shardwise.errors import CheckpointError

__all__ = [
    "Found",
    "clear_leftovers",
    "commit",
    "find_checkpoints",
    "folder_of_run",
    "make_temporary",
    "newest_whole",
    "read_latest",
    "read_manifest",
    "remove",
    "remove_all",
    "replace_file",
    "write_latest",
]

_TEMPORARY, _GONE, _OWNER = ".tmp-", ".gone-", ".owner"
_ASIDE = re.compile(r"\.tmp-(.+)-[0-9a-f]{32}-old")
_LATEST_BYTES = 256
_MOST_TRIES = 8  # to find a name taken, or free
_YOUNG_SECONDS = 10.0  # in this time whoever makes a directory has said that it is theirs
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint in a folder; ``problem`` says why it cannot be loaded, as far as its manifest and lengths tell."""

    tag: str
    path: Path
    manifest: Manifest | None
    problem: str = ""


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``path``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not path.is_dir() or path.is_symlink():
        raise CheckpointError(f"{path}: there is no checkpoint")
    if not (path / MANIFEST).exists():
        raise CheckpointError(f"{path}: has no {MANIFEST}: {_what_it_is(path)}")
    return Manifest.decode(read_small(path, MANIFEST, MAX_MANIFEST_BYTES), str(path / MANIFEST))


def read_latest(folder: Path) -> str | None:
    """Return the tag that ``latest`` names; None if there is no such file. The folder itself may be a link.

    Raises:
        CheckpointError: it holds no tag.
    """
    if not os.path.lexists(folder / LATEST):
        return None
    text = read_small(Path(os.path.realpath(folder)), LATEST, _LATEST_BYTES).decode(errors="replace").removesuffix("\n")
    if not is_tag(text):
        raise CheckpointError(f"{folder / LATEST}: names {text!r}, which is no tag of a checkpoint")
    return text


def find_checkpoints(folder: Path) -> list[Found]:
    """Return the checkpoints of a folder, oldest first: a run that went back saves fewer steps later."""
    found = []
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        path = folder / name
        if not is_tag(name) or not path.is_dir() or path.is_symlink() or not (path / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            found.append(Found(tag=name, path=path, manifest=None, problem=str(error)))
            continue
        found.append(Found(tag=name, path=path, manifest=manifest, problem=_lengths(path, manifest)))
    return sorted(found, key=lambda each: (each.manifest.time, each.manifest.step) if each.manifest else ("", -1))


def folder_of_run(path: Path) -> Path:
    """Return the folder of checkpoints in the folder of a run; ``path`` itself if it is no such folder."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not os.path.lexists(path / LATEST) and not find_checkpoints(path) else path


def newest_whole(folder: Path) -> Found | None:
    """Return the newest checkpoint without a problem."""
    return next((found for found in reversed(find_checkpoints(folder)) if not found.problem), None)


def make_temporary(folder: Path, tag: str, save_id: str) -> Path:
    """Make the private directory of a save; only this user may look inside until it is committed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_TEMPORARY}{tag}-{save_id}"
    path.mkdir(mode=0o700)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_of(os.getpid())}
    # Not brought to the disk: what a crash of the machine leaves is nobody's.
    write_whole(path / _OWNER, json.dumps(owner).encode(), to_disk=False)
    return path


def clear_leftovers(folder: Path) -> None:
    """Remove what saves of dead processes of this host left; put back what one had moved aside."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_symlink() and path.is_dir():
            with contextlib.suppress(OSError):  # what cannot be removed does not keep a save from being made
                _clear(path)


def _clear(path: Path) -> None:
    if not path.name.startswith((_TEMPORARY, _GONE)):
        if is_tag(path.name) and os.path.lexists(path / _OWNER) and not _is_owned(path):
            (path / _OWNER).unlink()  # its save ended right after the commit
        return
    if _is_owned(path) or _is_owned(path.with_name(path.name.removesuffix("-old"))):
        return
    aside = _ASIDE.fullmatch(path.name)
    if aside and is_tag(aside[1]) and not os.path.lexists(path.with_name(aside[1])):
        os.rename(path, path.with_name(aside[1]))
    else:
        shutil.rmtree(path, ignore_errors=True)


def commit(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Make a finished directory visible under its name, in one step.

    Raises:
        CheckpointError: the name is taken and may not be.
        OSError: the file system refuses.
    """
    mask = umask()
    for path in temporary.iterdir():
        path.chmod(0o666 & ~mask)
    temporary.chmod(0o777 & ~mask)
    sync_folder(temporary)
    for tries_left in reversed(range(_MOST_TRIES)):
        try:
            _put(temporary, target, overwrite=overwrite)
            break
        except OSError as error:  # another run has taken the name since we looked, or let it go
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST) or not tries_left:
                raise
    (target / _OWNER).unlink(missing_ok=True)  # not before: a directory without an owner may be cleared
    sync_folder(target.parent)


def _put(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(target):
        os.rename(temporary, target)
    elif overwrite and not target.is_symlink() and (target / MANIFEST).exists():
        shutil.rmtree(_exchange(temporary, target), ignore_errors=True)  # the new one is there, whatever happens
    elif os.path.lexists(target):
        raise CheckpointError(f"{target}: exists already")
    else:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))


def remove(path: Path, save_id: str) -> None:
    """Make a checkpoint invisible in one step, then remove it."""
    gone = path.with_name(f"{_GONE}{path.name}-{save_id}")
    with contextlib.suppress(FileNotFoundError):  # another run has removed it
        os.rename(path, gone)
    sync_folder(path.parent)
    shutil.rmtree(gone, ignore_errors=True)  # the save of another run may be at it as well


def remove_all(folder: Path) -> None:
    """Remove every checkpoint of a folder, whole or not, and the folder if nothing else is in it."""
    if folder.is_dir() and not folder.is_symlink():
        clear_leftovers(folder)
        (folder / LATEST).unlink(missing_ok=True)
        for each in find_checkpoints(folder):
            shutil.rmtree(each.path)
        with contextlib.suppress(OSError):
            folder.rmdir()


def write_latest(folder: Path, tag: str, save_id: str) -> None:
    """Let ``latest`` name a checkpoint, in one step."""
    replace_file(folder / LATEST, lambda path: write_whole(path, f"{tag}\n".encode()), save_id)


def replace_file(path: Path, write: Callable[[Path], object], save_id: str | None = None) -> None:
    """Let ``write`` make a file that takes the place of ``path`` in one step, whatever that was; no link is followed.

    Args:
        path: of the file; its folder is made if it does not exist.
        write: is given a free path in a directory of this process.
        save_id: drawn anew for every call; None: draws one.
    """
    number = uuid.uuid4().hex if save_id is None else save_id
    temporary = make_temporary(path.parent, path.name, number)
    try:
        write(temporary / path.name)
        with open(temporary / path.name, "rb") as stream:
            os.fsync(stream.fileno())
        (temporary / path.name).chmod(0o666 & ~umask())
        os.replace(temporary / path.name, path)
    finally:
        gone = temporary.with_name(f"{_GONE}{path.name}-{number}")
        os.rename(temporary, gone)
        shutil.rmtree(gone, ignore_errors=True)
    sync_folder(path.parent)


def removable(found: Collection[Found], keep_last: int, keep: Collection[str]) -> Iterator[Found]:
    """Yield the checkpoints that retention lets go: neither among the last ones, nor to be kept."""
    whole = [each for each in found if not each.problem]
    last = {each.tag for each in whole[-keep_last:]}
    for each in whole:
        if each.tag not in last and each.tag not in keep:
            yield each


def _exchange(first: Path, second: Path) -> Path:
    """Put a directory in the place of another, at once; where the file system cannot, one after the other.

    Returns:
        Where the other one is now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
            return first
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
    aside = first.with_name(f"{first.name}-old")
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except OSError:
        os.rename(aside, second)
        raise
    return aside


def _lengths(path: Path, manifest: Manifest) -> str:
    for index, facts in enumerate(manifest.files):
        file = path / manifest.file_name(index)
        try:
            num_bytes = file.lstat().st_size
        except OSError:
            return f"{file} is missing"
        if num_bytes != facts.bytes:
            return f"{file} has {num_bytes} bytes, expected {facts.bytes}"
    return ""


def _is_owned(path: Path) -> bool:
    """Whether the process that made a temporary directory may still be alive."""
    try:
        owner = json.loads(read_small(path, _OWNER, 4096))
        host, pid, start = owner["host"], owner["pid"], owner["start"]
    except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return _is_just_made(path)
    if host != socket.gethostname():
        return isinstance(host, str)  # of another host: nobody can tell
    return type(pid) is int and start is not None and bool(start == _start_of(pid))


def _is_just_made(path: Path) -> bool:
    """Whether a directory is so new that its maker may not have said yet that it is theirs."""
    with contextlib.suppress(OSError):
        is_young = abs(time.time() - path.lstat().st_mtime) < _YOUNG_SECONDS
        return is_young and path.name.startswith(_TEMPORARY) and set(os.listdir(path)) <= {_OWNER}
    return False


def _start_of(pid: int) -> str | None:
    """Return when a process began, in the kernel's own count; None if there is none."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return text.rpartition(")")[2].split()[19] + "/" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _what_it_is(path: Path) -> str:
    names = set(os.listdir(path)) if path.is_dir() else set()
    if names & {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}:
        return (
            "it holds an export of weights, without optimizer state and counters. Load weights with "
            "initial_values=shardwise.from_weights(...), or pass --weights-only"
        )
    if any(name.endswith("_model_states.pt") for name in names):
        return "it is DeepSpeed's: import it with `shardwise checkpoint convert --from deepspeed`"
    if ".metadata" in names:
        return "it is of torch.distributed.checkpoint: import it with `shardwise checkpoint convert --from dcp`"
    return "it is no checkpoint"
