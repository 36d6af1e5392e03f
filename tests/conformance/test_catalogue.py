"""Every method keeps the catalogue's promises, and adding a file adds a method everywhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import secateur
from secateur import catalogue
from secateur.attacks.inversion.adaptive import settings_of_mode
from secateur.config import FEDERATED, UPDATES
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import (
    AGAINST_SUBMODELS,
    list_modes,
    name_missing_clients,
    name_missing_members,
    name_unmet,
)
from secateur.report.method_sheet import describe_cost, describe_meanings, describe_method, describe_threat

ALL = [(kind, name) for kind in catalogue.PACKAGES for name in catalogue.methods(kind)]

NEW = '''"""A pruner of somebody's own."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.catalogue import method


@method("pruner", "mine", "-")
@dataclass(frozen=True)
class Mine:
    """Prunes what I like."""

    taste: float = 0.5
'''


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_method_says_what_it_is(kind, name):
    entry = catalogue.find(kind, name)
    row = json.loads(json.dumps(entry.describe(), default=str))
    assert row["name"] == name and name == name.lower() and " " not in name
    assert row["paper"] in (*catalogue.PAPERS, "-"), "a paper of the project, or - for none"
    assert len(row["summary"]) > 20 and row["summary"].endswith((".", ")", ":")), "one line that says what it does"
    assert isinstance(row["defaults"], dict)


@pytest.mark.parametrize("name", catalogue.methods("defense"))
def test_every_defense_says_where_it_acts(name):
    entry = catalogue.find("defense", name)
    assert entry.info["acts_on"] in ("recipe", "loss", "fine-tuning", "training", *UPDATES, *FEDERATED)
    assert "Acts on:" in (entry.make.__doc__ or "")


@pytest.mark.parametrize("name", catalogue.methods("defense"))
def test_every_defense_names_the_strongest_attacker_known(name):
    entry = catalogue.find("defense", name)
    strongest = entry.info["strongest"]
    assert strongest == describe_method(entry.describe() | {"kind": "defense"})["strongest"] and len(strongest) < 120
    parts = {part for mode in entry.info.get("adaptive", ()) for part in mode.split("+")}
    assert all(part in strongest for part in parts), "every mode that the rows ask for is named"
    updates = entry.info["acts_on"] in (*UPDATES, *FEDERATED)
    assert not updates or parts or "the plain attack" in strongest, "or it says that no mode sees more"


@pytest.mark.parametrize("name", catalogue.methods("defense"))
def test_every_defense_says_which_known_attackers_it_did_not_meet(name):
    strongest, modes = catalogue.find("defense", name).info["strongest"], list_modes(name)
    knowing = [f"sgi:{settings_of_mode(mode)}" for mode in modes]
    assert name_unmet(name, ["ig", *knowing]) == ""
    assert name_unmet(name, ["ig"]).startswith("did not meet adaptive=") is bool(modes)
    kindest = name_missing_members(name, ["conf"])
    named = kindest.removeprefix("did not meet ")
    assert named in strongest or catalogue.find("defense", name).info["acts_on"] in (*UPDATES, *FEDERATED)
    assert name_missing_members(name, ["conf", "lira"], adaptive=True, in_out=16) == ""
    for weaker in ({"in_out": 0}, {"in_out": 8}):
        assert name_missing_members(name, ["rmia"], adaptive=True, **weaker) == kindest
    assert name_missing_members(name, ["rmia:mode=offline"], adaptive=True, in_out=16) == kindest
    unaware = name_missing_members(name, ["rmia"], in_out=16)
    assert unaware == (kindest if "--adaptive" in kindest else "")


def test_sub_models_name_the_shadow_federations_that_they_did_not_meet():
    assert name_missing_clients(["yeom"]) == f"did not meet {AGAINST_SUBMODELS}"
    assert name_missing_clients(["rmia"], federations=4) and not name_missing_clients(["yeom", "rmia"], federations=8)


def test_a_hyper_parameter_that_a_method_does_not_have_is_refused():
    with pytest.raises(WrongInput, match="did you mean 'strength'"):
        catalogue.find("defense", "ppb")(stength=1)


def test_a_name_belongs_to_one_file():
    with pytest.raises(WrongInput, match="snip"):
        catalogue.method("pruner", "snip", "-")(lambda: None)


def test_adding_a_file_adds_a_method_everywhere(tmp_path):
    source = Path(secateur.__file__).parent
    shutil.copytree(source, tmp_path / "secateur")  # with its compiled modules
    (tmp_path / "secateur" / "pruning" / "mine.py").write_text(NEW)
    commands = ["list", "pruners", "--json"], ["audit", "--pruner", "mine:tase=1"]
    code = f"import sys; from secateur.cli import main; sys.exit([main(command) for command in {commands}][1])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["mine"] == {"name": "mine", "summary": "Prunes what I like.", "paper": "-", "defaults": {"taste": 0.5}}
    assert "snip" in rows
    assert done.returncode == 2 and "did you mean 'taste'" in done.stderr


@pytest.mark.parametrize("kind", catalogue.PACKAGES)
def test_every_method_has_a_sheet_of_meanings_threat_and_cost(kind):
    for name, entry in catalogue.methods(kind).items():
        row = {"kind": kind} | entry.describe()
        assert not [parameter for parameter, text in describe_meanings(row).items() if not text], name
        assert describe_cost(row), name
        if kind not in ("model", "dataset", "study"):
            assert describe_threat(row), name
        if kind == "attack":
            assert re.search(r"models? (is|are) trained", describe_cost(row)) and "quer" in describe_cost(row), name
