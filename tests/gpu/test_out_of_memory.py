"""Real shortages of a GPU's memory: the work goes on with less at once, and its results are those of a whole GPU.

Each test runs without a limit, measures the memory, and runs again with a part of it. `pytest -rP` shows a line a test,
in the form of the table in docs/measurements.md: the memory of the free run, the limit, the errors raised by torch, and
the largest difference of the results.
"""

import gc
import tempfile
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from secateur import tree
from secateur.attacks.inversion.gradient_matching import GradientMatching
from secateur.attacks.inversion.updates import gradient_update
from secateur.cli.exits import _explain
from secateur.data.dataset import Dataset
from secateur.data.partition import iid
from secateur.defenses.withholding import PseudoLargest
from secateur.federated.client_training import LocalTraining
from secateur.federated.federation import Federation
from secateur.federated.spec import FederationSpec
from secateur.gpu.graphs import Branches, Captured
from secateur.interfaces import Batch, Knowledge, ServerView
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit_many
from silent_watch import Silent

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
CUDA, MIB, CLIENTS = torch.device("cuda"), 2**20, 12


@pytest.fixture(autouse=True)
def whole_gpu():
    """Give the memory back, whatever a test did."""
    yield
    limit(None)


def limit(size):
    """Let this process hold so many bytes of the GPU; None: all of them."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0 if size is None else size / torch.cuda.mem_get_info()[1])


class Shortage:
    """The memory that some work needs, and a limit below it."""

    def __init__(self, share, cached=False):
        self.share, self.cached = share, cached  # cached: count the memory that the allocator keeps for other streams
        self.errors = 0

    @contextmanager
    def measured(self):
        limit(None)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        peak = torch.cuda.max_memory_reserved() if self.cached else torch.cuda.max_memory_allocated()
        self.need, self.limit = peak, before + self.share * (peak - before)

    @contextmanager
    def limited(self):
        limit(self.limit)
        before = torch.cuda.memory_stats()["num_ooms"]
        yield
        self.errors = torch.cuda.memory_stats()["num_ooms"] - before
        limit(None)

    def tell(self, name, difference):
        """Print a line for the table."""
        print(f"| {name} | {self.need / MIB:.0f} | {self.limit / MIB:.0f} | {self.errors} | {difference:.1e} |")


def difference(states, others):
    """Return the largest difference of named tensors, relative to the largest entry of each tensor."""
    pairs = [(one[name], other[name]) for one, other in zip(states, others, strict=True) for name in one]
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-300)) for a, b in pairs if a.is_floating_point())


def perceptron(inputs, width, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = [nn.Linear(inputs, width), nn.Sigmoid(), nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, 10)]
        return nn.Sequential(nn.Flatten(), *parts).double()


def tasks(count):
    rng = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(4096, 64, generator=rng).double(), torch.randint(10, (4096,), generator=rng)).to(CUDA)
    nets = [perceptron(64, 1024, seed) for seed in range(count)]
    states = [{name: value.to(CUDA) for name, value in tree.state_of(net).items()} for net in nets]
    return [Task(state, batch, batch, torch.Generator().manual_seed(i)) for i, state in enumerate(states)]


@pytest.mark.parametrize("execution", ["stacked", "sequential", "auto"])
def test_models_of_a_training(execution, caplog):
    """Stacked models do not fit; models in branches of one graph fit as calls, and not in the capture."""
    net, many, recipe = perceptron(64, 1024), tasks(8), Recipe(epochs=4, batch_size=2048)
    shortage = Shortage(0.6, cached=execution != "stacked")

    def train():
        done = dict(fit_many(net, many, recipe, execution=execution))
        return [done[i].state for i in range(len(many))], [done[i].history for i in range(len(many))]

    with shortage.measured():
        states, histories = train()
    with shortage.limited():
        limited_states, limited_histories = train()
    if execution != "auto":  # which times what fits, and takes that
        assert shortage.errors and "memory ran out with 8 models at once; going on with 4" in caplog.text
    apart = difference(states, limited_states)
    assert apart < 1e-9
    for rows, others in zip(histories, limited_histories, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert other == pytest.approx(row, rel=1e-9)
    shortage.tell(f"training of 8 models, {execution}", apart)


def federation(net=None, execution="stacked", **terms):
    rng = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(520, 1, 6, 6, generator=rng), torch.randint(10, (520,), generator=rng)
    local = LocalTraining(steps=2, batch_size=8, learning_rate=0.1)
    spec = {"rounds": 6, "per_round": CLIENTS, "local": local, "evaluate_every": 3}
    spec |= {"shares": iid(480, CLIENTS + 4, torch.Generator().manual_seed(0))} | terms
    data = Dataset("random", inputs, labels, 10, 480)
    net = perceptron(36, 1536) if net is None else net
    return Federation(net, data, FederationSpec(**spec), 0, CUDA, execution=execution)


def test_clients_with_batchnorm_are_stacked():
    """Lanes of a vmap in channels_last have no memory of their own, which cuDNN's BatchNorm asks for."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
    models = []
    for execution in ("stacked", "sequential"):
        fed = federation(net=net, execution=execution)
        list(fed.rounds())
        assert (fed.together is not None) == (execution == "stacked")
        models.append(fed.model())
    assert difference(models[:1], models[1:]) < 1e-3  # BatchNorm of 8 rows in float32, over six rounds


