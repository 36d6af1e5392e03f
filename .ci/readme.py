"""Runs what README and how-to pages show: `secateur` and `python examples/` lines and Python blocks, in a quick form.

    .venv/bin/python .ci/readme.py [--only-extras] [PAGE ...]

Any Python that has Secateur will do. A line that needs a missing extra must name it; with the extra it must work. The
work happens in a temporary folder that holds the files which the pages presume. `pip install` and `make` lines are
left out. Data sets that are not embedded are read from $SECATEUR_DATA; one that is not there is replaced by digits.

A section whose Python block begins with a file's name (`# my_models.py`) is whole: it brings all that its lines need.
It runs in a folder of its own, and its lines as they stand.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
RUN_FILE = "model: my_package.models:small_net"  # the beginning of the run file that is run
LEFT_OUT = ("pip install", "make ")
EXTRAS = {  # of what needs an extra: the package, and the extra that brings it
    r"^secateur sweep": ("ray", "ray"),
    r"^secateur recommend": ("optuna", "search"),
    r"--defense \S*\bdp\b": ("opacus", "dp"),
    r"\.onnx": ("onnxruntime", "onnx"),
    r"int8": ("torchao", "compress"),
    r"--engine flower|flower-quickstart|federated\.flower": ("flwr", "flower"),
}
QUICK = {  # what makes a line quick; the first that fits is added, and the others have --dry-run
    "secateur list": "",
    "secateur report": "",
    "secateur gate": "",
    "secateur sweep": "",  # sweep.yaml is tiny
    "secateur prune": "--set train.epochs=1 --set finetune.epochs=1",
    "secateur reproduce dgp": "--set steps=ig --set defenses=none,dgp",
    "secateur reproduce": "",  # the pages' own lines are tiny
    "secateur": "--dry-run",
    "python": "--iterations 20",
}
WHOLE = "whole"  # the folder of a section that brings all that it needs
DECIDED = (0, 1, 3)  # exit codes of a gate: the tiny run behind it may leak, or show nothing
TINY = "--set train.epochs=1 --set finetune.epochs=1 --shadows 1 --pruner l1-unstructured --attack conf"
IN_RUN_FILE = {"my_package.models:small_net": "my_models:net", "images.npz": "own.npz"}
IN_PYTHON = {", ...]": "]", '"paper"': "[0.1]", "iterations=500": "iterations=5"}
FILES = {
    "my_models.py": """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
""",
    "policy.yaml": "limits: {auc: .9}\n",
    "sweep.yaml": "job: invert\nattack: ig\niterations: 5\ntargets: 1\nseeds: 2\n",
    "presumed.py": """
import torch
import secateur
from my_models import net as make
from secateur.data.load import load
from secateur.defenses.dgp import DualGradientPruning

rng = torch.Generator().manual_seed(0)
data = load("digits").limit_rows(200, rng)
inputs, labels = torch.rand(2, 1, 8, 8, generator=rng) * 2 - 1, data.labels[:2]
members, nonmembers = ((data.inputs[rows], data.labels[rows]) for rows in (slice(0, 50), slice(50, 100)))
its_members, its_nonmembers = ((data.inputs[rows], data.labels[rows]) for rows in (slice(100, 150), slice(150, 200)))
model, shadow, net = make(), make(), make()
sent = DualGradientPruning().compress({name: torch.randn_like(value) for name, value in net.named_parameters()})
""",
}


@dataclass(frozen=True)
class Example:
    """A line or a Python block of a page, and the command that runs it quickly."""

    text: str  # as the page has it, a block by its first line
    command: list[str]
    remarks: tuple[str, ...] = ()
    folder: str = "."  # below the furnished one

    @property
    def missing(self) -> tuple[str, str] | None:
        """The package that it needs and that is not installed, with its extra."""
        needed = self.extra
        return None if needed is None or importlib.util.find_spec(needed[0]) else needed

    @property
    def extra(self) -> tuple[str, str] | None:
        """The package and the extra that it needs."""
        whole = " ".join([self.text, *self.command])
        return next((needed for pattern, needed in EXTRAS.items() if re.search(pattern, whole)), None)


def main() -> int:
    """Run the examples, print a line of each, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-extras", action="store_true", help="only what needs an extra")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="by default README and all how-to pages")
    arguments = parser.parse_args()
    only_extras, sections = arguments.only_extras, list_sections(arguments.pages)
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.monotonic()
        blocks = (block for section in list_sections(PAGES) for block in section)
        furnish(folder, next(text for _, text in blocks if text.startswith(RUN_FILE)))
        print(
            f"furnished a folder with the files that the pages presume ({time.monotonic() - begun:.0f} s)", flush=True
        )
        for example in (one for blocks in sections for one in examples(blocks, folder)):
            if only_extras and example.extra is None:
                continue
            if (problem := run(example, folder / example.folder)) is not None:
                failures.append(f"--- {example.text}\n{problem}")
    print(*failures, sep="\n", file=sys.stderr)
    print(f"{len(failures)} failed", flush=True)
    return 1 if failures else 0


