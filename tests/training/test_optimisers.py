"""Optimisers of clients: equal to torch.optim, with slopes, and readable as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.errors import WrongInput
from secateur.interfaces import Optimiser
from secateur.training.optimisers import (
    START,
    bound_gradient,
    list_batches,
    list_rates,
    parse_optimiser,
    take_step,
    write_optimiser,
)

RULES: list[tuple[str, Any]] = [
    ("sgd", lambda p: torch.optim.SGD(p, 0.05)),
    ("sgd:momentum=0.9", lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    ("sgd:weight_decay=0.01", lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.01)),
    (
        "sgd:momentum=0.8:nesterov=true:weight_decay=0.1",
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    ("adam", lambda p: torch.optim.Adam(p, 0.05)),
    (
        "adam:betas=0.8/0.95:eps=0.001:weight_decay=0.1",
        lambda p: torch.optim.Adam(p, 0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    ("adamw:weight_decay=0.1", lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)),
]


def task(params: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Return a loss with slopes of several sizes."""
    return (torch.tanh(inputs @ params["w"]) + params["b"]).square().mean()


def begin() -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(3)
    params = {"w": torch.randn(4, 3, generator=rng), "b": torch.randn(3, generator=rng)}
    return {name: value.double() for name, value in params.items()}, torch.randn(6, 4, generator=rng).double()


def unroll(optimiser: Optimiser, params: dict[str, Tensor], inputs: Tensor, rates: tuple[float, ...]) -> list[Tensor]:
    """Return the weights after the steps, as functions of the inputs."""
    params, moments = {name: value.requires_grad_() for name, value in params.items()}, START
    for step, rate in enumerate(rates):
        loss = task(params, inputs * (1 + step))
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()), create_graph=True), strict=True))
        direction, moments = take_step(optimiser, params, grads, moments)
        params = {name: value - rate * direction[name] for name, value in params.items()}
    return list(params.values())


@pytest.mark.parametrize(("text", "make"), RULES)
def test_equals_torch_optim_over_several_steps(text: str, make: Any) -> None:
    params, inputs = begin()
    leaves = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    reference = make(list(leaves.values()))
    for step in range(5):
        reference.zero_grad()
        task(dict(leaves), inputs * (1 + step)).backward()
        reference.step()
    trained = unroll(parse_optimiser(text), params, inputs, (0.05,) * 5)
    for ours, theirs in zip(trained, leaves.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("text", [text for text, _ in RULES])
def test_has_slopes_in_the_examples(text: str) -> None:
    params, inputs = begin()
    optimiser = parse_optimiser(text if text.startswith("sgd") else f"{text}:schedule=cosine")
    rates = list_rates(optimiser, 0.05, 3)
    assert torch.autograd.gradcheck(lambda x: unroll(optimiser, params, x, rates)[0], inputs.requires_grad_())


def test_softness_turns_a_sign_into_a_slope() -> None:
    grads = {"w": torch.tensor([1.0, -1.0, 0.0])}
    direction, _ = take_step(Optimiser("adam"), {}, grads, START, softness=0.03)
    torch.testing.assert_close(direction["w"], torch.tensor([1.0, -1.0, 0.0]) / 1.02)
    zero = torch.zeros(2, requires_grad=True)
    hard, _ = take_step(Optimiser("adam"), {}, {"w": zero}, START)
    assert torch.autograd.grad(hard["w"].sum(), zero)[0].isfinite().all()


def test_cosine_and_step_schedules_are_those_of_torch() -> None:
    leaf = [nn.Parameter(torch.zeros(1))]
    for text, scheduler in (
        ("sgd:schedule=cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)),
        ("sgd:schedule=step:step_size=2:gamma=0.3", lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.3)),
    ):
        reference = torch.optim.SGD(leaf, 0.2)
        schedule, rates = scheduler(reference), []
        for _ in range(6):
            rates.append(reference.param_groups[0]["lr"])
            reference.step()
            schedule.step()
        assert list_rates(parse_optimiser(text), 0.2, 6) == pytest.approx(rates)


@pytest.mark.parametrize(
    "text", ["sgd", "sgd:momentum=0.9:nesterov=true", "adam:betas=0.9/0.95", "adamw:eps=1e-06:schedule=0.1/0.05"]
)
def test_text_is_read_as_it_is_written(text: str) -> None:
    assert write_optimiser(parse_optimiser(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("adm", "did you mean 'adam'"),
        ("sgd:betas=0.9/0.9", "'betas' is not known"),
        ("sgd:momentum=lots", "is no number"),
        ("sgd:momentum=1", "must be in [0, 1)"),
        ("sgd:nesterov=true", "needs momentum"),
        ("adam:betas=0.9", "write two"),
        ("adam:schedule=linear", "'linear' is not known"),
    ],
)
def test_refuses_a_wrong_text_with_a_sentence(text: str, problem: str) -> None:
    with pytest.raises(WrongInput, match=problem.replace("[", r"\[").replace("(", r"\(").replace(")", r"\)")):
        parse_optimiser(text)


def test_refuses_as_many_rates_as_there_are_no_steps() -> None:
    with pytest.raises(WrongInput, match="2 rates, and the client takes 3 steps"):
        list_rates(Optimiser(schedule=(0.1, 0.05)), 0.1, 3)


def test_epochs_have_a_partial_last_batch_and_steps_go_round() -> None:
    assert list_batches(7, 3, epochs=2) == ((0, 1, 2), (3, 4, 5), (6,)) * 2
    assert list_batches(4, 3, steps=2) == ((0, 1, 2), (3, 0, 1))
    assert list_batches(4, None) == ((0, 1, 2, 3),)


@pytest.mark.parametrize("text", ["adam", "adam:weight_decay=0.1", "adamw:weight_decay=0.1", "adam:eps=0.001"])
def test_one_step_of_adam_bounds_the_gradient(text: str) -> None:
    rng = torch.Generator().manual_seed(0)
    grads = torch.randn(2000, generator=rng) * 10 ** (-12 * torch.rand(2000, generator=rng))
    grads[:100] = 0
    weights, optimiser = torch.randn(2000, generator=rng) / 10, parse_optimiser(text)
    leaf = nn.Parameter(weights.clone())
    leaf.grad = grads.clone()
    rule = torch.optim.AdamW if optimiser.kind == "adamw" else torch.optim.Adam
    rule([leaf], 0.001, eps=optimiser.eps, weight_decay=optimiser.weight_decay).step()
    low, high = bound_gradient(optimiser, 0.001, {"w": weights}, {"w": leaf.detach()})
    assert ((low["w"] <= grads) & (grads <= high["w"])).all()
    narrow = (high["w"] - low["w"]) < 0.2 * grads.abs()
    assert narrow.sum() > (
        300 if not optimiser.weight_decay or optimiser.kind == "adamw" else 0
    )  # sizes, not signs alone
    assert (low["w"].isfinite() | high["w"].isfinite()).all()
