"""Every engine answers as the plain loop does: on every layer, for every kind of problem."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.attacks.inversion.engines import choose, engine_for, layer_rules
from secateur.attacks.inversion.engines.autograd import evaluate_singly, evaluate_stacked
from secateur.attacks.inversion.engines.layerwise import explain_unsupported, layerwise
from secateur.attacks.inversion.problem import Compared, Problem, structure
from secateur.errors import WrongInput
from secateur.gpu.graphs import capture_step
from secateur.gpu.memory import halve_on_shortage
from secateur.interfaces import Optimiser
from secateur.models.create import create
from secateur.training.optimisers import ONE_GRADIENT, LocalSteps, list_batches

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
    wanted = evaluate_singly(problem, objective)(variables, labels, fixed or {})
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


ENGINES = {"stacked": evaluate_stacked, "layerwise": layerwise}
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
@OBJECTIVES
def test_entries_of_a_known_size_and_an_unknown_sign(engine, dtype, objective):
    problem, variables, labels = made(small(), batch=2, dtype=dtype)
    sizes = {name: value.abs() for name, value in problem.observed.items()}
    agree(engine, replace(problem, observed=sizes, unsigned=some_mask(problem)), variables, labels, objective)


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
    turn = LocalSteps(list_batches(3, step_batch, steps=3), (0.05,) * 3)
    unrolled = Problem(problem.net, sent, problem.observed, own_weights=True, turn=turn)
    agree(evaluate_stacked, unrolled, variables, labels, objective)
    agree(evaluate_stacked, unrolled, soft(problem, variables), None, objective)


@OBJECTIVES
def test_stacked_unrolls_adam_and_compares_with_bounds(objective):
    problem, variables, labels = made(small(), batch=3, dtype=torch.float64)
    turn = LocalSteps(list_batches(3, 2, epochs=2), (0.05, 0.04, 0.03, 0.02), Optimiser("adam"), softness=0.03)
    agree(evaluate_stacked, replace(problem, turn=turn), variables, labels, objective)
    low = {name: torch.where(value > 0, value / 2, -torch.inf) for name, value in problem.observed.items()}
    high = {name: torch.where(value > 0, torch.inf, value / 2) for name, value in problem.observed.items()}
    bound = replace(problem, bounds=(low, high), turn=replace(ONE_GRADIENT, softness=0.03))
    agree(evaluate_stacked, bound, variables, labels, objective)
    assert "bounds" in str(explain_unsupported(bound))


def test_stacked_applies_a_compression_to_the_trial_and_can_go_in_chunks():
    problem, variables, labels = made(small(), batch=2, trials=5)

    def largest(gradient):
        return {name: value * (value.abs() > value.abs().mean()) for name, value in gradient.items()}

    squeezed = Problem(problem.net, problem.sent, problem.observed, compression=largest)
    agree(evaluate_stacked, squeezed, variables, labels)
    agree(lambda p, o: evaluate_stacked(p, o, chunk=2), squeezed, variables, labels)


TWO_STEPS = LocalSteps(((), ()), (0.1, 0.1))
MODELS = ["lenet-zhu", "cnn6", "resnet18-w16", "vgg11-bn", "mapp-cnn-8", "digits-cnn"]


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_project(engine, name):
    shape = (3, 32, 32)
    net = shaken(create(name, shape, 10, drawn()))
    agree(engine, *made(net, shape, trials=2, classes=10))


def seeded(make, seed: int = 0) -> nn.Module:
    """A network whose weights do not hang on the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return shaken(make())


class Residual(nn.Module):
    """Overwrites what its layers gave, and adds to it in place, as many published networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.shortcut = nn.Conv2d(3, 6, 1)
        self.last = nn.Linear(6 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.first(x), inplace=True)
        y = self.norm(self.second(y))
        y += self.shortcut(x)
        return self.last(y.relu_().flatten(1))


class Tokens(nn.Module):
    """Linear layers and LayerNorms on more than two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.wide = nn.LayerNorm((4, 8), bias=False)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).flatten(2).transpose(1, 2)
        y = self.wide(y + nn.functional.gelu(self.mix(self.norm(y))))
        return self.last(y.mean(1))


