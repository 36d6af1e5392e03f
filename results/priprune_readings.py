"""What PriPrune's open readings decide, on a small Conv-2 and a CPU: tables of results/priprune.md.

Conv-2 with 4 and 8 channels and 32 hidden units; lambda_sha is as many times the paper's as its weights are fewer, so
that alpha rests alike. 10 writers of QMNIST, 5 a round, 400 rounds of one local step of 20 pictures at rate .25 by
PruneFL's loss. The base mask is one client's, by squared gradients at rate .3, and stays. With --attacks the server
attacks one client in so many of the last rounds, 10 apart, by SGI with 100 iterations; leakage is paired with that of
the reading `none`, if given. A READING is as priprune_rule.py says. Rounding grows: other machines end points apart.

    python results/priprune_readings.py [--data FOLDER] [--seeds 0,1] [--attacks N] [--out FILE.jsonl] READING...
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from priprune_rule import Reading, reading
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad

from secateur import tree
from secateur.attacks.inversion.sgi import SGI
from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.data.partition import by_writer
from secateur.defenses.withholding import WITHHELD, mask_sent, rates, reload
from secateur.federated.averaging import Average
from secateur.federated.build import load_data
from secateur.federated.client_training import LocalTraining, binary_cross_entropy, train
from secateur.federated.federation import ServerEvaluation
from secateur.interfaces import Batch, Knowledge, Mask, Params, ServerView, Weights
from secateur.metrics.estimates import mean_of
from secateur.metrics.pictures import nmi
from secateur.pruning.masks import prune_lowest
from secateur.runs.unfinished import NullWatcher
from secateur.seeding import derive
from secateur.studies.priprune.federations import of_first_writers

ROUNDS, PER_ROUND, TESTED = 400, 5, 3000
LOCAL = LocalTraining(steps=1, loss=binary_cross_entropy)
ATTACK = SGI(iterations=100, learning_rate=0.1)


def small(rng: Generator) -> nn.Module:
    """The network, each tensor uniform within 1 / sqrt(fan-in): the weights are drawn first, then the biases."""
    features = [nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(4, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    net = nn.Sequential(*features, nn.Linear(392, 32), nn.ReLU(), nn.Linear(32, 10))
    layers = [layer for layer in net if isinstance(layer, nn.Conv2d | nn.Linear)]
    for part in ("weight", "bias"):
        for layer in layers:
            value, bound = getattr(layer, part).data, layer.weight[0].numel() ** -0.5
            value.copy_((torch.rand(value.shape, generator=rng) * 2 - 1) * bound)
    return net


class Federation:
    """400 rounds under one reading, or under none, by one seed."""

    def __init__(self, data: Dataset, rule: Reading | None, seed: int) -> None:
        self.data, self.rule, self.seed = data, rule, seed
        self.rng, self.order = (Generator().manual_seed(start + seed) for start in (0, 1000))
        self.shares = by_writer(data.writers[: data.train_size])
        self.net = small(self.rng)
        self.judge = ServerEvaluation(
            self.net, data.batch.take(slice(data.train_size, data.train_size + TESTED)), LOCAL.loss
        )
        self.mask = self.pruned(tree.params_of(self.net))
        self.model = tree.mask_tree(tree.params_of(self.net), self.mask)
        self.states: dict[int, Params] = {}
        self.seen: list[tuple[ServerView, Tensor]] = []

    def loss(self, params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        """PruneFL's, of one batch."""
        return LOCAL.loss(functional_call(self.net, params, (inputs,)), labels)

    def pruned(self, params: Params) -> Mask:
        """What one client keeps by the squared gradients of 100 local steps; of flat weights the largest."""
        squares = {name: torch.zeros_like(value) for name, value in params.items() if value.ndim > 1}
        for _ in range(100):
            rows = self.shares[0][torch.randint(len(self.shares[0]), (LOCAL.batch_size,), generator=self.rng)]
            slopes = grad(self.loss)(params, *self.data.batch.take(rows))
            params = {name: value - LOCAL.learning_rate * slopes[name] for name, value in params.items()}
            squares = {name: value + slopes[name] ** 2 for name, value in squares.items()}
        return prune_lowest({n: value + 1e-12 * params[n].abs() for n, value in squares.items()}, 0.3, "global")

    def turn(self, client: int, batch: Batch) -> tuple[Params, Mask]:
        """What a client sends, and what it withholds."""
        if self.rule is None:
            objective = lambda params, _, *examples: self.loss(params, *examples)  # noqa: E731
            return train(objective, self.model, {}, self.mask, [tuple(batch)], LOCAL).params, {}
        if client not in self.states:
            self.states[client] = self.rule.begun(self.model, derive(self.seed, "alpha", client))
        noise, batches = self.rule.noise(self.model, 1, self.rng), Batch(*(part[None] for part in batch))
        given = self.model, self.mask, self.states[client], batches, noise, LOCAL.learning_rate
        made = self.rule.turn(self.loss, *given)
        self.states[client] = made.state
        return made.values, made.withheld

    def round(self, attacked: bool) -> float:
        """One round; the share of all weights that its clients withheld."""
        average = Average("weighted" if self.rule is None else self.rule.averaging, self.model)
        chosen, shares = torch.randperm(len(self.shares), generator=self.order)[:PER_ROUND].tolist(), []
        for client in chosen:
            rows = self.shares[client]
            batch = self.data.batch.take(rows[torch.randperm(len(rows), generator=self.order)[: LOCAL.batch_size]])
            values, withheld = self.turn(client, batch)
            average.add(values, len(rows), mask_sent(withheld, self.mask))
            shares += [float(rates(withheld, self.mask).of_all)] if withheld else []
            if attacked and client == chosen[0]:
                self.seen.append((ServerView(self.model, Weights(values)), batch.inputs))
        self.model = tree.mask_tree(average.result(self.model), self.mask)
        return sum(shares) / PER_ROUND

    def accuracy(self, model: Params) -> float:
        """On the first test pictures."""
        return self.judge(model)["test_accuracy"]

    def leakage(self) -> dict[str, list[float]]:
        """NMI and AMI of what SGI makes of each attacked update."""
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (self.data.mean, self.data.std))
        about = {"batch_size": LOCAL.batch_size, "loss": LOCAL.loss, "learning_rate": LOCAL.learning_rate}
        known = Knowledge(self.net, self.data.input_shape, self.data.classes, mean, std, **about)
        found: dict[str, list[float]] = {"nmi": [], "ami": []}
        for number, (view, truth) in enumerate(self.seen):
            ((_, made),) = ATTACK.reconstruct([[view]], known, [derive(number, "attack")], NullWatcher(lambda _: None))
            alike = nmi(known.pixels(truth), known.pixels(made.batch.inputs))
            for name, values in found.items():
                values.append(float(getattr(alike, name).mean()))
        return found


