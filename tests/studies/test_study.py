"""The engine of all studies: a page after any end, fields of a scale by their rules, steps and claims from data."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch

from secateur import catalogue, studies
from secateur.config import Audit, read
from secateur.errors import WrongInput
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.steps import Step
from secateur.studies.mapp.federations import cases_of
from secateur.studies.matrix.ground import MatrixStep
from secateur.studies.priprune.federations import Federations, values_of
from secateur.studies.samia import AuditStep
from secateur.studies.study import SIZES, Request, Scale, Study, read_scales, run_steps, scale_of

FIELDS = {  # of every kind
    "data": {"full": {}},
    "rounds": {"kind": "whole", "full": 3, "tiny": 2},
    "examples": {"kind": "whole", "full": None},
    "rate": {"kind": "number", "full": 0.5},
    "augment": {"kind": "switch", "full": None},
    "spare": {"kind": "whole", "full": 0, "least": 0},
    "pairs": {"kind": "whole", "full": 2, "least": 2, "even": True},
    "threads": {"kind": "whole", "full": 1},
    "units": {"kind": "several", "full": [8], "among": [8, 16]},
}
SIZE = Scale(**{name: rules["full"] for name, rules in FIELDS.items()})


@pytest.fixture
def fields(monkeypatch):
    """A paper of its own, whose scales have these fields."""
    monkeypatch.setattr("secateur.studies.study.read_data", lambda paper, name: FIELDS)
    monkeypatch.setattr("secateur.studies.study.read_scales", read_scales.__wrapped__)  # kept by no cache


def run(out, measure):
    request = Request("study", "tiny", {"data": "digits", "model": None}, [], out)
    return run_steps(request, SIZE, torch.device("cpu"), [0], measure, only={"bases": "snip"})


def one_row(run):
    run.add([Row(model="m", dataset="d", defense="none", seed=0, metric="test_accuracy", value=0.5, extra={})])


def fails(run):
    one_row(run)
    raise RuntimeError("in the middle")


def fails_at_once(run):
    raise RuntimeError("before any row")


def test_the_page_is_written_afterwards_and_the_changes_are_in_the_config(tmp_path):
    def measure(run):
        one_row(run)
        (run.folder / "unfinished").mkdir()

    torch.set_num_threads(2)
    assert (
        len(run(tmp_path, measure)) == 1
        and torch.get_num_threads() == SIZE.threads == 1
        and (tmp_path / "report.html").exists()
    )
    assert not (tmp_path / "unfinished").exists()
    config = (tmp_path / "config.yaml").read_text()
    assert "data: digits" in config and "bases: snip" in config and "units:" in config


def test_the_page_is_written_after_an_error_too_and_no_rows_yet_hide_no_error(tmp_path):
    with pytest.raises(RuntimeError, match="in the middle"):
        run(tmp_path / "some", fails)
    assert (tmp_path / "some" / "report.html").exists()
    with pytest.raises(RuntimeError, match="before any row"):
        run(tmp_path / "none", fails_at_once)
    assert not (tmp_path / "none" / "report.html").exists()


def test_no_page_goes_into_a_folder_that_is_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text("someone's")
    with pytest.raises(WrongInput, match="not the folder of a run"):
        run(tmp_path, one_row)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_fields_are_read_by_their_rules(fields):
    texts = ["rounds=4", "examples=9", "rate=1e-2", "augment=true", "spare=0", "pairs=6", "units=8+16"]
    size = scale_of("mine", "tiny", texts)
    assert (size.rounds, size.examples, size.rate, size.augment) == (4, 9, 0.01, True)
    assert (size.spare, size.pairs, size.units) == (0, 6, [8, 16])
    assert scale_of("mine", "full") == SIZE and scale_of("mine", "tiny") == SIZE.change(rounds=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data=x", "set: 'data=x' is not possible in this study; allowed: rounds, examples, rate, augment, spare"),
        ("rounds", "set: 'rounds' is not possible"),
        ("rounds=0", "rounds: 0 is not allowed; must be a whole number, at least 1"),
        ("rounds=true", "rounds: true is not allowed; must be a whole number, at least 1"),
        ("rate=few", "rate: nan is not allowed; must be above 0"),
        ("augment=1", "augment: '1' is not allowed; must be true or false"),
        ("spare=-1", "spare: -1 is not allowed; must be a whole number, at least 0"),
        ("pairs=3", "pairs: 3 is not allowed; must be an even number, at least 2"),
        ("units=8+9", "units: '8+9' is not allowed; use 8, 16, several joined by +"),
    ],
)
def test_wrong_fields_are_named(text, expected, fields):
    with pytest.raises(WrongInput) as error:
        scale_of("mine", "tiny", [text])
    assert str(error.value).startswith(expected)


PAPERS = ("dgp", "mapp", "priprune", "samia")
PACKAGES = (*PAPERS, "matrix")  # the matrix is no paper's


def test_every_study_has_a_title_and_a_table():
    studies_of = [studies.read_data(paper, "studies")["studies"] for paper in PACKAGES]
    titles = {name: study["title"] for known in studies_of for name, study in known.items()}
    assert titles == {name: entry.summary for name, entry in catalogue.methods("study").items()}
    for name, entry in catalogue.methods("study").items():
        study = entry.make()
        module, _, function = study.table.partition(":")
        assert callable(getattr(import_module(f"secateur.studies.{study.package}.{module}"), function)), name
        assert study.steps and study.package in PACKAGES


@pytest.mark.parametrize("scale", SIZES)
@pytest.mark.parametrize("name", catalogue.methods("study"))
def test_steps_of_every_study_can_be_read_at_every_scale(name, scale):
    study = catalogue.find("study", name).make()
    size = read_scales(study.package)[scale]
    if study.package == "dgp":
        assert all(step.defenses and step.model in read_scales("dgp")["full"].models for step in study.read_steps(Step))
    elif study.package == "mapp":
        assert all(case.unit in (8, 16, 32, 64) and case.attacks for case in cases_of(study, size))
    elif study.package == "priprune":
        assert all(step.bases and step.defenses for step in study.read_steps(Federations, **values_of(size)))
    elif study.package == "matrix":
        rows = [step.title for step in study.read_steps(MatrixStep, networks=size.networks[:1])]
        assert len(rows) == len(set(rows)) == 30
    else:
        (step,) = study.read_steps(AuditStep)
        assert read(Audit, None, step.settings(scale, {})).attack


@dataclass(frozen=True)
class Part:
    """A step of a study."""

    bases: tuple[str, ...] = ("none",)
    data: str = "digits"
    size: int = 1


def test_steps_come_from_data_with_the_values_that_they_name(monkeypatch):
    values = {"values": {"bases": ["snip", "grasp"], "data": ["mnist", "digits"], "sizes": [2, 4]}}
    monkeypatch.setattr("secateur.studies.study.read_data", lambda paper, name: values)
    steps = [{"data": "{data}", "size": "{sizes}", "bases": ["none", "{bases}:rate={rates:g}"]}, {"size": 3}]
    study = Study("mine", lambda study, request: None, lambda study, archive: {}, "tables:one", steps)
    read = study.read_steps(Part, rates=(0.5, 1.0))
    bases = ("none", "snip:rate=0.5", "snip:rate=1", "grasp:rate=0.5", "grasp:rate=1")
    assert read[:4] == [Part(bases, data, size) for data in ("mnist", "digits") for size in (2, 4)]
    assert read[4:] == [Part(size=3)]


def row(attack, defense, value):
    extra = {"target": None, "batch_size": 1, "labels": "inferred", "stage": "untrained"}
    labels = {"model": "m", "dataset": "d", "defense": defense, "attack": attack, "seed": 0, "extra": extra}
    return Row(**labels, metric="lpips", value=value, low=value - 0.01, high=value + 0.01)


def test_a_claim_is_judged_by_its_need_bound_and_unit_with_the_words_in_place():
    cases = {"a": Estimate(0.3, 0.2, 0.4), "b": Estimate(0.05, 0.01, 0.09)}
    names = ("dgp", "open", "rob", "passive", "r_gap")
    first, *_ = DgpResults([]).judge("recovery", **dict.fromkeys(names, cases))
    (second,) = DgpResults([]).judge("adaptive", {"defense": "dgp"}, hides=cases)
    assert (first.verdict, second.verdict) == ("not supported", "supported")  # every case above .1, and above -.02
    assert second.claim.startswith("dgp hides as much") and "mean 0.175" in second.measured


def test_a_claim_says_which_keys_it_compares():
    rows = [row("ig", "none", 0.1), row("rob", "none", 0.5), row("ig", "dgp:k1=0.1", 0.4)]
    hidden, *_ = DgpResults(rows).judge("recovery", open={})
    assert hidden.measured == "ig, dgp, none: 0.300 [0.286, 0.314]" and hidden.verdict == "supported"
    hidden, *_ = DgpResults(rows[:2]).judge("recovery", open={})
    assert hidden.measured == "not measured here"


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_have_the_fields_that_a_claim_can_have(paper):
    tables = {name: claims for name, claims in studies.read_data(paper, "claims").items() if name != "about"}
    compared = {"of", "each", "higher", "lower", "metric", "case"}
    for claim in (claim for claims in tables.values() for claim in claims.values()):
        assert {"claim"} <= claim.keys() <= {"claim", "need", "bound", "unit", "hides"} | compared
        assert ("metric" in claim) == ("each" in claim) == ("higher" in claim or "lower" in claim)
        assert claim.get("need", "most") in ("most", "every", "some") and isinstance(claim.get("bound", 0.0), float)
    code = "".join(path.read_text() for path in (Path(studies.__file__).parent / paper).glob("*.py"))
    assert all(f'"{name}"' in code or f'"{name}.' in code for name in tables)
