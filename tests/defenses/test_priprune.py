"""PriPrune's turn: the five traps of Algorithm 3, its terms by hand, alpha's gradient by finite differences.

A turn is compared with what it must be: plain SGD for the weights, torch.optim.Adam for alpha, Eq. 18 for the samples.
"""

import math

import pytest
import torch
from tiny_client import RATE, WEIGHTS, drawn, loss
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, vmap
from torch.nn.functional import logsigmoid

from secateur import tree
from secateur.config import Audit, Invert, read
from secateur.defenses.priprune import LOGITS, PRESETS, STEPS, TURNS, PriPrune, sample_withheld
from secateur.defenses.withholding import SAVED, WITHHELD, rates, reload, whole_mask
from secateur.errors import WrongInput
from secateur.federated.averaging import Average
from secateur.federated.client_training import LocalTraining, train
from secateur.interfaces import Batch
from secateur.wire import decode, encode


def turned(rule, seed=0, state=None, rate=RATE, chance=1, received=None):
    params, mask, batches = drawn(seed)
    received = params if received is None else received
    noise = rule.noise(received, len(batches.labels), torch.Generator().manual_seed(chance))
    return rule.turn(loss, received, mask, rule.init(received) if state is None else state, batches, noise, rate)


def half(rule, seed=0):
    """A state in which alpha is below 1/2 for some weights and above for others."""
    params, _, _ = drawn(seed)
    rng = torch.Generator().manual_seed(4)
    logits = {LOGITS + n: torch.randn(params[n].shape, generator=rng, dtype=torch.float64) for n in WEIGHTS}
    return rule.init(params) | logits


def whole(made):
    """All weights of a client at the end of its turn, sent or withheld."""
    state, values = made.state, made.values
    return {n: torch.where(state[WITHHELD + n], state[SAVED + n], v) if n in WEIGHTS else v for n, v in values.items()}


# The five traps ------------------------------------------------------------------------------------------------------


def test_trap_1_the_last_rounds_mask_mixes_what_was_saved_with_what_is_received():
    rule = PriPrune(step=0.0)  # alpha stays, and so does what is withheld
    first = turned(rule, state=half(rule))
    received, mask, _ = drawn(0)
    received = {name: value + 10 for name, value in received.items()}
    for chance in (2, 3):  # whatever is sampled
        second = turned(rule, state=first.state, rate=0.0, chance=chance, received=received)
        for name in WEIGHTS:
            was = first.withheld[name]
            assert bool(was.any()) and bool((~was & mask[name]).any())
            begun = whole(second)[name]
            assert torch.equal(begun[was], whole(first)[name][was])  # reloaded
            assert torch.equal(begun[~was & mask[name]], received[name][~was & mask[name]])
            assert bool(((begun != 0) == mask[name]).all())  # nothing is 0 but what the base pruned


def test_trap_2_without_privacy_a_turn_is_plain_sgd_whatever_lambda_acc_is():
    params, mask, batches = drawn(0)
    steps = list(zip(batches.inputs, batches.labels, strict=True))
    plain = train(
        lambda p, _, x, y: loss(p, x, y), params, {}, mask, steps, LocalTraining(steps=2, learning_rate=RATE), True
    )
    for accuracy in (1.0, 5.0, 50.0):
        made = turned(PriPrune(accuracy=accuracy, privacy=0.0, sharing=0.0))
        for found, expected in ((whole(made), plain.params), (made.summed, plain.summed), (made.last, plain.last)):
            assert all(torch.allclose(found[n], v, rtol=0, atol=1e-12) for n, v in expected.items())
        assert float(made.loss) == pytest.approx(float(plain.loss))


def test_trap_3_alpha_is_the_probability_of_withholding():
    rule = PriPrune(alpha=0.9)
    made = turned(rule)
    assert all(bool((made.values[n] == 0).all()) for n in WEIGHTS)  # an empty update
    assert float(rates(made.withheld, drawn(0)[1]).of_kept) == 1
    assert all(bool((made.values[n] != 0).all()) for n in ("0.bias", "3.bias"))
    open_ = turned(PriPrune(alpha=0.1))
    assert float(rates(open_.withheld, drawn(0)[1]).of_kept) == 0
    assert all(bool(((open_.values[n] != 0) == drawn(0)[1][n]).all()) for n in WEIGHTS)
    tau, noise = torch.tensor(1.0), torch.zeros(2)
    assert sample_withheld(torch.tensor([2.0, -2.0]), noise, tau).tolist() == [1.0, 0.0]  # index 0 of pi: withhold


