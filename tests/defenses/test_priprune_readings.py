"""The readings of results/priprune_rule.py: the usual one is PriPrune itself, the others differ where they say so."""

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny_client import RATE, WEIGHTS, drawn, loss
from torch.func import grad

from secateur.defenses.priprune import LOGITS, PriPrune
from secateur.defenses.withholding import SAVED, WITHHELD
from secateur.errors import WrongInput


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


RULE = imported(Path(__file__).parents[2] / "results" / "priprune_rule.py")


def state_of(rule, seed=0):
    """A state in which some weights were withheld and saved, and alpha lies on both sides of 1/2."""
    params, mask, _ = drawn(seed, steps=1)
    rng = torch.Generator().manual_seed(9)
    state = rule.init(params)
    for name in WEIGHTS:
        a, home = (torch.randn(params[name].shape, generator=rng, dtype=torch.float64) for _ in range(2))
        held = (a > 0) & mask[name]
        state |= {LOGITS + name: a, WITHHELD + name: held, SAVED + name: torch.where(held, home, 0)}
    return state


def turned(rule, state, seed=0, rate=RATE):
    received, mask, batches = drawn(seed, steps=1)
    noise = rule.noise(received, 1, torch.Generator().manual_seed(5))
    return rule.turn(loss, received, mask, state, batches, noise, rate), {n: noise[n][0] for n in WEIGHTS}


def test_the_usual_reading_is_priprune_turn_after_turn():
    usual = RULE.reading("usual")
    given = {name: value for name, value in asdict(usual).items() if name in asdict(PriPrune())}
    plain = PriPrune(**given)
    assert given == asdict(PriPrune()) | {"sharing": usual.sharing}
    states = [state_of(rule) for rule in (usual, plain)]
    for seed in range(4):
        made = [turned(rule, state, seed)[0] for rule, state in zip((usual, plain), states, strict=True)]
        states = [each.state for each in made]
        for found, expected in zip(*(each[:5] for each in made), strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_to_the_letter_the_weights_begin_where_the_fresh_sample_mixes():
    rule = RULE.reading("letter=true:step=0")
    state, (received, mask, _) = state_of(rule), drawn(0, steps=1)
    made, noise = turned(rule, state, rate=0.0)
    for name in WEIGHTS:
        sample = state[LOGITS + name] + noise[name] > 0
        begun = torch.where(sample, state[SAVED + name], received[name]) * mask[name]
        found = torch.where(made.withheld[name], made.state[SAVED + name], made.values[name])
        assert torch.equal(found, begun)
        assert not torch.equal(sample, state[WITHHELD + name])


def test_by_mixing_l_acc_pulls_towards_what_was_saved_or_received():
    rule = RULE.reading("mixes=true:privacy=0:sharing=0:descent=sgd:step=.001:accuracy=3")
    state, (received, _, batches) = state_of(rule), drawn(0, steps=1)
    made, noise = turned(rule, state)
    odds = {n: state[LOGITS + n] + noise[n] for n in WEIGHTS}
    mixed = {n: torch.where(odds[n] > 0, state[SAVED + n], received[n]) for n in WEIGHTS}
    pull = grad(loss)(received | mixed, batches.inputs[0], batches.labels[0])
    for name in WEIGHTS:
        soft = (odds[name] / rule.temperature).sigmoid()
        between = state[SAVED + name] - received[name]
        slope = 3 * pull[name] * between * soft * (1 - soft) / rule.temperature
        alpha = state[LOGITS + name].sigmoid()
        moved = alpha - 0.001 * slope / (alpha * (1 - alpha))  # d alpha = d a / (alpha (1 - alpha))
        assert torch.allclose(made.state[LOGITS + name].sigmoid(), moved, rtol=0, atol=1e-12)


def test_alpha_can_begin_at_a_place_of_its_own():
    params, _, _ = drawn(0, steps=1)
    params = {name: value.float() for name, value in params.items()}
    one, other = (RULE.reading("drawn=true").begun(params, torch.Generator().manual_seed(s)) for s in (1, 2))
    plain = RULE.reading("alpha=.9").begun(params, torch.Generator())
    for name in WEIGHTS:
        alpha = one[LOGITS + name].sigmoid()
        assert alpha.unique().numel() == alpha.numel() and not torch.equal(one[LOGITS + name], other[LOGITS + name])
        assert torch.allclose(plain[LOGITS + name].sigmoid(), torch.tensor(0.9))


def test_a_reading_is_written_as_its_fields():
    assert RULE.reading("none") is None
    made = RULE.reading("sharing=7e-7:normalise=global:averaging=coverage:mixes=true")
    assert (made.sharing, made.normalise, made.averaging, made.mixes) == (7e-7, "global", "coverage", True)
    for wrong in ("steps=1", "plain", "normalise=never"):
        with pytest.raises(WrongInput):
            RULE.reading(wrong)
