"""Run the commands and Python blocks of every page in this environment, in a quick form.

    python .ci/readme.py                       # everything; what needs an extra that is missing must name the extra
    python .ci/readme.py --only-extras         # only what needs an extra
    python .ci/readme.py docs/howto/gate.md    # one page

Commands stand in fences, in indented blocks and in spans. Each is run here in a small size (`SMALL`, `QUICK`), by a
test (`ELSEWHERE`), or not at all for a reason (`NOT_RUN`); tests/test_pages.py fails for a line that has no rule, and
parses all of them. Lines run in a folder with the files that the pages presume. Data sets that are not embedded are
read from $SECATEUR_DATA; one that is not there is replaced by digits.

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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HISTORY = {"CHANGELOG.md", "docs/decisions.md", "docs/measurements.md", "docs/notebook.md"}  # commands of their time
PATTERNS = ("*.md", "docs/**/*.md", "results/*.md", ".github/**/*.md")
PAGES = [
    str(path.relative_to(ROOT))
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
    if str(path.relative_to(ROOT)) not in HISTORY
]
CODE = re.compile(
    r"^```(?P<kind>\w*)\n(?P<fence>.*?)^```$"
    r"|(?P<indented>(?:^ {4}[^\n]*\n)+)"
    r"|`(?P<span>(?:secateur|python|make|pip install) [^`\n]+)`",
    re.MULTILINE | re.DOTALL,
)
MENTION = re.compile(r"secateur [\w-]+( --[\w-]+)?")  # of a command or an option
RUN_FILE = "model: my_package.models:small_net"  # the beginning of the run file that is run
HERE = ".ci/readme.py"
ELSEWHERE = {  # "page: line" by a pattern; the file that runs it, and words of that file which show it
    r"docs/tutorial\.md: (?!pip|make)": ("tests/system/test_readme.py", '"tutorial.md"'),
    r"CONTRIBUTING\.md: python: ": ("tests/test_contributing.py", '"CONTRIBUTING.md"'),
    r"make demo$": (".ci/run", "\nmake demo\n"),
    r"make check$": (".ci/run", "\nmake check\n"),
    r"make test$": (".ci/run", "\nmake test\n"),
    r"make test-system$": (".ci/run", "\nmake test-system\n"),
    r"make \.venv/core$": (".ci/run", "\nmake .venv/core\n"),
    r"make site$": ("tests/system/test_readme.py", '"site.py"'),
    r"python (results/table|\.ci/words)\.py": ("Makefile", "$(BIN)/python results/table.py"),
    r"docs/deploy\.md: (openssl|printf|ssh-keygen|flower-super|flwr|\[superlink|address =|root-certificates =)": (
        "tests/system/test_flower_own_deployed.py",
        "deploy.md",
    ),
    r"docs/deploy\.md: export FLWR": ("tests/system/deploying.py", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"),
    r"python -m secateur\.federated\.flower\.nodes": ("tests/system/deploying.py", "secateur.federated.flower.nodes"),
    r"python examples/flower-strategies/simulate\.py": ("tests/system/test_flower_strategies.py", '"simulate.py"'),
    r"python: .*secateur\.federated\.flare": ("tests/system/flare_app/run.py", "UploadFilter"),
    r"secateur audit-app path/to/app --defense none,dgp": ("tests/system/test_app_audit.py", '"--defense none,dgp"'),
    r"secateur audit-app path/to/app --run-config": ("tests/system/test_app_audit.py", '"--run-config"'),
    r"secateur reproduce mapp-table5$": ("tests/system/test_studies.py", '"--scale", "tiny"'),
}
NOT_RUN = {  # and those that nothing runs, with the reason; their options are checked all the same
    r"pip install": "an index, or extras that .ci/run installs together",
    r"make bench": "half an hour of measurements",
    r"results/\S+: ": "a measurement: hours, a GPU, or another machine",
    r"python benchmarks/": "minutes of an idle machine, and a peer in an environment of its own",
    r"python tests/system/golden\.py": "it writes into the checkout",
    r"secateur \S+ .*--address": "a cluster of Ray",
    r"secateur report RUN\.\.\.": "it names any runs; docs/howto/runs.md has such a line that is run",
}
EXTRAS = {  # of what needs an extra: the package, and the extra that brings it; "" if the page has its pip install
    r"torch\.onnx\.export": ("onnxscript", ""),  # torch's own sentence names it
    r"^secateur sweep(?!.*--dry-run)": ("ray", "ray"),
    r"^secateur recommend": ("optuna", "search"),
    r"--defense \S*\bdp\b": ("opacus", "dp"),
    r"\.onnx": ("onnxruntime", "onnx"),
    r"int8": ("torchao", "compress"),
    r"--engine flower|audit-app|flower-quickstart|federated\.flower|ClientApp|Strategy\(": ("flwr", "flower"),
}
SMALL = {  # values of options, wherever a line has them
    "--rounds": "2",
    "--clients": "4",
    "--per-round": "4",
    "--targets": "1",
    "--restarts": "1",
    "--iterations": "2",
    "--rounds-before": "2",
    "--attack-at": "2",
    "--attack-every": "2",
    "--attack-history": "2",
    "--canaries": "20",
    "--seeds": "1",
    "--scale": "tiny",
}
TRAINING = "--set train.epochs=1 --set finetune.epochs=1"
QUICK = {  # options that make a line quick; the first pattern that fits is used
    r"secateur (list|report|gate|sweep|init)": "",  # sweep.yaml is tiny
    r"secateur prune": TRAINING,
    r"secateur reproduce dgp": "--set steps=ig --set defenses=none,dgp",
    r"secateur reproduce": "",
    r"secateur audit .*(--predictions|\.pt2|\.onnx|--weights \S+ (?!.*train))": "",
    r"secateur audit --model resnet": f"{TRAINING} --shadows 1 --set examples=200 --attack conf",
    r"secateur audit( |$)(?!.*(\.yaml|own\.npz|--data digits))": f"{TRAINING} --shadows 2 --set examples=400",
    r"secateur audit ": f"{TRAINING} --shadows 2 --sparsity .5 --seeds 1",
    r"secateur invert .*--update": "--iterations 2",
    r"secateur invert": "--targets 1 --iterations 2 --set examples=300",
    r"secateur federate .*--partition writer": "--rounds 2 --per-round 4 --iterations 2 --set examples=400",
    r"secateur federate --attack rob": "--rounds 2 --clients 4 --per-round 4 --set examples=400",  # has no iterations
    r"secateur federate .*--submodels": "--rounds 2 --set examples=400",
    r"secateur federate": "--rounds 2 --clients 4 --per-round 4 --iterations 2 --set examples=400",
    r"secateur recommend .*--updates": "--defense none,dgp --candidates 2 --finalists 1 --targets 1 --iterations 2",
    r"secateur recommend": f"{TRAINING} --shadows 1 --set examples=300 --attack conf --pruner l1-unstructured "
    "--sparsity .9 --defense basic --candidates 2 --finalists 1",
    r"secateur audit-app .*--dry-run": "",
    r"secateur audit-app \S+quickstart": "--clients 2 --attack-clients 1 --run-config rounds=1",
    r"secateur audit-app": "--clients 2 --attack-clients 1 --iterations 2 "
    "--run-config 'num-server-rounds=2 examples=2'",
    r"python": "--iterations 20",
}
WHOLE = "whole"  # the folder of a section that brings all that it needs
DECIDED = (0, 1, 3)  # exit codes where limits decide: a tiny run may leak, or show nothing
TINY = f"{TRAINING} --shadows 1 --pruner l1-unstructured --attack conf"
IN_RUN_FILE = {"my_package.models:small_net": "my_models:net", "images.npz": "own.npz"}
IN_LINES = {"path/to/app": str(ROOT / "tests" / "system" / "adam_app"), "--attack-clients 8": "--attack-clients 1"}
IN_LINES |= {"big.onnx": "net.onnx", "NAME": "lira", "RUN ": "runs/mine "}
IN_PYTHON = {", ...]": "]", '"paper"': "[0.1]", "iterations=500": "iterations=5"}
IN_PYTHON |= dict.fromkeys(("(1, 28, 28)", "(3, 32, 32)"), "(1, 8, 8)")  # of the presumed network
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
from secateur.interfaces import Batch

rng = torch.Generator().manual_seed(0)
data = load("digits").limit_rows(200, rng)
inputs, labels = torch.rand(2, 1, 8, 8, generator=rng) * 2 - 1, data.labels[:2]
members, nonmembers = ((data.inputs[rows], data.labels[rows]) for rows in (slice(0, 50), slice(50, 100)))
its_members, its_nonmembers = ((data.inputs[rows], data.labels[rows]) for rows in (slice(100, 150), slice(150, 200)))
model, shadow, net, network = make(), make(), make(), make
mean, std, batch = [0.5], [0.5], Batch(data.inputs[:8], data.labels[:8])
sent = DualGradientPruning().compress({name: torch.randn_like(value) for name, value in net.named_parameters()})
""",
}


