"""Gradient matching as ratios, measured in one run: against breaching on a CPU, against the plain loop on a GPU.

CPU: trial-iterations per CPU second of one thread, IG with TV and box, 20 targets of ours at once, breaching's one
after another (several at once it cannot), turns alternating, medians. At least 3x on LeNet-Zhu and CNN6 and 1.4x on
ResNet18. GPU: the engine that `auto` takes, in a CUDA graph, against the plain loop on the same GPU; at least 60x on
CNN6 and 30x on ResNet18 at 20 targets. FLOPs are counted on the plain loop's evaluation; the share of the peak is of
NVIDIA's 494.7 TFLOP/s of TF32 on an H200.
`--quality` attacks the same targets to the end with both and prints PSNR, MSE and CW-SSIM.

    python benchmarks/invert.py [--device cpu|cuda] [--models ...] [--quality] [--iterations N] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.ig import IG
from secateur.attacks.inversion.updates import gradient_update
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.gpu.graphs import fast
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView
from secateur.metrics.image import mse, psnr
from secateur.metrics.pictures import cw_ssim
from secateur.models.create import create
from secateur.seeding import derive

Row = dict[str, Any]
PEAK = 494.7e12  # TF32 without sparsity
TV = 0.2  # breaching's; ours then takes half of dx + dy as it does


class Silent:
    """A watch that keeps nothing."""

    def advance(self, iterations: int) -> None:
        """Nothing to show."""

    def load(self) -> Params | None:
        """Nothing was kept."""
        return None

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Nothing is kept."""


