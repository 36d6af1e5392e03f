"""Figs. 2, 4 and 5 of priprune at their tiny scale, from the command line to table and page."""

import json
from collections import Counter

import pytest

from secateur.cli import main
from secateur.evaluation.theory_curves import THEORY, updates
from secateur.runs.folder import load_rows
from secateur.studies.priprune.results import CIFAR10, FEMNIST
from secateur.studies.study import read_scales

pytestmark = pytest.mark.system
TINY_GRID = read_scales("priprune")["tiny"].leaking
BASES = len(TINY_GRID["bases"])
RATES, BATCHES, NETWORKS = (
    [len(varied[data]) for data in (FEMNIST, CIFAR10)]
    for varied in (TINY_GRID["rates"], TINY_GRID["batches"], TINY_GRID["networks"])
)
LINES = {
    "priprune-fig2": {"pruning rate p": BASES * RATES[0]},
    "priprune-fig4": {"pruning rate p": BASES * sum(RATES), "batch size B": BASES * sum(BATCHES)},
    # rounds 1 and 2 of every network, and 4 of the two that are run for longer
    "priprune-fig5": {"model size d": BASES * sum(NETWORKS), "round T": BASES * (2 * sum(NETWORKS) + 2)},
}
CLAIMS = {"priprune-fig2": 9, "priprune-fig4": 18, "priprune-fig5": 16}


@pytest.mark.parametrize("name", LINES)
def test_a_tiny_study_of_theory(name, tmp_path, capsys):
    assert main(["reproduce", name, "--scale", "tiny", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    measured = [row for row in rows if row["metric"] == "NMI (256 levels)"]
    axes = [axis for axes in LINES.values() for axis in axes]
    assert Counter(next(axis for axis in axes if axis in row) for row in measured) == LINES[name]
    assert sum(row["metric"] == "claim" for row in rows) == CLAIMS[name]
    known = updates(load_rows(tmp_path))
    assert known and all(
        {"nmi_256_chance", "ami_100", "printed_total", "corrected_total"} <= set(x) for x in known.values()
    )
    ranks = [row.value for row in load_rows(tmp_path) if row.metric == "rank" and row.extra["study"] == THEORY]
    assert max(ranks) == TINY_GRID["examples"] - 1
    assert "This scale shows that the study runs, not what is true" in (tmp_path / "table.md").read_text()
    assert "Theory beside measurement" in (tmp_path / "report.html").read_text()
