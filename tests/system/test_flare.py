"""Filters of NVIDIA FLARE in its simulator: they rewrite updates, say what they changed, and fail closed."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
APP = Path(__file__).with_name("flare_app")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with nvflare: this one, or a new environment that also sees this one's packages."""
    if importlib.util.find_spec("nvflare") is not None:
        return sys.executable
    folder = tmp_path_factory.mktemp("flare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=200)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [folder / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt", "nvflare>=2.8"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install nvflare: {done.stderr.strip().splitlines()[-1]}")
    return str(folder / "bin" / "python")


@pytest.mark.timeout(900)
def test_filters_rewrite_updates_and_fail_closed(python, tmp_path):
    source = Path(importlib.util.find_spec("secateur").origin).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{APP}", "OMP_NUM_THREADS": "1"}
    command = [python, str(APP / "run.py"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=500, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    seen = {site: [] for site in ("site-1", "site-2", "site-3", "site-4")}
    for one in json.loads((tmp_path / "seen.json").read_text()):
        seen[one["client"]].append(one)
    assert all(len(rounds) == 2 for rounds in seen.values())
    assert all(not one["dxo"] and one["code"] == "TASK_RESULT_FILTER_ERROR" for one in seen["site-4"])

    plain, first, again = (flat(one) for one in (seen["site-3"][0], *seen["site-1"]))
    assert 0.15 < float((first != 0).double().mean()) < 0.25 and bool(torch.isin(first[first != 0], plain).all())
    assert not torch.equal(first, again)  # the residual of the first round is in the second
    weights = flat(seen["site-2"][0]) - begun()
    assert 0.15 < float((weights != 0).double().mean()) < 0.25
    assert torch.allclose(weights[weights != 0], plain[weights != 0], atol=1e-6)

    assert (
        "noise:sigma=0: cosine of the update (2242 values) and of what is sent 1.000000; this defense does nothing"
        in said
    )
    assert "dgp:k1=0.05:k2=0.75+error-feedback: cosine of the update (2242 values) and of what is sent 0.6" in said
    assert "this defense does nothing" not in "".join(line for line in said.splitlines() if "dgp" in line)
    assert (tmp_path / "site-2" / "report.html").exists()


def flat(one):
    """All numbers that the server received from a client, in the network's order."""
    return torch.cat([torch.tensor(values) for values in one["values"].values()])


def begun():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [torch.nn.Conv2d(1, 12, 5, padding=2, stride=2), torch.nn.Sigmoid(), torch.nn.Flatten()]
        net = torch.nn.Sequential(*parts, torch.nn.Linear(192, 10))
    return torch.cat([value.detach().flatten() for value in net.state_dict().values()])
