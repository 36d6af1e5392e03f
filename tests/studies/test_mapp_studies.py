"""Studies of mapp_fl: a table follows from its rows by hand; tiny ones run from the command line to their tables."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from secateur import catalogue
from secateur.cli import main
from secateur.config.methods import choice
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.augment import crop_and_flip
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.runs.folder import load_figures, load_rows, open_run
from secateur.runs.rows import Row, select_comparable
from secateur.studies.mapp import federations, tables
from secateur.studies.mapp.federations import (
    Case,
    MappRunner,
    cases_of,
    load_data,
    shares_of,
    terms_of,
    with_augmentation,
)
from secateur.studies.mapp.tables import ACCURACY, YEOM, MappFederation, MappResults, Metric, Query
from secateur.studies.study import Request, read_scales, scale_of
from secateur.studies.table import find_printed

NARROW = 0.001
SCALES = read_scales("mapp")
RIVALS = ("fdropout", "heterofl", "mapp-fl")
SIZES = tuple(find_printed("mapp", "table_2", "sizes"))


def row(metric, value, rule, client, *, model="mapp-cnn-16", large=2, seed=0, attack=None, defense="none", **extra):
    ends = {} if value is None else {"low": value - NARROW, "high": value + NARROW}
    own = {"scope": "server" if client is None else "client", "client": client, "submodels": rule}
    own |= {"large_clients": large, "rate": 1.0, "data_size": 1000, "parameters": 100} | extra
    labels = {"model": model, "dataset": "cifar10", "defense": defense, "attack": attack, "seed": seed}
    return Row(**labels, metric=metric, value=value, **ends, extra=own)


def federation(rule, server, clients, *, sizes=None, rates=None, attack="yeom", **common):
    """Rows of one federation: (accuracy, advantage) of the server and of each client."""
    rows = []
    asked = {"attack": attack, "batches": "mixed", "updates": 1}
    for client, pair in [(None, server), *enumerate(clients)]:
        extra = dict(common)
        if client is not None:
            extra["data_size"] = (sizes or SIZES)[client]
            extra["rate"] = 1.0 if rates is None else rates[client]
        if pair is not None:
            rows.append(row("test_accuracy", pair[0], rule, client, **extra))
            rows.append(row("advantage", pair[1], rule, client, **extra, **asked))
            rows.append(row("auc", 0.5 + pair[1], rule, client, **extra, **asked))
    return rows


def said(findings, *words):
    (found,) = [finding for finding in findings if all(word in finding.claim for word in words)]
    return found.verdict


# Numbers and setting ---------------------------------------------------------------------------------------------
def test_the_tables_as_the_paper_prints_them():
    counts = {name: cells(find_printed("mapp", name)) for name in ("table_3", "table_4", "table_5", "table_6")}
    assert counts == {"table_3": 12, "table_4": 90, "table_5": 12, "table_6": 4}
    assert find_printed("mapp", "table_4", "cifar10", 0, "heterofl") == [70.43, 1.91, 70.31, 2.98]
    assert find_printed("mapp", "table_4", "cifar100", 4, "mapp-fl") == [44.48, 1.61, 32.31, 4.58]
    assert find_printed("mapp", "table_4", "femnist", 9, "fdropout") == [86.55, 8.83, 78.82, 12.50]
    assert find_printed("mapp", "table_3", "femnist", "mapp-cnn-64") == -0.75
    assert find_printed("mapp", "table_3", "cifar10", "mapp-cnn-8") == -0.62
    assert find_printed("mapp", "table_2", "large", "advantage")[9] == 9.8 and sum(SIZES) == 50_000


def cells(table):
    """The number of cells of a nested table, without the sentence about it."""
    return sum(cells(value) if isinstance(value, dict) else 1 for key, value in table.items() if key != "about")


@pytest.fixture(scope="module")
def cifar_labels():
    """Labels of CIFAR-10's train part and a few others; pictures do not matter here."""
    labels = torch.cat([torch.arange(10).repeat_interleave(5000), torch.arange(10)])
    return Dataset("cifar10", torch.zeros(len(labels), 3, 1, 1), labels, 10, 50_000)


