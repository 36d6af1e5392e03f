"""A round of stacked clients as one function: what a CUDA graph asks of it, what it draws, and where states lie."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from secateur.config import base_pruning, defense
from secateur.defenses.uploads import protection_of
from secateur.federated.client_training import BroadcastModel
from secateur.federated.faults import Faults
from secateur.federated.stacked_rounds import ClientStateBank
from secateur.interfaces import Batch
from tiny_rules import Half, Moving, Noisy, Withhold, bn_net, federation, run


class OneDevice(TorchDispatchMode):
    """Fails where a tensor with entries is made on, or goes to, another device than the federation's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
        assert all(each.is_meta or each.ndim == 0 or each.numel() == 0 for each in tensors), func
        return made


def on_meta(value):
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def moved(fed):
    """A federation whose tensors have no numbers: nothing can be asked of them, as in a CUDA graph."""
    server, crowd = fed.server, fed.turns.trainer
    for name in ("weights", "buffers", "mask", "squares", "moments"):
        setattr(server, name, tree_map(on_meta, getattr(server, name)))
    server.model = crowd.model = BroadcastModel(*(tree_map(on_meta, part) for part in vars(server.model).values()))
    crowd.data = fed.turns.data = Batch(*map(on_meta, crowd.data))
    crowd.function.structure.to("meta")
    fed.together.homes.held = tree_map(on_meta, fed.together.homes.held)
    return fed.together


@pytest.mark.parametrize("base", ["none", "prunefl:every=2:iterations=2", "feddst:every=2"])
@pytest.mark.parametrize(
    "rule", ["none", "pseudo-largest", "mix:of=kept:scope=layer", "priprune", "noise", "dgp+error-feedback"]
)
def test_a_round_reads_no_number_and_stays_on_its_device(base, rule):
    protection = protection_of(defense(rule))
    if base.startswith("feddst") and protection.get("upload"):  # refused: clients that choose masks send weights
        return
    net = None if rule == "priprune" else bn_net()
    fed = federation(net, execution="stacked", rounds=3, base=base_pruning(base).make(), **protection)
    next(fed.rounds())
    given = tree_map(on_meta, fed.together._inputs(2, fed.sampler(2), [True] * 3, {}))
    together, choose = moved(fed), fed.turns.choice_of_masks(2)
    assert (choose is None) == (not base.startswith("feddst"))
    with OneDevice():
        made = together._round(given, 2, choose)
    assert made.alive.is_meta and made.alive.shape == (3,)
    assert all(part.is_meta for part in tree_leaves(made.update) if part is not None)


@pytest.mark.parametrize(
    "terms",
    [
        {"net": bn_net()},
        {"custom_turn": Noisy()},
        protection_of(defense("pseudo-mix")),
        protection_of(defense("noise")),
        protection_of(defense("priprune")),
        {},
    ],
)
def test_what_a_gpu_draws_at_once_has_the_form_of_what_clients_draw(terms):
    fed = federation(execution="stacked", **terms)
    together, drawn = fed.together, fed.sampler(1)
    found, again, later = (tree_leaves(together.draws_at_once(number, drawn)) for number in (1, 1, 2))
    wanted = tree_leaves(together._draws(1, drawn))
    assert bool(wanted) == bool(terms)
    for one, many, same, other in zip(wanted, found, again, later, strict=True):
        assert many.shape == one.shape and many.dtype == one.dtype and torch.equal(many, same)
        assert not torch.equal(many[0], many[1]) and not torch.equal(many, other)


def test_states_by_place():
    homes = ClientStateBank({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(True)}, 3)
    assert homes.assign_slots([7, 4, 9], [True, False, True]) == [0, 3, 1]  # who is not heard has no place
    places = torch.tensor([0, 3, 1])
    assert homes.read_slots(places)["a"][[0, 2]].tolist() == [[1, 2], [1, 2]] and list(homes) == [7, 9]
    state = {"a": torch.tensor([[5.0, 5.0], [6.0, 6.0], [torch.nan, 0.0]]), "b": torch.zeros(3, dtype=torch.bool)}
    homes.keep(places, state, torch.tensor([True, False, False]))  # the last one went astray
    assert homes[7]["a"].tolist() == [5, 5] and not homes[7]["b"]
    assert homes[9]["a"].tolist() == [1, 2] and homes[9]["b"]
    homes.clear()
    homes[4] = {"a": torch.tensor([8.0, 8.0]), "b": torch.tensor(False)}
    assert homes.assign_slots([7, 4], [True, True]) == [1, 0] and homes[7]["a"].tolist() == [
        1,
        2,
    ]  # as before its first round
    assert ClientStateBank({}, 3).assign_slots([1, 2], [True, True]) == [3, 3]


TERMS = [
    {"base": Half(every=2), "withholding": Withhold()},
    {"custom_turn": Noisy()},
    protection_of(defense("dgp+error-feedback")),
    {"base": Moving(every=2), "averaging": "coverage"},
]


@pytest.mark.parametrize("view", ["update", "sum"])
@pytest.mark.parametrize("terms", TERMS)
def test_who_looks_is_shown_what_is_shown_one_by_one(terms, view):
    shown = []
    for execution in ("sequential", "stacked"):
        seen = []
        run(
            federation(
                execution=execution, observers=[(1, seen.append)], view=view, faults=Faults(nan=0.2, shape=0.1), **terms
            )
        )
        shown.append(seen)
    assert len(shown[0]) == len(shown[1]) > 0
    for one, other in zip(*shown, strict=True):
        assert (one.round, one.clients) == (other.round, other.clients) and torch.equal(one.rows, other.rows)
        for name, value in one.view.sent.items():
            torch.testing.assert_close(other.view.sent[name], value, rtol=0, atol=1e-9)
        for name, value in one.view.update.values.items():
            torch.testing.assert_close(other.view.update.values[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("terms", TERMS[:3])
def test_one_that_goes_on_has_the_numbers_of_one_that_was_never_put_down(terms):
    whole, first, second = (federation(execution="stacked", rounds=6, **terms) for _ in range(3))
    wanted, rounds = run(whole), first.rounds()
    told = [measure for _ in range(3) for measure in next(rounds).measures]
    tensors, data = first.state()
    run(second)  # what is there already must not stay
    second.load({name: value.clone() for name, value in tensors.items()}, data)
    assert told + run(second) == wanted and list(second.states) == list(whole.states)
    for client, state in whole.states.items():
        assert all(torch.equal(second.states[client][name], value) for name, value in state.items())
    assert all(torch.equal(value, second.model()[name]) for name, value in whole.model().items())
