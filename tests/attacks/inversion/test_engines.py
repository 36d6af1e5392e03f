"""Every engine answers as the plain loop does: on every layer, for every kind of problem."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.attacks.inversion.engines.plain import plain
from secateur.attacks.inversion.engines.stacked import stacked
from secateur.attacks.inversion.problem import Compared, Problem, structure
from secateur.models.create import create

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}


@dataclass(frozen=True)
class Cosine:
    """One minus the cosine, with a prior on the pictures and, where wanted, one on the statistics."""

    needs_gap: bool = False
    needs_statistics: bool = False

    def __call__(self, compared: Compared, variables, fixed) -> tuple[Tensor, Tensor]:
        matching = 1 - compared.dot / (compared.trial * compared.observed).sqrt()
        inputs = variables["inputs"]
        total = matching + 0.1 * (inputs[..., 1:] - inputs[..., :-1]).abs().mean((-4, -3, -2, -1))
        for mean, variance in compared.statistics:
            total = total + 0.1 * mean.square().mean(-1) + 0.1 * (variance - 1).square().mean(-1)
        if "centre" in fixed:
            total = total + (inputs - fixed["centre"]).square().mean((-4, -3, -2, -1))
        return total, matching


@dataclass(frozen=True)
class Gap(Cosine):
    """The squared distance, as DLG's."""

    needs_gap: bool = True

    def __call__(self, compared: Compared, variables, fixed) -> tuple[Tensor, Tensor]:
        assert compared.gap is not None
        return compared.gap, compared.gap


def drawn(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def shaken(net: nn.Module, seed: int = 0) -> nn.Module:
    """Norms whose weights and statistics are not the trivial ones."""
    rng = drawn(seed)
    for name, value in net.state_dict().items():
        if value.ndim == 1 and value.is_floating_point():
            centred = name.endswith(("bias", "running_mean"))
            value.copy_(0.2 * torch.randn(value.shape, generator=rng) + (0 if centred else 1))
    return net


def made(
    net: nn.Module, shape=(3, 8, 8), batch=1, trials=3, batchnorm="eval", dtype=torch.float32, classes=4, **options
) -> tuple[Problem, dict, Tensor]:
    """A problem with targets of its own, variables to evaluate it at, and labels."""
    net = structure(net.to(dtype), batchnorm)
    sent = tree.state_of(net)
    rng = drawn(1)
    truth = torch.randn(trials, batch, *shape, generator=rng).to(dtype)
    labels = torch.randint(classes, (trials, batch), generator=rng)
    observed = []
    for inputs, of in zip(truth, labels, strict=True):
        loss = nn.functional.cross_entropy(net(inputs), of)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        observed.append(dict(zip([name for name, _ in net.named_parameters()], grads, strict=True)))
    problem = Problem(net, sent, tree.stack(observed), **options)
    variables = {"inputs": (truth + 0.5 * torch.randn(truth.shape, generator=rng)).to(dtype)}
    return problem, variables, labels


def agree(engine, problem: Problem, variables, labels, objective=None, fixed=None) -> None:
    """The engine's answer is the plain loop's, and nothing that it was given has changed."""
    objective = objective or Cosine()
    before = {**tree.clone(problem.sent), **{f"module {k}": v.clone() for k, v in problem.net.state_dict().items()}}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in problem.net.modules()]
    wanted = plain(problem, objective)(variables, labels, fixed or {})
    got = engine(problem, objective)(variables, labels, fixed or {})
    after = {**problem.sent, **{f"module {k}": v for k, v in problem.net.state_dict().items()}}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in problem.net.modules()]
    tolerance = TOLERANCE[variables["inputs"].dtype]
    for one, other in ((got.total, wanted.total), (got.matching, wanted.matching)):
        assert not one.requires_grad
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 0.01)
    assert got.gradient.keys() == wanted.gradient.keys() == variables.keys()
    for name, value in wanted.gradient.items():
        error = (got.gradient[name] - value).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)
        assert not got.gradient[name].requires_grad
        assert error.max() < tolerance, f"{name}: {error.tolist()}"


def small(norm=nn.BatchNorm2d, activation=nn.ReLU) -> nn.Module:
    """A network with a norm of each kind, small enough for every combination."""
    make = {nn.BatchNorm2d: lambda c: nn.BatchNorm2d(c), nn.GroupNorm: lambda c: nn.GroupNorm(2, c)}[norm]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 6, 3, padding=1), make(6), activation(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), make(8), activation()]
        return shaken(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 4)))


