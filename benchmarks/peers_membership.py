"""LiRA and RMIA here, in LeakPro (c47752f) and in Privacy Meter (e384af8), from the logits of the same models.

LeakPro trains eight shadow models in pairs, each on half of the rows, by the training that a user writes for it. Its
logits then go to all three tools, with those of the target and, for Privacy Meter, of a model on the other rows. A
tenth of the rows trains no model: the population of RMIA for Privacy Meter and for ours. Of each attack: AUC, TPR at
1 % FPR, the AUC that the tool itself states, and CPU seconds of one thread once the logits are there. Our rows have
the largest difference from the scores of the peer too. Gamma, a and the temperature of LeakPro's RMIA are ours.

    python benchmarks/peers_membership.py [--data digits|location] [--seeds N] [--folder F] [--json FILE]

The peers are cloned into the folder, at their commits, with the packages that the development environment lacks.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TQDM_DISABLE="1")

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset

from secateur.catalogue import find
from secateur.data.load import load
from secateur.interfaces import Batch, BlackBox, Candidates, InOut
from secateur.metrics.membership import auc, roc, tpr_at_fpr

REPOSITORIES = {
    "leakpro": ("aidotse/LeakPro", "c47752fad0fb48cba7d4d03023cdcedf267501c4"),
    "privacy_meter": ("privacytrustlab/ml_privacy_meter", "e384af8fd9319b8eeb1303aa82474df1441e3c59"),
}
PACKAGES = ("dotmap", "seaborn", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing", "ts2vec")
PACKAGES += ("umap-learn", "pynndescent", "numba", "llvmlite", "torchvision==0.28.0")
FOLDER = Path(__file__).parent.parent / "build" / "membership-peers"
SHADOWS, EPOCHS, BATCH = 8, 40, 64
LEAKPRO = [  # its own a is 0.33, and its own population half of the rows
    {"attack": name, "online": online, "num_shadow_models": SHADOWS} | more
    for name, more in (("lira", {}), ("rmia", {"gamma": 2.0, "offline_a": 0.3, "z_data_sample_fraction": 1.0}))
    for online in (True, False)
]


class Task(NamedTuple):
    """Logits of all models, whose first is the target and second a model on the other rows, then the shadows."""

    labels: Tensor  # (N,) of the rows that train models, then (Z,) of the population
    logits: Tensor  # (2 + shadows, N + Z, K)
    members: Tensor  # (2 + shadows, N) bool


class Result(NamedTuple):
    """Scores of an attack on the target's rows, the AUC that the tool states, and its CPU seconds."""

    scores: Tensor
    stated: float | None
    seconds: float


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Data set with the attributes and the method that LeakPro asks for."""

    def __init__(self, data: Tensor, targets: Tensor) -> None:
        self.data, self.targets = data, targets

    def return_params(self) -> dict[str, Any]:
        """Return the further arguments: none."""
        return {}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index], self.targets[index]


class Net(nn.Module):
    """Small network of one hidden layer; LeakPro makes it by its class and the values of its arguments."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.width, self.classes = width, classes
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        result: Tensor = self.layers(inputs)
        return result


def environment(folder: Path) -> None:
    """Clone the peers and install what they need into a folder of their own; once."""
    packages = folder / "packages"
    if not packages.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(packages), *PACKAGES], check=True)
    for name, (address, commit) in REPOSITORIES.items():
        if not (folder / name).is_dir():
            git = ["/usr/bin/env", "git"]
            subprocess.run([*git, "clone", "-q", f"https://github.com/{address}", str(folder / name)], check=True)
            subprocess.run([*git, "-C", str(folder / name), "checkout", "--quiet", commit], check=True)
        sys.path.append(str(folder / name))
    sys.path.append(str(packages))
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    except RuntimeError:  # that of the package index needs CUDA; these attacks use none of its operators
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def train(net: nn.Module, batches: Any, optimiser: torch.optim.Optimizer, epochs: int = EPOCHS) -> float:
    """Train a network and return its accuracy in the last epoch."""
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        right = 0
        for inputs, labels in batches:
            optimiser.zero_grad()
            outputs = net(inputs)
            criterion(outputs, labels).backward()
            optimiser.step()
            right += int((outputs.argmax(1) == labels).sum())
    return right / len(batches.dataset)


def make_network(rows: Rows, classes: int, seed: int) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    """Return a new network, the batches that train it, and its optimiser."""
    torch.manual_seed(seed)
    net = Net(rows.data[0].numel(), classes)
    return net, DataLoader(rows, batch_size=BATCH, shuffle=True), torch.optim.Adam(net.parameters(), 0.005)


