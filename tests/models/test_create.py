import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import Generator, nn

from secateur.errors import WrongInput
from secateur.models.create import check, create, load_weights
from secateur.tree import state_of

MINE = """
from torch import nn

def sized(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], classes))

def fixed():
    return nn.Linear(4, 2)

def wide(classes, width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, classes))

def broken():
    raise RuntimeError("no weights today")

def text():
    return "a net"

ready = nn.Linear(4, 2)
number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_nets", None)


def seeded(seed):
    return Generator().manual_seed(seed)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_generator_alone_decides_the_weights():
    torch.manual_seed(1)
    one = create("digits-cnn", (1, 8, 8), 10, seeded(5))
    torch.manual_seed(2)
    assert same(one, create("digits-cnn", (1, 8, 8), 10, seeded(5)))
    assert not same(one, create("digits-cnn", (1, 8, 8), 10, seeded(6)))
    rng = seeded(5)
    assert same(one, create("digits-cnn", (1, 8, 8), 10, rng))
    assert not same(one, create("digits-cnn", (1, 8, 8), 10, rng))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    check(create("mlp", (5,), 3, seeded(0)), (5,), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_hyper_parameters_reach_the_model():
    net = create("mlp", (5,), 3, seeded(0), dropout=0.4)
    assert {m.p for m in net.modules() if isinstance(m, nn.Dropout)} == {0.4}
    with pytest.raises(WrongInput, match="'drop' is not known; did you mean 'dropout'"):
        create("mlp", (5,), 3, seeded(0), drop=0.4)


def test_an_unknown_name_meets_the_nearest_one():
    with pytest.raises(WrongInput, match="did you mean 'resnet18'"):
        create("resnet-18", (3, 32, 32), 10, seeded(0))


@pytest.mark.parametrize("function", ["sized", "fixed", "wide"])
def test_a_users_function(mine, function):
    net = create(f"my_nets:{function}", (4,), 2, seeded(3))
    check(net, (4,), 2)
    assert same(net, create(f"my_nets:{function}", (4,), 2, seeded(3)))


def test_a_users_hyper_parameter(mine):
    assert create("my_nets:wide", (4,), 2, seeded(0), width=5)[0].out_features == 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_nets:absent", "cannot be imported .*absent"),
        (
            "no_such_module:net",
            "cannot be imported .*no_such_module.*start secateur in the folder of no_such_module.py",
        ),
        (":net", "cannot be imported"),
        ("my_nets:", "cannot be imported"),
        ("my_nets:broken", "raised RuntimeError: no weights today"),
        ("my_nets:text", "returned str; it must return a torch.nn.Module"),
        ("my_nets:ready", "is Linear; it must be a function"),
        ("my_nets:number", "is int; it must be a function"),
    ],
)
def test_a_users_mistake_is_one_sentence(mine, name, says):
    with pytest.raises(WrongInput, match=f"^model: .*{says}"):
        create(name, (4,), 2, seeded(0))


class Answers(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (Answers(torch.full((2, 3), float("nan"))), "finite"),
        (Answers(torch.full((2, 3), float("inf"))), "finite"),
        (Answers(torch.zeros(2, 4)), r"\(2, 3\) logits, and returned \(2, 4\)"),
        (Answers(torch.zeros(6)), r"returned \(6,\)"),
        (Answers((torch.zeros(2, 3),)), "returned tuple"),
        (nn.Linear(7, 3), r"inputs of the shape \(4,\); it raised RuntimeError"),
    ],
)
def test_check_refuses(net, says):
    with pytest.raises(WrongInput, match=f"^model: .*{says}"):
        check(net, (4,), 3)


def test_check_leaves_the_model_as_it_was():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double().train()
    net[1].eval()
    before = state_of(net)
    check(net, (4,), 3)
    assert [module.training for module in net] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_saved_weights_come_back(tmp_path):
    one = create("digits-cnn", (1, 8, 8), 10, seeded(1))
    save_file(state_of(one), tmp_path / "net.safetensors")
    other = create("digits-cnn", (1, 8, 8), 10, seeded(2))
    assert load_weights(other, tmp_path / "net.safetensors") is other
    assert same(one, other)


def test_weights_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "net.safetensors"
    save_file({"weight": torch.zeros(3, 5), "extra": torch.zeros(1)}, path)
    net = nn.Linear(4, 3)
    before = state_of(net)
    with pytest.raises(WrongInput) as error:
        load_weights(net, path)
    assert error.value.field == "weights"
    assert error.value.message.endswith(
        "does not fit the model; missing: bias; unexpected: extra; of another shape: weight (3, 5) for (3, 4)"
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_only_the_first_few_names_are_given(tmp_path):
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(WrongInput, match=r"missing: 1\.weight, 1\.bias, 4\.weight and 3 more$"):
        load_weights(create("mlp", (5,), 3, seeded(0)), tmp_path / "empty.safetensors")


def test_unreadable_weights(tmp_path):
    with pytest.raises(WrongInput, match=r"net\.h5 is not allowed; use a \.safetensors file, or a state dict"):
        load_weights(nn.Linear(4, 3), tmp_path / "net.h5")
    save_file(state_of(nn.Linear(4, 3)), tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-7])
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("cut", "absent", "folder"):
        with pytest.raises(WrongInput, match=f"{name}.safetensors cannot be read"):
            load_weights(nn.Linear(4, 3), tmp_path / f"{name}.safetensors")