def test_repeats_have_table_2s_sizes_and_other_images_or_sizes_of_their_own(cifar_labels):
    first, second = (shares_of(Case("mapp-fl"), cifar_labels, seed) for seed in (0, 1))
    assert tuple(map(len, first)) == tuple(map(len, second)) == SIZES
    assert set(first[9].tolist()) != set(second[9].tolist())
    assert tuple(len(rows) for rows in shares_of(Case("none", fresh=True), cifar_labels, 3)) != SIZES


def test_the_papers_setting(cifar_labels):
    terms = terms_of(Case("mapp-fl"), SCALES["full"], cifar_labels, 0)
    assert (terms.rounds, terms.local.batch_size, terms.local.learning_rate) == (150, 128, 1e-3)
    assert (terms.averaging, terms.uncovered) == ("uniform", "zero")
    assert list(terms.rates) == [1.0, 1.0] + [0.5] * 8


def test_a_scale_can_be_changed_and_wrong_changes_are_refused():
    scale = scale_of("mapp", "full", ["rounds=60", "large=0+1+2+5+9"])
    assert (scale.rounds, scale.large) == (60, [0, 1, 2, 5, 9])
    for wrong in ("rounds=-1", "rounds=1+2", "data=mnist", "round=3", "large=a", "augment=1", "rounds=true"):
        with pytest.raises(WrongInput, match=wrong.partition("=")[0]):
            scale_of("mapp", "tiny", [wrong])
    zeros = [f"{name}=0" for name in ("rounds", "updates", "shuffles", "patience", "threads", "at_once")]
    for wrong in (*zeros, "large=0+11", "units=16+3", "shadows=3"):  # none is found out after hours of work
        with pytest.raises(WrongInput, match=r"is not allowed; (must be|use 8, 16, 32, 64, several|use 0, 1, 2)"):
            scale_of("mapp", "tiny", [wrong])


# Tables ----------------------------------------------------------------------------------------------------------
def test_every_rule_beside_the_papers_numbers():
    rows = federation("heterofl", (0.78, 0.025), [(0.70, 0.04), (0.70, 0.06)])
    rows += federation("mapp-fl", (0.77, 0.015), [(0.69, 0.03), (0.69, 0.01)])
    rows += federation("fdropout", (0.76, 0.019), [(0.42, 0.02), (0.42, 0.02)])
    rows += federation("none", (0.78, 0.02), [(0.77, 0.05), (0.77, 0.04)])
    rows += federation("none", (0.69, 0.01), [(0.68, 0.03), (0.68, 0.02)], model="mapp-cnn-8")
    lines, findings = tables.rules(MappResults(rows))
    mapp = next(line for line in lines if line.labels["rule"] == "mapp-fl")
    assert mapp.cells["client_advantage"].value == pytest.approx(0.02)
    assert mapp.cells["server_accuracy"].value == pytest.approx(0.77)
    assert mapp.paper == "server 77.00 / 1.49, clients 68.26 / 2.99"
    assert said(findings, "less exposed than HeteroFL") == "supported"
    assert said(findings, "about as accurate as HeteroFL") == "supported"
    assert said(findings, "FDropout's clients are less accurate") == "supported"
    assert said(findings, "exposes clients less") == "supported"
    assert not any("alone" in finding.claim for finding in findings)  # nobody trained alone


def test_clients_alone_are_the_small_ones():
    rates = [1.0, 0.5, 0.5]
    rows = federation("mapp-fl", (0.77, 0.01), [(0.77, 0.04), (0.66, 0.01), (0.64, 0.02)], rates=rates)
    rows += federation("local", None, [(0.70, 0.2), (0.50, 0.2), (0.52, 0.2)], rates=rates)
    lines, findings = tables.by_client(MappResults(rows))
    assert [line.labels["data size"] for line in lines[:3]] == ["17020", "7400", "7040"]
    assert lines[2].paper.endswith("local 61.57, MaPP-FL 66.30 / 1.52")
    local = next(line for line in lines if line.labels.get("rule") == "local")
    assert local.mark == f"the average of its small clients; {tables.YEOM_ONLY}"
    assert local.cells["client_accuracy"].value == pytest.approx(0.51) and local.cells["server_accuracy"] is None
    assert said(findings, "every small client does better") == "supported"
    assert said(findings, "13.5 points") == "supported"  # (.16 + .12) / 2 = .14


