"""What a round of a federation costs, in one run: of one that prunes, and of one over sub-models.

Pruning: Conv-2, 10 clients, 5 local steps of batch 20 (PruneFL's setting). On a CPU: CPU seconds of one thread against
a plain loop over an nn.Module and torch.optim.SGD with the same batches, at most 1.1x. On a GPU: milliseconds a round
once the round is captured, for each base pruning and defense, and what 20 000 rounds would take: at most 5 minutes
plain, 10 with priprune.

Sub-models: the CNN of mapp_fl with u = 16, two clients with all of it and eight with half of its channels, one epoch of
batches of 128. On a CPU: 512 pictures a client, against a plain loop with torch.optim.Adam and without channels_last,
at most 0.75x. On a GPU: the sizes of mapp_fl's Table 2, and what 150 rounds would take: at most 4 minutes; also of
several federations together, each.

Attacks: on a GPU, milliseconds an iteration on ten updates of 20 pictures each, of networks with other weights each.

On a GPU all are also measured with stacked convolutions in groups, as vmap makes them, in place of the kernels.

Engines: the same work in process, in Flower's simulation and by pfl-research, as benchmarks/flower.py measures it.

What is compared takes turns, and medians count. Pictures and labels are random.

    python benchmarks/federate.py [--what pruning submodels attacks engines] [--device cpu|cuda] [--rounds N]
        [--model NAME] [--repeats N] [--json F]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.engines.autograd import evaluate_stacked
from secateur.attacks.inversion.problem import Compared, Problem, Variables, structure
from secateur.catalogue import find
from secateur.config import base_pruning, defense_of_clients
from secateur.data.dataset import Dataset
from secateur.data.partition import iid
from secateur.defenses.uploads import protection_of
from secateur.federated.build import rates_of
from secateur.federated.client_training import LocalTraining, binary_cross_entropy
from secateur.federated.federation import Federation
from secateur.federated.sampling import Sampler
from secateur.federated.spec import FederationSpec
from secateur.federated.spec import SubmodelSpec as SubmodelTerms
from secateur.federated.submodels.federation import StackedFederations, SubmodelFederation
from secateur.gpu import stacked_layers
from secateur.gpu.graphs import capture_step
from secateur.interfaces import Params
from secateur.models.create import create

CLIENTS, PER_ROUND, ROWS, TARGET = 193, 10, 19_300, 20_000
LIMITS = {"none": 5.0, "priprune": 10.0}  # minutes of 20 000 rounds on one H200
LOCAL = LocalTraining(steps=5, batch_size=20, learning_rate=0.05)
TABLE_2 = (17020, 7400, 7040, 6310, 4060, 3110, 1660, 1650, 1260, 490)  # rows of mapp_fl's clients


def setting(model: str = "conv-2") -> tuple[nn.Module, Dataset]:
    """A network and random pictures: in the shape of FEMNIST, of a VGG in that of CIFAR-10."""
    rng, classes, shape = Generator().manual_seed(0), 62, (1, 28, 28)
    if model.startswith("vgg"):
        classes, shape = 10, (3, 32, 32)
    inputs = torch.randn(ROWS + classes, *shape, generator=rng)
    labels = torch.randint(classes, (ROWS + classes,), generator=rng)
    return create(model, shape, classes, rng), Dataset("random", inputs, labels, classes, ROWS)


def federation(net: nn.Module, data: Dataset, base: str, defense: str, device: str, rounds: int) -> Federation:
    """One that evaluates at its end only."""
    shares = iid(data.train_size, CLIENTS, Generator().manual_seed(0))
    protection = protection_of(defense_of_clients(defense))
    how = {"rounds": rounds, "per_round": PER_ROUND, "local": LOCAL, "evaluate_every": rounds}
    return Federation(net, data, FederationSpec(shares, base=base_pruning(base).make(), **how, **protection), 0, device)


def plain_round(server: nn.Module, worker: nn.Module, data: Dataset, sampler: Sampler, number: int) -> None:
    """Federated averaging as anybody would write it; all clients have as many rows."""
    drawn, total = sampler(number), {}
    for rows in drawn.rows:
        worker.load_state_dict(server.state_dict())
        optimiser = torch.optim.SGD(worker.parameters(), LOCAL.learning_rate)
        for step in rows:
            optimiser.zero_grad()
            cross_entropy(worker(data.inputs[step]), data.labels[step]).backward()
            optimiser.step()
        for name, value in worker.state_dict().items():
            total[name] = value.clone() if name not in total else total[name].add_(value)
    server.load_state_dict({name: value / len(drawn.rows) for name, value in total.items()})


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def on_cpu(repeats: int) -> dict[str, Any]:
    """Ours against a plain loop."""
    torch.set_num_threads(1)
    net, data = setting()
    fed, server = federation(net, data, "none", "none", "cpu", repeats + 2), copy.deepcopy(net)
    rounds, worker = fed.rounds(), copy.deepcopy(net)
    next(rounds), plain_round(server, worker, data, fed.sampler, 1)  # both warm
    found = [
        (seconds(partial(next, rounds)), seconds(partial(plain_round, server, worker, data, fed.sampler, number)))
        for number in range(2, repeats + 2)
    ]
    ours, plain = (median(each) for each in zip(*found, strict=True))
    return {"device": "cpu", "seconds": ours, "plain_seconds": plain, "ratio": ours / plain, "limit": 1.1}


def on_gpu(base: str, defense: str, count: int, model: str) -> dict[str, Any]:
    """Milliseconds of a captured round."""
    net, data = setting(model)

    def each() -> float:
        rounds = federation(net, data, base, defense, "cuda", count + 11).rounds()
        return _each(partial(next, rounds), count, warmups=10)

    with_kernels, found = each(), {"device": torch.cuda.get_device_name(), "base": base, "defense": defense}
    memory = torch.cuda.max_memory_allocated() / 2**30
    with _in_groups():
        by_groups = each()
    found |= {"model": model, "ms": 1e3 * with_kernels, "groups_ms": 1e3 * by_groups, "ratio": with_kernels / by_groups}
    return found | {"GiB": memory, "minutes_of_20000": with_kernels * TARGET / 60, "limit": LIMITS.get(defense)}


def attacks_on_gpu(count: int, model: str) -> dict[str, Any]:
    """Milliseconds of a captured iteration on ten updates, each of another network."""
    net, data = setting(model)
    rng, many = torch.Generator("cuda").manual_seed(0), {name: value.cuda() for name, value in net.named_parameters()}
    sent, observed = (
        {name: torch.randn(10, *value.shape, generator=rng, device="cuda") * 0.05 for name, value in many.items()}
        for _ in range(2)
    )
    problem = Problem(structure(net.cuda(), "eval"), sent, observed, own_weights=True, loss=binary_cross_entropy)
    labels = data.labels[:200].view(10, 20).cuda()

    def each() -> float:
        variables = {"inputs": data.inputs[:200].view(10, 20, *data.inputs.shape[1:]).cuda()}
        evaluate = evaluate_stacked(problem, Cosine())

        def step() -> None:
            variables["inputs"].sub_(evaluate(variables, labels, {}).gradient["inputs"].sign(), alpha=1e-3)

        return _each(capture_step(step, variables), count, warmups=5)

    with_kernels, found = each(), {"device": torch.cuda.get_device_name(), "model": model}
    with _in_groups():
        by_groups = each()
    return found | {"ms": 1e3 * with_kernels, "groups_ms": 1e3 * by_groups, "ratio": with_kernels / by_groups}


@dataclass(frozen=True)
class Cosine:
    """One minus the cosine of two gradients."""

    needs_gap: bool = False
    needs_statistics: bool = False

    def __call__(self, compared: Compared, variables: Variables, fixed: Params) -> tuple[Tensor, Tensor]:
        """Of each trial."""
        found = 1 - compared.dot / (compared.trial * compared.observed).sqrt()
        return found, found


@contextmanager
def _in_groups() -> Iterator[None]:
    """Let vmap take stacked convolutions as it does by itself."""
    usual, stacked_layers.takes = stacked_layers.takes, lambda *given: False
    try:
        yield
    finally:
        stacked_layers.takes = usual


def _each(run: Callable[[], object], count: int, warmups: int) -> float:
    """Seconds of a call, once all is captured."""
    for _ in range(warmups):
        run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def submodels(
    sizes: Sequence[int], rule: str, device: str, rounds: int, beside: SubmodelFederation | None = None, seed: int = 0
) -> SubmodelFederation:
    """A federation of mapp_fl that evaluates at its end only, on random pictures in the shape of CIFAR-10."""
    shares = list(torch.arange(sum(sizes)).split(list(sizes)))
    chosen = {"rule": find("submodel", rule)(), "rates": rates_of(shares, 2)}
    terms = SubmodelTerms(shares=shares, rounds=rounds, evaluate_every=rounds, **chosen)
    net = create("mapp-cnn-16", (3, 32, 32), 10, Generator().manual_seed(0)).to(device)
    return SubmodelFederation(net, _pictures(sum(sizes)), terms, seed, device, beside=beside)


@cache
def _pictures(rows: int) -> Dataset:
    rng = Generator().manual_seed(0)
    inputs, labels = torch.randn(rows + 128, 3, 32, 32, generator=rng), torch.randint(10, (rows + 128,), generator=rng)
    return Dataset("random", inputs, labels, 10, rows)


def plain_submodels(server: nn.Module, small: nn.Module, fed: SubmodelFederation, rng: Generator) -> None:
    """HeteroFL as anybody would write it: the first channels are cut out, trained, and added up where they were."""
    state = server.state_dict()
    total, count = ({name: torch.zeros_like(value) for name, value in state.items()} for _ in range(2))
    for rate, rows in zip(fed.rates, fed.terms.shares, strict=True):
        worker = copy.deepcopy(server if rate == 1 else small)
        places = {name: tuple(map(slice, value.shape)) for name, value in worker.state_dict().items()}
        worker.load_state_dict({name: state[name][place] for name, place in places.items()})
        optimiser = torch.optim.Adam(worker.parameters(), 1e-3)
        for step in rows[torch.randperm(len(rows), generator=rng)].split(128):
            optimiser.zero_grad()
            cross_entropy(worker(fed.train.inputs[step]), fed.train.labels[step]).backward()
            optimiser.step()
        for name, value in worker.state_dict().items():
            total[name][places[name]] += value
            count[name][places[name]] += 1
    server.load_state_dict({n: torch.where(count[n] > 0, total[n] / count[n], state[n]) for n in state})


def submodels_on_cpu(repeats: int) -> dict[str, Any]:
    """Ours against a plain loop."""
    torch.set_num_threads(1)
    fed = submodels((512,) * 10, "heterofl", "cpu", repeats + 2)
    server, small = (copy.deepcopy(fed.trainer.narrow[fed.keys[rate]].net) for rate in (1.0, 0.5))
    rounds, plainly = fed.rounds(), partial(plain_submodels, server, small, fed, Generator().manual_seed(0))
    next(rounds), plainly()  # both warm
    found = [(seconds(partial(next, rounds)), seconds(plainly)) for _ in range(repeats)]
    ours, plain = (median(each) for each in zip(*found, strict=True))
    return {"device": "cpu", "seconds": ours, "plain_seconds": plain, "ratio": ours / plain, "limit": 0.75}


def submodels_on_gpu(rule: str, count: int, together: int) -> dict[str, Any]:
    """Seconds of a round of Table 2's clients, of several federations at once, and by vmap instead of kernels."""
    each, by_vmap = (_rounds_of_submodels(rule, count, together, kernels) for kernels in (True, False))
    found = {"device": torch.cuda.get_device_name(), "rule": rule, "together": together, "seconds": each}
    memory = torch.cuda.max_memory_allocated() / 2**30
    found |= {"vmap_seconds": by_vmap, "ratio": each / by_vmap, "GiB": memory}
    return found | {"minutes_of_150": each * 150 / 60, "limit": 4.0}


