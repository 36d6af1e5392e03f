"""Everything that reads inputs of others: a few mutated inputs each; tests/fuzz.py tries as many as one asks."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import build_targets
from mutation import case_of, try_case
from secateur.runs.folder import open_run

sys.path.insert(0, str(Path(__file__).parent / "report"))
from audited import audit_rows, figures_of

pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = 5  # targets of a test, so that all take seconds


def audit_bundle(folder):
    """A small audit as one JSON of its files."""
    rows = audit_rows()
    with open_run(folder, "audit", {"model": "digits-cnn", "limits": {"auc": 0.6}}, seeds=[0]) as run:
        run.add(rows)
        run.show(figures_of(rows))
    names = ("results.jsonl", "groups.jsonl", "figures.jsonl", "config.yaml", "run.json")
    return json.dumps({name: (folder / name).read_text() for name in names}).encode()


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    return build_targets(folder, [audit_bundle(folder / "run")])


def test_the_inputs_that_are_mutated_are_right(targets):
    for target in targets:
        for seed in target.seeds:
            assert try_case(target, seed) == "read", target.name


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(10, 10**9))
def test_a_mutated_input_is_read_or_refused(targets, part, number):
    for target in targets[part::PARTS]:
        if target.share > 2 or number % 10 == 0:  # the slow ones more rarely
            try_case(target, case_of(target, 0, number))
