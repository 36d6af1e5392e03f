"""The user's own training function, and the key of a user's code."""

import importlib
import sys

import pytest
import torch
from torch import Generator, nn

from secateur.cli import main
from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.training.recipe import Task
from secateur.training.user_function import UserFunction, source_key

FIT = """
import torch
from torch import nn

def fit(model, inputs, labels, generator):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        rows = torch.randint(len(inputs), (16,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimiser.step()
    return model

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

def keep(model, inputs, labels, generator):
    return model

def explode(model, inputs, labels, generator):
    for value in model.parameters():
        value.data.fill_(float("nan"))
    return model

def fail(model, inputs, labels, generator):
    raise RuntimeError("no disk left\\nand more")

def another(model, inputs, labels, generator):
    return nn.Linear(3, 5)

def nothing(model, inputs, labels, generator):
    pass

def chance(model, inputs, labels, generator):
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    return model
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's, and import it anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(text, name="fits"):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        names.append(name)
        return f"{name}:fit"

    yield write
    for name in names:
        sys.modules.pop(name, None)


def task(seed=0):
    rng = Generator().manual_seed(seed)
    inputs = torch.randn(40, 3, generator=rng)
    net = nn.Linear(3, 2)
    batch = Batch(inputs, (inputs[:, 0] > 0).long())
    return net, Task({k: v.clone() for k, v in net.state_dict().items()}, batch, batch, Generator().manual_seed(seed))


def test_the_function_trains_a_copy_and_repeats_itself(module):
    module(FIT)
    net, job = task()
    ((index, fitted),) = UserFunction("fits:fit").fit_many(net, [job])
    ((_, again),) = UserFunction("fits:fit").fit_many(net, [job])
    assert index == 0 and all(torch.equal(fitted.state[name], again.state[name]) for name in fitted.state)
    assert all(torch.equal(value, job.state[name]) for name, value in net.state_dict().items())  # the start is kept
    net.load_state_dict(fitted.state)
    assert float((net(job.train.inputs).argmax(1) == job.train.labels).float().mean()) > 0.9


def test_the_global_generator_is_seeded_too_and_left_alone(module):
    module(FIT)
    net, job = task()
    torch.manual_seed(1)
    first = UserFunction("fits:chance").train(net, job)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(UserFunction("fits:chance").train(net, job)["weight"], first["weight"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("keep", "returned the weights that it got; it must train them"),
        ("explode", "returned NaN or infinite weights"),
        ("fail", "raised RuntimeError: no disk left"),
        ("another", "returned another model than it got; of another shape: weight"),
        ("nothing", "returned NoneType; return the trained model"),
        ("absent", "cannot be imported"),
    ],
)
def test_what_the_function_returns_is_checked(name, problem, module):
    module(FIT)
    with pytest.raises(WrongInput, match=f"train: .*{problem}") as raised:
        UserFunction(f"fits:{name}").train(*task())
    assert "\n" not in str(raised.value)


BASE = """
import helpers
RATE = 0.1
UNUSED = 3

def scale(x):
    return RATE * x

def fit(model, inputs, labels, generator):
    return helpers.step(scale(model))

def other():
    return UNUSED
"""


def test_the_key_changes_with_the_code_that_the_function_needs_and_with_no_other(module):
    module("def step(x):\n    return x\n", "helpers")
    key = source_key("train", module(BASE))
    same = [BASE + "\ndef unrelated():\n    return 1\n", BASE.replace("UNUSED = 3", "UNUSED = 4")]
    same += [BASE.replace("RATE * x", "RATE*x  # a comment"), '"""A docstring."""\n' + BASE]
    assert all(source_key("train", module(text)) == key for text in same)
    other = [BASE.replace("RATE = 0.1", "RATE = 0.2"), BASE.replace("RATE * x", "RATE + x")]
    other += [BASE + "\nRATE += 1\n", BASE + "\nhelpers.step = None\n", BASE.replace("step(scale", "step(1 and scale")]
    keys = {source_key("train", module(text)) for text in other}
    assert len(keys) == len(other) and key not in keys
    module(BASE)
    module("def step(x):\n    return -x\n", "helpers")
    assert source_key("train", "fits:fit") != key


@pytest.mark.parametrize("text", ["from helpers import *\n", "def fit():\n    return globals()['other']()\n"])
def test_where_names_cannot_be_followed_the_whole_module_counts(text, module):
    module("def fit():\n    return 1\n", "helpers")
    key = source_key("train", module(text))
    assert source_key("train", module(text + "\ndef unrelated():\n    return 1\n")) != key


TINY = ["--set", "finetune.epochs=1", "--set", "examples=240", "--model", "fits:net", "--attack", "conf,lira"]


def audit(out, *flags):
    return main(["audit", *TINY, "--out", str(out), *flags])


def test_an_audit_trains_every_model_by_the_function_and_again_only_where_it_changed(module, tmp_path, capsys):
    module(FIT)
    flags = ["--train", "fits:fit", "--shadows", "2"]
    assert audit(tmp_path / "run", *flags) == 0
    trained = sorted((tmp_path / "run" / "artifacts").glob("train-*"))
    assert len(trained) == 3 and "slimming" not in (tmp_path / "run" / "results.jsonl").read_text()
    module(FIT + "\ndef unrelated():\n    return 1\n")
    assert audit(tmp_path / "run", *flags) == 0
    assert sorted((tmp_path / "run" / "artifacts").glob("train-*")) == trained
    module(FIT.replace("range(30)", "range(31)"))
    assert audit(tmp_path / "run", *flags) == 0
    assert len(list((tmp_path / "run" / "artifacts").glob("train-*"))) == 6
    assert "function: fits:fit" in (tmp_path / "run" / "config.yaml").read_text()


def test_prune_trains_by_the_function_as_the_audit_does(module, tmp_path):
    module(FIT)
    same = ["--train", "fits:fit", "--pruner", "l1-unstructured"]
    assert audit(tmp_path / "run", *same, "--shadows", "2", "--export", str(tmp_path / "models")) == 0
    assert main(["prune", *TINY[:6], *same, "--out", str(tmp_path / "pruned.safetensors")]) == 0
    (audited,) = (tmp_path / "models").glob("l1*.safetensors")
    assert audited.read_bytes() == (tmp_path / "pruned.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--train", "fits:absent"], "train: 'fits:absent' cannot be imported"),
        (["--train", "fits"], "train: 'fits' is not allowed; use module:function, or fields such as epochs"),
        (["--set", "train={function: fits:fit, epochs: 3}"], "train: the function sets the training, and epochs too"),
        (["--train", "fits:fit", "--pruner", "slimming"], "train: slimming acts on the training, which fits:fit does"),
        (["--train", "fits:fit", "--defense", "dp-sgd-scratch"], "train: dp-sgd-scratch acts on the training"),
        (["--train", "fits:keep", "--pruner", "none"], "train: fits:keep returned the weights that it got"),
    ],
)
def test_a_wrong_function_is_one_sentence(flags, problem, module, tmp_path, capsys):
    module(FIT)
    assert audit(tmp_path / "run", *flags) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("secateur: ")]
    assert len(said) == 1 and problem in said[0]
