"""Rob isolates what its formula predicts, and what it isolates is exact."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import catalogue
from secateur.attacks.inversion.rob import (
    Rob,
    expected_isolated,
    explain,
    fill_rows,
    interpolate,
    read_out,
    read_surviving,
    thresholds,
)
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.config import defense_of_updates
from secateur.data.load import load
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView, UploadContext, Weights
from secateur.tree import state_of
from silent_watch import Silent

CLASSES = 5


def small(shape, dtype=torch.double):
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(shape[0], 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    size = features.eval()(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*features, nn.Linear(size, CLASSES)).to(dtype)


def knowledge_of(net, shape, batch, **more):
    zero = torch.zeros(shape[0], 1, 1)
    return Knowledge(net, shape, CLASSES, zero, zero + 1, batch_size=batch, **more)


def mount(attack, shape, batches, rng, dtype=torch.double, update=gradient_update, **more):
    """Tamper, let clients answer, reconstruct."""
    net = small(shape, dtype)
    first = knowledge_of(net, shape, batches[0].size, **more)
    tampered, state = attack.tamper(net, state_of(net), first, rng)
    knowledge = dataclasses.replace(first, net=tampered)
    views = [ServerView(state, update(tampered, state, batch)) for batch in batches]
    attack.check(knowledge, views[0])
    found = dict(attack.reconstruct([[view] for view in views], knowledge, [rng] * len(views), Silent()))
    return state, [found[i] for i in range(len(batches))]


def noise(count, batch, shape, rng, dtype=torch.double):
    """Pictures whose measurement is a unit Gaussian whatever the row."""
    return [
        Batch(
            torch.randn(batch, *shape, generator=rng, dtype=dtype),
            torch.randint(CLASSES, (batch,), generator=rng),
        )
        for _ in range(count)
    ]


def exact(found, batch, tolerance):
    """Which of the batch's pictures were found."""
    gaps = (found.batch.inputs[:, None] - batch.inputs[None]).flatten(2).abs().amax(2)
    return (gaps < tolerance).any(0)


def alone(state, batch):
    """Which of the batch's pictures have a bin to themselves."""
    measured = batch.inputs.flatten(1) @ state["imprint.weight"][0]
    place = torch.bucketize(measured, -state["imprint.bias"])
    return (place[:, None] == place[None]).sum(1) == 1


def test_read_out_by_hand():
    """Two pictures in the bins 0 and 2 of three; row i sums those at or above bin i, each times its slope."""
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 4.0])
    weight = torch.stack([2 * a - 1 * b, -1 * b, -1 * b])
    pictures, slopes = read_out(weight, torch.tensor([1.0, -1.0, -1.0]), 1e-5)
    assert torch.equal(pictures, torch.stack([a, b]))
    assert slopes.tolist() == [2.0, -1.0]


def test_pictures_that_share_a_bin_are_averaged_by_their_slopes():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 4.0])
    pictures, _ = read_out((3 * a + b)[None], torch.tensor([4.0]), 1e-5)
    assert torch.allclose(pictures[0], 0.75 * a + 0.25 * b)


def test_what_survives_by_hand():
    """The same two pictures, the first row's bias dropped: its jump still shows a, stretched to the box; b is exact."""
    a, b = torch.tensor([1.0, 2.0, 0.5, -4.0]), torch.tensor([-3.0, 4.0, 1.0, 2.0])
    sent = {"imprint.weight": torch.ones(3, 4), "imprint.bias": torch.tensor([9.0, 1.0, -1.0])}
    weight = torch.stack([2 * a - 1 * b, -1 * b, -1 * b])
    read = read_surviving(weight, torch.tensor([0.0, -1.0, -1.0]), sent, torch.full((4,), 2.0), 1e-5)
    assert torch.allclose(read[0], torch.stack([a / 2, b]))
    assert read[1].tolist() == [4.0, -1.0]  # 2a fills the box at a slope of 4; the sign is that of 0 - (-1)
    weight[0, 3] = weight[2, 0] = 0  # an entry of the first row, and one of the last: the jump keeps the other row's
    read = read_surviving(weight, torch.tensor([0.0, -1.0, -1.0]), sent, torch.full((4,), 2.0), 1e-5)
    assert torch.equal(read[0][-1], torch.tensor([0.0, 4.0, 1.0, 2.0]))


