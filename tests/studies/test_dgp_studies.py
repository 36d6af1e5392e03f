"""Studies of dgp: a table follows from its rows by hand; tiny ones run from the command line to their tables."""

import json
from dataclasses import replace

import pytest
import torch

from secateur import catalogue
from secateur.cli import main
from secateur.errors import WrongInput
from secateur.experiments.invert import ClientExposure
from secateur.runs.folder import load_figures, load_rows
from secateur.runs.rows import Row, select_comparable
from secateur.studies.dgp import OPTIONAL, PARTS, cost, extensions, merge_steps, tables, theory
from secateur.studies.dgp.extensions import broadcast_lines, guess_label, judge_broadcast
from secateur.studies.dgp.results import AttackKey, DgpResults
from secateur.studies.dgp.steps import Step, attack_texts
from secateur.studies.study import STRONGEST, read_scales, scale_of, select_steps
from secateur.studies.table import find_printed

NARROW = 0.001
SCALES = read_scales("dgp")


def row(metric, value, defense="none", model="resnet18", attack=None, dataset="cifar10", seed=0, **extra):
    ends = {"low": value - NARROW, "high": value + NARROW}
    own = {"model": model, "dataset": dataset, "defense": defense, "attack": attack, "seed": seed}
    return Row(**own, metric=metric, value=value, **ends, extra=extra)


def attacked(attack, defense, lpips, cw_ssim, adaptive=None, **extra):
    """What an attack on all targets comes to; a higher CW-SSIM goes with a higher PSNR."""
    name = {"gi": "gi-dgp-paper"}.get(attack, attack) + (f":adaptive={adaptive}" if adaptive else "") + ":iterations=9"
    labels = {"target": None, "batch_size": 1, "labels": "inferred", "stage": "untrained"} | extra
    values = {"lpips": lpips, "cw_ssim": cw_ssim, "psnr": 30 * cw_ssim, "label_accuracy": 1.0}
    return [row(metric, value, defense, attack=name, **labels) for metric, value in values.items()]


def trained(defense, *accuracies, model="resnet18", dataset="cifar10"):
    """A training with these accuracies over its epochs."""
    labels = {"study": "training", "epochs": len(accuracies)}
    rows = [
        row("test_accuracy", value, defense, model, dataset=dataset, epoch=epoch, **labels)
        for epoch, value in enumerate(accuracies, start=1)
    ]
    return [*rows, row("ratio", 0.6, defense, model, dataset=dataset, epoch=len(accuracies), **labels)]


def said(findings, *words):
    (found,) = [finding for finding in findings if all(word in finding.claim for word in words)]
    return found.verdict


# Numbers -------------------------------------------------------------------------------------------------------
def test_table_1_as_the_paper_prints_it():
    table = find_printed("dgp", "table_1")
    rows = [row for attack in table.values() if isinstance(attack, dict) for row in attack.values()]
    assert len(rows) == 10 and all(len(row) == 9 for row in rows)
    assert table["ig"]["cw_ssim"]["dgp"] == 0.287 and table["rob"]["lpips"]["outpost"] == 0.295
    assert table["r-gap"]["lpips"]["precode"] is None
    accuracy = [find_printed("dgp", "table_1_accuracy", name) for name in ("noise", "soteria", "dgp")]
    assert accuracy == [0.7601, 0.9290, 0.9340]
    assert find_printed("dgp", "table_5_6", "cifar100", "ig", "dgp", "lenet-zhu") == [0.3163, 0.3781]
    assert find_printed("dgp", "table_9", "ig") is None and find_printed("dgp", "table_2", "rob", 0.06, 0.9) == [
        0.531,
        0.029,
    ]


# Attackers -----------------------------------------------------------------------------------------------------
def test_each_defense_meets_the_attackers_it_is_weak_against():
    tiny = SCALES["tiny"]
    assert list(attack_texts("ig", "none", tiny)) == [f"ig:iterations={tiny.iterations}"]
    known = list(attack_texts("gi", "dgp", tiny))
    assert [text.partition("adaptive=")[2] for text in known] == ["", "support", "reapply"]
    assert all(text.startswith("gi-dgp-paper:") for text in known)
    assert list(attack_texts("rob", "dgp", tiny)) == ["rob", "rob:adaptive=support"]  # there is no trial to compress
    assert list(attack_texts("rob", "soteria", tiny)) == ["rob"]
    fed_back = list(attack_texts("ig", "top-k+error-feedback", tiny))
    assert fed_back[-1].endswith(":adaptive=support:follows=true") and len(fed_back) == 4
    assert all("follows" not in text for text in attack_texts("rob", "dgp+error-feedback", tiny))  # it cannot
    assert list(attack_texts("r-gap", "soteria", tiny)) == ["r-gap", "r-gap:adaptive=layer"]
    assert list(attack_texts("r-gap", "outpost", tiny)) == ["r-gap", "r-gap:adaptive=mask", "r-gap:adaptive=support"]


# Tables --------------------------------------------------------------------------------------------------------
def test_plain_and_knowing_attackers_stand_side_by_side():
    rows = attacked("ig", "none", 0.01, 0.95) + attacked("ig", "dgp", 0.32, 0.30)
    rows += attacked("ig", "dgp", 0.30, 0.35, "support") + attacked("ig", "dgp", 0.05, 0.80, "reapply")
    lines, findings = tables.fig3(DgpResults(rows))
    bare, dgp = lines
    assert (bare.cells["adaptive"], dgp.cells["adaptive"]) == ("", "reapply")  # the one that comes nearest
    assert dgp.cells["lpips"].value == 0.32 and dgp.cells["adaptive lpips"].value == 0.05
    assert dgp.paper == "LPIPS 0.316, SSIM 0.287" and dgp.mark == tables.PLAIN_ONLY
    assert said(findings, "DGP protects under every attack") == "supported"
    assert said(findings, "dgp hides as much from an attacker who knows") == "not supported"
    assert said(findings, "fail under Rob") == "undecided"  # not measured


