"""Text to train on: the source of Python's own standard library, which is always present, and files of one's own.

Owns ``Corpus``, ``load_stdlib``, ``batch``, ``find_files`` and ``read_documents``. Imports torch and ``errors`` only;
it knows nothing of ranks but their number in a seed. Read ``cli/demo.py`` or ``train/text.py`` next.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import ConfigError

__all__ = ["Corpus", "Documents", "batch", "find_files", "load_stdlib", "read_documents"]

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
LINES_SUFFIX = ".jsonl"
_PROBE_BYTES = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Text as one run of bytes, and what identifies it.

    Attributes:
        num_files: number of files read.
        num_bytes: number of bytes, and of tokens.
        sha256: of the bytes, in hexadecimal.
        tokens: [num_bytes], uint8: one byte is one token.
    """

    num_files: int
    num_bytes: int
    sha256: str
    tokens: Tensor


def load_stdlib(min_bytes: int = 4_000_000) -> Corpus:
    """Read the standard library's ``.py`` files, in the order of their paths, until there are ``min_bytes`` bytes.

    Installed packages and test folders are left out. The last file is read to its end, so there may be more bytes;
    there are fewer when the whole library is smaller.

    Raises:
        ConfigError: ``min_bytes`` is not positive, or the library has no source files (it may be in a zip file).
    """
    if min_bytes < 1:
        raise ConfigError(f"load_stdlib: min_bytes must be at least 1, got {min_bytes}")
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    num_files = 0
    for path in sorted(_source_files(root), key=lambda path: path.relative_to(root).as_posix()):
        text += path.read_bytes()
        num_files += 1
        if len(text) >= min_bytes:
            break
    if not text:
        raise ConfigError(f"load_stdlib: no Python source under {root}: use a Python with its library unpacked")
    return Corpus(
        num_files=num_files,
        num_bytes=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
        tokens=torch.frombuffer(text, dtype=torch.uint8),
    )


def batch(tokens: Tensor, *, seed: int, step: int, rank: int, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Cut random windows out of the text: a pure function of its arguments.

    Args:
        tokens: [num_tokens], any integer dtype.
        seed: of the whole run.
        step: number of the optimizer step.
        rank: number of the data-parallel rank; ranks see different windows.
        batch_size: number of windows.
        length: of a window, in tokens.

    Returns:
        Inputs and targets, each [batch_size, length], int64; the target is the token after each input.

    Raises:
        ConfigError: the text is not longer than one window.
    """
    num_starts = tokens.numel() - length
    if num_starts < 1:
        raise ConfigError(f"batch: a window of {length} tokens needs a longer text, got {tokens.numel()} tokens")
    mixed = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()  # neighbouring seeds give unlike generators
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))
    starts = torch.randint(num_starts, (batch_size, 1), generator=generator)
    windows = tokens[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Texts in the order of their files.

    Attributes:
        texts: UTF-8 bytes of each document: a text file, or the text of one line of a JSONL file.
        names: of each document, for messages: "path", or "path:line".
        num_files: number of files read.
        num_bytes: number of bytes of all texts.
        sha256: of all texts with their lengths, in hexadecimal.
        not_text: files of folders that were left out because they are not text.
    """

    texts: tuple[bytes, ...]
    names: tuple[str, ...]
    num_files: int
    num_bytes: int
    sha256: str
    not_text: tuple[str, ...]


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files among paths, and those in folders among them, to any depth, in the order of their names.

    Names in folders that begin with a dot are left out, and links to folders are not followed.

    Raises:
        ConfigError: a path does not exist, or there is no file at all.
    """
    files: list[Path] = []
    for name in paths:
        place = Path(name).expanduser()
        if place.is_dir():
            files += _visible_files(place)
        elif place.is_file():
            files.append(place)
        else:
            raise ConfigError(f"data.path: there is no file or folder {name!r}")
    if not files:
        raise ConfigError(f"data.path: no files in {', '.join(map(repr, paths)) or 'an empty list'}")
    return files


def read_documents(paths: Sequence[str], field: str = "text") -> Documents:
    """Read text files and JSONL files (``*.jsonl``: one JSON object per line, its text under ``field``).

    Args:
        paths: files and folders, see ``find_files``. Files in folders that hold a zero byte are left out; empty texts
            and empty lines are, too.
        field: key of the text in a line.

    Raises:
        ConfigError: a path does not exist, a file cannot be read, a line is no object or has no text, or there is no
            text at all; the message names the file and the line.
    """
    named = {Path(name).expanduser() for name in paths}
    texts: list[bytes] = []
    names: list[str] = []
    not_text: list[str] = []
    digest = hashlib.sha256()
    files = find_files(paths)
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"data.path: {file}: {error.strerror}") from None
        if file.suffix.lower() == LINES_SUFFIX:
            found = list(_texts_of_lines(file, data, field))
        elif b"\0" in data[:_PROBE_BYTES]:
            if file in named:
                raise ConfigError(f"data.path: {file} holds a zero byte, so it is not text")
            not_text.append(str(file))
            continue
        else:
            found = [(str(file), data)]
        for name, text in found:
            if text:
                texts.append(text)
                names.append(name)
                digest.update(len(text).to_bytes(8, "little") + text)
    if not texts:
        raise ConfigError(f"data.path: there is no text in {', '.join(map(repr, paths))}")
    return Documents(
        texts=tuple(texts),
        names=tuple(names),
        num_files=len(files) - len(not_text),
        num_bytes=sum(map(len, texts)),
        sha256=digest.hexdigest(),
        not_text=tuple(not_text),
    )


def _texts_of_lines(file: Path, data: bytes, field: str) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise ConfigError(f"data.path: {place}: is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"data.path: {place}: expected an object {{...}}, got a {type(values).__name__}")
        if not isinstance(values.get(field), str):
            keys = ", ".join(map(repr, list(values)[:10])) or "no keys"
            raise ConfigError(f"data.field: {place}: no text under {field!r}; the line has {keys}")
        yield place, values[field].encode("utf-8", errors="replace")


def _visible_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                yield path
