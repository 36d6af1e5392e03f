"""Recipes over a Ray cluster: workers compute the stages of recipes, and the run's folder gets their files.

A worker has a folder of its own, with the stages that the run has so far. It measures one recipe there and returns the
files that are new. The search then measures the recipe itself and finds every stage done, so that its rows are those of
a search without workers. A worker reads the data by the run file, as the pieces of a sweep do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from secateur.config import SearchFields
from secateur.errors import WrongInput
from secateur.gpu.determinism import deterministic
from secateur.progress import progress
from secateur.runs.artifacts import write
from secateur.runs.folder import Run
from secateur.training.ray import connected

OF_RECIPES = ("prune-", "reshape-", "attack-", "portrait-")  # stages of single recipes, which no other one needs
Spread = Callable[[Sequence[Any], int], None]  # (recipes, rung)
Files = Mapping[str, bytes]  # of stages, by name


@contextmanager
def opened_spread(
    config: SearchFields, run: Run, address: str | None, prepare: Callable[[SearchFields], Any]
) -> Iterator[Spread | None]:
    """Yield the function that measures recipes of one generation on a cluster; None without an address.

    `prepare` makes a search ready on a worker. A worker that fails or dies leaves its recipe to the search, which
    measures it here.
    """
    if address is None:
        yield None
        return
    gpus = int(getattr(config, "device", "cpu").startswith("cuda"))
    with connected(address) as ray:
        job: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1)(measure_elsewhere)

        def spread(recipes: Sequence[Any], rung: int) -> None:
            stages = {k: v for k, v in read_stages(run.folder).items() if not k.startswith(OF_RECIPES)}
            known = ray.put(stages)
            running = [job.remote(prepare, config, recipe, rung, known) for recipe in recipes]
            with progress(f"{len(recipes)} recipes on {address}", len(recipes), unit="recipes") as advance:
                while running:
                    ended, running = ray.wait(running)
                    for one in ended:
                        try:
                            keep_stages(run.folder, ray.get(one))
                        except ray.exceptions.RayError:  # the search measures it itself, and names its error
                            continue
                        finally:
                            advance(1)

        yield spread


def measure_elsewhere(
    prepare: Callable[[SearchFields], Any], config: SearchFields, recipe: Any, rung: int, known: Files
) -> Files:
    """Measure a recipe in a folder of this machine; return the stages that were not known."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="secateur-") as name:
        folder = Path(name)
        (folder / "artifacts").mkdir()
        keep_stages(folder, known)
        with deterministic(getattr(config, "deterministic", False)), suppress(WrongInput):  # such as a loss of NaN
            prepare(config).open(Run(folder)).assess(0, recipe, rung)
        return {name: content for name, content in read_stages(folder).items() if name not in known}


def read_stages(folder: Path) -> dict[str, bytes]:
    """Return the finished stages of a run by the names of their files."""
    return {path.name: path.read_bytes() for path in sorted((folder / "artifacts").glob("*.safetensors"))}


def keep_stages(folder: Path, files: Files) -> None:
    """Write stages into a run's folder, each completely or not at all; refuse a name that leads out of it."""
    for name, content in files.items():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WrongInput("address", f"a worker names the file {name!r}, which is no stage; check the cluster")
        write(folder / "artifacts" / name, content)