def test_one_seed_is_compared_picture_by_picture():
    rows = attacked("ig", "none", 0.2, 0.9) + attacked("ig", "dgp", 0.4, 0.9)
    for defense, scores in {"none": (0.1, 0.3, 0.2), "dgp": (0.25, 0.55, 0.4)}.items():
        for target, value in enumerate(scores):
            labels = {"batch_size": 1, "labels": "inferred", "stage": "untrained", "target": target, "item": 0}
            rows.append(row("lpips", value, defense, attack="ig:iterations=9", **labels))
    found = DgpResults(rows)
    bare, dgp = found.clients
    apart = found.less(dgp, bare, "lpips")  # .15 .25 .2: mean .2, deviation .05, t(2) = 4.3027
    assert apart.value == pytest.approx(0.2) and apart.high - 0.2 == pytest.approx(4.3027 * 0.05 / 3**0.5, rel=1e-4)
    assert found.less(dgp, bare, "cw_ssim").value == 0.0  # no pictures of these: by their means


def strongest(study, rows):
    """The findings of a study's table that ask of the strongest attackers, by key, and all of its findings."""
    _, findings = catalogue.find("study", study).make().tabulate(DgpResults(rows))
    return {found.key.removesuffix(STRONGEST): found for found in findings if found.key.endswith(STRONGEST)}, findings


def test_the_strongest_attacker_is_picked_by_each_measure_of_hiding():
    rows = attacked("ig", "none", 0.0, 0.9) + attacked("ig", "dgp", 0.5, 0.2)
    rows += attacked("ig", "dgp", 0.2, 0.3, "support") + attacked("ig", "dgp", 0.4, 0.6, "reapply")
    rows += attacked("ig", "dgp", 0.6, 0.1, "layer")
    plain = DgpResults(rows)
    informed = plain.under_strongest()
    bare, dgp = informed.clients
    assert informed.pick_attacker(dgp, "lpips").adaptive == "support"  # .2: the lowest LPIPS
    assert informed.pick_attacker(dgp, "cw_ssim").adaptive == "reapply"  # .6: the highest CW-SSIM
    assert informed.pick_attacker(bare, "lpips") == bare == plain.pick_attacker(bare, "lpips")
    assert plain.pick_attacker(dgp, "cw_ssim") == dgp
    assert informed.best_adaptive(dgp).adaptive == "reapply"
    assert [case.value for case in plain.differences(dgp, bare)] == pytest.approx([0.5, 0.7])
    assert [case.value for case in informed.differences(dgp, bare)] == pytest.approx([0.2, 0.3])
    assert DgpResults(attacked("ig", "none", 0.0, 0.9) + attacked("ig", "dgp", 0.5, 0.2)).under_strongest() is None
    again = [replace(x, seed=1) for x in rows if "reapply" not in x.attack]  # reapply has one seed of two
    assert DgpResults(rows + again).under_strongest().pick_attacker(dgp, "cw_ssim").adaptive == "support"


def test_what_met_no_attacker_who_knows_of_it_has_no_strongest():
    rows = attacked("ig", "none", 0.0, 0.9) + attacked("ig", "noise", 0.5, 0.2) + attacked("ig", "top-k", 0.2, 0.6)
    rows += attacked("ig", "dgp", 0.5, 0.2) + attacked("ig", "dgp", 0.3, 0.5, "support")
    found = DgpResults(rows).under_strongest()
    bare, noise, top_k, dgp = found.clients
    assert found.pick_attacker(top_k, "cw_ssim") is None and found.less(top_k, bare, "cw_ssim") is None
    assert found.pick_attacker(noise, "cw_ssim") == noise  # nobody knows better
    assert found.contrast(dgp, bare, case="ig")["ig"].value == pytest.approx(0.3)
    asked, findings = strongest("dgp-table1", rows)
    assert asked["recovery.passive"].measured == "not measured here"
    assert next(x for x in findings if x.key == "recovery.passive").verdict == "supported"


# ig-smooth in the place of IG -----------------------------------------------------------------------------------
def searched(defense, plain, smooth, mode=None, seeds=(0,), smooth_seeds=None):
    """IG and ig-smooth on a client, by their CW-SSIM; LPIPS is what lacks to .9."""
    both = {"ig": (plain, seeds), "ig-smooth": (smooth, seeds if smooth_seeds is None else smooth_seeds)}
    rows = {name: attacked(name, defense, 0.9 - value, value, mode) for name, (value, _) in both.items()}
    return [replace(row, seed=seed) for name, (_, seeds) in both.items() for seed in seeds for row in rows[name]]


def line_of(rows, defense="dgp"):
    lines, _ = tables.fig3(DgpResults(rows))
    (line,) = [line for line in lines if line.labels["defense"] == defense]
    return line


def test_ig_smooth_stands_beside_the_papers_attacker():
    rows = searched("none", 0.5, 0.7) + searched("noise", 0.4, 0.405) + searched("dgp", 0.2, 0.3)
    assert [line_of(rows, name).cells["adaptive"] for name in ("none", "noise", "dgp")] == ["ig-smooth"] * 3
    assert [line_of(rows, name).mark for name in ("none", "noise", "dgp")] == ["ig-smooth sees more", "", tables.UNMET]
    rows += searched("dgp", 0.25, 0.6, "support")
    line = line_of(rows)
    assert (line.labels["attack"], line.cells["cw_ssim"].value, line.paper) == ("ig", 0.2, "LPIPS 0.316, SSIM 0.287")
    assert (line.cells["adaptive"], line.cells["adaptive cw_ssim"].value) == ("ig-smooth, support", 0.6)
    assert line.mark == "who knows of the defense sees more"
    assert line_of(rows + attacked("ig", "dgp", 0.2, 0.7, "reapply")).cells["adaptive"] == "reapply"
    better = rows[:-8] + searched("dgp", 0.25, 0.28, "support")  # who knows sees less than who searches better
    assert (line_of(better).cells["adaptive"], line_of(better).mark) == ("ig-smooth", "ig-smooth sees more")
    alone = line_of([row for row in rows if "ig-smooth" in row.attack])
    assert alone.cells["cw_ssim"] is None and alone.cells["adaptive"] == "ig-smooth, support"


