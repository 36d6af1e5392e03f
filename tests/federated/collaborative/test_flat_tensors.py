"""Many tensors as one row, and a network's buffers over a step."""

import torch
from torch import nn

from alone import small
from secateur import tree
from secateur.federated.collaborative.flat_tensors import ALIGNED, Flat, Statistics
from secateur.functional import Functional, split

SHAPES = {"b": (3,), "w": (2, 5, 3, 3), "s": (), "m": (4, ALIGNED), "v": (7, 1, 1, 1)}


def drawn(users=()):
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn([*users, *shape], generator=rng) for name, shape in SHAPES.items()}


def test_what_is_joined_is_found_again_and_gaps_are_zero():
    flat = Flat(drawn())
    for users in ((), (3,)):
        tensors = drawn(users)
        rows = flat.join(tensors)
        assert rows.shape == (*users, flat.size)
        views = flat.views(rows)
        assert list(views) == list(SHAPES)
        assert all(torch.equal(views[name], value) for name, value in tensors.items())
        for value in views.values():
            value.zero_()
        assert not rows.any()  # they are views, and nothing lies between them
    assert all(start % ALIGNED == 0 for start in flat.starts.values()) and flat.size % ALIGNED == 0
    assert flat.sizes == (90, 7, 3, 1, 4 * ALIGNED)
    assert {flat.starts[name] < flat.tail for name in ("w", "v")} == {True}
    assert {flat.starts[name] >= flat.tail for name in ("b", "s", "m")} == {True}


def test_every_tensor_of_every_row_by_itself():
    tensors = drawn((3,))
    flat = Flat(drawn())
    each = flat.split_rows(flat.join(tensors))
    wanted = [value[user] for user in range(3) for value in tensors.values()]
    assert all(map(torch.equal, each, wanted))


def test_filters_that_lie_channels_last_are_taken_as_they_lie():
    flat, rows = Flat(drawn()), torch.empty(3, Flat(drawn()).size)
    plain = drawn((3,))
    for user in range(3):
        own = {name: value[user] for name, value in plain.items()}
        own["w"] = own["w"].contiguous(memory_format=torch.channels_last)
        flat.join_turned(own, rows[user])
        start = flat.starts["w"]
        assert torch.equal(rows[user, start : start + 90], own["w"].permute(0, 2, 3, 1).flatten())
        assert all(
            torch.equal(value, plain[name][user]) for name, value in flat.channels_last_views(rows[user]).items()
        )
    assert all(torch.equal(value, plain[name]) for name, value in flat.channels_last_views(rows).items())


def test_rows_of_either_kind_are_paired_entry_by_entry():
    flat, tensors = Flat(drawn()), drawn((3,))
    turned, plain = flat.allocate(3), flat.allocate(3)
    for user in range(3):
        flat.join_turned({name: value[user] for name, value in tensors.items()}, turned[user])
    for into, value in flat.pairs(plain, turned):
        into.copy_(value)
    assert torch.equal(plain, flat.join(tensors))
    one = flat.allocate(1)[0]
    for into, value in flat.pairs(one, turned[1]):
        into.copy_(value)
    assert torch.equal(one, plain[1])


def test_buffers_are_averaged_counted_or_taken():
    net = nn.Sequential(small(), nn.BatchNorm1d(3, momentum=None, dtype=torch.float64))
    net.register_buffer("own", torch.tensor([1.0, 2.0]))
    learner = Functional(net, training=True, device="cpu")
    params, buffers = split(net, tree.state_of(net))
    statistics = Statistics(learner.structure, buffers, users=2)
    assert list(statistics.buffers) == list(buffers)
    rows = statistics.copies()
    found = [statistics.buffers_of(user, rows) for user in range(2)]
    assert "0.1.num_batches_tracked" not in found[0] and "1.num_batches_tracked" in found[0]
    inputs = torch.randn(2, 5, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for own, some in zip(found, inputs, strict=True):
        learner(params | own, some)
    found[0]["own"].fill_(5)
    statistics.take(rows)
    kept = statistics.buffers
    assert kept["own"].tolist() == [5, 5] and kept["own"].dtype == torch.float32
    assert int(kept["0.1.num_batches_tracked"]) == int(kept["1.num_batches_tracked"]) == 1
    for name in ("0.1.running_mean", "0.1.running_var", "1.running_mean", "1.running_var"):
        assert torch.equal(kept[name], (found[0][name] + found[1][name]) / 2)
        assert not torch.equal(kept[name], buffers[name])
    assert int(net[0][1].num_batches_tracked) == 0  # the given net is as it was
