"""A federation with FedDST here and in FedPruning (7069881): accuracy, seconds of a round and of a client's training.

Ten clients hold 1,500 digits, two take part in a round with two local epochs, and half of a small network is pruned.
FedPruning runs as it is meant to, a process of MPI for the server and for each client of a round; the metrics that it
sends to Weights & Biases are kept in a list instead. Ours runs in one process, one thread each. The methods differ in
detail: FedPruning starts from the largest weights, lets its share of adjusted weights fall to 0, and averages zeros of
clients that pruned a weight; ours starts at random, keeps the share, and averages over the clients that kept a weight.

    python benchmarks/peers_federation.py [--seeds N] [--rounds N] [--folder F] [--json FILE]

FedPruning is cloned into the folder, at its commit, with MPICH and mpi4py.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.data.partition import iid
from secateur.federated.base_pruning.feddst import FedDST
from secateur.federated.client_training import LocalTraining
from secateur.federated.federation import Federation
from secateur.federated.spec import FederationSpec

ADDRESS, COMMIT = "https://github.com/FedPruning/FedPruning", "70698813d6a2e44e000d36597954ab89ee6522b0"
PACKAGES = ("mpi4py==4.1.2", "mpich==5.0.2")
FOLDER = Path(__file__).parent.parent / "build" / "fedpruning"
ROWS, CLIENTS, PER_ROUND, EPOCHS, BATCH, RATE, ALPHA, EVERY = 1500, 10, 2, 2, 30, 0.1, 0.1, 5
DENSITY = 0.5


class Net(nn.Module):
    """Two convolutions and a layer; FedPruning tells layers apart by the beginnings of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Linear(512, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        features = nn.functional.max_pool2d(self.second(self.first(inputs).relu()).relu(), 2)
        result: Tensor = self.last(features.flatten(1))
        return result


def make_task(seed: int) -> tuple[Net, Dataset, list[Tensor]]:
    """Return the same network, data and shares for both."""
    rng, data = Generator().manual_seed(seed), load("digits")
    order = torch.randperm(len(data.labels), generator=rng)
    torch.manual_seed(seed)
    whole = Dataset("digits", data.inputs[order], data.labels[order], 10, ROWS)
    return Net(), whole, list(iid(ROWS, CLIENTS, rng))


def run_ours(seed: int, rounds: int) -> dict[str, Any]:
    """Return accuracy and seconds of our rounds."""
    net, data, shares = make_task(seed)
    local = LocalTraining(steps=None, epochs=EPOCHS, batch_size=BATCH, learning_rate=RATE)
    base = FedDST(rate=1 - DENSITY, alpha=ALPHA, every=EVERY)
    terms = FederationSpec(shares, rounds=rounds, per_round=PER_ROUND, local=local, base=base, evaluate_every=1)
    federation, spent, accuracy = Federation(net, data, terms, seed), [], 0.0
    begun, cpu = time.perf_counter(), time.process_time()
    for done in federation.rounds():
        spent.append(time.perf_counter() - begun)
        accuracy = next(one.value for one in done.measures if one.metric == "test_accuracy")
        begun = time.perf_counter()
    return {
        "accuracy": accuracy,
        "seconds_of_a_round": median(spent[1:]),
        "cpu_seconds_of_a_turn": (time.process_time() - cpu) / len(spent) / PER_ROUND,
    }


def serve(seed: int, rounds: int, folder: Path) -> None:
    """Take the part of one process of FedPruning: the server, or a client of every round. It ends by an abort."""
    import numpy as np

    log = ModuleType("wandb")
    log.log = lambda values: append(folder / "server", values | {"at": time.perf_counter()})  # type: ignore[attr-defined]
    sys.modules |= {"wandb": log, "evaluate": ModuleType("evaluate")}  # the second scores language models only
    from api.distributed.feddst import FedDSTAPI  # type: ignore[import-not-found]
    from api.pruning.model_pruning import SparseModel  # type: ignore[import-not-found]

    class Trainer(FedDSTAPI.MyModelTrainerCLS):  # type: ignore[misc,name-defined]
        def train(self, *parts: Any, **named: Any) -> Any:
            begun = time.thread_time()
            result = super().train(*parts, **named)
            append(folder / "clients", {"seconds": time.thread_time() - begun})
            return result

    net, data, shares = make_task(seed)
    random.seed(seed)
    np.random.seed(seed)
    rows_and_labels = TensorDataset(data.inputs, data.labels)
    loaders = {
        number: DataLoader(Subset(rows_and_labels, rows.tolist()), batch_size=BATCH, shuffle=True)
        for number, rows in enumerate(shares)
    }
    settings = {"dataset": "digits", "client_num_in_total": CLIENTS, "client_num_per_round": PER_ROUND}
    settings |= {"comm_round": rounds - 1, "epochs": EPOCHS, "lr": RATE, "batch_size": BATCH, "num_eval": -1}
    settings |= {"delta_T": EVERY, "T_end": rounds, "adjust_alpha": ALPHA, "adjustment_epochs": None, "A_epochs": 0}
    settings |= {"growth_data_mode": "batch", "frequency_of_the_test": 1, "is_mobile": 1, "backend": "MPI"}
    settings |= {"client_optimizer": "sgd", "wd": 0.0, "ci": 0}
    comm, number, size = FedDSTAPI.FedML_init()
    model = SparseModel(net, target_density=DENSITY, strategy="ERK_magnitude")
    held = DataLoader(Subset(rows_and_labels, range(ROWS, len(data.labels))), batch_size=100)
    sizes = {number: len(rows) for number, rows in enumerate(shares)}
    parts = (model, ROWS, None, held, sizes, loaders, None, argparse.Namespace(**settings), Trainer(model))
    FedDSTAPI.FedML_FedDST_distributed(number, size, torch.device("cpu"), comm, *parts)


def append(path: Path, values: dict[str, Any]) -> None:
    """Add a line to a file; the processes end without a chance to write at their end."""
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def run_theirs(seed: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Start the processes of FedPruning, and return accuracy and seconds of its rounds."""
    packages = folder / "packages"
    site = next(packages.glob("lib/python*/site-packages"))
    paths = [str(site), str(folder / "repository"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as name:
        command = [str(packages / "bin" / "mpirun"), "-n", str(PER_ROUND + 1), sys.executable, __file__]
        command += ["--serve", name, "--seeds", str(seed), "--rounds", str(rounds)]
        found = {"PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": str(packages / "lib")}
        done = subprocess.run(command, env=os.environ | found, capture_output=True, text=True, check=False, timeout=300)
        lines = {part: _read(Path(name) / part) for part in ("server", "clients")}
    tests = [line for line in lines["server"] if "Test/Accuracy" in line]
    if len(tests) != rounds:  # it ends every run by an abort, so that the exit code says nothing
        raise SystemExit(f"FedPruning ended after {len(tests)} of {rounds} rounds:\n{done.stderr[-3000:]}")
    times = [line["at"] for line in tests]
    return {
        "accuracy": tests[-1]["Test/Accuracy"],
        "seconds_of_a_round": median(b - a for a, b in pairwise(times)),
        "cpu_seconds_of_a_turn": median(line["seconds"] for line in lines["clients"]),
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def environment(folder: Path) -> None:
    """Clone the peer and install MPI into a folder of their own; once."""
    if not (folder / "packages").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--ignore-installed", "--prefix", str(folder / "packages")]
        subprocess.run([*command, *PACKAGES], check=True)
    if not (folder / "repository").is_dir():
        git = ["/usr/bin/env", "git"]
        subprocess.run([*git, "clone", "--quiet", ADDRESS, str(folder / "repository")], check=True)
        subprocess.run([*git, "-C", str(folder / "repository"), "checkout", "--quiet", COMMIT], check=True)


def main() -> None:
    """Print a line of each tool and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the peer is or goes")
    parser.add_argument("--json", type=Path, help="a file for the rows, one a line")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve is not None:
        return serve(arguments.seeds, arguments.rounds, arguments.serve)
    environment(arguments.folder)
    for seed in range(arguments.seeds):
        for tool, run in (("Secateur", run_ours), ("FedPruning", run_theirs)):
            more = (arguments.folder,) if run is run_theirs else ()
            row = {"tool": tool, "seed": seed, "rounds": arguments.rounds} | run(seed, arguments.rounds, *more)
            print(json.dumps(row), flush=True)
            if arguments.json is not None:
                append(arguments.json, row)


if __name__ == "__main__":
    main()