def test_the_strongest_may_be_ig_smooth_that_knows_of_the_defense():
    rows = searched("none", 0.5, 0.8) + searched("dgp", 0.2, 0.3) + searched("dgp", 0.25, 0.6, "support")
    found = DgpResults(rows).under_strongest()
    bare, dgp = found.clients
    assert found.pick_attacker(dgp, "cw_ssim").adaptive == "ig-smooth, support"
    assert found.pick_attacker(dgp, "cw_ssim", smooth=False).adaptive == "support"
    assert found.less(bare, dgp, "cw_ssim").value == pytest.approx(0.8 - 0.6)
    unmet = DgpResults(searched("none", 0.5, 0.8) + searched("dgp", 0.2, 0.3)).under_strongest()
    assert unmet.pick_attacker(dgp, "cw_ssim") is None, "nobody who knows of it"
    assert DgpResults(searched("none", 0.5, 0.8)).under_strongest() is not None


SEEDS = (0, 1, 2)


@pytest.mark.parametrize(
    ("bare", "plain", "support", "expected"),
    [
        (SEEDS, SEEDS, SEEDS, 0.8 - 0.6),
        ((), SEEDS, SEEDS, 0.5 - 0.25),  # the undefended client did not meet it
        (SEEDS, (), (), 0.5 - 0.25),  # the defended one did not
        (SEEDS, SEEDS, (), 0.5 - 0.25),  # or not in a mode in which it met IG
        (SEEDS, SEEDS, SEEDS[:2], 0.5 - 0.25),  # or not on every seed
        (SEEDS[1:], SEEDS, SEEDS, 0.5 - 0.25),
    ],
)
def test_ig_smooth_counts_where_both_clients_met_it_in_all_modes_and_seeds(bare, plain, support, expected):
    rows = searched("none", 0.5, 0.8, None, SEEDS, bare) + searched("dgp", 0.2, 0.3, None, SEEDS, plain)
    found = DgpResults(rows + searched("dgp", 0.25, 0.6, "support", SEEDS, support)).under_strongest()
    undefended, dgp = (found.one(defense=name) for name in ("none", "dgp"))
    for one, other, sign in ((undefended, dgp, 1), (dgp, undefended, -1)):
        assert found.less(one, other, "cw_ssim").value == pytest.approx(sign * expected)


def test_the_same_attack_is_compared_with_who_knows_of_the_defense():
    rows = searched("dgp", 0.2, 0.5) + searched("dgp", 0.2, 0.8, "support")
    _, findings = tables.fig3(DgpResults(rows))
    assert said(findings, "dgp hides as much from an attacker who knows") == "supported"  # support sees as much as IG
    _, findings = tables.fig3(DgpResults(searched("dgp", 0.2, 0.5)))
    assert not [finding for finding in findings if "who knows" in finding.claim]


def test_ig_smooth_is_held_against_ig_by_the_best_of_the_same_modes():
    words = "ig-smooth recovers more than IG"
    rows = searched("none", 0.5, 0.8) + searched("dgp", 0.2, 0.3) + searched("dgp", 0.6, 0.4, "support")
    _, findings = tables.fig3(DgpResults(rows))
    (found,) = [finding for finding in findings if words in finding.claim]
    assert found.measured == "1 of 2, 1 against; mean 0.050"  # .8 - .5 and .4 - .6
    none, dgp = rows[:8], rows[8:]
    assert said(tables.fig3(DgpResults(none))[1], words) == "supported"
    assert said(tables.fig3(DgpResults(dgp))[1], words) == "not supported"
    assert said(tables.table2(DgpResults(none))[1], words) == said(tables.fig2(DgpResults(none))[1], words)
    for fewer in (dgp[:-4], [row for row in dgp if "ig-smooth" not in row.attack], rows[:4]):  # a mode or all is unmet
        assert not [finding for finding in tables.fig3(DgpResults(fewer))[1] if words in finding.claim]


def test_each_defense_is_held_against_the_strongest_ig():
    words = "hides from the strongest IG"
    rows = searched("none", 0.5, 0.7) + searched("noise", 0.3, 0.6) + searched("dgp", 0.2, 0.3)
    _, findings = tables.fig3(DgpResults(rows))
    assert said(findings, f"noise {words}") == "supported"  # .6 against .7
    assert not [finding for finding in findings if f"dgp {words}" in finding.claim], "nobody who knows of it"
    for smooth, verdict in ((0.65, "supported"), (0.75, "not supported")):  # as much is found by IG alone: .4
        _, findings = tables.fig3(DgpResults(rows + searched("dgp", 0.4, smooth, "support")))
        assert said(findings, f"dgp {words}") == verdict
    plain = attacked("ig", "none", 0.0, 0.9) + attacked("ig", "noise", 0.5, 0.2)
    assert not [finding for finding in tables.fig3(DgpResults(plain))[1] if words in finding.claim]