ODD = {
    "residual": Residual,
    "tokens": Tokens,
    "no affine": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, affine=False),
        nn.GroupNorm(1, 4, affine=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(144, 4),
    ),
    "flat": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 9), nn.BatchNorm1d(9), nn.ELU(), nn.Linear(9, 4, bias=False)
    ),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 9), nn.Sigmoid(), nn.Linear(9, 4)),
    "leaf": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)),
}


@TYPES
@OBJECTIVES
@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("name", list(ODD))
def test_layerwise_on_every_layer(dtype, objective, batchnorm, name):
    agree(layerwise, *made(seeded(ODD[name]), batch=3, batchnorm=batchnorm, dtype=dtype), objective)


def test_layerwise_in_chunks_is_the_same():
    problem, variables, labels = made(small(), batch=2, trials=5, batchnorm="batch")
    fixed = {"centre": torch.randn(variables["inputs"].shape, generator=drawn(7))}
    for chunk in (1, 2, 5, 9):
        agree(lambda p, o, size=chunk: layerwise(p, o, chunk=size), problem, variables, labels, fixed=fixed)


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.one_of(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from(["same", "valid"])),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    groups=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([1, 3]),
    bias=st.booleans(),
    objective=st.sampled_from([Cosine(), Gap()]),
    large=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_layerwise_on_any_convolution(kernel, stride, dilation, padding, mode, groups, batch, bias, objective, large):
    assume(padding != "same" or stride == (1, 1))

    def make():
        options = dict(dilation=dilation, groups=groups, bias=bias, padding=padding, padding_mode=mode)
        first = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 8, kernel, stride, **options), nn.Softplus()]
        return nn.Sequential(*first, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))

    problem, variables, labels = made(seeded(make), (3, 9, 8), batch=batch, trials=2, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            layer_rules, "LARGE", 0 if large else layer_rules.LARGE
        )  # both ways to have a convolution's gradient
        agree(layerwise, problem, variables, labels, objective)


def test_layerwise_by_inner_products_and_by_gradients():
    """Wide layers at few places go by inner products, masked ones by their gradients: both as the plain loop."""
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 64, 3, stride=4), nn.Tanh(), nn.Conv2d(64, 64, 2), nn.Tanh(),
                                       nn.Flatten(), nn.Linear(64, 4)))  # fmt: skip
    problem, variables, labels = made(net, dtype=torch.float64)
    agree(layerwise, problem, variables, labels)
    agree(layerwise, Problem(problem.net, problem.sent, problem.observed, some_mask(problem)), variables, labels)


def test_the_gap_is_exact_where_the_gradients_nearly_agree():
    """|g|^2 - 2 <g, g*> + |g*|^2 has no right digit where |g - g*|^2 is below the rounding of |g*|^2.

    With t = |g - g*| / |g*| and a gradient that is right to some u |g|, rounding moves the gap by 2 u / t of itself, on
    every processor another way, and what cancels by u / t^2. At t = 1e-9 in float64 that is below 1e-5 against 1 or
    more; float32 has no t that keeps the two as far apart.
    """
    problem, variables, labels = made(small(), batchnorm="batch", dtype=torch.float64)
    near = {name: value.clone() for name, value in variables.items()}
    exact = Problem(problem.net, problem.sent, tree.stack(_gradients(problem, near["inputs"], labels)))
    near["inputs"] += 1e-9 * torch.randn(near["inputs"].shape, generator=drawn(9))
    wanted = evaluate_singly(exact, Gap())(near, labels, {}).total
    lengths = sum(value.square().flatten(1).sum(1) for value in exact.observed.values())
    assert (wanted < torch.finfo(torch.float64).eps * lengths).all()
    torch.testing.assert_close(layerwise(exact, Gap())(near, labels, {}).total, wanted, rtol=1e-3, atol=0)


