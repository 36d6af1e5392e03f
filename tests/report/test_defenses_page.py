"""The page's comparison of defenses: pictures side by side, curves, and the front of accuracy, leakage and bytes."""

import pytest

from secateur.report.defenses import (
    build_defense_sheets,
    build_tables,
    describe_front,
    draw_balance,
    draw_epochs,
    list_facts,
    select_front,
    weigh_defenses,
)
from secateur.report.page import Source, render
from secateur.report.summary import SummaryCell, SummaryLine
from secateur.report.theory import draw_distances
from secateur.runs.rows import Row

VALUES = ("test_accuracy", "cw_ssim", "ratio")


def row(metric, value, defense, attack=None, model="net", **extra):
    own = {"model": model, "dataset": "digits", "defense": defense, "attack": attack, "seed": 0}
    return Row(**own, metric=metric, value=value, low=value - 0.01, high=value + 0.02, extra=extra)


def trained(defense, ratio, *accuracies):
    labels = {"study": "training", "epochs": len(accuracies)}
    rows = [row("test_accuracy", x, defense, epoch=i, **labels) for i, x in enumerate(accuracies, start=1)]
    return [*rows, row("ratio", ratio, defense, epoch=len(accuracies), **labels)]


def attacked(defense, attack, cw_ssim, labels="inferred", **extra):
    return row("cw_ssim", cw_ssim, defense, attack, target=None, labels=labels, **extra)


def picture(attack, defense, target, item=0, **more):
    labels = {"model": "net", "dataset": "digits", "seed": 0, "batch_size": 1, "labels": "inferred"}
    return (
        labels
        | {"kind": "picture", "attack": attack, "defense": defense, "target": target, "item": item}
        | {"png": f"{attack}-{defense}-{target}", "label": 3}
        | more
    )


def test_a_defense_is_worth_its_accuracy_its_worst_leak_and_its_bytes():
    rows = trained("none", 1.0, 0.5, 0.9) + trained("dgp+error-feedback", 0.6, 0.4, 0.88) + trained("ats", 1.0, 0.7)
    rows += [attacked("none", "ig", 0.95), attacked("dgp", "ig", 0.3), attacked("dgp", "ig:adaptive=reapply", 0.7)]
    rows += [attacked("ats", "ig", 0.98, against="used"), attacked("ats", "ig", 0.5, against="raw")]
    found = {line.labels["defense"]: line for line in weigh_defenses(rows)}
    dgp = found["dgp+error-feedback"]
    assert [dgp.value(name) for name in VALUES] == [0.88, 0.7, 0.6] and dgp.labels["attack"] == "ig"  # the last epoch
    assert found["ats"].value("cw_ssim") == 0.5  # of the raw picture
    assert found["none"].value("test_accuracy") == 0.9
    assert leak([*rows, attacked("none", "ig", 0.99, "oracle")], "none") == 0.99  # told the labels: another attacker
    (view,) = draw_balance(rows)
    bars = [view.panels[0].data[0][axis] for axis in ("error_x", "error_y")]
    assert [(bar["arrayminus"][0], bar["array"][0]) for bar in bars] == [(0.01, 0.02)] * 2


def leak(rows, defense):
    return next(line.value("cw_ssim") for line in weigh_defenses(rows) if line.labels["defense"] == defense)


def test_a_trained_network_is_not_charged_with_the_leaks_of_another():
    rows = [*trained("none", 1.0, 0.9), attacked("none", "ig", 0.6), attacked("none", "r-gap", 1.0, model="cnn6")]
    (view,) = draw_balance(rows)  # cnn6 was attacked, never trained
    assert view.label == "net on digits" and "CW-SSIM 0.60 under ig" in view.text


def test_one_attacker_on_two_models_or_batches_is_two():
    rows = [*trained("none", 1.0, 0.9), attacked("none", "ig", 0.9, stage="untrained", batch_size=1)]
    rows += [attacked("none", "ig", 0.2, stage="weights given", batch_size=1)]
    rows += [attacked("none", "ig", 0.1, stage="untrained", batch_size=4)]
    assert leak(rows, "none") == 0.9  # the highest, not their mean


def test_error_feedback_has_the_leak_of_its_first_round_too():
    rows = [*trained("dgp+error-feedback", 0.6, 0.9), attacked("dgp", "ig", 0.9, stage="untrained")]
    rows += [attacked("dgp", "ig", 0.95, stage="weights given")]  # a trained model with an empty residual: nobody's
    rows += [attacked("dgp+error-feedback", "ig", 0.3, stage="weights given")]
    assert leak(rows, "dgp+error-feedback") == 0.9


def test_the_front_by_hand():
    def point(name, *values):
        cells = {metric: SummaryCell(value, 0, 1) for metric, value in zip(VALUES, values, strict=True)}
        return SummaryLine({"defense": name, "attack": "ig"}, cells)

    a, b = point("a", 0.9, 0.9, 1.0), point("b", 0.8, 0.5, 1.0)
    c, d = point("c", 0.8, 0.6, 0.6), point("d", 0.8, 0.6, 1.0)  # b and c are better than d
    assert select_front([a, b, c, d]) == [b, c, a]
    twin = point("twin", 0.9, 0.9, 1.0)
    assert select_front([a, twin]) == [a, twin]
    assert describe_front([a, d]).startswith("On the front, from least to most accurate: d: 80.0% right, CW-SSIM 0.60")


