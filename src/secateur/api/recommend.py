"""`secateur.recommend(...)`: the search for a recipe from Python, with a function that builds the chosen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from secateur.api import Printable
from secateur.config import read, schema_of
from secateur.evaluation.limits import Check, Outcome, outcome
from secateur.evaluation.selection import Assessment
from secateur.experiments.recommend import run_recommend
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row


@dataclass(frozen=True, eq=False)
class Recommended(Printable):
    """The recommended recipe, the front that it was chosen from, and a function that builds its model."""

    kind = "recommend"
    rows: list[Row]
    figures: list[dict[str, Any]]
    recipe: str
    settings: Mapping[str, str | float]  # such as pruner, sparsity, defense, epochs and learning rate
    chosen: Mapping[str, Estimate]  # measures on the rows that chose it
    confirmed: Mapping[str, Estimate]  # measures on rows that chose nothing, by fresh attackers and all attacks
    front: Sequence[Assessment]
    checks: Sequence[Check]
    sentences: Sequence[str]
    command: str
    build: Callable[[], nn.Module]

    @property
    def outcome(self) -> Outcome:
        """The answer to all limits on the recommended model: within, above or inconclusive."""
        return outcome(self.checks)

    def print(self) -> None:
        """Print the recipes that shadow models attacked, and the answer."""
        from secateur.report.recommend import print_recommendation

        print_recommendation(self.rows, self.sentences)


def recommend(
    out: Path | str,
    *,
    updates: bool = False,
    federation: bool = False,
    export: Path | str | None = None,
    address: str | None = None,
    **fields: Any,
) -> Recommended:
    """Search recipes, and audit the one that leaks least within limits on rows that chose nothing.

    Args:
        out: the folder of the run; calling again with the same fields resumes it.
        updates: True to search a defense of updates instead of a compression of a model.
        federation: True to search pruning, withholding and model sizes of a federation.
        export: a folder that the model is written to.
        address: a Ray cluster, host:port, whose workers measure the recipes.
        fields: the fields of a run file of `secateur recommend`, such as model="digits-cnn", data="digits",
            max_accuracy_drop=.01, max_bytes=.25, budget="2h".
    """
    settings = read(schema_of(updates, federation), None, fields)
    result = run_recommend(settings, Path(out), None if export is None else Path(export), address)
    return Recommended(
        result.rows,
        result.figures,
        result.recipe.title,
        result.recipe.settings,
        result.chosen.measures,
        result.confirmed.measures,
        result.front,
        result.checks,
        result.sentences,
        result.command,
        result.confirmed.build,
    )