def _rounds_of_submodels(rule: str, count: int, together: int, kernels: bool) -> float:
    first = submodels(TABLE_2, rule, "cuda", count + 6)
    others = [submodels(TABLE_2, rule, "cuda", count + 6, first, seed) for seed in range(1, together)]
    for narrow in first.trainer.narrow.values():
        narrow.chain = narrow.chain if kernels else None
    rounds = StackedFederations([first, *others]).rounds()
    return _each(partial(next, rounds), count, warmups=5) / together


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = ("pruning", "submodels", "attacks", "engines")
    parser.add_argument("--what", nargs="+", choices=several, default=["pruning"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=200, help="on a GPU")
    parser.add_argument("--model", default="conv-2", help="of pruning and attacks on a GPU")
    parser.add_argument("--repeats", type=int, default=5, help="on a CPU")
    parser.add_argument("--bases", nargs="+", default=["none", "snip", "prunefl"])
    parser.add_argument("--defenses", nargs="+", default=["none", "pseudo-largest", "priprune", "dgp"])
    parser.add_argument("--rules", nargs="+", default=["mapp-fl", "fdropout"], help="of sub-models, on a GPU")
    parser.add_argument("--together", nargs="+", type=int, default=[1, 3], help="federations at once, on a GPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if "attacks" in given.what and given.device == "cpu":
        raise SystemExit("attacks are measured on a GPU: --device cuda")
    found = []
    for row in (row for what in given.what if what != "engines" for row in _rows(what, given)):
        parts = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print(", ".join(parts), flush=True)
        found.append(row)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=2))
    if "engines" in given.what:
        beside = given.json if given.json is None or not found else given.json.with_suffix(".engines.json")
        told = [] if beside is None else ["--json", str(beside)]
        script = str(Path(__file__).with_name("flower.py"))
        raise SystemExit(subprocess.call([sys.executable, script, "--clients", "10", "100", "--peer", *told]))


def _rows(what: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure what was asked for, and announce each measurement before it begins."""
    for name, measure in _measurements(what, given):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        yield measure()


def _measurements(what: str, given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    gpu, count, model = given.device == "cuda", given.rounds, given.model
    if what == "attacks":
        yield f"{count} iterations of attacks on {model}", partial(attacks_on_gpu, count, model)
    elif what == "submodels" and gpu:
        for rule, together in product(given.rules, given.together):
            name = f"{count} rounds of {together} sub-model federation(s), {rule}"
            yield name, partial(submodels_on_gpu, rule, count, together)
    elif gpu:
        for base, own in product(given.bases, given.defenses):
            name = f"{count} rounds of {model}, base pruning {base}, defense {own}"
            yield name, partial(on_gpu, base, own, count, model)
    else:
        measure = submodels_on_cpu if what == "submodels" else on_cpu
        yield f"{given.repeats} rounds of {what} and of a plain loop", partial(measure, given.repeats)


if __name__ == "__main__":
    main()
