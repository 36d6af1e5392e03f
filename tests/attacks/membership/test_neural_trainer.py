"""The networks of the neural attacks against the library's layers, and the loop that trains them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from secateur.attacks.membership import neural
from secateur.attacks.membership.neural import Dropout, Mlp, NeuralSchedule, Nn, keep, logits, train
from secateur.attacks.membership.samia import Samia, Transformer
from secateur.errors import WrongInput
from secateur.gpu import graphs
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.seeding import initialise

CLASSES = 7


class Plain(nn.Module):
    """SAMIA's network with the library's encoder layers and the same weights."""

    def __init__(self, ours, dropout):
        super().__init__()
        self.scale, self.embed, self.join, self.decide = ours.scale, ours.embed, ours.join, ours.decide
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        for theirs, own in zip(self.encoder.layers, ours.layers, strict=True):
            pairs = [(theirs.self_attn.out_proj, own.output), (theirs.linear1, own.widen), (theirs.linear2, own.narrow)]
            pairs += [(theirs.norm1, own.attended), (theirs.norm2, own.normal)]
            theirs.self_attn.in_proj_weight = own.queries_keys_values.weight
            theirs.self_attn.in_proj_bias = own.queries_keys_values.bias
            for library, written in pairs:
                library.weight, library.bias = written.weight, written.bias

    def forward(self, x):
        tokens = gelu(self.embed(self.scale(x).view(len(x), 3, CLASSES).transpose(1, 2)))
        return self.decide(self.join(self.encoder(tokens).flatten(1)).relu())


@pytest.fixture
def network(rng):
    return initialise(lambda: Transformer(CLASSES), rng)


@pytest.fixture
def rows(rng):
    """Rows that a network can learn: members have a larger first value."""
    truth = torch.randint(2, (400,), generator=rng)
    inputs = torch.randn(400, 3 * CLASSES, generator=rng)
    inputs[:, 0] += truth
    return Batch(inputs, truth)


def test_the_written_attention_equals_the_librarys_in_eval_mode(network, rows):
    network.scale.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    theirs = Plain(network, 0.2).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(network, rows.inputs), theirs(rows.inputs), rtol=0, atol=1e-5)


def test_the_written_attention_equals_the_librarys_in_train_mode_without_dropout(network, rows):
    theirs = Plain(network, 0.0).train()
    parameters = list(network.parameters())
    given = [net.train()(rows.inputs) for net in (network, theirs)]
    torch.testing.assert_close(*given, rtol=0, atol=1e-5)
    for ours, plain in zip(*(torch.autograd.grad(x.square().sum(), parameters) for x in given), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_the_network_is_initialised_as_the_librarys(network):
    """The same families and widths, from the generator alone."""
    layer = nn.TransformerEncoderLayer(64, 4, 128)
    for theirs, own in (
        (layer.self_attn.in_proj_weight, network.layers[0].queries_keys_values.weight),
        (layer.self_attn.out_proj.weight, network.layers[0].output.weight),
        (layer.linear1.weight, network.layers[0].widen.weight),
    ):
        assert float(own.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.05)
        assert float(own.detach().abs().max()) == pytest.approx(float(theirs.detach().abs().max()), rel=0.02)
    assert not network.layers[0].queries_keys_values.bias.any() and not network.layers[0].output.bias.any()


def test_dropout_drops_its_share_keeps_the_mean_and_repeats_with_its_seed():
    x = torch.ones(1000, 1001)
    first, second = (Dropout(0.2, torch.Generator().manual_seed(s))(x) for s in (0, 0))
    assert torch.equal(first, second)
    assert sorted(first.unique().tolist()) == [0, pytest.approx(256 / 205)]
    assert float((first == 0).double().mean()) == pytest.approx(51 / 256, abs=2e-3)  # five standard errors
    assert float(first.double().mean()) == pytest.approx(1, abs=3e-3)
    neighbours = (first[:, 1:] == 0) & (first[:, :-1] == 0)
    assert float(neighbours.double().mean()) == pytest.approx(0.04, abs=2e-3)  # one draw's eight masks are independent


def test_dropout_is_where_the_library_has_it(network, rows):
    shapes = []
    network(rows.inputs[:10], lambda x: shapes.append(tuple(x.shape)) or x)
    tokens = 10 * CLASSES
    assert shapes == [(10 * 4, CLASSES, CLASSES), (tokens, 64), (tokens, 128), (tokens, 64)] * 3
    shapes.clear()
    Mlp(5)(torch.zeros(10, 5), lambda x: shapes.append(tuple(x.shape)) or x)
    assert shapes == [(10, 512), (10, 256), (10, 128)]


def rates_of(monkeypatch, rows, schedule):
    """The learning rate of every epoch."""
    rates, plain = [], neural._train_epoch

    def note(*arguments):
        rates.append(arguments[0].optimiser.param_groups[0]["lr"])
        plain(*arguments)

    monkeypatch.setattr(neural, "_train_epoch", note)
    network = initialise(lambda: Mlp(3 * CLASSES), torch.Generator().manual_seed(0))
    taken = train(network, rows, schedule, torch.Generator().manual_seed(0))
    assert taken == len(rates)
    return rates


def test_the_papers_schedule_lowers_the_rate_after_a_half_and_three_quarters(monkeypatch, rows):
    schedule = NeuralSchedule(epochs=8, early_stopping=False)
    rates = rates_of(monkeypatch, rows, schedule)
    assert rates == pytest.approx([0.01] * 4 + [0.001] * 2 + [0.0001] * 2)


def test_early_stopping_lowers_the_rate_when_the_held_out_loss_stalls_and_then_ends(monkeypatch, rows):
    rates = rates_of(monkeypatch, rows, NeuralSchedule(epochs=500, learning_rate=0.1))
    assert 6 <= len(rates) < 100
    assert sorted({round(rate, 6) for rate in rates}) == [0.001, 0.01, 0.1]
    assert rates == sorted(rates, reverse=True)


def test_early_stopping_keeps_the_best_weights(rows, rng):
    noise = Batch(rows.inputs, torch.randint(2, (400,), generator=rng))  # nothing to learn: the loss can only rise
    held_out_loss = []
    network = initialise(lambda: Mlp(3 * CLASSES), rng)
    plateau = neural._Plateau(network, patience=2)
    for step in range(4):
        before = plateau.loss
        plateau.is_reached(network, noise)
        held_out_loss.append(before)
        with torch.no_grad():
            network.layers[-1].weight.mul_(10.0 ** (step + 1))
    best = initialise(lambda: Mlp(3 * CLASSES), torch.Generator())
    best.load_state_dict(plateau.best)
    found = float(nn.functional.cross_entropy(logits(best, noise.inputs), noise.labels))
    assert found == pytest.approx(plateau.loss) and plateau.loss == min(held_out_loss)


def test_chance_comes_from_the_generator_alone(rows):
    def once():
        network = initialise(lambda: Transformer(CLASSES), torch.Generator().manual_seed(3))
        train(network, rows, NeuralSchedule(epochs=2), torch.Generator().manual_seed(4))
        return network.state_dict()

    before = torch.get_rng_state()
    first = once()
    torch.rand(5)  # what others draw must not matter
    second = once()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.set_rng_state(before)
    once()
    assert torch.equal(before, torch.get_rng_state())


def test_a_last_batch_of_one_row_joins_the_one_before(rows):
    network = initialise(lambda: Transformer(CLASSES), torch.Generator().manual_seed(0))
    train(network, rows.take(torch.arange(129)), NeuralSchedule(epochs=1, early_stopping=False), torch.Generator())


def test_a_network_that_diverges_is_said_clearly(rows):
    schedule = NeuralSchedule(epochs=5, learning_rate=1e20, early_stopping=False)
    with pytest.raises(WrongInput, match="diverge"):
        train(initialise(lambda: Mlp(3 * CLASSES), torch.Generator()), rows, schedule, torch.Generator())


def test_the_score_is_the_logit_of_member_and_its_sign_decides(rng):
    box = BlackBox(lambda x: torch.cat([x, 1 - x], 1).double())  # float64 answers serve too
    some = Batch(torch.rand(200, 1, generator=rng), torch.zeros(200, dtype=torch.int64))
    sure = Batch(0.9 + 0.1 * torch.rand(200, 1, generator=rng), some.labels)
    attack = replace(Nn(), epochs=20, learning_rate=0.1).fit([Shadow(box, sure, some)], rng)
    guesses = attack.score(box, Candidates(Batch(torch.tensor([[0.95], [0.2]]), some.labels[:2])))
    network, _ = attack.fitted
    expected = logits(network, torch.tensor([[0.95, 0.05], [0.2, 0.8]]))
    torch.testing.assert_close(guesses.scores, expected[:, 1] - expected[:, 0])
    assert guesses.members.tolist() == (guesses.scores > 0).tolist() == [True, False]


def test_every_shadow_row_is_asked_once_and_the_victim_only_to_score(rng):
    asked = []

    def box(name):
        return BlackBox(lambda x: asked.append((name, len(x))) or torch.cat([x, 1 - x], 1).clamp(0, 1).softmax(1))

    half = Batch(torch.rand(20, 1, generator=rng), torch.zeros(20, dtype=torch.int64))
    attack = replace(Samia(), epochs=3).fit([Shadow(box("shadow"), half, half)], rng)
    assert asked == [("shadow", 20)] * 22  # for members and for non-members: p, and 10 directions
    asked.clear()
    attack.score(box("victim"), Candidates(half))
    assert asked == [("victim", 20)] * 11


def test_keep_changes_nothing():
    x = torch.ones(3)
    assert keep(x) is x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_steps_replayed_from_a_graph_on_a_gpu_learn_what_single_steps_learn(dropout, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    rows = Batch(torch.randn(1000, 30, generator=rng), torch.randint(2, (1000,), generator=rng))
    schedule = NeuralSchedule(epochs=3, batch_size=64, dropout=dropout, early_stopping=False)

    def trained(warm_up):
        monkeypatch.setattr(graphs, "WARMUPS", warm_up)
        network = initialise(lambda: Mlp(30), torch.Generator().manual_seed(0)).cuda()
        train(network, rows.to("cuda"), schedule, torch.Generator().manual_seed(0))
        return torch.cat([value.flatten() for value in network.parameters()])

    torch.testing.assert_close(trained(warm_up=3), trained(warm_up=10_000), rtol=1e-3, atol=1e-4)
