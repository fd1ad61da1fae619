"""The native settings while they grow from DeepSpeed's: what was written, what was judged, what is wrong so far."""

from dataclasses import dataclass, field
from typing import Any

from shardwise.config.resolve import Verdict, VerdictFate, Written
from shardwise.interop.deepspeed.kinds import Key

__all__ = ["Build", "Entry", "number"]


@dataclass(frozen=True)
class Entry:
    """A key that was written; ``path`` is its spelling."""

    key: Key
    path: str
    value: Any


@dataclass(kw_only=True)
class Build:
    """What is known so far; the fields from ``tree`` on become those of ``Written``.

    Attributes:
        source: what to call the settings.
        device: type of the device that trains.
        overridden: dotted keys that were set on the command line.
        entries: keys that were written, by their main spelling.
        sections: dotted names of the sections that were written.
        no_effect: reason -> spellings of the keys it is for; they share a note.
    """

    source: str
    device: str
    overridden: frozenset[str] = frozenset()
    entries: dict[str, Entry] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    no_effect: dict[str, list[str]] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key that was written and is not refused, else the default."""
        entry = self.entries.get(name)
        if entry is None or self.verdicts[name].fate == "refused":
            return default
        return entry.value

    def is_on(self, switch: str) -> bool:
        """Whether a switch asks for its feature."""
        entry = self.entries.get(switch)
        return entry is not None and not entry.key.is_quiet(entry.value)

    def path(self, name: str) -> str:
        """Return a key as the user spelled it."""
        return self.entries[name].path if name in self.entries else name

    def judge(self, entry: Entry, fate: VerdictFate, why: str = "") -> None:
        """Record what becomes of a key."""
        self.verdicts[entry.key.name] = Verdict(
            key=entry.path, value=entry.value, fate=fate, target=entry.key.to, why=why or entry.key.why
        )

    def ignore(self, entry: Entry, why: str = "") -> None:
        """Accept a key that has no effect here, and add it to the note about its reason."""
        self.judge(entry, "no effect", why)
        self.no_effect.setdefault(why or entry.key.why, []).append(entry.path)

    def refuse(self, entry: Entry, why: str, line: str = "") -> None:
        """Refuse a key: a problem, and its native keys are not missing."""
        self.judge(entry, "refused", why)
        self.problems.append(line or f"{entry.path}: {why}")
        self.doubtful.update(key for key in entry.key.to.split(", ") if key)

    def refuse_unknown(self, path: str, value: Any, why: str) -> None:
        """Refuse what is no key."""
        self.problems.append(f"{path}: {why}")
        self.verdicts[path] = Verdict(key=path, value=value, fate="refused", why=why)

    def set(self, native: str, value: Any, name: str) -> None:
        """Set a native key; ``name`` is the DeepSpeed key that says so."""
        section, _, last = native.rpartition(".")
        (self.tree.setdefault(section, {}) if section else self.tree)[last] = value
        path = self.path(name)
        self.names[native] = path
        self.origins[native] = f"--set {path}" if path in self.overridden else f"{self.source}: {path}"

    def set_default(self, native: str, value: Any, name: str, note: str) -> None:
        """Set a native key whose DeepSpeed key is absent, where the defaults differ."""
        self.set(native, value, name)
        self.origins[native] = f"DeepSpeed's default of {name}"
        self.verdicts[name] = Verdict(key=name, value=None, fate="mapped", target=native, why=note, absent=True)
        self.notes.append(note)

    def remark_default(self, name: str, note: str) -> None:
        """Note what an absent key means where DeepSpeed's default is not what happens here."""
        self.verdicts[name] = Verdict(key=name, value=None, fate="no effect", why=note, absent=True)
        self.notes.append(note)

    def written(self) -> Written:
        """Return the result."""
        grouped = (f"{_joined(paths)}: no effect here: {why}" for why, paths in self.no_effect.items())
        return Written(
            tree=self.tree,
            source=self.source,
            dialect="deepspeed",
            origins=self.origins,
            names=self.names,
            notes=(*self.notes, *grouped),
            problems=tuple(self.problems),
            doubtful=frozenset(self.doubtful),
            needs_batch=True,
            verdicts=tuple(self.verdicts.values()),
        )


def number(value: Any) -> Any:
    """Return an integer for 5e8, which JSON reads as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _joined(paths: list[str]) -> str:
    """Return ``a.b, a.c`` as ``a.{b, c}``."""
    sections = {path.rpartition(".")[0] for path in paths}
    if len(paths) == 1 or len(sections) > 1 or "" in sections:
        return ", ".join(paths)
    return f"{sections.pop()}.{{{', '.join(path.rpartition('.')[2] for path in paths)}}}"
