"""The page of the matrix: strongest attacks, intervals, colours, marks, and sentences that intervals allow."""

from itertools import pairwise

import pytest

from secateur.report.heatmap import AUC, BY_KEY, CELL, GROUND, REFUSED, SCALE, build_heatmaps
from secateur.report.matrix import INKS, build_page, list_ground
from secateur.report.matrix_sentences import write_sentences
from secateur.runs.rows import Row

NEAR = (-0.1, 0.0, 0.1)


def cell(name, column, value, seed=0, attack="sgi", metric=CELL, note=None, **extra):
    labels = {"study": "matrix", "row": name, "acts_on": "gradient", "column": column, "base_pruning": "none"}
    return Row(
        model="conv-2", dataset="cifar10", defense=name, seed=seed, attack=attack, metric=metric, value=value,
        low=None if value is None else value - 1, high=None if value is None else value + 1, note=note,
        extra=labels | extra,
    )  # fmt: skip


def seeds(name, column, centre, spread=NEAR, **more):
    return [cell(name, column, centre + by, seed, **more) for seed, by in enumerate(spread)]


def only(rows):
    (heatmap,) = build_heatmaps(rows)
    return heatmap


def sentences_of(rows):
    return write_sentences(only(rows))


def test_a_cell_shows_its_strongest_attack_of_most_seeds():
    rows = seeds("dgp", "strongest", 14) + seeds("dgp", "strongest", 20, attack="sgi:adaptive=support")
    rows += [cell("dgp", "strongest", 50, attack="sgi:adaptive=reapply")]  # of one seed only
    shown = only(rows).rows[0].cells["strongest"]
    assert (shown.attack, shown.text) == ("sgi:adaptive=support", "20.0")
    assert shown.interval == "19.8 to 20.2"  # Student's over three seeds: 20 -+ 4.303 * 0.1 / sqrt(3)
    assert [line[0] for line in shown.list_rows()] == ["sgi", "sgi:adaptive=support", "sgi:adaptive=reapply"]


def test_a_cell_of_one_seed_has_that_seeds_interval():
    shown = only([cell("dgp", "inversion", 14)]).rows[0].cells["inversion"]
    assert shown.interval == "13.0 to 15.0"
    assert sentences_of([cell("dgp", "inversion", 14)]) == []


@pytest.mark.parametrize(("value", "shade"), [(0.3, 0), (0.5, 0), (0.56, 1), (0.79, 5), (0.8, 5), (1.0, 5)])
def test_colours_follow_the_scale_of_the_column(value, shade):
    assert BY_KEY["updates"].worst == AUC and len(SCALE) == 6
    assert BY_KEY["updates"].shade(value) == shade
    assert BY_KEY["seconds"].shade(value) is None


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_darken_step_by_step_and_their_small_print_is_readable():
    backs = [luminance(colour) for colour in SCALE]
    assert all(one - other > 0.05 for one, other in pairwise(backs)), "told apart without hues"
    for back, ink in zip(backs, map(luminance, INKS), strict=True):
        light, dark = max(back, ink), min(back, ink)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_defense_that_hides_from_the_plain_attacker_only_is_called_so():
    rows = seeds("none", "inversion", 20) + seeds("none", "strongest", 20)
    rows += seeds("dgp", "inversion", 12) + seeds("dgp", "strongest", 20)
    rows += seeds("soteria", "inversion", 12) + seeds("soteria", "strongest", 15)
    rows += seeds("noise", "inversion", 12) + seeds("noise", "strongest", 12)
    plain, lost, less, strongest = sentences_of(rows)
    assert all(name in plain for name in ("dgp", "soteria", "noise")) and "by 8.0 dB" in plain
    assert lost.startswith("These hide from the plain attacker and are not shown to hide from the strongest one")
    assert "dgp" in lost and "soteria" not in lost and "noise" not in lost
    assert "soteria† (by 3.0 dB" in less and "dgp" not in less
    assert "soteria" in strongest and "noise" in strongest and "dgp" not in strongest


def test_other_pictures_are_compared_above_their_grey():
    rows = seeds("none", "strongest", 25, psnr_grey=12.5) + seeds("same", "strongest", 21, psnr_grey=12.5)
    rows += seeds("ats", "strongest", 22, psnr_grey=9.5) + seeds("adgp", "strongest", 21, psnr_grey=12.0)
    (sentence,) = sentences_of(rows)
    assert "same† (by 4.0 dB" in sentence and "adgp† (by 3.5 dB" in sentence and "ats" not in sentence
    ats = next(row for row in only(rows).rows if row.name == "ats")
    assert ats.cells["strongest"].text == "22.0" and ats.measure("strongest")[1].value == 25.0


