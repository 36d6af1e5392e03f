"""Theory beside measurement: curves and claims follow from rows by hand; a federation's terms from its model."""

import pytest
import torch
from scipy.stats import spearmanr

from secateur.config import Federate, base_pruning, read
from secateur.evaluation.theory_curves import (
    BATCH,
    RATE,
    ROUNDS,
    SIZE,
    THEORY,
    curves,
    mean_correlation,
    rank_correlation,
    updates,
)
from secateur.experiments.federate import FederateExperiment
from secateur.federated.build import build_spec, load_data, network_of
from secateur.federated.federation import Federation
from secateur.report.page import Source, render
from secateur.report.theory import draw_theory
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.studies.priprune import theory
from secateur.studies.priprune.results import PripruneResults
from secateur.studies.priprune.theory import bound, tabulate, terms_by_name
from secateur.theory.mutual_information import gradient_spectrum, single_round, single_round_prunefl, spectrum_of

D = {"conv-1": 400, "conv-2": 600}
EXAMPLES = 8  # of a client, for the covariance


def attacked(nmi, psnr=10.0, base="snip", rate=0.3, batch=4, model="conv-2", round=2, seed=0, bits=50.0, data="qmnist"):
    """The rows of one attacked update and of its theory."""
    common = {"model": model, "dataset": data, "pruner": f"{base}:rate={rate:g}", "sparsity": rate, "seed": seed}
    own = {
        "base_pruning": base,
        "broadcast": "masked",
        "round": round,
        "client": 3,
        "batch_size": batch,
        "target": None,
    }
    values = {"nmi_256": nmi, "ami_256": nmi - 0.1, "psnr": psnr}
    rows = [Row(**common, attack="sgi:iterations=9", metric=k, value=v, extra=own) for k, v in values.items()]
    own = {"study": THEORY, "local_batch": batch, "at_round": round, "parameters": D[model], "client": 3}
    forms = {"printed_total": -bits, "corrected_total": bits, "printed_rounds": -round * bits}
    forms |= {"corrected_rounds": round * bits, "corrected_gradient": bits - 1, "rank": 7.0}
    return rows + [Row(**common, defense="none", metric=k, value=v, extra=own) for k, v in forms.items()]


def by_rate(base="snip"):
    """Leakage, PSNR and the corrected bits fall with the rate, and the printed ones rise."""
    rates = (0.1, 0.3, 0.5, 0.7, 0.9)
    return [row for p in rates for row in attacked(0.5 - p / 4, 20 - p, base, p, bits=100 - 50 * p)]


def verdicts(findings):
    return {finding.claim.removesuffix(" (rank correlation within a seed)"): finding.verdict for finding in findings}


# Curves --------------------------------------------------------------------------------------------------------
def test_theory_joins_the_update_that_it_is_of():
    ((update, values),) = updates(attacked(0.4, bits=80)).items()
    assert (update.base, update.rate, update.batch, update.attack, update.round) == ("snip", 0.3, 4, "sgi", 2)
    assert values["nmi_256"] == 0.4 and values["corrected_total"] == 80 and values["parameters"] == 600


def test_a_curve_differs_in_one_thing_alone():
    rows = by_rate() + attacked(0.2, batch=8) + attacked(0.3, model="conv-1") + attacked(0.6, round=4)
    known = updates(rows)
    (rates,) = curves(known, RATE)
    assert list(rates.points) == [0.1, 0.3, 0.5, 0.7, 0.9] and len(rates.points[0.3]) == 1  # of round 2 as the others
    (batches,) = curves(known, BATCH)
    assert list(batches.points) == [4, 8] and batches.labels["rate"] == 0.3 and batches.labels["model"] == "conv-2"
    (sizes,) = curves(known, SIZE)
    assert list(sizes.points) == [400, 600] and sizes.networks == {400: "conv-1", 600: "conv-2"}
    (rounds,) = curves(known, ROUNDS)
    assert list(rounds.points) == [2, 4] and rounds.average_at(4, "nmi_256").value == 0.6


def test_updates_are_compared_within_a_round():
    """In each round leakage falls with the rate, but between the rounds the pictures differ by more."""
    rows = by_rate() + [row for p in (0.1, 0.3, 0.5, 0.7, 0.9) for row in attacked(0.9 - p / 4, rate=p, round=4)]
    (curve,) = curves(updates(rows), RATE)
    found = curve.correlate("x", "nmi_256")
    assert found.value == pytest.approx(-1) and found.high < -0.99
    raw = rank_correlation([(x, each["nmi_256"]) for x, own in curve.points.items() for each in own])
    assert raw.value == pytest.approx(-0.492, abs=1e-3)
    exact = rank_correlation([(1, 1), (2, 3), (3, 2), (4, 5), (5, 4)], spent=1)
    assert (exact.low, exact.high) == pytest.approx((-0.6970, 0.9956), abs=1e-3)  # tanh(atanh .8 -+ 1.96 / 1)


