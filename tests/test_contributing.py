"""What CONTRIBUTING.md says is true: its three methods work as they stand."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"\*\*An? \w+\*\*: `(src/\S+\.py)`\n```python\n(.*?)```", GUIDE, re.DOTALL)
FLAGS = ["--pruner", "checkerboard", "--defense", "smooth", "--attack", "loudest", "--sparsity", ".5", "--shadows", "1"]


@pytest.fixture(scope="module")
def secateur(tmp_path_factory):
    """The command, run from a copy of the source that has the three files."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", copy / "src")  # with its compiled modules
    for path, text in EXAMPLES:
        assert not (copy / path).exists()
        (copy / path).write_text(text, encoding="utf-8")

    def run(*arguments):
        command = [sys.executable, "-m", "secateur", *arguments]
        environment = os.environ | {"PYTHONPATH": str(copy / "src")}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)

    return run


def test_each_kind_has_an_example():
    assert [Path(path).parent.name for path, _ in EXAMPLES] == ["membership", "pruning", "defenses"]


@pytest.mark.system
def test_the_three_examples_are_audited_as_they_stand(secateur):
    tiny = ["--set", "train.epochs=1", "--set", "finetune.epochs=1", "--json"]
    done = secateur("audit", *FLAGS, *tiny, "--out", "run")
    assert done.returncode == 0, done.stderr
    aucs = [row for row in json.loads(done.stdout) if row["metric"] == "auc" and row["pruner"] == "checkerboard"]
    assert aucs and all(row["value"] is not None for row in aucs)
    assert {(row["attack"], row["defense"]) for row in aucs} == {("loudest", "smooth")}


def test_the_lists_name_them(secateur):
    listed = secateur("list", "pruners", "--json")
    assert "Drops weights by position, whatever they are worth." in {
        row["summary"] for row in json.loads(listed.stdout)
    }
