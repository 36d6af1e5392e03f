"""Networks of a user's function that return something else than a table of logits."""

import copy
import importlib

import pytest
import torch
from torch import Generator

import secateur
from secateur import tree
from secateur.errors import WrongInput
from secateur.inference import bind_state, to_probabilities
from secateur.models.create import check, create
from secateur.models.wrap import wrap
from secateur.training.recipe import Recipe

MODULE = """
import types
from torch import nn

class Net(nn.Module):
    def __init__(self, outputs, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(5, 8), nn.Linear(8, outputs), change
    def forward(self, x):
        return self.change(self.last(self.first(x).relu()))

def plain(): return Net(2, lambda y: y)
def mapping(): return Net(2, lambda y: {"hidden": y[:, :1], "logits": y})
def pair(): return Net(2, lambda y: (y, y[:, :1]))
def record(): return Net(2, lambda y: types.SimpleNamespace(loss=None, logits=y))
def one(): return Net(1, lambda y: y)
def flat(): return Net(1, lambda y: y[:, 0])
def sure(): return Net(1, lambda y: y.sigmoid().squeeze(1))
def second(): return Net(2, lambda y: {"probabilities": y.softmax(1)[:, 1]})
"""
FORMS = ("plain", "mapping", "pair", "record", "one", "flat", "sure", "second")


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_outputs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_outputs"


def make(own, form, classes=2):
    return create(f"{own}:{form}", (5,), classes, Generator().manual_seed(0))


@pytest.mark.parametrize("form", FORMS)
def test_the_command_reads_outputs_as_python_does(form, own):
    net, rows = make(own, form), torch.randn(30, 5, generator=Generator().manual_seed(1))
    check(net, (5,), 2)
    bare = copy.deepcopy(net)
    bare._forward_hooks.clear()
    answers = to_probabilities(bind_state(net, tree.state_of(net), "cpu")(rows))
    outputs = "probabilities" if form in ("sure", "second") else "logits"
    assert torch.allclose(answers, wrap(bare, outputs=outputs).predict(rows), atol=1e-6)
    assert list(net.state_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("form", ["mapping", "flat", "sure"])
def test_python_prunes_networks_of_any_outputs(form, own):
    net, rng = getattr(importlib.import_module(own), form)(), Generator().manual_seed(0)
    sides = [(torch.randn(20, 5, generator=rng), torch.arange(20) % 2) for _ in range(2)]
    options = {"attacks": "conf", "pruner": "l1-unstructured", "recipe": Recipe(epochs=1)}
    assert secateur.audit(net, *sides, **options).value("auc", "conf") is not None
    assert not net._forward_hooks  # the user's own network is left alone


def test_one_number_cannot_answer_for_three_classes(own):
    with pytest.raises(WrongInput, match=r"\(2, 3\) logits, and returned \(2, 1\)"):
        check(make(own, "one", classes=3), (5,), 3)