def test_curves_of_the_epochs():
    (view,) = draw_epochs(trained("none", 1.0, 0.5, 0.9) + trained("dgp", 0.6, 0.4, 0.8))
    assert view.label == "net on digits"
    assert [(list(trace["x"]), list(trace["y"])) for trace in view.panels[0].data] == [
        ([1, 2], [0.5, 0.9]),
        ([1, 2], [0.4, 0.8]),
    ]
    assert "dgp 80.0%" in view.panels[0].alt
    assert view.panels[0].layout["xaxis"]["dtick"] == 1  # there is no half epoch
    (long,) = draw_epochs(trained("none", 1.0, *[0.5] * 100))
    assert long.panels[0].layout["xaxis"]["nticks"] == 10
    assert draw_balance(trained("none", 1.0, 0.5)) == []  # never attacked


def test_pictures_by_defense():
    figures = [picture(None, "none", t) for t in (0, 1)] + [picture("ig:iterations=3", "none", t) for t in (0, 1)]
    figures += [picture("ig:iterations=3", "dgp", 0), picture("ig:adaptive=support:iterations=3", "dgp", 0)]
    figures += [picture("rob", "none", 0)]
    (sheet,) = build_defense_sheets(figures)  # rob met one defense only
    assert sheet.title == "ig: net on digits"
    assert [name for name, _ in sheet.lines] == ["truth", "none", "dgp", "dgp, attacker: support"]
    shown = dict(sheet.lines)
    assert shown["none"] == ["ig:iterations=3-none-0", "ig:iterations=3-none-1"]
    assert shown["dgp"] == ["ig:iterations=3-dgp-0", None]
    assert build_defense_sheets([figure | {"png": None} for figure in figures]) == []
    later = [figure | {"stage": "weights given", "png": "later"} for figure in figures]
    first, second = build_defense_sheets(figures + later)
    assert first == sheet and second.title == "ig: net on digits, weights given"  # one does not stand over the other


@pytest.mark.parametrize("with_attack", [True, False])
def test_the_page_of_a_study(with_attack):
    rows = trained("none", 1.0, 0.5, 0.9) + trained("dgp+error-feedback", 0.6, 0.4, 0.88)
    told = {"threat": "a server", "knows": "all", "stage": "untrained", "batch_size": 1, "total_variation": None}
    if with_attack:
        rows += [attacked(defense, "ig", 0.9, **told) for defense in ("none", "dgp")]
    html = render([Source("study", rows, [], "", {})])
    assert "Accuracy over the epochs" in html
    assert ("Accuracy, leakage and bytes of each defense" in html) == with_attack
    assert "Accuracy and gaps" not in html  # a training is no audited model
    assert list_facts(rows) == {"Network": "net", "Data": "digits"}
    assert "Leakage of the updates" in html and "Training under each defense" in html


def test_a_study_without_attacks_and_trainings_has_its_tables():
    sizes = {"dgp": 0.6125, "adgp": 0.32}
    rows = [row("ratio", ratio, defense, study="cost", steps=5) for defense, ratio in sizes.items()]
    rows += [row("residual_mean", 3.5, "dgp", study="training", epoch=2, epochs=2)]
    trained, cost = build_tables(rows).values()
    assert [[cell.text for cell in line] for line in cost.lines] == [["dgp", "0.613"], ["adgp", "0.320"]]
    assert [column.heading for column in trained.columns] == ["defense", "residual's norm"]
    html = render([Source("study", rows, [], "", {})])
    assert "Cost of each defense" in html and "0.613" in html
    assert "residual&#39;s norm" in html and "pruned models" not in html


def distanced(defense, number, distance, error, bound, by_sent, **more):
    values = {"relative_distance": distance, "error": error, "bound": bound, "bound_by_sent": by_sent}
    return [row(name, value, defense, study="theory", number=number, **more) for name, value in values.items()]


def test_every_reconstruction_is_a_point_by_its_distance_beside_its_bounds():
    rows = distanced("none", 0, 0.0, 2.0, 1.0, 0.0) + distanced("none", 1, 0.0, 4.0, 5.0, 0.0)
    rows += distanced("dgp", 0, 0.8, 6.0, 3.0, 7.0) + distanced("dgp", 1, 0.9, 8.0, 3.0, 9.0)
    rows += [row("relative_distance", 0.5, "noise", study="theory", number=0)]  # nothing was reconstructed
    (view,) = draw_distances(rows)
    assert view.label == "net on digits"
    (plot,) = view.panels
    drawn = {trace["name"]: (list(trace["x"]), list(trace["y"])) for trace in plot.data}
    assert drawn == {
        "none": ([0.0, 0.0], [2.0, 4.0]),
        "dgp": ([0.8, 0.9], [6.0, 8.0]),
        "bound by Eq. 2": ([0.0, 0.0, 0.8, 0.9], [1.0, 5.0, 3.0, 3.0]),
        "bound by the sent update": ([0.0, 0.0, 0.8, 0.9], [0.0, 0.0, 7.0, 9.0]),
    }
    assert "distance" in plot.layout["xaxis"]["title"]["text"] and "error" in plot.layout["yaxis"]["title"]["text"]
    assert "none (distance 0, mean error 3) to dgp (distance 0.85, mean error 7)" in view.text
    assert "1 of 4 reconstructions by Eq. 2, 2 by the sent update" in view.text and view.text in plot.alt
    page = render([Source("fig1", rows, [], "", {})])
    assert "Error by the distance of the update" in page and "breaks the bound" in page
    assert len(draw_distances([*rows, *distanced("dgp", 0, 0.8, 6.0, 3.0, 7.0, run="other")])) == 2
    assert draw_distances([attacked("none", "ig", 0.9)]) == []
