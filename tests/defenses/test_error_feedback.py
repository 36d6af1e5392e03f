"""Error feedback loses nothing, bitwise; and what it starves is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import catalogue
from secateur.config import defense
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.dp import DifferentialPrivacy
from secateur.defenses.error_feedback import RESIDUAL, ErrorFeedback, Starvation, starvation, upload_of
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput
from secateur.interfaces import Batch, UploadContext

WHOLE = [TopK(), DualGradientPruning(), DualGradientPruning(release=2), AlignedDualGradientPruning()]


@pytest.mark.parametrize("inner", WHOLE, ids=str)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_sent_and_next_residual_equal_gradient_and_residual_bitwise(inner, seed, dtype):
    rng, upload = torch.Generator().manual_seed(seed), ErrorFeedback(inner)
    shapes = {"w": (7, 9), "b": (7,), "s": ()}
    state = upload.init({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()})
    for _ in range(6):
        scale = 10.0 ** float(torch.randint(-6, 6, (), generator=rng))
        grads = {name: scale * torch.randn(shape, dtype=dtype, generator=rng) for name, shape in shapes.items()}
        before = {name: grads[name] + state[RESIDUAL + name] for name in grads}
        sent, state = upload(grads, state, None)
        for name in grads:
            assert torch.equal(sent[name] + state[RESIDUAL + name], before[name])
            assert torch.equal((sent[name] != 0) & (state[RESIDUAL + name] != 0), torch.zeros_like(sent[name]).bool())


def test_algorithm_2_by_hand():
    upload = ErrorFeedback(TopK(keep=0.5))
    grads = {"w": torch.tensor([3.0, 2.0])}
    state = upload.init(grads)
    sent, state = upload(grads, state, None)
    assert sent["w"].tolist() == [3, 0] and state[RESIDUAL + "w"].tolist() == [0, 2]
    sent, state = upload(grads, state, None)  # P = (3, 4)
    assert sent["w"].tolist() == [0, 4] and state[RESIDUAL + "w"].tolist() == [3, 0]


def test_over_the_rounds_what_was_sent_is_the_sum_of_the_gradients_less_what_waits(rng):
    upload, total = ErrorFeedback(TopK(0.1)), torch.zeros(50, dtype=torch.float64)
    grads = [{"w": torch.randn(50, generator=rng, dtype=torch.float64)} for _ in range(20)]
    state = upload.init(grads[0])
    for one in grads:
        sent, state = upload(one, state, None)
        total += sent["w"]
    assert torch.allclose(total + state[RESIDUAL + "w"], sum(one["w"] for one in grads), atol=1e-12)


def test_noise_that_was_drawn_goes_to_the_upload_inside_and_is_fed_back():
    upload, grads = ErrorFeedback(GaussianNoise(0.5)), {"w": torch.tensor([1.0, 2.0])}
    sent, state = upload(grads, upload.init(grads), None, noise={"w": torch.tensor([2.0, -4.0])})
    assert sent["w"].tolist() == [2, 0] and state[RESIDUAL + "w"].tolist() == [-1, 2]


def test_the_report_counts_what_was_never_sent():
    grads = {"w": torch.tensor([8.0, 4, 4, 4, 0]), "b": torch.tensor([6.0, 1.0])}
    upload = ErrorFeedback(DualGradientPruning(k1=0.2, k2=0.4))
    state, unsent = (
        upload.init(grads),
        {name: torch.ones_like(value, dtype=torch.bool) for name, value in grads.items()},
    )
    assert starvation(state, unsent) == Starvation(0, 7, 0, 7)
    for _ in range(3):
        sent, state = upload(grads, state, None)
        unsent = {name: where & (sent[name] == 0) for name, where in unsent.items()}
    # the 8 and the 6 are always on top; the zero has nothing to send
    found = starvation(state, unsent)
    assert [unsent["w"].tolist(), unsent["b"].tolist()] == [[True, False, False, False, True], [True, False]]
    assert found[1:] == (3, 2, 7)
    waits = torch.cat([state[RESIDUAL + "w"], state[RESIDUAL + "b"]])
    assert waits[0] == 24 and waits[5] == 18
    assert found.residual_norm == pytest.approx(float(waits.double().norm()))


def test_it_does_not_go_around_what_makes_its_gradient_anew():
    with pytest.raises(WrongInput, match="cannot be combined with DifferentialPrivacy"):
        ErrorFeedback(DifferentialPrivacy())
    with pytest.raises(WrongInput, match="residual cannot be added"):
        upload_of(defense("dp+error-feedback"))


def test_a_defense_as_text_becomes_an_upload():
    assert upload_of(defense("dgp:k1=.1+error-feedback")) == ErrorFeedback(DualGradientPruning(k1=0.1))
    assert upload_of(defense("error-feedback+top-k")) == ErrorFeedback(TopK())
    assert upload_of(defense("noise")) == GaussianNoise()
    assert upload_of(defense("none")) is None
    with pytest.raises(WrongInput, match="use for example dgp\\+error-feedback"):
        upload_of(defense("error-feedback"))
    with pytest.raises(WrongInput, match="cannot be combined"):
        defense("dgp+top-k")
    assert catalogue.find("defense", "error-feedback").summary.startswith("Adds what an upload did not send")


def test_soteria_and_outpost_go_inside_too(rng):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    sent = {name: value.detach() for name, value in net.named_parameters()}
    batch = Batch(torch.randn(2, 1, 2, 2, generator=rng), torch.tensor([0, 1]))
    turning = UploadContext(net, sent, batch, 0, rng)
    grads = {name: torch.randn(value.shape, generator=rng) for name, value in sent.items()}
    for name in ("soteria", "outpost"):
        upload = upload_of(defense(f"{name}+error-feedback"))
        out, state = upload(grads, upload.init(grads), turning)
        for key, value in grads.items():
            assert torch.allclose(out[key] + state[RESIDUAL + key], value, atol=1e-6)
