"""Verdicts on updates and federations, from hand-made rows."""

import pytest

from secateur.evaluation.attack_strength import list_modes
from secateur.report.update_verdict import judge_federations, judge_updates
from secateur.runs.rows import Row

FULL = "ig"


def attacked(
    attack, defense="none", recognisable=0.0, *, updates=20, pictures=None, identified=0.0, extra=(), **values
):
    """Rows of one attack that met one defense."""
    mode = attack.partition("adaptive=")[2].partition(":")[0]
    labels = {"model": "m", "dataset": "d", "seed": 0, "attack": attack, "defense": defense, "adaptive": bool(mode)}
    more = {"target": None, "labels": "inferred", "batch_size": 1, "total_variation": 0.01, "calibrated": True}
    labels["extra"] = more | dict(extra)
    measures = {"recognisable": recognisable, "recognisable_squares": 0.0, "recognisable_denoised": recognisable}
    measures |= {"psnr": 9.0, "psnr_min": 5.4, "psnr_max": 9.9, "psnr_grey": 7.5, "failed": 0.0, "updates": updates}
    measures |= {"pictures": pictures or updates, "identified_chance": 1 / max(1, updates)} | values
    rows = [Row(**labels, metric=metric, value=value) for metric, value in measures.items()]
    return [*rows, Row(**labels, metric="identified", value=0.5, low=identified, high=1.0)]


def judged(*rows):
    return {verdict.subject: verdict for verdict in judge_updates([row for same in rows for row in same])}


def missing(verdict):
    (sentence,) = [sentence for sentence in verdict.sentences if sentence.startswith("Missing: ")]
    assert (verdict.badge.text, verdict.badge.colour) == ("Inconclusive", "doubtful")
    return sentence


def test_each_defense_has_a_badge_of_its_own():
    """Finding 5: one badge for all, red as soon as `none` was among them."""
    dgp = [attacked(f"ig:adaptive={mode}", "dgp") for mode in ("support", "reapply")]
    found = judged(
        attacked("ig", "none", 0.6), attacked("ig", "dgp"), *dgp, attacked("ig", "dp"), attacked("ig", "outpost")
    )
    assert {name: verdict.badge.colour for name, verdict in found.items()} == {
        "no defense": "bad",
        "dgp": "good",
        "dp": "good",
        "outpost": "doubtful",
    }
    assert found["no defense"].badge.text == "Training pictures are recognisable"
    assert (
        "12 of 20 pictures of 20 updates are recognisable to ig (after a light denoiser)."
        in found["no defense"].sentences
    )
    assert "None of 20 pictures of 20 updates is recognisable to ig; with 95 % confidence up to 16% may be." in (
        found["dp"].sentences
    )
    assert "adaptive=mask, adaptive=support" in missing(found["outpost"])


def test_green_needs_the_strongest_attacker_all_iterations_a_fit_weight_and_enough_updates():
    """Finding 2: green with 300 of 2500 iterations, for two targets, and against a plain attacker only."""
    plain = judged(attacked("ig", "dgp"))["dgp"]
    assert "it was attacked plainly only; one who knows of it (adaptive=support, adaptive=reapply) may see" in missing(
        plain
    )
    half = judged(attacked("ig", "dgp"), attacked("ig:adaptive=support", "dgp"))["dgp"]
    assert "not every attacker who knows of it was met" in missing(half) and "(adaptive=reapply)" in missing(half)
    assert "ig took 300 of its 2500 iterations" in missing(judged(attacked("ig:iterations=300"))["no defense"])
    assert judged(attacked("ig:iterations=2500"))["no defense"].badge.colour == "good"
    assert "2 updates attacked; pictures are told apart from 3 on" in missing(
        judged(attacked("ig", updates=2))["no defense"]
    )
    fixed = judged(attacked("ig:tv=0.0001", extra={"calibrated": False}))["no defense"]
    assert "ig:tv=0.0001 had a fixed weight of total variation" in missing(fixed)
    every = [
        attacked(f"ig:tv={weight}", extra={"calibrated": False, "total_variation": weight})
        for weight in (1e-4, 1e-3, 1e-2, 1e-1)
    ]
    assert judged(*every)["no defense"].badge.colour == "good"  # all weights were shown
    assert (
        judged(attacked("rob", extra={"calibrated": False, "total_variation": None}))["no defense"].badge.colour
        == "good"
    )


def test_the_badge_follows_the_worst_case():
    one = judged(attacked("ig", recognisable=0.05))["no defense"]
    assert one.badge.colour == "bad" and one.sentences[0].startswith(
        "1 of 20 pictures of 20 updates is recognisable to ig"
    )
    apart = judged(attacked("ig", identified=0.06))["no defense"]
    assert apart.badge.text == "Pictures are told apart better than by chance" and apart.badge.colour == "bad"
    why = "ig: 50.0% of its pictures are nearest to their own truth; chance: 5.0%."
    assert why in apart.sentences and why not in one.sentences
    assert judge_updates([]) == []


def test_words_follow_the_measures():
    """Finding 4: "come back" stood beside 0 % recognisable, and beside 5.4 dB where grey has 7.5."""
    none, some = judged(attacked("ig"))["no defense"], judged(attacked("ig", recognisable=1.0))["no defense"]
    for verdict in (none, some):
        assert not any(word in verdict.text for word in ("come back", "recover", "bring"))
    assert "None of 20 pictures" in none.text and "20 of 20 pictures" in some.text
    assert "The PSNR of ig is from 5.4 to 9.9 dB; a grey picture has 7.5 dB." in none.sentences


