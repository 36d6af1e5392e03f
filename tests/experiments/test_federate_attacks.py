"""Attackers of `secateur federate` by the command line: whom, when, with what, and that a stopped run goes on."""

import json

import pytest

from secateur.cli import main
from secateur.config import Federate, read
from secateur.federated.federation import Federation
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

TINY = ["--model", "lenet-zhu", "--rounds", "4", "--clients", "6", "--per-round", "4", "--local-steps", "1"]
TINY += ["--batch-size", "2", "--evaluate-every", "4", "--set", "examples=200", "--no-images"]
IG = ["--attack", "ig:iterations=2"]


def rows_of(out, *more):
    assert main(["federate", "--out", str(out), *TINY, *more]) == 0
    return load_rows(out)


def test_clients_rounds_and_history(tmp_path, capsys):
    more = [*IG, "--attack-at", "2,4", "--attack-clients", "2", "--attack-history", "2", "--fixed-batches"]
    rows = [row for row in rows_of(tmp_path, *more) if row.metric == "psnr"]
    assert {row.extra["round"] for row in rows} == {2, 4}
    assert [row.extra["attacked"] for row in rows] == [1, 1, 2] * 2
    assert all(row.extra["same_rows"] and row.extra["fixed_batches"] for row in rows)
    assert main(["federate", "--out", str(tmp_path), *TINY, *more, "--dry-run"]) == 0
    assert "in round 2, 4: 2 of a round's clients, its last 2 rounds together" in capsys.readouterr().out


def test_named_clients(tmp_path):
    named = rows_of(tmp_path / "a", *IG, "--attack-every", "1", "--attack-clients", "[2]", "--rounds", "3")
    assert {row.extra["client"] for row in named if row.metric == "psnr"} == {2}
    assert read(Federate, None, {"attack": "ig", "attack_clients": "3,5"}).attack_clients == [3, 5]
    assert read(Federate, None, {"attack": "ig", "attack_clients": "all"}).attack_clients == "all"


def test_membership_and_the_sum(tmp_path):
    rows = rows_of(tmp_path / "a", "--membership", "yeom,lira", "--attack-clients", "all")
    assert {(row.attack, row.metric) for row in rows if row.metric == "auc"} == {("yeom", "auc"), ("lira", "auc")}
    assert len([row for row in rows if row.metric == "advantage"]) == 8
    rows = rows_of(tmp_path / "b", *IG, "--membership", "yeom", "--view", "sum")
    assert {row.extra["client"] for row in rows if row.attack} == {None} and all(r.extra["view"] == "sum" for r in rows)


def test_defenses_are_compared_on_the_same_rows(tmp_path):
    """What is withheld, DGP, and local DP: the same clients and examples, so every defense has the same rows."""
    pytest.importorskip("opacus")
    defenses = ["none", "pseudo-largest", "dgp", "dgp+error-feedback", "dp", "pseudo-largest+dp"]
    more = ["--base-pruning", "snip", "--defense", ",".join(defenses), "--membership", "yeom"]
    rows = rows_of(tmp_path, *IG, *more)
    places = {}
    for row in rows:
        if row.metric in ("psnr", "auc", "test_accuracy", "bytes_up"):
            place = row.metric, row.extra["round"], row.extra["client"]
            places.setdefault(row.defense, set()).add(place)
    assert len(places) == 6 and len({frozenset(each) for each in places.values()}) == 1
    assert {row.defense for row in rows if row.metric == "epsilon"} == {"dp", "pseudo-largest+dp"}
    up = {row.defense: row.value for row in rows if row.metric == "bytes_up" and row.extra["client"] is None}
    assert up["dgp"] < up["pseudo-largest"] < up["none"]


def test_ggl_learns_from_the_test_part(tmp_path, capsys):
    more = ["--attack", "ggl:iterations=2:population=4", "--set", "generator_steps=2", "--set", "generator_width=4"]
    rows = rows_of(tmp_path, *more, "--rounds", "1")
    told = [row for row in rows if row.metric == "psnr"]
    assert len(told) == 1 and "a generator of such pictures" in told[0].extra["knows"]
    assert list((tmp_path / "artifacts").glob("generator*"))