def list_sections(pages: list[Path]) -> list[list[tuple[str, str]]]:
    """Return the blocks of code of each section, as language and text."""
    return [
        re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        for page in pages
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    ]


def furnish(folder: Path, run_file: str) -> None:
    """Write the files that the lines of the pages name."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from secateur.attacks.inversion.updates import gradient_update, weights_update
    from secateur.config import Invert
    from secateur.data.load import load
    from secateur.interfaces import Batch, Optimiser
    from secateur.models.create import create
    from secateur.training.optimisers import LocalSteps
    from secateur.tree import state_of

    for name, text in FILES.items():
        (folder / name).write_text(text)
    for ours, theirs in IN_RUN_FILE.items():
        assert ours in run_file, f"the run file has no {ours} any more"
        run_file = run_file.replace(ours, theirs)
    (folder / "audit.yaml").write_text(run_file)
    (folder / "examples").symlink_to(ROOT / "examples")
    rng, digits = torch.Generator().manual_seed(0), load("digits")
    pixels = digits.inputs[:600] * digits.std[0] + digits.mean[0]
    inputs, labels = pixels.clamp(0, 1), digits.labels[:600]
    scaling = {"mean": [0.0], "std": [1.0]}  # an untrained network knows its members in no scaling
    np.savez(folder / "own.npz", inputs=inputs.numpy(), labels=labels.numpy(), train_size=400, **scaling)
    probabilities = torch.rand(100, 10, generator=rng).softmax(1).numpy()
    np.savez(
        folder / "answers.npz", probabilities=probabilities, labels=labels[:100].numpy(), membership=np.arange(100) < 50
    )
    sys.path.insert(0, str(folder))
    from my_models import net as make  # type: ignore[import-not-found]

    net = make()
    for name in ("net", "sent"):
        save_file(state_of(net), folder / f"{name}.safetensors")
    update = gradient_update(net, state_of(net), Batch(inputs[:1], labels[:1]))
    save_file(update.values, folder / "captured.safetensors", metadata={"kind": "gradient"})
    for name in ("net", "small"):
        export(net, inputs[:1], folder / name)
    usual = create(Invert().model, digits.input_shape, digits.classes, rng)
    save_file(state_of(usual), folder / "trained.safetensors")
    state, step = state_of(usual), LocalSteps(((0,),), (0.001,), Optimiser("adam"))
    for number in (1, 2):
        save_file(state, folder / f"sent{number}.safetensors")
        state |= weights_update(usual, state, digits.batch.take(torch.tensor([number])), turn=step).values
        save_file(state, folder / f"got{number}.safetensors", metadata={"kind": "weights"})
    parts = {
        f"residual.{name}": torch.randn(value.shape, generator=rng) * 0.01 for name, value in usual.named_parameters()
    }
    save_file(parts, folder / "residual.safetensors")
    done = execute([secateur(), *shlex.split(f"audit {TINY} --out runs/mine")], folder)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "runs" / "mine", folder / "runs" / "other")


def export(net: Any, inputs: Any, path: Path) -> None:
    """Write a network as .pt2, and as .onnx; without the packages for ONNX that file is empty, and never read."""
    import torch

    torch.export.save(torch.export.export(net.eval(), (inputs,)), path.with_suffix(".pt2"))
    if importlib.util.find_spec("onnxscript"):
        torch.onnx.export(net, (inputs,), path.with_suffix(".onnx"), dynamo=True, dynamic_shapes=({0: "n"},))
    else:
        path.with_suffix(".onnx").touch()


def examples(blocks: list[tuple[str, str]], folder: Path) -> Iterator[Example]:
    """Yield a section's lines and Python blocks in their order; files that it shows are written before."""
    shown = {text.split()[1]: text for kind, text in blocks if kind == "python" and re.match(r"# \w+\.py\n", text)}
    for name, text in shown.items():
        (folder / WHOLE).mkdir(exist_ok=True)
        (folder / WHOLE / name).write_text(text)
    for kind, text in blocks:
        if kind == "python" and text not in shown.values():
            yield whole_block(text) if shown else block(text)
        elif not kind:
            for written in text.splitlines():
                if not written or written.startswith(LEFT_OUT):
                    continue
                words = " ".join(written.partition(" #")[0].split())
                yield Example(words, [secateur(), *shlex.split(words)[1:]], (), WHOLE) if shown else line(words)


