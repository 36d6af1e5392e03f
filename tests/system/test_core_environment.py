"""The wheel in an environment with the core dependencies alone: every command works, or names the extra it needs."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
OPTIONAL = ("triton", "opacus", "flwr", "ray", "optuna", "skimage", "hypothesis", "pytest", "playwright")
KINDS = ("attacks", "defenses", "pruners", "base-prunings", "submodels", "models", "datasets", "studies")
TINY = "--set train.epochs=2 --set finetune.epochs=1"
ROUNDS = "--data digits --rounds 2 --clients 3"
RUNS = {
    "audit": f"audit {TINY} --shadows 1 --pruner l1-unstructured --attack conf",
    "invert": "invert --attack ig --iterations 20 --targets 1 --defense none,dgp",
    "federate": f"federate {ROUNDS} --model digits-cnn --per-round 2 --batch-size 8 --local-steps 1 "
    "--base-pruning snip --attack sgi --iterations 5 --membership yeom",
    "submodels": f"federate {ROUNDS} --submodels mapp-fl --large-clients 1 --attack yeom",
    "study": "reproduce dgp-fig2 --scale tiny",
}
MISSING = {
    "sweep sweep.yaml": ("ray", "ray"),
    f"federate {ROUNDS} --per-round 2 --engine flower": ("flwr", "flower"),
    "invert --defense dp": ("opacus", "dp"),
    "audit --defense dp-sgd": ("opacus", "dp"),
    "audit --set execution=ray": ("ray", "ray"),
}
PYTHON = """
import torch
from torch import nn

import secateur

rng = torch.Generator().manual_seed(0)
inputs, labels = 2 * torch.rand(80, 1, 8, 8, generator=rng) - 1, torch.arange(80) % 10

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

sides = [(inputs[rows], labels[rows]) for rows in torch.arange(80).split(20)]
report = secateur.audit(net(), *sides[:2], shadows=[(net(), *sides[2:])], attacks=["conf"])
assert 0 <= report.value("auc", "conf") <= 1
report.write("python-audit.html")
found = secateur.invert(net(), (inputs[:1], labels[:1]), "ig", batch_size=1, mean=[0.5], std=[0.5], iterations=5)
assert found.rows
found.write("python-invert.html")
pixels = {"mean": [0.5], "std": [0.5]}
assert secateur.federate(net(), (inputs, labels), clients=2, rounds=1, attack="ig:iterations=2", **pixels).rows
"""


class Environment:
    """A virtual environment with Secateur's wheel and nothing else, and a folder to work in."""

    def __init__(self, folder, wheel):
        self.folder, self.bin = folder / "work", folder / "venv" / "bin"
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=True)
        install = ["install", "--quiet", "--disable-pip-version-check", "--no-compile", "-c", ROOT / "constraints.txt"]
        done = self.run("python", "-m", "pip", *install, wheel)  # most modules of torch are never imported
        assert done.returncode == 0, done.stderr

    def run(self, program, *arguments):
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SECATEUR"))}
        own |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        command = [self.bin / program, *arguments]
        return subprocess.run(command, cwd=self.folder, env=own, capture_output=True, text=True, timeout=550)

    def secateur(self, line):
        return self.run("secateur", *line.split())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist and the wheel of the tracked files; nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("build")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def core(distributions, tmp_path_factory):
    (wheel,) = distributions.glob("*.whl")
    environment = Environment(tmp_path_factory.mktemp("core"), wheel)
    assert not environment.bin.is_relative_to(ROOT)
    (environment.folder / "sweep.yaml").write_text("job: invert\nattack: ig\nseeds: 2\n")
    return environment


def test_the_wheel_and_the_sdist_are_whole(distributions):
    (wheel,), (sdist,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    assert wheel.name.startswith(f"secateur_audit-{VERSION}-") and sdist.name == f"secateur_audit-{VERSION}.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files <= packed
    assert "secateur/py.typed" in packed
    for suffix in (".html.j2", ".css", ".js"):
        assert any(name.endswith(suffix) for name in packed)
    assert all(name.startswith(("secateur/", f"secateur_audit-{VERSION}.dist-info/")) for name in packed)
    with tarfile.open(sdist) as archive:
        assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= {
            name.partition("/")[2] for name in archive.getnames()
        }


def test_no_optional_package_is_there(core):
    code = f"import importlib.util; print(*[name for name in {OPTIONAL} if importlib.util.find_spec(name)])"
    done = core.run("python", "-c", code)
    cuda = core.run("python", "-c", "import torch; print(torch.version.cuda)").stdout != "None\n"
    assert set(done.stdout.split()) <= ({"triton"} if cuda else set()), done.stderr  # torch for CUDA brings Triton
    located = core.run("python", "-c", "import secateur; print(secateur.__file__)").stdout
    assert located.startswith(str(core.bin.parent))
    checked = core.run("python", "-m", "pip", "check", "--disable-pip-version-check")
    assert checked.returncode == 0, checked.stdout


def test_the_version(core):
    assert core.secateur("--version").stdout == f"{VERSION}\n"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_rows_and_a_page(core, name):
    done = core.secateur(f"{RUNS[name]} --out runs/{name}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (core.folder / "runs" / name / "results.jsonl").read_text().splitlines()]
    assert rows
    page = core.folder / "runs" / name / "report.html"
    assert "<style>" in page.read_text() and page.stat().st_size > 100_000  # the page holds its own plots and styles
    if name == "audit":
        again = core.secateur(f"report runs/{name} --out page.html")
        assert again.returncode == 0, again.stderr
        assert (core.folder / "page.html").stat().st_size > 100_000


def test_a_pruned_model(core):
    done = core.secateur(f"prune {TINY} --out model.safetensors")
    assert done.returncode == 0, done.stderr
    code = "import secateur; secateur.load_pruned('model.safetensors')"
    done = core.run("python", "-c", code)
    assert done.returncode == 0, done.stderr


def test_lists_of_every_kind(core):
    code = f"from secateur.cli import main; print([int(main(['list', kind])) for kind in {KINDS}])"
    done = core.run("python", "-c", code)
    assert done.stdout.splitlines()[-1] == str([0] * len(KINDS)), done.stderr


@pytest.mark.parametrize("line", MISSING)
def test_what_needs_an_extra_names_it(core, line):
    package, extra = MISSING[line]
    done = core.secateur(line)
    sentence = f"secateur: {package}: is not installed; install it with: pip install 'secateur-audit[{extra}]'\n"
    assert (done.returncode, done.stderr) == (2, sentence)


def test_from_python(core):
    done = core.run("python", "-c", PYTHON)
    assert done.returncode == 0, done.stderr
    assert all((core.folder / f"python-{name}.html").exists() for name in ("audit", "invert"))


def test_the_newest_typer_keeps_exit_codes(core, tmp_path):
    """Newer typers carry a copy of click, whose errors are other classes."""
    done = core.run("python", "-m", "pip", "install", "--quiet", "--target", tmp_path / "newest", "typer")
    assert done.returncode == 0, done.stderr
    for line, code in (("audit --spasity .5", 2), ("adit", 2), (f"{RUNS['audit']} --set limits.auc=0", 1)):
        program = (
            f"import sys; sys.path.insert(0, {str(tmp_path / 'newest')!r}); from secateur.cli import entry; entry()"
        )
        done = core.run("python", "-c", program, *line.split(), *(["--out", "limited"] if code == 1 else []))
        assert done.returncode == code, done.stderr
