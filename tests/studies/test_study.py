"""The engine of all studies: a page after any end, fields of a scale by their rules, and a title for every study."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from secateur import catalogue, studies
from secateur.errors import WrongInput
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row
from secateur.studies.claims import judge_claims
from secateur.studies.study import Request, run_steps, scale_of


@dataclass(frozen=True)
class Size:
    """A scale with a field of every kind."""

    data: dict = field(default_factory=dict)
    rounds: int = 3
    examples: int | None = None
    rate: float = 0.5
    augment: bool | None = None
    spare: int = field(default=0, metadata={"least": 0})
    pairs: int = field(default=2, metadata={"least": 2, "even": True})
    threads: int = 1
    units: tuple[int, ...] = field(default=(8,), metadata={"among": (8, 16)})


def run(out, measure):
    request = Request("study", "tiny", {"data": "digits", "model": None}, [], out)
    return run_steps(request, Size(), torch.device("cpu"), [0], measure, only={"bases": "snip"})


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
        and torch.get_num_threads() == Size().threads == 1
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


def test_fields_are_read_by_their_rules():
    texts = ["rounds=4", "examples=9", "rate=1e-2", "augment=true", "spare=0", "pairs=6", "units=8+16"]
    size = scale_of({"tiny": Size()}, "tiny", texts)
    assert (size.rounds, size.examples, size.rate, size.augment) == (4, 9, 0.01, True)
    assert (size.spare, size.pairs, size.units) == (0, 6, (8, 16))
    assert scale_of({"tiny": size}, "tiny") == size


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
def test_wrong_fields_are_named(text, expected):
    with pytest.raises(WrongInput) as error:
        scale_of({"tiny": Size()}, "tiny", [text])
    assert str(error.value).startswith(expected)


def test_every_title_is_of_a_study_and_every_study_has_one():
    titles = {}
    for path in Path(studies.__file__).parent.glob("*/titles.json"):
        titles |= json.loads(path.read_text(encoding="utf-8"))
    assert titles == {name: entry.summary for name, entry in catalogue.methods("study").items()}


def test_a_claim_is_judged_by_its_need_bound_and_unit_with_the_words_in_place():
    cases = {"a": Estimate(0.3, 0.2, 0.4), "b": Estimate(0.05, 0.01, 0.09)}
    first, second = judge_claims("dgp", "recovery", {"defense": "dgp"}, dgp=cases, adaptive=cases)
    assert (first.verdict, second.verdict) == ("not supported", "supported")  # every case above .1, and above -.02
    assert second.claim.startswith("dgp hides as much") and "on average 0.175" in second.measured


@pytest.mark.parametrize("paper", ["dgp", "mapp", "priprune", "samia"])
def test_claims_have_the_fields_that_a_claim_can_have(paper):
    tables = {name: claims for name, claims in studies.read_data(paper, "claims").items() if name != "about"}
    pair = {"metric", "higher", "lower", "case"} if paper == "mapp" else set()
    for claim in (claim for claims in tables.values() for claim in claims.values()):
        assert {"claim"} <= claim.keys() <= {"claim", "need", "bound", "unit"} | pair
        assert claim.get("need", "most") in ("most", "every", "some") and isinstance(claim.get("bound", 0.0), float)
    code = "".join(path.read_text() for path in (Path(studies.__file__).parent / paper).glob("*.py"))
    assert all(f'"{name}"' in code for name in tables)
