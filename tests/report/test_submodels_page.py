"""The page of federations over sub-models: clients and servers, the plane, and who trains which cells."""

import json
import re
from dataclasses import replace

import pytest

from secateur.evaluation.submodel_advice import Advice, Option, rows_of
from secateur.metrics.membership import Estimate
from secateur.report import submodels
from secateur.report.page import Source, render
from secateur.report.submodels_plots import draw_cells
from secateur.report.terminal import print_submodels
from secateur.runs.rows import Row

LABELS = {"model": "mapp-cnn-16", "dataset": "digits", "defense": "none", "seed": 0}


def row(metric, value, client=None, rule="mapp-fl", large=2, seed=0, attack=None, note=None, **extra):
    own = {"submodels": rule, "large_clients": large, "round": 9, "client": client} | extra
    ends = {} if value is None else {"low": value - 0.01, "high": value + 0.01}
    return Row(**LABELS | {"seed": seed}, attack=attack, metric=metric, value=value, note=note, **ends, extra=own)


def party(client, accuracy, advantage, note=None, **more):
    who = {"scope": "server" if client is None else "client", "data_size": 100, "parameters": 25000} | more
    asked = {"attack": "yeom", "batches": "mixed", "updates": 1}
    return [
        row("test_accuracy", accuracy, client, **who),
        row("advantage", advantage, client, note=note, **who, **asked),
    ]


def cells(rule="mapp-fl"):
    blocks = [([0, 1], [0, 1]), ([2, 3], [0, 1]), ([0, 1], [2, 3]), ([0, 1, 2, 3], [0, 1, 2, 3])]
    trained = [{"client": i, "outputs": a, "inputs": b} for i, (a, b) in enumerate(blocks)]
    common = LABELS | {"submodels": rule, "large_clients": 1, "kind": "cells", "layer": "5"}
    return common | {"outputs": 4, "inputs": 4, "trained": trained}


def page_of(rows, figures=()):
    return render([Source("run", rows, list(figures), config="", environment={})])


def embedded(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL).group(1))


def test_a_federation_is_its_server_and_its_average_client():
    rows = party(None, 0.8, 0.02) + party(0, 0.7, 0.04) + party(1, 0.6, 0.08)
    (found,) = submodels.summarise_federations(rows)
    assert (found.value("client_accuracy"), found.value("client_advantage")) == (
        pytest.approx(0.65),
        pytest.approx(0.06),
    )
    assert found.cells["client_accuracy"].high - 0.65 == pytest.approx(0.01)  # by the same examples
    assert found.cells["client_advantage"].high - 0.06 == pytest.approx(0.01)  # by the same non-members
    assert found.value("server_accuracy") == 0.8 and submodels.list_excluded(found) == (2, [])


def test_seeds_are_averaged_and_show_an_interval_over_them():
    rows = party(0, 0.7, 0.04) + party(0, 0.8, 0.06, seed=1)
    (party_line,) = submodels.summarise_parties(rows)
    found = party_line.cells["client_advantage"]
    assert found.value == pytest.approx(0.05)
    assert (found.low, found.high) == pytest.approx((0.05 - 12.7062 * 0.01, 0.05 + 12.7062 * 0.01))


def test_other_ways_of_asking_do_not_mix_with_the_plain_one():
    rows = party(0, 0.7, 0.04)
    rows.append(row("advantage", 0.9, 0, scope="client", data_size=1, parameters=1, attack="yeom", batches="apart"))
    (party_line,) = submodels.summarise_parties(rows)
    found = party_line.cells["client_advantage"]
    assert found.value == 0.04


def test_the_average_clients_interval_is_that_of_the_seeds_means():
    rows = party(0, 0.7, 0.0) + party(1, 0.7, 0.4) + party(0, 0.7, 0.2, seed=1) + party(1, 0.7, 0.3, seed=1)
    (found,) = submodels.summarise_federations(rows)
    cell = found.cells["client_advantage"]
    radius = 12.706205 * 0.025  # Student's of .2 and .25
    assert [cell.value, cell.low, cell.high] == pytest.approx([0.225, 0.225 - radius, 0.225 + radius])