def test_large_clients_one_after_another():
    rows = []
    for large, server in ((0, 0.44), (2, 0.77)):
        rows += federation("mapp-fl", (server, 0.01), [(0.69, 0.03)], large=large)
        rows += federation("heterofl", (0.70, 0.02), [(0.70, 0.04)], large=large)
        rows += federation("fdropout", (0.60, 0.01), [(0.40, 0.02)], large=large)
    lines, findings = tables.by_large(MappResults(rows))
    assert lines[0].paper == "server 44.03 / 0.67, clients 69.42 / 2.91"
    assert said(findings, "less exposed than HeteroFL") == "supported"
    assert said(findings, "MaPP-FL's server is worse than its clients") == "supported"
    assert said(findings, "HeteroFL's server is as good") == "supported"
    assert said(findings, "as private as FDropout") == "undecided"  # one point more, within the interval


def test_kept_cells_are_lines_of_their_own_and_judge_nothing(cifar_labels):
    rows = federation("mapp-fl", (0.44, 0.01), [(0.69, 0.03)], large=0, uncovered="zero")
    rows += federation("mapp-fl", (0.80, 0.01), [(0.69, 0.03)], large=0, uncovered="keep")
    zero, keep = tables.by_large(MappResults(rows))[0]
    assert (zero.labels["rule"], keep.labels["rule"]) == ("mapp-fl", "mapp-fl (uncovered: keep)")
    assert zero.paper and not keep.paper and keep.cells["server_accuracy"].value == pytest.approx(0.8)
    assert said(tables.by_large(MappResults(rows))[1], "MaPP-FL's server is worse") == "supported"  # the zeroed one
    for name in ("mapp-fig3", "mapp-table4"):
        cases = cases_of(catalogue.find("study", name).make(), SCALES["tiny"])
        kept = [case for case in cases if case.uncovered == "keep"]
        assert [(case.submodels, case.large) for case in kept] == [(rule, 0) for rule in RIVALS]
    assert terms_of(kept[0], SCALES["tiny"], cifar_labels, 0).uncovered == "keep"
    few = cases_of(catalogue.find("study", "mapp-table4").make(), SCALES["tiny"].change(large=[2]))
    assert few and not [case for case in few if case.uncovered == "keep"]


def test_coupling_layer_by_layer():
    rows = federation("fdropout", (0.76, 0.02), [(0.40, 0.02)])
    rows += federation("fdropout:coupling=independent", (0.75, 0.02), [(0.24, 0.02)])
    lines, findings = tables.couple_channels(MappResults(rows))
    assert lines[1].labels["inputs and outputs"] == "independent" and lines[1].paper.endswith("clients 23.56 / 1.74")
    assert said(findings, "coupled layer by layer") == "supported"


def test_less_data_means_more_exposure_over_the_clients_of_all_draws():
    advantages = [0.01, 0.02, 0.021, 0.022, 0.03, 0.035, 0.05, 0.051, 0.06, 0.2]
    rows = federation("none", (0.7, 0.01), [(0.6, x) for x in advantages], sizes=[*SIZES[:9], 90], model="mapp-cnn-8")
    rows += federation("none", (0.8, 0.02), [(0.7, 2 * x) for x in advantages], sizes=[*SIZES[:9], 90])
    lines, findings = tables.complexity(MappResults(rows, 400))
    assert lines[0].cells["r"].value < -0.9 and lines[0].cells["excluded"] == "1" and lines[0].paper == "-0.62"
    assert said(findings, "r of log10") == "supported"
    assert said(findings, "advantage rises with the model's size") == "supported"


