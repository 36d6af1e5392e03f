"""What the page says of attacks on updates."""

import json
import re

import pytest
from audited import audit_rows, figures_of

import tiny_attack
from secateur.config import Invert, read
from secateur.errors import WrongInput
from secateur.experiments.invert import run_invert
from secateur.report.inversion import build_gallery, draw_losses
from secateur.report.page import Source, render, write_page
from secateur.report.terminal import print_inversion
from secateur.runs.rows import Row

PNG = 'class="picture" aria-label'


@pytest.fixture
def updates(monkeypatch, tmp_path):
    tiny_attack.install(monkeypatch)
    config = read(Invert, None, {"model": "tiny_attack:linear", "attack": "tiny:iterations=3,tiny", "targets": 4})
    run_invert(config, tmp_path / "updates")
    return tmp_path / "updates"


def figure(target, psnr, attack="ig", **more):
    labels = {"model": "m", "dataset": "d", "seed": 0, "labels": "inferred", "batch_size": 1, "kind": "picture"}
    own = {"attack": attack, "target": target, "item": 0, "png": "AA", "label": 3, "found": True}
    return labels | own | {"scores": {"psnr": psnr}} | more


def test_the_worst_case_comes_first_whichever_attack_it_was():
    figures = [figure(0, 10.0), figure(1, 12.0), figure(2, "inf"), figure(0, 30.0, "dlg"), figure(3, None)]
    figures += [figure(target, None, None) for target in range(4)]
    cards = build_gallery(figures)
    assert [card.title for card in cards] == ["target 2", "target 0", "target 1", "target 3"]
    assert [guess.title for guess in cards[1].guesses] == ["ig", "dlg"] and cards[0].truth is not None
    assert cards[0].guesses[0].lines == ["PSNR inf dB", "label 3"]


def test_pictures_of_several_networks_or_batch_sizes_say_of_which():
    found = [figure(0, 3.0), figure(0, 2.0, model="n"), figure(0, 1.0, batch_size=4)]
    titles = ["m on d, batches of 1, target 0", "n on d, batches of 1, target 0"]
    titles += ["m on d, batches of 4, target 0, picture 0"]
    assert [card.title for card in build_gallery(found)] == titles


def test_pictures_of_an_untrained_and_of_a_trained_model_are_told_apart():
    found = [figure(0, 3.0, stage="untrained"), figure(0, 2.0, stage="weights given")]
    assert [card.title for card in build_gallery(found)] == ["untrained, target 0", "weights given, target 0"]
    assert [card.title for card in build_gallery(found[:1])] == ["target 0"]
    rounds = [figure(0, 9.0, "ig", stage=f"round {at}", round=at, client=3) for at in (2, 4)]
    assert [card.title for card in build_gallery(rounds)] == ["round 2, client 3", "round 4, client 3"]


def test_losses_of_two_batch_sizes_are_two_plots():
    curve = {"kind": "loss", "curve": [[0, 1.0], [1, 0.5]], "defense": "none"}
    views = draw_losses(figure(0, 1.0, batch_size=size, **curve) for size in (2, 4))
    assert [view.label for view in views] == ["m on d, batches of 2: ig", "m on d, batches of 4: ig"]


def test_the_table_says_what_its_lines_differ_in(tmp_path):
    told = {"threat": "a server", "knows": "all", "labels": "inferred", "total_variation": None, "target": None}
    for key, values in {"stage": ("untrained", "weights given"), "batch_size": (2, 4)}.items():
        own = {"model": "m", "dataset": "d", "seed": 0, "attack": "ig", "metric": "psnr", "value": 9.0}
        rows = [Row(**own, extra=told | {"stage": "untrained", "batch_size": 2} | {key: value}) for value in values]
        table = render([Source("run", rows, [], "", {})]).split('id="recovered"')[1].split("</table>")[0]
        assert all(f">{value}</td>" in table for value in values) and f">{key.replace('_', ' ')}<" in table


def test_what_stands_under_a_picture():
    (card,) = build_gallery([figure(0, 1.0, "ig:iterations=5:tv=0.1", labels="oracle", unfinished=True, found=False)])
    assert card.guesses[0].title == "ig"
    assert card.guesses[0].lines[:3] == ["iterations=5", "tv=0.1", "labels known"]
    assert {"unfinished", "nothing returned"} <= set(card.guesses[0].lines)


