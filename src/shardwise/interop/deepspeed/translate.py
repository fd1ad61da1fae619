"""DeepSpeed's JSON in native settings: every key mapped, refused or explained.

``keys.py`` has the table; this file walks what was written and applies the rows, ``sections.py`` knows the settings
that several keys make together. Values are checked for their kind here, for their limits by the native model.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.config.check import native_keys
from shardwise.config.resolve import Written
from shardwise.config.words import children, show, suggestion
from shardwise.interop.deepspeed.build import Build, Entry, number
from shardwise.interop.deepspeed.keys import ALIASES, KEYS, MISSPELLINGS
from shardwise.interop.deepspeed.kinds import Fate
from shardwise.interop.deepspeed.sections import SECTIONS

__all__ = ["deepspeed_keys", "native_counterparts", "translate"]

MAY_BE_NULL = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "zero_optimization.zenflow")
TO_HOST = (
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
)
SET_BY_SECTIONS = ("optimizer.", "scheduler.", "fp16.")
UNRESOLVED = '"auto" is not resolved: the tool that you took this file from fills it in; write a value'


def deepspeed_keys() -> tuple[str, ...]:
    """Return every dotted key that DeepSpeed 0.19.8 knows, other spellings included."""
    return (*KEYS, *ALIASES)


def native_counterparts() -> dict[str, str]:
    """Return the names at the top of a DeepSpeed file -> the native key that says the same, or ""."""
    tops = {key.partition(".")[0]: "" for key in deepspeed_keys()}
    for row in KEYS.values():
        if row.name in tops and row.fate is Fate.SAME:
            tops[row.name] = row.to
    return tops


def translate(
    values: Mapping[str, Any],
    *,
    source: str = "config",
    device: str = "cpu",
    overridden: frozenset[str] = frozenset(),
) -> Written:
    """Express DeepSpeed's settings in native ones; nothing raises, problems are collected.

    Args:
        values: plain nested dicts, as in a DeepSpeed JSON file.
        source: what to call them in origins and errors.
        device: type of the device that trains; offloading to the host is nothing to do on "cpu".
        overridden: dotted keys that were set on the command line.
    """
    build = Build(source=source, device=device, overridden=overridden)
    _collect(values, "", build)
    for row in KEYS.values():
        if row.fate is Fate.SAME and not row.name.startswith("scheduler."):
            build.names[row.to] = build.path(row.name)
    for entry in build.entries.values():
        _apply(entry, build)
    for section in SECTIONS:
        section(build)
    return build.written()


def _collect(values: Mapping[str, Any], section: str, build: Build) -> None:
    """Fill ``entries`` with the known keys; what else is there becomes a problem."""
    known = deepspeed_keys()
    for name, value in values.items():
        path = f"{section}.{name}" if section else name
        canonical = ALIASES.get(path, path)
        if canonical in KEYS:
            if canonical in build.entries:
                build.refuse_unknown(path, value, f"the same setting as {build.path(canonical)}; remove one of them")
            else:
                build.entries[canonical] = Entry(KEYS[canonical], path, value)
        elif not any(key.startswith(f"{path}.") for key in known):
            build.refuse_unknown(path, value, f"unknown key; {_hint(path, known)}")
        elif isinstance(value, Mapping):
            build.sections.add(path)
            _collect(value, path, build)
        elif value == "auto":
            build.refuse_unknown(path, value, UNRESOLVED)
        elif value is not None or path not in MAY_BE_NULL:
            hint = '; write {"stage": 1}' if path == "zero_optimization" and value is True else ""
            build.refuse_unknown(path, value, f"expected a section, got {show(value)}{hint}")


def _hint(path: str, known: tuple[str, ...]) -> str:
    if path in MISSPELLINGS:
        return f"did you mean {MISSPELLINGS[path]}?"
    same = next((row.name for row in KEYS.values() if row.fate is Fate.SAME and row.to == path), "")
    nearest = suggestion(path, known)
    if path not in children("", native_keys()) or nearest == f"did you mean {same}?":
        return nearest
    hint = "a native name, where DeepSpeed's are read: the two cannot be mixed"
    return f"{hint}; write {same}" if same else hint


def _apply(entry: Entry, build: Build) -> None:
    """Judge one key by its row; what has the same meaning is set, unless it belongs to a section with choices."""
    key, value = entry.key, entry.value
    if key.fate is Fate.REFUSED and not key.quiet:
        build.refuse(entry, key.why, _refusal(entry))
    elif value == "auto" and not key.is_quiet(value):
        build.refuse(entry, UNRESOLVED)
    elif not key.kind.accepts(value):
        build.refuse(entry, f"expected {key.kind.expected}, got {show(value)}")
    elif key.switch and not build.is_on(key.switch):
        build.judge(entry, "off", f"it tunes {build.path(key.switch)}, which is off")
    elif key.fate is Fate.SAME:
        build.judge(entry, "same")
        if not key.name.startswith(SET_BY_SECTIONS):
            build.set(key.to, number(value), key.name)
    elif key.fate is Fate.MAPPED:
        build.judge(entry, "off" if value in (None, False) and key.is_quiet(value) else "mapped")
    elif key.is_quiet(value):
        build.judge(entry, "off", "asks for nothing")
    elif key.fate is Fate.NO_EFFECT:
        build.ignore(entry)
    elif build.device == "cpu" and key.name in TO_HOST and value in ("cpu", "CPU", True):
        build.ignore(entry, "training is on the CPU, so all state is in host memory anyway")
    elif key.switch:
        why = f"it tunes {build.path(key.switch)}, which is refused" if key.fate is Fate.LATER and not key.quiet else ""
        build.judge(entry, "refused", why) if why else build.refuse(entry, key.why, _refusal(entry))
    else:
        build.refuse(entry, key.why, _refusal(entry))


def _refusal(entry: Entry) -> str:
    key = entry.key
    shown = "" if isinstance(entry.value, dict | list) else f" = {show(entry.value)}"
    if key.fate is Fate.LATER:
        return f"{entry.path}{shown}: not in this version; {key.why}"
    return f"{entry.path}{shown}: {key.why}"
