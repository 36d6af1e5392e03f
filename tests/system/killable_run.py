"""A run to be killed: chains of stages with seeded tensors, and a row for each."""

import time
from pathlib import Path

import torch

from secateur.runs.artifacts import Result
from secateur.runs.folder import open_run
from secateur.runs.rows import Row


def train(seed: int, pause: float) -> Result:
    time.sleep(pause)
    rng = torch.Generator().manual_seed(seed)
    return Result({"weight": torch.randn(200, 30, generator=rng)}, {"epochs": 3 + seed})


def prune(model: Result, sparsity: float) -> Result:
    weight = model.tensors["weight"]
    return Result({"weight": weight * (weight.abs() > weight.abs().quantile(sparsity))})


def work(folder: Path, models: int = 15, pause: float = 0.01) -> None:
    """Two stages per model: all are trained as many at once, then each is pruned."""
    with open_run(folder, "audit", {"models": models}, seeds=range(models)) as run:
        print("open", flush=True)
        depends = [{"seed": seed} for seed in range(models)]
        start = time.perf_counter()
        trained = run.stages("train", depends, lambda missing: ((seed, train(seed, pause)) for seed in missing))
        seconds = time.perf_counter() - start
        for seed, model in enumerate(trained):
            pruned = run.stage("prune", {"model": model.key, "sparsity": 0.5}, lambda m=model: prune(m, 0.5))
            common = {"model": "linear", "dataset": "noise", "sparsity": 0.5, "seed": seed}
            value = float(pruned.tensors["weight"].norm())
            run.add([Row(**common, metric="norm", value=value, extra={"epochs": model.data["epochs"]})])
            run.add([Row(**common, metric="seconds", value=seconds, timing=True)])
            time.sleep(pause)
