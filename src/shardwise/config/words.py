"""Plain words for what is wrong with a setting: values as they were written, the nearest valid key.

Pure text. Read ``check.py`` for how a tree of settings is validated with it.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

__all__ = ["children", "leaves", "listing", "nearest", "show", "suggestion"]

WIDTH = 60
MAX_BITS = 256
LIST_AT_MOST = 24


def show(value: object) -> str:
    """Return a value as JSON writes it, on one line of at most 60 characters."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # not JSON; an integer of thousands of digits inside; a cycle
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of everything that is not a section; an empty section counts as nothing."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def children(section: str, valid: Iterable[str]) -> list[str]:
    """Return the names that may stand in a section ("" is the top), in the order of ``valid``."""
    start = f"{section}." if section else ""
    return list(dict.fromkeys(key[len(start) :].partition(".")[0] for key in valid if key.startswith(start)))


def nearest(name: str, candidates: Collection[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most like ``name``, without regard to case, or None."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name[:200].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def suggestion(key: str, valid: Collection[str]) -> str:
    """Say which valid key an unknown dotted key is most like: in its section, else anywhere, else list its section.

    Args:
        key: the unknown key.
        valid: every dotted key that may be written (those of sections are implied).
    """
    section, _, name = key.rpartition(".")
    start = f"{section}." if section else ""
    siblings = children(section, valid)
    near = nearest(name, siblings, 0.7)
    if near is None:
        elsewhere = {known.rpartition(".")[2]: known for known in reversed(list(valid))}
        far = nearest(name, elsewhere, 0.8)
        if far is not None:
            return f"did you mean {elsewhere[far]}?"
        near = nearest(name, siblings, 0.5)
    if near is not None:
        return f"did you mean {start}{near}?"
    return f"valid {'in ' + section if section else 'at the top'}: {listing(siblings)}"


def listing(names: Iterable[str]) -> str:
    """Return ``a, b, c``, cut after some two dozen."""
    names = list(names)
    more = len(names) - LIST_AT_MOST
    return ", ".join(names[:LIST_AT_MOST]) + (f" and {more} more" if more > 0 else "")
