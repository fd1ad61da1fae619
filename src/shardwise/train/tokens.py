"""From text to tokens and back: bytes as they are, or a Hugging Face ``tokenizer.json``.

The tokenizer file is read by the package ``tokenizers`` (the extra "hf"); nothing in it is run as code.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.errors import ConfigError

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer", "optional_package"]

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Turns text into numbers below ``vocab``.

    Attributes:
        vocab: number of distinct tokens.
        end: token that ends a document; None if there is none.
    """

    vocab: int
    end: int | None

    def encode(self, text: bytes, name: str) -> Tensor:
        """Return the tokens of a UTF-8 text, [num_tokens], any integer dtype; ``name`` is for messages."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no text becomes a replacement character."""


class ByteTokenizer:
    """One byte is one token; the byte 0 ends a document."""

    def __init__(self) -> None:
        self.vocab = 256
        self.end: int | None = 0

    def encode(self, text: bytes, name: str) -> Tensor:
        """Return the bytes, [num_bytes], uint8."""
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """The tokenizer of a ``tokenizer.json``.

    Args:
        path: of the file.
        end_token: text of the token that ends a document; None: a common one if the tokenizer has it.

    Raises:
        ConfigError: the file cannot be read, or has no such token.
    """

    def __init__(self, path: Path, end_token: str | None) -> None:
        if not path.is_file():
            raise ConfigError(f'data.tokenizer: there is no file {str(path)!r}; expected "bytes" or a tokenizer.json')
        tokenizers = optional_package("tokenizers", "data.tokenizer")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ConfigError(f"data.tokenizer: {path} is not a tokenizer: {error}") from None
        self.vocab = int(self._tokenizer.get_vocab_size())
        self.end = self._end(end_token, path)

    def _end(self, wanted: str | None, path: Path) -> int | None:
        found = [self._tokenizer.token_to_id(name) for name in (_END_TOKENS if wanted is None else (wanted,))]
        known = [int(number) for number in found if number is not None]
        if wanted is not None and not known:
            raise ConfigError(f"data.end_token: {path} has no token {wanted!r}")
        return known[0] if known else None

    def encode(self, text: bytes, name: str) -> Tensor:
        """Return the tokens without those that a template would add, [num_tokens], int32.

        Raises:
            ConfigError: the text is not UTF-8.
        """
        try:
            words = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f'data.path: {name} is not UTF-8 text: {error}; "bytes" reads any') from None
        return torch.tensor(self._tokenizer.encode(words, add_special_tokens=False).ids, dtype=torch.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_tokenizer(name: str, end_token: str | None) -> Tokenizer:
    """Return the byte tokenizer for "bytes", else that of a file or of a folder with a ``tokenizer.json``.

    Raises:
        ConfigError: see ``FileTokenizer``; or ``end_token`` is given for bytes.
    """
    if name == "bytes":
        if end_token is not None:
            raise ConfigError("data.end_token: is for a tokenizer.json; with bytes the byte 0 ends a document")
        return ByteTokenizer()
    path = Path(name).expanduser()
    return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_token)


def optional_package(name: str, setting: str) -> Any:
    """Import a package of the extra "hf".

    Raises:
        ConfigError: it is not installed; names the setting that needs it and the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: needs the package {name}, which cannot be imported ({error}): "
            "install it, or the extra hf of shardwise"
        ) from None
