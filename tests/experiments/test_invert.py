"""The job of `secateur invert`, with a small attack of the tests' own."""

import sys

import pytest
import torch

import tiny_attack
from secateur.config import Invert, read
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.experiments.invert import plan, run_invert
from secateur.experiments.invert_targets import public_rows, rows_of
from secateur.runs import unfinished
from secateur.runs.folder import load_figures, load_rows
from secateur.runs.rows import select_comparable

MODEL = "tiny_attack:linear"
PNG = 'class="picture" aria-label'


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    tiny_attack.install(monkeypatch)


def settings(**more):
    return read(Invert, None, {"model": MODEL, "attack": "tiny", "targets": 5, "together": 2} | more)


def summary(rows, metric):
    return next(row for row in rows if row.metric == metric and row.extra["target"] is None)


def test_rows_pictures_and_page(tmp_path):
    rows = run_invert(settings(), tmp_path / "run")
    assert rows == load_rows(tmp_path / "run")
    single = [row for row in rows if row.metric == "psnr" and row.extra["target"] is not None]
    assert [row.extra["target"] for row in single] == [0, 1, 2, 3, 4]
    assert all(row.extra["trial"] == 2 and row.extra["labels"] == "inferred" for row in single)
    assert all(row.value > 50 for row in single)  # exact but for the start, halved 20 times
    assert summary(rows, "psnr").extra["threat"] and summary(rows, "label_accuracy").value == 1.0
    assert summary(rows, "diverged").value == 5 and summary(rows, "identified").value == 1.0
    assert {row.extra["stage"] for row in rows} == {"untrained"} and {row.extra["update"] for row in rows} == {
        "gradient"
    }
    assert all(row.timing == (row.metric == "seconds") for row in rows)
    names = sorted(path.name for path in (tmp_path / "run" / "pictures").iterdir())
    assert len(names) == 10 and names[0] == "seed0-target0000-00-tiny.png"
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count(PNG) == 10
    assert "shows training pictures" in page and "one linear layer" in page
    assert not (tmp_path / "run" / "unfinished").exists()


def test_progress_names_the_defense_wherever_it_acts(tmp_path, capsys):
    run_invert(settings(targets=1, defense="none,ats,noise"), tmp_path / "run")
    said = capsys.readouterr().err
    assert "tiny on target 0, seed 0" in said
    assert "tiny on target 0 under ats, seed 0" in said and "under noise, seed 0" in said


def test_no_images_leaves_no_picture_in_page_and_folder(tmp_path):
    run_invert(settings(targets=2), tmp_path / "run")
    run_invert(settings(targets=2, images=False), tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert PNG not in page and "shows training pictures" not in page and "PSNR" in page
    assert not list((tmp_path / "run").glob("pictures/*"))


def test_more_targets_keep_what_is_done(tmp_path):
    first = run_invert(settings(targets=4), tmp_path / "run")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "artifacts").iterdir()}
    second = run_invert(settings(targets=6), tmp_path / "run")
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert len(list((tmp_path / "run" / "artifacts").iterdir())) == 3
    singles = [[row for row in select_comparable(rows) if row["target"] is not None] for rows in (first, second)]
    assert singles[1][: len(singles[0])] == singles[0]


