"""breaching (PyPI 0.1.2) on problems of ours, in an environment of its own: its pictures and its seconds.

    python benchmarks/breaching_peer.py PROBLEM.pt OUT.pt

PROBLEM.pt holds a network of ours by name, its state, the gradients, labels and starts of some targets, and the
settings of IG. benchmarks/invert.py writes it and calls this file; it may be called by hand on another machine.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("breaching==0.1.2", "hydra-core<1.4", "omegaconf<2.5", "antlr4-python3-runtime==4.9.3")
FOLDER = Path(__file__).parent.parent / ".venv" / "breaching"


def environment(folder: Path = FOLDER) -> Path:
    """The peer's packages in a folder of their own, beside the project's and not in its way; installed once."""
    if not (folder / "breaching").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *PACKAGES, "torchvision"], check=True)
    return folder


def load(folder: Path) -> Any:
    """Import breaching; torchvision's published build wants two operators that a CPU build of torch does not have."""
    sys.path.append(str(folder))
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        load.library = library  # type: ignore[attr-defined]  # it is gone when nobody holds it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import breaching  # type: ignore[import-not-found]
    return breaching


class Peer:
    """breaching's IG on one network."""

    def __init__(self, problem: dict[str, Any], breaching: Any) -> None:
        from secateur.models.create import create

        self.problem = problem
        net = create(problem["model"], problem["input_shape"], problem["classes"], torch.Generator())
        net.load_state_dict(problem["state"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = breaching.get_attack_config("invertinggradients")
        config.optim.max_iterations = problem["iterations"]
        config.regularization.total_variation.scale = problem["total_variation"]
        config.optim.callback = 10**9
        self.setup = {"device": torch.device(problem["device"]), "dtype": torch.float}
        self.net = net.eval().to(self.setup["device"])
        self.attacker = breaching.attacks.prepare_attack(
            self.net, torch.nn.CrossEntropyLoss(), config, {"device": self.setup["device"], "dtype": torch.float}
        )

    def reconstruct(self, target: int) -> Tensor:
        """Its pictures of one target, from our start."""
        p = self.problem
        names = [name for name, _ in self.net.named_parameters()]
        metadata = SimpleNamespace(
            shape=p["input_shape"], mean=p["mean"], std=p["std"], modality="vision", classes=p["classes"]
        )
        payload = {
            "parameters": [value.detach().clone() for value in self.net.parameters()],
            "buffers": [value.detach().clone() for value in self.net.buffers()],
            "metadata": metadata,
        }
        labels = p["labels"][target].to(self.setup["device"])
        shared = {
            "gradients": [p["gradients"][target][name].to(self.setup["device"]) for name in names],
            "buffers": None,
            "metadata": {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None},
        }
        start = p["starts"][target].to(self.setup["device"])
        found, _ = self.attacker.reconstruct([payload], [shared], {}, initial_data=start)
        return found["data"].cpu()  # type: ignore[no-any-return]


def main() -> None:
    """Reconstruct every target of a problem's file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the peer's packages are or go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problem = torch.load(arguments.problem, weights_only=True)
    peer = Peer(problem, load(environment(arguments.folder)))
    pictures, cpu, wall = [], [], []
    for target in range(len(problem["labels"])):
        print(f"breaching: target {target + 1} of {len(problem['labels'])} ...", file=sys.stderr, flush=True)
        before = time.process_time(), time.perf_counter()
        pictures.append(peer.reconstruct(target))
        cpu.append(time.process_time() - before[0])
        wall.append(time.perf_counter() - before[1])
        print(f"breaching: {cpu[-1]:.2f} CPU seconds, {wall[-1]:.2f} s", file=sys.stderr, flush=True)
        torch.save({"pictures": torch.stack(pictures), "cpu": cpu, "wall": wall}, arguments.out)


if __name__ == "__main__":
    main()