def test_claims_to_hide_are_asked_again_of_the_strongest():
    rows = attacked("ig", "none", 0.0, 0.9) + attacked("ig", "dgp", 0.5, 0.2) + attacked("ig", "soteria", 0.5, 0.2)
    rows += attacked("ig", "dgp", 0.2, 0.6, "support") + attacked("ig", "soteria", 0.01, 0.89, "layer")
    asked, findings = strongest("dgp-table1", rows)
    assert asked.keys() >= {f"recovery.{name}" for name in ("dgp", "rob", "unrecognisable", "passive", "r_gap")}
    assert asked["recovery.dgp"].verdict == "supported" and "0.200" in asked["recovery.dgp"].measured
    assert asked["recovery.unrecognisable"].verdict == "not supported"  # .01 of LPIPS
    (plain,) = (found for found in findings if found.key == "recovery.unrecognisable")
    assert plain.verdict == "supported" and asked["recovery.unrecognisable"].claim.endswith(plain.claim)
    assert not {"recovery.open", "adaptive.hides"} & asked.keys()  # no claim that something is hidden


def test_steps_of_the_strongest_lead_over_settings_that_met_none():
    ratios = {(0.05, 0.75): (0.3, 0.6), (0.1, 0.7): (0.29, None), (0.2, 0.6): (0.28, 0.45)}
    rows = []
    for (k1, k2), (plain, informed) in ratios.items():
        rows += attacked("ig", f"dgp:k1={k1}:k2={k2}", 0.9 - plain, plain)
        rows += attacked("ig", f"dgp:k1={k1}:k2={k2}", 0.9 - informed, informed, "support") if informed else []
    some = attacked("ig-smooth", "dgp:k1=0.05:k2=0.75", 0.1, 0.8)  # of one setting alone, so it counts for none
    some += attacked("ig-smooth", "dgp:k1=0.1:k2=0.7", 0.1, 0.8)  # it does not know of the defense either
    for every in (rows, rows + some):
        asked, _ = strongest("dgp-table2", every)
        assert asked["table2.ratio"].measured == "0.0667 to 0.333: 0.150 [0.149, 0.151]"
        assert asked["table2.ratio"].verdict == "supported"


def test_labels_are_counted_under_the_strongest_too():
    rows = [x for x in attacked("ggl", "dgp", 0.5, 0.2) if x.metric != "label_accuracy"]
    rows.append(replace(rows[0], metric="label_accuracy", value=0.1, low=0.1, high=0.1))
    asked, findings = strongest("dgp-fig5", rows + attacked("ggl", "dgp", 0.5, 0.2, "support"))
    assert next(x for x in findings if x.key == "labels.right").verdict == "supported"  # .1
    assert asked["labels.right"].verdict == "not supported"  # 1.0


def test_figure_2_asks_of_updates_whose_labels_are_inferred():
    rows = attacked("ig", "top-k", 0.1, 0.5) + attacked("ig", "dgp", 0.4, 0.2)
    rows += attacked("ig", "top-k", 0.1, 0.5, labels="oracle") + attacked("ig", "dgp", 0.4, 0.2, labels="oracle")
    rows += attacked("ig", "top-k", 0.1, 0.5, "support") + attacked("ig", "dgp", 0.1, 0.5, "support")
    asked, findings = strongest("dgp-fig2", rows)
    assert findings[0].measured.startswith("ig: 0.300") and findings[0].verdict == "supported"
    assert asked["fig2.hidden"].measured.startswith("ig: 0.000") and asked["fig2.hidden"].verdict != "supported"


def test_a_claim_against_the_strongest_stands_in_the_table_of_reproduce(tmp_path, capsys):
    small = ["--set", "steps=ig", "--set", "defenses=none,dgp", "--set", "targets=1", "--set", "iterations=2"]
    out = ["--set", "examples=80", "--scale", "tiny", "--out", str(tmp_path / "fig2")]
    assert main(["reproduce", "dgp-table1", *small, *out]) == 0
    table = (tmp_path / "fig2" / "table.md").read_text()
    assert "ours, from the strongest attacker met: DGP protects under every attack" in table


def test_ats_is_compared_with_both_pictures():
    rows = attacked("ig", "ats", 0.001, 0.98, against="used") + attacked("ig", "ats", 0.11, 0.57, against="raw")
    lines, _ = tables.fig3(DgpResults(rows))
    assert [line.labels["defense"] for line in lines] == ["ats (used pictures)", "ats (raw pictures)"]
    assert [line.paper for line in lines] == ["LPIPS 0.00045, SSIM 0.981", "LPIPS 0.108, SSIM 0.566"]


def test_without_lpips_the_claims_are_held_by_cw_ssim_alone():
    rows = attacked("ig", "none", 0.0, 0.9) + attacked("ig", "dgp", 0.0, 0.3)
    _, findings = tables.fig3(DgpResults([x for x in rows if x.metric != "lpips"]))
    claim = "DGP protects under every attack: CW-SSIM (LPIPS not measured) at least 0.1"
    assert said(findings, claim) == "supported"
    _, findings = tables.fig3(DgpResults(rows))
    assert said(findings, "DGP protects under every attack: LPIPS and CW-SSIM at least 0.1") == "not supported"


def test_lpips_and_cw_ssim_of_the_same_pictures_are_one_case():
    rows = attacked("ig", "none", 0.0, 0.9) + attacked("ig", "dgp", 0.3, 0.85)
    found = DgpResults(rows)
    bare, dgp = found.clients
    (case,) = found.contrast(dgp, bare, case="ig").values()
    assert case.value == pytest.approx(0.05)  # of CW-SSIM; LPIPS differs by .3
    _, findings = tables.fig3(found)
    assert said(findings, "DGP protects under every attack") == "not supported"


