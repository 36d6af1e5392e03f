"""Every defense that acts on the upload keeps the promises of interfaces.Upload, alone and inside error feedback."""

import inspect

import pytest
import torch
from torch import nn
from torch.func import vmap

from secateur import catalogue, tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import Audit, Prune, defense, read
from secateur.defenses.error_feedback import RESIDUAL, ErrorFeedback, upload_of
from secateur.defenses.selection import counts
from secateur.errors import WrongInput
from secateur.interfaces import Batch, UploadContext

NAMES = [name for name, entry in catalogue.methods("defense").items() if entry.info["acts_on"] == "upload"]
ALONE = [*NAMES, "dgp:release=2"]
ALL = ALONE + [f"{name}+error-feedback" for name in ALONE if name not in ("dp", "distributed-dp")]
SHARES = {"top-k": (0, 0.8), "dgp": (0.05, 0.75), "adgp": (0, 0.8)}  # of n entries counts(n, ...) are sent, exactly


def client(dtype=torch.float64, seed=0, number=0):
    """A client's gradient and what it has at hand, all new."""
    made = torch.Generator().manual_seed(7)
    with torch.no_grad(), torch.random.fork_rng():
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)).to(dtype)
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=made))
    batch = Batch(torch.randn(3, 1, 6, 6, generator=made).to(dtype), torch.tensor([0, 5, 2]))
    sent = tree.state_of(net)
    turning = UploadContext(net, sent, batch, number, torch.Generator().manual_seed(seed))
    return gradient_update(net, sent, batch, "batch").values, turning


def run(text, rounds=3, dtype=torch.float64, seed=0):
    """What is sent in every round, and the states."""
    upload = upload_of(defense(text))
    grads, _ = client(dtype)
    state, sent, states = upload.init(grads), [], []
    for number in range(rounds):
        out, state = upload(grads, state, client(dtype, seed, number)[1])
        sent.append(out)
        states.append(state)
    return sent, states


