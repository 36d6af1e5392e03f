"""Shadow federations: whose rows they have, that they are stages, and that the server's models are attacked too."""

from dataclasses import replace

import pytest
import torch

import tiny_submodels as tiny
from secateur import tree
from secateur.config import Federate, choice, read
from secateur.errors import WrongInput
from secateur.federated.checkpoint import FederationLog
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.federated.submodels.membership_attacks import Asking, ShadowPool, join_pools
from secateur.federated.submodels.shadow_federations import ShadowRun, design_shadows
from secateur.runs.folder import open_run
from secateur.seeding import derive

ASKING = Asking(federations=4, compare=False, size=10)
SIZES = tiny.SIZES


def single():
    """The small network in the precision of the data."""
    return tiny.net(dtype=torch.float32)


def test_every_candidate_is_in_half_of_the_federations_and_known_members_in_all():
    fed, data = tiny.federation(), tiny.data()
    design = design_shadows(fed.terms, data, ASKING, 0)
    assert set(design.pools) == set(range(5)) and len(design.shares) == 4
    for client, (rows, is_member) in design.pools.items():
        inside, share = design.inside[client], fed.terms.shares[client]
        asked, population = rows[: len(is_member)], rows[len(is_member) :]
        assert (inside.sum(0) == 2).all() and inside.shape == (4, len(rows))
        assert torch.isin(asked[is_member], share).all() and (asked[~is_member] >= data.train_size).all()
        assert int(is_member.sum()) == len(asked) / 2 and not torch.isin(population, asked).any()
        assert (population >= data.train_size).all() and 0 < len(population) <= len(asked) / 2
        always = set(share.tolist()) - set(asked.tolist())
        for model, chosen in enumerate(inside):
            held = set(design.shares[model][client].tolist())
            assert held == set(rows[chosen].tolist()) | (held & always) and len(held & always) == 3
    again = design_shadows(fed.terms, data, ASKING, 0)
    assert all(torch.equal(*pair) for pair in zip(design.shares[1], again.shares[1], strict=True))


def test_a_client_that_is_too_small_gets_rows_of_nobody():
    terms = tiny.federation().terms
    terms = replace(terms, shares=[*terms.shares[:4], torch.tensor([74, 73])])
    design = design_shadows(terms, tiny.data(), ASKING, 0)
    assert 4 not in design.pools and all(len(shares[4]) == 2 for shares in design.shares)
    assert all((shares[4] >= sum(SIZES)).all() for shares in design.shares)


def test_pools_are_joined_by_hand():
    """Members 0 1 2, non-members 10 11 (twice) 12; 12 is also population of the first, where 13 is left."""
    one = ShadowPool(torch.tensor([0, 10, 1, 11, 12, 13]), torch.tensor([True, False, True, False]))
    two = ShadowPool(torch.tensor([11, 2, 12]), torch.tensor([False, True, False]))
    joined = join_pools([one, two], derive(0, "joined"))
    assert sorted(joined.rows[:6][joined.is_member].tolist()) == [0, 1, 2]
    assert sorted(joined.rows[:6][~joined.is_member].tolist()) == [10, 11, 12] and joined.rows[6:].tolist() == [13]
    assert joined.population.tolist() == [6]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Models of four shadow federations, and a function that takes them from the same run again."""
    folder = tmp_path_factory.mktemp("shadows") / "run"
    terms = replace(tiny.federation().terms, rounds=2, evaluate_every=2)

    def models():
        with open_run(folder, "federate", {"a": 1}, device="cpu", seeds=[0]) as run:
            shadows = ShadowRun(run, single, tiny.data(), terms, ASKING, 0, torch.device("cpu"), "auto", 1)
            return shadows.models()[0]

    return models(), models, terms


def test_a_finished_shadow_federation_is_not_run_again(finished, monkeypatch):
    models, again, _ = finished
    monkeypatch.setattr(SubmodelFederation, "run_round", lambda *_: pytest.fail("it was run again"))
    for one, other in zip(models.models, again().models, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert [len(tree.parts(model)) for model in models.models] == [6] * 4  # the server and five clients
    first, second = (tree.part(model, "client1") for model in models.models[:2])
    assert all(value.shape == second[name].shape for name, value in first.items())
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert tree.part(models.models[0], "server")["0.weight"].shape[0] == 8 and first["0.weight"].shape[0] == 4


def test_clients_and_server_are_attacked_with_the_models_of_all_rounds(finished):
    models, _, terms = finished
    attacks = [choice("attack", name) for name in ("lira", "rmia:gamma=1")]
    log, labels = FederationLog(), {"model": "m", "dataset": "d", "seed": 0, "defense": "none"}
    labels |= {"extra": {"submodels": "mapp-fl", "rounds": 2}}
    exposer = ExposureObserver(attacks, tiny.data(), labels, log, terms, asking=ASKING)
    exposer.shadows = models
    fed = tiny.federation(rounds=2, evaluate_every=2, model=single(), observers=[exposer])
    tiny.told(fed)
    exposer.attack(fed)
    aucs = [row for row in log.rows if row.metric == "auc"]
    assert [(row.attack[:4], row.extra["client"]) for row in aucs] == [
        (attack, client) for client in (0, 1, 2, 3, 4, None) for attack in ("lira", "rmia")
    ]
    assert {row.extra["shadows"] for row in aucs} == {"4 federations, all rounds"}
    assert all(row.extra["population"] > 0 and row.value is not None for row in aucs)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attack": "yeom", "shadow_federations": 4}, "would learn nothing"),
        ({"attack": "lira", "shadow_federations": 3}, "even"),
        ({"attack": "lira", "shadow_federations": 4, "advise": True}, "would learn nothing"),
    ],
)
def test_wrong_input(fields, sentence):
    with pytest.raises(WrongInput, match=sentence):
        read(Federate, None, {"submodels": "mapp-fl"} | fields)