def test_the_settings_of_dgp_step_by_step():
    rob = {"attack": "rob", "batch_size": 9}
    rows = []
    for (k1, k2), lpips in {(0.03, 0.45): 0.4, (0.05, 0.75): 0.5, (0.06, 0.9): 0.55}.items():
        rows += attacked(defense=f"dgp:k1={k1}:k2={k2}", lpips=lpips, cw_ssim=0.6 - lpips, **rob)
    for (k1, k2), lpips in {(0.03, 0.45): 0.3, (0.05, 0.75): 0.2, (0.06, 0.9): 0.1}.items():
        rows += attacked(defense=f"dgp:k1={k1}:k2={k2}", lpips=lpips, cw_ssim=0.6 - lpips, adaptive="support", **rob)
    for (k1, k2), lpips in {(0.05, 0.75): 0.3, (0.1, 0.7): 0.25, (0.2, 0.6): 0.2}.items():
        rows += attacked("ig", f"dgp:k1={k1}:k2={k2}", lpips, 0.6 - lpips)
    for defense, accuracy in {
        "dgp:k1=0.05:k2=0.75": 0.93,
        "dgp:k1=0.06:k2=0.9": 0.92,
        "dgp:k1=0.2:k2=0.6": 0.9,
    }.items():
        rows += trained(f"{defense}+error-feedback", 0.5, accuracy)
    lines, findings = tables.table2(DgpResults(rows))
    assert said(findings, "k1 + k2", "against Rob") == "supported"
    assert said(findings, "k1 + k2", "knows of it") == "not supported"
    assert said(findings, "p = k1 / k2", "IG") == "not supported"
    assert said(findings, "cost accuracy") == "supported"
    assert [line.paper for line in lines][:1] == ["LPIPS 0.426, SSIM 0.146"] and lines[-1].paper == "92.82%"


@pytest.mark.parametrize(("last", "verdict"), [(0.5001, "undecided"), (0.49, "not supported"), (0.55, "supported")])
def test_most_steps_are_not_every_step(last, verdict):
    rows = []
    for (k1, k2), lpips in {(0.03, 0.45): 0.3, (0.04, 0.6): 0.4, (0.05, 0.75): 0.5, (0.06, 0.9): last}.items():
        rows += attacked("rob", f"dgp:k1={k1}:k2={k2}", lpips, 0.6 - lpips, batch_size=9)
    _, found = tables.table2(DgpResults(rows))
    assert said(found, "Rob, at every step") == verdict
    assert said(found, "IG, at every step") == "undecided"  # not measured


def test_the_last_epoch_is_the_final_accuracy():
    rows = trained("none", 0.5, 0.93) + trained("top-k+error-feedback", 0.4, 0.93)
    rows += trained("dgp+error-feedback", 0.4, 0.925) + trained("noise", 0.3, 0.7)
    lines, findings = tables.table1(DgpResults(rows))
    assert [line.cells["test_accuracy"].value for line in lines] == [0.93, 0.93, 0.925, 0.7]
    assert lines[0].cells["over_epochs"] == "▅█" and lines[2].paper == "93.40%"
    assert said(findings, "all but noise train as well") == said(findings, "noise performs worst") == "supported"


def test_error_feedback_and_alignment():
    rows = trained("none", 0.9) + trained("dgp+error-feedback", 0.895) + trained("dgp", 0.4)
    rows += trained("adgp+error-feedback", 0.8)
    _, findings = tables.fig4(DgpResults(rows))
    assert said(findings, "close to the baseline") == said(findings, "without error feedback") == "supported"
    assert said(findings, "ADGP keeps") == "not supported"
    rows = trained("top-k:keep=0.05+error-feedback", 0.7, dataset="cifar100")
    lines, findings = tables.table7(DgpResults(rows + trained("dgp+error-feedback", 0.74, dataset="cifar100")))
    assert findings[0].verdict == "supported" and [line.paper for line in lines] == ["73.68%", "74.04%"]


def test_seeds_are_gathered_and_clients_told_apart():
    rows = attacked("rob", "none", 0.1, 0.9, batch_size=4) + attacked("rob", "none", 0.2, 0.8, batch_size=9)
    found = DgpResults(rows)
    assert [(cell.batch_size, found.of(cell, "lpips")[0].value) for cell in found.cells] == [(4, 0.1), (9, 0.2)]
    lines, _ = tables.gallery(found)
    assert [line.labels["batch_size"] for line in lines] == ["4", "9"]
    assert isinstance(next(iter(found.cells)), AttackKey)


def test_bytes_beside_the_papers():
    rows, pruned = [], {"top-k": 0.61, "outpost": 0.615}
    for model, sizes in {"resnet18": {"dgp": 0.61, "adgp": 0.33, **pruned}, "cnn6": {"dgp": 0.62, "adgp": 0.3}}.items():
        for defense, ratio in sizes.items():
            values = {"bytes": ratio * 2**20, "ratio": ratio, "paper_ratio": 0.6125}
            rows += [row(metric, value, defense, model, study="cost") for metric, value in values.items()]
    lines, findings = cost.table3(DgpResults(rows))
    assert [line.paper for line in lines] == ["52.216 MB", "27.174 MB", "52.216 MB", "", "0.721 MB", "0.375 MB"]
    assert lines[0].cells["MB"].value == pytest.approx(0.61)
    assert said(findings, "encoded", "dgp 0.6125, adgp 0.3188") == "not supported"  # .33 is above 27.174 / 85.251
    assert said(findings, "counted as the paper counts") == "not supported"  # nor is .6125 ADGP's share
    assert said(findings, "Outpost sends as much") == "supported"  # .615 against .61
    assert said(findings, "ADGP sends less") == "supported"
    seconds = [row("defense_seconds", x, d, study="cost") for d, x in {"soteria": 9.0, "dgp": 0.5}.items()]
    seconds += [row("user_seconds", 12.0, "soteria", study="cost")]
    lines, findings = cost.table4(DgpResults(seconds))
    assert lines[0].paper == "862.567 s" and findings[0].verdict == "supported"
    assert [lines[0].cells[title].value for title in ("seconds an epoch", "with the gradients")] == [9.0, 12.0]