def test_every_attack_has_its_line_and_its_plane(capsys):
    rows = [*party(None, 0.8, 0.02), *party(0, 0.7, 0.04)]
    asked = {"scope": "client", "data_size": 100, "parameters": 25000, "batches": "mixed", "updates": 1}
    rows += [row("advantage", 0.5, 0, attack="lira", **asked), row("test_accuracy", 0.8, round=9, rounds=9)]
    yeom, lira = submodels.summarise_federations(rows)
    assert [(each.labels["attack"], each.value("client_advantage")) for each in (yeom, lira)] == [
        ("yeom", 0.04),
        ("lira", 0.5),
    ]
    drawn = embedded(page_of(rows))["submodel_planes"]
    assert [view["label"] for view in drawn] == ["digits, yeom", "digits, lira"]
    assert drawn[1]["panels"][0]["layout"]["yaxis"]["title"]["text"] == "advantage of lira"
    print_submodels(rows)
    assert [line.split()[1:5] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["yeom", "80.0%", "2.0%", "-"],
        ["lira", "80.0%", "-", "-"],
    ]


def test_clients_with_less_data_are_drawn_and_correlated_by_model_size():
    rows = party(None, 0.8, 0.02, data_size=9999)
    for client, (size, advantage) in enumerate([(500, 0.5), (1000, 0.4), (2000, 0.3), (4000, 0.2), (30, 0.9)]):
        rows += party(client, 0.7, advantage, data_size=size)
    rows += party(5, 0.7, 0.1, data_size=8000, parameters=100_000)
    (view,) = embedded(page_of(rows))["submodel_planes"]
    (drawn,) = view["panels"][1]["data"]
    assert drawn["x"] == [30, 500, 1000, 2000, 4000, 8000] and drawn["y"] == [0.9, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert view["panels"][1]["layout"]["xaxis"]["tickvals"][:2] == [20, 50]
    low, high = view["panels"][1]["layout"]["xaxis"]["range"]
    assert 10**low < 20 and 10**high > 10_000  # so that two ticks are seen however near the sizes lie
    (federation,) = submodels.summarise_federations(rows)
    (sized,) = submodels.correlate_by_size(federation.rows)
    assert sized.correlation.r.value == pytest.approx(-1)  # not of the server, nor of the larger model
    assert sized.clients == "4 of size 25,000 with 400 examples or more" and sized.clients in page_of(rows)
    asked = [each for each in rows if each.metric == "advantage" and each.extra["data_size"] < 3000]
    (small,) = submodels.correlate_by_size(asked)
    assert (small.correlation.clients, small.smallest) == (4, 0)  # all where few have so many


@pytest.mark.parametrize(("kept", "curves"), [(("keep",), [["0", "2"]]), (("zero", "keep"), [["0", "2"], ["0"]])])
def test_kept_cells_have_a_curve_of_their_own_only_beside_zeroed_ones(kept, curves):
    rows = [each for how in kept for each in party(0, 0.7, 0.04, large=0, uncovered=how)]
    rows += party(0, 0.7, 0.05, large=2, uncovered=kept[0])
    (view,) = embedded(page_of(rows))["submodel_planes"]
    assert [trace["text"] for trace in view["panels"][0]["data"]] == curves
    assert [len(trace["x"]) for trace in view["panels"][1]["data"]] == [len(each) for each in curves]


def viewed(metric, value, client, batches, updates=1):
    scope = {"scope": "server" if client is None else "client", "data_size": 100, "parameters": 25000}
    return row(metric, value, client, attack="yeom", batches=batches, updates=updates, **scope)


@pytest.mark.parametrize("scoring", ["fixed", "apart"])
def test_the_tables_show_the_view_that_the_run_was_told_to_take(scoring):
    rows = [viewed("advantage", 0.3, 0, scoring), viewed("advantage", 0.1, 0, "mixed")]
    assert [each.cells["client_advantage"].value for each in submodels.summarise_parties(rows)] == [0.3]
    assert [each.cells["client_advantage"].value for each in submodels.summarise_parties(rows[:1])] == [
        0.3
    ]  # a network without BatchNorm
    assert "Ways of scoring" not in page_of(rows[:1])


def test_the_page_shows_what_the_scoring_batches_do():
    rows = [viewed("advantage", 0.04, None, "mixed")]
    for client, advantage in ((0, 0.1), (1, 0.3)):
        rows += [viewed("advantage", advantage, client, "mixed"), viewed("auc", 0.5 + advantage, client, "mixed")]
        rows += [viewed("advantage", 2 * advantage, client, "mixed", 3), viewed("advantage", 0.6, client, "apart")]
    plain, several, apart = scorings = submodels.compare_scorings(rows)
    assert [(line.labels["batches"], line.labels["updates"]) for line in scorings] == [
        ("mixed", 1),
        ("mixed", 3),
        ("apart", 1),
    ]
    assert [plain.value(x) for x in ("server_advantage", "client_advantage", "auc")] == [
        0.04,
        pytest.approx(0.2),
        pytest.approx(0.7),
    ]
    assert several.value("client_advantage") == pytest.approx(0.4) and several.value("server_advantage") is None
    assert apart.value("client_advantage") == pytest.approx(0.6)
    page = page_of(rows)
    assert "Ways of scoring" in page and "60.0%" in page and "0.700" in page


def test_kept_and_zeroed_cells_are_told_apart_where_there_are_any():
    rows = [each for how in ("keep", "zero") for each in party(None, 0.8, 0.02, large=0, uncovered=how)]
    kept, zeroed = submodels.summarise_federations(rows)
    assert tuple(submodels.name_federation(line.labels) for line in (kept, zeroed)) == (
        "mapp-fl, mapp-cnn-16, uncovered kept",
        "mapp-fl, mapp-cnn-16",
    )
    assert submodels.name_federation(dict(kept.labels) | {"large_clients": 2}) == submodels.name_federation(
        zeroed.labels
    )
    small = [replace(each, model="mapp-cnn-8") for each in rows]
    assert "Federations over sub-models of mapp-cnn-16, mapp-cnn-8 on digits" in page_of(rows + small)


def test_the_page_shows_plane_cells_and_clients():
    rows = []
    for large in (0, 2):
        rows += party(None, 0.8, 0.02, large=large) + party(0, 0.7, 0.04 + large / 100, large=large)
    rows += party(1, 0.6, None, note="excluded: 3 rows are too few")
    page = page_of(rows, [cells()])
    drawn = embedded(page)
    (view,) = drawn["submodel_planes"]
    assert view["panels"][0]["data"][0]["text"] == ["0", "2"]
    assert "mapp-fl, mapp-cnn-16 (0 large)" in view["text"]
    (heat,) = drawn["submodel_cells"]
    whole, *groups = heat["panels"]
    counts = whole["data"][0]["z"]
    assert counts[0] == [2, 2, 2, 2] and counts[3] == [2, 2, 1, 1]  # the large client trains them all
    assert len(groups) == 3 and "100 % of the cells" in heat["text"]
    assert "excluded: 3 rows are too few" in page and "Client by client" in page


def test_clients_that_cannot_be_attacked_are_counted(capsys):
    why = "excluded: 3 rows are too few"
    rows = [each for rule in ("mapp-fl", "heterofl") for each in party(0, 0.7, 0.04, rule=rule)]
    rows += [each for rule in ("mapp-fl", "heterofl") for each in party(1, 0.6, None, note=why, rule=rule)]
    found, _ = submodels.summarise_federations(rows)
    assert submodels.list_excluded(found) == (2, [why]) and found.value("client_advantage") == 0.04
    assert "1 of 2 clients</small>" in page_of(rows)
    print_submodels(rows)
    assert "mapp-fl, heterofl: 1 of 2 clients could not be attacked: 3 rows are too few" in capsys.readouterr().out


def test_a_seed_in_which_a_client_is_excluded_leaves_the_others_interval():
    rows = party(0, 0.7, None, note="excluded: 3 rows are too few") + party(0, 0.7, 0.04, seed=1)
    (party_line,) = submodels.summarise_parties(rows)
    found = party_line.cells["client_advantage"]
    assert (found.low, found.high) == (pytest.approx(0.03), pytest.approx(0.05))


def test_pictures_of_cells_name_their_clients_and_show_how_many_train_each():
    trained = [{"client": i, "outputs": [0, 1], "inputs": [0, 1]} for i in range(40)]
    trained += [{"client": 40, "outputs": [2, 3], "inputs": [0, 1]}]
    ((whole, many, one),) = [each["panels"] for each in embedded(page_with(trained))["submodel_cells"]]
    assert many["title"].startswith("clients 0, 1, 2,") and many["title"].endswith("11 and 28 others")
    assert one["title"] == "client 40"
    assert whole["data"][0]["showscale"] and whole["data"][0]["zmax"] == 40 and not one["data"][0]["showscale"]
    assert all(each["layout"][axis]["showline"] for each in (whole, one) for axis in ("xaxis", "yaxis"))


def page_with(trained):
    return page_of(party(0, 0.7, 0.04), [cells() | {"trained": trained}])


def test_why_an_auc_is_what_it_is():
    asked = {"scope": "client", "data_size": 100, "parameters": 25000, "batches": "mixed", "updates": 1}
    rows = party(0, 0.7, 0.04)
    auc = row("auc", 0.5, 0, attack="yeom", note="gamma 2 ranks all examples alike", **asked)
    page = page_of([*rows, auc])
    assert '<li id="note-1">gamma 2 ranks all examples alike</li>' in page
    assert 'data-value="0.5">0.500<sup><a href="#note-1"' in page


@pytest.mark.parametrize("groups", [9, 16])
def test_every_group_has_a_picture(groups):
    trained = [{"client": i, "outputs": [i], "inputs": [0, 1]} for i in range(groups)]
    page = page_of(party(0, 0.7, 0.04), [cells() | {"outputs": groups, "inputs": 2, "trained": trained}])
    (heat,) = embedded(page)["submodel_cells"]
    assert len(heat["panels"]) == 1 + groups


def test_a_federation_that_nobody_attacked_has_its_accuracy():
    rows = [row("test_accuracy", 0.5, round=1), row("test_accuracy", 0.9), row("client_accuracy", 0.7)]
    (found,) = submodels.summarise_federations(rows)
    assert (
        found.value("server_accuracy") == 0.9
        and found.value("client_accuracy") == 0.7
        and "client_advantage" not in found.cells
    )
    page = page_of(rows)
    assert "90.0%" in page and len(embedded(page)["submodel_rounds"]) == 1 and "Client by client" not in page


def test_advice_is_a_table_of_its_own():
    option = Option(1.0, Estimate(0.8, 0.7, 0.9), Estimate(0.1, 0.0, 0.2))
    labels = LABELS | {"extra": {"submodels": "mapp-fl", "round": 3, "large_clients": 2}}
    page = page_of(rows_of([Advice(4, 490, (option,), 1.0, "the whole model: no other size was tried")], labels))
    assert "the whole model: no other size was tried" in page and "80.0%" in page and "490" in page


def test_a_layer_of_very_many_cells_is_described_and_not_drawn():
    (view,) = draw_cells([cells() | {"outputs": 10**9, "inputs": 10**9}])
    assert view.panels == [] and "cells, too many to draw" in view.text