def test_trap_4_the_printed_average_counts_withheld_zeros_and_coverage_does_not():
    received, mask, _ = drawn(0)
    shy, frank = (turned(PriPrune(alpha=alpha, step=0.0), rate=0.0) for alpha in (0.9, 0.1))
    for how, share in (("weighted", 0.5), ("uniform", 0.5), ("coverage", 1.0)):
        average = Average(how, received)
        for made in (shy, frank):
            average.add(made.values, 7, {name: ~made.withheld[name] & mask[name] for name in WEIGHTS})
        found = average.result(received)
        assert all(torch.allclose(found[name], share * received[name]) for name in WEIGHTS)
        assert all(torch.allclose(found[name], received[name]) for name in ("0.bias", "3.bias"))


def test_trap_5_a_withheld_weight_changes_no_byte_of_the_upload():
    rule = PriPrune(step=0.0)
    first = turned(rule, state=half(rule))
    shapes = {name: value.shape for name, value in first.values.items()}
    sent = decode(encode(first.values), shapes)
    assert all(bool((sent[name][first.withheld[name]] == 0).all()) for name in WEIGHTS)
    received = {name: value + 1 for name, value in drawn(0)[0].items()}
    uploads = set()
    for shift in (0.0, 1.0, -100.0):  # of what it keeps at home; at rate 0 that has no way out but the upload itself
        moved = {SAVED + n: first.state[SAVED + n] + shift * first.withheld[n] for n in WEIGHTS}
        made = turned(rule, state=first.state | moved, rate=0.0, received=received)
        uploads.add(encode(made.values))
        assert all(torch.equal(made.state[name], value) for name, value in moved.items())
    assert len(uploads) == 1


# Its terms ------------------------------------------------------------------------------------------------------------


def setting(rule):
    params, mask, batches = drawn(3)
    keep = whole_mask(params, mask)
    examples = batches.inputs[0], batches.labels[0]
    found = grad(loss)(params, *examples)
    steep = {n: torch.where(keep[n], found[n], 0) for n in WEIGHTS}
    noise = {n: v[0] for n, v in rule.noise(params, 1, torch.Generator().manual_seed(6)).items()}
    logits = {n: half(rule)[LOGITS + n] for n in WEIGHTS}
    return logits, (loss, params, steep, keep, examples, noise, torch.tensor(1.7, dtype=torch.float64))


def differences(function, logits, size=1e-6):
    found = {name: torch.zeros_like(value) for name, value in logits.items()}
    for name, value in logits.items():
        for place in range(value.numel()):
            shift = torch.zeros(value.numel(), dtype=torch.float64)
            shift[place] = size
            up, down = (logits | {name: value + s * shift.view_as(value)} for s in (1, -1))
            found[name].view(-1)[place] = (function(up) - function(down)) / (2 * size)
    return found


@pytest.mark.parametrize("normalise", ["layer", "global"])
def test_the_gradient_of_alpha_is_that_of_finite_differences(normalise):
    rule = PriPrune(sharing=0.1, normalise=normalise)
    logits, others = setting(rule)
    found = grad(rule.objective)(logits, *others, hard=False)
    expected = differences(lambda a: rule.objective(a, *others, hard=False), logits)
    assert all(torch.allclose(found[n], expected[n], atol=1e-7) for n in WEIGHTS)
    assert all(bool((found[n][~others[3][n]] == 0).all()) for n in WEIGHTS)  # a base-pruned weight's alpha rests


