"""Rounds over sub-models: averages by hand, observers, faults, defenses, resuming, several together, clients alone."""

from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tiny_submodels as tiny
from secateur import tree
from secateur.config import defense_of_clients
from secateur.errors import WrongInput
from secateur.federated.attacks.observer import Every
from secateur.federated.build import rates_of, submodel_protection
from secateur.federated.faults import Faults
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels import networks
from secateur.federated.submodels.clients import AdamMoments, SubmodelResult
from secateur.federated.submodels.federation import StackedFederations
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.networks import without_statistics
from secateur.federated.submodels.structure import params_of
from secateur.federated.traffic import value_bytes
from secateur.interfaces import Batch


def returned(federation, values):
    """A round in which each client sends one number everywhere."""
    jobs = federation.begin(1)
    made = [torch.full_like(job.start, value) for job, value in zip(jobs, values, strict=True)]
    return federation.finish(1, [SubmodelResult(flat, AdamMoments(flat, flat, 1)) for flat in made])


@pytest.mark.parametrize("uncovered", ["keep", "zero"])
def test_a_cell_is_the_mean_of_those_who_trained_it(uncovered):
    federation = tiny.federation("heterofl", large=0, widths=(0.5, 0.25), uncovered=uncovered)
    assert federation.rates == [0.5, 0.5, 0.5, 0.25, 0.25]
    before = federation.model()
    returned(federation, [1, 2, 3, 10, 20])
    bias, first = federation.model()["0.bias"], before["0.bias"]
    assert bias[:2].tolist() == [7.2, 7.2]  # (1 + 2 + 3 + 10 + 20) / 5
    assert bias[2:4].tolist() == [2.0, 2.0]
    assert torch.equal(bias[4:], first[4:] if uncovered == "keep" else torch.zeros(4).double())
    assert federation.model()["8.bias"].tolist() == [7.2] * 3  # the classifier's outputs are everybody's


def test_weighted_by_rows():
    federation = tiny.federation("none", averaging="weighted")
    returned(federation, [1, 2, 3, 4, 5])
    wanted = sum(size * value for size, value in zip(tiny.SIZES, (1, 2, 3, 4, 5), strict=True)) / sum(tiny.SIZES)
    assert all(torch.allclose(value, torch.full_like(value, wanted)) for value in federation.model().values())


def test_the_classifiers_rows_of_own_labels():
    federation = tiny.federation("none", own_labels=True)
    federation.owned[0] = torch.tensor([1.0, 0.0, 1.0]).double()
    returned(federation, [100, 2, 2, 2, 2])
    model = federation.model()
    assert model["8.bias"].tolist() == [21.6, 2.0, 21.6] and model["8.weight"][1].eq(2).all()
    assert model["0.bias"].eq(21.6).all()


def test_labels_that_a_client_does_not_own_count_as_zero_logits():
    federation = tiny.federation("none", own_labels=True)
    narrow, (inputs, labels) = federation.narrow(0), federation.train.take(torch.tensor([0, 2, 3, 5]))
    owned = torch.tensor([1.0, 0.0, 1.0]).double()
    found = narrow.loss(federation.flat, inputs, labels, owned)
    wanted = cross_entropy(without_statistics(tiny.net()).train()(inputs) * owned, labels)
    assert torch.allclose(found, wanted)


def test_it_learns_and_tells_of_server_clients_and_bytes():
    found = tiny.told(tiny.federation(rounds=25, evaluate_every=25))
    by = {(each.metric, each.client): each.value for each in found}
    assert by["test_accuracy", None] > 0.8
    assert by["parameters", None] == by["parameters", 0] > by["parameters", 1]
    assert by["bytes_up", 0] > 2.5 * by["bytes_up", 1] and by["bytes_up", 1] == by["bytes_up", 4]
    accuracies = [by["test_accuracy", client] for client in range(5)]
    assert by["client_accuracy", None] == pytest.approx(sum(accuracies) / 5)
    assert [by["client_rows", client] for client in range(5)] == list(tiny.SIZES)
    assert by["covered", None] == 1.0  # a large client trains everything


