"""Advice follows from the rows of pilots, and every client had every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.cli import main
from secateur.config import Federate, read
from secateur.evaluation.submodel_advice import advise, caution, from_rows, rows_of
from secateur.experiments.submodel_pilots import deal_widths
from secateur.runs.folder import load_rows
from secateur.runs.rows import Row

LABELS = {"model": "mapp-cnn-16", "dataset": "digits", "defense": "none", "seed": 0, "extra": {"submodels": "mapp-fl"}}


def measured(client, rate, accuracy, advantage, half=0.01):
    extra = {"submodels": "mapp-fl", "scope": "client", "client": client, "rate": rate, "data_size": 100 * (client + 1)}
    rows = []
    for metric, value in (("test_accuracy", accuracy), ("advantage", advantage)):
        ends = {} if value is None else {"low": value - half, "high": value + half}
        rows.append(Row(**LABELS | {"extra": extra}, metric=metric, value=value, **ends))
    return rows


def test_the_size_with_the_highest_accuracy_less_advantage_is_taken():
    rows = measured(0, 1.0, 0.80, 0.20) + measured(0, 0.5, 0.78, 0.05) + measured(1, 1.0, 0.8, 0.1)
    rows += measured(1, 0.5, 0.6, 0.095)
    private, accurate = advise(rows)
    assert (private.rate, accurate.rate) == (0.5, 1.0) and private.data_size == 100
    assert private.words == "0.5 of the channels: 2.0 points less accurate, 15.0 points less exposed"
    assert accurate.words == (
        "the whole model: 20.0 points more accurate, exposure not known to differ (+0.5 points, within chance)"
    )


def test_nothing_is_recommended_on_a_difference_within_chance():
    """Finding 12: a size was recommended for a difference that was called undecided in the same sentence."""
    (advice,) = advise(measured(0, 1.0, 0.80, 0.10) + measured(0, 0.5, 0.79, 0.11))
    assert advice.rate is None and advice.words.startswith("no recommendation, as the pilots cannot decide; the whole")
    ((_, (read,)),) = from_rows(rows_of([advice], LABELS))
    assert read == advice


def test_pilots_of_one_size_are_averaged_and_what_they_differ_by_widens_the_interval():
    rows = measured(0, 1.0, 0.7, 0.1) + measured(0, 1.0, 0.8, 0.1)
    (option,) = advise(rows)[0].options
    assert option.accuracy.value == pytest.approx(0.75) and option.advantage.value == pytest.approx(0.1)
    assert option.advantage.high - 0.1 == pytest.approx(0.01)  # the same examples again tell nothing new
    (option,) = advise(measured(0, 1.0, 0.9, 0.1) + measured(0, 1.0, 0.5, 0.1))[0].options
    assert option.accuracy.high == 1  # and no more
    (option,) = advise(rows)[0].options
    assert option.accuracy.high - 0.75 == pytest.approx((0.01**2 + (1.96 * 0.05) ** 2) ** 0.5)


def test_a_client_that_cannot_be_attacked_is_told_to_be_careful():
    (advice,) = advise(measured(0, 1.0, 0.8, None) + measured(0, 0.25, 0.7, None))
    assert advice.rate == 0.25 and "too few" in advice.words


def test_advice_survives_being_rows():
    given = advise(measured(0, 1.0, 0.80, 0.20) + measured(0, 0.5, 0.78, 0.05) + measured(3, 1.0, 0.8, None))
    ((_, read),) = from_rows(rows_of(given, LABELS))
    assert read == given


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ({"pilot_rounds": 10, "rounds": 150}, "so pilots of 10 rounds for a federation of 150 favour the whole model"),
        ({"pilot_rounds": 1, "rounds": 2}, "so pilots of 1 round for"),
        ({}, "so short pilots favour the whole model"),
    ],
)
def test_pilots_that_are_shorter_than_the_federation_come_with_a_caution(rounds, said):
    row = Row(**LABELS | {"extra": LABELS["extra"] | rounds}, metric="recommended_rate", value=1.0)
    assert caution(row).startswith("Small models lag in early rounds, ") and said in caution(row)


@pytest.mark.parametrize(
    ("given", "rounds"), [({}, 10), ({"rounds": 3}, 3), ({"rounds": 40}, 10), ({"rounds": 3, "pilot_rounds": 7}, 7)]
)
def test_pilots_are_no_longer_than_the_federation_unless_one_says_so(given, rounds):
    assert read(Federate, None, {"submodels": "mapp-fl", "data": "cifar10"} | given).pilot_rounds == rounds


def test_pilots_as_long_as_the_federation_need_no_caution():
    extra = LABELS["extra"] | {"pilot_rounds": 10, "rounds": 10}
    assert caution(Row(**LABELS | {"extra": extra}, metric="recommended_rate", value=1.0)) is None


@given(st.integers(2, 12), st.integers(2, 4), st.integers(1, 3))
def test_every_client_has_every_size_once_a_draw(clients, sizes, draws):
    widths = [1 / (number + 1) for number in range(sizes)]
    pilots = deal_widths(clients, widths, draws, 0)
    assert len(pilots) == sizes * draws
    for client in range(clients):
        assert sorted(pilot[client] for pilot in pilots) == sorted(widths * draws)
    for pilot in pilots:  # about as many clients each
        counts = [pilot.count(width) for width in widths]
        assert max(counts) - min(counts) <= 1


def test_advice_from_the_command_line(tmp_path, capsys):
    command = ["federate", "--submodels", "mapp-fl", "--advise", "--batch-size", "64", "--out", str(tmp_path / "run")]
    command += ["--set", "examples=600", "--set", "pilot_rounds=1", "--set", "pilot_draws=1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    ((told, advice),) = from_rows(load_rows(tmp_path / "run"))
    assert told.attack == "yeom" and "advantage of yeom" in said and f"client 9: {advice[9].words}" in said
    value, low, high = (100 * each for each in advice[0].options[1].accuracy[:3])
    assert f"{value:.1f}% [{low:.1f}, {high:.1f}]" in said
    assert len(advice) == 10 and all(len(one.options) == 2 for one in advice)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Model size for each client" in page and advice[0].words in page
    assert "the advantage of yeom on the model that it sends" in page and "accuracy, whole model" in page
    assert "so pilots of 1 round for a federation of 150 favour the whole model" in said and caution(told) in page
    other = [*command[:2], "none", *command[3:]]
    other[other.index("--out") + 1] = str(tmp_path / "other")
    assert main(other) == 2 and "advise" in capsys.readouterr().err
