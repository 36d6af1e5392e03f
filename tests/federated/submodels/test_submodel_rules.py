"""Channel rules by hand: the sets of the paper's code, its groups, and how much of the server ten clients cover."""

import json

import numpy as np
import pytest
import torch

from secateur import catalogue
from secateur.catalogue import find
from secateur.cli import main
from secateur.errors import WrongInput
from secateur.federated.submodels.networks import without_statistics
from secateur.federated.submodels.rules import RuleContext, turn
from secateur.federated.submodels.structure import ClientAndRound, Structure
from secateur.models.create import create

# numpy.random.RandomState(seed).permutation(8), by seed
DRAWN = {
    1: [7, 2, 1, 6, 0, 4, 3, 5],
    2: [4, 1, 6, 2, 3, 7, 5, 0],
    3: [5, 7, 4, 6, 3, 1, 0, 2],
    4: [4, 7, 3, 0, 1, 5, 6, 2],
    6: [0, 5, 6, 7, 4, 3, 1, 2],
    13: [1, 4, 3, 5, 6, 7, 0, 2],
    26: [3, 7, 4, 2, 1, 0, 6, 5],
}
ROUND_1 = [2, 9, 6, 4, 0, 3, 1, 7, 8, 5]  # RandomState(1).permutation(10)
FIRST, SECOND = [0, 1, 2, 3], [4, 5, 6, 7]


def at(client=0, number=1, layer=0, keep=4, of=8):
    return RuleContext(client, 10, number, layer, layer, keep, of)


def chosen(name, place, **fields):
    return find("submodel", name)(**fields)(place).tolist()


def of_seed(seed):
    return sorted(DRAWN[seed][:4])


def test_the_names():
    assert list(catalogue.methods("submodel")) == [
        *("fdropout", "gsr", "heterofl", "heterofl-r", "local", "mapp-fl", "mapp-fl-r", "none", "osm", "osr", "ufr")
    ]