def audit_with_leakpro(rows: Rows, members: Tensor, seed: int, folder: Path) -> tuple[Any, nn.Module]:
    """Train a network on the members and let LeakPro audit it; return LeakPro's object and the network."""
    import joblib
    import yaml
    from leakpro import LeakPro  # type: ignore[import-not-found]
    from leakpro.input_handler.abstract_input_handler import AbstractInputHandler  # type: ignore[import-not-found]
    from leakpro.schemas import EvalOutput, TrainingOutput  # type: ignore[import-not-found]

    class Handler(AbstractInputHandler):  # type: ignore[misc]
        UserDataset = Rows

        def train(self, dataloader: Any, model: Any, criterion: Any, optimizer: Any, epochs: int) -> Any:
            accuracy = train(model, dataloader, optimizer, epochs)
            return TrainingOutput(model=model, metrics=EvalOutput(accuracy=accuracy, loss=0.0))

        def eval(self, loader: Any, model: Any, criterion: Any) -> Any:
            with torch.no_grad():
                hits = [model(inputs).argmax(1) == labels for inputs, labels in loader]
            return EvalOutput(accuracy=float(torch.cat(hits).double().mean()), loss=0.0)

    np.random.seed(seed)
    net, batches, optimiser = make_network(Rows(*rows[members]), int(rows.targets.max()) + 1, seed)
    score = EvalOutput(accuracy=train(net, batches, optimiser), loss=0.0)
    sides = [side.nonzero()[:, 0].tolist() for side in (members, ~members)]
    trained = TrainingOutput(model=net, metrics=score)
    loss = nn.CrossEntropyLoss()
    metadata = LeakPro.make_mia_metadata(trained, optimiser, loss, batches, score, EPOCHS, *sides, "rows")
    joblib.dump(metadata, folder / "model_metadata.pkl")
    joblib.dump(rows, folder / "rows.pkl")
    torch.save(net.state_dict(), folder / "target_model.pkl")
    target = {"module_path": __file__, "model_class": "Net", "target_folder": str(folder)}
    target["data_path"] = str(folder / "rows.pkl")
    audit = {"attack_type": "mia", "attack_list": LEAKPRO, "data_modality": "tabular", "output_dir": str(folder)}
    (folder / "audit.yaml").write_text(yaml.safe_dump({"audit": audit, "target": target}))
    tool = LeakPro(Handler, str(folder / "audit.yaml"))
    tool.run_audit()
    return tool, net


def score_by_leakpro(tool: Any, order: Tensor) -> Iterator[tuple[str, Result]]:
    """Run LeakPro's attacks again, whose models and logits are kept; its rows are members, then the others."""
    for attack, setting in zip(tool.attack_scheduler.attacks, LEAKPRO, strict=True):
        begun = time.process_time()
        attack.prepare_attack()
        result = attack.run_attack()
        seconds = time.process_time() - begun
        scores = torch.empty(len(order), dtype=torch.float64)
        scores[order] = torch.as_tensor(np.asarray(result.signal_values, dtype=np.float64))
        mode = "online" if setting["online"] else "offline"
        yield f"{setting['attack']} {mode}", Result(scores, float(result.roc_auc), seconds)