class Case:
    """One untrained network and some targets."""

    def __init__(self, model: str, data: Dataset, targets: int, device: str, seed: int = 0) -> None:
        self.model, self.data, self.device = model, data, device
        self.net: nn.Module = create(model, data.input_shape, data.classes, derive(seed, "benchmark", model)).eval()
        self.state = {name: value.to(device) for name, value in self.net.state_dict().items()}
        rows = torch.randperm(data.train_size, generator=derive(seed, "targets"))[:targets]
        self.truth = data.batch.take(rows).to(device)
        views = []
        for i in range(targets):
            one = Batch(self.truth.inputs[i : i + 1], self.truth.labels[i : i + 1])
            views.append(ServerView(self.state, gradient_update(self.net, self.state, one, "eval")))
        self.views = views
        stats = [torch.tensor(values).view(-1, 1, 1).to(device) for values in (data.mean, data.std)]
        self.knowledge = Knowledge(self.net, data.input_shape, data.classes, *stats, labels=self.truth.labels[:, None])

    def ours(self, iterations: int, engine: str = "auto", tv: float = TV) -> Tensor:
        """Our pictures of all targets, in the model's units."""
        attack = replace(IG(), iterations=iterations, engine=engine, tv=tv, tv_average=True, labels="oracle")
        targets = [[view] for view in self.views]
        found = dict(attack.reconstruct(targets, self.knowledge, [derive(0, "attack")] * len(targets), Silent()))
        return torch.cat([found[i].batch.inputs for i in range(len(targets))])

    def problem(self, iterations: int, targets: int, tv: float = TV) -> dict[str, Any]:
        """The same for breaching_peer.py."""
        rng = derive(0, "starts")
        return {
            "model": self.model,
            "input_shape": self.data.input_shape,
            "classes": self.data.classes,
            "state": {name: value.cpu() for name, value in self.state.items()},
            "gradients": [
                {name: value.cpu() for name, value in view.update.values.items()} for view in self.views[:targets]
            ],
            "labels": self.truth.labels[:targets, None].cpu(),
            "starts": torch.randn(targets, 1, *self.data.input_shape, generator=rng),
            "mean": self.data.mean,
            "std": self.data.std,
            "iterations": iterations,
            "total_variation": tv,
            "device": self.device,
        }

    def theirs(self, iterations: int, targets: int, folder: Path | None, tv: float = TV) -> dict[str, Any]:
        """The pictures and seconds of breaching, from a process of its own."""
        with tempfile.TemporaryDirectory() as place:
            given, found = Path(place) / "problem.pt", Path(place) / "found.pt"
            torch.save(self.problem(iterations, targets, tv), given)
            command = [sys.executable, str(Path(__file__).parent / "breaching_peer.py"), str(given), str(found)]
            extra = [] if folder is None else ["--folder", str(folder)]
            subprocess.run([*command, *extra], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return torch.load(found, weights_only=True)  # type: ignore[no-any-return]


def seconds(device: str) -> float:
    """CPU seconds on a CPU; on a GPU the wall clock once it has finished."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def our_rate(case: Case, iterations: int, engine: str = "auto") -> float:
    """Trial-iterations a second; two lengths, so that getting ready does not count."""
    case.ours(2, engine)
    points = []
    for length in (iterations, 2 * iterations):
        before = seconds(case.device)
        case.ours(length, engine)
        points.append(seconds(case.device) - before)
    return iterations * len(case.views) / (points[1] - points[0])


def plain_rate(case: Case, iterations: int) -> float:
    """Trial-iterations a second of IG as a PyTorch user writes it, one target; TF32 as ours takes it."""
    net = create(case.model, case.data.input_shape, case.data.classes, torch.Generator()).eval().to(case.device)
    net.load_state_dict(case.state)
    parameters, aim = list(net.parameters()), list(case.views[0].update.values.values())
    picture = torch.randn(1, *case.data.input_shape, device=case.device, requires_grad=True)
    low, high = case.knowledge.box
    adam = torch.optim.Adam([picture], 0.1)

    def step() -> None:
        loss = cross_entropy(net(picture), case.truth.labels[:1])
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        dot = torch.stack([(a * b).sum() for a, b in zip(found, aim, strict=True)]).sum()
        sizes = [torch.stack([x.square().sum() for x in some]).sum() for some in (found, aim)]
        lines, columns = picture.diff(dim=-2).abs().mean(), picture.diff(dim=-1).abs().mean()
        total = 1 - dot / (sizes[0] * sizes[1]).sqrt() + TV * (lines + columns) / 2
        (picture.grad,) = torch.autograd.grad(total, [picture])
        picture.grad.sign_()
        adam.step()
        with torch.no_grad():
            picture.clamp_(low, high)

    with fast():
        for _ in range(10):
            step()
        before = seconds(case.device)
        for _ in range(iterations):
            step()
        return iterations / (seconds(case.device) - before)


def against_breaching(case: Case, budget: float, rounds: int, folder: Path | None) -> Row:
    """Rates on a CPU, turns alternating."""
    guess = our_rate(case, 4) / len(case.views)
    iterations = max(4, int(budget * guess / 3))
    theirs, ours = [], []
    for number in range(1, rounds + 1):
        length = max(8, int(iterations * len(case.views) / 3))
        theirs.append(length / case.theirs(length, 1, folder)["cpu"][0])
        ours.append(our_rate(case, iterations))
        told = f"turn {number} of {rounds}: ours {ours[-1]:.4g}, breaching {theirs[-1]:.4g} trial-iterations a second"
        print(told, file=sys.stderr, flush=True)
    row = {"model": case.model, "targets": len(case.views), "ours": median(ours), "breaching": median(theirs)}
    return row | {"ratio": median(a / b for a, b in zip(ours, theirs, strict=True)), "rounds": rounds}


def against_plain(case: Case, iterations: int) -> Row:
    """Rates on a GPU."""
    one = Case(case.model, case.data, 1, case.device)
    plain = plain_rate(one, iterations)
    torch.cuda.reset_peak_memory_stats()
    ours = our_rate(case, 4 * iterations)
    flops = flops_of(one)
    row = {"model": case.model, "targets": len(case.views), "ours": ours, "plain loop": plain, "ratio": ours / plain}
    memory = torch.cuda.max_memory_allocated() / 2**30
    return row | {"FLOPs an evaluation": flops, "of the TF32 peak": ours * flops / PEAK, "GiB": memory}


def flops_of(case: Case) -> float:
    """The products of one trial's double backward."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        case.ours(1, "plain")
    return float(counter.get_total_flops())


def quality(case: Case, iterations: int, peer_targets: int, folder: Path | None, tv: float) -> Row:
    """How well both see the same targets after the same iterations."""
    row: Row = {"model": case.model, "iterations": iterations, "tv": tv}
    truth = case.knowledge.pixels(case.truth.inputs)
    found = {"ours": case.knowledge.pixels(case.ours(iterations, tv=tv))}
    if peer_targets:
        peer = case.theirs(iterations, peer_targets, folder, tv)
        found["breaching"] = case.knowledge.pixels(peer["pictures"].flatten(0, 1).to(case.device))
    for name, pictures in found.items():
        scores = {"PSNR": psnr(truth[: len(pictures)], pictures), "MSE": mse(truth[: len(pictures)], pictures)}
        scores["CW-SSIM"] = cw_ssim(truth[: len(pictures)], pictures).values
        row[f"{name} targets"] = len(pictures)
        for measure, values in scores.items():
            row[f"{name} median {measure}"] = float(values.median())
        row[f"{name} PSNR"] = [round(float(value), 2) for value in scores["PSNR"]]
    if "breaching" in found:
        same = psnr(truth[:peer_targets], found["ours"][:peer_targets])
        row["ours median PSNR on breaching's targets"] = float(same.median())
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["lenet-zhu", "cnn6", "resnet18"])
    parser.add_argument("--targets", type=int, nargs="+", default=[20])
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="default: 30 on a GPU, 2500 with --quality")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--tv", type=float, default=TV)
    parser.add_argument("--peer-targets", type=int, help="of breaching's; default all, 4 on ResNet18")
    parser.add_argument("--peer-folder", type=Path, help="where breaching's packages are or go")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load("cifar10")
    rows = []
    for model in arguments.models:
        for targets in arguments.targets:
            work = "quality" if arguments.quality else "speed"
            told = f"measuring {work} of {targets} targets of {model} on {arguments.device} ..."
            print(told, file=sys.stderr, flush=True)
            case = Case(model, data, targets, arguments.device)
            if arguments.quality:
                peers = arguments.peer_targets
                peers = (4 if model.startswith("resnet") else targets) if peers is None else peers
                row = quality(case, arguments.iterations or 2500, peers, arguments.peer_folder, arguments.tv)
            elif arguments.device == "cpu":
                row = against_breaching(case, arguments.budget, arguments.rounds, arguments.peer_folder)
            else:
                row = against_plain(case, arguments.iterations or 30)
            print(
                {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
            rows.append(row)
            if arguments.json is not None:
                machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
                arguments.json.write_text(json.dumps([*rows, machine | {"device": arguments.device}], indent=1))


if __name__ == "__main__":
    main()