def test_without_any_bias_the_sign_is_that_of_the_measurement():
    a = torch.tensor([1.0, 2.0, 0.5, -1.0])
    weight, bias = torch.stack([3 * a, 0 * a, 0 * a]), torch.zeros(3)
    for edges, sign in (([-1.0, -2.0, -3.0], 1), ([3.0, 2.0, 1.0], -1)):  # a bin above 0, one below
        sent = {"imprint.weight": torch.ones(3, 4), "imprint.bias": torch.tensor(edges)}
        pictures, _, _ = read_surviving(weight, bias, sent, torch.full((4,), 2.0), 1e-5)
        assert torch.allclose(pictures, sign * a[None])


def pruned(name):
    def update(net, state, batch):
        upload = upload_of(defense_of_updates(name))
        values = gradient_update(net, state, batch).values
        turning = UploadContext(net, state, batch, 0, torch.Generator().manual_seed(0))
        return Gradient(upload(values, upload.init(values), turning)[0])

    return update


def likest(found, batch):
    """Each picture's largest |cosine| with one that was found, over the batch."""
    if not found.batch.size:
        return torch.zeros(batch.size, dtype=torch.double)
    one, other = (nn.functional.normalize(x.flatten(1)) for x in (batch.inputs, found.batch.inputs))
    return (one @ other.T).abs().amax(1)


@pytest.mark.parametrize("defense", ["top-k", "dgp"])
def test_who_knows_of_pruning_sees_more_pictures(defense):
    """The jumps of the weights outlive the biases."""
    shape, seen = (3, 8, 8), {}
    for adaptive in ("none", "support"):
        rng = torch.Generator().manual_seed(3)
        batches = noise(20, 9, shape, rng)
        _, found = mount(Rob(adaptive=adaptive), shape, batches, rng, update=pruned(defense))
        seen[adaptive] = torch.cat([likest(one, batch) for one, batch in zip(found, batches, strict=True)]).mean()
    assert seen["support"] > seen["none"] + 0.1


def test_where_nothing_was_dropped_the_adaptive_attacker_reads_the_same():
    shape, read = (1, 8, 8), {}
    for adaptive in ("none", "support"):
        rng = torch.Generator().manual_seed(3)
        batches = noise(5, 9, shape, rng)
        _, read[adaptive] = mount(Rob(adaptive=adaptive), shape, batches, rng)
    for plain, knowing in zip(*read.values(), strict=True):
        assert torch.allclose(plain.batch.inputs, knowing.batch.inputs)
        assert torch.equal(plain.batch.labels, knowing.batch.labels)


def test_mask_takes_small_entries_for_noise():
    """Noise in the holes of a pruned gradient hides nothing from an attacker who looks for two heaps."""
    shape, seen = (3, 8, 8), {}

    def update(net, state, batch):
        values, rng = pruned("top-k")(net, state, batch).values, torch.Generator().manual_seed(1)
        noise = {n: 1e-9 * torch.randn(v.shape, generator=rng, dtype=v.dtype) for n, v in values.items()}
        return Gradient({name: torch.where(value == 0, noise[name], value) for name, value in values.items()})

    for adaptive in ("support", "mask"):
        rng = torch.Generator().manual_seed(3)
        batches = noise(10, 9, shape, rng)
        _, found = mount(Rob(adaptive=adaptive), shape, batches, rng, update=update)
        seen[adaptive] = torch.cat([likest(one, batch) for one, batch in zip(found, batches, strict=True)]).mean()
    assert seen["mask"] > seen["support"] + 0.1


