"""The functions of Python: secateur.audit, invert, federate and others; here their examples and printed results."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any, ClassVar

from secateur.data.examples import read_examples
from secateur.errors import WrongInput, require
from secateur.interfaces import Batch
from secateur.runs.artifacts import write
from secateur.runs.folder import describe_environment
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

        source = Source(self.kind, self.rows, self.figures, config="", environment=self.provenance)
        write(Path(path), render([source]).encode())
        return Path(path)

    @property
    def provenance(self) -> dict[str, Any]:
        """The versions and the machine, as run.json has them."""
        return describe_environment("cpu")

    def to_pandas(self) -> Any:
        """Return the rows as a pandas.DataFrame, a column for each field."""
        require("pandas", "pandas")
        import pandas

        return pandas.DataFrame([row.to_json() for row in self.rows])

    def _repr_html_(self) -> str:
        """Return the measurements as a table, for notebooks."""
        fields = ("model", "pruner", "sparsity", "defense", "attack", "metric", "value", "low", "high", "note")
        shown = [row.to_json() for row in self.rows if row.value is not None and not row.timing]
        names = [name for name in fields if any(row[name] is not None for row in shown)]
        head = "".join(f"<th>{name}</th>" for name in names)
        lines = ("".join(f"<td>{_write_cell(row[name])}</td>" for name in names) for row in shown)
        return f"<table><thead><tr>{head}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines)}</tr></tbody></table>"

    def print(self) -> None:
        """Print the table of results."""
        from secateur.report.terminal import print_audit, print_federation, print_inversion

        printers = {"audit": print_audit, "federate": print_federation, "invert": print_inversion}
        printers["audit-app"] = print_federation
        printers[self.kind](self.rows)


def _write_cell(value: Any) -> str:
    """Return a value as text for HTML; numbers have four digits."""
    return "" if value is None else html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


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