def test_a_client_is_judged_by_what_it_received_in_the_last_round():
    federation = tiny.federation("none", rounds=2)
    first, second = federation.rounds()
    server = [m.value for m in first.measures if m.metric == "test_loss"]
    clients = {m.client: m.value for m in second.measures if m.metric == "test_loss" and m.client is not None}
    assert clients == dict.fromkeys(range(5), pytest.approx(server[0]))


def test_an_observer_sees_what_is_sent():
    seen = []
    federation = tiny.federation("mapp-fl", rounds=4, observers=[(2, seen.append)])
    tiny.told(federation)
    assert [(each.round, each.client) for each in seen] == [
        (number, client) for number in (2, 4) for client in range(5)
    ]
    small = seen[1]
    assert small.rate == 0.5 and small.rows.tolist() == list(range(29, 46))
    assert {name: tuple(value.shape) for name, value in small.sent.items()} == {
        name: tuple(value.shape) for name, value in small.net.named_parameters()
    }
    assert small.channels["0"].tolist() in ([0, 1, 2, 3], [4, 5, 6, 7]) and small.channels["8"].tolist() == [0, 1, 2]
    assert any(not torch.equal(small.sent[name], small.received[name]) for name in small.sent)


def test_lost_clients_are_told_and_left_out():
    federation = tiny.federation("mapp-fl", faults=Faults(drop_out=0.3, nan=0.3, shape=0.2), rounds=6)
    found = tiny.told(federation)
    notes = " ".join(each.note for each in found if each.metric == "lost_clients")
    assert "dropped out" in notes and "NaN" in notes and "wrong shape" in notes
    assert all(value.isfinite().all() for value in federation.model().values())


@pytest.mark.parametrize("defense", ["dgp", "dgp+error-feedback", "top-k", "noise", "largest", "pseudo-largest", "mix"])
def test_defenses_joined_with_sub_models_resume_to_equal_numbers(defense):
    def made(rounds):
        fields = {"rounds": 4, "evaluate_every": 4, **submodel_protection(defense_of_clients(defense))}
        federation = tiny.federation("fdropout", **fields)
        *_, done = islice(federation.rounds(), rounds)
        return federation, done

    whole, wanted = made(4)
    half, _ = made(2)
    other, _ = made(1)
    other.load(*half.state())
    (_, found) = other.rounds()
    assert found.measures == wanted.measures
    assert torch.equal(other.flat, whole.flat)


def test_what_dgp_does_not_send_stays_as_it_was():
    seen = []
    federation = tiny.federation(
        "mapp-fl", observers=[(1, seen.append)], rounds=1, **submodel_protection(defense_of_clients("dgp"))
    )
    found = {(m.metric, m.client): m.value for m in tiny.told(federation)}
    changed = [int((seen[1].sent[n] != seen[1].received[n]).sum()) for n in seen[1].sent]
    assert 0.15 < sum(changed) / tree.count(seen[1].sent) < 0.25  # DGP keeps a fifth
    assert found["bytes_up", 1] < 0.4 * found["bytes_down", 1]


def test_withheld_weights_are_not_sent_and_are_put_back():
    seen = []
    fields = {
        "observers": [(1, seen.append)],
        "rounds": 2,
        **submodel_protection(defense_of_clients("pseudo-largest:rate=0.5")),
    }
    federation = tiny.federation("heterofl", large=0, **fields)
    next(federation.rounds())
    sent = seen[0].sent
    assert int((sent["3.weight"] == 0).sum()) > 0
    state = federation.states[0]
    hidden = state["withheld.3.weight"]
    assert bool((state["saved.3.weight"][hidden] != 0).all()) and not bool(hidden[4:].any())
    _, cut, start = federation._begin(2, 0)
    begun = params_of(start, cut.shapes)["3.weight"]
    small = cut.take("3.weight", hidden)
    assert torch.equal(begun[small], cut.take("3.weight", state["saved.3.weight"])[small])
    assert int(value_bytes(sent)) < 8 * tree.count(sent)


