"""Kinds of values in other tools' settings, and the row that says what becomes of one key. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

__all__ = [
    "ANYTHING",
    "BOOL",
    "COUNT",
    "DTYPE",
    "FINITE",
    "FRACTION",
    "INTEGER",
    "OBJECT",
    "PAIR",
    "RATE",
    "RATES",
    "STRINGS",
    "TEXT",
    "WHOLE",
    "Fate",
    "Key",
    "Kind",
    "one_of",
    "or_null",
]


class Fate(StrEnum):
    """What becomes of a key."""

    SAME = "same"
    """The same meaning under a native name."""
    MAPPED = "mapped"
    """Expressed by native settings of another form."""
    NO_EFFECT = "no effect"
    """Accepted; the result does not depend on it here."""
    LATER = "later"
    """Refused when it asks for something, because this version does not have it."""
    REFUSED = "refused"
    """Refused when it asks for something."""


class Kind(NamedTuple):
    """What values a key takes."""

    expected: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _is_whole(value: Any) -> bool:
    return _is_finite(value) and float(value).is_integer()


BOOL = Kind("true or false", lambda value: isinstance(value, bool))
INTEGER = Kind("an integer", _is_whole)
WHOLE = Kind("an integer >= 0", lambda value: _is_whole(value) and value >= 0)
COUNT = Kind("an integer >= 1", lambda value: _is_whole(value) and value >= 1)
FINITE = Kind("a finite number", _is_finite)
RATE = Kind("a number >= 0", lambda value: _is_finite(value) and value >= 0)
FRACTION = Kind("a number from 0 to 1", lambda value: _is_finite(value) and 0 <= value <= 1)
RATES = Kind(
    "a number >= 0, or a list of them",
    lambda value: RATE.accepts(value) or (isinstance(value, list) and bool(value) and all(map(RATE.accepts, value))),
)
PAIR = Kind(
    "a list of two numbers",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_finite, value)),
)
TEXT = Kind("a string", lambda value: isinstance(value, str))
STRINGS = Kind(
    "a list of strings",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value)),
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
ANYTHING = Kind("anything", lambda value: True)


def one_of(*names: str) -> Kind:
    """Return the kind of some strings, in any case."""
    return Kind(
        "one of " + ", ".join(names),
        lambda value: isinstance(value, str) and value.lower() in {name.lower() for name in names},
    )


def or_null(kind: Kind) -> Kind:
    """Return the kind that also takes null."""
    return Kind(f"{kind.expected}, or null", lambda value: value is None or kind.accepts(value))


DTYPE = one_of("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: dotted.
        kind: what values it takes.
        fate: what becomes of it.
        to: native keys that it sets.
        why: the reason of a fate other than SAME, or what to do.
        quiet: values that ask for nothing.
        switch: key that turns the feature on which this one only tunes.
        aliases: other spellings.
        absent: what it means to leave the key out, where that is not the native default.
    """

    name: str
    kind: Kind
    fate: Fate
    to: str = ""
    why: str = ""
    quiet: tuple[Any, ...] = ()
    switch: str = ""
    aliases: tuple[str, ...] = ()
    absent: str = ""

    def is_quiet(self, value: Any) -> bool:
        """Whether a value asks for nothing; true is not 1."""
        lowered = value.lower() if isinstance(value, str) else value
        return any(type(value) is type(calm) and lowered == calm for calm in self.quiet) or (
            _is_number(value) and any(_is_number(calm) and calm == value for calm in self.quiet)
        )
