"""CPU seconds of an audit's stages beside a plain reference, measured in one run with one thread.

Location-30, a victim and five shadows, L1 unstructured .7, the paper's threshold attacks and SAMIA. The reference has
DataLoader batches, the library's encoder layers, queries recomputed for each attack, and the victim's set scored every
epoch. SAMIA's epochs are timed in turn with the reference's, `--epochs` of each, and their median stands for all 100.
Limits: at most 0.6 of the reference at the same schedule, and a tenth with SAMIA's own early stopping. `--full` also
trains SAMIA by the whole schedule, so that the two areas under the curve can be compared.

    python benchmarks/audit.py [--data FOLDER] [--epochs 3] [--seed 0] [--full] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import plain_audit as plain
from secateur import tree
from secateur.attacks.membership.neural import train
from secateur.attacks.membership.samia import Samia
from secateur.catalogue import find
from secateur.data.load import load
from secateur.data.partition import victim_shadow
from secateur.inference import predict
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.metrics.membership import auc, roc
from secateur.models.create import create
from secateur.seeding import derive, initialise
from secateur.training.recipe import Fitted, Recipe, Task
from secateur.training.trainer import fit_many

THRESHOLDS = ("conf", "xent", "mentr", "top1-conf")
EPOCHS = 100  # of the paper's schedule


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and what was made."""
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


