"""Every membership attack of the catalogue, found by itself: does it find members, and only by what a model learnt?"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from secateur import catalogue
from secateur.data.partition import in_out
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Shadow
from secateur.metrics.membership import auc, roc
from secateur.seeding import derive, initialise

WIDTH, CLASSES, ROWS = 20, 4, 300  # of each set: half members, half non-members
ATTACKS = catalogue.methods("attack")
CHEAP = {"epochs": 6, "learning_rate": 0.03}  # for the attacks that are a network
DESIGNS = ("disjoint", "in-out")


def random_rows(number, *labels):
    """Vectors whose labels can only be learnt by heart."""
    rng = derive(0, "rows", *labels)
    return Batch(torch.randn(number, WIDTH, generator=rng), torch.randint(CLASSES, (number,), generator=rng))


def memorised(batch, *labels):
    """A model that knows the batch by heart, in float64 so that rounding says nothing."""
    rng = derive(0, "net", *labels)
    net = initialise(lambda: nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, CLASSES)), rng).double()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        cross_entropy(net(batch.inputs.double()), batch.labels).backward()
        optimiser.step()
    assert (net(batch.inputs.double()).argmax(1) == batch.labels).float().mean() > 0.98

    def predict(inputs):
        with torch.no_grad():
            return net(inputs.double()).softmax(1)

    return BlackBox(predict)


@dataclass(frozen=True)
class Scene:
    """A target that memorised half of the candidates, one that never saw any, and the attacker's own models."""

    saw: BlackBox
    never_saw: BlackBox
    candidates: Candidates
    is_member: torch.Tensor
    shadows: list[Shadow] | InOut


@pytest.fixture(scope="module")
def scenes():
    pool, population, elsewhere = (random_rows(ROWS, name) for name in ("pool", "population", "elsewhere"))
    is_member = torch.rand(ROWS, generator=derive(0, "members")) < 0.5
    never_saw, saw = memorised(elsewhere, "elsewhere"), memorised(pool.take(is_member), "target")
    disjoint = []
    for i in range(4):
        members, nonmembers = random_rows(ROWS // 2, "in", i), random_rows(ROWS // 2, "out", i)
        disjoint.append(Shadow(memorised(members, "shadow", i), members, nonmembers))
    membership = in_out(ROWS, 8, derive(0, "in-out"))
    boxes = [memorised(pool.take(inside), "in-out", i) for i, inside in enumerate(membership)]
    known = Candidates(pool, torch.arange(ROWS), population)
    return {
        "disjoint": Scene(saw, never_saw, Candidates(pool, None, population), is_member, disjoint),
        "in-out": Scene(saw, never_saw, known, is_member, InOut(boxes, pool, membership)),
    }


def fitted(name, scene, seed=0):
    entry = ATTACKS[name]
    return entry(**{key: CHEAP[key] for key in CHEAP if key in entry.defaults}).fit(scene.shadows, derive(seed, name))


@pytest.fixture(scope="module")
def attacks(scenes):
    """Every attack fitted to every design, once."""
    made = {}

    def get(name, design):
        if (name, design) not in made:
            made[name, design] = fitted(name, scenes[design])
        return made[name, design]

    return get


def area(guesses, is_member):
    return float(auc(roc(guesses.scores.double(), is_member)))


def test_the_catalogue_has_the_attacks_of_the_paper_and_those_after_it():
    paper = {"conf", "xent", "entropy", "mentr", "top1-conf", "correctness", "nn", "top3-nn", "nn-cls", "samia"}
    assert paper <= set(ATTACKS)
    for name, entry in ATTACKS.items():
        assert entry.info["sees"] in ("probabilities", "labels"), name
        assert entry.info["shadows"] in ("needed", "none", "for a threshold", "in-out or disjoint"), name


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", ATTACKS)
class TestEveryAttack:
    def test_finds_members_of_a_model_that_memorised_them(self, scenes, attacks, name, design):
        scene = scenes[design]
        guesses = attacks(name, design).score(scene.saw, scene.candidates)
        assert guesses.scores.shape == guesses.members.shape == (ROWS,)
        assert guesses.members.dtype == torch.bool
        assert guesses.scores.isfinite().all()
        assert area(guesses, scene.is_member) > 0.65
        right = guesses.members == scene.is_member
        balanced = sum(float(right[scene.is_member == side].double().mean()) for side in (True, False)) / 2
        assert balanced > 0.6

    def test_is_at_chance_on_a_model_that_never_saw_the_data(self, scenes, attacks, name, design):
        scene = scenes[design]
        guesses = attacks(name, design).score(scene.never_saw, scene.candidates)
        assert abs(area(guesses, scene.is_member) - 0.5) < 0.12  # three and a half standard errors

    def test_does_not_depend_on_the_order_of_the_candidates(self, scenes, attacks, name, design):
        scene, attack = scenes[design], attacks(name, design)
        order = torch.randperm(ROWS, generator=derive(0, "order"))
        given = scene.candidates
        shuffled = Candidates(
            given.batch.take(order), given.ids if given.ids is None else given.ids[order], given.population
        )
        first, second = attack.score(scene.saw, given), attack.score(scene.saw, shuffled)
        torch.testing.assert_close(second.scores, first.scores[order], rtol=1e-4, atol=1e-4)
        close_call = (first.scores.abs() < 1e-3)[order]
        assert torch.equal((second.members | close_call), (first.members[order] | close_call))


@pytest.mark.parametrize("name", ATTACKS)
def test_the_same_seed_gives_the_same_answer_and_leaves_the_global_generator_alone(scenes, attacks, name):
    scene = scenes["disjoint"]
    before = torch.get_rng_state()
    first, second = (a.score(scene.saw, scene.candidates) for a in (attacks(name, "disjoint"), fitted(name, scene)))
    assert torch.equal(first.scores, second.scores) and torch.equal(first.members, second.members)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ATTACKS)
def test_without_shadows_an_attack_says_that_it_needs_them_or_runs(scenes, name):
    scene, attack = scenes["disjoint"], ATTACKS[name]()
    if ATTACKS[name].info["shadows"] in ("none", "for a threshold"):
        guesses = attack.fit([], derive(0, name)).score(scene.saw, scene.candidates)
        assert area(guesses, scene.is_member) > 0.65
        assert (guesses.members is None) == (ATTACKS[name].info["shadows"] == "for a threshold")
    else:
        with pytest.raises(WrongInput, match="shadow"):
            attack.fit([], derive(0, name))
        with pytest.raises(WrongInput, match="fit it"):
            attack.score(scene.saw, scene.candidates)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_model_that_answers_with_labels_only_is_attacked_or_refused(scenes, attacks, name):
    scene = scenes["disjoint"]
    labels = BlackBox(lambda x: one_hot(scene.saw.predict(x).argmax(1), CLASSES).double(), labels_only=True)
    attack = attacks(name, "disjoint")
    if ATTACKS[name].info["sees"] == "labels":
        assert area(attack.score(labels, scene.candidates), scene.is_member) > 0.65
    else:
        with pytest.raises(WrongInput, match="labels only"):
            attack.score(labels, scene.candidates)