STEPS = {"none": (0.0, 40.0), "top-k": (0.2, 30.0), "dgp": (0.8, 11.0), "noise": (1.0, 5.0)}  # distance and PSNR


def distanced(defense, targets, broken=0.0):
    """Some targets under a defense, each a little unlike the others."""
    distance, psnr = STEPS[defense.partition(":")[0]]
    rows = attacked("ig", defense, 0.3, 0.3)
    for number in range(targets):
        values = {"relative_distance": distance, "error": 1.0, "bound": 0.5, "bound_by_sent": 2.0}
        values |= {"violated": broken, "violated_by_sent": 1.0, "fitted": 0.1, "reached": 0.1 * number}
        rows += [row(metric, value, defense, study="theory", number=number) for metric, value in values.items()]
        shifted = psnr + number * (1 if distance else 3)
        rows.append(row("psnr", shifted, defense, attack="ig:iterations=9", target=number, item=0))
    return rows


def test_quality_by_distance():
    lines, findings = theory.fig1(DgpResults([x for defense in STEPS for x in distanced(defense, 5)]))
    line = lines[2]
    assert line.cells["relative distance"].value == pytest.approx(0.8)
    assert line.cells["Eq. 2 broken"].value == 0.0
    assert line.cells["epsilon"].value == pytest.approx(0.3)  # the 4th of 5 trials at delta .2
    assert line.cells["Theorem 1 prints"] == "0.820"  # .1 + .9 * .8
    assert said(findings, "worse reconstruction") == "supported"  # -psnr rises with the distance
    assert said(findings, "Eq. 2") == "undecided"  # 0 of 5 targets may still be more than 5 %
    assert said(findings, "with what was sent") == "not supported"


def test_the_distances_of_ig_stand_beside_its_own_pictures():
    rows = [x for defense in STEPS for x in distanced(defense, 5)]
    smooth = [replace(x, attack="ig-smooth", value=60.0) for x in rows if x.metric == "psnr"]
    once, again = (theory.fig1(DgpResults(every))[1][0] for every in (rows, rows + smooth))
    assert once.measured == again.measured != "not measured here"


def test_more_defenses_of_the_same_targets_narrow_no_interval():
    few = [x for defense in ("none", "top-k", "dgp", "noise") for x in distanced(defense, 5)]
    again = [x for defense in STEPS for n in range(8) for x in distanced(f"{defense}:again={n}", 5)]
    once, often = (theory.fig1(DgpResults(rows))[1] for rows in (few, again))
    for words in (("worse reconstruction",), ("Eq. 2",), ("with what was sent",)):
        first, second = (next(x for x in found if all(w in x.claim for w in words)) for found in (once, often))
        assert first.measured == second.measured, words
    assert said(often, "Eq. 2") == "undecided"  # 160 reconstructions of 5 pictures are 5 pictures


def test_an_empty_and_a_trained_residual():
    given = {"stage": "weights given"}
    rows = attacked("ig", "dgp", 0.2, 0.5, **given) + attacked("ig", "dgp+error-feedback", 0.4, 0.2, **given)
    for defense, held in {"dgp+error-feedback": 9.0, "top-k+error-feedback": 1.0}.items():
        rows += trained(defense, 0.9)
        values = {"residual_mean": held, "error_norm": held, "gamma_1_whole": 0.5, "gradient_square": 4.0}
        values |= {"never_sent": 5.0, "entries": 100.0}
        labels = {"study": "training", "epochs": 1, "epoch": 1}
        rows += [row(metric, value, defense, **labels) for metric, value in values.items()]
    lines, findings = extensions.residual(DgpResults(rows))
    assert said(findings, "a residual from training hides more") == "supported"
    assert said(findings, "holds back more under DGP") == "supported"
    held = next(line for line in lines if line.part == extensions.HELD)
    assert held.cells["mean residual, squared norm"].value == 81.0
    assert held.cells["share never sent"].value == pytest.approx(0.05)
    # Eq. 3: 3 gamma (2 + gamma) / (2 (1 - gamma)^2) G^2 = 3 * .5 * 2.5 / .5 * 4
    assert held.cells["Lemma 1 says at most"] == "30"


def test_adgp_is_held_against_dgp():
    rows = attacked("ig", "dgp", 0.3, 0.3) + attacked("ig", "adgp", 0.1, 0.6)
    rows += trained("dgp+error-feedback", 0.9) + trained("adgp+error-feedback", 0.85)
    rows += trained("adgp+error-feedback (user 0 broadcasts nothing)", 0.84)
    _, findings = extensions.align(DgpResults(rows))
    assert said(findings, "ADGP hides as much as DGP") == said(findings, "ADGP is as accurate") == "not supported"
    assert said(findings, "one user that lies") == "undecided"  # 1 point, with its interval


def test_membership_by_defense():
    rows = []
    for defense, auc in {"none": 0.7, "dgp+error-feedback": 0.71, "noise": 0.55}.items():
        rows.append(row("test_accuracy", 0.8, defense))
        rows += [row("auc", auc, defense, attack=attack) for attack in ("conf", "mentr")]
    lines, findings = extensions.membership(DgpResults(rows))
    assert len(lines) == 3 * 2 and lines[0].cells["test_accuracy"].value == 0.8
    assert said(findings, "noise hides members too") == "supported"
    assert said(findings, "dgp+error-feedback hides members too") == "not supported"


