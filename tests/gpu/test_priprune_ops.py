"""PriPrune's turn by kernels against operations of torch: by Triton's interpreter, or on a GPU where there is one."""

import os

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="left out: Triton is not installed")

from secateur import tree
from secateur.defenses import priprune
from secateur.defenses.priprune import FIRST, LOGITS, TURNS, Fused, Plain, PriPrune, passes_for
from secateur.defenses.withholding import SAVED, WITHHELD, whole_mask
from secateur.gpu import BETA_1, priprune_ops
from secateur.interfaces import Batch

pytestmark = pytest.mark.system  # interpreted, they take minutes
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCES = {torch.float32: 2e-5} if GPU else {torch.float64: 1e-14, torch.float32: 5e-7}
RATE = 0.25  # a kernel is given its numbers in float32, and this one it has exactly
NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5))
SHAPES = {name: value.shape for name, value in NET.named_parameters()}
FUSED, PLAIN = Fused(torch.ops.secateur), Plain()


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """So that a tensor takes several, the last of them in part."""
    monkeypatch.setattr(priprune_ops, "BLOCK", 16)
    monkeypatch.setattr(priprune_ops, "STRETCH", 32)


def loss(params, inputs, labels):
    return cross_entropy(functional_call(NET, params, (inputs,)), labels)


def given(rule, seed, steps, dtype):
    """A received model and a base mask; a client's state after some turns, its batches and its chance."""
    rng = torch.Generator().manual_seed(seed)
    draws = {name: torch.randn(3, *shape, generator=rng, dtype=dtype) for name, shape in SHAPES.items()}
    received = {name: value[0] for name, value in draws.items()}
    mask = {name: value[1] < 0.5 for name, value in draws.items() if value.ndim > 2}
    state = rule.init(received) | {LOGITS + name: draws[name][2] for name in mask}
    was = {name: torch.rand(mask[name].shape, generator=rng) < 0.5 for name in mask}
    state |= {WITHHELD + name: where for name, where in was.items()}
    state |= {SAVED + name: torch.where(where, draws[name][1], 0) for name, where in was.items()}
    state |= {TURNS: torch.tensor(seed, dtype=dtype)}
    inputs = torch.randn(steps, 4, 1, 4, 4, generator=rng, dtype=dtype)
    labels = torch.randint(5, (steps, 4), generator=rng)
    parts = received, mask, state, {"x": inputs, "y": labels}, rule.noise(received, steps, rng)
    return [tree.to(part, DEVICE) for part in parts]


def turned(passes, rule, received, mask, state, batches, noise):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priprune, "passes_for", lambda *_: passes)
        return rule.turn(loss, received, mask, state, Batch(batches["x"], batches["y"]), noise, RATE)


def same(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        one, other = (each if isinstance(each, dict) else {"": each} for each in (one, other))
        assert set(one) == set(other)
        for name, value in other.items():
            assert one[name].dtype == value.dtype and one[name].shape == value.shape
            assert torch.allclose(one[name], value, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"learns": "step"}, {"normalise": "global"}, {"sharing": 0.125, "step": 0.5}])