def test_correlations_are_taken_within_a_repeat():
    falling, rising = [0.05, 0.04, 0.03, 0.02], [0.02, 0.03, 0.04, 0.05]
    rows = []
    for seed, advantages in enumerate((rising, rising, falling)):  # clients are sorted by size, largest first
        rows += federation(
            "none", (0.7, 0.01), [(0.6, x) for x in advantages], seed=seed, sizes=[8000, 4000, 2000, 1000]
        )
    (line,), findings = tables.correlations(MappResults(rows))
    r = line.cells["r"]
    assert r.value == pytest.approx(-1 / 3) and (r.low, r.high) == (-1.0, 1.0)  # -1, -1, 1: Student's ends are clipped
    assert line.cells["r over all clients"].value == pytest.approx(-1 / 3) and line.cells["clients"] == "12"
    assert findings[0].verdict == "undecided"
    few = [row for row in rows if row.seed == 0 or row.extra.get("data_size") != 8000]  # too few clients in two repeats
    assert tables.correlations(MappResults(few))[0][0].cells["r"].low == -1.0, "one repeat of three is no sample"
    known = tables.correlations(MappResults(rows))[0][0].cells["clients"]
    assert tables.correlations(MappResults(rows + rows))[0][0].cells["clients"] == known, "a client counts once"


def test_lines_of_exposure_say_that_only_yeom_was_met():
    rows = federation("heterofl", (0.7, 0.02), [(0.7, 0.04)]) + federation("mapp-fl", (0.7, 0.02), [(0.7, 0.03)])
    lines, _ = tables.rules_and_clients(MappResults(rows))
    assert lines and all(line.mark == tables.YEOM_ONLY for line in lines)
    met = [*rows, *federation("mapp-fl", (0.7, 0.02), [(0.7, 0.03)], attack="rmia:gamma=1.0")]
    assert not any(line.mark for line in tables.rules(MappResults(met))[0])
    blind = [row for row in rows if row.metric == "test_accuracy"]
    assert not any(line.mark for line in tables.rules(MappResults(blind))[0])


@pytest.mark.parametrize(
    ("accuracy", "advantage", "verdict"),
    [(0.69, 0.03, "supported"), (0.66, 0.03, "not supported"), (0.69, 0.05, "not supported")],
)
def test_the_best_trade_off_is_both_private_and_accurate(accuracy, advantage, verdict):
    rows = federation("heterofl", (0.7, 0.02), [(0.70, 0.04)]) + federation("fdropout", (0.7, 0.02), [(0.4, 0.025)])
    rows += federation("mapp-fl", (0.7, 0.02), [(accuracy, advantage)])
    for lines, findings in (tables.rules(MappResults(rows)), tables.by_large(MappResults(rows))):
        assert lines and said(findings, "best accuracy-privacy trade-off") == verdict


def test_accuracies_by_the_same_examples_are_no_more_certain_for_being_many():
    alike = [(0.7, 0.04)] * 4
    found = MappResults(federation("none", (0.7, 0.02), alike) + federation("mapp-fl", (0.7, 0.02), alike))
    (fedavg, _), (way, *_) = found.keys, found.attacks
    accuracy, advantage = (found.value(fedavg, metric)[0] for metric in (ACCURACY, Metric("advantage", way)))
    assert accuracy.high - accuracy.value == pytest.approx(NARROW)  # of one model on one test part
    assert advantage.high - advantage.value == pytest.approx(NARROW)  # the non-members are the same
    overall = tables.average_all([found.value(each, Metric("advantage", way)) for each in found.keys])
    assert overall.high - overall.value == pytest.approx(NARROW)  # every federation has these members


def test_the_ranking_under_another_attacker():
    rows = []
    for attack, hetero in (("yeom", 0.05), ("lira", 0.02)):
        rows += federation("heterofl", (0.7, 0.01), [(0.7, hetero)], attack=attack)
        rows += federation("mapp-fl", (0.7, 0.01), [(0.7, 0.03)], attack=attack)
    found = MappResults(rows)
    assert found.attacks == [YEOM, Query("lira")]
    lines, findings = tables.attackers(found)
    assert len(lines) == 4 and said(findings, "whoever attacks") == "not supported"


