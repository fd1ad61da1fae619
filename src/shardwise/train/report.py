"""What a run tells while it goes on: plain values, for a terminal, a file, or another process."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.accounting.report import MemoryReport

__all__ = ["Evaluated", "Finished", "Message", "Resumed", "Sampled", "Started", "StepDone", "as_json"]


@dataclass(frozen=True, kw_only=True)
class Started:
    """Everything is there, nothing is trained yet.

    Attributes:
        model: name, as the user wrote it.
        num_params: of the whole model.
        num_ranks: data-parallel ranks.
        zero_stage: ZeRO stage.
        batch_size: sequences per update, over all ranks.
        context: longest sequence, in tokens.
        num_files: files of text.
        num_bytes: bytes of text.
        num_tokens: tokens of text.
        text_sha256: of the text.
        not_text: files that were left out.
        packed: whether all sequences are equally long.
        planned_bytes: of model states on rank 0 at rest, by kind.
        num_steps: updates to come.
    """

    model: str
    num_params: int
    num_ranks: int
    zero_stage: int
    batch_size: int
    context: int
    num_files: int
    num_bytes: int
    num_tokens: int
    text_sha256: str
    not_text: tuple[str, ...]
    packed: bool
    planned_bytes: dict[str, int]
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A checkpoint was loaded.

    Attributes:
        path: of the checkpoint.
        step: updates that were made before it.
        num_ranks: that saved it.
        changed: settings of the optimizer that were others in the checkpoint, as "name old -> new".
    """

    path: str
    step: int
    num_ranks: int
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One update.

    Attributes:
        step: its number, from 1 on.
        loss: mean over the tokens (over the micro-batches, where losses are averaged) of all ranks, in nats.
        lr: learning rate of the update.
        grad_norm: of the mean gradient, before clipping.
        tokens: targets in the update, over all ranks.
        seconds: of the update on rank 0, evaluation left out.
        skipped: updates so far that were left out because gradients were not finite.
        planned_bytes: of model states on rank 0 at rest, by kind.
        measured_bytes: held by rank 0, by kind, while gradients are there.
        peak_rss_bytes: largest resident set of rank 0's process so far.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: int
    planned_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    peak_rss_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Targets per second, over all ranks."""
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The mean loss over held-out tokens after ``step`` updates, in nats."""

    step: int
    held_out_loss: float


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Text that the model wrote after ``step`` updates, its prompt included."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a run ended.

    Attributes:
        steps: updates.
        seconds: of training and evaluation on rank 0.
        tokens: targets, over all ranks.
        skipped: updates that were left out.
        first_loss: of the first update.
        last_loss: of the last update.
        first_held_out_loss: before the first update; None if nothing is held out.
        held_out_loss: after the last one.
        digest: sha256 of all parameters in fp32.
        weights: path of the file with the weights.
        sample: text that the model wrote; "" if none was asked for.
        memory: planned beside measured on this rank, as the last update ended; None if there was none to make.
    """

    steps: int
    seconds: float
    tokens: int
    skipped: int
    first_loss: float
    last_loss: float
    first_held_out_loss: float | None
    held_out_loss: float | None
    digest: str
    weights: str
    sample: str
    memory: MemoryReport | None = None


Message = Started | Resumed | StepDone | Evaluated | Sampled | Finished


def as_json(message: Message) -> dict[str, Any]:
    """Return a message's fields for JSON, which has no infinite numbers and no NaN: they become null."""
    values = asdict(message)
    if isinstance(message, StepDone):
        values["tokens_per_second"] = message.tokens_per_second
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
