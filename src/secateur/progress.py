"""Progress of long work on stderr: bars with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from secateur.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

PAUSE = 30.0  # seconds between two lines of one stage where there is no terminal

_shown: list[Progress] = []  # the outermost display; a terminal shows one, and inner bars join it


class Advance(Protocol):
    """Function that advances a bar."""

    def __call__(self, steps: int, said: str | None = None) -> None:
        """Advance by `steps`; `said` replaces the description before the bar."""
        ...


@contextmanager
def progress(description: str, total: int | None = None, rate: bool = False, unit: str = "steps") -> Iterator[Advance]:
    """Show work of `total` steps (None: unknown); yield a function that advances by a number of steps.

    `rate` also shows the steps per second. `unit` names the steps in lines.

    Example:
        >>> with progress("shadows", 5) as advance:
        ...     for _ in range(5):
        ...         advance(1)
    """
    description = printable(description)
    if not _shown and not sys.stderr.isatty():  # rich replaces stderr while bars are shown, and isatty() is then False
        print(description if total is None else f"{description}: {_count(total, unit)}", file=sys.stderr, flush=True)
        yield _write_lines(description, total, unit)
        return
    with _display() as bars:
        task = bars.add_task(description, total=total, rate=rate)
        try:
            yield lambda steps, said=None: bars.update(task, advance=steps, description=said)
        finally:
            bars.remove_task(task)


def _write_lines(description: str, total: int | None, unit: str) -> Advance:
    """Return a function that writes a line every PAUSE seconds: the steps done, and the time left."""
    begun = last = time.monotonic()
    done = 0

    def advance(steps: int, said: str | None = None) -> None:
        nonlocal done, last
        done, now = done + steps, time.monotonic()
        if now - last < PAUSE or not done:
            return
        last = now
        more = 0 if total is None else total - done  # diverged trials begin again, beyond the total
        left = f", about {_describe_time((now - begun) / done * more)} left" if more > 0 else ""
        counted = _count(done, unit) if total is None else f"{done} of {_count(total, unit)}"
        print(f"{said or description}: {counted}{left}", file=sys.stderr, flush=True)

    return advance


def _count(number: int, unit: str) -> str:
    """Return a number with its unit.

    Example:
        >>> _count(1, "rounds"), _count(2, "rounds")
        ('1 round', '2 rounds')
    """
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"


def _describe_time(seconds: float) -> str:
    """Return a time in words.

    Example:
        >>> _describe_time(40), _describe_time(400), _describe_time(40_000)
        ('40 s', '7 min', '11 h')
    """
    size, name = next(((size, name) for size, name in ((3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s"))
    return f"{seconds / size:.0f} {name}"


def _rate() -> ProgressColumn:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Rate(ProgressColumn):
        """Column of the steps per second, for tasks with `rate`."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.1f}/s" if task.fields["rate"] and speed else "")

    return Rate()


@contextmanager
def _display() -> Iterator[Progress]:
    if _shown:
        yield _shown[0]
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(overflow="fold")
    )  # the only column that may wrap
    bar, left = BarColumn(bar_width=max(4, console.width // 8)), TimeRemainingColumn()
    with Progress(text, bar, MofNCompleteColumn(), _rate(), left, console=console) as bars:
        _shown.append(bars)
        try:
            yield bars
        finally:
            _shown.clear()