def test_rob_in_a_pruned_federation(tmp_path):
    rows = rows_of(tmp_path, "--attack", "rob:bins=32", "--base-pruning", "snip", "--attack-clients", "2")
    told = [row for row in rows if row.metric == "psnr"]
    assert len(told) == 3 and all(row.extra["active"] for row in told) and told[-1].value > 30
    lost = [row for row in rows if row.metric == "lost_clients"]
    assert [row.value for row in lost] == [2] and "attacker changed" in lost[0].note


@pytest.mark.parametrize("defense", ["random", "pseudo-random"])
def test_rob_fills_weights_that_clients_withhold(tmp_path, defense):
    attacks = "rob:bins=64,rob:bins=64:adaptive=fill"
    rows = rows_of(tmp_path, "--attack", attacks, "--attack-clients", "2", "--defense", defense)
    seen = {row.attack: row.value for row in rows if row.metric == "psnr" and row.extra["client"] is None}
    assert seen["rob:adaptive=fill:bins=64"] > seen["rob:bins=64"] + 10


EVERYTHING = [*IG, "--attack-at", "3,4", "--attack-clients", "2", "--attack-history", "3", "--membership", "yeom,lira"]
EVERYTHING += ["--defense", "dgp+error-feedback"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return select_comparable(rows_of(tmp_path_factory.mktemp("federate") / "whole", *EVERYTHING))


@pytest.mark.parametrize("at", [2, 3, 4])
def test_stopped_anywhere_it_goes_on_with_what_was_remembered(tmp_path, monkeypatch, at, undisturbed):
    monkeypatch.setattr("secateur.federated.checkpoint.EVERY", 0.0)
    whole = Federation.run_round

    def stopping(self, number):
        if number == at:
            raise KeyboardInterrupt
        return whole(self, number)

    monkeypatch.setattr(Federation, "run_round", stopping)
    command = ["federate", "--out", str(tmp_path / "run"), *TINY, *EVERYTHING]
    assert main(command) == 130
    monkeypatch.setattr(Federation, "run_round", whole)
    assert main(command) == 0
    assert select_comparable(load_rows(tmp_path / "run")) == undisturbed


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--attack-clients", "2"], "membership"),
        ([*IG, "--attack-clients", "some"], "how many"),
        ([*IG, "--attack-clients", "0"], "attack_clients"),
        ([*IG, "--attack-clients", "9"], "take part"),
        ([*IG, "--attack-clients", "[9]"], "must be in [0, 5]"),
        ([*IG, "--attack-at", "9"], "4 rounds"),
        ([*IG, "--attack-at", "2", "--attack-every", "2"], "cannot be combined with attack_every"),
        ([*IG, "--view", "total"], "view"),
        ([*IG, "--view", "sum", "--attack-clients", "2"], "no single client"),
        (["--attack", "rob", "--view", "sum"], "shows none"),
        (["--attack", "rob", "--membership", "yeom"], "cannot be combined with rob"),
        (["--membership", "samia"], "yeom"),
        (["--membership", "lira", "--per-round", "2"], "at least 3"),
        (["--defense", "priprune+dgp"], "can be combined only with dp"),
        (["--defense", "dp", "--base-pruning", "prunefl"], "no epsilon"),
        (["--defense", "dp", "--local-steps", "2"], "must be 1"),
        (["--defense", "dp:accountant=prv:noise_multiplier=.3", "--rounds", "100"], "rdp"),
    ],
)
def test_what_cannot_be_attacked_is_refused_before_any_work(tmp_path, capsys, wrong, said):
    assert main(["federate", "--out", str(tmp_path / "run"), *TINY, *wrong]) == 2
    told = capsys.readouterr().err
    assert told.startswith("secateur: ") and said in told and told.count("\n") == 1, told
    assert not (tmp_path / "run").exists()


def test_rows_as_json_carry_what_was_shown(tmp_path, capsys):
    assert main(["federate", "--out", str(tmp_path), *TINY, *IG, "--view", "sum", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["metric"] == "psnr"]
    assert [row["batch_size"] for row in rows] == [8] and "sum of 4 clients" in rows[0]["knows"]
