"""Theory and measurement side by side: the tables of priprune's Figs. 2, 4 and 5, and what they say of its claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.priprune_curves import RATE, ROUNDS, SIZE, Axis, Curve, curves, updates
from secateur.studies.priprune_found import Seen
from secateur.studies.priprune_grid import BASE_RATE, CIFAR10, FEMNIST
from secateur.studies.priprune_numbers import TABLE_2
from secateur.studies.tables import Cells, Line

STANDS_FOR = {"femnist": FEMNIST, "qmnist": FEMNIST, "mnist": FEMNIST, "cifar10": CIFAR10}
COLUMNS = {
    "nmi_256": "NMI (256 levels)",
    "nmi_256_chance": "by chance",
    "ami_256": "AMI (256)",
    "nmi_100": "NMI (100)",
    "nmi_100_chance": "by chance (100)",
    "ami_100": "AMI (100)",
    "psnr": "PSNR",
    "printed_total": "printed, bits",
    "corrected_total": "corrected, bits",
    "corrected_gradient": "of it the gradient's",
    "rank": "d*",
}
OVER_ROUNDS = {"printed_rounds": "printed x T", "corrected_rounds": "corrected x T"}
RANKS = "(rank correlation over updates)"


def tabulate(*axes: Axis) -> Callable[[Seen], tuple[list[Line], list[Finding]]]:
    """How a figure's rows become a part for each of its axes, and its findings."""

    def table(found: Seen) -> tuple[list[Line], list[Finding]]:
        known = updates(found.rows)
        drawn = {axis: list(curves(known, axis)) for axis in axes}
        lines = [line for own in drawn.values() for curve in own for line in _lines(curve)]
        return lines, [finding for axis, own in drawn.items() for finding in _findings(axis, own)]

    return table


def _lines(curve: Curve) -> Iterator[Line]:
    names = COLUMNS | (OVER_ROUNDS if curve.axis is ROUNDS else {})
    shared = {name: f"{value:g}" if isinstance(value, int | float) else value for name, value in curve.labels.items()}
    for x in curve.points:
        varied = {"model": curve.networks[x]} if curve.axis is SIZE else {}
        cells: Cells = {title: curve.at(x, name) for name, title in names.items()}
        at = {curve.axis.title: f"{x:,.0f}" if x >= 1000 else f"{x:g}"}
        yield Line(shared | varied | at, cells, _paper(curve, x), part=f"By {curve.axis.title}")


def _paper(curve: Curve, x: float) -> str:
    """Of these figures the paper prints no numbers; of the base prunings at its rate Table 2 does."""
    if curve.axis is not RATE or x != BASE_RATE:
        return ""
    printed = TABLE_2.get((STANDS_FOR.get(curve.labels["data"], ""), curve.labels["base"]))
    return f"NMI {printed[0][0]:g} after 20 000 rounds" if printed else ""


def _findings(axis: Axis, own: Sequence[Curve]) -> Iterator[Finding]:
    way, sign = ("rises", 1) if axis.rises else ("falls", -1)
    theory = "rounds" if axis is ROUNDS else "total"
    forms = {f"{form}_{theory}": form for form in ("printed", "corrected")}
    forms |= {} if axis is ROUNDS else {"corrected_gradient": "corrected, without the mask"}

    def held(claim: str, first: str, second: str, sign: int = 1) -> Finding:
        cases = {curve.title: _turned(curve.together(first, second), sign) for curve in own}
        return judge(f"{claim} {RANKS}", cases, unit="")

    yield held(f"leakage {way} with the {axis.title}: NMI, 256 levels", "x", "nmi_256", sign)
    yield held(f"leakage {way} with the {axis.title}: beyond chance, AMI", "x", "ami_256", sign)
    for metric, form in forms.items():
        yield held(f"theory, {form}, {way} with the {axis.title}", "x", metric, sign)
    for metric, form in forms.items():
        yield held(f"theory, {form}, goes with measured NMI along the {axis.title}", metric, "nmi_256")
    yield held(f"NMI and PSNR agree along the {axis.title}", "nmi_256", "psnr")


def _turned(found: Estimate | None, sign: int) -> Estimate | None:
    return found if found is None or sign > 0 else Estimate(-found.value, -found.high, -found.low, found.note)
