"""Membership attacks here and in ART (PyPI adversarial-robustness-toolbox 1.20.1), on the same predictions.

A small network is trained on half of 900 digits, and eight shadow models on halves of 897 others. Both tools get the
answers of these models and nothing else: ART's black-box attack with each of its attack models, and ours. Of each:
AUC, TPR at 1 % FPR, and CPU seconds of one thread to fit and to score. Means over seeds, lowest to highest.

    python benchmarks/membership_peer.py [--seeds N] [--folder F]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.catalogue import find
from secateur.data.load import load
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.metrics.membership import auc, roc, tpr_at_fpr

PACKAGES = ("adversarial-robustness-toolbox==1.20.1", "six", "tqdm")
FOLDER = Path(__file__).parent.parent / "build" / "art"
VICTIM, SHADOWS = 900, 8  # rows of the victim's side, half of them members; the attacker has the others
OURS = ("conf", "nn-cls", "lira", "rmia")
THEIRS = ("rf", "gb", "lr", "nn")


class Task(NamedTuple):
    """Answers of the victim and of the shadow models to all rows, with the labels and who was trained on what."""

    labels: Tensor  # (N,)
    answers: Tensor  # (1 + shadows, N, K) probabilities
    members: Tensor  # (1 + shadows, N) bool


def environment(folder: Path = FOLDER) -> None:
    """The peer's packages in a folder of their own, beside the project's and not in its way; installed once."""
    if not (folder / "art").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *PACKAGES], check=True)
    sys.path.append(str(folder))


def train(inputs: Tensor, labels: Tensor, rng: Generator) -> nn.Module:
    """Train a small network until it knows its rows by heart."""
    torch.manual_seed(int(torch.randint(2**31, (), generator=rng)))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(200):
        optimiser.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimiser.step()
    return net.eval()


def make_task(seed: int) -> Task:
    """Train the victim and the shadow models."""
    rng, data = Generator().manual_seed(seed), load("digits")
    order = torch.randperm(len(data.labels), generator=rng)
    inputs, labels = data.inputs[order], data.labels[order]
    members = torch.zeros(1 + SHADOWS, len(labels), dtype=torch.bool)
    members[0, : VICTIM // 2] = True
    rest = len(labels) - VICTIM
    for shadow in members[1:]:
        shadow[VICTIM + torch.randperm(rest, generator=rng)[: rest // 2]] = True
    nets = [train(inputs[rows], labels[rows], rng) for rows in members]
    with torch.no_grad():
        return Task(labels, torch.stack([net(inputs).softmax(1) for net in nets]), members)


def score_ours(task: Task, name: str, seed: int) -> Tensor:
    """Return the scores of one of our attacks; a row's input is its number, and models are tables of answers."""

    def side(rows: Tensor) -> Batch:
        return Batch(rows.float().unsqueeze(1), task.labels[rows])

    rows = torch.arange(len(task.labels))
    boxes = [BlackBox(lambda inputs, table=table: table[inputs[:, 0].long()]) for table in task.answers]
    pool = rows >= VICTIM
    shadows = [
        Shadow(box, side(rows[pool & used]), side(rows[pool & ~used]))
        for box, used in zip(boxes[1:], task.members[1:], strict=True)
    ]
    rng = Generator().manual_seed(seed)
    candidates = Candidates(side(rows[:VICTIM]), population=side(rows[VICTIM:]))
    return find("attack", name)().fit(shadows, rng).score(boxes[0], candidates).scores


def score_theirs(task: Task, kind: str, seed: int) -> Tensor:
    """Return the scores of ART's black-box attack with one of its attack models."""
    import numpy as np
    from art.attacks.inference.membership_inference import MembershipInferenceBlackBox
    from art.estimators.classification import BlackBoxClassifierNeuralNetwork

    np.random.seed(seed)
    torch.manual_seed(seed)
    labels, answers, members = (part.numpy() for part in task)
    estimator = BlackBoxClassifierNeuralNetwork(lambda x: x, (64,), 10, channels_first=True)
    attack = MembershipInferenceBlackBox(estimator, attack_model_type=kind)
    known = [(answers[i], members[i]) for i in range(1, 1 + SHADOWS)]
    pool = np.arange(len(labels)) >= VICTIM

    def gather(inside: bool) -> tuple[np.ndarray, np.ndarray]:
        chosen = [pool & (used == inside) for _, used in known]
        return (
            np.concatenate([table[rows] for (table, _), rows in zip(known, chosen, strict=True)]),
            np.concatenate([labels[rows] for rows in chosen]),
        )

    (inside, its_labels), (outside, other_labels) = gather(True), gather(False)
    attack.fit(y=its_labels, test_y=other_labels, pred=inside, test_pred=outside)
    guesses = attack.infer(None, labels[:VICTIM], pred=answers[0, :VICTIM], probabilities=True)
    return torch.as_tensor(np.asarray(guesses, dtype=np.float64)).reshape(VICTIM, -1)[:, -1]


def measure(seeds: int) -> Iterator[tuple[str, list[tuple[float, float, float]]]]:
    """Yield each attack's AUC, TPR at 1 % FPR and CPU seconds, seed by seed."""
    tasks = [make_task(seed) for seed in range(seeds)]
    truth = torch.arange(VICTIM) < VICTIM // 2
    for tool, names, attack in (("Secateur", OURS, score_ours), ("ART", THEIRS, score_theirs)):
        attack(tasks[0], names[0], 0)  # imports
        for name in names:
            results = []
            for seed, task in enumerate(tasks):
                begun = time.process_time()
                scores = attack(task, name, seed)
                seconds = time.process_time() - begun
                curve = roc(scores, truth)
                results.append((float(auc(curve)), float(tpr_at_fpr(curve, 0.01)), seconds))
            yield f"{tool} {name}", results


def main() -> None:
    """Print a line of each attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the peer's packages are or go")
    arguments = parser.parse_args()
    environment(arguments.folder)
    warnings.simplefilter("ignore")
    for name, results in measure(arguments.seeds):
        columns = [torch.tensor(column) for column in zip(*results, strict=True)]
        shown = [f"{column.mean():.3f} ({column.min():.3f} to {column.max():.3f})" for column in columns]
        print(f"{name:16} AUC {shown[0]}  TPR at 1 % FPR {shown[1]}  CPU seconds {shown[2]}", flush=True)


if __name__ == "__main__":
    main()