def test_a_turn_is_the_plain_ones(fields, steps, dtype):
    rule = PriPrune(**{"sharing": 2.0**-10} | fields)
    parts = given(rule, 3, steps, dtype)
    for mask in (parts[1], {}):
        parts[1] = mask
        same(turned(FUSED, rule, *parts), turned(PLAIN, rule, *parts), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("learns", ["turn", "step"])
def test_many_clients_are_lanes_of_one_launch(learns, own, dtype, monkeypatch):
    rule, launched, launch = PriPrune(learns=learns, sharing=2.0**-10), [], priprune_ops._launch

    def counted(kernel, *given, **how):
        launched.append(kernel)
        launch(kernel, *given, **how)

    monkeypatch.setattr(priprune_ops, "_launch", counted)
    clients = [given(rule, seed, 2, dtype) for seed in range(3)]
    received, mask, *_ = clients[0]
    others = [tree.stack([one[part] for one in clients]) for part in (2, 3, 4)]
    masks = tree.stack([one[1] for one in clients]) if own else mask  # chosen by each client, or the server's
    dims = (None, 0 if own else None, 0, 0, 0)
    found, expected = (
        vmap(lambda *one, passes=passes: tuple(turned(passes, rule, *one)), dims)(received, masks, *others)
        for passes in (FUSED, PLAIN)
    )
    same(found, expected, TOLERANCES[dtype])
    assert len(launched) == 2 * (6 if learns == "step" else 4)  # of two tensors, beside those of the sums


@pytest.mark.parametrize("part", range(5))
def test_any_part_alone_may_be_of_many(part):
    rule, dtype = PriPrune(), next(iter(TOLERANCES))
    clients = [given(rule, seed, 1, dtype) for seed in range(2)]
    parts = [tree.stack([one[at] for one in clients]) if at == part else clients[0][at] for at in range(5)]
    dims = tuple(0 if at == part else None for at in range(5))
    found, expected = (
        vmap(lambda *one, passes=passes: tuple(turned(passes, rule, *one)), dims)(*parts) for passes in (FUSED, PLAIN)
    )
    same(found, expected, TOLERANCES[dtype])


def test_vmap_in_vmap():
    rule, dtype = PriPrune(), next(iter(TOLERANCES))
    (received, mask, *parts), (_, _, *more) = (given(rule, seed, 1, dtype) for seed in (0, 1))
    stacked = [tree.stack([tree.stack([one, other])] * 2) for one, other in zip(parts, more, strict=True)]
    for dims in (0, (None, 0, 0)):  # inside, a state that all share
        first = stacked if dims == 0 else [{name: value[:, 0] for name, value in stacked[0].items()}, *stacked[1:]]
        found, expected = (
            vmap(vmap(lambda *one, passes=passes: tuple(turned(passes, rule, received, mask, *one)), dims))(*first)
            for passes in (FUSED, PLAIN)
        )
        same(found, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("normalise", ["layer", "global"])
def test_the_slope_that_is_written_out_is_autograds(normalise, dtype):
    """Of an a that is far out, too, and in the cold."""
    rule = PriPrune(sharing=0.125, normalise=normalise, temperature=0.125)
    received, mask, state, batches, noise = given(rule, 5, 1, dtype)
    state |= {LOGITS + name: 8 * state[LOGITS + name] for name in mask}
    begun = PLAIN.reload(received, state, mask)
    examples = batches["x"][0], batches["y"][0]
    slopes = grad(rule.objective)(
        {name: state[LOGITS + name] for name in mask}, loss, begun, grad(loss)(begun, *examples),
        whole_mask(received, mask), examples, {name: value[0] for name, value in noise.items()},
        torch.tensor(0.125 * 0.965**5, dtype=dtype, device=DEVICE).clamp_min(0.1),
    )  # fmt: skip
    made = turned(FUSED, rule, received, mask, state, batches, noise)
    for name, slope in slopes.items():
        assert (made.state[FIRST + name] / (1 - BETA_1) - slope).abs().max() < 5 * TOLERANCES[dtype]
        assert bool((made.state[FIRST + name][~mask[name]] == 0).all())


def test_what_is_not_a_number_stays_so_that_the_server_can_tell():
    rule, dtype = PriPrune(), next(iter(TOLERANCES))
    for part, name in ((2, LOGITS + "0.weight"), (0, "3.weight"), (0, "0.bias")):
        parts = given(rule, 3, 1, dtype)
        parts[1] = {}
        parts[part][name].view(-1)[1] = torch.nan
        found, expected = (turned(passes, rule, *parts) for passes in (FUSED, PLAIN))
        for one, other in ((found.values, expected.values), (found.state, expected.state)):
            assert all(torch.equal(one[each].isnan(), value.isnan()) for each, value in other.items()), name


def test_nothing_that_is_given_changes():
    rule = PriPrune(learns="step")
    parts = given(rule, 3, 2, next(iter(TOLERANCES)))
    before = [tree.clone(part) for part in parts]
    turned(FUSED, rule, *parts)
    assert all(torch.equal(one[n], v) for one, copy in zip(parts, before, strict=True) for n, v in copy.items())


def test_which_passes_are_taken(monkeypatch):
    for dtype in (torch.float32, torch.float64):
        params = {"w": torch.zeros(2, 2, dtype=dtype, device=DEVICE)}
        fused = GPU and dtype == torch.float32
        assert isinstance(passes_for(params, PriPrune().init(params)), Fused if fused else Plain)
    monkeypatch.setattr(priprune, "FUSED", False)
    params = {"w": torch.zeros(2, 2, device=DEVICE)}
    assert isinstance(passes_for(params, PriPrune().init(params)), Plain)