def test_a_hard_sample_has_the_gradient_of_the_soft_one_at_the_hard_masks():
    rule = PriPrune(privacy=0.0, sharing=0.0, accuracy=3.0)
    logits, others = setting(rule)
    _, params, _, _, examples, noise, temperature = others
    masks = {n: sample_withheld(a, noise[n], temperature) for n, a in logits.items()}
    assert all(set(m.unique().tolist()) == {0.0, 1.0} for m in masks.values())
    assert all(torch.equal(m == 1, logits[n] + noise[n] > 0) for n, m in masks.items())
    slope = grad(loss)(params | {n: params[n] * (1 - masks[n]) for n in WEIGHTS}, *examples)

    def line(a):  # the loss, linear in the soft sample around the hard one
        soft = {n: sample_withheld(a[n], noise[n], temperature, hard=False) for n in WEIGHTS}
        return 3.0 * sum((slope[n] * params[n] * -soft[n]).sum() for n in WEIGHTS)

    found, expected = grad(rule.objective)(logits, *others), differences(line, logits)
    assert all(torch.allclose(found[n], expected[n], atol=1e-7) for n in WEIGHTS)


def test_the_loss_is_equation_16_with_equation_17_by_hand():
    gradient = {"a": torch.tensor([[3.0, -1.0]]), "b": torch.tensor([[0.0, 2.0, -2.0, 4.0, 0.0, 0.0]])}
    layer, whole_net = PriPrune().importance(gradient), PriPrune(normalise="global").importance(gradient)
    assert layer["a"].tolist() == [[0.75 * 2 / 8, 0.25 * 2 / 8]]
    assert layer["b"].tolist() == [[0.0, 0.25 * 6 / 8, 0.25 * 6 / 8, 0.5 * 6 / 8, 0.0, 0.0]]
    assert whole_net["a"][0].tolist() == pytest.approx([3 / 12, 1 / 12])
    assert whole_net["b"][0].tolist() == pytest.approx([0, 2 / 12, 2 / 12, 4 / 12, 0, 0])
    zero = PriPrune().importance({"a": torch.zeros(1, 2)})["a"]
    assert zero.tolist() == [[0.0, 0.0]]
    logits = {"a": torch.tensor([[0.5, -1.0]]), "b": torch.zeros(1, 6)}
    keep = {name: torch.ones_like(value, dtype=torch.bool) for name, value in logits.items()}
    keep["b"][0, 5] = False
    rule, silent = PriPrune(accuracy=2.0, privacy=3.0, sharing=0.5), torch.tensor(7.0)
    others = (lambda p, x, y: silent, logits, gradient, keep, (silent, silent), logits, torch.tensor(1.0))
    privacy = -sum((layer[name] * logsigmoid(a)).sum() for name, a in logits.items())
    sharing = logits["a"].sigmoid().sum() + 5 * 0.5
    assert float(rule.objective(logits, *others)) == pytest.approx(float(2 * 7 + 3 * privacy + 0.5 * sharing))


def test_alpha_rests_where_the_notes_say():
    # Of L_pri and L_sha alone: alpha* = (lambda_pri / lambda_sha) * weight.
    rule = PriPrune(accuracy=0.0, privacy=0.02, sharing=0.1)
    _, others = setting(rule)
    best = {n: 0.2 * rule.importance(others[2])[n] for n in WEIGHTS}
    logits = {n: torch.logit(best[n].clamp_min(1e-9)) for n in WEIGHTS}
    slopes = grad(rule.objective)(logits, *others)
    assert all(bool((slopes[n][best[n] > 0].abs() < 1e-12).all()) for n in WEIGHTS)


def test_a_sample_is_equation_18():
    rng = torch.Generator().manual_seed(0)
    alpha, tau = torch.rand(50, generator=rng, dtype=torch.float64), torch.tensor(0.7)
    gumbel = -torch.log(-torch.log(torch.rand(2, 50, generator=rng, dtype=torch.float64)))
    pi = torch.stack([alpha, 1 - alpha])
    expected = torch.softmax((pi.log() + gumbel) / tau, 0)[0]
    assert torch.allclose(sample_withheld(alpha.logit(), gumbel[0] - gumbel[1], tau, hard=False), expected)


def test_a_weight_is_withheld_as_often_as_alpha_says():
    noise = PriPrune(learns="step").noise({"w": torch.zeros(100, 100)}, 5, torch.Generator().manual_seed(0))["w"]
    assert noise.shape == (5, 100, 100) and bool(noise.isfinite().all())
    for alpha in (0.1, 0.5, 0.9):
        share = sample_withheld(torch.full((), math.log(alpha / (1 - alpha))), noise, torch.tensor(5.0)).mean()
        assert float(share) == pytest.approx(alpha, abs=0.01)