@pytest.mark.parametrize("defense", ["soteria", "priprune", "outpost", "dp"])
def test_defenses_that_cannot_be_joined_are_refused(defense):
    with pytest.raises(WrongInput, match="cannot be combined with sub-models"):
        tiny.federation(**submodel_protection(defense_of_clients(defense)))


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_together_each_comes_to_what_it_comes_to_alone(execution):
    def made(rule, seed, **fields):
        return tiny.federation(rule, seed=seed, evaluate_every=3, execution=execution, **fields)

    kinds = [("mapp-fl", 0), ("mapp-fl", 1), ("heterofl", 0), ("none", 0)]
    first = made(*kinds[0])
    together = StackedFederations([first, *(made(*kind, beside=first) for kind in kinds[1:])])
    *_, last = together.rounds()
    for kind, found, one in zip(kinds, last.parts, together.federations, strict=True):
        alone = made(*kind)
        wanted = {(m.metric, m.client): m.value for m in tiny.told(alone)}
        assert {(m.metric, m.client): m.value for m in found.measures} == pytest.approx(wanted, abs=1e-6)
        for name in ("0.weight", "3.weight", "8.weight", "8.bias"):  # biases before a BatchNorm are round-off
            assert torch.allclose(one.model()[name], alone.model()[name], atol=1e-9)


def test_together_resumes():
    def made():
        first = tiny.federation(seed=0)
        return StackedFederations([first, tiny.federation("gsr", seed=1, beside=first)])

    whole, half, other = made(), made(), made()
    *_, wanted = whole.rounds()
    next(half.rounds())
    other.load(*half.state())
    *_, found = other.rounds()
    assert found == wanted and all(torch.equal(v, whole.model()[n]) for n, v in other.model().items())
    with pytest.raises(WrongInput, match="beside the first"):
        StackedFederations([tiny.federation(), tiny.federation()])


def test_some_clients_a_round():
    seen = []
    federation = tiny.federation(per_round=2, rounds=3, observers=[(1, seen.append)])
    found = tiny.told(federation)
    assert [each.round for each in seen] == [1, 1, 2, 2, 3, 3]
    assert len([m for m in found if m.metric == "test_accuracy" and m.client is not None]) == 5


def test_local_stops_by_its_validation_loss_and_keeps_the_best():
    seen = []
    alone = LocalBaseline(
        tiny.federation(
            "local",
            rounds=30,
            fields={"patience": 2, "validation": 0.3},
            observers=[(1, seen.append)],
            local=tiny.Adam(batch_size=8, learning_rate=0.02),
        )
    )
    found = {(m.metric, m.client): m.value for m in tiny.told(alone)}
    epochs = [found["epochs", client] for client in range(5)]
    assert min(epochs) < 30 and len(set(epochs)) > 1
    assert ("test_accuracy", None) not in found and found["client_accuracy", None] > 0.4
    assert [each.client for each in seen] == list(range(5)) and seen[0].rate == 1.0 and seen[1].rate == 0.5
    assert all(torch.equal(each.rows, own) for each, (own, _) in zip(seen, alone.parts, strict=True))
    own, held = alone.parts[0]
    assert len(held) == 9 and sorted([*own.tolist(), *held.tolist()]) == list(range(29))
    narrow = alone.federation.narrow(0)
    losses = networks.losses(narrow.net, seen[0].sent, alone.federation.train.take(held), 10)
    assert float(losses.mean()) == pytest.approx(alone.clients[0].lowest)


def test_local_resumes():
    def made():
        return LocalBaseline(tiny.federation("local", rounds=6))

    whole, half, other = made(), made(), made()
    wanted, rounds = tiny.told(whole), half.rounds()
    next(rounds), next(rounds)
    other.load(*half.state())
    assert tiny.told(other) == wanted


@torch.no_grad()
def test_statistics_are_re_estimated_over_the_own_examples():
    net = without_statistics(tiny.net())
    params = {name: value.detach() for name, value in net.named_parameters()}
    own = tiny.data().inputs[:40].double()
    single = networks.predict_reestimated(net, params, own, own[:1], batch_size=20)  # one row alone can be asked
    many = networks.predict_reestimated(net, params, own, own, batch_size=20)
    assert torch.allclose(single, many[:1])
    first = net[0](own)
    means = torch.stack([part.mean((0, 2, 3)) for part in first.split(20)]).mean(0)
    variances = torch.stack([part.transpose(0, 1).flatten(1).var(1) for part in first.split(20)]).mean(0)
    normed = (first - means[:, None, None]) / (variances[:, None, None] + 1e-5).sqrt()
    tracked = tiny.net()
    tracked[1].running_mean, tracked[1].running_var = means, variances
    assert torch.allclose(tracked.eval()[1](first), normed)
    static_ones = networks.logits(net, params, own, 20)
    assert not torch.allclose(static_ones, many)