def _gradients(problem: Problem, inputs: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    names = [name for name, _ in problem.net.named_parameters()]
    params = list(problem.net.parameters())
    losses = [nn.functional.cross_entropy(problem.net(x), y) for x, y in zip(inputs, labels, strict=True)]
    return [dict(zip(names, torch.autograd.grad(loss, params), strict=True)) for loss in losses]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(192, 192), nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.layer(x.flatten(1)).tanh()))


class Around(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.flatten(1)) @ self.layer.weight)


class Scaled(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.flatten(1)) * self.scale)


class Branching(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.flatten(1))) * (1 if x.sum() > 0 else 2)


class Viewing(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.view(-1, 192)))  # Flower's own first app does so


@pytest.mark.parametrize(
    "make, reason",
    [
        (Viewing, "its forward calls view"),
        (Twice, "the layer layer is called 2 times"),
        (Around, "the parameter layer.weight is used outside of its layer"),
        (Scaled, "the parameter scale is in Scaled"),
        (Branching, "its forward cannot be traced"),
        (lambda: nn.Sequential(nn.PReLU(), nn.Flatten(), nn.Linear(192, 4)), "the parameter 0.weight is in PReLU"),
    ],
)
def test_what_layerwise_cannot_take_is_said(make, reason):
    problem, variables, labels = made(make())
    assert reason in str(explain_unsupported(problem))
    with pytest.raises(WrongInput, match="layerwise cannot be used"):
        layerwise(problem, Cosine())
    if make is not Branching:
        agree(evaluate_stacked, problem, variables, labels)


def test_problems_that_layerwise_cannot_take_are_said():
    problem, _, _ = made(small())
    base = problem.net, problem.sent, problem.observed
    assert explain_unsupported(problem) is None
    assert "weights of its own" in str(explain_unsupported(Problem(*base, own_weights=True)))
    assert "unrolled" in str(explain_unsupported(Problem(*base, turn=TWO_STEPS)))
    assert "compressed" in str(explain_unsupported(Problem(*base, compression=lambda gradient: gradient)))
    tied = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
    tied[2].weight = tied[1].weight
    assert "is also 1.weight" in str(explain_unsupported(Problem(tied, {}, {})))
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    hooked[1].register_forward_hook(lambda *_: None)
    assert "hooks" in str(explain_unsupported(Problem(hooked, {}, {})))


