"""Tables of dgp about the accuracy of collaborative training."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub

from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp import privacy_tables
from secateur.studies.dgp.paper_numbers import ACCURACY, TABLE_2_ACCURACY, TABLE_7
from secateur.studies.dgp.results import DgpResults, TrainingKey, base
from secateur.studies.table import Cells, TableLine, sparkline

LITTLE = 0.01  # a loss of accuracy that still counts as similar to the baseline
MUCH = 0.05  # a large loss of accuracy
TRAINED = "Accuracy of collaborative training"
FEEDBACK = "+error-feedback"
Paper = Callable[[TrainingKey], str]
Cases = dict[str, Estimate | None]


def accuracy_lines(results: DgpResults, paper: Paper = lambda course: "") -> list[TableLine]:
    """Return one line per training: final accuracy, accuracy over the epochs, traffic and residual."""
    lines = []
    for course, measures in results.courses.get("training", {}).items():
        labels = {"defense": course.defense} | {
            name: getattr(course, name)
            for name in ("model", "data")
            if len({getattr(other, name) for other in results.courses["training"]}) > 1
        }
        cells: Cells = {"test_accuracy": mean(measures["test_accuracy"]), "over_epochs": curve(results, course)}
        names = ("ratio", "paper_ratio", "gamma_1", "residual_mean")
        cells |= {_TITLES.get(name, name): mean(measures.get(name, {})) for name in names}
        lines.append(TableLine(labels, cells, paper(course), part=TRAINED))
    return lines


_TITLES = {"ratio": "bytes / dense", "paper_ratio": "as the paper counts", "residual_mean": "residual"}


def curve(results: DgpResults, course: TrainingKey) -> str:
    """Return the first seed's accuracy over the epochs as one line of text, scaled to its maximum."""
    rows = [
        row
        for row in results.rows
        if row.metric == "test_accuracy"
        and row.extra.get("study") == "training"
        and TrainingKey(row.defense or "none", row.model, row.dataset) == course
    ]
    values = [row.value or 0.0 for row in rows if row.seed == rows[0].seed]
    return sparkline(values[:: max(1, len(values) // 20)])


def table1(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Table 1: the quality of the reconstructions, and the final accuracy."""
    lines, findings = privacy_tables.table1(results)
    similar = ("ats", "soteria", "precode", "outpost", "top-k", "dgp")
    known = {base(course.defense): course for course in results.courses.get("training", {})}
    cost = {name: _less(results, known.get(name), known.get("none")) for name in similar}
    noise = _less(results, known.get("none"), known.get("noise"))
    return lines + accuracy_lines(results, _table1_accuracy), [
        *findings,
        judge(
            f"all but noise train as well as the baseline (at most {100 * LITTLE:g} point less)", cost, "every", -LITTLE
        ),
        judge(f"noise performs worst: at least {100 * MUCH:g} points less", {"noise": noise}, "every", MUCH),
    ]


def table2_both(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Table 2: DGP by k1 and k2, reconstructions and accuracy."""

    def paper(course: TrainingKey) -> str:
        return _percent(TABLE_2_ACCURACY.get(privacy_tables.shares(course.defense) or (0.0, 0.0)), course)

    by_shares = {privacy_tables.shares(course.defense): course for course in results.courses.get("training", {})}
    usual = by_shares.get((0.05, 0.75))
    harder = {f"{k[0]:g}, {k[1]:g}": by_shares.get(k) for k in ((0.06, 0.90), (0.20, 0.60))}
    cost = {name: _less(results, usual, course) for name, course in harder.items()}
    claim = "the strongest settings (k1 + k2 = 96 %, p = 1/3) cost accuracy"
    return privacy_tables.table2(results) + accuracy_lines(results, paper), [
        *privacy_tables.table2_claims(results),
        judge(claim, cost, "every"),
    ]


def table7(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Table 7: Top-k at 95 % against DGP at 80 %, on CIFAR-100."""
    courses = results.courses.get("training", {})
    cases = {x.model: _less(results, x, _other(results, x, "top-k")) for x in courses if base(x.defense) == "dgp"}
    lines = accuracy_lines(results, lambda x: _percent(TABLE_7.get((base(x.defense), x.model)), x, x.model))
    return lines, [judge("DGP at 80 % is more accurate than Top-k at 95 %", cases, "every")]


def fig4(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 4: accuracy with and without error feedback, on several networks and data sets."""
    courses = list(results.courses.get("training", {}))
    several = len({x.data for x in courses}) > 1

    def named(course: TrainingKey) -> str:
        return f"{course.model}, {course.data}" if several else course.model

    with_feedback = [course for course in courses if course.defense == "dgp" + FEEDBACK]
    near = {named(x): _less(results, x, _other(results, x, "none")) for x in with_feedback}
    gain = {named(x): _less(results, x, x._replace(defense="dgp")) for x in with_feedback}
    aligned = {named(x): _less(results, _other(results, x, "adgp"), _other(results, x, "none")) for x in with_feedback}
    within = f"(at most {100 * LITTLE:g} point less)"
    return accuracy_lines(results), [
        judge(f"DGP with error feedback is close to the baseline {within}", near, "every", -LITTLE),
        judge("DGP without error feedback performs poorly: with it, it is more accurate", gain, "every"),
        judge(f"ADGP keeps the accuracy too {within}", aligned, "every", -LITTLE),
    ]


def fig2(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 2: Top-k against DGP, the quality of IG's reconstructions and the accuracy over the epochs."""
    lines, _ = privacy_tables.table1(results)
    by_defense = {base(cell.defense): cell for cell in results.places}
    known = {base(course.defense): course for course in results.courses.get("training", {})}
    apart = privacy_tables.hidden(results, by_defense.get("dgp"), by_defense.get("top-k"), "ig")
    gap = _less(results, known.get("dgp"), known.get("top-k"))
    return lines + accuracy_lines(results, _table1_accuracy), [
        judge("IG recovers less under DGP than under Top-k of the same share", apart, "every", unit=""),
        judge(
            f"DGP is as accurate as Top-k (at most {100 * LITTLE:g} point less)", {"accuracy": gap}, "every", -LITTLE
        ),
    ]


def _table1_accuracy(course: TrainingKey) -> str:
    return _percent(ACCURACY.get(base(course.defense)), course)


def _percent(value: float | None, course: TrainingKey, network: str = "resnet18") -> str:
    """Format an accuracy of the paper, with the paper's network if ours is another one."""
    return "" if value is None else privacy_tables.of_network(f"{100 * value:.2f}%", course.model, network)


def _other(results: DgpResults, course: TrainingKey, defense: str) -> TrainingKey | None:
    """Return the training of the same network on the same data under another defense; None if there is none."""
    candidates = (x for x in results.courses.get("training", {}) if (x.model, x.data) == (course.model, course.data))
    return next((x for x in candidates if base(x.defense) == defense), None)


def _less(results: DgpResults, course: TrainingKey | None, other: TrainingKey | None) -> Estimate | None:
    """Return the accuracy of one training minus that of another."""
    if course is None or other is None:
        return None
    return combine(sub, results.accuracy(course), results.accuracy(other))