def test_a_federation_that_re_estimates():
    found = {
        (m.metric, m.client): m.value
        for m in tiny.told(tiny.federation(batchnorm="reestimated", rounds=20, evaluate_every=20))
    }
    assert found["test_accuracy", None] > 0.7


def test_scores_under_static_batchnorm_depend_on_the_batch():
    net = without_statistics(tiny.net())
    params = {name: value.detach() for name, value in net.named_parameters()}
    batch = Batch(tiny.data().inputs[:21].double(), tiny.data().labels[:21])
    whole, parts = networks.losses(net, params, batch, 21), networks.losses(net, params, batch, 10)
    assert len(parts) == 21 and not torch.allclose(whole, parts)  # 10 and 11 rows


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rates": [1.0]}, "client_widths: 1 are set for 5 clients"),
        ({"averaging": "coverage"}, "averaging"),
        ({"uncovered": "drop"}, "uncovered"),
        ({"per_round": 9}, r"per_round: 9 is not allowed; must be in \[1, 5\]"),
        ({"rounds": 0}, "rounds"),
        ({"test_batch": 1}, "test_batch"),
    ],
)
def test_wrong_terms_are_refused(fields, message):
    rates = [1.0, *[0.5] * 4]
    rule = tiny.find("submodel", "heterofl")()
    with pytest.raises(WrongInput, match=message):
        SubmodelSpec(tiny.shares(), rule, **({"rates": rates} | fields))


def test_who_is_large_and_how_widths_are_dealt():
    shares = [torch.arange(n) for n in (5, 9, 9, 2)]
    assert rates_of(shares, 1) == [0.5, 1.0, 0.5, 0.5]
    assert rates_of(shares, 0, (0.25, 1.0)) == [0.25, 1.0, 1.0, 0.25]
    assert rates_of(shares, 4) == [1.0] * 4
    for wrong in (5, -1):
        with pytest.raises(WrongInput, match=r"must be in \[0, 4\]"):
            rates_of(shares, wrong)
    with pytest.raises(WrongInput, match="client_widths"):
        rates_of(shares, 1, (0.0,))


class Keeping(Every):
    """An observer that keeps what it saw of one client."""

    def __init__(self):
        super().__init__(1, self.keep)
        self.kept = []

    def keep(self, seen):
        """Keep the bias of the first layer."""
        if seen.client == 1:
            self.kept.append(seen.sent["0.bias"])

    def state(self):
        """What is kept."""
        return {str(i): value for i, value in enumerate(self.kept)}, None

    def load(self, tensors, data):
        """Go on from it."""
        self.kept = list(tensors.values())


def test_what_an_observer_keeps_is_saved_with_the_federation():
    def made():
        keeping = Keeping()
        return keeping, tiny.federation(observers=[keeping])

    (wanted, whole), (_, half), (found, other) = made(), made(), made()
    tiny.told(whole)
    next(half.rounds())
    other.load(*half.state())
    assert len(found.kept) == 1
    tiny.told(other)
    assert len(found.kept) == 3 and all(map(torch.equal, found.kept, wanted.kept))


class Picky(nn.Linear):
    """Reads parameters at multiples of 16 bytes alone, as kernels of a GPU do."""

    def forward(self, inputs):
        assert all(value.data_ptr() % 16 == 0 for value in self.parameters())
        return super().forward(inputs)


@pytest.mark.parametrize("first", range(4))
def test_models_are_judged_wherever_their_vector_begins(first):
    net = nn.Sequential(Picky(3, 5), nn.BatchNorm1d(5, track_running_stats=False), Picky(5, 2))
    shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
    size, rng = sum(value.numel() for value in net.parameters()), torch.Generator().manual_seed(0)
    row, inputs = torch.randn(first + size, generator=rng)[first:], torch.randn(6, 3, generator=rng)
    params = params_of(row, shapes)
    for judge in (
        networks.logits,
        lambda net, params, inputs: networks.predict_reestimated(net, params, inputs, inputs),
    ):
        assert torch.equal(judge(net, params, inputs), judge(net, tree.clone(params), inputs))