def test_an_attack_that_guesses_without_a_defense_says_nothing_of_one():
    rows = []
    for defense, aucs in {"none": (0.7, 0.5, 0.5005), "noise": (0.6, 0.5, 0.52)}.items():
        rows += [
            row("auc", auc, defense, attack=name) for name, auc in zip(("conf", "rmia", "lira"), aucs, strict=True)
        ]
    _, (found,) = extensions.membership(DgpResults(rows))
    assert found.verdict == "supported"  # conf alone: .7 to .6
    left_out = "left out, not clearly above 0.5 without a defense: rmia, lira"
    assert found.measured.startswith("conf: 0.100") and found.measured.endswith(f"; {left_out}")
    _, (found,) = extensions.membership(DgpResults([x for x in rows if x.attack != "conf"]))
    assert (found.verdict, found.measured) == ("undecided", left_out)


# Settings ------------------------------------------------------------------------------------------------------
def test_full_is_the_papers_setting():
    full = SCALES["full"]
    assert (full.targets, full.iterations, full.users, full.epochs, full.examples) == (20, 2500, 10, None, None)
    assert full.models["resnet18"] == "resnet18" and full.data["cifar100"] == "cifar100"
    assert scale_of("dgp", "tiny", ["targets=1", "learning_rate=0.2"]).targets == 1
    assert scale_of("dgp", "tiny", ["learning_rate=2e-1", "augment=true", "in_out=0"]).learning_rate == 0.2


def test_every_result_of_the_paper_is_a_study():
    names = {f"dgp-table{n}" for n in range(1, 8)} | {f"dgp-fig{n}" for n in range(1, 10)}
    assert (
        names | {"dgp-adgp", "dgp-residual", "dgp-convergence", "dgp-membership"} <= catalogue.methods("study").keys()
    )


# From end to end -----------------------------------------------------------------------------------------------
def test_a_study_runs_and_is_resumed(tmp_path, capsys):
    small = ["--set", "targets=1", "--set", "iterations=2", "--set", "epochs=1", "--set", "examples=80"]
    command = ["reproduce", "dgp-fig2", "--scale", "tiny", "--out", str(tmp_path / "fig2"), *small]
    assert main(command) == 0
    text = (tmp_path / "fig2" / "table.md").read_text()
    assert text in capsys.readouterr().out and "## Accuracy of collaborative training" in text
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "fig2" / "artifacts").iterdir()}
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["targets"] for row in rows} == {1} and {row["iterations"] for row in rows} == {2}
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "fig2" / "artifacts").iterdir()}
    assert "report.html" in {path.name for path in (tmp_path / "fig2").iterdir()}


