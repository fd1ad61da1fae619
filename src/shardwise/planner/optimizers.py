"""State that optimizers keep, in words per parameter element: torch's, Lion, and what compresses it.

A word is one element in the optimizer's dtype, mostly the master's. Counters (one number per tensor) are left out.
``optim/families.py`` asks this table, after it has refused those that do not work on fragments. Measured:
docs/optimizers-memory.md.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardwise.errors import ConfigError

__all__ = ["factored_state_words", "quantized_state_bytes", "state_words"]

Options = Mapping[str, Any]


def _always(words: int) -> Callable[[Options], int]:
    return lambda options: words


# name of the class -> words, given the options it was built with
_WORDS: Mapping[str, Callable[[Options], int]] = MappingProxyType(
    {
        "Adam": lambda options: 3 if options.get("amsgrad") else 2,
        "AdamW": lambda options: 3 if options.get("amsgrad") else 2,
        "NAdam": _always(2),
        "RAdam": _always(2),
        "Adamax": _always(2),
        "Adadelta": _always(2),
        "Adagrad": _always(1),
        "ASGD": _always(1),
        "Rprop": _always(2),
        "Lion": _always(1),
        "Muon": _always(1),
        "SparseAdam": _always(2),
        "SGD": lambda options: 1 if options.get("momentum") else 0,
        "RMSprop": lambda options: 1 + bool(options.get("momentum")) + bool(options.get("centered")),
    }
)


def state_words(name: str, options: Options | None = None) -> int:
    """Return the number of state elements per parameter element.

    Args:
        name: of the class: "AdamW".
        options: what the class is built with; only those that add state matter.

    Raises:
        ConfigError: the optimizer is not in the table.

    Source: torch.optim of torch 2.13; Lion: arXiv:2302.06675.
    """
    if name not in _WORDS:
        raise ConfigError(f"unknown optimizer state of {name}: pass optim_words=, its state elements per parameter")
    return _WORDS[name](options or {})


def factored_state_words(rows: int, columns: int, *, momentum: bool = False) -> float:
    """Return the words per element that Adafactor keeps for a matrix: one row, one column, perhaps a momentum.

    Source: Adafactor, arXiv:1804.04235, section 3.
    """
    return (rows + columns) / (rows * columns) + momentum


def quantized_state_bytes(words: float, *, bits: int = 8, block: int = 256, scale_bytes: int = 4) -> float:
    """Return the bytes per parameter of optimizer state that is quantized in blocks.

    Source: Dettmers et al., arXiv:2110.02861, section 2 (8-bit optimizers; 2048 at first, 256 in their library).
    """
    return words * (bits / 8 + scale_bytes / block)