def soft(problem: Problem, variables: dict) -> dict:
    shape = (*variables["inputs"].shape[:2], 4)
    return {**variables, "labels": torch.randn(shape, generator=drawn(5)).to(variables["inputs"].dtype)}


def some_mask(problem: Problem) -> dict[str, Tensor]:
    rng = drawn(3)
    return {name: torch.rand(value.shape, generator=rng) > 0.4 for name, value in problem.observed.items()}


ENGINES = {"stacked": stacked}
BOTH = pytest.mark.parametrize("engine", list(ENGINES.values()), ids=list(ENGINES))
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float64"])
OBJECTIVES = pytest.mark.parametrize("objective", [Cosine(), Gap()], ids=["cosine", "gap"])


@BOTH
@TYPES
@OBJECTIVES
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "norm, batchnorm", [(nn.BatchNorm2d, "eval"), (nn.BatchNorm2d, "batch"), (nn.GroupNorm, "eval")]
)
def test_norms_and_batches(engine, dtype, objective, batch, norm, batchnorm):
    agree(engine, *made(small(norm), batch=batch, batchnorm=batchnorm, dtype=dtype), objective)


@BOTH
@TYPES
@OBJECTIVES
def test_labels_that_are_optimised_too(engine, dtype, objective):
    problem, variables, _ = made(small(), batch=2, dtype=dtype)
    agree(engine, problem, soft(problem, variables), None, objective)


@BOTH
@TYPES
@OBJECTIVES
def test_masks(engine, dtype, objective):
    problem, variables, labels = made(small(), batch=2, dtype=dtype)
    masked = Problem(problem.net, problem.sent, problem.observed, mask=some_mask(problem))
    agree(engine, masked, variables, labels, objective)


@BOTH
@TYPES
@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
def test_statistics_and_what_is_fixed_within_a_step(engine, dtype, batchnorm):
    problem, variables, labels = made(small(), batch=3, batchnorm=batchnorm, dtype=dtype)
    fixed = {"centre": torch.zeros_like(variables["inputs"])}
    agree(engine, problem, variables, labels, Cosine(needs_statistics=True), fixed)


@BOTH
def test_names_that_are_left_out_of_the_matching(engine):
    problem, variables, labels = made(small())
    for gone in (["0.weight"], ["0.bias", "1.weight"], ["8.weight", "8.bias"]):
        observed = {name: value for name, value in problem.observed.items() if name not in gone}
        agree(engine, Problem(problem.net, problem.sent, observed), variables, labels)


@BOTH
@OBJECTIVES
def test_a_loss_of_ones_own(engine, objective):
    def smooth(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1) + outputs.square().mean()

    problem, variables, labels = made(small(), batch=3, loss=smooth)
    agree(engine, problem, variables, labels, objective)


@TYPES
@OBJECTIVES
@pytest.mark.parametrize("step_batch", [None, 2])
def test_stacked_unrolls_steps_of_networks_of_their_own(dtype, objective, step_batch):
    problem, variables, labels = made(small(), batch=3, dtype=dtype)
    shift = torch.linspace(0.9, 1.1, problem.trials, dtype=dtype)
    sent = {name: torch.stack([value * f for f in shift]) for name, value in problem.sent.items()}
    unrolled = Problem(
        problem.net, sent, problem.observed, own_weights=True, steps=3, learning_rate=0.05, step_batch=step_batch
    )
    agree(stacked, unrolled, variables, labels, objective)
    agree(stacked, unrolled, soft(problem, variables), None, objective)


def test_stacked_applies_a_compression_to_the_trial_and_can_go_in_chunks():
    problem, variables, labels = made(small(), batch=2, trials=5)

    def largest(gradient):
        return {name: value * (value.abs() > value.abs().mean()) for name, value in gradient.items()}

    squeezed = Problem(problem.net, problem.sent, problem.observed, compression=largest)
    agree(stacked, squeezed, variables, labels)
    agree(lambda p, o: stacked(p, o, chunk=2), squeezed, variables, labels)


MODELS = ["lenet-zhu", "cnn6", "resnet18-w16", "vgg11-bn", "mapp-cnn-8", "digits-cnn"]


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_project(engine, name):
    shape = (3, 32, 32)
    net = shaken(create(name, shape, 10, drawn()))
    agree(engine, *made(net, shape, trials=2, classes=10))