def test_a_client_without_theory_counts_where_leakage_is_measured_and_not_beside_the_bound():
    """Another client leaks more, at every rate by the same: its updates are compared with one another."""
    rates = {0.1: 0.40, 0.5: 0.42, 0.9: 0.41}  # of client 3; client 5 leaks .2 more and falls
    other = {0.1: 0.66, 0.5: 0.62, 0.9: 0.58}
    rows = [row for p, nmi in rates.items() for row in attacked(nmi, rate=p, bits=100 * nmi)]
    for p, nmi in other.items():
        (first, *_) = attacked(nmi, rate=p)
        rows.append(Row(**{**first.__dict__, "extra": first.extra | {"client": 5}}))
    (curve,) = curves(updates(rows), RATE)
    assert [len(own) for own in curve.points.values()] == [2, 2, 2]
    assert (
        curve.average_at(0.1, "nmi_256").value == pytest.approx(0.53)
        and curve.average_at(0.1, "corrected_total").value == 40
    )
    pairs = [(p - 0.5, nmi - sum(own.values()) / 3) for own in (rates, other) for p, nmi in own.items()]
    falls = spearmanr(*zip(*[(x, round(y, 9)) for x, y in pairs], strict=True)).statistic
    assert curve.correlate("x", "nmi_256").value == pytest.approx(falls)
    assert curve.correlate("corrected_total", "nmi_256").value == pytest.approx(1)  # client 3's three updates alone
    (sizes, *_) = [each for each in updates(rows).values() if each["client"] == 5]
    assert sizes["parameters"] == 600 and "corrected_total" not in sizes


def test_a_correlation_is_taken_within_a_seed_and_its_interval_over_seeds():
    """Within the seeds leakage goes with the rate by 1, 1 and -1/2; pooled over seeds it would seem certain."""
    rates, measured = (0.1, 0.5, 0.9), ((0.3, 0.4, 0.5), (0.30, 0.42, 0.43), (0.4, 0.5, 0.3))
    rows = [
        row
        for seed, values in enumerate(measured)
        for p, nmi in zip(rates, values, strict=True)
        for row in attacked(nmi, rate=p, seed=seed)
    ]
    (curve,) = curves(updates(rows), RATE)
    found, spread = curve.correlate("x", "nmi_256"), 4.302653 * 0.75**0.5 / 3**0.5  # t(2) s / sqrt(n), s^2 = .75
    assert found.value == pytest.approx(0.5) and found.high == 1
    assert found.low == max(-1.0, 0.5 - spread) == -1
    (_, *_, agree), (line, *_) = tabulate((RATE,), PripruneResults(rows, {}))[::-1]
    assert "over the updates" not in agree.measured
    cell = line.cells["NMI (256 levels)"]  # .3, .3 and .4 at rate .1: s / sqrt(n) = 1 / 30
    assert cell.value == pytest.approx(1 / 3) and cell.high - cell.value == pytest.approx(4.302653 / 30, abs=1e-6)
    close = mean_correlation([0.2, 0.3, 0.4])
    assert (close.low, close.high) == pytest.approx((0.3 - 4.302653 * 0.1 / 3**0.5, 0.3 + 4.302653 * 0.1 / 3**0.5))


def test_one_seed_has_the_interval_over_its_updates_and_says_so():
    rows = [row for p, nmi in ((0.1, 0.5), (0.5, 0.4), (0.9, 0.3)) for row in attacked(nmi, rate=p)]
    rows += [row for p, nmi in ((0.1, 0.7), (0.5, 0.4), (0.9, 0.3)) for row in attacked(nmi, rate=p, round=4)]
    (curve,) = curves(updates(rows), RATE)
    cell = curve.average_at(0.1, "nmi_256")  # .5 and .7: s / sqrt(n) = .1, t(1) = 12.706
    assert cell.high - cell.value == pytest.approx(1.2706, abs=1e-4)
    _, findings = tabulate((RATE,), PripruneResults(rows, {}))
    assert all("over the updates of one seed" in finding.measured for finding in findings if "[" in finding.measured)


def test_rank_correlation_is_spearmans():
    pairs = [(1.0, 3.0), (2.0, 1.0), (2.0, 5.0), (4.0, 4.0), (9.0, 4.0)]
    assert rank_correlation(pairs).value == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
    assert rank_correlation([]) is None and rank_correlation([(1, 2), (1, 3)]) is None


# Tables --------------------------------------------------------------------------------------------------------
def test_what_falls_and_what_rises_with_the_rate():
    rows = [row for base in ("snip", "prunefl") for row in by_rate(base)]
    lines, findings = tabulate((RATE,), PripruneResults(rows, {}))
    assert len(lines) == 10 and {line.part for line in lines} == {"By pruning rate p"}
    third = next(line for line in lines if line.labels["pruning rate p"] == "0.3" and line.labels["base"] == "prunefl")
    assert third.cells["NMI (256 levels)"].value == pytest.approx(0.425) and third.cells["d*"].value == 7
    assert third.paper == "NMI 0.22 after 20 000 rounds"
    found = verdicts(findings)
    assert found["leakage falls with the pruning rate p: NMI, 256 levels"] == "supported"
    assert found["theory, printed, falls with the pruning rate p"] == "not supported"
    assert found["theory, corrected, falls with the pruning rate p"] == "supported"
    assert found["theory, printed, goes with measured NMI along the pruning rate p"] == "not supported"
    assert found["NMI and PSNR agree along the pruning rate p"] == "supported"