def test_alphas_step_is_adams():
    rule, rng = PriPrune(step=0.02), torch.Generator().manual_seed(0)
    params = {"w": torch.zeros(3, 4, dtype=torch.float64)}
    state, leaf = rule.init(params), torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([leaf], lr=0.02)
    for _ in range(5):
        leaf.grad = torch.randn(3, 4, generator=rng, dtype=torch.float64)
        optimiser.step()
        state = state | rule.step_adam(state, {"w": leaf.grad})
    assert torch.allclose(state[LOGITS + "w"], leaf.detach(), atol=1e-12) and float(state[STEPS]) == 5


def test_alpha_learns_once_a_turn_by_the_turns_gradient_or_at_every_step():
    params, mask, batches = drawn(0)
    whole_turn, each = PriPrune(), PriPrune(learns="step")
    made = {rule.learns: turned(rule) for rule in (whole_turn, each)}
    assert [float(made[name].state[STEPS]) for name in ("turn", "step")] == [1, 2]
    before = {
        n: v - RATE * torch.where(mask[n], g, 0) if n in mask else v - RATE * g
        for (n, v), g in zip(
            params.items(), grad(loss)(params, batches.inputs[0], batches.labels[0]).values(), strict=True
        )
    }
    noise = {n: v[0] for n, v in whole_turn.noise(params, 2, torch.Generator().manual_seed(1)).items()}
    keep, examples = whole_mask(params, mask), (batches.inputs[1], batches.labels[1])
    logits = {n: torch.zeros_like(params[n]) for n in WEIGHTS}
    tau = torch.tensor(5.0, dtype=torch.float64)
    slopes = grad(whole_turn.objective)(logits, loss, before, made["turn"].summed, keep, examples, noise, tau)
    expected = whole_turn.step_adam(whole_turn.init(params), slopes)
    assert all(torch.allclose(made["turn"].state[LOGITS + n], expected[LOGITS + n], atol=1e-12) for n in WEIGHTS)
    one = Batch(batches.inputs[:1], batches.labels[:1])  # the paper's one local step: both are the same
    found = []
    for rule in (whole_turn, each):
        chance = rule.noise(params, 1, torch.Generator().manual_seed(1))
        found.append(rule.turn(loss, params, mask, rule.init(params), one, chance, RATE).state)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_temperature_falls_with_a_clients_turns_and_never_to_nothing():
    seen = []

    class Watched(PriPrune):
        def objective(self, *arguments, **others):
            seen.append(float(arguments[-1]))
            return super().objective(*arguments, **others)

    rule = Watched()
    for turns in (0, 1, 10, 5000):
        begun = half(rule) | {TURNS: torch.tensor(float(turns), dtype=torch.float64)}
        made = turned(rule, state=begun)
        assert float(made.state[TURNS]) == turns + 1 and float(made.state[STEPS]) == 1
        assert all(bool(value.isfinite().all()) for value in made.state.values())
    assert seen == pytest.approx([5.0, 5 * 0.965, 5 * 0.965**10, 0.1])


# Its promises --------------------------------------------------------------------------------------------------------


def test_the_rate_adapts():
    rule, state, found = PriPrune(accuracy=0.0, privacy=2.0, sharing=0.2, step=0.2), None, []
    for number in range(40):
        made = turned(rule, state=state, chance=number)
        state = made.state
        found.append(float(rates(made.withheld, drawn(0)[1]).of_kept))
    assert len(set(found)) > 1 and 0 < found[-1] < 1
    steep = {n: made.summed[n].abs()[drawn(0)[1][n]] for n in WEIGHTS}
    held = {n: made.withheld[n][drawn(0)[1][n]] for n in WEIGHTS}
    name = "3.weight"
    assert float(steep[name][held[name]].mean()) > float(steep[name][~held[name]].mean())