def test_an_interrupted_attack_shows_what_it_had_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("secateur.runs.unfinished.EVERY", 0.0)
    whole = run_invert(settings(), tmp_path / "whole")
    stopping = tiny_attack.Tiny.reconstruct

    def stopped(self, targets, knowledge, rng, watch):
        once = tiny_attack.Tiny(self.iterations, stop=9)
        yield from stopping(once, targets, knowledge, rng, watch)

    with monkeypatch.context() as patch:
        patch.setattr(tiny_attack.Tiny, "reconstruct", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_invert(settings(), tmp_path / "run")
    unfinished = [figure for figure in load_figures(tmp_path / "run") if figure.get("unfinished")]
    assert {figure["target"] for figure in unfinished if figure["kind"] == "picture"} == {0, 1}
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("unfinished</small>") == 2 and page.count(PNG) == 5 + 2
    assert (tmp_path / "run" / "pictures" / "seed0-target0001-00-tiny.png").exists()

    begun = []

    def seen(self, targets, knowledge, rng, watch):
        loaded = watch.load()
        begun.append(int(loaded["step"]) if loaded else 0)
        yield from stopping(self, targets, knowledge, rng, watch)

    monkeypatch.setattr(tiny_attack.Tiny, "reconstruct", seen)
    again = run_invert(settings(), tmp_path / "run")
    assert begun == [9, 0, 0]  # in the middle of the first group
    assert select_comparable(again) == select_comparable(whole)
    assert "unfinished</small>" not in (tmp_path / "run" / "report.html").read_text()


def test_a_damaged_state_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    keeper = unfinished.StageWatcher(tmp_path, "invert", "0" * 64, lambda steps: None, lambda pictures: [])
    assert keeper.load() is None
    keeper.advance(3)
    keeper.save({"x": torch.arange(3)}, [])
    counted = []
    again = unfinished.StageWatcher(tmp_path, "invert", "0" * 64, counted.append, lambda pictures: [])
    assert again.load()["x"].tolist() == [0, 1, 2] and counted == [3]
    (path,) = (tmp_path / "unfinished").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    assert again.load() is None
    unfinished.forget(tmp_path, "invert", "0" * 64)
    assert not list((tmp_path / "unfinished").iterdir())


def test_batches_seeds_and_what_was_not_found(tmp_path):
    rows = run_invert(settings(attack="tiny:misses=1", targets=3, batch_size=3, seeds=2), tmp_path / "run")
    assert {row.seed for row in rows} == {0, 1}
    assert summary(rows, "returned").value == pytest.approx(2 / 3)
    assert {row.extra["item"] for row in rows if row.extra["target"] is not None} == {None, 0, 1, 2}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "nothing returned</small>" in page and "target 2, picture 1, seed 1" in page


def test_an_active_attacker_sends_its_own_model(tmp_path):
    rows = run_invert(settings(attack="tiny,meddling", targets=2), tmp_path / "run")
    by_attack = {row.attack: row.value for row in rows if row.metric == "psnr" and row.extra["target"] is None}
    assert set(by_attack) == {"tiny", "meddling"} and by_attack["meddling"] != by_attack["tiny"]


def test_the_written_configuration_gives_the_same_rows(tmp_path):
    first = run_invert(settings(iterations=4), tmp_path / "a")
    second = run_invert(read(Invert, tmp_path / "a" / "config.yaml", {}), tmp_path / "b")
    assert select_comparable(first) == select_comparable(second)
    assert {row.attack for row in first} == {"tiny:iterations=4"}


def test_the_plan_refuses_what_the_job_would(tmp_path):
    assert "one linear layer" in plan(settings())[-1]
    told = "\n".join(plan(settings(targets=1, attack="ggl", generator_steps=7)))
    assert "take 1 update of 1 example" in told and "train a generator for 7 steps on 899 rows" in told
    with pytest.raises(WrongInput, match="needs one local step"):
        plan(settings(local_steps=2))


def test_an_attack_that_needs_a_generator_gets_one_of_public_rows_once_a_seed(tmp_path):
    small = {"generator_steps": 2, "generator_width": 4, "targets": 3, "together": 2}
    config = settings(**small, attack="ggl:iterations=2:population=4", labels="oracle")
    rows = run_invert(config, tmp_path / "run")
    assert "a generator of such pictures" in summary(rows, "psnr").extra["knows"]
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "run" / "artifacts").iterdir())
    assert names == ["generator", "invert", "invert"]
    assert select_comparable(run_invert(config, tmp_path / "again")) == select_comparable(rows)


def test_a_generator_never_learns_from_a_target():
    data = load("digits")
    for targets in (1, 20, 1700):
        config = settings(targets=targets)
        public = set(public_rows(config, data, 0).tolist())
        assert public and not public & set(rows_of(config, data, 0).flatten().tolist())
    with pytest.raises(WrongInput, match="targets: leave no row to train a generator on"):
        plan(settings(targets=1797, attack="ggl"))


def test_a_generator_of_the_users_own_is_asked_again_when_its_source_changes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "own_pictures.py"
    made = "def pictures(z, y):\n    return {} * z[:, :64].sigmoid().view(-1, 1, 8, 8)\n"
    ggl = settings(attack="ggl:generator=own_pictures:pictures:iterations=1", targets=1)

    def artifacts():
        monkeypatch.delitem(sys.modules, "own_pictures", raising=False)
        run_invert(ggl, tmp_path / "run")
        return len(list((tmp_path / "run" / "artifacts").iterdir()))

    source.write_text(made.format(1.0))
    assert artifacts() == artifacts() == 1
    source.write_text(made.format(0.25))
    assert artifacts() == 2


def test_a_target_begins_at_the_same_place_whoever_is_attacked_with_it_and_however_the_attacker_adapts():
    from secateur.config import choice
    from secateur.experiments.invert import chance_of

    plain, adaptive = choice("inversion", "ig"), choice("inversion", "ig:adaptive=support")
    together, third = chance_of(0, plain)[1], chance_of(0, adaptive, first=2)[1]
    draws = [int(torch.randint(2**62, (), generator=together)) for _ in range(4)]
    assert [int(torch.randint(2**62, (), generator=third)) for _ in range(2)] == draws[2:]
    assert int(torch.randint(2**62, (), generator=chance_of(1, plain)[1])) != draws[0]


def test_closed_form_attacks_adapt_where_that_means_something(tmp_path):
    config = read(
        Invert,
        None,
        {"model": "digits-cnn", "attack": "rob:bins=16", "adaptive": "support", "defense": "dgp", "targets": 2}
        | {"batch_size": 3},
    )
    rows = [row for row in run_invert(config, tmp_path / "run") if row.attack]
    assert {(row.attack, row.adaptive) for row in rows} == {("rob:adaptive=support:bins=16", True)}
    for attack, word in (("rob", "layer"), ("rob", "reapply"), ("r-gap", "reapply")):
        with pytest.raises(WrongInput, match=f"{word} means nothing here: {attack} "):
            read(Invert, None, {"attack": attack, "adaptive": word})