@pytest.mark.parametrize("rule", [{}, {"withholding": PseudoLargest()}], ids=["plain", "withholding"])
@pytest.mark.parametrize("rounds", [0, 3], ids=["at once", "in the capture"])
def test_clients_of_a_round(rounds, rule, caplog):
    """The limit begins before a round: the first, or the fourth, in which the graph is captured."""
    shortage = Shortage(0.5)

    def run(limited):
        fed, measures = federation(**rule), []
        steps = fed.rounds()
        for _ in range(rounds):
            measures += next(steps).measures
        if limited:
            assert fed.together is not None and not fed.room.on_host
            with shortage.limited():
                measures += [measure for done in steps for measure in done.measures]
            assert shortage.errors and fed.together is None
            assert "memory ran out with 12 clients at once; going on with one at a time" in caplog.text
            held = {value.device.type for state in fed.states.values() for value in state.values()}
            assert fed.room.on_host == bool(rule) and held == ({"cpu"} if rule else set())
            assert ("host memory" in caplog.text) == bool(rule)
        else:
            measures += [measure for done in steps for measure in done.measures]
        return measures, tree.clone(fed.model()), {c: tree.to(state, "cpu") for c, state in fed.states.items()}

    with shortage.measured():
        measures, model, states = run(limited=False)
    limited_measures, limited_model, limited_states = run(limited=True)
    apart = difference([model], [limited_model])
    assert apart < 1e-9
    for one, other in zip(measures, limited_measures, strict=True):
        assert (one.metric, one.round, one.client) == (other.metric, other.round, other.client)
        assert other.value == pytest.approx(one.value, rel=1e-9)
    assert states.keys() == limited_states.keys()
    if rule:
        assert difference(states.values(), [limited_states[client] for client in states]) < 1e-9
    when = "before the first round" if rounds == 0 else "before the capture"
    shortage.tell(f"round of {CLIENTS} clients{', withholding' if rule else ''}, {when}", apart)


def invert(targets, restarts, engine):
    """Return pictures of an attack on gradients of large batches, whose activations take most of the memory."""
    net, rng, rows = perceptron(36, 1024).to(CUDA), torch.Generator().manual_seed(2), 1000
    state = tree.state_of(net)
    truths = [
        Batch(torch.rand(rows, 1, 6, 6, generator=rng).double(), torch.randint(10, (rows,), generator=rng)).to(CUDA)
        for _ in range(targets)
    ]
    half, labels = torch.full((1, 1, 1), 0.5), torch.stack([truth.labels for truth in truths])
    known = Knowledge(net, (1, 6, 6), 10, half, half, batch_size=rows, labels=labels)
    views = [[ServerView(state, gradient_update(net, state, truth, "eval"))] for truth in truths]
    attack = GradientMatching(iterations=10, learning_rate=0.01, restarts=restarts, labels="oracle", engine=engine)
    rngs = [torch.Generator().manual_seed(i) for i in range(targets)]
    pictures = dict(attack.reconstruct(views, known, rngs, Silent()))
    return [{"inputs": pictures[i].batch.inputs.clone()} for i in range(targets)]


@pytest.mark.parametrize("engine", ["stacked", "layerwise"])
def test_targets_of_an_inversion(engine, caplog):
    shortage = Shortage(0.6)
    with shortage.measured():
        pictures = invert(8, 2, engine)
    with shortage.limited():
        limited_pictures = invert(8, 2, engine)
    assert shortage.errors and "memory ran out with 8 trials at once; going on with 4" in caplog.text
    apart = difference(pictures, limited_pictures)
    assert apart < 1e-6  # Adam divides by the size of a gradient, which may be nearly 0
    shortage.tell(f"inversion of 8 targets, {engine}", apart)


def test_restarts_of_one_target_are_not_halved_and_the_user_hears_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the log
    shortage = Shortage(0.4)
    with shortage.measured():
        invert(1, 16, "stacked")
    with shortage.limited(), pytest.raises(torch.OutOfMemoryError) as raised:
        invert(1, 16, "stacked")
    code, sentence = _explain(raised.value, None)
    assert code == 70 and "out of memory (tried to allocate " in sentence and "restarts" in sentence


def test_a_capture_of_branches_that_lacks_memory_gives_it_back():
    """Otherwise the allocator believes in a capture for ever, and never frees cached memory again."""
    x, sizes = torch.ones(64 * MIB // 8, dtype=torch.float64, device=CUDA), []
    branches = Branches(4, CUDA, parallel=True)

    def work(y):
        sizes.append(len(y))
        return torch.stack([part.sum() for part in branches(lambda i: (y * i + 1).exp())])

    captured = Captured(work, CUDA, required=True)
    for _ in range(3):
        captured(x)
    limit(torch.cuda.memory_allocated() + 200 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        captured(x)
    assert len(sizes) == 4
    del captured
    limit(None)
    assert torch.cuda.memory_reserved() < 200 * MIB
    assert torch.randn(9, device=CUDA).unique().numel() == 9
    again = Captured(work, CUDA, required=True)
    totals = [again(x).clone() for _ in range(6)]
    assert all(torch.equal(total, totals[0]) for total in totals)
