"""Real text that is always present: the source of Python's own standard library, as bytes.

Owns ``Corpus``, ``load_stdlib`` and ``batch``. Imports torch and ``errors`` only; it knows nothing of ranks but their
number in a seed. Read ``cli/demo.py`` next: it trains ``models/gpt.py`` on these bytes.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import ConfigError

__all__ = ["Corpus", "batch", "load_stdlib"]

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


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


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                yield path