def measured(federation: Federation, attacks: int) -> dict[str, Any]:
    """What one comes to; the course is of (round, accuracy, withheld)."""
    begun, course = time.process_time(), []
    attacked = {ROUNDS - 10 * number for number in range(attacks)}
    for number in range(1, ROUNDS + 1):
        withheld = federation.round(number in attacked)
        if number == 1 or number % 100 == 0:
            course.append((number, federation.accuracy(federation.model), withheld))
    row = {"accuracy": course[-1][1], "withheld": course[-1][2], "course": course}
    if states := federation.states.values():
        own = [federation.accuracy(reload(federation.model, state, federation.mask)) for state in states]
        layers = {n: [float(state[WITHHELD + n].double().mean()) for state in states] for n in federation.mask}
        row |= {"own": sum(own) / len(own), "layers": {n: sum(shares) / len(shares) for n, shares in layers.items()}}
    return row | (federation.leakage() if attacks else {}) | {"seconds": time.process_time() - begun}


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    words = [f"{name} {row[name]:.1%}" for name in ("withheld", "accuracy", "own") if name in row]
    return f"{row['reading']}, seed {row['seed']}: {', '.join(words)} ({row['seconds']:.0f} s)"


def compared(rows: list[dict[str, Any]]) -> None:
    """Print leakage over all attacked updates with Student's 95 % interval, and what a reading takes of `none`'s."""
    for text in dict.fromkeys(row["reading"] for row in rows):
        for measure in ("nmi", "ami"):
            own, plain = ([v for row in rows if row["reading"] == t for v in row[measure]] for t in (text, "none"))
            words = [f"{text}, {measure}", "{:.3f} [{:.3f}, {:.3f}]".format(*mean_of(own)[:3])]
            if text != "none" and plain:
                less = mean_of([one - other for one, other in zip(plain, own, strict=True)])
                words += ["less {:.3f} [{:.3f}, {:.3f}]".format(*less[:3]), f"{less.value * len(own) / sum(plain):.0%}"]
            print(*words)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="the folder that holds QMNIST/raw/; else $SECATEUR_DATA")
    parser.add_argument("--seeds", default="0", help="joined by commas")
    parser.add_argument("--attacks", type=int, default=0, help="updates of each federation that are attacked")
    parser.add_argument("--out", type=Path, help="rows are added to this file as they come")
    parser.add_argument("readings", nargs="+", metavar="READING")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rules = {text: reading(text) for text in given.readings}
    config = read(Federate, None, {"data": "qmnist", "model": "conv-2", "data_folder": given.data})
    data, rows = of_first_writers(load_data(config)[0], 10), []
    for text, rule in rules.items():
        for seed in map(int, given.seeds.split(",")):
            row = {"reading": text, "seed": seed} | measured(Federation(data, rule, seed), given.attacks)
            rows.append(row)
            print(told(row), flush=True)
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    if given.attacks:
        compared(rows)


if __name__ == "__main__":
    main()