FLOWER = """
import secateur.federated.flower
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from secateur.federated.flower import *
from secateur.interfaces import Knowledge
"""


@dataclass(frozen=True)
class Example:
    """A line or a Python block of a page, and the command that runs it quickly."""

    text: str  # as the page has it, a block by its first line
    command: list[str]
    remarks: tuple[str, ...] = ()
    folder: str = "."  # below the furnished one
    page: str = ""

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


@dataclass(frozen=True)
class Code:
    """A block or a span of a page: its language, which is empty for commands, and its text."""

    page: str
    kind: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The commands, without remarks; what a backslash breaks is one line. A Python block is one line."""
        if self.kind:
            return [f"python: {' '.join(self.text.split())}"] if self.kind == "python" else []
        whole = re.sub(r"\\\n\s*", " ", self.text).splitlines()
        return [words for line in whole if (words := " ".join(line.partition(" #")[0].split()))]

    def find_runner(self, line: str) -> str:
        """Return the file that runs a line, or the reason why none does; the line of a Python block begins "python: ".

        Raises:
            SystemExit: the line has no rule.
        """
        before = rf"({re.escape(self.page)}: )?"
        for pattern, rule in (ELSEWHERE | NOT_RUN).items():
            if re.match(before + pattern, f"{self.page}: {line}"):
                return rule if isinstance(rule, str) else rule[0]
        if line.split()[0] in ("secateur", "python", "python:", "cp"):
            return HERE
        raise SystemExit(f"{self.page}: no rule for the line: {line}; see ELSEWHERE and NOT_RUN in {HERE}")


def main() -> int:
    """Run the examples, print a line of each, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-extras", action="store_true", help="only what needs an extra")
    parser.add_argument("pages", nargs="*", default=PAGES, help="by default all pages")
    arguments = parser.parse_args()
    only_extras, sections = arguments.only_extras, list_sections(arguments.pages)
    failures, done = 0, set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.monotonic()
        blocks = (code.text for section in list_sections(["docs/howto/runs.md"]) for code in section)
        run_file = next(text for text in blocks if text.startswith(RUN_FILE))
        furnished = fork(lambda: furnish(folder, run_file), folder)
        assert furnished.returncode == 0, furnished.stderr
        print(
            f"furnished a folder with the files that the pages presume ({time.monotonic() - begun:.0f} s)", flush=True
        )
        for example in (one for section in sections for one in examples(section, folder)):
            if (only_extras and example.extra is None) or (example.text, example.folder) in done:
                continue
            done.add((example.text, example.folder))
            if (problem := run(example, folder / example.folder)) is not None:
                failures += 1
                print(f"--- {example.page}: {example.text}\n{problem}", file=sys.stderr, flush=True)
    print(f"{len(done)} run, {failures} failed", flush=True)
    return 1 if failures else 0