def test_means_are_over_all_pictures_of_all_clients():
    """An app's four clients: the brightest picture's grey and the best client's labels stood for all of them."""

    def client(number, pictures, **values):
        place = {"round": 1, "client": number, "stage": "round 1"}
        return attacked("ig", updates=1, pictures=pictures, extra=place, **values)

    low = client(0, 1, psnr=14.0, psnr_min=14.0, psnr_max=14.0, psnr_grey=11.0, label_accuracy=1.0)
    high = client(1, 3, psnr=18.0, psnr_min=16.0, psnr_max=19.0, psnr_grey=15.0, label_accuracy=2 / 3)
    sentences = judged(low, high)["no defense"].sentences
    grey = "a grey picture has 14.0 dB on average"  # (11 + 3 * 15) / 4
    assert f"The PSNR of ig is 17.0 dB on average, from 14.0 to 19.0 dB; {grey}." in sentences
    assert "ig finds 75.0% of the labels." in sentences


def test_an_attack_that_failed_has_measured_nothing():
    nothing = judged(attacked("ig", failed=1.0), attacked("dlg", failed=1.0))["no defense"]
    assert (nothing.badge.text, nothing.badge.colour) == ("Nothing was measured", "doubtful")
    assert [sentence.partition(" (")[0] for sentence in nothing.sentences] == [
        "ig failed on every target",
        "dlg failed on every target",
    ]
    part = judged(attacked("ig", failed=0.25))["no defense"]
    assert "ig failed on 25% of its targets" in part.text and part.badge.colour == "doubtful"


def test_a_defense_that_stands_only_against_the_plain_attacker_is_called_so():
    def text(plain, knowing):
        return judged(attacked("ig", "dgp", plain), attacked("ig:adaptive=support", "dgp", knowing))["dgp"].text

    words = "It stands only against the plain attacker, not against ig:adaptive=support."
    assert words in text(0.0, 0.1)
    assert words not in text(0.0, 0.0) and words not in text(0.1, 0.1)


def test_an_auditor_is_judged_by_all_its_updates():
    """Finding 4: the auditor's verdict described one update of eight; finding 2: no caution on its page."""

    def update(number, recognisable=0.0):
        place = {"round": number, "client": 7 * number, "stage": f"round {number}", "batch_size": 1 + number}
        return attacked("ig", "dgp", recognisable, updates=1, pictures=1 + number, extra=place)

    found = judged(*(update(number) for number in range(8)))["dgp"]
    assert "None of 36 pictures of 8 updates" in found.text
    assert "it was attacked plainly only" in missing(found)
    found = judged(*(update(number, float(number == 3)) for number in range(8)))["dgp"]
    assert found.badge.colour == "bad" and "4 of 36 pictures of 8 updates are recognisable" in found.text


def test_a_promised_epsilon_has_a_sentence():
    promise = Row(
        model="m",
        dataset="d",
        seed=0,
        defense="dp",
        metric="epsilon",
        value=8.0,
        note="epsilon 8 for 1 update",
        extra={"target": None},
    )
    assert "Its promise: epsilon 8 for 1 update." in judged(attacked("ig", "dp"), [promise])["dp"].sentences


@pytest.mark.parametrize(("auc", "low", "colour"), [(0.7, 0.6, "bad"), (0.52, 0.45, "doubtful")])
def test_a_federation_has_a_verdict_on_pictures_members_and_epsilon(auc, low, colour):
    """Finding 5: the page of a federation had no verdict at all."""
    place = {"base_pruning": "snip", "round": 4, "client": 3}
    shared = {"model": "m", "dataset": "d", "seed": 0, "defense": "dp"}
    rows = attacked("sgi", "dp", extra=place)
    rows.append(Row(**shared, attack="yeom", metric="auc", value=auc, low=low, high=0.8, extra=place))
    whole = {"base_pruning": "snip", "round": 4, "client": None}
    rows.append(Row(**shared, metric="epsilon", value=3.0, note="epsilon 3 of the worst client", extra=whole))
    rows.append(Row(**shared, metric="test_accuracy", value=0.9, extra=whole))
    (verdict,) = judge_federations(rows)
    assert verdict.badge.colour == colour and verdict.subject == "snip, dp"
    assert f"Members: yeom reaches an AUC of {auc:.3f} [{low:.3f}, 0.800]; guessing has .5." in verdict.sentences
    assert "Its promise: epsilon 3 of the worst client." in verdict.sentences
    assert "None of 20 pictures" in verdict.text and judge_updates(rows) == []
    assert verdict.sentences[0].startswith("Members: " if colour == "bad" else "None of 20 pictures")  # the leak first
    (silent,) = judge_federations([row for row in rows if row.attack is None and row.metric != "epsilon"])
    assert (silent.badge.text, silent.badge.colour) == ("Not attacked", "doubtful")


def test_modes_are_those_of_the_catalogue():
    assert list_modes("precode+dgp") == ["layer", "support", "reapply"]
    assert list_modes("random", attacks=["ig"]) == ["support+follows"]  # fill needs a tampered model
    assert list_modes("random", attacks=["rob"]) == ["support+follows", "fill"]
    assert list_modes("mine") == list_modes("dp") == []  # a name of the user's own, or none known