def test_copies_of_other_pictures_stay_copies():
    rows = seeds("none", "active", 60, (0, 0, 0), psnr_grey=12.5) + seeds("x", "active", 60, (0, 0, 0), psnr_grey=13)
    assert sentences_of(rows) == []


def test_a_defense_of_fine_tuning_is_compared_with_fine_tuning():
    close = (-0.01, 0.0, 0.01)
    rows = seeds("none", "final-rmia", 0.97, close)
    rows += [row for name, auc in (("basic", 0.9), ("ppb", 0.8), ("adv", 0.9)) for row in tuned(name, auc, close)]
    (sentence,) = sentences_of(rows)
    assert sentence == (
        "These lower the AUC of RMIA on the final model: basic (by 0.070 AUC), ppb (by 0.100 AUC, beside basic)."
    )
    assert sentences_of([row for row in rows if row.extra["row"] != "basic"]) == [], "nothing to compare with"


def tuned(name, auc, spread):
    return seeds(name, "final-rmia", auc, spread, acts_on="on the final model")


def test_pictures_of_a_first_round_are_held_against_those_without_a_defense_there():
    place = {"outside": "a first round"}
    rows = seeds("none", "inversion", 25) + seeds("ats", "inversion", 21, **place)
    assert sentences_of(rows) == [], "another round of another network"
    rows += seeds("none (first round)", "inversion", 22, **place)
    (sentence,) = sentences_of(rows)
    assert "ats (by 1.0 dB, beside none (first round))" in sentence and "none (first round) (by" not in sentence


def test_seeds_that_scatter_allow_no_sentence():
    wide = (-8.0, 0.0, 8.0)
    rows = seeds("none", "inversion", 20, wide) + seeds("dgp", "inversion", 14, tuple(reversed(wide)))
    assert sentences_of(rows) == []


def test_a_defense_may_raise_what_it_should_lower():
    rows = seeds("none", "final-rmia", 0.6, (-0.01, 0, 0.01)) + seeds("top-k", "final-rmia", 0.7, (-0.01, 0, 0.01))
    (sentence,) = sentences_of(rows)
    assert sentence.startswith("These raise the AUC of RMIA on the final model: top-k (by 0.100 AUC")


def test_reference_models_under_the_defense_may_find_more_than_others():
    close = (-0.01, 0.0, 0.01)
    rows = seeds("ats", "final-rmia", 0.5, close, attack="rmia") + seeds("dgp", "final-rmia", 0.5, close, attack="rmia")
    rows += seeds("ats", "final-rmia", 0.6, close, attack="rmia", references="imitating")
    rows += seeds("dgp", "final-rmia", 0.501, close[::-1], attack="rmia", references="imitating")
    (sentence,) = sentences_of(rows)
    assert sentence == (
        "These show RMIA more through reference models under the defense than through others: ats (by 0.100 AUC)."
    )


def test_refused_and_unmet_cells_are_marked_with_their_reasons():
    rows = [cell("ppb", "inversion", None, attack=None, metric=REFUSED, note="no update <is> sent", by="the matrix")]
    rows += [
        cell("dgp", "strongest", 13),
        cell("dgp", "strongest", 14, attack="ig-smooth", unmet="ig-smooth:adaptive=reapply: no"),
        cell("ats", "active", 9, outside="a"),
    ]
    page = build_page(rows, [])
    ppb, dgp, ats = page["maps"][0].rows
    assert ppb.cells["inversion"].reasons == ["no update <is> sent (said by the matrix)"]
    assert not ppb.cells["inversion"].text and not ppb.cells["inversion"].unmet
    assert dgp.cells["strongest"].unmet and dgp.cells["strongest"].marks == ["ig-smooth:adaptive=reapply: no"]
    assert not ats.cells["active"].unmet and ats.cells["active"].marks == ["a"]


def test_sub_models_lack_shadow_federations():
    rows = seeds("mapp-fl", "updates", 0.7, attack="rmia") + seeds("dgp", "updates", 0.7, attack="rmia")
    rows += seeds("heterofl", "updates", 0.7, attack="rmia:gamma=1.0", shadows="8 federations, all rounds")
    mapp, dgp, hetero = (row.cells["updates"] for row in only(rows).rows)
    assert mapp.unmet and "shadow federations" in mapp.marks[0]
    assert not dgp.unmet and not hetero.unmet
    new = cell("heterofl", "updates", 0.8, attack="rmia:gamma=1.0", shadows="8 federations, all rounds")
    both = [*seeds("heterofl", "updates", 0.7, attack="rmia"), new]
    assert only(both).rows[0].cells["updates"].unmet, "two of three seeds met none"


