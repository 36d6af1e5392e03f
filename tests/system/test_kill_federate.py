"""A federation killed at many random moments goes on at its last saved round and ends with the same rows."""

import random
import shutil

import pytest
from killable import KillableCommand
from killing import finished, killed
from safetensors import safe_open

from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

pytestmark = pytest.mark.system

SAVED = "unfinished/*.safetensors"
SETTINGS = ["--model", "lenet-zhu", "--rounds", "60", "--clients", "8", "--per-round", "4", "--local-steps", "2"]
SETTINGS += ["--batch-size", "4", "--base-pruning", "random,prunefl", "--defense", "pseudo-largest"]
SETTINGS += ["--attack", "ig:iterations=10", "--attack-every", "20", "--set", "faults.drop_out=.1"]
SETTINGS += ["--attack-clients", "2", "--attack-history", "2", "--membership", "yeom,lira"]
SUBMODELS = ["--submodels", "fdropout,local", "--rounds", "30", "--clients", "8", "--partition", "iid"]
SUBMODELS += ["--batch-size", "32", "--defense", "none", "--attack", "yeom", "--attack-history", "3"]
SUBMODELS += ["--evaluate-every", "10", "--set", "examples=400"]

LEARNT = ["--model", "lenet-zhu", "--rounds", "40", "--clients", "8", "--per-round", "4", "--local-steps", "2"]
LEARNT += ["--batch-size", "4", "--base-pruning", "prunefl:every=16:iterations=16:samples=20"]
LEARNT += ["--defense", "priprune:sharing=.02:step=.1", "--attack", "sgi:iterations=10:follows=true"]
LEARNT += ["--attack-every", "20", "--set", "faults.drop_out=.1"]
STATES = (".logits.", ".first.", ".second.", ".turns", ".withheld.", ".saved.")  # of PriPrune's clients


def start(folder, settings):
    return KillableCommand("federate", "--out", str(folder), *settings)


def names(kept):
    """The tensors in a file that have something in them."""
    with safe_open(kept, "pt") as file:
        return {name for name in file.keys() if file.get_tensor(name).any()}  # noqa: SIM118


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("settings", "attacked", "keeps"),
    [
        (SETTINGS, {20, 40, 60}, ("client.", "server.mask.")),
        (SUBMODELS, {30}, ()),
        (LEARNT, {20, 40}, ("client.", "server.squares.", *STATES)),
    ],
)
def test_killed_many_times_and_still_the_same_rows(tmp_path, settings, attacked, keeps):
    finished(start(tmp_path / "whole", settings))
    whole, folder = select_comparable(load_rows(tmp_path / "whole")), tmp_path / "killed"
    assert {row["round"] for row in whole if row["attack"] is not None} == attacked

    moments, kills, missing = random.Random(0), 0, set(keeps)
    while kills < 4 or missing:  # states come and go with the rounds: each was once what a federation went on from
        assert kills < 40, missing
        if killed(start(folder, settings), folder, SAVED, moments):
            kills += 1
            kept = {name for path in folder.glob(SAVED) for name in names(path)}
            missing = {part for part in missing if not any(part in name for name in kept)}
        else:  # it got through: compare, and begin anew for the kills that are left
            assert select_comparable(load_rows(folder)) == whole
            shutil.rmtree(folder)
    finished(start(folder, settings))
    assert select_comparable(load_rows(folder)) == whole
    assert not (folder / "unfinished").exists()
