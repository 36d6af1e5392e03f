"""Secateur imports whole without any one of its optional packages, and without all of them.

`tests/system/test_core_environment.py` runs the commands where none of them is installed.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {"scikit-image": "skimage", "pytest-xdist": "xdist", "import-linter": "importlinter"}  # where names differ
WALK = '''
import importlib, json, os, pkgutil, sys, traceback

def walk(hidden):
    """Import the catalogue, the public names, the command line and the experiments, while some packages are hidden."""
    sys.modules.update(dict.fromkeys(hidden))
    from secateur import catalogue
    for kind in catalogue.PACKAGES:
        assert [method.describe() for method in catalogue.methods(kind).values()], kind
    import secateur
    for name in secateur.__all__:
        getattr(secateur, name)
    import secateur.cli, secateur.experiments
    for module in pkgutil.walk_packages(secateur.experiments.__path__, "secateur.experiments."):
        importlib.import_module(module.name)

class Recorder:
    """A finder that finds nothing, and records the packages that are asked for."""
    def __init__(self):
        self.names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])

def alone(hidden, write=None):
    """Walk in a child of this process, which has imported nothing of Secateur; return the child's exit status.

    The names of the packages that the walk asks for are written to a pipe.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        sys.meta_path.insert(0, recorder := Recorder())
        walk(hidden)
        if write is not None:
            os.write(write, json.dumps(sorted(recorder.names)).encode())
        os._exit(0)
    except BaseException:
        print(hidden, file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
'''


def modules(requirements):
    names = (re.match(r"[\w-]+", requirement).group() for requirement in requirements)
    return [MODULES.get(name, name.replace("-", "_")) for name in names]


def run(code, packages):
    done = subprocess.run([sys.executable, "-c", WALK + code, json.dumps(packages)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_all_optional_packages():
    packages = [name for requirements in EXTRAS.values() for name in modules(requirements)]
    assert {"triton", "opacus", "flwr", "ray", "optuna", "skimage", "hypothesis"} <= set(packages)
    run("walk(json.loads(sys.argv[1]))", packages)


@pytest.mark.system
def test_without_each_optional_package_in_turn():
    """Packages that are always there are imported once, before others are hidden; the test above hides them first.

    Triton is hidden first, as torch's compiler imports it and is most of the time of an import of Secateur. A package
    that nothing asks for is not hidden: that would change nothing.
    """
    packages = [name for extra, some in EXTRAS.items() if extra != "dev" for name in modules(some)]
    code = """
packages = json.loads(sys.argv[1])
import torch
assert not {"secateur", "triton", *packages} & set(sys.modules)
failed = [alone(["triton"])]
import jinja2, pydantic, rich.progress, scipy.signal, scipy.stats, torch._dynamo, typer, yaml
assert not {"secateur", *packages} & set(sys.modules)
read, write = os.pipe()
failed.append(alone([], write))
os.close(write)
asked = set(json.loads(os.read(read, 1 << 16)))
assert "secateur" in asked
sys.exit(any(failed + [alone([package]) for package in packages if package in asked]))
"""
    run(code, packages)
