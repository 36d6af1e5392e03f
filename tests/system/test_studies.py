"""Every study at its tiny scale: its table has its lines, and its verdicts follow from its numbers."""

import json
from collections import Counter

import pytest

from secateur import catalogue
from secateur.cli import main
from secateur.report.heatmap import BY_KEY, build_heatmaps
from secateur.runs.folder import load_figures, load_rows
from secateur.studies.dgp.extensions import HELD, LISTENED
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.tables import LEFT_OUT, RECOVERED, TRAINED, left_out_lines
from secateur.studies.results import AuditResults
from secateur.studies.study import Study, read_scales
from secateur.studies.table import NOT_SUPPORTED, SUPPORTED, UNDECIDED

pytestmark = pytest.mark.system
TINY = read_scales("samia")["tiny"]
NAMES = [name for name in catalogue.methods("study") if name.startswith("samia-")]
OF_UPDATES = [name for name in catalogue.methods("study") if name.startswith("dgp-")]
MATRIX = (1 + len(TINY.sparsity)) * len(TINY.pruners)  # lines of targets, the original included for every pruner
PRUNED = len(TINY.pruners) * len(TINY.sparsity)
LINES = {
    "samia-fig1": 2 * 2,  # original and pruned; confidence and sensitivity
    "samia-fig4": 2 * 10,  # quantities and classes
    "samia-fig6": 1 + PRUNED,
    "samia-fig7": 1 + PRUNED,
    "samia-fig8": 1 + PRUNED,
    "samia-fig9": 1 + PRUNED,
    "samia-fig10": (1 + PRUNED) * 6,  # attacks
    "samia-fig11": (1 + len(TINY.sparsity)) * 6,
    "samia-fig12": MATRIX,
    "samia-fig13": 1 + len(TINY.sparsity),
    "samia-fig14": 3 * 2,
    "samia-fig15": 2 * 10,
    "samia-fig16": 1 + len(TINY.pruners) * 4,  # defenses
    "samia-fig17": 1 + 4,
    "samia-fig18": 1 + len(TINY.pruners) * 4,
    "samia-fig19": 1 + 4,
    "samia-table1": TINY.experiments + 1,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_study(name, tmp_path, capsys):
    assert main(["reproduce", name, "--scale", "tiny", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    study: Study = catalogue.find("study", name).make()
    lines, findings = study.tabulate(AuditResults(load_rows(tmp_path), load_figures(tmp_path)))
    assert len(lines) == LINES[name]
    assert findings
    claims = [row for row in rows if row["metric"] == "claim"]
    assert [(row["claim"], row["verdict"]) for row in claims] == [(each.claim, each.verdict) for each in findings]
    for row in claims:
        check(row["measured"], row["verdict"])
    measured = [row for row in rows if row["metric"] != "claim"]
    assert measured and all(row["value"] is not None for row in measured)
    assert all(row["low"] <= row["value"] <= row["high"] for row in measured if row["low"] is not None)
    text = (tmp_path / "table.md").read_text()
    assert all(finding.claim in text for finding in findings)


@pytest.fixture(scope="module")
def hall(tmp_path_factory):
    """One folder for all studies of sub-models: they share the federations that they have in common."""
    return tmp_path_factory.mktemp("hall")


@pytest.mark.parametrize("name", [name for name in catalogue.methods("study") if name.startswith("mapp-")])
def test_a_tiny_study_of_submodels(name, hall, capsys):
    short = ["--set", "rounds=1", "--set", "examples=500"]
    assert main(["reproduce", name, "--scale", "tiny", "--out", str(hall), *short, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    claims, measured = ([row for row in rows if (row["metric"] == "claim") == yes] for yes in (True, False))
    assert claims and measured
    for row in claims:
        check(row["measured"], row["verdict"])
    values = [row for row in measured if row["value"] is not None]
    assert values and all(row["low"] <= row["value"] <= row["high"] for row in values if row["low"] is not None)
    text = (hall / "table.md").read_text()
    assert name in text and all(row["claim"] in text for row in claims)


COLUMNS = 9  # the eight defenses of dgp Table 1, and ATS twice: against the used and the raw pictures
# lines of clients in mid-training, whose residual is not empty: attacks by defenses
AFTER = {"dgp-table1": 2 * 3, "dgp-table2": 1 + 3, "dgp-fig2": 3, "dgp-adgp": 4}
PARTS = {  # lines of a study of dgp by the part of the table that they stand in
    "dgp-table1": {
        RECOVERED: (COLUMNS - 1) + 3 * COLUMNS + 3 + AFTER["dgp-table1"],
        TRAINED: 8,
        LEFT_OUT: 1,
    },  # no R-GAP under PRECODE
    "dgp-table2": {RECOVERED: 3 + 3 + AFTER["dgp-table2"], TRAINED: 5},
    "dgp-table3": {"": 3 * 10},  # networks and defenses
    "dgp-table4": {"": 3 * 10},
    "dgp-table5": {RECOVERED: 2 * 3 * 2},  # attacks, networks, defenses
    "dgp-table6": {RECOVERED: 2 * 3 * 2},
    "dgp-table7": {TRAINED: 3 * 2},
    "dgp-fig1": {"": 9},
    "dgp-fig2": {RECOVERED: 3 + AFTER["dgp-fig2"], TRAINED: 3},
    "dgp-fig3": {RECOVERED: (COLUMNS - 1) + 3 * COLUMNS, LEFT_OUT: 1},
    "dgp-fig4": {TRAINED: 3 * 4},
    "dgp-fig5": {RECOVERED: COLUMNS},
    "dgp-fig6": {RECOVERED: 4},
    "dgp-fig7": {RECOVERED: 4},
    "dgp-fig8": {RECOVERED: 2 * COLUMNS},
    "dgp-fig9": {RECOVERED: 3 * COLUMNS},
    "dgp-adgp": {RECOVERED: 4 * 4 + AFTER["dgp-adgp"], LISTENED: 1, TRAINED: 3 + 1},  # one user lies
    "dgp-convergence": {"": 4 + 3},  # Theorem 2, and Lemma 1 where something is held back
    "dgp-residual": {RECOVERED: 2 + 1 + 3 * 2, TRAINED: 3, HELD: 3},
    "dgp-membership": {"": 10 * 4},  # defenses and attacks
}


@pytest.mark.parametrize("name", OF_UPDATES)
def test_a_tiny_study_of_updates(name, tmp_path, capsys):
    assert main(["reproduce", name, "--scale", "tiny", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    study: Study = catalogue.find("study", name).make()
    found = DgpResults(load_rows(tmp_path))
    lines, findings = study.tabulate(found)
    lines = [*lines, *left_out_lines(found)]
    assert Counter(line.part for line in lines) == PARTS[name]
    claims = [row for row in rows if row["metric"] == "claim"]
    assert [(row["claim"], row["verdict"]) for row in claims] == [(each.claim, each.verdict) for each in findings]
    for row in claims:
        check(row["measured"], row["verdict"])
    measured = [row for row in rows if row["metric"] != "claim"]
    assert measured and all(row["value"] is not None for row in measured)
    assert all(row["low"] <= row["value"] for row in measured if row["low"] is not None)
    assert all(row["value"] <= row["high"] for row in measured if row["high"] is not None)  # one end may be infinite
    assert "This scale shows that the study runs, not what is true" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "report.html").stat().st_size > 0


def check(measured, verdict):
    """The word agrees with the count of cases that is printed beside it, whichever need the claim has."""
    if measured.startswith("not measured"):
        assert verdict == UNDECIDED
    elif " yes, " in measured:
        above, total = int(measured.split()[0]), int(measured.split()[2])
        against = int(measured.split("yes, ")[1].split()[0])
        assert verdict != SUPPORTED or above > 0
        assert verdict != NOT_SUPPORTED or against > 0
        assert verdict == UNDECIDED or above + against > 0
        assert above < total or verdict == SUPPORTED
        assert against < total or verdict == NOT_SUPPORTED


def test_the_tiny_matrix_has_a_number_or_a_reason_in_every_cell(tmp_path, capsys):
    command = ["reproduce", "matrix", "--scale", "tiny", "--seeds", "1", "--out", str(tmp_path), "--json"]
    assert main(command) == 0
    capsys.readouterr()
    (heatmap,) = build_heatmaps(load_rows(tmp_path))
    assert len(heatmap.rows) == 30
    cells = {(row.name, key): row.cells[key] for row in heatmap.rows for key in BY_KEY}
    assert all(bool(cell.measure) != bool(cell.reasons) for cell in cells.values())
    assert not [cell.reasons for cell in cells.values() if "a fault" in " ".join(cell.reasons)]
    measured = {place for place, cell in cells.items() if cell.measure}
    final = {"pruning alone (l1)", "basic", "ppb", "adv", "dp-sgd", "int8"}
    inverted = {name for name, key in measured if key == "strongest"}
    others = {row.name for row in heatmap.rows} - final
    assert others - {"priprune", "mapp-fl", "heterofl"} <= inverted <= others  # priprune takes no BatchNorm
    assert all((name, "final-rmia") in measured for name in final | {"none", "dgp", "adgp", "ats", "largest"})
    page = (tmp_path / "report.html").read_text()
    assert page.count('<th scope="row">') == 30 and "plotly" not in page and len(page) < 2**20
    assert main(command) == 0, "a second start takes all stages from the folder"
