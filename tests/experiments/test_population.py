"""The attacker's own population: rows that are neither members nor candidates train shadow models."""

import numpy as np
import pytest
import torch

from secateur.attacks.membership.rmia import rmia
from secateur.cli import main
from secateur.config import Audit
from secateur.data.load import load
from secateur.data.partition import in_out_pool, split_trained, victim_shadow
from secateur.evaluation.setup import join_population
from secateur.experiments.audit import parts_of
from secateur.interfaces import Batch, BlackBox, InOut
from secateur.runs.folder import load_rows

TINY = ["--set", "train.epochs=6", "--set", "train.patience=6", "--set", "finetune.epochs=1", "--model", "mlp"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(*parts):
    return {int(row) for part in parts for row in part}


def test_shadows_of_a_given_model_train_on_the_population_alone_and_on_no_more_rows_than_the_victim():
    split = split_trained(200, 60, 3, rng(), population=torch.arange(200, 400))
    assert rows(split.victim.train) == set(range(60))
    assert len(split.victim.test) == 126 and rows(split.victim.validation, split.victim.test) == set(range(60, 200))
    for part in split.shadows:
        assert len(part.train) == 60 and rows(part.train, part.validation, part.test) == set(range(200, 400))
    assert rows(split.shadows[0].train) != rows(split.shadows[1].train)


def test_the_victim_stays_the_same_with_a_population_and_shadows_draw_from_both():
    plain, joined = (victim_shadow(100, 2, rng(), population=extra) for extra in (None, torch.arange(100, 130)))
    assert all(map(torch.equal, vars(plain.victim).values(), vars(joined.victim).values()))
    for part in joined.shadows:
        drawn = rows(part.train, part.validation, part.test)
        assert len(part.train) == len(plain.victim.train) and set(range(100, 130)) <= drawn
        assert not drawn & rows(*vars(plain.victim).values())


@pytest.mark.parametrize(("outside", "joined"), [(20, 33), (60, 12), (100, 15)])
def test_in_out_models_get_as_many_rows_as_the_victim_and_a_tenth_of_strangers(outside, joined):
    victim = split_trained(60 + outside + 10, 60, 0, rng()).victim
    pool = in_out_pool(victim, torch.arange(500, 700), rng())
    candidates = len(victim.train) + len(victim.test)
    assert pool[:candidates].tolist() == torch.cat([victim.train, victim.test]).tolist()
    assert len(pool) - candidates == joined and int(pool[candidates:].min()) >= 500
    assert len(in_out_pool(victim, torch.arange(0), rng())) == candidates


def test_rmia_compares_with_the_population_of_the_pool():
    pool = Batch(torch.randn(40, 2, generator=rng()), torch.zeros(40, dtype=torch.int64))
    boxes = [BlackBox(lambda x, i=i: torch.softmax(x * (i + 1), 1)) for i in range(4)]
    inside = torch.stack([torch.arange(40) % 4 >= 2, torch.arange(40) % 4 < 2] * 2)
    known = rmia().fit(InOut(boxes, pool, inside, torch.arange(30, 40)), rng())
    assert sorted(known.rows.tolist()) == list(range(30, 40))
    assert len(rmia().fit(InOut(boxes, pool, inside), rng()).rows) == 40


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Digits of a user: 240 members, 260 others, and 400 that are neither; a model that was trained on the members."""
    folder, data = tmp_path_factory.mktemp("files"), load("digits")
    pixels = ((data.inputs * data.std[0] + data.mean[0]) * 255).round().byte().numpy()
    labels = data.labels.numpy()
    np.savez(folder / "own.npz", inputs=pixels[:500], labels=labels[:500], train_size=240)
    np.savez(folder / "population.npz", inputs=pixels[500:900], labels=labels[500:900])
    np.savez(folder / "overlap.npz", inputs=pixels[400:600], labels=labels[400:600])
    np.savez(folder / "wide.npz", inputs=pixels[:50, :, :, :6], labels=labels[:50])
    np.savez(folder / "numbers.npz", inputs=data.inputs[500:600].numpy(), labels=labels[500:600])
    np.savez(folder / "strange.npz", inputs=pixels[500:520], labels=np.arange(20))
    weights = ["--data", str(folder / "own.npz"), "--rows", "all", "--sparsity", "0"]
    assert main(["prune", *TINY, *weights, "--out", str(folder / "net.safetensors")]) == 0
    return folder


def audit(files, out, *flags):
    given = ["--data", str(files / "own.npz"), "--weights", str(files / "net.safetensors"), "--pruner", "none"]
    return main(["audit", *TINY, *given, "--out", str(out), *flags])


def test_the_population_is_scaled_as_the_data(files):
    config = Audit(data=str(files / "own.npz"), schema=1)
    data, alone = load(str(files / "own.npz")), load(str(files / "population.npz"))
    joined = join_population(config, data, str(files / "population.npz"))
    assert joined.population == 400 and joined.train_size == 240
    pixels = alone.inputs * alone.std[0] + alone.mean[0]
    torch.testing.assert_close(joined.inputs[500:] * data.std[0] + data.mean[0], pixels)


@pytest.mark.parametrize(("flags", "models"), [(["--shadows", "3"], 3), (["--attack", "conf,rmia"], 8)])
def test_an_audit_trains_the_attackers_models_on_the_population(files, tmp_path, flags, models, few_epochs):
    assert audit(files, tmp_path / "run", "--population", str(files / "population.npz"), *flags) == 0
    found = load_rows(tmp_path / "run")
    assert {row.value for row in found if row.metric == "population"} == {400.0}
    (resemblance,) = (row.note for row in found if row.extra.get("check") == "shadows")
    assert f"{models} shadow models, each trained on " in resemblance
    assert all(row.value is not None for row in found if row.metric == "auc")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "400 more rows of its own" in page or "attackers with shadow models were weaker" in page


def test_all_outsiders_are_asked_about_where_the_population_is_the_attackers(files):
    config = Audit(weights=files / "net.safetensors", shadows=2, train={"epochs": 1}, schema=1)
    data = join_population(config, load(str(files / "own.npz")), str(files / "population.npz"))
    parts = parts_of(config, data, seed=0)
    assert len(parts["victim"].test) == 234
    assert all(int(part.train.min()) >= 500 for role, part in parts.items() if role != "victim")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("overlap.npz", "100 of 200 rows are in own too; leave them out"),
        ("wide.npz", "inputs of the shape (1, 8, 6), those of own have (1, 8, 8)"),
        ("numbers.npz", "not scaled alike"),
        ("strange.npz", "strange has labels from 0 to 19; allowed: 0 to 9"),
        ("absent.npz", "does not exist"),
    ],
)
def test_a_wrong_population_is_one_sentence(files, tmp_path, file, problem, capsys):
    assert audit(files, tmp_path / "run", "--population", str(files / file)) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_population_without_a_recipe_is_refused(files, tmp_path, capsys):
    given = ["--data", str(files / "own.npz"), "--weights", str(files / "net.safetensors"), "--model", "mlp"]
    population = ["--population", str(files / "population.npz")]
    assert main(["audit", *given, *population, "--out", str(tmp_path / "run")]) == 2
    assert "population: is for the attacker's models; set a `train:`" in capsys.readouterr().err