@pytest.mark.parametrize("learns", ["turn", "step"])
def test_many_clients_stacked_are_each_as_alone(learns):
    rule = PriPrune(learns=learns)
    received, mask, _ = drawn(0)
    clients = []
    for seed in range(3):
        _, _, batches = drawn(seed)
        noise = rule.noise(received, 2, torch.Generator().manual_seed(seed))
        clients.append((turned(rule, state=half(rule), chance=seed).state, batches, noise))
    states, inputs, labels, noises = (
        tree.stack([one[0] for one in clients]),
        torch.stack([one[1].inputs for one in clients]),
        torch.stack([one[1].labels for one in clients]),
        tree.stack([one[2] for one in clients]),
    )
    many = vmap(lambda s, x, y, n: tuple(rule.turn(loss, received, mask, s, Batch(x, y), n, RATE)))(
        states, inputs, labels, noises
    )
    for number, (state, batches, noise) in enumerate(clients):
        alone = rule.turn(loss, received, mask, state, batches, noise, RATE)
        for one, part in zip(alone, many, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.allclose(one, part[number], atol=1e-12)
                continue
            for name, value in one.items():
                same = torch.equal if value.dtype == torch.bool else lambda a, b: torch.allclose(a, b, atol=1e-9)
                assert same(value, part[name][number]), name


def test_a_turn_asks_for_no_number_so_that_a_graph_can_hold_it():
    with FakeTensorMode():
        made = turned(PriPrune())
    assert all(isinstance(value, FakeTensor) for value in made.state.values())  # without numbers to ask for


def test_nothing_that_is_given_changes_and_noise_decides():
    rule = PriPrune()
    received, mask, batches = drawn(0)
    state, noise = half(rule), rule.noise(received, 2, torch.Generator().manual_seed(0))
    given = [received, mask, state, noise, batches._asdict()]
    before, chance = [tree.clone(one) for one in given], torch.get_rng_state()
    first, again = (rule.turn(loss, received, mask, state, batches, noise, RATE) for _ in range(2))
    assert all(torch.equal(one[n], v) for one, copy in zip(given, before, strict=True) for n, v in copy.items())
    assert torch.equal(chance, torch.get_rng_state())
    assert all(torch.equal(first.state[n], value) for n, value in again.state.items())
    other = turned(rule, state=state, chance=9)
    assert any(not torch.equal(first.state[LOGITS + n], other.state[LOGITS + n]) for n in WEIGHTS)
    assert {n: v.shape for n, v in first.state.items()} == {n: v.shape for n, v in state.items()}
    assert {n: v.dtype for n, v in first.state.items()} == {n: v.dtype for n, v in state.items()}


def test_without_a_base_pruning_it_works_too():
    rule = PriPrune(alpha=0.9)
    received, _, batches = drawn(0)
    noise = rule.noise(received, 2, torch.Generator().manual_seed(0))
    made = rule.turn(loss, received, {}, rule.init(received), batches, noise, RATE)
    assert all(bool((made.values[n] == 0).all()) and bool(made.withheld[n].all()) for n in WEIGHTS)
    begun = reload(received, made.state, {})
    assert all(torch.equal(begun[n], made.state[SAVED + n]) for n in WEIGHTS)


def test_the_papers_lambdas():
    assert len(PRESETS) == 8 and PriPrune(*PRESETS["femnist", "prunefl"]) == PriPrune(5.0, 15.0, 2e-5) == PriPrune()
    assert PriPrune(*PRESETS["femnist", "feddst"], alpha=0.1) == PriPrune(10.0, 8.0, 2e-5, alpha=0.1)


@pytest.mark.parametrize(
    "fields",
    [{"alpha": 0.0}, {"alpha": 1.0}, {"privacy": -1.0}, {"coolest": 9.0}, {"normalise": "net"}, {"learns": "never"}],
)
def test_what_makes_no_sense_is_refused(fields):
    with pytest.raises(WrongInput):
        PriPrune(**fields)


def test_commands_without_clients_refuse_it():
    for kind in (Audit, Invert):
        with pytest.raises(WrongInput, match="use secateur federate"):
            read(kind, None, {"defense": "priprune"})


def test_it_is_said_where_the_lambdas_are_for_a_larger_network():
    assert PriPrune().caution(6_601_504) is None
    assert PriPrune(sharing=2e-4).caution(600_000) is None  # alpha rests at .125 on average
    assert PriPrune().caution(600_000).endswith("try sharing=0.0002")  # at 1.25
    assert PriPrune(privacy=0.0).caution(100) is None and PriPrune(sharing=0.0).caution(100) is not None
