"""All cases of a question, with what each needs, and the one to take.

A question gives the number of GPUs, the micro-batch and the depth, or leaves one of the three to be found: the fewest
GPUs, the largest micro-batch or the deepest model that fits, case by case.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.sizing.case import Case, Memory, Need, Verdict
from shardwise.sizing.search import largest
from shardwise.sizing.subject import SizingSubject

__all__ = ["Answer", "Choice", "Question", "ask"]

MOST: Mapping[str, int] = MappingProxyType({"gpus": 1024, "micro": 65536, "depth": 4096})

Wanted = Literal["gpus", "micro", "depth"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        memory: of one device.
        gpus: number of devices; None: find the fewest.
        micro: samples per forward on one rank; "own" that of the settings; None: find the most.
        depth: number of blocks; "own" that of the model; None: find the most.
        stages: which to look at.
        precisions: which to look at, the first one preferred.
        checkpointing: which to look at.

    Raises:
        ConfigError: more than one number is to be found.
    """

    memory: Memory
    gpus: int | None
    micro: int | Literal["own"] | None = 1
    depth: int | Literal["own"] | None = "own"
    stages: tuple[int, ...] = (0, 1, 2, 3)
    precisions: tuple[str | None, ...] = ("bf16", "fp32")
    checkpointing: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        if [self.gpus, self.micro, self.depth].count(None) > 1:
            raise ConfigError("one of the number of GPUs, the micro-batch and the depth can be found, not several")

    @property
    def wanted(self) -> Wanted | None:
        """The number that is to be found."""
        missing: list[Wanted] = [name for name in MOST if getattr(self, name) is None]  # type: ignore[misc]
        return missing[0] if missing else None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row.

    Attributes:
        need: of the case; where a number is found, of the case with this number, or of the least if none fits.
        verdict: of ``need``.
        found: the number that was asked for; 0 if none fits; None: nothing was asked for.
    """

    need: Need
    verdict: Verdict
    found: int | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All rows, and which to take.

    Attributes:
        answers: in the order in which they are to be preferred.
        best: the first that fits; None: none does.
        refused: the cases that a run would refuse, as one without recomputation for its model, and why.
    """

    question: Question
    answers: tuple[Answer, ...]
    best: Answer | None
    refused: tuple[tuple[Case, str], ...] = ()

    @property
    def plain_is_enough(self) -> bool:
        """Whether nothing needs to be sharded."""
        return self.best is not None and self.best.need.case.stage == 0 and not self.best.need.case.checkpointing


def ask(subject: SizingSubject, question: Question, tell: Callable[[Case], None] = lambda case: None) -> Choice:
    """Answer a question by dry runs.

    Preferred is what costs least time: no recomputation before recomputation, then the lower stage, since stages 0 to
    2 send the same and stage 3 half as much again, then the precision named first.

    Args:
        subject: the model and its settings.
        question: what is asked.
        tell: is told each case before its dry run.

    Raises:
        ConfigError: no case can be planned: the settings contradict each other, or the model cannot be run without
            data.
    """
    if question.wanted in ("gpus", "micro") and subject.fixes_batch:
        raise ConfigError(
            f"{subject.name}: leave out the samples per update (batch.size, train_batch_size) to find a number that "
            "they would follow from; name samples per forward and accumulation instead"
        )
    if question.wanted == "depth" and subject.depth is None:
        raise ConfigError(f"{subject.name}: the depth of a Hugging Face model cannot be chosen: name a built-in model")
    kinds = itertools.product(question.checkpointing, question.stages, question.precisions)
    rows: list[Answer] = []
    refused: list[tuple[Case, str]] = []
    for checkpointing, stage, precision in kinds:
        case = Case(
            stage=stage,
            precision=precision,
            checkpointing=checkpointing,
            gpus=question.gpus or 1,
            micro=None if question.micro == "own" else question.micro or 1,
            depth=None if question.depth == "own" else question.depth or 1,
        )
        try:
            rows.append(_answer(subject, question, case, tell))
        except ConfigError as error:
            refused.append((case, str(error)))
    if not rows:
        raise ConfigError(refused[0][1])
    fitting = [row for row in rows if row.verdict == "fits"]
    return Choice(question=question, answers=tuple(rows), best=_best(fitting, question), refused=tuple(refused))


def _best(fitting: Sequence[Answer], question: Question) -> Answer | None:
    if not fitting:
        return None
    if question.wanted == "gpus":
        return min(fitting, key=lambda row: row.found or 0)
    return fitting[0] if question.wanted is None else max(fitting, key=lambda row: row.found or 0)


def _answer(subject: SizingSubject, question: Question, case: Case, tell: Callable[[Case], None]) -> Answer:
    wanted, memory = question.wanted, question.memory
    needs: dict[int, Need] = {}

    def need_of(number: int) -> Need:
        if number not in needs:
            chosen = case if wanted is None else _with(case, wanted, number)
            tell(chosen)
            needs[number] = subject.need(chosen, memory)
        return needs[number]

    def fits(number: int) -> bool:
        return memory.verdict(need_of(number).peak) == "fits"

    if wanted is None:
        need = need_of(1)
        return Answer(need=need, verdict=memory.verdict(need.peak))
    if wanted == "gpus":
        found = _fewest(fits, stage=case.stage)
        need = need_of(found or MOST["gpus"])
    else:
        found = _most(fits, need_of, memory, MOST[wanted])
        need = need_of(found or 1)
    return Answer(need=need, verdict=memory.verdict(need.peak), found=found)


def _with(case: Case, wanted: Wanted, number: int) -> Case:
    changes: dict[str, Any] = {wanted: number}
    return replace(case, **changes)


def _most(fits: Callable[[int], bool], need_of: Callable[[int], Need], memory: Memory, limit: int) -> int:
    """Return the largest number that fits; bytes grow by about the same for each more."""
    if not fits(1):
        return 0
    if not fits(2):
        return 1
    slope = max(1, need_of(2).peak - need_of(1).peak)
    room = memory.bytes * (1 - memory.margin) - need_of(1).peak
    return largest(fits, guess=1 + int(room / slope), limit=limit)


def _fewest(fits: Callable[[int], bool], *, stage: int) -> int:
    """Return the fewest devices that fit, 0 if no number does.

    Bytes fall with the number of devices until padding and records of the ranks outweigh that: it is doubled, not
    taken from the far end.
    """
    number = 1
    while not fits(number):
        if stage == 0 or number >= MOST["gpus"]:
            return 0
        number *= 2
    low = number // 2
    return low + largest(lambda more: not fits(low + more), limit=number - low) + 1 if number > 2 else number