def rows_of(*missing, biases=()):
    """The rows and biases of `test_read_out_by_hand`, those named not sent: (weight, bias, their masks of sent)."""
    weight, bias = torch.tensor([[5.0, 0.0], [3.0, -4.0], [3.0, -4.0]]), torch.tensor([1.0, -1.0, -1.0])
    sent, bias_sent = torch.ones_like(weight, dtype=torch.bool), torch.ones_like(bias, dtype=torch.bool)
    for place in missing:
        sent[place] = False
    bias_sent[list(biases)] = False
    return weight.where(sent, 9.0), bias.where(bias_sent, 9.0), sent, bias_sent


@pytest.mark.parametrize("biases", [(), (1,), (2,)])
def test_an_entry_that_was_not_sent_is_that_of_an_equal_row(biases):
    """No picture lies in bin 1, so rows 1 and 2 are equal; without a bias the rows' sent entries say so."""
    weight, bias = fill_rows(*rows_of((1, 0), (2, 1), biases=biases))
    pictures, slopes = read_out(weight, bias, 1e-5)
    assert torch.equal(pictures, torch.tensor([[1.0, 2.0], [-3.0, 4.0]]))
    assert slopes.tolist() == [2.0, -1.0]


def test_an_entry_that_no_equal_row_has_is_shared_by_the_pictures_around_it():
    """The jump of 5 over slopes 2 and -1 is 2 * 2 - 1 * -1; above all sent rows there is nothing to read."""
    weight, bias = fill_rows(*rows_of((1, 0), (2, 0)))
    assert torch.allclose(weight[:, 0], torch.tensor([5.0, 1.0, 1.0]))
    pictures, _ = read_out(weight, bias, 1e-5)
    assert torch.allclose(pictures, torch.tensor([[2.0, 2.0], [-1.0, 4.0]]))
    pictures, _ = read_out(*fill_rows(*rows_of((0, 0))), 1e-5)
    assert torch.allclose(pictures, torch.tensor([[0.0, 2.0], [-3.0, 4.0]]))


def test_interpolation_keeps_known_entries_and_falls_to_zero_after_the_last_row():
    rows, known = torch.tensor([[8.0], [0.0], [4.0], [0.0]]), torch.tensor([[True], [False], [True], [False]])
    assert interpolate(rows, known, torch.tensor([1.0, 3.0, 1.0, 3.0])).flatten().tolist() == [8.0, 7.0, 4.0, 3.0]
    assert not interpolate(rows, torch.zeros_like(known), torch.ones(4)).any()


def withheld(share, seed=1):
    """Updates whose weights lack a share at random, biases too: as weights, where 0 was sent for them."""

    def update(net, state, batch):
        values, rng = weights_update(net, state, batch).values, torch.Generator().manual_seed(seed)
        return Weights(
            {name: value * (torch.rand(value.shape, generator=rng) > share) for name, value in values.items()}
        )

    return update


@pytest.mark.parametrize("update", [gradient_update, weights_update], ids=["gradient", "weights"])
def test_where_nothing_was_withheld_filling_changes_nothing(update):
    shape, read = (1, 8, 8), {}
    for adaptive in ("none", "fill"):
        rng = torch.Generator().manual_seed(3)
        _, read[adaptive] = mount(
            Rob(adaptive=adaptive), shape, noise(5, 9, shape, rng), rng, update=update, learning_rate=0.1
        )
    for plain, knowing in zip(*read.values(), strict=True):
        assert torch.equal(plain.batch.inputs, knowing.batch.inputs)
        assert torch.equal(plain.batch.labels, knowing.batch.labels)


