"""The notebooks of examples/notebooks run from their first cell to their last, each in a process and a folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NEEDS = {"onnx-int8": ("onnxruntime", "onnx", "onnxscript"), "flower-app": ("flwr", "ray")}
RUN = """
import json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"))
"""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    missing = [name for name in NEEDS.get(path.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"left out: {missing[0]} is not installed")
    alone = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, path], cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_there_are_five():
    assert len(list(FOLDER.glob("*.ipynb"))) == 5
