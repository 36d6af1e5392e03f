"""The composite action and its example workflow, run by their shell steps as a build server would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"\$\{\{ inputs\.(\w+) \}\}")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOW = yaml.safe_load((ROOT / "examples/gate/workflow.yml").read_text())


def inputs_of(given):
    defaults = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()}
    assert not given.keys() - defaults.keys()
    return defaults | given


def run_steps(folder, given):
    """Run all steps of the action with bash; return the first exit code that is not 0."""
    values = inputs_of(given)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        named = {name: values[PLACE.fullmatch(text)[1]] for name, text in step["env"].items()}
        env = os.environ | named | {"PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "step_summary.md")}
        done = subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=folder, env=env, check=False)
        if done.returncode:
            return done.returncode
    return 0


def test_the_example_workflow_runs_and_decides(tmp_path):
    step = next(step for step in WORKFLOW["jobs"]["secateur"]["steps"] if "with" in step and "policy" in step["with"])
    given = {name: str(ROOT / value) for name, value in step["with"].items()} | {"package": ""}
    code = run_steps(tmp_path, given)
    summary = (tmp_path / "step_summary.md").read_text()
    assert code in (0, 1, 3) and summary == (tmp_path / "runs/secateur/summary.md").read_text()
    wanted = {0: "WITHIN", 1: "ABOVE", 3: "INCONCLUSIVE"}[code]
    assert f"### Secateur: {wanted}" in summary
    document = json.loads((tmp_path / "runs/secateur/secateur.sarif").read_text())
    assert document["runs"][0]["results"]
    again = {"config": "", "policy": str(tmp_path / "strict.yaml"), "baseline": "runs/secateur", "package": ""}
    (tmp_path / "strict.yaml").write_text("limits: {auc: 0.01}\n")
    assert run_steps(tmp_path, again) == 1


def test_a_wrong_run_file_ends_the_job(tmp_path):
    (tmp_path / "audit.yaml").write_text("modle: digits-cnn\n")
    (tmp_path / "policy.yaml").write_text("limits: {auc: 0.9}\n")
    assert run_steps(tmp_path, {"config": "audit.yaml", "policy": "policy.yaml", "package": ""}) == 2
    assert not (tmp_path / "step_summary.md").exists()
