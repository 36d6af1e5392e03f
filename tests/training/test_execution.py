"""The ways of stepping many lanes are equal to each other and to a plain loop."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.errors import WrongInput
from secateur.functional import Functional, join_state, split
from secateur.training.execution import Lane, Lanes, choose, map_many

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


class Net(nn.Module):
    """Convolution, BatchNorm, a dropout of channels, and one dropout module that is used twice."""

    def __init__(self, rate=0.3):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.channels = nn.Dropout2d(rate)
        self.drop = nn.Dropout(rate)
        self.hidden = nn.Linear(4 * 25, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.channels(torch.relu(self.norm(self.conv(x))))
        return self.head(self.drop(torch.relu(self.hidden(self.drop(x.flatten(1))))))


def problem(dtype, lanes=3, batches=(6, 6, 4), device="cpu", rate=0.3, masked=True):
    """An objective, lanes with masks, and the inputs of a few steps, with a partial last batch."""
    torch_state = torch.get_rng_state()
    nets = []
    for seed in range(lanes):
        torch.manual_seed(seed)
        nets.append(Net(rate).to(device, dtype))
    torch.set_rng_state(torch_state)
    rng = torch.Generator(device).manual_seed(0)
    function = Functional(nets[0], training=True, device=device)

    def objective(params, buffers, inputs, labels, *noise):
        return cross_entropy(function(params | buffers, inputs, noise), labels)

    def mask(seed):
        keep = torch.rand(4, 2, 3, 3, generator=torch.Generator().manual_seed(seed)) > 0.5
        return {"conv.weight": keep.to(device)} if masked and seed != 1 else {}

    made = [Lane(*split(net, net.state_dict()), mask(seed)) for seed, net in enumerate(nets)]
    steps = []
    for size in batches:
        step = []
        for lane in made:
            x = torch.randn(size, 2, 5, 5, generator=rng, dtype=dtype, device=device)
            y = torch.randint(0, 3, (size,), generator=rng, device=device)
            noise = [ask.draw(rng) for ask in function.asks(lane.params | lane.buffers, x)]
            step.append((x, y, *noise))
        steps.append(step)
    return objective, made, steps, nets


def adam(leaves):
    return torch.optim.Adam(leaves, 1e-2, weight_decay=1e-2, fused=True, capturable=leaves[0].is_cuda)


def sgd(leaves):
    return torch.optim.SGD(leaves, 0.05, momentum=0.9, weight_decay=1e-2, fused=True)


def run(execution, optimiser, dtype, **settings):
    objective, lanes, steps, _ = problem(dtype, **settings)
    stepper = Lanes(objective, lanes, optimiser, execution)
    losses = torch.stack([stepper.step(step) for step in steps])
    return losses, [tree.clone(state) for state in stepper.states()]


def apart(first, second):
    """The largest difference between two lists of states, relative to the size of each tensor."""
    return max(
        float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-6))
        for a, b in zip(first, second, strict=True)
        for name in b
    )


@pytest.mark.parametrize("optimiser", [adam, sgd])
def test_stacked_equals_sequential_in_float64(optimiser):
    one, several = run("sequential", optimiser, torch.float64), run("stacked", optimiser, torch.float64)
    assert torch.allclose(one[0], several[0], rtol=1e-9, atol=0)
    assert apart(several[1], one[1]) < 1e-9


def test_stacked_equals_sequential_in_float32_after_one_step():
    one, several = (run(execution, sgd, torch.float32, batches=(8,)) for execution in ("sequential", "stacked"))
    assert apart(several[1], one[1]) < 1e-5


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_steps_equal_a_plain_loop(execution, channels_last):
    objective, lanes, steps, nets = problem(torch.float64, rate=0.0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    if channels_last:
        shaped = lambda t: t.contiguous(memory_format=layout) if t.ndim == 4 else t  # noqa: E731
        lanes = [Lane({k: shaped(v) for k, v in lane.params.items()}, lane.buffers, lane.mask) for lane in lanes]
        steps = [[tuple(map(shaped, tensors)) for tensors in step] for step in steps]
    stepper = Lanes(objective, lanes, adam, execution)
    losses = torch.stack([stepper.step(step) for step in steps])
    for i, net in enumerate(nets):
        optimiser = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=1e-2)
        tree.apply_mask(net, lanes[i].mask)
        for k, step in enumerate(steps):
            loss = cross_entropy(net(step[i][0]), step[i][1])
            assert abs(float(loss.detach()) - float(losses[k, i])) < 1e-9
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            tree.apply_mask(net, lanes[i].mask)
        assert apart([stepper.states()[i]], [net.state_dict()]) < 1e-9


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
@pytest.mark.parametrize("optimiser", [adam, sgd])
def test_masked_weights_are_exactly_zero_after_every_step(execution, optimiser):
    objective, lanes, steps, _ = problem(torch.float32)
    stepper = Lanes(objective, lanes, optimiser, execution)
    for step in steps:
        stepper.step(step)
        for state, lane in zip(stepper.states(), lanes, strict=True):
            if lane.mask:
                assert (state["conv.weight"][~lane.mask["conv.weight"]] == 0).all()
            assert (state["conv.weight"] != 0).any()


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_what_was_given_never_changes(execution):
    objective, lanes, steps, nets = problem(torch.float32)
    before = [tree.clone(lane.params | lane.buffers) for lane in lanes]
    chance = torch.get_rng_state()
    stepper = Lanes(objective, lanes, adam, execution)
    for step in steps:
        stepper.step(step)
    for lane, old, net in zip(lanes, before, nets, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in (lane.params | lane.buffers).items())
        assert all(torch.equal(value, old[name]) for name, value in net.state_dict().items())
        assert int(stepper.states()[0]["norm.num_batches_tracked"]) == 3
    assert torch.equal(torch.get_rng_state(), chance)


def test_a_parameter_that_the_loss_does_not_reach_stays():
    lane = Lane({"used": torch.ones(2), "idle": torch.ones(2)}, {})
    for execution in ("sequential", "stacked"):
        stepper = Lanes(lambda params, _, x: (params["used"] * x).sum(), [lane, lane], sgd, execution)
        stepper.step([(torch.ones(2),), (torch.ones(2),)])
        assert torch.equal(stepper.states()[0]["idle"], torch.ones(2))
        assert not torch.equal(stepper.states()[0]["used"], torch.ones(2))


def test_auto_on_a_cpu_is_sequential_and_unknown_ways_are_refused():
    objective, lanes, steps, _ = problem(torch.float32)
    assert choose(objective, lanes, adam, steps[0]) == "sequential"
    with pytest.raises(WrongInput, match="did you mean 'stacked'"):
        Lanes(objective, lanes, adam, "staked")


def test_dropout_takes_the_given_noise_and_drops_at_its_rate():
    net = nn.Sequential(nn.Dropout(0.25), nn.Dropout2d(0.5, inplace=True))
    function = Functional(net, training=True, device="cpu")
    x = torch.ones(50, 40, 3, 3)
    first, second = function.asks({}, x)
    assert (first.shape, first.rate) == (x.shape, 0.25)
    assert (second.shape, second.rate) == ((50, 40, 1, 1), 0.5)
    rng = torch.Generator().manual_seed(0)
    noise = [first.draw(rng), second.draw(rng)]
    assert torch.equal(function({}, x, noise), x * noise[0] * noise[1])
    assert abs(float(noise[0].mean()) - 1) < 0.02
    assert noise[0].unique().tolist() == pytest.approx([0, 4 / 3])
    quiet = Functional(net, training=False, device="cpu")
    assert quiet.asks({}, x) == [] and torch.equal(quiet({}, x), x)


def test_a_model_that_draws_by_itself_is_refused_and_the_global_generator_stays():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    before = torch.get_rng_state()
    with pytest.raises(WrongInput, match="model: draws random numbers"):
        Functional(Noisy(), training=True, device="cpu").asks({}, torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_split_and_joined_know_frozen_tied_and_unsaved_tensors():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    net.register_buffer("unsaved", torch.ones(1), persistent=False)
    params, others = split(net, net.state_dict())
    assert set(params) == {"0.weight", "1.bias"} and set(others) == {"0.bias", "unsaved"}
    assert list(join_state(net, params | others)) == list(net.state_dict())
    with pytest.raises(WrongInput, match=r"weights: 0\.bias is missing"):
        split(net, {"0.weight": net[0].weight})


def square(x):
    if x < 0:
        raise WrongInput("x", "must not be negative")
    return x * x, torch.get_num_threads()


def test_map_many_goes_one_by_one():
    assert dict(map_many(square, [1, 2])) == {0: square(1), 1: square(2)}


def test_wrong_input_survives_a_process_border():
    error = pickle.loads(pickle.dumps(WrongInput("field", "sentence")))
    assert (error.field, error.message, str(error)) == ("field", "sentence", "field: sentence")


def test_imports_need_no_optional_package():
    code = "import sys; sys.modules.update(ray=None, pydantic=None); "
    code += "import secateur.training.trainer, secateur.training.execution"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.system
def test_ray_spreads_jobs_on_one_thread_each_and_brings_errors_home():
    ray = pytest.importorskip("ray")
    assert dict(map_many(square, [1, 2, 3], "ray")) == {0: (1, 1), 1: (4, 1), 2: (9, 1)}
    assert not ray.is_initialized()
    with pytest.raises(WrongInput, match="must not be negative"):
        list(map_many(square, [-1], "ray"))


@needs_cuda
@pytest.mark.parametrize("optimiser", [adam, sgd])
@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_captured_equals_eager_on_a_gpu(execution, optimiser):
    settings = {"device": "cuda", "batches": (6, 4) * 6}  # two shapes in turn: two graphs that share memory
    eager, captured = (
        run("eager", optimiser, torch.float64, **settings),
        run(execution, optimiser, torch.float64, **settings),
    )
    assert torch.allclose(eager[0], captured[0], rtol=1e-9, atol=0)
    assert apart(captured[1], eager[1]) < 1e-9


@needs_cuda
def test_auto_on_a_gpu_times_the_ways_and_leaves_the_lanes_alone():
    objective, lanes, steps, _ = problem(torch.float32, device="cuda")
    before = [tree.clone(lane.params | lane.buffers) for lane in lanes]
    assert choose(objective, lanes, adam, steps[0]) in ("sequential", "stacked")
    for lane, old in zip(lanes, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in (lane.params | lane.buffers).items())


@needs_cuda
def test_auto_on_a_gpu_goes_eager_where_nothing_can_be_captured():
    def objective(params, _, x):
        return (params["w"] * x).sum() * (1 if x.sum().item() > 0 else 2)

    lane = Lane({"w": torch.ones(2, device="cuda")}, {})
    inputs = [(torch.ones(2, device="cuda"),)] * 2
    assert choose(objective, [lane, lane], sgd, inputs) == "eager"
    Lanes(objective, [lane, lane], sgd, "eager").step(inputs)