@pytest.mark.system
def test_a_study_that_was_stopped_goes_on(tmp_path, monkeypatch):
    small = ["--set", "targets=1", "--set", "iterations=2", "--set", "epochs=1", "--set", "examples=80"]
    command = ["reproduce", "dgp-table2", "--scale", "tiny", *small, "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    measure, calls = ClientExposure.measure, []

    def stopped(self, attack):
        calls.append(attack)
        if len(calls) == 5:
            raise KeyboardInterrupt
        measure(self, attack)

    monkeypatch.setattr(ClientExposure, "measure", stopped)
    assert main([*command, str(tmp_path / "again")]) == 130
    assert (tmp_path / "again" / "report.html").exists()
    assert main([*command, str(tmp_path / "again")]) == 0
    one, two = (select_comparable(load_rows(tmp_path / name)) for name in ("whole", "again"))
    assert one == two


def test_a_study_without_pictures_and_one_of_two_models_with_all_of_them(tmp_path):
    small = ["--set", "targets=1", "--set", "iterations=2", "--set", "epochs=1", "--set", "examples=80"]
    command = ["reproduce", "dgp-residual", "--scale", "tiny", "--set", "adaptive=none", *small, "--out"]
    assert main([*command, str(tmp_path / "shown")]) == main([*command, str(tmp_path / "hidden"), "--no-images"]) == 0
    figures = [figure for figure in load_figures(tmp_path / "shown") if figure["kind"] == "picture"]
    truths = sum(figure["attack"] is None for figure in figures)
    files = list((tmp_path / "shown" / "pictures").rglob("*.png"))
    assert truths == 4 and len(figures) == 4 + 2 + 1 + 3 * 2 and len(files) == len(figures)  # none over another
    assert not list((tmp_path / "hidden").rglob("*.png"))
    assert all(not figure["png"] for figure in load_figures(tmp_path / "hidden") if figure["kind"] == "picture")
    assert "This page shows training pictures" not in (tmp_path / "hidden" / "report.html").read_text()


def test_a_part_of_a_study_is_for_a_machine_of_its_own():
    steps = catalogue.find("study", "dgp-table1").make().read_steps(Step)
    left, others = select_steps(steps, ["steps=ig,training", "defenses=none,dgp+error-feedback", "epochs=3"], PARTS)
    assert [step.name for step in left] == ["ig", "ig", "ig", "training"] and others == ["epochs=3"]
    assert [step.trained for step in left] == [False, False, True, False]
    assert left[0].defenses == ("none",) and left[2].defenses == ("none", "dgp+error-feedback")
    assert select_steps(steps, [], PARTS, OPTIONAL) == (list(steps), [])
    plain, _ = select_steps(steps, ["adaptive=none"], PARTS, OPTIONAL)
    few, _ = select_steps(steps, ["adaptive=mask,support", "steps=ig"], PARTS, OPTIONAL)
    assert {step.adaptive for step in plain[:5]} == {()} and few[0].adaptive == ("support", "mask")
    assert list(attack_texts("ig", "dgp", SCALES["tiny"], few[0].adaptive))[1:] == ["ig:iterations=12:adaptive=support"]
    with pytest.raises(WrongInput, match="adaptive"):
        select_steps(steps, ["adaptive=nobody"], PARTS, OPTIONAL)
    for wrong, words in (
        ("steps=deep-leakage", "steps: 'deep-leakage' .*r-gap"),
        ("defenses=dgp,dpg", "'dpg' .*soteria"),
    ):
        with pytest.raises(WrongInput, match=words):
            select_steps(steps, [wrong], PARTS)
    with pytest.raises(WrongInput, match=r"leaves nothing of this study.*r-gap.*training.*soteria"):
        select_steps(steps, ["steps=training", "defenses=dgp"], PARTS)
    ratios, _ = select_steps(catalogue.find("study", "dgp-table2").make().read_steps(Step), ["defenses=dgp"], PARTS)
    assert all("dgp:k1=" in defense for step in ratios for defense in step.defenses)  # a name stands for its settings


def test_steps_that_a_given_network_makes_the_same_are_one():
    steps, full = catalogue.find("study", "dgp-fig4").make().read_steps(Step), SCALES["full"]
    assert merge_steps(steps, full, {}) == steps and len(steps) == 8
    assert merge_steps(steps, full, {"model": "lenet-zhu"}) == [steps[0], steps[4]]  # two data sets
    assert merge_steps(steps, full, {"model": "lenet-zhu", "data": "digits"}) == steps[:1]
    assert merge_steps(steps, SCALES["tiny"], {}) == steps[:4]  # digits stand for both data sets


def test_what_takes_too_long_is_left_out_with_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SCALES, "tiny", SCALES["tiny"].change(untrained=("dgp",), epochs=1, targets=1, iterations=1))
    assert main(["reproduce", "dgp-fig2", "--scale", "tiny", "--out", str(tmp_path / "fig2")]) == 0
    printed = capsys.readouterr().out
    assert "not trained: training under dgp takes too long for this scale" in printed
    assert "| none                 |" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dgp-fig10"], "study: 'dgp-fig10' is not known"),
        (["dgp-fig2", "--scale", "huge"], "scale: 'huge' is not allowed"),
        (["dgp-fig2", "--scale", "tiny", "--set", "batch=3"], "is not possible in this study; allowed: examples"),
        (
            ["dgp-fig2", "--scale", "tiny", "--set", "targets=few"],
            "targets: few is not allowed; must be a whole number, at least 1",
        ),
        (
            ["dgp-fig2", "--scale", "tiny", "--set", "users=0"],
            "users: 0 is not allowed; must be a whole number, at least 1",
        ),
        (
            ["dgp-table3", "--scale", "tiny", "--set", "repeats=0"],
            "repeats: 0 is not allowed; must be a whole number, at least 1",
        ),
        (
            ["dgp-fig2", "--scale", "tiny", "--set", "in_out=-1"],
            "in_out: -1 is not allowed; must be a whole number, at least 0",
        ),
        (
            ["dgp-fig2", "--scale", "tiny", "--set", "learning_rate=nan"],
            "learning_rate: nan is not allowed; must be above 0",
        ),
        (
            ["dgp-fig2", "--scale", "tiny", "--set", "augment=maybe"],
            "augment: 'maybe' is not allowed; must be true or false",
        ),
        (["dgp-fig2", "--scale", "tiny", "--set", "targets=[1"], "is not readable"),
        (["dgp-fig2", "--scale", "tiny", "--data", "digit"], "did you mean 'digits'"),
        (["dgp-fig2", "--scale", "tiny", "--data", "breast_cancer"], "it must have pictures"),
    ],
)
def test_wrong_input(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    said_so = capsys.readouterr()
    assert expected in said_so.err and said_so.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_who_only_listens_to_adgp_hears_the_label():
    inside = {"0.weight": torch.zeros(2, 2, dtype=torch.bool), "4.weight": torch.zeros(3, 4, dtype=torch.bool)}
    inside["4.weight"][2, :3] = inside["4.weight"][0, 0] = True
    assert guess_label(inside, "4").tolist() == [2]
    extra = {"study": "overheard"}
    labels = {"model": "m", "dataset": "d", "defense": "adgp", "seed": 0, "extra": extra}
    rows = [Row(**labels, metric="label_accuracy", value=0.9, low=0.7, high=0.97)]
    rows += [Row(**labels, metric="label_chance", value=0.1)]
    (line,), (claim,) = broadcast_lines(DgpResults(rows)), judge_broadcast(DgpResults(rows))
    assert line.cells["label_accuracy"].value == 0.9 and "no better than by chance" in claim.claim
    assert "not" in claim.verdict, claim.verdict
    assert judge_broadcast(DgpResults([])) == []


def test_theorems_stand_beside_what_a_run_came_to():
    """One bound that holds and says something, one that is infinite and so says nothing, one that is broken."""
    rows = []
    for defense, lemma, theorem in (
        ("top-k", (1.0, 4.0, 3.0, 100.0), (2.0, 3.0, 2.5, 9.0)),
        ("dgp", (50.0, float("inf"), float("inf"), 100.0), (5.0, 4.0, 3.0, 9.0)),
        ("none", (0.0, 0.0, 0.0, 100.0), (2.0, 3.0, 2.5, 9.0)),
    ):
        labels = {"model": "m", "dataset": "d", "defense": defense, "seed": 0, "extra": {"study": "bounds"}}
        values = {"gamma_1_whole": 0.5, "smoothness": 2.0}
        for name, four in (("lemma_1", lemma), ("theorem_2", theorem)):
            values |= {f"{name}_{part}": value for part, value in zip(theory.PARTS, four, strict=True)}
        rows += [Row(**labels, metric=name, value=value) for name, value in values.items()]
    lines, (holds, says) = theory.convergence(DgpResults(rows))
    marks = {(line.labels["theorem"], line.labels["defense"]): line.mark for line in lines}
    assert marks == {
        ("Lemma 1", "top-k"): "",
        ("Theorem 2", "top-k"): "",
        ("Lemma 1", "dgp"): "says nothing",
        ("Theorem 2", "dgp"): "broken",
        ("Theorem 2", "none"): "",
    }
    assert (holds.verdict, says.verdict) == ("not supported", "not supported")