def whole_block(text: str) -> Example:
    """Return a Python block that stands for itself."""
    first = next(line for line in text.splitlines() if "secateur." in line)
    return Example(f"python: {first} ...", [sys.executable, "-c", text], (), WHOLE)


def block(text: str) -> Example:
    """Return a Python block, with the names that the text around it presumes."""
    code = text
    for ours, theirs in IN_PYTHON.items():
        code = code.replace(ours, theirs)
    before = "from presumed import *\n"
    if "ClientApp" in code:
        before += "import secateur.federated.flower\nfrom flwr.clientapp import ClientApp\n"
    first = next(line for line in text.splitlines() if "secateur" in line and line != "import secateur")
    return Example(f"python: {first} ...", [sys.executable, "-c", before + code])


def line(text: str) -> Example:
    """Return a command line in its quick form."""
    words, remarks = shlex.split(text), []
    if words[0] not in ("secateur", "python"):
        raise SystemExit(f"no rule for the line: {text}")
    for place, word in enumerate(words[:-1]):
        value = words[place + 1]
        if word == "--data" and not value.endswith(".npz") and not is_here(value):
            words[place + 1] = "digits"
            remarks.append(f"digits for {value}")
        elif word == "--partition" and remarks:
            words[place + 1] = "dirichlet-labels"
            remarks.append(f"dirichlet-labels for {value}")
        elif word == "--device" and not has_gpu():
            words[place + 1] = "cpu"
            remarks.append(f"cpu for {value}")
    quick = next(more for start, more in QUICK.items() if text.startswith(start))
    words[0] = secateur() if words[0] == "secateur" else sys.executable
    if quick:
        remarks.append(quick)
    return Example(text, [*words, *shlex.split(quick)], tuple(remarks))


def run(example: Example, folder: Path) -> str | None:
    """Run an example and print a line of it; return the reason if it failed."""
    from secateur.errors import install_command

    begun = time.monotonic()
    done = execute(example.command, folder)
    remarks = [f"with {', '.join(example.remarks)}"] if example.remarks else []
    if example.missing is None:
        passed = done.returncode in (DECIDED if example.text.startswith("secateur gate") else (0,))
    else:
        package, extra = example.missing
        sentence = f"{package}: is not installed; install it with: {install_command(extra)}"
        code = 2 if example.command[0] == secateur() else 1  # a script ends with a traceback
        passed = done.returncode == code and sentence in done.stderr
        remarks.append(f"names the extra {extra}" if passed else f"does not name the extra {extra}")
    told = f" ({'; '.join(remarks)})" if remarks else ""
    print(f"{'ok' if passed else 'FAILED'} {time.monotonic() - begun:.1f} s: {example.text}{told}", flush=True)
    return None if passed else f"exit code {done.returncode}\n{done.stderr}"


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def secateur() -> str:
    """Return the command of this environment."""
    return str(Path(sys.executable).with_name("secateur"))


def is_here(name: str) -> bool:
    """True if a data set is embedded or lies in $SECATEUR_DATA."""
    from secateur.data.load import load
    from secateur.errors import WrongInput

    folder = os.environ.get("SECATEUR_DATA")
    try:
        load(name, folder or "nowhere", download=False)
    except WrongInput:
        return False
    return True


def has_gpu() -> bool:
    """True if there is a GPU."""
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
