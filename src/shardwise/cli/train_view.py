"""What ``shardwise train`` shows of a run: lines, and on a terminal a panel that moves. It knows messages only."""

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from shardwise.train.report import Evaluated, Finished, Message, Resumed, Sampled, Started, StepDone

__all__ = ["TrainView", "kinds_and_bytes", "text_facts"]

MIB = 1 << 20


class TrainView:
    """Shows messages as they come; a context manager.

    Args:
        console: where; a panel is shown only if it is a terminal.
        line_every: updates between lines.
        quiet: show the end only.
    """

    def __init__(self, console: Console, *, line_every: int, quiet: bool) -> None:
        self._console = console
        self._line_every = line_every
        self._quiet = quiet
        self._num_steps = 0
        self._tokens, self._seconds = 0, 0.0  # since the last line
        self._held_out = ""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._live: Live | None = None

    def __enter__(self) -> "TrainView":
        """Begin."""
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        self._end_panel()

    def _end_panel(self) -> None:
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()
            self._live = None

    def show(self, message: Message) -> None:
        """Show one message."""
        if isinstance(message, Started):
            self._start(message)
        elif isinstance(message, Resumed):
            ranks = f"{message.num_ranks} rank{'s' if message.num_ranks > 1 else ''}"
            self._print(f"resumed after {message.step} updates from {message.path}, saved by {ranks}", always=True)
            if message.changed:
                self._print(f"changed since the checkpoint: {', '.join(message.changed)}", always=True)
            if self._live is not None:
                self._bars.update(self._bars.task_ids[0], completed=message.step)
        elif isinstance(message, StepDone):
            self._step(message)
        elif isinstance(message, Evaluated):
            self._held_out = f"{message.held_out_loss:.4f}"
            self._print(f"step {message.step:6d}  held-out loss {message.held_out_loss:.4f}")
        elif isinstance(message, Sampled):
            if message.step < self._num_steps:
                self._print(f"sample after {message.step} updates:\n{_indented(message.text)}")
        else:
            self._finish(message)

    def _start(self, started: Started) -> None:
        self._num_steps = started.num_steps
        self._bars.add_task("updates", total=started.num_steps)
        unlike = "windows" if started.packed else "documents"
        self._print(
            f"model: {started.model}, {started.num_params:,} parameters; stage {started.zero_stage} on "
            f"{started.num_ranks} rank{'s' if started.num_ranks > 1 else ''}"
        )
        self._print(text_facts(started))
        self._print(
            f"batch: {started.batch_size} {unlike} of at most {started.context} tokens; {started.num_steps} updates"
        )
        self._print(f"planned bytes per rank: {kinds_and_bytes(started.planned_bytes)}")

    def _step(self, done: StepDone) -> None:
        self._tokens += done.tokens
        self._seconds += done.seconds
        line = self._line(done)
        shows_line = done.step % self._line_every == 0 or done.step in (1, self._num_steps)
        if self._live is not None:
            self._bars.update(self._bars.task_ids[0], completed=done.step)
            self._live.update(self._panel(done), refresh=shows_line)
        if shows_line:
            self._print(line)
            self._tokens, self._seconds = 0, 0.0

    def _line(self, done: StepDone) -> str:
        return f"step {done.step:6d}/{self._num_steps}  " + "  ".join(self._figures(done))

    def _figures(self, done: StepDone) -> list[str]:
        measured, planned = sum(done.measured_bytes.values()), sum(done.planned_bytes.values())
        return [
            f"loss {done.loss:.4f}",
            f"lr {done.lr:.3g}",
            f"grad norm {done.grad_norm:.3g}",
            f"{self._tokens / self._seconds:,.0f} tokens/s",
            f"memory {measured / MIB:.1f} MiB (planned {planned / MIB:.1f})",
            f"rss {done.peak_rss_bytes / MIB:,.0f} MiB",
            f"skipped {done.skipped}",
        ]

    def _panel(self, done: StepDone) -> RenderableType:
        figures = self._figures(done)
        rows = ["  ".join(figures[:4]), "  ".join(figures[4:]), f"bytes: {kinds_and_bytes(done.measured_bytes)}"]
        if self._held_out:
            rows.insert(1, f"held-out loss {self._held_out}")
        return Panel(Group(self._bars, *map(Text, rows)), title="shardwise train", title_align="left")

    def _finish(self, finished: Finished) -> None:
        self._end_panel()
        if finished.sample:
            self._print(f"sample:\n{_indented(finished.sample)}")
        if finished.memory is not None:
            self._print(str(finished.memory))
        rate = finished.tokens / finished.seconds if finished.seconds else 0.0
        self._print(
            f"{finished.steps} updates, {finished.tokens:,} tokens in {finished.seconds:.0f} s "
            f"({rate:,.0f} tokens/s, evaluation included), {finished.skipped} skipped"
        )
        if finished.held_out_loss is None:
            verdict = f"loss {finished.first_loss:.4f} -> {finished.last_loss:.4f}"
        else:
            verdict = f"held-out loss {finished.first_held_out_loss:.4f} -> {finished.held_out_loss:.4f}"
        self._print(verdict, always=True)
        self._print(f"parameters sha256 {finished.digest}", always=True)
        self._print(f"weights {finished.weights}", always=True)

    def _print(self, text: str, *, always: bool = False) -> None:
        if always or not self._quiet:
            self._console.print(text, markup=False)


def text_facts(facts: Started) -> str:
    """Return one line about the text of a run."""
    left_out = f", {len(facts.not_text)} files left out that are not text" if facts.not_text else ""
    return (
        f"text: {facts.num_files:,} files, {facts.num_bytes:,} bytes, {facts.num_tokens:,} tokens, "
        f"sha256 {facts.text_sha256[:12]}{left_out}"
    )


def kinds_and_bytes(by_kind: dict[str, int]) -> str:
    """Return ``param 1,024, master 0, ...``."""
    return ", ".join(f"{kind} {count:,}" for kind, count in by_kind.items())


def _indented(text: str) -> str:
    safe = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return "\n".join(f"  | {line}" for line in safe.split("\n"))