def test_leakage_that_does_not_rise_with_rounds_is_said_so():
    rows = [row for t in range(1, 9) for row in attacked(0.5 - t / 40, round=t)]
    lines, findings = tabulate((ROUNDS,), PripruneResults(rows, {}))
    assert lines[2].cells["corrected x T"].value == 150
    found = verdicts(findings)
    assert found["leakage rises with the round T: NMI, 256 levels"] == "not supported"
    assert found["theory, corrected, rises with the round T"] == "supported"


def test_one_point_decides_nothing():
    lines, findings = tabulate((RATE, BATCH), PripruneResults(attacked(0.4), {}))
    assert not lines and {finding.verdict for finding in findings} == {"undecided"}


# Federations ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def config():
    fields = {"model": "conv-1", "examples": 200, "clients": 5, "per_round": 2, "rounds": 2, "local_steps": 1}
    fields |= {"batch_size": 4, "loss": "binary", "attack": "sgi:iterations=2", "attack_every": 1, "images": False}
    return read(Federate, None, fields)


@pytest.mark.parametrize("base", ["snip:rate=0.5", "prunefl:every=2:iterations=2:samples=10"])
def test_the_terms_are_those_of_the_model_that_clients_receive(config, base, tmp_path):
    (data, device), chosen = load_data(config), base_pruning(base)
    with open_run(tmp_path, "study", {}) as run:
        bound(EXAMPLES, run, config, data, device, 0, chosen)
        again = len(list((tmp_path / "artifacts").iterdir()))
        bound(EXAMPLES, run, config, data, device, 0, chosen)  # kept
        assert len(list((tmp_path / "artifacts").iterdir())) == again == 1
    first = {row.metric: row.value for row in run.rows[: len(run.rows) // 2] if row.extra["at_round"] == 1}
    terms, net = build_spec(config, data, 0, chosen, config.defense[0]), network_of(config, data, 0)
    start = Federation(net, data, terms, 0)
    client = run.rows[0].extra["client"]
    batch = start.train.take(terms.shares[client][:EXAMPLES])
    spectrum = gradient_spectrum(net, start.model(), batch, start.server.mask, terms.local.loss)
    weights = sum(keep.numel() for keep in start.server.mask.values())
    rate = 1 - start.server.density
    adaptive = chosen.name == "prunefl"
    forms = single_round_prunefl(spectrum, 4, weights) if adaptive else single_round(spectrum, 4, rate, weights)
    for name, value in terms_by_name(forms).items():
        assert first[name] == pytest.approx(value)
    assert first["rank"] == spectrum.rank <= EXAMPLES - 1
    assert first["corrected_rounds"] == pytest.approx(first["corrected_total"])  # one round
    assert {row.extra["at_round"] for row in run.rows} == {1, 2}


def test_a_federation_that_diverged_has_a_note_and_no_bound(config, tmp_path, monkeypatch):
    def astray(*arguments):
        return spectrum_of(torch.full((3, 2), torch.nan))

    monkeypatch.setattr(theory, "gradient_spectrum", astray)
    data, device = load_data(config)
    with open_run(tmp_path, "study", {}) as run:
        bound(EXAMPLES, run, config, data, device, 0, base_pruning("snip"))
    assert len(run.rows) == 4 and all(row.value is None and "not finite" in row.note for row in run.rows)


def test_attack_and_theory_meet_in_one_run_and_on_its_page(config, tmp_path):
    (data, device), rates = load_data(config), ("snip:rate=0.2", "snip:rate=0.8")
    with open_run(tmp_path, "study", {}) as run:
        for text in rates:
            FederateExperiment(config, run, data, device).measure([0], base_pruning(text), config.defense[0])
            bound(EXAMPLES, run, config, data, device, 0, base_pruning(text))
    known = updates(run.rows)
    assert len(known) == 4 and all({"nmi_256", "nmi_100", "psnr", "printed_total"} <= set(x) for x in known.values())
    lines, _ = tabulate((RATE,), PripruneResults(run.rows, {}))
    assert [line.labels["pruning rate p"] for line in lines] == ["0.2", "0.8"]
    views = draw_theory(run.rows)
    assert [view.label for view in views] == ["pruning rate p, conv-1 on digits, batch 4"]
    titles = [panel.title for panel in views[0].panels]
    assert len(titles) == 4 and "as printed" in titles[1] and "corrected" in titles[2] and "gradient's" in titles[3]
    assert len(views[0].panels[0].data) == 2  # NMI, and what it would be by chance
    page = render([Source("study", run.rows, run.figures, config="", environment={})])
    assert "Theory beside measurement" in page
    rounds = draw_theory([row for t in (1, 2, 4) for row in attacked(0.4, round=t)])
    assert [view.label for view in rounds] == ["round T, conv-2 on qmnist, rate 0.3, batch 4"]
    assert not draw_theory([row for row in run.rows if row.extra.get("study") != THEORY])