class Bench:
    """The data, the splits, and the six models: the victim's first."""

    def __init__(self, folder: str | None, seed: int) -> None:
        self.data, self.seed = load("location", folder), seed
        split = victim_shadow(len(self.data.inputs), 5, derive(seed, "split"))
        self.parts = [split.victim, *split.shadows]
        self.sides = [tuple(map(self.data.batch.take, (part.train, part.test))) for part in self.parts]
        self.nets = [self.net(i) for i in range(len(self.parts))]
        self.seconds: dict[str, tuple[float, float]] = {}

    def net(self, index: int) -> nn.Module:
        """An untrained model."""
        return create("mlp", self.data.input_shape, self.data.classes, derive(self.seed, "net", index))

    def train(self, stage: str, recipe: Recipe, pruned: bool) -> None:
        """Train, or prune and fine-tune, all six; the reference takes as many epochs as each of ours did."""
        announce(stage)
        starts = [copy.deepcopy(net) for net in self.nets]

        def ours() -> dict[int, Fitted]:
            masks = [find("pruner", "l1-unstructured")()(n, self.data.batch, 0.7, derive(0)) for n in starts]
            tasks = [
                Task(
                    tree.state_of(net),
                    *(self.data.batch.take(rows) for rows in (part.train, part.validation)),
                    derive(self.seed, stage, i),
                    masks[i] if pruned else None,
                )
                for i, (net, part) in enumerate(zip(starts, self.parts, strict=True))
            ]
            self.masks = masks if pruned else [{}] * len(masks)
            return dict(fit_many(starts[0], tasks, recipe))

        own, fitted = timed(ours)

        def reference() -> None:
            for i, part in enumerate(self.parts):
                batches = [self.data.batch.take(rows) for rows in (part.train, part.validation)]
                net = tree.apply_mask(copy.deepcopy(starts[i]), self.masks[i])
                plain.fit(net, *batches, len(fitted[i].history), self.masks[i])

        self.note(stage, own, timed(reference)[0])
        for i, net in enumerate(self.nets):
            net.load_state_dict(fitted[i].state)

    def box(self, net: nn.Module) -> BlackBox:
        """A model as an attacker meets it; the same question is answered from memory, as in an audit."""
        state, answers = tree.state_of(net), WeakTensorKeyDictionary()

        def answer(inputs: Tensor) -> Tensor:
            if inputs not in answers:
                answers[inputs] = predict(net, state, inputs)
            return answers[inputs]

        return BlackBox(answer)

    def attack(self, full: bool, epochs: int) -> dict[str, float]:
        """Time the threshold attacks and SAMIA; returns areas under the curve."""
        boxes = [self.box(net) for net in self.nets]
        shadows = [Shadow(box, *sides) for box, sides in zip(boxes[1:], self.sides[1:], strict=True)]
        candidates = Candidates(Batch(*(torch.cat(pair) for pair in zip(*self.sides[0], strict=True))))
        is_member = torch.arange(candidates.batch.size) < self.sides[0][0].size

        def run(name: str, **fields: Any) -> float:
            fitted = find("attack", name)(**fields).fit(shadows, derive(self.seed, name))
            scores = fitted.score(boxes[0], candidates).scores
            return float(auc(roc(scores.double(), is_member)))

        announce("threshold attacks")
        own, areas = timed(lambda: {name: run(name) for name in THRESHOLDS})
        classes = self.data.classes
        each = [lambda n=name: plain.threshold_attack(n, self.nets, self.sides, classes) for name in THRESHOLDS]
        self.note("threshold attacks", own, sum(timed(work)[0] for work in each))
        announce(f"SAMIA, {epochs} of {EPOCHS} epochs")
        self._samia(shadows, boxes[0], candidates, is_member, epochs)
        announce("SAMIA, early stopping")
        stopped, areas["samia"] = timed(lambda: run("samia"))
        self.note("SAMIA, early stopping", stopped, self.seconds["SAMIA, 100 epochs"][1])
        if full:
            announce("the AUC of SAMIA by the whole schedule")
            areas["samia, 100 epochs"] = run("samia", early_stopping=False)
        return areas

    def _samia(
        self, shadows: list[Shadow], victim: BlackBox, candidates: Candidates, is_member: Tensor, epochs: int
    ) -> None:
        attack, classes = Samia(early_stopping=False), self.data.classes
        all_sides = [(s.box, side) for s in shadows for side in (s.members, s.nonmembers)]
        sides = [(net, side) for net, pair in zip(self.nets, self.sides, strict=True) for side in pair]
        asking, seen = timed(
            lambda: [attack.features(box, side, derive(0)) for box, side in [(victim, candidates.batch), *all_sides]]
        )
        plain_asking, asked = timed(lambda: [plain.samia_inputs(net, side, classes) for net, side in sides])
        truths = torch.cat([torch.full((side.size,), 1 - i % 2) for i, (_, side) in enumerate(all_sides)])
        rows, plain_rows = Batch(torch.cat(seen[1:]), truths), Batch(torch.cat(asked[2:]), truths)
        plain_victim = Batch(torch.cat(asked[:2]), is_member.long())
        network = initialise(lambda: attack.network(rows.inputs.shape[1]), derive(self.seed))
        net = plain.Samia(classes)
        optimiser = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=5e-4)
        own, reference = [], []
        for epoch in range(epochs):
            one = replace(attack, epochs=1)
            own.append(timed(lambda e=epoch, o=one: train(network, rows, o, derive(self.seed, "epoch", e)))[0])
            reference.append(timed(lambda: plain.samia_epoch(net, optimiser, plain_rows, plain_victim))[0])
            print(f"SAMIA epoch {epoch + 1}: {own[-1]:.2f} s, reference {reference[-1]:.2f} s", file=sys.stderr)
        plain_seconds = plain_asking + EPOCHS * median(reference)
        self.note("SAMIA, 100 epochs", asking + EPOCHS * median(own), plain_seconds)

    def note(self, stage: str, own: float, reference: float) -> None:
        """Keep and print a stage's CPU seconds, ours and the plain reference's."""
        self.seconds[stage] = own, reference
        print(f"{stage:24}{own:10.1f}{reference:10.1f}{own / reference:8.3f}", flush=True)


def announce(stage: str) -> None:
    """Say what is measured next."""
    print(f"measuring {stage} ...", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="the folder that holds location/; else $SECATEUR_DATA, the cache or a download")
    parser.add_argument("--epochs", type=int, default=3, help="of SAMIA that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="also train SAMIA by the whole schedule")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)  # the reference draws from the global generator
    print(f"{'CPU seconds':24}{'secateur':>10}{'plain':>10}{'ratio':>8}", flush=True)
    bench = Bench(given.data, given.seed)
    bench.train("train", Recipe(epochs=50), pruned=False)
    bench.train("prune and fine-tune", Recipe(epochs=25), pruned=True)
    areas = bench.attack(given.full, given.epochs)
    print("AUC: " + ", ".join(f"{name} {area:.4f}" for name, area in areas.items()))
    if given.json:
        given.json.write_text(json.dumps({"seconds": bench.seconds, "auc": areas, "seed": given.seed}, indent=1))


if __name__ == "__main__":
    main()
