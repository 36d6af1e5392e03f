"""Training speed as ratios, measured in one run: against a plain PyTorch loop on a CPU, an eager loop on a GPU.

CPU: CPU time of one thread, both in channels_last, epochs of both interleaved, medians. At most 1.05x the plain loop.
GPU: one step of the six models of an audit (a victim and five shadows). At least 3x (resnet18-w16) and 2.5x
(resnet18-pool) faster than the eager loop in the memory format that suits it better. TF32 is left as PyTorch sets it,
the same for all.

    python benchmarks/training.py [--device cpu|cuda] [--json FILE] [--archive FILE]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import archive
from secateur import tree
from secateur.functional import Functional, split
from secateur.inference import to_channels_last
from secateur.interfaces import Batch
from secateur.models.create import create
from secateur.training.execution import Lane, Lanes, choose
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

Row = dict[str, Any]


def make(name: str, shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    """A model of the catalogue with ten classes."""
    return create(name, shape, 10, torch.Generator().manual_seed(seed))


def data(size: int, shape: tuple[int, ...], device: str = "cpu", seed: int = 0) -> Batch:
    """Random images and labels."""
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(size, *shape, generator=rng), torch.randint(10, (size,), generator=rng)).to(device)


def plain_epoch(net: nn.Module, optimiser: torch.optim.Optimizer, train: Batch, validation: Batch) -> None:
    """An epoch as a PyTorch user writes it."""
    net.train()
    total = torch.zeros(())
    for rows in torch.randperm(train.size).split(128):
        optimiser.zero_grad()
        loss = cross_entropy(net(train.inputs[rows]), train.labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total += loss.detach() * len(rows)
    net.eval()
    with torch.no_grad():
        scores = torch.cat([net(part) for part in validation.inputs.split(256)])
        float(cross_entropy(scores, validation.labels)), float((scores.argmax(1) == validation.labels).float().mean())
    float(total)


def cpu(name: str, shape: tuple[int, ...], size: int, epochs: int) -> Row:
    """CPU seconds an epoch of `fit` and of the plain loop; each epoch of ours is followed by one of theirs."""
    train, validation = data(size, shape), data(size // 8, shape, seed=1)
    net = make(name, shape)
    peer = copy.deepcopy(net).to(memory_format=torch.channels_last)
    images = Batch(train.inputs.contiguous(memory_format=torch.channels_last), train.labels)
    others = Batch(validation.inputs.contiguous(memory_format=torch.channels_last), validation.labels)
    optimiser = torch.optim.Adam(peer.parameters(), 1e-3, weight_decay=5e-4)
    plain_epoch(peer, optimiser, images, others)
    ours: list[float] = []
    theirs: list[float] = []
    clock = [time.process_time()]

    def after_each(_: int, __: dict[str, float]) -> None:
        now = time.process_time()
        ours.append(now - clock[0])
        plain_epoch(peer, optimiser, images, others)
        clock[0] = time.process_time()
        theirs.append(clock[0] - now)

    task = Task(tree.state_of(net), train, validation, torch.Generator().manual_seed(0))
    fit(net, task, Recipe(epochs=epochs + 1, patience=None), progress=after_each)
    seconds = {"plain": median(theirs[1:]), "fit": median(ours[1:])}
    ratio = seconds["fit"] / seconds["plain"]
    return {"model": name, "seconds": seconds, "ratio": ratio, "target": "<= 1.05", "met": ratio <= 1.05}


def milliseconds(step: Callable[[], object], repeats: int = 30) -> float:
    """The median time of one call, after a warm-up."""
    times = []
    for turn in range(repeats + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if turn >= 5:
            times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def eager(nets: list[nn.Module], batches: list[Batch]) -> Callable[[], None]:
    """One step of every model, one after the other, as a PyTorch user writes it."""
    pairs = [(net, torch.optim.Adam(net.parameters(), 1e-3, weight_decay=5e-4)) for net in nets]

    def step() -> None:
        for (net, optimiser), (inputs, labels) in zip(pairs, batches, strict=True):
            optimiser.zero_grad()
            cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return step


def gpu(name: str, target: float, models: int = 6) -> Row:
    """Milliseconds of one step of all models, eager and in our ways, and the way that `auto` takes."""
    shape = (3, 32, 32)
    nets = [make(name, shape, seed).cuda().train() for seed in range(models)]
    batches = [data(128, shape, "cuda", seed) for seed in range(models)]
    lanes = [Lane(*map(to_channels_last, split(net, tree.state_of(net)))) for net in nets]
    function = Functional(nets[0], training=True, device="cuda")
    inputs = [tuple(to_channels_last(batch._asdict()).values()) for batch in batches]
    optimiser = Recipe().make_optimiser

    def objective(params: Any, buffers: Any, images: Any, labels: Any) -> torch.Tensor:
        return cross_entropy(function(params | buffers, images), labels)

    def ours(execution: str) -> float:
        stepper = Lanes(objective, lanes, optimiser, execution)
        return milliseconds(lambda: stepper.step(inputs))

    times = {"eager": milliseconds(eager(nets, batches))}
    twins = [copy.deepcopy(net).to(memory_format=torch.channels_last) for net in nets]
    times["eager channels_last"] = milliseconds(eager(twins, [Batch(*pair) for pair in inputs]))
    times |= {execution: ours(execution) for execution in ("sequential", "stacked")}
    taken = choose(objective, lanes, optimiser, inputs)
    ratio = min(times["eager"], times["eager channels_last"]) / times[taken]
    row = {"model": name, "milliseconds": times, "auto": taken, "ratio": ratio}
    return row | {"target": f">= {target}", "met": ratio >= target}


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    archive.add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    measures: dict[str, Callable[[], Row]] = {
        "resnet18-w16": lambda: cpu("resnet18-w16", (3, 32, 32), 512, 9),
        "digits-cnn": lambda: cpu("digits-cnn", (1, 8, 8), 1280, 31),
    }
    if arguments.device == "cuda":
        measures = {
            name: partial(gpu, name, target) for name, target in (("resnet18-w16", 3.0), ("resnet18-pool", 2.5))
        }
    for name, measure in measures.items():
        print(f"measuring {name} on {arguments.device} ...", file=sys.stderr, flush=True)
        row = measure()
        rows.append(row)
        numbers = row.get("milliseconds") or {key: 1e3 * value for key, value in row["seconds"].items()}
        unit = "ms a step of six models" if "milliseconds" in row else "ms an epoch"
        shown = ", ".join(f"{key} {value:.2f}" for key, value in numbers.items())
        auto = f", auto takes {row['auto']}" if "auto" in row else ""
        verdict = "met" if row["met"] else "missed"
        told = f"ratio {row['ratio']:.3f} (target {row['target']}: {verdict})"
        print(f"{row['model']}: {shown} {unit}{auto}; {told}", flush=True)
    archive.write(arguments.archive, [row | {"limit": row["target"]} for row in rows], arguments.device)
    if arguments.json:
        machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
        head = {"device": arguments.device, "machine": machine, "torch": torch.__version__, "threads": 1}
        arguments.json.write_text(json.dumps(head | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