def test_the_list(capsys):
    assert main(["list", "submodels", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mapp-fl"]["defaults"] == {"groups": 4} and "Eq. 8" in rows["mapp-fl"]["summary"]


def test_whose_turn_is_the_rounds_permutation():
    assert [turn(at(client)) for client in range(10)] == ROUND_1


def test_none_and_heterofl():
    assert chosen("none", at()) == list(range(8))
    assert chosen("heterofl", at(client=7, number=9, layer=3)) == FIRST


@pytest.mark.parametrize(
    ("group", "even", "odd"), [(0, FIRST, FIRST), (1, SECOND, FIRST), (2, FIRST, SECOND), (3, SECOND, SECOND)]
)
def test_mapp_fl_by_group_and_layer(group, even, odd):
    client = next(c for c in range(10) if ROUND_1[c] % 4 == group)
    assert [chosen("mapp-fl", at(client, layer=layer)) for layer in range(3)] == [even, odd, even]


def test_mapp_fl_deals_groups_anew_in_every_round():
    assert chosen("mapp-fl", at(client=2, number=1, layer=1)) == SECOND  # 6 % 4 = 2
    assert chosen("mapp-fl", at(client=2, number=2, layer=1)) == FIRST  # RandomState(2): 5 % 4 = 1


@pytest.mark.parametrize(("groups", "width", "of"), [(9, 4, 12), (16, 3, 12)])
def test_nine_and_sixteen_groups_cover_every_pair_of_blocks_once(groups, width, of):
    rule = find("submodel", "mapp-fl")(groups=groups)
    turns = np.random.RandomState(1).permutation(groups)
    pairs = set()
    for client in range(groups):
        even, odd = (rule(RuleContext(client, groups, 1, layer, layer, width, of)) for layer in (0, 1))
        pairs.add((even[0], odd[0]))
        number = turns[client] % groups
        assert even[0] == number % (of // width) * width and odd[0] == number // (of // width) * width
    assert len(pairs) == groups


def test_random_sets_by_layer_and_set():
    assert [chosen("heterofl-r", at(client, number=client + 1, layer=1)) for client in (0, 5)] == [of_seed(2)] * 2
    assert chosen("ufr", at(client=4, layer=3)) == of_seed(4)  # its turn is 0: seed (0 + 1)(3 + 1)
    assert chosen("mapp-fl-r", at(client=0, layer=0)) == of_seed(3)  # its turn is 2, so is its group
    assert chosen("mapp-fl-r", at(client=2, layer=1)) == of_seed(6)  # its turn is 6, its group 2
    assert chosen("osr", at(client=8, number=12, layer=0)) == of_seed(13)  # set t
    assert chosen("fdropout", at(client=0, number=1, layer=1)) == of_seed(26)  # set 2 + 10 t = 12
    assert chosen("gsr", at(client=0, number=1, layer=0)) == of_seed(13)  # set 2 % 4 + 10 t = 12


def test_osm_has_two_readings():
    code = [chosen("osm", at(client, number=1)) for client in range(10)]
    assert code == [SECOND] * 10  # t % 4 = 1, an even layer
    drawn = [1, 3, 0, 0, 3, 1, 3, 1, 3, 0]  # RandomState(1).randint(4, size=10)
    paper = [chosen("osm", at(client, number=1), reading="paper") for client in range(10)]
    assert paper == [SECOND if group % 2 else FIRST for group in drawn]


@pytest.mark.parametrize("fields", [{"groups": 5}, {"groups": 1}])
def test_groups_are_squares(fields):
    with pytest.raises(WrongInput, match="must be 4, 9 or 16"):
        find("submodel", "mapp-fl")(**fields)


def test_coupling_is_layer_wise_or_independent():
    with pytest.raises(WrongInput, match="layer-wise"):
        find("submodel", "fdropout")(coupling="both")


@pytest.fixture(scope="module")
def structure():
    return Structure(without_statistics(create("mapp-cnn-16", (3, 32, 32), 10, torch.Generator())), (3, 32, 32))


def covered(structure, name, clients, number=1, **fields):
    """The share of the hidden convolutions' cells that some of ten clients train in a round."""
    rule = find("submodel", name)(**fields)
    cuts = [structure.cut(rule, ClientAndRound(client, 10, number), 0.5) for client in clients]
    hidden = ["5.weight", "10.weight", "15.weight"]
    cells = [{int(cell) for cut in cuts for cell in cut.parts[name].tolist()} for name in hidden]
    return sum(map(len, cells)) / sum(structure.sizes[name] for name in hidden)


TEN, EIGHT = range(10), range(2, 10)


@pytest.mark.parametrize(
    ("name", "clients", "low", "high"),
    [
        ("heterofl", TEN, 0.25, 0.25),
        ("heterofl-r", TEN, 0.25, 0.25),
        ("mapp-fl", TEN, 1.0, 1.0),
        ("mapp-fl-r", TEN, 0.67, 0.69),
        ("ufr", TEN, 0.935, 0.955),
        ("fdropout", TEN, 0.93, 0.97),
        ("ufr", EIGHT, 0.89, 0.92),
        ("fdropout", EIGHT, 0.87, 0.93),
        ("osr", TEN, 0.25, 0.25),
        ("osm", TEN, 0.25, 0.25),
        ("osm:reading=paper", TEN, 0.75, 1.0),  # a group may be nobody's
        ("gsr", TEN, 0.65, 0.72),  # 1 - .75^4 = .684 of four random sets
        ("mapp-fl:groups=9", TEN, 1.0, 1.0),
    ],
)
def test_coverage_of_hidden_cells_by_ten_and_by_eight_small_clients(structure, name, clients, low, high):
    """Of the notes; in every round."""
    name, _, setting = name.partition(":")
    field, _, value = setting.partition("=")
    fields = {field: int(value) if value.isdigit() else value} if setting else {}
    for number in (1, 2, 3, 17, 60, 149):
        assert low - 1e-9 <= covered(structure, name, clients, number, **fields) <= high + 1e-9, number


def test_eight_small_clients_of_mapp_fl_cover_all_where_all_groups_occur(structure):
    dealt = {t: {turn(at(client, t)) % 4 for client in EIGHT} for t in range(1, 501)}
    assert 0.93 <= np.mean([len(groups) == 4 for groups in dealt.values()]) <= 0.97
    for number in (1, 2, 15, 16):  # in 15 and 16 a group is missing, and with it a quarter of every hidden layer
        assert covered(structure, "mapp-fl", EIGHT, number) == len(dealt[number]) / 4
    assert [len(dealt[number]) for number in (1, 2, 15, 16)] == [4, 4, 3, 3]