def test_the_papers_uploads_are_there():
    assert {"top-k", "dgp", "adgp", "soteria", "outpost", "noise", "dp"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_which_adaptive_attackers_are_the_right_ones(name):
    assert set(catalogue.find("defense", name).info["adaptive"]) <= {"support", "layer", "reapply", "mask"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("text", ALL)
def test_names_shapes_and_dtypes_are_the_gradients_and_the_state_keeps_its_own(text, dtype):
    grads, _ = client(dtype)
    begun = {name: (value.shape, value.dtype) for name, value in upload_of(defense(text)).init(grads).items()}
    sent, states = run(text, dtype=dtype)
    for out, state in zip(sent, states, strict=True):
        assert list(out) == list(grads)
        assert all(out[name].shape == value.shape and out[name].dtype == dtype for name, value in grads.items())
        assert all(bool(value.isfinite().all()) for value in out.values())
        assert {name: (value.shape, value.dtype) for name, value in state.items()} == begun


@pytest.mark.parametrize("text", [text for text in ALL if not text.startswith("soteria")])  # it asks for its layer
def test_an_update_of_no_tensors_stays_one(text):
    upload = upload_of(defense(text))
    sent, state = upload({}, upload.init({}), client()[1])
    assert sent == state == {}
    if hasattr(upload, "compress"):
        assert upload.compress({}) == {}


@pytest.mark.parametrize("text", ALL)
def test_nothing_that_is_given_changes(text):
    upload = upload_of(defense(text))
    grads, turning = client()
    _, state = upload(grads, upload.init(grads), turning)
    given = [grads, state, turning.sent, turning.batch._asdict()]
    before, weights, training = [tree.clone(one) for one in given], tree.state_of(turning.net), turning.net.training
    upload(grads, state, turning)
    for one, copy in zip(given, before, strict=True):
        assert all(torch.equal(one[name], value) for name, value in copy.items())
    assert all(torch.equal(value, weights[name]) for name, value in turning.net.state_dict().items())
    assert turning.net.training == training


@pytest.mark.parametrize("text", ALL)
def test_a_seed_decides_everything_and_the_global_generator_nothing(text):
    torch.manual_seed(1)
    first = run(text)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = run(text)
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", NAMES)
def test_noise_can_be_drawn_beforehand(name):
    upload = catalogue.find("defense", name)()
    grads, turning = client()
    sent, _ = upload(grads, upload.init(grads), turning)
    if not hasattr(upload, "noise"):
        other, _ = upload(grads, upload.init(grads), client(seed=1)[1])
        assert all(torch.equal(value, other[key]) for key, value in sent.items()), "it draws, and has no noise()"
        return
    drawn = upload.noise(grads, torch.Generator().manual_seed(0))
    again, _ = upload(grads, upload.init(grads), turning, noise=drawn)
    assert all(torch.equal(value, again[key]) for key, value in sent.items())


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("ties", [False, True], ids=["as it is", "with ties"])
def test_the_number_of_entries_that_are_sent_is_exact(name, ties):
    upload = catalogue.find("defense", name)()
    grads, turning = client()
    grads = {key: value + 1 if value.ndim == 1 else value for key, value in grads.items()}  # no chance zeros
    if ties:  # half of all magnitudes are equal
        grads = {key: torch.where(torch.arange(v.numel()).view_as(v) % 4 < 2, -0.1, v) for key, v in grads.items()}
    sent, _ = upload(grads, upload.init(grads), turning)
    for key, value in grads.items():
        _, kept = counts(value.numel(), *SHARES[name])
        assert int((sent[key] != 0).sum()) == kept
        assert bool(((sent[key] == value) | (sent[key] == 0)).all())


@pytest.mark.parametrize("name", SHARES)
def test_what_an_attacker_applies_again_is_what_the_client_did_in_vmap_too(name):
    upload = catalogue.find("defense", name)()
    grads, turning = client()
    sent, _ = upload(grads, upload.init(grads), turning)
    wrapped = ErrorFeedback(upload)
    with_empty_residual, _ = wrapped(grads, wrapped.init(grads), turning)
    many = vmap(upload.compress)({key: torch.stack([value, -value]) for key, value in grads.items()})
    for key, value in sent.items():
        assert torch.equal(upload.compress(grads)[key], value) and torch.equal(with_empty_residual[key], value)
        assert torch.equal(many[key][0], value) and torch.equal(many[key][1], -value)


@pytest.mark.parametrize("name", SHARES)
def test_a_gradient_flows_through_what_an_attacker_applies_again(name):
    upload = catalogue.find("defense", name)()
    values = torch.randn(40, generator=torch.Generator().manual_seed(0), requires_grad=True)
    shown = upload.compress({"w": values})["w"]
    (slope,) = torch.autograd.grad(shown.sum(), values)
    assert torch.equal(slope != 0, shown != 0)


@pytest.mark.parametrize("text", [text for text in ALL if "+" in text])
def test_error_feedback_loses_nothing(text):
    upload = upload_of(defense(text))
    grads, turning = client()
    state = upload.init(grads)
    for _ in range(4):
        before = upload.accumulate(grads, state)
        sent, state = upload(grads, state, turning)
        for name, value in before.items():
            after = sent[name] + state[RESIDUAL + name]
            whole = ((sent[name] == 0) | (sent[name] == value)).all()
            assert torch.equal(after, value) if whole else torch.allclose(after, value, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_do_not_make_updates_refuse_it(name):
    for kind in (Audit, Prune):
        with pytest.raises(WrongInput, match=f"{name} acts on updates; use secateur invert"):
            read(kind, None, {"defense": name})


@pytest.mark.parametrize("name", NAMES)
def test_its_call_begins_as_the_interface_says(name):
    parameters = list(inspect.signature(catalogue.find("defense", name)().__call__).parameters.values())
    assert [p.name for p in parameters[:3]] == ["grads", "state", "context"]
    assert all(p.default is None for p in parameters[3:])
