"""The search for a recipe on digits, small enough for every test run: one run that all tests here read."""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import yaml

import secateur
from secateur.cli import main
from secateur.config import Recommend, read
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.evaluation import limits
from secateur.evaluation.selection import Assessment
from secateur.experiments import pipeline, recipe_spread
from secateur.experiments import recommend as recommend_job
from secateur.experiments.prune import load_pruned
from secateur.experiments.recipe_evaluation import RecipeBench, split_parts
from secateur.experiments.recipe_search import SHADOWED, Confirmation
from secateur.experiments.recommend import plan
from secateur.metrics.membership import Estimate
from secateur.runs.folder import load_figures, load_finished
from secateur.runs.rows import Row, select_comparable
from secateur.training.aided_trainer import fit_by_losses

pytest.importorskip("optuna")
FIELDS = {
    "examples": 600,
    "train": {"epochs": 2, "patience": None},
    "pruner": ["l1-unstructured", "l1-structured"],
    "sparsity": [0.5, 0.9],
    "defense": ["basic", "ppb"],
    "epochs": [1, 2],
    "learning_rate": [0.001],
    "attack": ["conf", "lira"],
    "shadows": 2,
    "candidates": 5,
    "finalists": 2,
    "max_bytes": 0.5,
    "max_accuracy_drop": 0.9,
    "compare": [{"pruner": "l1-unstructured", "sparsity": 0.5}],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished search, and its answer."""
    folder = tmp_path_factory.mktemp("recommend")
    return folder, secateur.recommend(folder / "run", export=folder / "model", **FIELDS)


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run's folder, to change."""
    return shutil.copytree(run[0] / "run", tmp_path / "run")


def test_the_recipe_is_chosen_on_one_half_and_audited_on_the_other(run):
    folder, result = run
    rows = load_finished(folder / "run")
    audited = {(row.pruner, row.defense) for row in rows if row.metric == "auc"}
    assert audited == {("none", "basic"), (result.settings["pruner"], result.settings["defense"])}
    assert {row.attack for row in rows if row.metric == "auc"} == {"conf", "lira"}
    searched = [row for row in rows if row.metric == "search_auc"]
    assert sorted(row.extra["recipe"] for row in searched) == list(range(5))
    assert sorted(row.extra["rung"] for row in searched) == [0, 0, 1, 2, 2]
    assert (searched[0].pruner, searched[0].sparsity) == ("l1-unstructured", 0.5)  # the user's recipe begins
    assert result.chosen["auc"] != result.confirmed["auc"]
    counts = {row.metric: row.value for row in rows if row.metric in ("members", "nonmembers")}
    data = load("digits").limit_rows(600, torch.Generator())
    config = read(Recommend, None, FIELDS).to_audit()
    parts, (first, second) = split_parts(config, data, 0)
    assert counts == {"members": len(second.train), "nonmembers": len(second.test)}
    for side in ("train", "test"):
        halves = [getattr(half, side).tolist() for half in (first, second)]
        assert not set(halves[0]) & set(halves[1])
        assert sorted(halves[0] + halves[1]) == sorted(getattr(parts["victim"], side).tolist())


def test_originals_and_shadows_are_trained_once(run):
    folder, _ = run
    rows = load_finished(folder / "run")
    stages = {row.extra["work"]: row.extra["stages"] for row in rows if row.metric == "seconds_spent"}
    assert stages["train"] == 1 + 2 * 2  # the victim, two shadows of the search, two fresh ones
    assert all(row.timing for row in rows if row.metric == "seconds_spent")


def test_the_limits_hold_and_the_file_has_the_bytes(run):
    _, result = run
    assert result.settings["pruner"] == "l1-structured" and result.confirmed["bytes"].value <= 0.5
    assert {check.measure: str(check.outcome) for check in result.checks}["bytes"] == "within"
    assert result.sentences[0].startswith("Ship l1-structured")


def test_the_command_makes_the_model_that_was_audited(run, tmp_path, monkeypatch):
    folder, result = run
    monkeypatch.chdir(tmp_path)
    assert main(result.command.split()[1:]) == 0
    rows, exported = load("digits").inputs[:20], load_pruned(folder / "model" / "model.safetensors")
    for net in (load_pruned(tmp_path / "model.safetensors"), result.build()):
        torch.testing.assert_close(net(rows), exported(rows), rtol=0, atol=0)
    assert sum(p.numel() for p in exported.parameters()) < 20_000


def test_a_finished_search_repeats_its_rows_and_a_killed_one_ends_with_the_same(run, copied):
    for name in ("results.jsonl", "groups.jsonl", "figures.jsonl", "search.json"):  # as a kill in the search leaves it
        (copied / name).unlink()
    for stage in sorted((copied / "artifacts").iterdir())[::3]:
        stage.unlink()
    again = secateur.recommend(copied, **FIELDS)
    assert select_comparable(again.rows) == select_comparable(run[1].rows)
    assert again.recipe == run[1].recipe


def test_a_recipe_that_cannot_be_made_ends_no_search(copied, monkeypatch):
    assess = RecipeBench.assess

    def fail(bench, number, recipe, rung):
        if number == 1 or (rung == SHADOWED and number == 0):
            raise WrongInput("model", "the loss became NaN in epoch 1")
        return assess(bench, number, recipe, rung)

    (copied / "search.json").unlink()
    monkeypatch.setattr(RecipeBench, "assess", fail)
    result = secateur.recommend(copied, **FIELDS)
    (failed,) = [row for row in result.rows if row.metric == "search_auc" and row.extra["recipe"] == 1]
    assert failed.value is None and "NaN" in failed.note
    assert "could not be made" in (copied / "report.html").read_text()
    monkeypatch.setattr(RecipeBench, "assess", lambda *arguments: fail(arguments[0], 1, None, 0))
    with pytest.raises(WrongInput, match="no recipe could be made"):
        secateur.recommend(copied, **FIELDS | {"seed": 1})


def test_a_budget_that_is_over_leaves_one_generation_and_one_finalist(copied):
    fields = {name: value for name, value in FIELDS.items() if name != "candidates"} | {"budget": "0.001s"}
    first, again = (secateur.recommend(copied, **fields) for _ in range(2))
    searched = [row for row in first.rows if row.metric == "search_auc"]
    assert sorted(row.extra["rung"] for row in searched) == [0, 0, 1, 1, 2]  # beside the user's recipe
    assert select_comparable(again.rows) == select_comparable(first.rows)
    assert read(Recommend, copied / "config.yaml", {}).budget == 0.001  # a run file that repeats the run


def test_a_known_recipe_stands_beside_the_recommended_one_on_the_same_rows(run):
    _, result = run
    compared = {row.extra["recipe"]: row for row in result.rows if row.metric == "compared_auc"}
    assert sorted(compared) == [-1, next(item.number for item in result.front if item.title == result.recipe)]
    assert (compared[-1].pruner, compared[-1].sparsity, compared[-1].extra["epochs"]) == ("l1-unstructured", 0.5, 1)
    assert result.sentences[-1].startswith("Yours, l1-unstructured 0.5 with basic, at most 1 epochs at 0.001: accuracy")


def test_a_recipe_to_beat_stays_or_a_better_one_stands_beside_it(copied):
    yours = {"pruner": "l1-structured", "sparsity": 0.5}
    fields = FIELDS | {"beat": [yours, yours], "compare": [], "limits": {"decide": "value"}}
    result = secateur.recommend(copied, **fields)
    chosen = {row.metric: row for row in result.rows if row.metric.startswith("search_") and row.extra["recipe"] == 0}
    assert chosen["search_auc"].extra["rung"] == SHADOWED
    for name in ("accuracy_drop", "auc", "bytes"):
        assert result.chosen[name].value <= chosen[f"search_{name}"].value
    said = " ".join(result.sentences)
    assert ("It is yours: no other recipe is shown to beat" in said) is (result.settings["sparsity"] == 0.5)


def test_a_better_recipe_is_held_against_yours_on_rows_that_chose_nothing():
    recipes = [SimpleNamespace(title=f"recipe {number}", labels={"extra": {}}) for number in range(3)]
    results = {0: assess(0, 0.02, 0.7), 1: assess(1, 0.0, 0.6), 2: assess(2, 0.015, 0.5)}
    added, limits = [], {"accuracy_drop": 0.02, "auc": 0.7}
    audited = Confirmation([], [], assess(2, 0.03, 0.5).measures, "prune", None, {}, lambda: None)
    search = SimpleNamespace(config=read(Recommend, None, {}), reference=results[0], recipes=recipes, limits=limits)
    search.finalists, search.chosen = list(results.values()), (1, recipes[1])
    search.bench = SimpleNamespace(run=SimpleNamespace(add=added.extend), confirm=lambda recipe: audited)
    search.measure_rows = lambda used, measures, prefix, **extra: [(used.title, extra)]
    theirs = assess(0, 0.005, 0.7).measures
    sentences, bounds = recommend_job.explain_reference(search, assess(1, 0.01, 0.6).measures, [(recipes[0], theirs)])
    assert bounds == {"accuracy_drop": 0.005, "auc": 0.7}
    assert "recipe 0, on rows that chose nothing: accuracy drop worse, within, AUC better" in sentences[0]
    assert "By value recipe 2" in sentences[1] and added == [("recipe 2", {"recipe": 2, "rung": 2, "rule": "value"})]
    search.reference, search.config = None, read(Recommend, None, {"beat": [{"pruner": "int8", "sparsity": 0.5}]})
    assert "None of yours to beat holds the limits" in recommend_job.explain_reference(search, {}, [])[0][0]


def test_recipes_of_one_generation_are_fine_tuned_together(tmp_path, monkeypatch):
    fits = []

    def watch(net, tasks, recipe, *, losses, **options):
        fits.append(len(tasks))
        return fit_by_losses(net, tasks, recipe, losses=losses, **options)

    monkeypatch.setattr(pipeline, "fit_by_losses", watch)
    fields = FIELDS | {"execution": "stacked", "examples": 200, "candidates": 4, "finalists": 1, "attack": "conf"}
    result = secateur.recommend(tmp_path / "run", **fields | {"compare": [], "epochs": [1], "shadows": 1})
    assert fits and max(fits) > 2
    stages = {row.extra["work"]: row.extra["stages"] for row in result.rows if row.metric == "seconds_spent"}
    assert stages["prune"] == 4 + 1 + 1  # the recipes, whose rungs are equal here, and two shadow models


def test_the_page_shows_the_answer_the_front_and_the_settings(run):
    folder, result = run
    page = (folder / "run" / "report.html").read_text()
    for text in (result.sentences[0].partition(":")[0], "What changed the outcome most", "recipe.yaml", "on the front"):
        assert text in page, text
    (answer,) = [figure for figure in load_figures(folder / "run") if figure["kind"] == "recipe"]
    assert answer["command"] == result.command
    assert yaml.safe_load((folder / "run" / "recipe.yaml").read_text())["remove"] is True


def test_impossible_limits_name_the_limit_and_the_nearest_recipe(copied, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    fields = {name: value for name, value in FIELDS.items() if name != "max_bytes"}
    file.write_text(json.dumps(fields))
    code = main(["recommend", str(file), "--max-bytes", "0.001", "--out", str(copied)])
    said = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "No recipe holds the limit 0.001 on share of the original's bytes: the lowest value is" in said
    assert "The nearest recipe is l1-structured 0.9" in said


def assess(number, drop, auc, rung=SHADOWED):
    ends = {"accuracy_drop": Estimate(drop, drop - 0.01, drop + 0.01), "auc": Estimate(auc, auc - 0.01, auc + 0.01)}
    return Assessment(number, f"recipe {number}", rung, ends)


def test_an_original_that_is_not_trained_out_ends_every_limit():
    config = read(Recommend, None, FIELDS | {"max_accuracy_drop": 0.03})
    chosen = SimpleNamespace(labels={"pruner": "l1-unstructured", "sparsity": 0.6, "defense": "mixed-distil"})
    labels = {"model": "digits-cnn", "dataset": "digits", "seed": 0}
    results = {0: assess(0, 0.009, 0.53), 1: assess(1, -0.12, 0.6, rung=1), 2: assess(2, -0.3, 0.6, rung=0)}
    search = SimpleNamespace(config=config, results=results, limits={"accuracy_drop": 0.03})
    search.bench, search.chosen = SimpleNamespace(labels=labels), (0, chosen)
    drop = Row(**labels, **chosen.labels, metric="accuracy_drop", value=0.01, low=0.0, high=0.02)
    confirmed = Confirmation([drop], [], {}, "prune", config, {}, lambda: None)
    doubted = recommend_job.doubt_original(search, confirmed).rows
    assert "recipe 1 is more accurate by 0.120 [0.110, 0.130]" in doubted[-1].note
    (check,) = limits.check(doubted, limits.policy_of(config.limits))
    assert str(check.outcome) == "inconclusive" and "not trained out" in check.reason
    results[1] = assess(1, -0.03, 0.6, rung=1)
    assert recommend_job.doubt_original(search, confirmed).rows == [drop]


def test_a_broken_limit_names_the_next_recipe_and_what_was_not_audited():
    recipes = [SimpleNamespace(title=f"recipe {number}") for number in range(3)]
    results = {0: assess(0, 0.0, 0.50), 1: assess(1, 0.01, 0.55), 2: assess(2, 0.0, 0.60, rung=1)}
    search = SimpleNamespace(limits={"accuracy_drop": 0.02}, shown=[], chosen=(0, recipes[0]), recipes=recipes)
    search.results, search.finalists = results, [results[0], results[1]]
    compared = [(recipes[0], assess(0, 0.05, 0.5).measures), (recipes[2], assess(2, 0.01, 0.6).measures)]
    following, yours, advice = recommend_job.name_others(search, compared)
    assert following.startswith("Next by the rows that chose is recipe 1") and "not audited" in following
    assert yours == "Of yours, recipe 2 holds the limits on both halves; taking it is a choice by both."
    assert "another seed" in advice
    search.finalists = search.finalists[:1]
    assert recommend_job.name_others(search, compared[:1]) == []


def test_a_recipe_that_leaks_less_by_value_alone_is_named():
    results = {0: assess(0, 0.0, 0.60), 1: assess(1, 0.015, 0.50)}
    search = SimpleNamespace(limits={"accuracy_drop": 0.02}, shown=["accuracy_drop"], results=results)
    search.finalists, search.config = list(results.values()), read(Recommend, None, {})
    search.bench = SimpleNamespace(rungs=["first", "second", "third"])
    said = recommend_job.write_sentences(search, results[0], results[0].measures, above=False)
    assert said[2].startswith("By value recipe 1 leaks less within the limits") and "decide: value" in said[3]
    assert not any("By value" in line for line in recommend_job.write_sentences(search, results[1], {}, above=False))


def test_a_value_above_a_limit_is_not_shipped_where_intervals_do_not_decide(run, copied):
    value = run[1].confirmed["auc"].value
    fields = FIELDS | {"compare": [], "limits": {"auc": value - 0.001, "decide": "high"}}
    result = secateur.recommend(copied, **fields)
    assert str(result.outcome) == "inconclusive" and result.recipe == run[1].recipe
    assert result.sentences[0].startswith("The best recipe of the search is")
    assert "on AUC by value; intervals do not decide" in result.sentences[1]


def test_ray_workers_leave_the_rows_of_a_search_without_them(run, tmp_path, monkeypatch):
    calls = []

    @contextmanager
    def spread_here(config, run, address, prepare):
        """The work of Ray's workers, in this process."""

        def spread(recipes, rung):
            known = recipe_spread.read_stages(run.folder)
            for recipe in recipes:
                recipe_spread.keep_stages(
                    run.folder, recipe_spread.measure_elsewhere(prepare, config, recipe, rung, known)
                )
                calls.append(rung)

        yield spread

    monkeypatch.setattr(recommend_job, "opened_spread", spread_here)
    folder = tmp_path / "run"
    shutil.copytree(run[0] / "run", folder)
    for stage in (folder / "artifacts").glob("prune-*"):
        stage.unlink()
    (folder / "search.json").unlink()
    again = secateur.recommend(folder, address="host:1", **FIELDS)
    assert calls == [1, 0, 0, 0, 0, 1, 1]
    assert select_comparable(again.rows) == select_comparable(run[1].rows)
    with pytest.raises(WrongInput, match="is no stage"):
        recipe_spread.keep_stages(tmp_path, {"../x.safetensors": b""})


def test_the_plan_and_what_is_refused(tmp_path, capsys, hide):
    assert "up to 5 recipes" in "".join(plan(read(Recommend, None, FIELDS)))
    for fields, problem in (
        ({"defense": "dp-sgd-scratch"}, "all recipes share"),
        ({"budget": "soon"}, "a time such as"),
        ({"weights": "w.pt"}, "train: is missing"),
    ):
        with pytest.raises(WrongInput, match=problem):
            read(Recommend, None, fields)
    hide("optuna")
    assert main(["recommend", "--out", str(tmp_path / "run")]) == 2
    assert "optuna: is not installed" in capsys.readouterr().err
