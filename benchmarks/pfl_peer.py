"""A round of the same federation here and in pfl-research (PyPI pfl 0.6.0), turns alternating in one process.

Both average the weights of all clients after plain SGD on the same batches, and must come to the same model, which is
checked after the first round. Of both: CPU and wall seconds of a round, medians; the first round of each is left out.
pfl gets batches that were cut before, as its data sets hold them; ours cuts them in its round.

    python benchmarks/pfl_peer.py [--work digits|mapp] [--clients N] [--rounds N] [--folder F]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import copy
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.data.dataset import Dataset
from secateur.data.partition import iid
from secateur.federated.client_training import LocalTraining
from secateur.federated.federation import Federation
from secateur.federated.sampling import SampledClients
from secateur.federated.spec import FederationSpec
from secateur.models.create import create

PACKAGES = ("pfl==0.6.0", "dp-accounting==0.4.4", "prv-accountant==0.2.0", "multiprocess<0.71", "dill", "dm-tree")
PACKAGES += ("absl-py", "attrs", "mpmath", "immutabledict", "wrapt")
FOLDER = Path(__file__).parent.parent / "build" / "pfl"
WORKS = {  # model, shape, examples a client, and what it does with them
    "digits": ("digits-cnn", (1, 8, 8), 8, LocalTraining(steps=1, batch_size=8, learning_rate=0.05)),
    "mapp": ("mapp-cnn-16", (3, 32, 32), 512, LocalTraining(steps=4, batch_size=128, learning_rate=0.05)),
}
NEAR = 0.01  # how far the models may be apart, as a share of the way that they went


def environment(folder: Path = FOLDER) -> None:
    """The peer's packages in a folder of their own, beside the project's and not in its way; installed once."""
    if not (folder / "pfl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *PACKAGES], check=True)
    sys.path.append(str(folder))


def ours(work: str, clients: int, rounds: int) -> Federation:
    """The federation here, of random pictures."""
    model, shape, size, local = WORKS[work]
    rng, rows = Generator().manual_seed(0), clients * size
    inputs, labels = torch.randn(rows + 10, *shape, generator=rng), torch.randint(10, (rows + 10,), generator=rng)
    shares = iid(rows, clients, rng)
    terms = FederationSpec(shares, rounds=rounds + 1, per_round=clients, local=local, evaluate_every=rounds + 1)
    data = Dataset("random", inputs, labels, 10, rows)
    return Federation(create(model, shape, 10, rng), data, terms, 0)


class Wrapped(nn.Module):
    """A network with the methods that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Of a batch."""
        return cross_entropy(self.net(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """What pfl evaluates in its first round, and never after."""
        from pfl.metrics import Weighted  # type: ignore[import-not-found]

        return {"loss": Weighted(float(self.loss(inputs, labels).detach()) * len(labels), len(labels))}


class Cohort:
    """A round's clients with their examples in the order of their steps, cut before the clock runs."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.queue: Iterator[Any] = iter(())

    def fill(self, drawn: SampledClients) -> None:
        """The next round."""
        from pfl.data.pytorch import PyTorchTensorDataset  # type: ignore[import-not-found]

        batches = [self.federation.examples(rows) for rows in drawn.rows]
        self.queue = iter([PyTorchTensorDataset(tensors=list(batch)) for batch in batches])

    def get_cohort(self, size: int) -> Iterator[tuple[Any, int]]:
        """As pfl asks for them."""
        return ((next(self.queue), 0) for _ in range(size))


def alternating(federation: Federation, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of every round in both; pfl drives, and each of its rounds is followed by one of ours."""
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
    from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    local, cohort, here = federation.terms.local, Cohort(federation), federation.rounds()
    net = Wrapped(federation.net)
    spent: dict[str, list[tuple[float, float]]] = {"secateur": [], "pfl": []}

    class Turns(TrainingProcessCallback):  # type: ignore[misc]
        begun = (0.0, 0.0)

        def on_train_begin(self, *, model: Any) -> Any:
            cohort.fill(federation.sampler(1))
            self.begun = _clock()
            return Metrics()

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            spent["pfl"].append(_since(self.begun))
            spent["secateur"].append(_of(lambda: next(here)))
            told = ", ".join(f"{name} {each[-1][0]:.3f}" for name, each in spent.items())
            print(f"round {central_iteration + 1} of {rounds}: CPU seconds {told}", file=sys.stderr, flush=True)
            if central_iteration == 0:
                _check(net.net, federation)
            cohort.fill(federation.sampler(min(central_iteration + 2, rounds)))
            self.begun = _clock()
            return False, Metrics()

    settings = {"central_num_iterations": rounds, "evaluation_frequency": 10**9, "val_cohort_size": 0}
    FederatedAveraging().run(
        NNAlgorithmParams(**settings, train_cohort_size=federation.terms.per_round),
        SimulatedBackend(cohort, cohort),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=local.learning_rate, local_batch_size=local.batch_size
        ),
        callbacks=[Turns()],
        send_metrics_to_platform=False,
    )
    return spent


def _check(net: nn.Module, federation: Federation) -> None:
    """Both have the same model, or the times are of different work; later float32 trajectories part by themselves."""
    model, first = federation.model(), dict(federation.net.named_parameters())
    apart, way = (
        torch.cat([(value - other[name]).detach().flatten() for name, value in net.named_parameters()]).norm()
        for other in (model, first)
    )
    if not apart <= NEAR * way:
        raise SystemExit(f"after round {federation.number} the models are {float(apart / way):.2g} of their way apart")


def _clock() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(begun: tuple[float, float]) -> tuple[float, float]:
    now = _clock()
    return now[0] - begun[0], now[1] - begun[1]


def _of(work: Callable[[], Any]) -> tuple[float, float]:
    begun = _clock()
    work()
    return _since(begun)


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, default="digits")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the peer's packages are or go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    environment(given.folder)
    logging.disable(logging.WARNING)
    print(
        f"measuring {given.rounds} rounds of {given.clients} clients on {given.work} ...", file=sys.stderr, flush=True
    )
    spent = alternating(ours(given.work, given.clients, given.rounds), given.rounds)
    row: dict[str, Any] = {"work": given.work, "clients": given.clients, "rounds": given.rounds}
    for name, each in spent.items():
        cpu, wall = (median(part) for part in zip(*each[1:], strict=True))
        row |= {f"{name}_cpu_seconds": cpu, f"{name}_wall_seconds": wall}
    print(json.dumps(row | {"ratio": row["secateur_cpu_seconds"] / row["pfl_cpu_seconds"]}), flush=True)


if __name__ == "__main__":
    main()
