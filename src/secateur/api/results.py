"""Results of the Python functions, with a page and a table, and the examples that these functions take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from secateur.data.examples import read_examples
from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.runs.artifacts import write
from secateur.runs.rows import Row

Examples = Any  # in one of the forms of `secateur.data.examples`


class Printable:
    """Rows and figures that can be written as a page and printed as a table."""

    kind: ClassVar[str]  # the command that gives the same rows
    rows: list[Row]
    figures: list[dict[str, Any]]

    def write(self, path: Path | str) -> Path:
        """Write the report page, with the figures, to `path`."""
        from secateur.report.page import Source, render

        write(Path(path), render([Source(self.kind, self.rows, self.figures, config="", environment={})]).encode())
        return Path(path)

    def print(self) -> None:
        """Print the table of results."""
        from secateur.report.terminal import print_audit, print_federation, print_inversion

        printers = {"audit": print_audit, "federate": print_federation, "invert": print_inversion}
        printers[self.kind](self.rows)


def read_batch(field: str, examples: Examples, label: str = "label") -> Batch:
    """Return a user's examples, in any form, as a batch; refuse labels that do not fit the inputs."""
    return check_batch(field, read_examples(field, examples, label))


def check_batch(field: str, batch: Batch) -> Batch:
    """Return a batch with labels of 64 bits; refuse labels that do not fit the inputs, and examples of no length."""
    inputs, labels = batch
    if not len(inputs) or labels.shape != inputs.shape[:1]:
        sizes = f"{len(inputs)} inputs and labels of the shape {tuple(labels.shape)}"
        raise WrongInput(field, f"{sizes} do not fit; use at least one input, and one label for each input")
    if not inputs[0].numel():
        raise WrongInput(field, f"inputs have the shape {tuple(inputs.shape[1:])}, which is empty; use examples")
    if labels.is_floating_point():
        raise WrongInput(field, f"labels are {labels.dtype}; use whole numbers, the classes from 0")
    return Batch(inputs, labels.long())