def test_yeoms_thresholds_count_once_where_scores_are_ranked():
    rows = []
    ways = ("yeom", "yeom:threshold=tuned", "yeom:threshold=class", "lira")
    for attack in ways:
        rows += federation("heterofl", (0.7, 0.01), [(0.7, 0.05)], attack=attack)
        rows += federation("mapp-fl", (0.7, 0.01), [(0.7, 0.03)], attack=attack)
    lines, findings = tables.attackers(MappResults(rows))
    assert len(lines) == 8
    ranked, placed = (
        next(each for each in findings if words in each.claim) for words in ("whoever attacks", "threshold lies")
    )
    assert ranked.measured.startswith("2 of 2") and ranked.verdict == "supported"
    assert placed.measured.startswith("3 of 3") and placed.verdict == "supported"
    assert set(ways) < set(cases_of(catalogue.find("study", "mapp-attackers").make(), SCALES["tiny"])[0].attacks)


def test_the_papers_claims_are_asked_of_attackers_with_shadows():
    rows = []
    for attack, hetero in (("yeom", 0.01), ("lira", 0.2), ("rmia:gamma=1.0", 0.2)):
        rows += federation("heterofl", (0.7, 0.01), [(0.7, hetero)], attack=attack)
        rows += federation("mapp-fl", (0.7, 0.01), [(0.7, 0.05)], attack=attack)
        rows += federation("none", (0.7, 0.01), [(0.7, 0.05)], attack=attack)
        rows += federation("none", (0.7, 0.01), [(0.7, hetero)], attack=attack, model="mapp-cnn-8")
    _, findings = tables.attackers(MappResults(rows))
    judged = {finding.key: finding for finding in findings}
    private, exposed = judged["attackers.private"], judged["attackers.exposed"]
    assert private.verdict == "supported" and private.measured.startswith("2 of 2")  # Yeom is not asked
    assert exposed.verdict == "not supported"


def test_only_attacks_that_learn_have_shadow_federations():
    def count(attacks, *overrides):
        scale = scale_of("mapp", "tiny", overrides)
        runner = MappRunner(None, scale, None, torch.device("cpu"), [choice("attack", name) for name in attacks])
        return runner.asking.federations

    assert count(["yeom"]) == 0
    assert count(["yeom", "rmia:gamma=1"]) == 4
    assert count(["lira"], "shadow_federations=0") == 0  # shadow clients of one turn


def test_table_5_has_both_readings_of_osm():
    names = [case.submodels for case in cases_of(catalogue.find("study", "mapp-table5").make(), SCALES["tiny"])]
    assert {"osm", "osm:reading=paper"} < set(names) and len(names) == len(set(names)) + 1  # FedAvg has two sizes


def test_each_federation_has_its_own_lira_less_yeom():
    rows = []
    for attack, small in (("yeom", 0.02), ("lira", 0.05)):  # of the larger network both find as much
        rows += federation("none", (0.7, 0.01), [(0.7, 0.03)], attack=attack)
        rows += federation("none", (0.6, 0.01), [(0.6, small)], attack=attack, model="mapp-cnn-8")
    _, findings = tables.attackers(MappResults(rows))
    (found,) = [finding for finding in findings if "than LiRA" in finding.claim]
    assert found.measured.startswith("1 of 2, 1 undecided")


def test_what_a_defense_adds():
    rows = federation("mapp-fl", (0.77, 0.02), [(0.7, 0.04)])
    rows += federation("mapp-fl", (0.70, 0.02), [(0.6, 0.01)], defense="dgp")
    found = MappResults(rows)
    assert found.keys[1] == MappFederation("mapp-fl", "mapp-cnn-16", 2, "dgp")
    _, findings = tables.add_defenses(found)
    assert said(findings, "exposes sub-model clients less") == said(findings, "costs the server") == "supported"


def test_the_ways_of_asking_are_lines_of_their_own():
    rows = federation("mapp-fl", (0.77, 0.02), [(0.7, 0.04)])
    rows.append(row("advantage", 0.09, "mapp-fl", 0, attack="yeom", batches="apart", updates=1))
    rows += federation("local", None, [(0.5, 0.3)], rates=[0.5])  # sends nothing, so it cannot be asked in all ways
    plain, apart = tables.by_query(MappResults(rows))
    assert plain.cells["client_advantage"].value == pytest.approx(0.04)
    assert apart.labels["scoring batches"] == "apart" and apart.cells["client_advantage"].value == pytest.approx(0.09)