def score_by_privacy_meter(task: Task) -> Iterator[tuple[str, Result]]:
    """Run the attacks of Privacy Meter; the second model serves to tune its a, which is yielded in the name."""
    import attacks  # type: ignore[import-not-found]

    count = task.members.shape[1]
    chosen = task.labels.expand(len(task.logits), -1)[:, :, None]
    signals = task.logits.double().softmax(2).gather(2, chosen)[:, :, 0].T.numpy()
    known, population, members = signals[:count], signals[count:], task.members.T.numpy()
    begun = time.process_time()
    a = float(attacks.tune_offline_a(0, known, population, members, logging.getLogger("quiet"))[0])
    scores = attacks.run_rmia(0, known, population, members, SHADOWS // 2, a)
    yield f"rmia offline a={a:.1f}", _measured(scores, begun)
    begun = time.process_time()
    yield "loss", _measured(attacks.run_loss(known[:, 0]), begun)


def _measured(scores: np.ndarray, begun: float) -> Result:
    return Result(torch.as_tensor(scores), None, time.process_time() - begun)


def score_by_ours(task: Task, name: str, outsiders: bool = False, **settings: Any) -> Result:
    """Run one of our attacks; a row's input is its number, and models are tables of answers.

    `outsiders` are the rows that train no model, as the population of RMIA; by default it is all rows, as in LeakPro.
    """
    begun = time.process_time()
    count, answers = task.members.shape[1], task.logits.double().softmax(2)
    boxes = [BlackBox(lambda inputs, table=table: table[inputs[:, 0].long()]) for table in answers]
    rows = torch.arange(len(task.labels))
    pool, rest = (Batch(part.double().unsqueeze(1), task.labels[part]) for part in (rows[:count], rows[count:]))
    attack = find("attack", name)(**settings)
    if name != "conf":
        attack = attack.fit(InOut(boxes[2:], pool, task.members[2:]), Generator().manual_seed(0))
    candidates = Candidates(pool, rows[:count], population=rest if outsiders else None)
    return Result(attack.score(boxes[0], candidates).scores, None, time.process_time() - begun)


def score_by_largest_half(task: Task, a: float) -> Result:
    """Return offline RMIA with P(z) from the larger half of the answers, as Privacy Meter has it."""
    count, chosen = task.members.shape[1], task.labels.expand(len(task.logits), -1)[:, :, None]
    p = task.logits.double().softmax(2).gather(2, chosen)[:, :, 0]
    outside = ~task.members[2:]
    means = (p[2:, :count] * outside).sum(0) / outside.sum(0), p[2:, count:].topk(SHADOWS // 2, 0).values.mean(0)
    x, z = (own / (((1 + a) * mean + (1 - a)) / 2) for own, mean in zip(p[0].split(count), means, strict=True))
    return Result((x[:, None] / z > 1).double().mean(1), None, 0.0)


def make_task(data: str, seed: int, folder: Path) -> tuple[Task, Any, Tensor]:
    """Let LeakPro train the models; return all logits, LeakPro's object and the order of its rows."""
    from leakpro.attacks.utils.shadow_model_handler import ShadowModelHandler  # type: ignore[import-not-found]

    whole, rng = load(data), Generator().manual_seed(seed)
    order = torch.randperm(len(whole.labels), generator=rng)
    count = len(order) * 9 // 20 * 2
    every = Rows(whole.inputs[order].float(), whole.labels[order].long())
    known = Rows(*every[torch.arange(count)])
    member = torch.zeros(count, dtype=torch.bool)
    member[torch.randperm(count, generator=rng)[: count // 2]] = True
    tool, net = audit_with_leakpro(known, member, seed, folder)
    other, batches, optimiser = make_network(Rows(*known[~member]), whole.classes, seed + 1000)
    train(other, batches, optimiser)
    handler = ShadowModelHandler()
    numbers = list(range(SHADOWS))
    nets = [net, other, *(model.model_obj for model in handler.get_shadow_models(numbers)[0])]
    inside = torch.as_tensor(handler.get_in_indices_mask(numbers, np.arange(count))).T
    with torch.no_grad():
        logits = torch.stack([one.eval()(every.data) for one in nets])
    rows = torch.cat([member.nonzero()[:, 0], (~member).nonzero()[:, 0]])
    return Task(every.targets, logits, torch.cat([torch.stack([member, ~member]), inside])), tool, rows


def measure(task: Task, tool: Any, order: Tensor) -> Iterator[tuple[str, str, Result, Tensor | None]]:
    """Yield tool, attack, result and, of ours, the scores of the peer that it is compared with."""
    leakpro, meter = dict(score_by_leakpro(tool, order)), dict(score_by_privacy_meter(task))
    for by, results in (("LeakPro", leakpro), ("Privacy Meter", meter)):
        for name, result in results.items():
            yield by, name, result, None
    for name in leakpro:
        attack, mode = name.split()
        peer = leakpro[name].scores if attack == "rmia" else None  # scores of LiRA have another scale
        yield "Secateur", name, score_by_ours(task, attack, mode=mode), peer
    yield "Secateur", "conf", score_by_ours(task, "conf"), -meter["loss"].scores
    tuned = next(name for name in meter if name != "loss")
    a = float(tuned.partition("a=")[2])
    ours = score_by_ours(task, "rmia", outsiders=True, mode="offline", gamma=1.0, temperature=1.0, a=a)
    yield "Secateur, its settings", tuned, ours, meter[tuned].scores
    yield "Secateur, its settings and P(z)", tuned, score_by_largest_half(task, a), meter[tuned].scores


def list_rows(data: str, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each attack and seed."""
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            task, tool, order = make_task(data, seed, Path(name))
            for by, attack, result, peer in measure(task, tool, order):
                curve = roc(result.scores, task.members[0])
                row = {"data": data, "seed": seed, "tool": by, "attack": attack, "auc": float(auc(curve))}
                row |= {"tpr_at_1_fpr": float(tpr_at_fpr(curve, 0.01)), "stated_auc": result.stated}
                gap = None if peer is None else float((result.scores - peer).abs().max())
                yield row | {"cpu_seconds": result.seconds, "gap": gap}


def main() -> None:
    """Print a line of each attack and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the peers are or go")
    parser.add_argument("--json", type=Path, help="a file for the rows, one a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    environment(arguments.folder)
    logging.disable(logging.WARNING)
    for row in list_rows(arguments.data, arguments.seeds):
        print(json.dumps(row), flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
