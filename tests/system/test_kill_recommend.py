"""A search for recipes killed at random moments ends with the rows and the recipe of one that was never killed."""

import os
import random
import subprocess
import sys

import pytest
from killing import finished, killed

from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

pytest.importorskip("optuna")

SPACE = ["--pruner", "l1-unstructured,l1-structured", "--sparsity", ".5,.9", "--defense", "basic,ppb,mixed-distil"]
EFFORT = ["--shadows", "2", "--candidates", "6", "--finalists", "2", "--attack", "conf,lira"]
EPOCHS = ["--set", "train.epochs=8", "--set", "finetune.epochs=4", "--set", "examples=800"]


def start(folder):
    command = [sys.executable, "-m", "secateur", "recommend", "--out", str(folder), *SPACE, *EFFORT, *EPOCHS]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.mark.timeout(1200)
def test_killed_many_times_and_still_the_same_rows_and_recipe(tmp_path):
    finished(start(tmp_path / "whole"))
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    moments = random.Random(0)
    for _ in range(6):
        killed(start(folder), folder, "artifacts/*.safetensors", moments)
    finished(start(folder))
    assert select_comparable(load_rows(folder)) == select_comparable(load_rows(whole))
    assert (folder / "recipe.yaml").read_text() == (whole / "recipe.yaml").read_text()