def list_sections(pages: list[str]) -> list[list[Code]]:
    """Return the blocks and commands of each section, in their order."""
    return [
        [
            Code(page, match["kind"] or "", match["fence"] or match["indented"] or match["span"])
            for match in CODE.finditer(section)
            if not MENTION.fullmatch(match["span"] or "")
        ]
        for page in pages
        for section in re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE)
    ]


def furnish(folder: Path, run_file: str) -> int:
    """Write the files that the lines of the pages name, and return 0."""
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
    torch.save(state_of(net), folder / "net.pt")
    for name in ("hospital-0", "hospital-1"):
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
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
    return 0


def export(net: Any, inputs: Any, path: Path) -> None:
    """Write a network as .pt2, and as .onnx; without the packages for ONNX that file is empty, and never read."""
    import torch

    torch.export.save(torch.export.export(net.eval(), (inputs,)), path.with_suffix(".pt2"))
    if importlib.util.find_spec("onnxscript"):
        torch.onnx.export(net, (inputs,), path.with_suffix(".onnx"), dynamo=True, dynamic_shapes=({0: "n"},))
    else:
        path.with_suffix(".onnx").touch()


def examples(section: list[Code], folder: Path) -> Iterator[Example]:
    """Yield a section's lines and Python blocks that are run here, in their order; its files are written before."""
    shown = {
        code.text.split()[1]: code.text
        for code in section
        if code.kind == "python" and re.match(r"# \w+\.py\n", code.text) and code.find_runner(code.lines[0]) == HERE
    }
    for name, text in shown.items():
        (folder / WHOLE).mkdir(exist_ok=True)
        (folder / WHOLE / name).write_text(text)
    for code in section:
        for words in (words for words in code.lines if code.find_runner(words) == HERE):
            if not code.kind:
                whole = [secateur(), *shlex.split(words)[1:]]
                yield Example(words, whole, (), WHOLE, code.page) if shown else line(words, code.page)
            elif code.text not in shown.values():
                yield whole_block(code) if shown else block(code)


