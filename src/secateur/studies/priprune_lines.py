"""Lines of a table of priprune: a federation each, or an attack on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from secateur.metrics.membership import Estimate
from secateur.studies.measured import mean
from secateur.studies.priprune_found import ACCURACY, CHANCE, LOSS, NMI, PSNR, WITHHELD, Course, Federation, Seen
from secateur.studies.tables import Cells, Line, sparkline

Paper = Callable[[Federation], str]
PLACES = ("data", "model", "batch", "broadcast", "view", "base", "rate", "defense")
CURVE = 20  # points of a curve in a line of text


def silent(each: Federation) -> str:
    """What the paper prints of it: nothing."""
    return ""


def lines(found: Seen, paper: Paper = silent, chosen: Sequence[Federation] | None = None, part: str = "") -> list[Line]:
    """One line for each federation and attack: its accuracy in the end, and what the attacked updates gave away."""
    wanted = list(found.courses if chosen is None else chosen)
    attacks = dict.fromkeys(attack for each in wanted for attack in found.attacks(each))
    made = []
    for each in wanted:
        for attack in attackers(found, each):
            labels = told(each, wanted) | ({"attack": str(attack)} if len(attacks) > 1 else {})
            made.append(Line(labels, _cells(found, each, attack), paper(each), part=part))
    return made


def attackers(found: Seen, each: Federation) -> list[str | None]:
    """Whose lines a federation has: one of its own where nobody attacked it."""
    return [*found.attacks(each)] or [None]


def told(each: Federation, among: Sequence[Federation]) -> dict[str, str]:
    """What tells a federation from the others, and always its base pruning, rate and defense."""
    names = [
        name
        for name in PLACES
        if name in ("base", "defense") or len({getattr(other, name) for other in among}) > 1 or name == "rate"
    ]
    titles = {"base": "base pruning", "rate": "base rate", "batch": "batch size"}
    return {
        titles.get(name, name): f"{getattr(each, name):g}" if name in ("rate", "batch") else str(getattr(each, name))
        for name in names
    }


def curve(course: Course) -> str:
    """A measure over the rounds in one line of text, of the first seed."""
    first = min((key[0] for key in course), default=0)
    values = [value for key, value in sorted(course.items()) if key[0] == first]
    return sparkline(values[:: max(1, len(values) // CURVE)])


def _cells(found: Seen, each: Federation, attack: str | None) -> Cells:
    cells: Cells = {"test_accuracy": mean(found.last(each, ACCURACY))}
    cells |= {"accuracy over rounds": curve(found.course(each, ACCURACY))}
    for title, metric in {"NMI": NMI, "NMI by chance": CHANCE, "PSNR": PSNR, "loss of the attack": LOSS}.items():
        cells[title] = mean(found.over(each, metric, attack)) if attack else None
    cells |= {"NMI over rounds": curve(found.course(each, NMI, attack)) if attack else None}
    if withheld := found.course(each, WITHHELD):
        cells |= {"withheld": mean(found.last(each, WITHHELD)), "withheld over rounds": curve(withheld)}
    return cells | {"MB up": megabytes(found, each, "bytes_up"), "MB down": megabytes(found, each, "bytes_down")}


def megabytes(found: Seen, each: Federation, metric: str) -> Estimate | None:
    """What all clients sent or received."""
    sums = mean(found.last(each, metric))
    return None if sums is None else Estimate(sums.value / 1e6, sums.low / 1e6, sums.high / 1e6)
