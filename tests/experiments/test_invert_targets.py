"""`ats:policies=search`: found before the run, named in its rows, and looked for once."""

import pytest
import torch
from torch import nn

import secateur
from secateur.config import Invert, defense, read
from secateur.defenses.ats import read_policies
from secateur.errors import WrongInput
from secateur.experiments import invert_targets
from secateur.experiments.invert import plan, run_invert
from secateur.interfaces import Batch

SEARCHED = "ats:candidates=4:policies=search+dgp"


def settings(**more):
    return read(Invert, None, {"defense": SEARCHED, "attack": "ig:iterations=1", "targets": 1} | more)


def test_a_run_searches_once_and_its_rows_name_what_was_found(tmp_path, monkeypatch):
    rows = run_invert(settings(), tmp_path / "run")
    (named,) = {row.defense for row in rows if row.metric == "psnr"}
    ats, _, dgp = named.partition("+")
    assert dgp == "dgp" and len(read_policies(ats.removeprefix("ats:policies="))) == 2
    assert all(len(policy) == 3 for policy in read_policies(ats.removeprefix("ats:policies=")))
    monkeypatch.setattr(invert_targets, "search", lambda *_: pytest.fail("it was searched before"))
    assert run_invert(settings(attack="ig:iterations=2"), tmp_path / "run")


def test_a_dry_run_says_so():
    assert any("search policies" in line for line in plan(settings()))


def test_the_search_is_of_the_settings_that_were_given(tmp_path):
    with pytest.raises(WrongInput, match="none of 4 candidates reaches an accuracy score of -63"):
        run_invert(settings(defense="ats:policies=search:candidates=4:threshold=-63.0"), tmp_path / "run")
    with pytest.raises(WrongInput, match="candidates: 0 is not allowed"):
        settings(defense="ats:policies=search:candidates=0")


def test_from_python(rng):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3))
    batch = Batch(torch.rand(6, 1, 8, 8, generator=rng), torch.tensor([0, 1, 2, 0, 1, 2]))
    report = secateur.invert(net, batch, "ig:iterations=1", defense=SEARCHED, batch_size=1)
    (named,) = {row.defense for row in report.rows}
    assert named.startswith("ats:policies=") and "search" not in named


def test_elsewhere_it_is_refused_with_the_reason():
    (part,) = defense("ats:policies=search").parts
    with pytest.raises(WrongInput, match="policies=search is not possible here"):
        part.make().transform(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
