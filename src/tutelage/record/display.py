"""Prints the progress of a run: one line per step and, on a terminal or in a notebook, a live bar.

On a terminal, notes and steps wrap at its width. Elsewhere (a log file) every line stays whole, however long it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tutelage.config.measures import PHASE, in_order, measure
from tutelage.record.measures import (
    change_text,
    duration,
    number,
    phases,
    printable,
    value_text,
    verdict,
)
from tutelage.record.notebook import BarState, NotebookBar

_VERDICT_STYLE = {"better": "bold green", "worse": "bold red", "same": ""}
_SAMPLE_CHARACTERS = 360
_UNLIMITED = 1000


@dataclass(slots=True)
class _Phase:
    name: str
    started: float
    inner: float = 0.0
    """seconds spent in phases inside this one"""


def plain_or_terminal() -> Console:
    """The console of standard output. What is not a terminal gets lines and tables as wide as they are."""
    console = Console()
    if not console.is_terminal:
        console.width = _UNLIMITED
    return console


class Display:
    """Progress of one run. Use it as a context manager around the whole of it, evaluation included."""

    def __init__(self, steps: int, title: str, *, console: Console | None = None) -> None:
        self.console = console or plain_or_terminal()
        self._steps = steps
        self._title = title
        self._step = 0
        self._work: tuple[str, int, int] | None = None
        self._work_started = 0.0
        self._stack: list[_Phase] = []
        self._seconds: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=10)
        self._last = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | NotebookBar
        if self.console.is_jupyter:
            self._live = NotebookBar(self._state)
        else:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=8)

    def __enter__(self) -> Display:
        self._last = time.monotonic()
        if self.console.is_interactive or self.console.is_jupyter:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin_at(self, step: int) -> None:
        """Set the number of steps that are already done, for a resumed run."""
        self._step = step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of a step. Inside another phase, its time counts for the inner one only, so that the phases of a
        step never add up to more than the step."""
        phase = _Phase(name, time.monotonic())
        outer = self._stack[-1] if self._stack else None
        self._stack.append(phase)
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._stack.remove(phase)
            spent = time.monotonic() - phase.started
            if outer is not None:
                outer.inner += spent
            self._seconds[name] = self._seconds.get(name, 0.0) + max(0.0, spent - phase.inner)

    def phase_metrics(self) -> dict[str, float]:
        """{"seconds/rollout": 3.1, …} of the step that is under way, to be logged with its other metrics."""
        return {PHASE + name: seconds for name, seconds in self._seconds.items()}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step that is done, with its phase times from the metrics or, without those, as measured here."""
        now = time.monotonic()
        seconds = phases(metrics) or dict(self._seconds)
        self._recent.append(sum(seconds.values()) or now - self._last)
        self._last, self._seconds, self._work = now, {}, None
        self._step = step
        times = " · ".join(f"{name} {duration(value)}" for name, value in seconds.items())
        eta = [] if self.console.is_interactive else [self._eta()]  # a bar shows it
        self.note("  ".join([f"step {step}/{self._steps}", *_facts(metrics), *([times] if times else []), *eta]))

    def note(self, text: str) -> None:
        """Print a text, above the bar if there is one."""
        self.console.print(Text(printable(text)), soft_wrap=not self.console.is_terminal)

    def line(self, text: str) -> None:
        """Print a text that may be copied, such as a path or a command: no line break is put into it."""
        self.console.print(Text(printable(text)), soft_wrap=True)

    def progress(self, label: str, done: int, total: int) -> None:
        """Show the progress of work outside of steps, such as an evaluation; without a terminal, only its end."""
        now = time.monotonic()
        if self._work is None or self._work[0] != label:
            self._work_started = now
        self._work = (label, done, total)
        if done >= total:
            self._work, self._last = None, now
            if not self.console.is_interactive:
                self.note(f"{label}: {total} done in {duration(now - self._work_started)}")

    def _eta(self) -> str:
        left = self._steps - self._step
        if left <= 0:
            return "done"
        if not self._recent:
            return "ETA –"
        return f"ETA {duration(left * sum(self._recent) / len(self._recent))}"

    def _state(self) -> BarState:
        work, stack = self._work, list(self._stack)
        name = work[0] if work else stack[-1].name if stack else ""
        done, total = (work[1], work[2]) if work else (self._step, self._steps)
        return BarState(printable(self._title), done, total, name, "" if work else self._eta())

    def _render(self) -> RenderableType:
        state = self._state()
        width = min(40, max(10, self.console.width - 60))
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            self._spinner,
            Text(state.title, style="bold"),
            ProgressBar(total=max(state.total, 1), completed=state.done, width=width),
            Text(f"{state.done}/{state.total}"),
            Text(state.phase, style="cyan"),
            Text(state.eta, style="yellow"),
        )
        return bar


def _facts(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that the line of a step shows: objective and speed."""
    names = [name for name in ("reward", "kl", "loss") if name in metrics]
    facts = [f"{name} {number(metrics[name])}" for name in names if name != "loss" or len(names) == 1]
    if "tokens_per_second" in metrics:
        facts.append(f"{number(metrics['tokens_per_second'])} tok/s")
    if "pictures_per_second" in metrics:
        facts.append(f"{number(metrics['pictures_per_second'])} pictures/s")
    return facts


def final_table(
    console: Console,
    before: Mapping[str, float],
    after: Mapping[str, float],
    samples: Sequence[tuple[str, str, str]],
    seconds: float,
    checkpoint: Path | str,
) -> None:
    """Print the outcome of a run: measures before and after, up to three answers (prompt, before, after), the time of
    training and the checkpoint."""
    table = Table(title="Held-out prompts, before and after", title_justify="left", title_style="bold")
    table.add_column("measure", overflow="fold")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in in_order([*before, *after]):
        table.add_row(*_comparison(name, before.get(name), after.get(name)))
    console.print()
    console.print(table)
    for prompt, old, new in samples[:3]:
        console.print()
        console.print(Text.assemble(("▸ ", "cyan"), (_shortened(prompt), "bold")), soft_wrap=not console.is_terminal)
        if not console.is_terminal:
            console.print(Text(f"before: {_shortened(old)}\nafter:  {_shortened(new)}"), soft_wrap=True)
            continue
        answers = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
        answers.add_column("before", ratio=1, overflow="fold", style="dim")
        answers.add_column("after", ratio=1, overflow="fold")
        answers.add_row(Text(_shortened(old)), Text(_shortened(new)))
        console.print(answers)
    console.print()
    console.print(f"Trained in {duration(seconds)}. Checkpoint: [bold]{escape(str(checkpoint))}[/bold]", soft_wrap=True)


def _comparison(name: str, before: float | None, after: float | None) -> tuple[Text, Text, Text, Text]:
    shown = measure(name)
    label = Text.assemble(shown.label, (f"  {shown.unit}" if shown.unit else "", "dim"))
    old = Text("–" if before is None else value_text(name, before))
    new = Text("–" if after is None else value_text(name, after))
    if before is None or after is None:
        return label, old, new, Text("–")
    return label, old, new, Text(change_text(name, before, after), style=_VERDICT_STYLE[verdict(name, before, after)])


def _shortened(text: str) -> str:
    text = printable(text).strip()
    return text if len(text) <= _SAMPLE_CHARACTERS else text[: _SAMPLE_CHARACTERS - 1].rstrip() + "…"