def whole_block(code: Code) -> Example:
    """Return a Python block that stands for itself."""
    first = next(line for line in code.text.splitlines() if "secateur." in line)
    return Example(f"python: {first} ...", [sys.executable, "-c", code.text], (), WHOLE, code.page)


def block(code: Code) -> Example:
    """Return a Python block, with the names that the text around it presumes."""
    text = code.text
    for ours, theirs in IN_PYTHON.items():
        text = text.replace(ours, theirs)
    before = "from presumed import *\n"
    if re.search(r"ClientApp|Strategy\(", text):
        before += FLOWER
    first = next(line for line in code.text.splitlines() if line and not line.startswith(("import", "from")))
    return Example(f"python: {first} ...", [sys.executable, "-c", before + text], (), ".", code.page)


def line(text: str, page: str) -> Example:
    """Return a command line in its quick form."""
    written = text
    for ours, theirs in IN_LINES.items():
        written = written.replace(ours, theirs)
    words, remarks = shlex.split(written), []
    if words[0] == "cp":
        return Example(text, ["bash", "-c", written], (), ".", page)
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
        elif word in SMALL and value != SMALL[word]:
            words[place + 1] = SMALL[word]
            remarks.append(f"{word} {SMALL[word]}")
    quick = shlex.split(next(more for start, more in QUICK.items() if re.match(start, written)))
    pairs = [quick[place : place + 2] for place in range(0, len(quick), 2)]
    added = [word for pair in pairs if pair[0] == "--set" or pair[0] not in words for word in pair]
    words[0] = secateur() if words[0] == "secateur" else sys.executable
    return Example(text, [*words, *added], (*remarks, *([" ".join(added)] if added else [])), ".", page)


def run(example: Example, folder: Path) -> str | None:
    """Run an example and print a line of it; return the reason if it failed."""
    from secateur.errors import install_command

    begun = time.monotonic()
    done = execute(example.command, folder)
    remarks = [f"with {', '.join(example.remarks)}"] if example.remarks else []
    if example.missing is None:
        decides = re.match(r"secateur (gate|recommend|audit \S+\.yaml)", example.text)
        passed = done.returncode in (DECIDED if decides else (0,))
    else:
        package, extra = example.missing
        named = f"the extra {extra}" if extra else package
        sentence = f"No module named '{package}'"
        if extra:
            sentence = f"{package}: is not installed; install it with: {install_command(extra)}"
        code = 2 if example.command[0] == secateur() else 1  # a script ends with a traceback
        passed = done.returncode == code and sentence in done.stderr
        remarks.append(f"names {named}" if passed else f"does not name {named}")
    told = f" ({'; '.join(remarks)})" if remarks else ""
    print(f"{'ok' if passed else 'FAILED'} {time.monotonic() - begun:.1f} s: {example.text}{told}", flush=True)
    return None if passed else f"exit code {done.returncode}\n{done.stderr}"


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; most in a fork of this process, which saves the seconds of their imports."""
    if command[0] == secateur() and not {"sweep", "audit-app", "flower"} & set(command):
        from secateur.cli import main as run_command

        return fork(lambda: int(run_command(command[1:])), folder)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def fork(function: Callable[[], int], folder: Path) -> subprocess.CompletedProcess[str]:
    """Call a function in a new process that works in a folder; its result is the exit code.

    This process itself computes nothing: autograd must not have started threads before a fork.
    """
    import torch  # noqa: F401  # here, so that a process that is forked has it

    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.chdir(folder)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                code = function()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([], code, output.read(), errors.read())


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