# Runs ------------------------------------------------------------------------------------------------------------
def test_every_study_of_the_paper_is_there():
    names = {name for name in catalogue.methods("study") if name.startswith("mapp-")}
    paper = {"mapp-fig1", "mapp-fig3", "mapp-fig4", *(f"mapp-table{number}" for number in range(2, 7))}
    assert names == paper | {"mapp-attackers", "mapp-joined"}


def reproduced(capsys, out, name, *more):
    assert main(["reproduce", name, "--scale", "tiny", "--out", str(out), "--set", "rounds=1", *more]) == 0
    return capsys.readouterr().out


def test_table_6_runs_to_its_table_and_again_to_the_same_rows(tmp_path, capsys):
    out = tmp_path / "run"
    printed = reproduced(capsys, out, "mapp-table6", "--set", "examples=400")
    assert "independent" in printed and "verdict" in printed and "apart" in printed and "augmentation none" in printed
    table = [json.loads(line) for line in (out / "table.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in table if row["metric"] == "claim"} <= {"supported", "not supported", "undecided"}
    rows = select_comparable(load_rows(out))
    again = reproduced(capsys, out, "mapp-table6", "--set", "examples=400")
    assert again == printed and select_comparable(load_rows(out)) == rows
    page = (out / "report.html").read_text()
    assert "Federations over sub-models" in page and "Client by client" in page and "Trained cells" in page
    rules = {name + end for name in ("fdropout", "mapp-fl-r") for end in ("", ":coupling=independent")}
    assert {figure["submodels"] for figure in load_figures(out)} == rules


def test_stronger_attackers_and_other_defenses_run(tmp_path, capsys):
    more = ("--set", "examples=400")
    printed = reproduced(capsys, tmp_path / "joined", "mapp-joined", *more)
    assert "pseudo-largest" in printed and "dgp" in printed
    with pytest.raises(WrongInput, match="model"):
        request = Request("mapp-fig1", "tiny", {"model": "cnn6"}, [], tmp_path / "refused")
        catalogue.find("study", "mapp-fig1").make().plan(request)


def test_crops_and_flips_where_the_public_code_has_them_unless_one_says_otherwise():
    digits = load_data(SCALES["tiny"], {})
    cifar = replace(digits, name="cifar10")
    for scale in SCALES:
        assert with_augmentation(scale_of("mapp", scale, []), cifar).augment is True
        assert with_augmentation(scale_of("mapp", scale, []), digits).augment is False
        assert with_augmentation(scale_of("mapp", scale, ["augment=false"]), cifar).augment is False
        assert with_augmentation(scale_of("mapp", scale, ["augment=true"]), digits).augment is True


def test_crops_and_flips_are_stated(tmp_path, capsys):
    printed = reproduced(capsys, tmp_path, "mapp-fig1", "--set", "examples=400", "--set", "augment=true")
    assert "augmentation crop and flip" in printed
    assert all(row.extra["augment"] for row in load_rows(tmp_path))
    data, scale = load_data(SCALES["tiny"], {}), scale_of("mapp", "tiny", ["augment=true"])
    terms = terms_of(Case("local"), scale, data, 0)
    assert terms.local.augment == crop_and_flip(data) and terms.local.batch_size == scale.batch_size


def held(folder, cases, seeds=(0,), **changes):
    """The rows of federations that a run had or has run."""
    size = SCALES["tiny"].change(**({"rounds": 1, "examples": 400} | changes))
    with open_run(folder, "study", {}) as run:
        MappRunner(run, size, load_data(size, {}), torch.device("cpu"), [choice("attack", "yeom")]).run_all(
            cases, seeds
        )
    assert not list(folder.glob("unfinished/*"))
    return select_comparable(run.rows)


def ran(rows):
    return list(dict.fromkeys((row["submodels"], row["model"], row["seed"]) for row in rows))


@pytest.fixture
def begun(monkeypatch):
    """The rounds that federations begin: (seed, rule, number), in order."""
    begin, seen = SubmodelFederation.begin, []

    def noted(self, number):
        seen.append((self.seed, type(self.terms.rule).__name__, number))
        return begin(self, number)

    monkeypatch.setattr(SubmodelFederation, "begin", noted)
    return seen


@pytest.mark.system
def test_federations_that_run_together_come_to_the_rows_they_come_to_alone(tmp_path, monkeypatch):
    cases = [Case("none", 8), Case("local"), Case("mapp-fl")]
    alone = held(tmp_path / "alone", cases, (0, 1), examples=600)
    monkeypatch.setattr(MappRunner, "at_once", 3)  # of both seeds
    assert held(tmp_path / "together", cases, (0, 1), examples=600) == alone
    assert ran(alone) == [(case.submodels, case.model, seed) for seed in (0, 1) for case in cases]
    assert len(list(tmp_path.glob("together/artifacts/*"))) == 6


def test_stacked_clients_come_to_nearly_the_same_rows(tmp_path, monkeypatch):
    cases = [Case("none", 8), Case("mapp-fl")]
    alone = held(tmp_path / "alone", cases, examples=600)
    monkeypatch.setattr(MappRunner, "at_once", 2)
    monkeypatch.setattr(federations, "SubmodelFederation", partial(SubmodelFederation, execution="stacked"))
    stacked = held(tmp_path / "stacked", cases, examples=600)
    assert [row | {"value": 0, "low": 0, "high": 0} for row in stacked] == [
        row | {"value": 0, "low": 0, "high": 0} for row in alone
    ]
    # On another processor one answer of some thousands may differ: a share then moves by 2.5e-4.
    assert [row["value"] for row in stacked] == pytest.approx([row["value"] for row in alone], rel=1e-3, abs=3e-4)


@pytest.mark.system
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_studies_share_runs_once(tmp_path, monkeypatch, begun, at_once):
    monkeypatch.setattr(MappRunner, "at_once", at_once)
    first, second = [Case("mapp-fl"), Case("none", 8)], [Case("heterofl"), Case("mapp-fl"), Case("ufr")]
    held(tmp_path / "shared", first)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shared/artifacts/*")}
    begun.clear()
    rows = held(tmp_path / "shared", [*second, *second])  # twice in one study is once too
    assert begun == [(0, "HeteroFL", 1), (0, "UniqueFixedRandom", 1)]
    assert len(files) == 2 and all(path.stat().st_mtime_ns == time for path, time in files.items())
    assert rows == held(tmp_path / "anew", [*second, *second])  # in the order of the cases, whatever was there
    begun.clear()
    held(tmp_path / "shared", first)
    assert not begun


@pytest.mark.system
def test_federations_that_were_killed_together_go_on_together(tmp_path, monkeypatch, begun):
    monkeypatch.setattr(MappRunner, "at_once", 2)
    monkeypatch.setattr("secateur.federated.checkpoint.EVERY", 0.0)
    monkeypatch.setattr("secateur.federated.checkpoint.SPEED", math.inf)  # the first round is saved
    cases, out = [Case("mapp-fl"), Case("none", 8), Case("heterofl"), Case("fdropout")], tmp_path / "killed"
    whole = held(tmp_path / "whole", cases, rounds=3)
    begun.clear()
    noted = SubmodelFederation.begin

    def stopping(self, number):
        if number == 3 and type(self.terms.rule).__name__ == "FederatedDropout":
            raise KeyboardInterrupt
        return noted(self, number)

    with monkeypatch.context() as killing, pytest.raises(KeyboardInterrupt):
        killing.setattr(SubmodelFederation, "begin", stopping)
        held(out, cases, rounds=3)
    assert {row.extra["submodels"] for row in load_rows(out)} == {"mapp-fl", "none"}  # those that were done
    assert len(list(out.glob("artifacts/*"))) == 2 and len(list(out.glob("unfinished/*"))) == 1
    begun.clear()
    assert held(out, cases, rounds=3) == whole
    assert {rule for _, rule, _ in begun} == {"HeteroFL", "FederatedDropout"} and min(n for *_, n in begun) > 1
