"""A run without a folder, for the Python functions: the same experiments, and no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from secateur.runs.artifacts import Result
from secateur.runs.rows import Row


class MemoryRun:
    """A run in memory: computes every stage, and collects the rows and the figures."""

    folder = None

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.figures: list[dict[str, Any]] = []

    def stage(self, name: str, depends: dict[str, Any], compute: Callable[[], Result]) -> Result:
        """Compute and return the result of a stage."""
        return compute()

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows."""
        self.rows.extend(rows)

    def show(self, figures: Iterable[dict[str, Any]]) -> None:
        """Add curves, histograms and pictures."""
        self.figures.extend(figures)

    def flush(self) -> None:
        """Do nothing: there are no files."""