def test_who_fills_entries_that_were_withheld_reads_most_pictures_exactly():
    """Of a batch of four in 128 bins, most gaps between pictures have a row where each entry was sent."""
    shape, seen = (3, 8, 8), {}
    for adaptive in ("none", "support", "fill"):
        rng = torch.Generator().manual_seed(3)
        batches = noise(20, 4, shape, rng)
        _, found = mount(Rob(adaptive=adaptive), shape, batches, rng, update=withheld(0.3), learning_rate=0.1)
        seen[adaptive] = torch.cat([exact(one, batch, 1e-6) for one, batch in zip(found, batches, strict=True)])
    assert not seen["none"].any() and not seen["support"].any()
    assert seen["fill"].double().mean() > 0.5


def test_an_update_of_zeros_alone_shows_no_pictures_to_who_fills_it(rng):
    _, (found,) = mount(
        Rob(adaptive="fill"), (1, 8, 8), noise(1, 9, (1, 8, 8), rng), rng, update=withheld(1.0), learning_rate=0.1
    )
    assert torch.isfinite(found.batch.inputs).all()


@pytest.mark.parametrize(("word", "reason"), [("layer", "imprint block alone"), ("reapply", "no trial to compress")])
def test_an_option_that_means_nothing_is_refused_with_the_reason(word, reason):
    with pytest.raises(WrongInput, match=f"means nothing here: rob .*{reason}.*allowed: none, support, mask, fill"):
        Rob(adaptive=word)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 9)])
def test_isolated_pictures_are_exact_and_no_others(shape, rng):
    batches = noise(20, 9, shape, rng)
    state, found = mount(Rob(), shape, batches, rng)
    for one, batch in zip(found, batches, strict=True):
        assert torch.equal(exact(one, batch, 1e-8), alone(state, batch))
        assert one.batch.size <= 9


def bin_masses(sent, pictures):
    """The share of pictures in every bin of a tampered model, (bins,)."""
    measured = pictures.flatten(1).to(sent["imprint.weight"]) @ sent["imprint.weight"][0]
    bins = torch.bucketize(measured, -sent["imprint.bias"]) - 1
    return torch.bincount(bins[bins >= 0], minlength=len(sent["imprint.bias"])) / len(pictures)


def test_the_isolated_share_is_the_expected_one(rng):
    """128 equal bins and 9 pictures: 93.9 %; 1800 pictures leave a standard error of about .6 %."""
    shape = (1, 8, 8)
    batches = noise(200, 9, shape, rng)
    state, found = mount(Rob(), shape, batches, rng)
    share = torch.cat([exact(one, batch, 1e-8) for one, batch in zip(found, batches, strict=True)]).double().mean()
    assert expected_isolated(torch.full((128,), 1 / 128), 9) == pytest.approx(0.939, abs=5e-4)
    assert float(share) == pytest.approx(0.939, abs=0.015)
    masses = bin_masses(state, torch.cat([batch.inputs for batch in batches]))
    assert float(share) == pytest.approx(expected_isolated(masses, 9), abs=0.015)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any), st.integers(1, 4))
def test_expected_isolated_counts_all_batches(weights, batch):
    """Against the enumeration of every way in which pictures can fall into bins."""
    masses = torch.tensor(weights, dtype=torch.double) / sum(weights)
    places = torch.cartesian_prod(*[torch.arange(len(weights))] * batch).view(-1, batch)
    chances = masses[places].prod(1)
    singles = ((places[:, :, None] == places[:, None, :]).sum(2) == 1).double().mean(1)
    assert expected_isolated(masses, batch) == pytest.approx(float((chances * singles).sum()), abs=1e-12)


def test_labels_of_isolated_pictures_are_right(rng):
    batches = noise(20, 4, (3, 8, 8), rng)
    state, found = mount(Rob(), (3, 8, 8), batches, rng)
    for one, batch in zip(found, batches, strict=True):
        if not bool(alone(state, batch).all()):
            continue
        gaps = (one.batch.inputs[:, None] - batch.inputs[None]).flatten(2).abs().amax(2)
        assert torch.equal(one.batch.labels, batch.labels[gaps.argmin(1)])
        assert one.loss < 1e-8


