"""A choice as a table for people and as plain values for JSON. Every figure is planned."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from shardwise.sizing.case import Case, Memory, Need
from shardwise.sizing.choice import Answer, Choice
from shardwise.sizing.states import StateRow
from shardwise.sizing.subject import SizingSubject

__all__ = ["choice_facts", "choice_tables", "gib", "state_facts", "state_tables"]

LEFT_OUT = (
    "Planned, not measured; free below 0 is too much, most of it what the last column names. Left out: rounding and "
    "fragmentation of the allocator, memory inside kernels, the device's context and libraries; evaluation and "
    "samples of a run; the memory of the host."
)
STATES_ONLY = (
    "Planned, states alone: no activations, gathered parameters or buffers. Whether there is room for training they do "
    "not say: name a model."
)
_NAMES: Mapping[str, str] = MappingProxyType(
    {"gpus": "fewest GPUs", "micro": "largest micro-batch", "depth": "most blocks"}
)


def gib(num_bytes: float) -> str:
    """Return bytes in GiB or MiB."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def choice_tables(subject: SizingSubject, choice: Choice) -> list[RenderableType]:
    """Return what is shown, in order."""
    question = choice.question
    shown: list[RenderableType] = [_title(subject, choice), _table(choice)]
    shown += [f"no row for {_words(case)}: {why}" for case, why in choice.refused]
    shown += [LEFT_OUT, *_verdicts(choice)]
    if question.wanted is not None and choice.best is None:
        shown.append(f"no {_NAMES[question.wanted].split()[1]} of any row fits")
    return shown


def choice_facts(subject: SizingSubject, choice: Choice) -> dict[str, Any]:
    """Return the same as plain values."""
    return {
        "model": subject.name,
        "context": subject.context,
        "memory_bytes": choice.question.memory.bytes,
        "margin": choice.question.memory.margin,
        "left_out": LEFT_OUT,
        "rows": [_facts(row) for row in choice.answers],
        "best": None if choice.best is None else choice.answers.index(choice.best),
        "refused": [{"case": asdict(case), "why": why} for case, why in choice.refused],
        "plain_is_enough": choice.plain_is_enough,
    }


def state_tables(num_params: int, memory: Memory, gpus: int | None, rows: Sequence[StateRow]) -> list[RenderableType]:
    """Return what is shown for a number of parameters, in order."""
    table = Table()
    for column in ("stage", "precision", "bytes per parameter", "GPUs", "planned states", "states of memory"):
        table.add_column(column, justify="left" if column == "precision" else "right")
    for row in rows:
        parts = row.accounting
        words = f"{parts.param:g} + {parts.grad:g} + {parts.optimizer:g} = {parts.total:g}"
        share = "no number is enough" if row.gpus is None else _share(row.bytes, memory)
        table.add_row(str(row.stage), row.precision, words, str(row.gpus or "-"), gib(row.bytes), share)
    where = "the fewest GPUs whose memory holds the states" if gpus is None else f"{gpus} GPUs"
    return [f"{num_params:,} parameters with AdamW on {where}, {gib(memory.bytes)} each", table, STATES_ONLY]


def state_facts(num_params: int, memory: Memory, rows: Sequence[StateRow]) -> dict[str, Any]:
    """Return the same as plain values."""
    return {
        "num_params": num_params,
        "memory_bytes": memory.bytes,
        "left_out": STATES_ONLY,
        "rows": [{**asdict(row), "accounting": asdict(row.accounting)} for row in rows],
    }


def _title(subject: SizingSubject, choice: Choice) -> str:
    question, need = choice.question, choice.answers[0].need
    given = {
        "gpus": f"{question.gpus} GPUs",
        "micro": f"micro-batch {need.case.micro}",
        "depth": f"{need.num_params:,} parameters",
    }
    words = [text for name, text in given.items() if name != question.wanted]
    asked = f": {_NAMES[question.wanted]}" if question.wanted else ""
    memory = question.memory
    return f"{subject.name}, {', '.join(words)}, context {subject.context}, {gib(memory.bytes)} per GPU{asked}"


def _table(choice: Choice) -> Table:
    wanted = choice.question.wanted
    table = Table()
    unit, size = ("GiB", 2**30) if choice.question.memory.bytes >= 2**30 else ("MiB", 2**20)
    heads = ["", "stage", "dtype", "recompute", "states", "activations", "other", f"peak {unit}", "free", ""]
    if wanted:
        heads.insert(4, _NAMES[wanted])
    if wanted == "depth":
        heads.insert(5, "parameters")
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "dtype", "recompute") else "right")

    def cell(num_bytes: float) -> str:
        return f"{num_bytes / size:,.2f}"

    for row in choice.answers:
        need, case = row.need, row.need.case
        activations = "" if need.states_alone else cell(need.kinds("activation"))
        rest = "" if need.states_alone else cell(need.peak - _states_at_peak(need) - need.kinds("activation"))
        cells = [
            ">" if row is choice.best else "",
            str(case.stage),
            case.precision or "own",
            "blocks" if case.checkpointing else "no",
            cell(_states_at_peak(need)),
            activations,
            rest,
            f"{'> ' if need.states_alone else ''}{cell(need.peak)}",
            cell(choice.question.memory.bytes - need.peak),
            f"no: {need.largest_kind}" if row.verdict == "no" else row.verdict,
        ]
        if wanted:
            cells.insert(4, str(row.found or "none"))
        if wanted == "depth":
            cells.insert(5, f"{need.num_params / 1e9:.2f}B")
        table.add_row(*cells)
    return table


def _verdicts(choice: Choice) -> list[RenderableType]:
    margin = f"{choice.question.memory.margin:.0%}"
    if choice.best is None:
        tight = [row for row in choice.answers if row.verdict == "tight"]
        if tight:
            return [f"nothing leaves {margin} of the memory free; the tight rows may run"]
        least = min(choice.answers, key=lambda row: row.need.peak)
        return [f"nothing fits: the least is {gib(least.need.peak)} of {gib(choice.question.memory.bytes)}"]
    case = choice.best.need.case
    if choice.plain_is_enough:
        return [f"plain data parallel is enough: stage 0 in {case.precision} leaves {margin} of the memory free"]
    how = " with recomputation of blocks" if case.checkpointing else ""
    return [f"take stage {case.stage} in {case.precision}{how}: the cheapest row that leaves {margin} free"]


def _words(case: Case) -> str:
    return f"stage {case.stage} in {case.precision or 'its own dtype'}{', recompute' if case.checkpointing else ''}"


def _states_at_peak(need: Need) -> int:
    return need.kinds("param", "master", "grad", "optim")


def _share(num_bytes: float, memory: Memory) -> str:
    share = num_bytes / memory.bytes
    return f"{share:.0%}" if share < 10 else f"{share:.0f}x"


def _facts(row: Answer) -> dict[str, Any]:
    need = row.need
    values = asdict(need) | {"case": asdict(need.case), "by_kind": dict(need.by_kind), "verdict": row.verdict}
    values["states_alone"] = need.states_alone
    if row.found is not None:
        values["found"] = row.found
    assert all(math.isfinite(value) for value in values.values() if isinstance(value, int | float))
    return values
