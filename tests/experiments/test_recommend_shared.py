"""Searches for a defense of updates and for the terms of a federation, on a few digits: one run each."""

import pytest
import torch

import secateur
from secateur.cli import main
from secateur.config import Federate, Invert, RecommendFederation, RecommendUpdates, read
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.experiments.federation_recipes import FederationBench
from secateur.experiments.recommend import plan, prepare_any
from secateur.experiments.update_recipes import halve_rows
from secateur.runs.folder import MemoryRun, load_finished
from secateur.runs.rows import select_comparable

pytest.importorskip("optuna")
UPDATES = {
    "examples": 200,
    "attack": ["ig:tv=0.01"],
    "iterations": 4,
    "targets": 4,
    "labels": "oracle",
    "images": False,
    "defense": ["none", "noise:sigma=10.0", "dgp"],
    "training_epochs": 1,
    "candidates": 3,
    "finalists": 2,
    "max_psnr": 100,
    "max_accuracy_drop": 1.0,
}
FEDERATION = {
    "model": "digits-cnn",
    "examples": 300,
    "rounds": 4,
    "clients": 3,
    "local_steps": 1,
    "base_pruning": ["none", "snip"],
    "submodels": ["heterofl"],
    "client_widths": [0.5],
    "large_clients": 1,
    "defense": ["none", "pseudo-largest:rate=0.3"],
    "membership": ["yeom", "lira"],
    "candidates": 4,
    "finalists": 1,
    "max_accuracy_drop": 1.0,
    "max_bytes": 0.6,
}


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    return folder, secateur.recommend(folder, updates=True, **UPDATES)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    return folder, secateur.recommend(folder, federation=True, **FEDERATION)


def test_a_defense_is_chosen_on_one_half_of_the_rows_and_attacked_on_the_other(updates):
    folder, result = updates
    rows = load_finished(folder)
    searched = {row.defense: row.extra["rung"] for row in rows if row.metric == "search_psnr"}
    assert set(searched) == {"none", "noise:sigma=10.0", "dgp"}
    assert searched[result.recipe] == 2 and min(searched.values()) == 0
    attacked = [row for row in rows if row.metric == "psnr" and row.extra["target"] is None]
    assert {row.defense for row in attacked} == {result.recipe}
    assert all(row.seed != 0 for row in attacked)  # a fresh one
    assert set(result.confirmed) == {"recognisable", "psnr", "accuracy_drop", "bytes"}


def test_halves_have_no_common_row():
    data = load("digits").limit_rows(100, torch.Generator())
    data = type(data)("digits", data.inputs, torch.arange(100), 100, 60)
    first, second = halve_rows(data, 0)
    assert (first.train_size, second.train_size) == (30, 30)
    assert sorted([*first.labels.tolist(), *second.labels.tolist()]) == list(range(100))
    assert max(first.labels[:30].max(), second.labels[:30].max()) < 60


def test_every_mode_that_is_known_against_a_defense_is_met_at_the_end():
    bench = prepare_any(read(RecommendUpdates, None, UPDATES)).open(MemoryRun())
    (dgp,) = [defense for defense in bench.search.defense if str(defense) == "dgp"]
    files = [bench.search.to_invert(attack=bench._list_attacks(dgp, rung)) for rung in range(3)]
    first, whole, last = ([str(attack) for attack in file.attacks] for file in files)
    assert first == ["ig:iterations=2:tv=0.01"] and whole == ["ig:iterations=4:tv=0.01"]
    assert {"ig:adaptive=support:iterations=4:tv=0.01", "ig:adaptive=reapply:iterations=4:tv=0.01", *whole} == set(last)


def test_the_run_file_of_a_defense_attacks_it_and_the_model_is_built(updates, tmp_path):
    folder, result = updates
    config = read(Invert, folder / "recipe.yaml", {})
    assert [str(defense) for defense in config.defense] == [result.recipe] and config.limits.psnr == 100
    assert result.command.startswith("secateur invert")
    assert result.build()(load("digits").inputs[:2]).shape == (2, 10)
    assert main(["recommend", str(folder / "config.yaml"), "--dry-run"]) == 0  # the file says what it searches


def test_a_finished_search_of_updates_repeats_its_rows(updates):
    folder, result = updates
    again = secateur.recommend(folder, updates=True, **UPDATES)
    assert select_comparable(again.rows) == select_comparable(result.rows)
    page = (folder / "report.html").read_text()
    assert "Recipes of the search" in page and "limit 1: it was not measured" not in page and "accuracy_drop" in page


def test_a_federation_is_chosen_by_membership_bytes_and_accuracy(federation):
    _, result = federation
    assert set(result.confirmed) == {"accuracy_drop", "auc", "bytes"}
    assert result.confirmed["bytes"].value <= 0.6 and not result.recipe.startswith("no base pruning, no defense")
    assert {check.measure: str(check.outcome) for check in result.checks}["bytes"] == "within"
    rows = [row for row in result.rows if row.metric == "search_auc"]
    assert len(rows) == 4 and sorted(row.extra["rung"] for row in rows)[-1] == 2
    assert sum(parameter.numel() for parameter in result.build().parameters())


def test_what_is_undefended_loses_nothing_and_is_named_so(updates, federation):
    for result in (updates[1], federation[1]):
        rows = [row for row in result.rows if row.metric == "search_accuracy_drop" and row.defense == "none"]
        plain = [row for row in rows if row.extra["title"] in ("no defense", "no base pruning, no defense")]
        assert [(row.value, row.low, row.high) for row in plain] == [(0.0, 0.0, 0.0)]


def test_the_run_file_of_a_federation_holds_its_terms(federation):
    folder, result = federation
    config = read(Federate, folder / "recipe.yaml", {})
    method = (config.submodels or config.base_pruning)[0]
    assert result.settings["pruning or rule"] == str(method)
    assert result.command.startswith("secateur federate")


def test_pilots_advise_a_width_for_every_client(tmp_path):
    config = read(RecommendFederation, None, FEDERATION)
    run = secateur.runs.folder.Run(tmp_path)
    (tmp_path / "artifacts").mkdir()
    bench = prepare_any(config).open(run)
    assert isinstance(bench, FederationBench)
    terms = {widths: rates for _, rates, widths in bench.open_space().terms}
    assert terms["0.5 of the channels"].count(1.0) == 1 and len(terms["0.5 of the channels"]) == 3
    assert set(terms["the channels that pilots advise"]) <= {0.5, 1.0} and len(terms[""]) == 0


def test_plans_and_what_is_refused():
    assert "on half of the rows" in "".join(plan(read(RecommendUpdates, None, UPDATES)))
    assert "pilots" in "".join(plan(read(RecommendFederation, None, FEDERATION)))
    with pytest.raises(WrongInput, match="cannot be combined with updates"):
        secateur.recommend("x", updates=True, federation=True)
    with pytest.raises(WrongInput, match="needs an attacker"):
        read(RecommendFederation, None, {"membership": "none"})
    with pytest.raises(WrongInput, match="leave it out of a search"):
        read(RecommendUpdates, None, {"local_steps": 2, "defense": "none"})
