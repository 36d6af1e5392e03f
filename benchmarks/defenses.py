"""What the defenses of an update cost, measured in one run, beside the paper's Tables 3 and 4.

Selection: DGP's on the gradient tensors of a model against torch.topk of the 20 % that Top-k keeps on the same tensors,
at most 1.5x as it is called by default, and unsorted, which is the faster, beside it; and by how much DGP's whole
upload makes a training step with a batch of 32 longer, at most 5 %.
Soteria: all scores against one backward per feature as its authors do it, of which some are timed and the rest
extrapolated; at least 3x. Wire: bytes and seconds of DGP's and ADGP's messages; at most 0.6125 and 0.3215 of dense on
ResNet18, beside the paper's own accounting. Epoch: seconds of every upload, extrapolated from one call to the 1 563
batches of 32 among 50 000 examples (Soteria's also from its own batch, in proportion), beside Table 4.

Seconds are CPU seconds of one thread, or on a GPU the wall clock once it has finished; medians; what is compared takes
turns. Pictures and labels are random.

    python benchmarks/defenses.py [--device cpu|cuda] [--models NAME ...] [--repeats N] [--skip PART ...] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.catalogue import find
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.selection import counts, end_to_end, top_and_between
from secateur.defenses.soteria import features, find_layer, scores
from secateur.interfaces import Batch, Mask, Params, UploadContext
from secateur.metrics.cost import communication, count_as_paper
from secateur.models.create import create
from secateur.wire import decode, encode

Row = dict[str, Any]
BATCH, STEPS = 32, 1563  # of the paper's users; batches in an epoch of CIFAR-10
LIMITS = {"dgp": 0.6125, "adgp": 0.3215}
TABLE_3 = {  # MB an epoch: baseline, dgp, adgp
    "lenet-zhu": (0.121, 0.074, 0.038),
    "vgg11-bn": (70.428, 43.137, 22.449),
    "resnet18": (85.251, 52.216, 27.174),
    "cnn6": (1.177, 0.721, 0.375),
}
TABLE_4 = {  # seconds an epoch
    "lenet-zhu": {"soteria": 52.460, "top-k": 0.113, "dgp": 0.146, "adgp": 0.167},
    "vgg11-bn": {"soteria": 331.379, "top-k": 0.419, "dgp": 0.764, "adgp": 0.842},
    "resnet18": {"soteria": 862.567, "top-k": 0.967, "dgp": 1.803, "adgp": 2.587},
    "cnn6": {"soteria": 291.419, "top-k": 0.100, "dgp": 0.237, "adgp": 0.256},
}


class Case:
    """A model and a client's batch on a device."""

    def __init__(self, model: str, device: str, repeats: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self.model, self.device, self.repeats = model, device, repeats
        self.net = create(model, (3, 32, 32), 10, rng).to(device)
        self.batch = Batch(torch.randn(BATCH, 3, 32, 32, generator=rng), torch.randint(10, (BATCH,), generator=rng))
        self.batch = self.batch.to(device)
        self.grads = gradient_update(self.net, tree.state_of(self.net), self.batch, "batch").values

    @property
    def examples(self) -> int:
        """Of Soteria's batch: a deep model's would take a CPU half an hour."""
        return 1 if self.device == "cpu" and self.model in ("resnet18", "vgg11-bn") else BATCH

    def turning(self, examples: int = BATCH) -> UploadContext:
        """What an upload has at hand."""
        some = self.batch.take(torch.arange(examples, device=self.device))
        return UploadContext(self.net, tree.state_of(self.net), some, 0, torch.Generator().manual_seed(0))

    def seconds(self, *calls: Callable[[], object], repeats: int | None = None) -> list[float]:
        """The median seconds of each call, which take turns, after a warm-up."""
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(1 + (repeats or self.repeats)):
            for call, kept in zip(calls, times, strict=True):
                start = self.clock()
                call()
                if turn:
                    kept.append(self.clock() - start)
        return [median(each) for each in times]

    def clock(self) -> float:
        """CPU seconds on a CPU; on a GPU the wall clock once it has finished."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def verdict(case: Case, value: float, limit: float, least: bool = False) -> Row:
    """A measured number of ResNet18, which the limits are set for, beside its limit."""
    if case.model != "resnet18":
        return {}
    met = value >= limit if least else value <= limit
    return {"limit": f"{'>=' if least else '<='} {limit}", "met": met}


def selection(case: Case) -> Iterator[Row]:
    """DGP's selection against torch.topk, and its upload against a training step."""
    defense = DualGradientPruning()

    def ours() -> object:
        return end_to_end(lambda sizes, flat: (top_and_between(sizes, flat, *defense.shares)[1],), case.grads)

    def topk(ordered: bool) -> object:
        kept = [(value.abs().flatten(), counts(value.numel(), 0, 0.8)[1]) for value in case.grads.values()]
        return [torch.topk(flat, number, sorted=ordered) for flat, number in kept]

    optimiser = torch.optim.SGD(case.net.parameters(), 0.01, 0.9)

    def step(defended: bool) -> None:
        optimiser.zero_grad()
        cross_entropy(case.net(case.batch.inputs), case.batch.labels).backward()  # type: ignore[no-untyped-call]
        if defended:
            defense.compress(
                {name: value.grad for name, value in case.net.named_parameters() if value.grad is not None}
            )
        optimiser.step()

    dgp, plain, unordered = case.seconds(ours, partial(topk, True), partial(topk, False))
    found = {"what": "selection", "model": case.model, "dgp s": dgp, "torch.topk s": plain, "ratio": dgp / plain}
    found |= {"torch.topk unsorted s": unordered, "ratio to unsorted": dgp / unordered}
    yield found | verdict(case, dgp / plain, 1.5)
    repeats = 5 if case.device == "cpu" else 4 * case.repeats  # a small difference of two larger times
    whole, longer = case.seconds(partial(step, False), partial(step, True), repeats=repeats)
    (alone,) = case.seconds(lambda: defense.compress(case.grads))
    found = {
        "what": "share of a step",
        "model": case.model,
        "step s": whole,
        "with dgp s": longer,
        "dgp alone s": alone,
    }
    yield found | {"ratio": longer / whole - 1} | verdict(case, longer / whole - 1, 0.05)


def soteria(case: Case, examples: int, timed: int = 16) -> Iterator[Row]:
    """Soteria's scores against one backward per feature."""
    turning = case.turning(examples)
    layer = find_layer(turning.net, None)
    inputs = turning.batch.inputs.clone().requires_grad_()
    found = features(turning, layer, inputs)  # (B, F)
    count = found.shape[1]

    def backwards() -> None:
        for feature in range(timed):
            (slope,) = torch.autograd.grad(found[:, feature].sum(), inputs, retain_graph=True)
            slope.flatten(1).norm(dim=1)

    ours, some = case.seconds(lambda: scores(turning, layer), backwards, repeats=max(1, case.repeats // 5))
    each = some * count / timed
    row = {"what": "soteria", "model": case.model, "examples": examples, "features": count, "ours s": ours}
    yield row | {"one backward each s": each, "ratio": each / ours} | verdict(case, each / ours, 3, least=True)


def wire(case: Case) -> Iterator[Row]:
    """What DGP and ADGP send and receive, and how long that takes."""
    grads = tree.to(case.grads, "cpu")
    shapes = {name: tuple(value.shape) for name, value in grads.items()}
    adgp = AlignedDualGradientPruning()
    ways: dict[str, tuple[Params, Mask | None]] = {
        "dgp": (DualGradientPruning().compress(grads), None),
        "adgp": (adgp.compress(grads), adgp.positions(grads)),
    }
    for place, (name, (sent, inside)) in enumerate(ways.items(), 1):
        data = encode(sent, inside=inside)
        there, back = case.seconds(
            partial(encode, sent, inside=inside), partial(decode, data, shapes, inside=inside), repeats=3
        )
        real, paper = communication(sent, inside), count_as_paper(sent, inside)
        row = {"what": "wire", "model": case.model, "defense": name, "encode s": there, "decode s": back}
        row |= {"up B": real.up, "down B": real.down, "broadcast B": real.broadcast, "bits an entry": real.bits}
        row |= {"MB": real.bytes / 2**20, "ratio": real.ratio, "paper's accounting": paper.ratio}
        row |= {"paper's accounting MB": paper.bytes / 2**20, "Table 3 MB": TABLE_3[case.model][place]}
        yield row | verdict(case, real.ratio, LIMITS[name])


def epochs(case: Case, uploads: list[str], examples: int) -> Iterator[Row]:
    """Seconds of every upload in an epoch."""
    for name in uploads:
        upload, slow = find("defense", name).make(), name == "soteria"
        turning, state = case.turning(examples if slow else BATCH), upload.init(case.grads)
        call = partial(upload, case.grads, state, turning)
        (one,) = case.seconds(call, repeats=1 if slow else None)
        whole = one * STEPS * (BATCH / examples if slow else 1)
        row = {"what": "epoch", "model": case.model, "defense": name, "one call s": one, "epoch s": whole}
        yield row | {"Table 4 s": TABLE_4[case.model].get(name)}


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=TABLE_4, default=["resnet18"])
    parser.add_argument("--uploads", nargs="+", default=["top-k", "dgp", "adgp", "outpost", "noise", "soteria"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--examples", type=int, help="of Soteria's batch; default 32, and 1 of a deep model on a CPU")
    parser.add_argument("--skip", nargs="+", choices=("selection", "soteria", "wire", "epochs"), default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[Case], Iterator[Row]]] = {
        "selection": selection,
        "soteria": lambda case: soteria(case, arguments.examples or case.examples),
        "wire": wire,
        "epochs": lambda case: epochs(case, arguments.uploads, arguments.examples or case.examples),
    }
    rows = []
    for case in (Case(model, arguments.device, arguments.repeats) for model in arguments.models):
        for name in (name for name in parts if name not in arguments.skip):
            print(f"measuring {name} of {case.model} on {case.device} ...", file=sys.stderr, flush=True)
            for row in parts[name](case):
                rows.append(row)
                shown = {
                    key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()
                }
                print(shown, flush=True)
    if arguments.json:
        machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
        head = {"device": arguments.device, "machine": machine, "torch": torch.__version__, "threads": 1}
        arguments.json.write_text(json.dumps(head | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