def test_a_long_gallery_opens_with_its_worst_cases(updates):
    lines = (updates / "figures.jsonl").read_text().splitlines()
    pictures = [line for line in map(json.loads, lines) if line["kind"] == "picture"]
    few = write_page([updates]).read_text()
    assert "<details><summary>" not in few.split('id="gallery"')[1].split("</section>")[0]
    more = [json.dumps(each | {"target": each["target"] + 4 * turn}) for turn in (1, 2, 3) for each in pictures]
    (updates / "figures.jsonl").write_text("\n".join([*lines, *more]) + "\n")
    opened, _, behind = write_page([updates]).read_text().split('id="gallery"')[1].partition("<summary>4 more")
    assert opened.count('<article class="card"') == 12 and behind.count('<article class="card"') == 4


def test_a_run_whose_trials_all_diverge_is_not_green(monkeypatch, tmp_path, capsys):
    tiny_attack.install(monkeypatch)
    config = read(Invert, None, {"model": "tiny_attack:linear", "attack": "broken", "targets": 2})
    rows = run_invert(config, tmp_path / "run")
    print_inversion(rows)
    assert "nothing was measured" in " ".join(capsys.readouterr().out.split())
    assert "Nothing was measured" in (tmp_path / "run" / "report.html").read_text()


def test_losses_have_one_view_an_attack(updates):
    page = (updates / "report.html").read_text()
    views = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])["losses"]
    assert [view["label"] for view in views] == ["tiny:iterations=3", "tiny"]
    assert [len(view["panels"][0]["data"]) for view in views] == [4, 4]
    assert views[0]["panels"][0]["layout"]["yaxis"]["type"] == "log"


def test_one_page_of_an_audit_and_of_attacks_on_updates(updates, tmp_path):
    folder, rows = tmp_path / "models", audit_rows()
    folder.mkdir()
    for name, objects in (("results.jsonl", [row.to_json() for row in rows]), ("figures.jsonl", figures_of(rows))):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in objects))
    (folder / "run.json").write_text(json.dumps({"schema": 1, "kind": "audit", "secateur": "0.1.0"}))
    page = write_page([updates, folder], tmp_path / "both.html").read_text()
    assert "Leakage of the pruned models and the updates" in page
    assert 'id="recovered"' in page and 'id="attacks"' in page and page.count(PNG) == 4 * 3
    assert page.count('class="badge"') == 2


def test_a_run_that_has_shown_nothing_yet_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "kind": "invert", "secateur": "0.1.0"}))
    with pytest.raises(WrongInput, match="no results yet"):
        write_page([tmp_path])


def test_a_narrow_terminal_cuts_no_name_and_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def rows(attack, metrics, **labels):
        extra = {"target": None, "labels": "inferred", "threat": "a server", "knows": "all"}
        own = {"model": "m", "dataset": "d", "seed": 0, "attack": attack, "defense": "outpost", "extra": extra | labels}
        return [Row(**own, metric=metric, value=value) for metric, value in metrics.items()]

    judged = {"psnr": 139.0, "psnr_median": 139.0, "psnr_max": 140.2, "ssim": 0.5, "lpips": 0.25}
    judged |= {"label_accuracy": 1.0, "recognisable": 1.0, "attack_loss": 1.01e-6}
    print_inversion(rows("ig:adaptive=support:iterations=2500", judged) + rows("r-gap", judged))
    table, _, _ = capsys.readouterr().out.partition("a server")
    for whole in ("adaptive=support", "iterations=2500", "r-gap", "outpost", "139.0 dB", "140.2 dB", "100.0%"):
        assert whole in table
    assert "nisable" in table.split("PSNR")[0] + table and "SSIM" in table  # the key column is the first measure
    monkeypatch.setenv("COLUMNS", "60")
    print_inversion(rows("ig:adaptive=support:iterations=2500", judged))
    narrow = capsys.readouterr().out.partition("a server")[0]
    assert "nisable" in narrow and "100.0%" in narrow and "LPIPS" not in narrow and "SSIM" not in narrow
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in table and "inferred" not in table  # labels are the same for all
    print_inversion(rows("ig", judged) + rows("ig", judged, labels="oracle"))
    table, _, _ = capsys.readouterr().out.partition("a server")
    assert "oracle" in table and "loss" not in table
    print_inversion(rows("ig", {"attack_loss": 0.25}))
    assert "loss" in capsys.readouterr().out


def test_a_losses_axis_is_logarithmic_only_where_every_loss_is_above_0():
    def axis(*losses):
        curve = [[step, loss] for step, loss in enumerate(losses)]
        own = {"kind": "loss", "curve": curve, "attack": "ig", "defense": "none", "target": 0, "seed": 0}
        (view,) = draw_losses([own | {"model": "m", "dataset": "d"}])
        return view.panels[0].layout["yaxis"]

    assert "type" not in axis(0.5, -0.1)
    assert (axis(1.0, 1e-4)["type"], axis(1.0, 1e-4)["dtick"]) == ("log", 1)
    assert "dtick" not in axis(1.0, 0.9)