def test_a_picture_is_explained_as_one_of_the_whole_batch_where_others_were_not_found(rng):
    shape, (batch,) = (1, 6, 6), noise(1, 3, (1, 6, 6), rng)
    net = small(shape)
    known = knowledge_of(net, shape, 3)
    tampered, state = Rob(bins=2048).tamper(net, state_of(net), known, rng)
    view = ServerView(state, gradient_update(tampered, state, batch))
    pictures, slopes = read_out(view.update.values["imprint.weight"], view.update.values["imprint.bias"], 1e-9)
    known = dataclasses.replace(known, net=tampered)
    assert len(pictures) == 3
    for some in ([0, 1, 2], [0, 2], [1]):
        labels, gap = explain(view, known, pictures[some].view(-1, *shape), slopes[some], range(CLASSES))
        truths = [
            int((picture.view(shape) - batch.inputs).flatten(1).norm(dim=1).argmin()) for picture in pictures[some]
        ]
        assert gap < 1e-6 and torch.equal(labels, batch.labels[truths])


def test_weights_after_one_step_show_as_much_as_the_gradient(rng):
    batches = noise(10, 9, (3, 8, 8), rng)
    update = lambda net, state, batch: weights_update(net, state, batch, learning_rate=0.1)  # noqa: E731
    state, found = mount(Rob(), (3, 8, 8), batches, rng, update=update, learning_rate=0.1)
    for one, batch in zip(found, batches, strict=True):
        assert torch.equal(exact(one, batch, 1e-6), alone(state, batch))


def test_batch_statistics(rng):
    batches = noise(5, 9, (3, 8, 8), rng)
    update = lambda net, state, batch: gradient_update(net, state, batch, "batch")  # noqa: E731
    state, found = mount(Rob(), (3, 8, 8), batches, rng, update=update, batchnorm="batch")
    for one, batch in zip(found, batches, strict=True):
        assert torch.equal(exact(one, batch, 1e-6), alone(state, batch))
        assert "guess" in one.note


def test_float32(rng):
    batches = noise(20, 9, (3, 16, 16), rng, torch.float32)
    state, found = mount(Rob(), (3, 16, 16), batches, rng, torch.float32)
    hits = torch.cat([exact(one, batch, 1e-2) for one, batch in zip(found, batches, strict=True)])
    singles = torch.cat([alone(state, batch) for batch in batches])
    assert float(hits[singles].double().mean()) > 0.97
    assert found[0].batch.inputs.dtype == torch.float32


def test_dct_has_laplace_quantiles(rng):
    attack = Rob(measurement="dct", deviation=64**-0.5)  # of noise: the row's norm
    batches = noise(20, 9, (1, 8, 8), rng)
    state, found = mount(attack, (1, 8, 8), batches, rng)
    for one, batch in zip(found, batches, strict=True):
        assert torch.equal(exact(one, batch, 1e-8), alone(state, batch))
    chance = torch.distributions.Laplace(0.0, 0.5**0.5).cdf(thresholds("dct", 4)[1:])
    assert chance.tolist() == pytest.approx([0.25, 0.5, 0.75])


def test_centre_and_deviation_are_what_the_attacker_believes(rng):
    """Who estimates the spread and the mean of pictures that are not normalised isolates as many as before."""
    attack = Rob(measurement="dct", centre=0.0, deviation=5 * 64**-0.5)
    batches = [Batch(5 * batch.inputs, batch.labels) for batch in noise(100, 9, (1, 8, 8), rng)]
    state, _ = mount(attack, (1, 8, 8), batches, rng)
    pictures = torch.cat([batch.inputs for batch in batches])
    assert expected_isolated(bin_masses(state, pictures), 9) > 0.92
    moved = pictures + state["imprint.weight"][0].view(1, 1, 8, 8) / state["imprint.weight"][0].square().sum()
    net = small((1, 8, 8))
    knowledge = knowledge_of(net, (1, 8, 8), 9)
    unit = 5 * 64**-0.5  # `moved` measures one deviation more
    _, centred = Rob(measurement="dct", centre=unit, deviation=unit).tamper(net, state_of(net), knowledge, rng)
    assert torch.allclose(bin_masses(centred, moved), bin_masses(state, pictures), atol=2e-3)


