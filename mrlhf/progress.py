"""What rank 0 shows while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "rich", "plain", "off"]

# Shown where present, in this order; the first name of each tuple that the metrics hold is taken.
_SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("score", ("score_mean", "score", "reward"), ".3f"),
    ("loss", ("loss",), ".4f"),
    ("accuracy", ("accuracy",), ".3f"),
    ("KL", ("kl_k1", "kl"), ".4f"),
    ("tokens/s", ("tokens_per_second",), ",.0f"),
)


class Display(Protocol):
    """Shows phases and iterations; usable as a context manager."""

    def phase(self, name: str) -> None:
        """Say what is being done now."""

    def iteration(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say that iteration ``step`` (from 1) is complete."""

    def message(self, text: str) -> None:
        """Print lines without disturbing the display."""

    def samples(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Show evaluated prompts, see `print_samples`."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OffDisplay:
    """Shows nothing: other ranks, and ``progress: off``."""

    def phase(self, name: str) -> None:
        """Ignore."""

    def iteration(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ignore."""

    def message(self, text: str) -> None:
        """Ignore."""

    def samples(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Ignore."""

    def __enter__(self) -> OffDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class PlainDisplay(OffDisplay):
    """One line per iteration, for logs. ``first_step`` is the number of iterations done before this process."""

    def __init__(self, iterations: int, console: Console, first_step: int = 0):
        self._iterations, self._console, self._first = iterations, console, first_step
        self._start = time.monotonic()

    def iteration(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line."""
        width = len(str(self._iterations))
        parts = [f"iteration {step:{width}d}/{self._iterations}", *_shown(metrics), f"ETA {self._eta(step)}"]
        self.message("  ".join(parts))

    def message(self, text: str) -> None:
        """Print as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def samples(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Print the table."""
        print_samples(rows, self._console)

    def _eta(self, step: int) -> str:
        done = max(step - self._first, 1)
        seconds = (time.monotonic() - self._start) / done * (self._iterations - step)
        return str(timedelta(seconds=round(seconds)))


class RichDisplay(PlainDisplay):
    """A bar with phase, score, KL, tokens/s and the time left."""

    def __init__(self, iterations: int, console: Console, first_step: int = 0):
        super().__init__(iterations, console, first_step)
        self._progress = Progress(
            TextColumn("[bold]{task.fields[phase]:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=console,
        )
        self._task = self._progress.add_task(
            "ppo", total=iterations, completed=first_step, phase="start", numbers="", eta="-"
        )

    def phase(self, name: str) -> None:
        """Show the phase."""
        self._progress.update(self._task, phase=name)

    def iteration(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar and show the numbers."""
        self._progress.update(self._task, completed=step, numbers="  ".join(_shown(metrics)), eta=self._eta(step))

    def __enter__(self) -> RichDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def open_display(
    mode: Mode, iterations: int, *, rank: int = 0, first_step: int = 0, console: Console | None = None
) -> Display:
    """The display of this rank: nothing off rank 0; ``auto`` is rich in a terminal and plain elsewhere.

    It writes to standard error unless a ``console`` is given.
    """
    if rank != 0 or mode == "off":
        return OffDisplay()
    console = console or log_console()
    if mode == "rich" or (mode == "auto" and console.is_terminal):
        return RichDisplay(iterations, console, first_step)
    return PlainDisplay(iterations, console, first_step)


def _shown(metrics: Mapping[str, float]) -> list[str]:
    found = []
    for label, names, spec in _SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            found.append(f"{label} {value:{spec}}")
    return found


def print_samples(rows: Sequence[Mapping[str, object]], console: Console | None = None) -> None:
    """A table of evaluated prompts on standard error: the reference's response beside the actor's, with scores."""
    if not rows:
        return
    table = Table("prompt", "before (reference)", "score", "after (actor)", "score", show_lines=True)
    for row in rows:
        before, after = (f"{row[key]:+.3f}" for key in ("reference_score", "score"))
        cells = [row["prompt"], row["reference_response"], before, row["response"], after]
        table.add_row(*(Text(str(cell)) for cell in cells))
    (console or log_console()).print(table)


def log_console() -> Console:
    """Standard error; a log has no width of its own, and rich would take 80 columns."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 140
    return console
