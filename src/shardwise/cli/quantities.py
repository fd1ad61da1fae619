"""Sizes as people write them."""

import re
from types import MappingProxyType

__all__ = ["parse_bytes"]

_UNITS = MappingProxyType(
    {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    | {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "5GB" or "512MiB".

    Raises:
        ValueError: it is none; says so in words for the user.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B)?", text.strip().upper())
    if found is None or (found[2] or "") not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"expected a size like 5GB or 512MiB, got {text!r}")
    return max(1, int(float(found[1]) * _UNITS[found[2] or ""]))
