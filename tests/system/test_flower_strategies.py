"""The example of an agreed defense, pruned models and sub-models: in Flower's simulation, and deployed with keys."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deploying import Deployment

pytestmark = pytest.mark.system

APP = Path(__file__).parents[2] / "examples" / "flower-strategies"
RESULT = r"(\w+): accuracy ([\d.]+), (\d+) updates as agreed, (\d+) breaches, (\d+) refusals"


def test_in_simulation():
    assert "    python examples/flower-strategies/simulate.py\n" in (APP.parents[1] / "docs" / "deploy.md").read_text()
    command = [sys.executable, str(APP / "simulate.py"), "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = {tuple(line[:1] + line[2:]): float(line[1]) for line in re.findall(RESULT, done.stdout)}
    assert set(results) == {
        ("pruned", "12", "0", "0"),
        ("submodels", "12", "0", "0"),
        ("whole", "9", "3", "0"),  # client 3 lost its mods
        ("whole", "0", "0", "12"),  # the run's config lacks the defense: nothing is trained, nothing is sent
    }, done.stdout
    trained = [accuracy for (model, *_), accuracy in results.items() if _ != ["0", "0", "12"]]
    assert min(trained) > 0.6 and results[("whole", "0", "0", "12")] < 0.3, done.stdout
    assert done.stdout.count("statement: is missing") == 3
    assert done.stdout.count("nothing is sent: secateur-defense: is not set") == 12


@pytest.mark.timeout(600)
def test_deployed_with_keys_of_the_nodes(tmp_path):
    """The run's config names the defense; the server knows the key of the first node only."""
    with Deployment(tmp_path) as flower:
        flower.superlink()
        flower.superexec()
        for place, name in enumerate(("first", "second")):
            flower.supernode(name, place, also=f'secateur-key="{tmp_path / name}"')
        config = {"rounds": 1, "model": "pruned", "secateur_defense": "dgp", "keys": str(tmp_path / "first.pub")}
        (run,) = set(re.findall(r"\d{15,}", flower.run(APP, **config)))
        ended = rf"Finished task \d+ of run {run}"
        flower.wait_for(lambda: re.search(ended, flower.said("superlink")), "the end of the run", 400)
        said = flower.flwr("log", run, "loop", "--show")
    assert re.search(RESULT, said).groups()[2:] == ("1", "1", "0"), said[-2000:]
    assert "signed by an unknown key" in said