def test_a_single_layer_is_a_network_too():
    problem, _, _ = made(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
    linear = Problem(problem.net[1], {k[2:]: v for k, v in problem.sent.items()},
                     {k[2:]: v for k, v in problem.observed.items()})  # fmt: skip
    assert explain_unsupported(linear) is None


def chosen(problem: Problem, trials: int, device: str, name: str = "auto") -> str:
    return choose(problem.take(torch.zeros(trials, dtype=torch.int64)), device, name).name


def test_the_engine_fits_device_network_and_trials():
    little, _, _ = made(small())
    net = structure(create("resnet18", (3, 32, 32), 10, drawn()), "eval")
    large = Problem(net, {}, {"0.weight": torch.zeros(1, 64, 3, 3, 3)})
    assert [chosen(little, n, "cpu") for n in (1, 2, 500)] == ["plain", "layerwise", "layerwise"]
    assert [chosen(little, n, "cuda") for n in (1, 20, 500)] == ["layerwise", "layerwise", "stacked"]
    assert [chosen(large, n, "cpu") for n in (1, 20)] == ["layerwise", "layerwise"]
    assert chosen(large, 500, "cuda") == "layerwise"
    assert (
        chosen(replace(little, turn=TWO_STEPS), 8, "cpu")
        == chosen(replace(large, turn=TWO_STEPS), 8, "cuda")
        == "stacked"
    )
    assert chosen(replace(large, turn=TWO_STEPS), 8, "cpu") == "plain"
    assert chosen(made(Branching())[0], 8, "cuda") == "plain"
    assert "unrolled" in choose(replace(little, turn=TWO_STEPS), "cuda").reason


def test_an_engine_by_name():
    problem, variables, labels = made(small())
    for name in ("auto", "plain", "stacked", "layerwise"):
        agree(lambda p, o, name=name: engine_for(p, o, "cpu", name), problem, variables, labels)
    with pytest.raises(WrongInput, match=r"engine: layerwise cannot be used: local steps are unrolled; allowed: "):
        engine_for(replace(problem, turn=TWO_STEPS), Cosine(), "cpu", "layerwise")
    with pytest.raises(WrongInput, match="did you mean 'layerwise'"):
        engine_for(problem, Cosine(), "cpu", "layer")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_halving_goes_on_with_half_as_many(error, caplog):
    tried = []

    def run(rows: Tensor) -> list[int]:
        tried.append(len(rows))
        if len(rows) > 3:
            raise error
        return rows.tolist()

    with caplog.at_level(logging.WARNING):
        parts = halve_on_shortage(run, torch.arange(13))
    assert [row for part in parts for row in part] == list(range(13))
    assert tried == [13, 7, 4, 2, 2, 2, 2, 2, 2, 1]
    assert len(caplog.records) == 1 and "memory ran out with 13 trials" in caplog.text


def test_halving_raises_what_is_not_about_memory_or_cannot_be_halved():
    def wrong(rows: Tensor) -> None:
        raise RuntimeError("shapes do not fit")

    def full(rows: Tensor) -> None:
        raise MemoryError

    with pytest.raises(RuntimeError, match="shapes"):
        halve_on_shortage(wrong, torch.arange(4))
    with pytest.raises(MemoryError):
        halve_on_shortage(full, torch.arange(4))


def test_on_a_cpu_a_step_is_itself():
    def step() -> None: ...

    assert capture_step(step, {"x": torch.zeros(1)}) is step


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@GPU
@pytest.mark.parametrize("engine", [evaluate_stacked, layerwise], ids=["stacked", "layerwise"])
@pytest.mark.parametrize("objective", [Cosine(needs_statistics=True), Gap()], ids=["cosine", "gap"])
def test_a_captured_step_does_what_the_eager_one_does(engine, objective):
    problem, variables, labels = made(small(), batch=2, dtype=torch.float64)
    problem = replace(
        problem, net=problem.net.cuda(), sent=tree.to(problem.sent, "cuda"), observed=tree.to(problem.observed, "cuda")
    )
    evaluate, labels = engine(problem, objective), labels.cuda()
    states = []
    for capture in (False, True):
        state = {"inputs": variables["inputs"].cuda().clone(), "total": torch.zeros(3, device="cuda").double()}

        def step(state=state) -> None:
            found = evaluate({"inputs": state["inputs"]}, labels, {})
            state["inputs"].sub_(0.1 * found.gradient["inputs"])
            state["total"].copy_(found.total)

        move = capture_step(step, state) if capture else step
        for _ in range(8):
            move()
        states.append(state)
    for name in states[0]:
        torch.testing.assert_close(states[1][name], states[0][name], rtol=1e-9, atol=1e-12)


@GPU
def test_what_cannot_be_captured_runs_without_a_graph(caplog):
    state = {"x": torch.zeros(1, device="cuda")}

    def step() -> None:
        if state["x"].item() >= 0:
            state["x"].add_(1)

    move = capture_step(step, state)
    for _ in range(6):
        move()
    assert state["x"].item() == 6 and "cannot be captured" in caplog.text


@GPU
def test_halving_on_a_gpu_that_is_full():
    unit = 64 * 2**20
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 5 * unit) / total)
    try:
        sizes = halve_on_shortage(
            lambda rows: torch.empty(len(rows), unit, dtype=torch.uint8, device="cuda").shape[0], torch.arange(8)
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sum(sizes) == 8 and max(sizes) <= 4
