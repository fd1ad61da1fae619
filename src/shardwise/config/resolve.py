"""From what a user wrote to settings: every problem in one error, every value with its origin.

A file is read into a ``Written`` (a native tree and where each key of it comes from) by ``configure.py``; ``resolve``
validates it, completes the batch arithmetic and keeps the origins, so that ``--print-config`` can tell them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.config.check import check
from shardwise.config.contradictions import contradictions, remarks
from shardwise.config.model import BatchConfig, Config
from shardwise.config.words import leaves, show
from shardwise.errors import ConfigError

__all__ = ["Batch", "Resolved", "Verdict", "VerdictFate", "Written", "examine", "resolve", "shortened"]

SHOWN_PROBLEMS = 50

VerdictFate = Literal["same", "mapped", "no effect", "off", "refused"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of one key of a file written for another tool.

    Attributes:
        key: dotted, as written.
        value: as written.
        fate: "off" is a key of a feature that stays switched off; "no effect" is accepted with a reason.
        target: native key, if it has one.
        why: the reason, or what to do.
        absent: it was not written, but its default differs from the native one.
    """

    key: str
    value: Any
    fate: VerdictFate
    target: str = ""
    why: str = ""
    absent: bool = False


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written, in native names.

    Attributes:
        tree: nested dicts, as in TOML.
        source: what to call the whole in an error, such as a file's name.
        dialect: "native" or "deepspeed".
        origins: dotted native key -> where it was written, such as "ds.json: zero_optimization.stage".
        names: dotted native key -> the key to name in an error, where that is another one.
        hints: unknown key -> what to say of it, where that is more than the nearest valid one.
        notes: one line each: keys accepted without effect, and changed defaults.
        problems: what is wrong already; the error lists them with those of the values.
        doubtful: native keys that were written, but wrongly, and are not in the tree.
        needs_batch: whether the batch may not be left out.
        verdicts: key by key, for ``shardwise explain``; empty for native settings.
    """

    tree: Mapping[str, Any]
    source: str = "config"
    dialect: Literal["native", "deepspeed"] = "native"
    origins: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    doubtful: frozenset[str] = frozenset()
    needs_batch: bool = False
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples per update; ``size == micro * accumulation * num_ranks``."""

    size: int
    micro: int
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Settings that fit together.

    Attributes:
        config: the validated tree, defaults filled in, the batch complete; ``clip_grad_norm`` is None when it is off.
        batch: complete batch arithmetic for ``num_ranks``.
        num_ranks: data-parallel ranks.
        origins: dotted key of every effective value -> where it comes from ("default" if nobody wrote it).
        notes: what the user should know, once.
    """

    config: Config
    batch: Batch
    num_ranks: int
    origins: Mapping[str, str]
    notes: tuple[str, ...]


def resolve(written: Written, num_ranks: int) -> Resolved:
    """Validate and complete.

    Args:
        written: what was read.
        num_ranks: data-parallel ranks.

    Raises:
        ConfigError: lists every problem, unknown keys with the nearest valid one.
    """
    resolved, problems = examine(written, num_ranks)
    if resolved is None:
        raise ConfigError(_listed(written.source, problems))
    return resolved


def examine(written: Written, num_ranks: int) -> tuple[Resolved | None, tuple[str, ...]]:
    """Return settings and no problems, or None and at least one; arguments and errors as of ``resolve``."""
    if type(num_ranks) is not int or num_ranks < 1:
        raise ConfigError(f"num_ranks: expected an integer >= 1, got {show(num_ranks)}")
    checked = check(written.tree, written.names, written.doubtful, written.hints)
    problems = [*written.problems, *checked.problems]
    config, batch = checked.config, None
    problems += contradictions(config, written.tree, written.names, checked.broken)
    if "batch" not in checked.broken:
        batch = _complete(config.batch, num_ranks, written, problems)
    if problems or batch is None:  # without a batch there is a problem
        return None, tuple(dict.fromkeys(problems))
    origins = _origins(config, batch, num_ranks, written)
    config = config.model_copy(
        update={
            "clip_grad_norm": config.clip_grad_norm or None,
            "batch": config.batch.model_copy(update=vars(batch)),
        }
    )
    notes = (*written.notes, *remarks(config, written.names))
    return Resolved(config=config, batch=batch, num_ranks=num_ranks, origins=origins, notes=notes), ()


def _listed(source: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return f"{source}: {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in shortened(problems))


def shortened(problems: Sequence[str]) -> list[str]:
    """Return the first 50 problems, and how many more there are: a file of something else can have thousands."""
    more = len(problems) - SHOWN_PROBLEMS
    return [*problems[:SHOWN_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _complete(given: BatchConfig, num_ranks: int, written: Written, problems: list[str]) -> Batch | None:
    """Compute what is not given; None when that is not possible, which becomes a problem."""
    size, micro, accumulation = given.size, given.micro, given.accumulation
    names = {name: written.names.get(f"batch.{name}", f"batch.{name}") for name in ("size", "micro", "accumulation")}
    ranks = _ranks(num_ranks)
    if size is None and micro is None:
        if written.needs_batch or accumulation is not None:
            problems.append(f"{names['size']}: give it or {names['micro']}; neither is there")
            return None
        micro = 1
    if size is None:
        assert micro is not None
        accumulation = accumulation or 1
        return Batch(size=micro * accumulation * num_ranks, micro=micro, accumulation=accumulation)
    if micro is None:
        accumulation = accumulation or 1
        per_micro = accumulation * num_ranks
        if size % per_micro:
            factors = f"{names['accumulation']} {show(accumulation)} * {ranks} = {show(per_micro)}"
            problems.append(f"{names['size']}: {show(size)} is not a multiple of {factors}")
            return None
        return Batch(size=size, micro=size // per_micro, accumulation=accumulation)
    per_window = micro * num_ranks
    if accumulation is None:
        if size % per_window:
            factors = f"{names['micro']} {show(micro)} * {ranks} = {show(per_window)}"
            problems.append(f"{names['size']}: {show(size)} is not a multiple of {factors}")
            return None
        return Batch(size=size, micro=micro, accumulation=size // per_window)
    if size != per_window * accumulation:
        factors = f"{names['micro']} {show(micro)} * {names['accumulation']} {show(accumulation)} * {ranks}"
        fitting, rest = divmod(size, micro * accumulation)
        fits = "" if rest else f"; it is right for {_ranks(fitting)}"
        problems.append(f"{names['size']}: {show(size)} is not {factors} = {show(per_window * accumulation)}{fits}")
        return None
    return Batch(size=size, micro=micro, accumulation=accumulation)


def _origins(config: Config, batch: Batch, num_ranks: int, written: Written) -> dict[str, str]:
    """Say of each effective value where it comes from."""
    tree = config.model_dump()
    given = [name for name in vars(batch) if tree["batch"][name] is not None]
    origins = {key: written.origins.get(key, "default") for key in leaves(tree)}
    for name in vars(batch):
        if name not in given:
            known = " and ".join(written.names.get(f"batch.{part}", f"batch.{part}") for part in given)
            origins[f"batch.{name}"] = f"from {known}, {num_ranks} ranks" if known else "default"
    return origins
