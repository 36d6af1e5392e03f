"""Rules that withhold weights: computed by hand, and promises that all of them keep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import vmap

from secateur import catalogue, tree
from secateur.config import Audit, Invert, read
from secateur.defenses import selection
from secateur.defenses.withholding import (
    Largest,
    Mix,
    PseudoLargest,
    RandomShare,
    divide,
    empty_state,
    mask_sent,
    put_back,
    rates,
    reload,
    whole_mask,
)
from secateur.errors import WrongInput
from secateur.wire import decode, encode, encode_mask


def sent(values, withheld, mask):
    return divide(tree.mask_tree(values, mask), withheld, False)[0]


NAMES = ["largest", "mix", "pseudo-largest", "pseudo-mix", "pseudo-random", "random"]
# Ten weights in two layers, eight of them kept by the base; the gradient of what is pruned is large on purpose.
WEIGHTS = {
    "a": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    "a.bias": torch.tensor([7.0, 8.0]),
    "b": torch.tensor([[9.0, 10.0], [11.0, 12.0]]),
}
MASK = {"a": torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), "b": torch.tensor([[1, 1], [1, 0]]).bool()}
GRADIENT = {
    "a": torch.tensor([[0.1, -0.9, 99.0], [0.5, -0.2, 0.3]]),
    "a.bias": torch.tensor([50.0, 50.0]),
    "b": torch.tensor([[0.8, -0.7], [0.05, 99.0]]),
}
NOISE = {"a": torch.tensor([[0.5, 0.9, 0.99], [0.1, 0.2, 0.8]]), "b": torch.tensor([[0.95, 0.3], [0.7, 0.99]])}


def chosen(rule):
    found = rule.withheld(WEIGHTS, GRADIENT, MASK, noise=NOISE)
    assert list(found) == ["a", "b"]  # biases are never withheld
    return [found[name].int().flatten().tolist() for name in found]


def test_largest_by_hand():
    assert chosen(Largest(rate=0.3)) == [[0, 1, 0, 0, 0, 0], [1, 1, 0, 0]]  # 3 of all ten: .9, .8, .7
    assert chosen(Largest(rate=0.3, of="kept")) == [[0, 1, 0, 0, 0, 0], [1, 0, 0, 0]]  # int(.3 * 8) = 2
    # Layer by layer: int(.5 * 6) = 3 and int(.5 * 4) = 2 of all, int(.5 * 5) and int(.5 * 3) of what was kept.
    assert chosen(Largest(rate=0.5, scope="layer")) == [[0, 1, 0, 1, 0, 1], [1, 1, 0, 0]]
    assert chosen(Largest(rate=0.5, scope="layer", of="kept")) == [[0, 1, 0, 1, 0, 0], [1, 0, 0, 0]]


def test_random_by_hand():
    assert chosen(RandomShare(rate=0.3)) == [[0, 1, 0, 0, 0, 1], [1, 0, 0, 0]]  # the highest draws: .95, .9, .8


def test_mix_by_hand():
    # Four of ten: the two largest gradients (.9 and .8), then of the others the two highest draws (.8 and .7).
    assert chosen(Mix(rate=0.4)) == [[0, 1, 0, 0, 0, 1], [1, 0, 1, 0]]
    # Figure A4: none, a third, two thirds and all by the largest gradients.
    thirds = [chosen(Mix(rate=0.3, largest=share)) for share in (0, 1 / 3, 2 / 3, 1)]
    assert thirds[0] == chosen(RandomShare(rate=0.3)) and thirds[3] == chosen(Largest(rate=0.3))
    assert thirds[1] == [[0, 1, 0, 0, 0, 1], [1, 0, 0, 0]] and thirds[2] == [[0, 1, 0, 0, 0, 1], [1, 0, 0, 0]]


def test_where_the_base_kept_less_than_the_rate_asks_for_all_of_it_is_withheld():
    assert chosen(Largest(rate=0.9)) == [[1, 1, 0, 1, 1, 1], [1, 1, 1, 0]]


def test_the_rates_have_both_denominators():
    found = rates(Largest(rate=0.3).withheld(WEIGHTS, GRADIENT, MASK), MASK)
    assert float(found.of_kept) == 3 / 8 and float(found.of_all) == 3 / 10
    assert float(rates({"a": torch.tensor([[True, False]])}, {}).of_kept) == 0.5


def test_pseudo_pruning_puts_back_what_was_withheld_and_nothing_else():
    withheld = PseudoLargest(rate=0.3).withheld(WEIGHTS, GRADIENT, MASK)
    state = divide(WEIGHTS, withheld, True)[1]
    received = {name: -value for name, value in WEIGHTS.items()}
    begun = reload(received, state, MASK)
    assert begun["a"].tolist() == [[-1.0, 2.0, 0.0], [-4.0, -5.0, -6.0]]
    assert begun["b"].tolist() == [[9.0, 10.0], [-11.0, 0.0]] and torch.equal(begun["a.bias"], received["a.bias"])
    moved = {"a": MASK["a"].clone().index_fill_(1, torch.tensor([1]), False), "b": MASK["b"]}
    assert reload(received, state, moved)["a"].tolist() == [[-1.0, 0.0, 0.0], [-4.0, 0.0, -6.0]]  # now base-pruned
    many = {name: torch.stack([value, value]) for name, value in state.items()}
    for mask in (MASK, moved, {}):
        begun = reload(received, state, mask)
        for home, lanes in ((state, ...), (many, 1)):  # of one client, and of many
            back = put_back(received, home, mask)
            assert back.keys() == withheld.keys() and all(torch.equal(v[lanes], begun[n]) for n, v in back.items())


def test_what_is_sent_is_kept_and_not_withheld():
    withheld = Largest(rate=0.3).withheld(WEIGHTS, GRADIENT, MASK)
    found = mask_sent(withheld, {"a": MASK["a"], "a.bias": torch.ones(2, dtype=torch.bool)})
    assert found["a"].tolist() == (MASK["a"] & ~withheld["a"]).tolist() and found["a.bias"].all()
    assert torch.equal(found["b"], ~withheld["b"])


def test_before_the_first_round_a_client_begins_at_what_it_receives():
    begun = reload(WEIGHTS, empty_state(WEIGHTS), MASK)
    assert all(torch.equal(value, tree.mask_tree(WEIGHTS, MASK)[name]) for name, value in begun.items())


def test_a_withheld_weight_changes_no_byte_of_the_upload():
    withheld = Largest(rate=0.3).withheld(WEIGHTS, GRADIENT, MASK)
    first = encode(sent(WEIGHTS, withheld, MASK))
    shapes = {name: value.shape for name, value in WEIGHTS.items()}
    assert decode(first, shapes)["b"].tolist() == [[0.0, 0.0], [11.0, 0.0]]
    for value in (0.0, -1e30, float("nan"), float("inf")):
        changed = {n: torch.where(withheld[n], value, v) if n in withheld else v for n, v in WEIGHTS.items()}
        assert encode(sent(changed, withheld, MASK)) == first
        assert encode(sent(changed, withheld, MASK), inside=MASK) == encode(sent(WEIGHTS, withheld, MASK), inside=MASK)
    difference = {name: value - 0.5 for name, value in WEIGHTS.items()}  # against what was received
    changed = {n: torch.where(withheld[n], 3.0, v) if n in withheld else v for n, v in difference.items()}
    assert encode(sent(difference, withheld, MASK)) == encode(sent(changed, withheld, MASK))
    assert len(encode_mask(withheld)) > 0


def client(seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"conv": (4, 2, 3, 3), "bias": (4,), "linear": (5, 12)}
    weights, gradient = ({n: torch.randn(s, generator=rng) for n, s in shapes.items()} for _ in range(2))
    mask = {n: torch.rand(s, generator=rng) < 0.7 for n, s in shapes.items() if n != "bias"}
    return weights, gradient, mask


def test_those_of_the_paper_are_there():
    found = [n for n, m in catalogue.methods("defense").items() if m.info["acts_on"] == "client" and n != "priprune"]
    assert found == NAMES
    assert [catalogue.find("defense", name)().pseudo for name in NAMES] == [False, False, True, True, True, False]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("of", ["all", "kept"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.6])
def test_counts_are_exact_and_stacked_clients_choose_as_one_does(name, scope, of, rate):
    rule = catalogue.find("defense", name)(rate=rate, of=of, scope=scope)
    clients = [client(seed) for seed in range(3)]
    noises = [rule.noise(weights, torch.Generator().manual_seed(9)) for weights, _, _ in clients]
    alone = [rule.withheld(*one, noise=noise) for one, noise in zip(clients, noises, strict=True)]
    stacked = [tree.stack([one[part] for one in clients]) for part in range(3)]
    chance = tree.stack(noises) if noises[0] else {}
    many = vmap(lambda w, g, m, n: rule.withheld(w, g, m, noise=n))(*stacked, chance)
    for number, ((weights, gradient, mask), found) in enumerate(zip(clients, alone, strict=True)):
        again = rule.withheld(weights, gradient, mask, torch.Generator().manual_seed(9))
        groups = [["conv"], ["linear"]] if scope == "layer" else [["conv", "linear"]]
        for names in groups:
            base = sum(mask[n].numel() if of == "all" else int(mask[n].sum()) for n in names)
            most = sum(int(mask[n].sum()) for n in names)
            assert sum(int(found[n].sum()) for n in names) == min(int(rate * base + 1e-9), most)
        for layer, where in found.items():
            assert bool((~where | mask[layer]).all())
            assert torch.equal(where, many[layer][number]) and torch.equal(where, again[layer])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_given_changes_and_the_global_generator_is_left_alone(name):
    rule, given_ = catalogue.find("defense", name)(), client()
    before, state = [tree.clone(one) for one in given_], torch.get_rng_state()
    rule.withheld(*given_, torch.Generator().manual_seed(0))
    assert all(torch.equal(one[n], v) for one, copy in zip(given_, before, strict=True) for n, v in copy.items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("of", ["all", "kept"])
@pytest.mark.parametrize("name", NAMES)
def test_it_asks_for_no_number_on_a_gpu_so_that_a_graph_can_hold_it(name, of, monkeypatch):
    monkeypatch.setattr(selection, "_must_not_read", lambda _: True)
    rule = catalogue.find("defense", name)(of=of)
    with FakeTensorMode():
        weights, gradient, mask = client()
        found = rule.withheld(weights, gradient, mask, noise=rule.noise(weights, torch.Generator()))
        assert isinstance(rates(found, mask).of_kept, FakeTensor)
    assert found["conv"].shape == (4, 2, 3, 3)


@given(seed=st.integers(0, 10_000), rate=st.floats(0, 0.99), share=st.floats(0, 1))
def test_mix_is_disjoint_and_as_many_as_largest(seed, rate, share):
    weights, gradient, mask = client(seed)
    gradient = {name: value.round() for name, value in gradient.items()}  # many equal magnitudes
    found = Mix(rate=rate, largest=share).withheld(weights, gradient, mask, torch.Generator().manual_seed(seed))
    other = Largest(rate=rate).withheld(weights, gradient, mask)
    assert sum(int(where.sum()) for where in found.values()) == sum(int(where.sum()) for where in other.values())


def test_without_a_base_pruning_every_weight_can_be_withheld():
    assert [int(keep.sum()) for keep in whole_mask(WEIGHTS, {}).values()] == [6, 4]


@pytest.mark.parametrize("name", NAMES)
def test_commands_without_clients_refuse_it(name):
    for kind in (Audit, Invert):
        with pytest.raises(WrongInput, match=f"{name} acts on the clients of a federation; use secateur federate"):
            read(kind, None, {"defense": name})


@pytest.mark.parametrize("fields", [{"rate": 1.0}, {"rate": -0.1}, {"of": "some"}, {"scope": "net"}, {"largest": 1.5}])
def test_what_makes_no_sense_is_refused(fields):
    with pytest.raises(WrongInput, match=next(iter(fields))):
        Mix(**fields)