def test_tamper_is_drawn_from_the_generator_and_leaves_the_model_alone():
    net = small((1, 8, 8))
    before = state_of(net)
    knowledge = knowledge_of(net, (1, 8, 8), 9)
    one, two, other = (Rob().tamper(net, before, knowledge, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
    assert not torch.equal(one[1]["imprint.weight"], other[1]["imprint.weight"])
    assert all(torch.equal(before[name], one[1][f"net.{name}"]) for name in before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert state_of(one[0]).keys() == one[1].keys()
    assert all(torch.equal(value, one[1][name]) for name, value in state_of(one[0]).items())


def test_a_zero_gradient_shows_no_pictures(rng):
    clear = lambda net, state, batch: Gradient(  # noqa: E731
        {name: torch.zeros_like(value) for name, value in gradient_update(net, state, batch).values.items()}
    )
    _, (found,) = mount(Rob(), (1, 8, 8), noise(1, 9, (1, 8, 8), rng), rng, update=clear)
    assert found.batch.size == 0
    assert found.batch.inputs.shape == (0, 1, 8, 8)


def test_noise_makes_every_bin_look_full_and_no_more_than_the_batch_is_kept(rng):
    def noisy(net, state, batch):
        values = gradient_update(net, state, batch).values
        return Gradient({n: v + 1e-2 * torch.randn(v.shape, generator=rng, dtype=v.dtype) for n, v in values.items()})

    _, (found,) = mount(Rob(), (1, 8, 8), noise(1, 9, (1, 8, 8), rng), rng, update=noisy)
    assert found.batch.size == 9
    assert torch.isfinite(found.batch.inputs).all()


def test_an_update_without_imprint_is_refused(rng):
    net = small((1, 8, 8))
    knowledge = knowledge_of(net, (1, 8, 8), 1)
    view = ServerView(state_of(net), gradient_update(net, state_of(net), noise(1, 1, (1, 8, 8), rng)[0]))
    with pytest.raises(WrongInput, match="tampered"):
        Rob().check(knowledge, view)


@pytest.mark.parametrize(
    "wrong", [{"bins": 1}, {"measurement": "mean"}, {"deviation": 0.0}, {"threshold": 1.0}, {"threshold": -0.1}]
)
def test_wrong_hyper_parameters_are_refused(wrong):
    with pytest.raises(WrongInput):
        Rob(**wrong)


def test_it_is_in_the_catalogue():
    entry = catalogue.find("inversion", "rob")
    assert entry.info["active"] is True
    assert entry.make is Rob


@pytest.mark.data
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_on_real_pictures_it_isolates_what_their_own_masses_say(name, data_folder, rng):
    data = load(name, data_folder, download=False)
    shape = tuple(data.batch.inputs.shape[1:])
    chosen = torch.randperm(len(data.batch.inputs), generator=rng)[: 150 * 9]
    pictures = Batch(data.batch.inputs[chosen].double(), data.batch.labels[chosen] % CLASSES)
    batches = [pictures.take(rows) for rows in torch.arange(150 * 9).split(9)]
    state, found = mount(Rob(), shape, batches, rng)
    share = torch.cat([exact(one, batch, 1e-7) for one, batch in zip(found, batches, strict=True)]).double().mean()
    expected = expected_isolated(bin_masses(state, data.batch.inputs[:5000]), 9)
    assert float(share) == pytest.approx(expected, abs=0.03)
    assert expected > 0.85