def test_pictures_lack_the_smooth_inversion_until_it_knows_as_much_as_others():
    def unmet(name, *attacks):
        rows = [row for attack in attacks for row in seeds(name, "strongest", 14, attack=attack)]
        return only(rows).rows[0].cells["strongest"].unmet

    plain, informed, smooth = "sgi:iterations=9", "sgi:adaptive=support", "ig-smooth:iterations=9"
    assert unmet("none", plain) and unmet("none", smooth) and not unmet("none", plain, smooth)
    assert unmet("dgp", plain, informed, smooth) and not unmet(
        "dgp", plain, informed, smooth, f"{smooth}:adaptive=support"
    )
    assert unmet("heterofl", plain) and not unmet("heterofl", plain, "sgi:adaptive=reapply", smooth)
    late = [*seeds("none", "strongest", 14, attack=plain), cell("none", "strongest", 20, attack=smooth)]
    assert only(late).rows[0].cells["strongest"].unmet, "two of three seeds did not meet it"


def test_the_active_server_lacks_modes_that_work_against_the_defense():
    def active(name, *attacks):
        rows = [row for attack in attacks for row in seeds(name, "active", 9, attack=attack)]
        return only(rows).rows[0].cells["active"]

    plain = active("random", "rob:bins=128")
    assert plain.unmet and plain.marks == ["it did not run with adaptive=fill on every seed"]
    assert not active("random", "rob:bins=128", "rob:adaptive=fill:bins=128").unmet
    assert active("dgp", "rob").unmet and not active("dgp", "rob", "rob:adaptive=support").unmet
    assert not active("noise", "rob").unmet and not active("soteria", "rob").unmet, "no mode of rob works"
    late = [*seeds("random", "active", 9, attack="rob"), cell("random", "active", 50, attack="rob:adaptive=fill")]
    assert only(late).rows[0].cells["active"].unmet, "two of three seeds did not meet it"


def test_a_cell_of_fewer_seeds_says_so():
    rows = [*seeds("dgp", "inversion", 14), cell("noise", "inversion", 14)]
    dgp, noise = (row.cells["inversion"].interval for row in only(rows).rows)
    assert dgp == "13.8 to 14.2" and noise == "13.0 to 15.0, 1 of 3 seeds"


def test_intervals_end_where_values_do():
    wide = (-0.3, 0.0, 0.1)
    rows = seeds("dgp", "updates", 0.9, wide) + seeds("dgp", "accuracy", 0.1, (-0.1, 0, 0.1))
    shown = only(rows + seeds("dgp", "active", 58, (-4, 0, 2))).rows[0].cells
    assert shown["updates"].estimate.high == 1.0 and shown["accuracy"].interval.startswith("0.0 to ")
    assert shown["active"].interval.endswith(" to 60.0") and shown["active"].list_rows()[0][1].endswith("60.0]")


def test_pictures_are_those_of_the_rows_defense_network_and_first_seed():
    rows = [cell("dgp", "inversion", 14, seed=1), cell("dgp", "strongest", 16, seed=1, attack="sgi:adaptive=support")]

    def picture(attack, png, **more):
        labels = {"kind": "picture", "model": "conv-2", "defense": "dgp", "base_pruning": "none", "seed": 1}
        return labels | {"attack": attack, "png": png, "target": 0, "item": 0} | more

    figures = [picture(None, "T"), picture("sgi", "P"), picture("sgi:adaptive=support", "S")]
    figures += [picture("sgi", "X", defense="top-k"), picture("sgi", "X", seed=0), picture("sgi", "X", model="m")]
    page = build_page(rows, figures)
    assert [strip.pngs for strip in page["strips"]["conv-2-dgp"]] == [["T"], ["P"], ["S"]]
    assert page["shows_pictures"]


def test_the_ground_is_described_with_all_values_in_which_runs_differ():
    def ground(**fields):
        return Row(model="m", dataset="d", seed=0, metric=GROUND, value=None, extra={"ground": fields})

    fields = {"data": "cifar10", "members": 800, "history": 10, "membership": ["yeom", "lira"]}
    words = list_ground([ground(**fields), ground(**fields | {"members": 400})])
    assert words["Data"].startswith("cifar10, 800 or 400 members")
    assert words["Updates"].endswith("each client: yeom, lira")
    assert "Clients" not in words


def test_a_row_that_lacks_the_smooth_inversion_is_compared_without_it():
    rows = seeds("none", "strongest", 20) + seeds("none", "strongest", 24, attack="ig-smooth")
    rows += seeds("dgp", "strongest", 17) + seeds("noise", "strongest", 17)
    rows += seeds("noise", "strongest", 19, attack="ig-smooth")
    (sentence,) = sentences_of(rows)
    assert "dgp† (by 3.0 dB" in sentence and "noise (by 5.0 dB" in sentence
