"""How far long work is: bars with the time left on a terminal, one line per stage elsewhere; always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_shown: list[Progress] = []  # the display of the outermost; a terminal has room for one, and inner bars join it


class Advance(Protocol):
    """Moves a bar on."""

    def __call__(self, steps: int, said: str | None = None) -> None:
        """So many steps more; `said` stands before the bar from now on."""
        ...


@contextmanager
def progress(description: str, total: int | None = None, rate: bool = False) -> Iterator[Advance]:
    """Show work of `total` steps (None: unknown); yields a function that advances by a number of steps.

    `rate` shows the steps a second too.

    Example:
        >>> with progress("shadows", 5) as advance:
        ...     for _ in range(5):
        ...         advance(1)
    """
    if not _shown and not sys.stderr.isatty():  # while bars are shown, stderr is rich's and denies being a terminal
        print(description if total is None else f"{description} ({total})", file=sys.stderr, flush=True)
        yield lambda steps, said=None: None
        return
    with _display() as bars:
        task = bars.add_task(description, total=total, rate=rate)
        try:
            yield lambda steps, said=None: bars.update(task, advance=steps, description=said)
        finally:
            bars.remove_task(task)


def _rate() -> ProgressColumn:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Rate(ProgressColumn):
        """Steps a second, of the work that asks for it."""

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
    text = TextColumn("{task.description}", table_column=Column(overflow="fold"))  # the only one that a line may cut
    bar, left = BarColumn(bar_width=max(4, console.width // 8)), TimeRemainingColumn()
    with Progress(text, bar, MofNCompleteColumn(), _rate(), left, console=console) as bars:
        _shown.append(bars)
        try:
            yield bars
        finally:
            _shown.clear()
