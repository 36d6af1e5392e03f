"""Tables of dgp about what attackers recover: plain ones, and beside them those who know of the defense.

Tables of dgp by setting of DGP, by network and by batch: Tables 2, 5 and 6, and the galleries of Figs. 5 to 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp.paper_numbers import COLUMNS, TABLE_1, TABLE_2, TABLE_5_6
from secateur.studies.dgp.results import Cell, Seen, base
from secateur.studies.table import Cells, Line

MEASURES = ("lpips", "cw_ssim")
EXTREMES = (("lpips", "min"), ("cw_ssim", "max"))  # of Rob's pictures
OPEN = 0.5  # a CW-SSIM above this: the picture is there
HIDDEN = 0.1  # so far from the baseline's LPIPS and CW-SSIM: it is not
SAME = 0.02  # of either: less is no difference that an eye sees
FAR = f": LPIPS and CW-SSIM at least {HIDDEN:g} away from the baseline's"
RECOVERED, LEFT_OUT = "What attackers recover", "Left out"
PLAIN_ONLY = "stands only against the plain attacker"
Paper = Callable[[Cell], str]
Cases = dict[str, Estimate | None]


def privacy_lines(found: Seen, paper: Paper) -> list[Line]:
    """One line for each client: what the plain attacker recovers, and the nearest of those who know of the defense."""
    lines = []
    for place in found.places:
        labels = {"attack": place.attack, "defense": title(place)} | differing(found, place)
        knowing = found.knowing(place)
        cells: Cells = {name: mean(found.of(place, name)) for name in MEASURES}
        if place.attack == "rob":
            cells |= {f"{name}_{end}": mean(found.of(place, f"{name}_{end}")) for name, end in EXTREMES}
        cells["label_accuracy"] = mean(found.of(place, "label_accuracy"))
        cells["adaptive"] = knowing.adaptive if knowing else ""
        if knowing is not None:
            cells |= {f"adaptive {name}": mean(found.of(knowing, name)) for name in MEASURES}
        lines.append(Line(labels, cells, paper(place), _mark(found, place, knowing), RECOVERED))
    return lines


def left_out_lines(found: Seen) -> list[Line]:
    """A line for all that could not be measured."""
    lines = []
    for row in found.left_out:
        labels = {"defense": row.defense or "none", "model": row.model, "reason": row.note or ""}
        lines.append(Line(labels, {}, part=LEFT_OUT))
    return lines


def title(place: Cell) -> str:
    """A client's defense, and for ATS what is compared."""
    return f"{place.defense} ({place.against} pictures)" if place.against else place.defense


def differing(found: Seen, place: Cell) -> dict[str, str]:
    """The labels in which the clients of a study differ, beside attack and defense."""
    names = ("model", "data", "batch_size", "labels", "stage")
    return {name: str(getattr(place, name)) for name in names if len({getattr(x, name) for x in found.places}) > 1}


def table1(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Table 1's privacy rows (and Fig. 3's), with the claims of Section 6.2."""
    return privacy_lines(found, by_column), [*claims(found), *knowing_claims(found)]


def by_column(place: Cell) -> str:
    """What Table 1 has of a client; of which network, where another stands for it."""
    column = COLUMNS.get((base(place.defense), place.against), "")
    named = {"lpips": "LPIPS", "cw_ssim": "SSIM", "lpips_min": "least LPIPS", "cw_ssim_max": "most SSIM"}
    told = [(text, TABLE_1.get((place.attack, name, column))) for name, text in named.items()]
    numbers = ", ".join(f"{text} {value:.3g}" for text, value in told if value is not None)
    return of_network(numbers, place.model, "cnn6" if place.attack == "r-gap" else "resnet18")


def of_network(numbers: str, model: str, paper: str = "resnet18") -> str:
    """A number of the paper, with its network where that is another one."""
    return numbers if model == paper or not numbers else f"{numbers} ({paper})"


def claims(found: Seen) -> list[Finding]:
    """Section 6.2 on plain attackers."""
    every, passive, shut = ("r-gap", "ig", "gi", "rob"), ("ig", "gi"), ("soteria", "noise", "top-k", "outpost", "dgp")
    open_to_rob = [("ats", "used"), ("soteria", ""), ("precode", ""), ("noise", "")]
    seen = {d: mean(found.of(cell, "cw_ssim")) for d, a in open_to_rob if (cell := _client(found, "rob", d, a))}
    return [
        _hides("DGP protects under every attack", found, [(attack, "dgp", "none") for attack in every], HIDDEN),
        judge(f"ATS, Soteria, PRECODE and noise fail under Rob: CW-SSIM above {OPEN:g}", seen, "every", OPEN, ""),
        _hides("Top-k and Outpost withstand Rob", found, [("rob", d, "none") for d in ("top-k", "outpost")], HIDDEN),
        _hides(
            "Top-k and Outpost are vulnerable to IG and GI, where DGP protects better",
            found,
            [(attack, "dgp", d) for attack in passive for d in ("top-k", "outpost")],
        ),
        _hides("all defenses but ATS withstand R-GAP", found, [("r-gap", d, "none") for d in shut], HIDDEN),
    ]


def knowing_claims(found: Seen) -> list[Finding]:
    """What the paper does not ask: whether a defense hides as much from an attacker who knows of it."""
    findings = []
    for defense in ("soteria", "precode", "top-k", "outpost", "dgp", "adgp"):
        cases: Cases = {}
        for place in found.select(defense=defense):
            cases |= hidden(found, found.knowing(place), place, case(found, place))
        if any(case is not None for case in cases.values()):
            claim = f"{defense} hides as much from an attacker who knows of it, within {SAME:g} (not in the paper)"
            findings.append(judge(claim, cases, "every", -SAME, unit=""))
    return findings


def hidden(found: Seen, one: Cell | None, other: Cell | None, name: str) -> Cases:
    """How much less is seen of one client than of another: LPIPS above it, CW-SSIM below it."""
    lpips, cw_ssim = found.less(one, other, "lpips"), found.less(other, one, "cw_ssim")
    return {f"{name}, LPIPS": lpips, f"{name}, CW-SSIM": cw_ssim}


def _hides(claim: str, found: Seen, pairs: Iterable[tuple[str, str, str]], bound: float = 0.0) -> Finding:
    """Whether one defense hides more than another, by at least so much, under each of some attacks."""
    cases: Cases = {}
    for attack, one, other in pairs:
        first, second = (_client(found, attack, each) for each in (one, other))
        cases |= hidden(found, first, second, f"{attack}, {one}, {other}")
    return judge(claim + (FAR if bound else ""), cases, "every", bound, unit="")


def _client(found: Seen, attack: str, defense: str, against: str = "") -> Cell | None:
    cells = found.select(attack=attack, defense=defense, against=against, labels="inferred", stage="untrained")
    return next(cells, None)


def case(found: Seen, place: Cell) -> str:
    """A client's name among the cases of a claim."""
    own = [place.defense] if ":" in place.defense else []
    return ", ".join([place.attack, *differing(found, place).values(), *own])


def _mark(found: Seen, place: Cell, knowing: Cell | None) -> str:
    lost = hidden(found, place, knowing, "").values()
    return PLAIN_ONLY if any(case is not None and case.low > SAME for case in lost) else ""


def table2(found: Seen) -> list[Line]:
    """Table 2's privacy rows."""

    def paper(place: Cell) -> str:
        k = shares(place.defense)
        return of_network(_pair(TABLE_2.get((*k, place.attack)) if k else None), place.model)

    return privacy_lines(found, paper)


def table2_claims(found: Seen) -> list[Finding]:
    """Rob depends on k1 + k2, IG on p = k1 / k2."""
    by_total, by_ratio = _rising(found, "rob", sum), _rising(found, "ig", lambda k: k[0] / k[1])
    return [
        judge("a larger k1 + k2 protects better against Rob, at every step", by_total, "every", unit=""),
        judge("a larger p = k1 / k2 protects better against IG, at every step", by_ratio, "every", unit=""),
    ]


def models(paper_data: str, found: Seen) -> tuple[list[Line], list[Finding]]:
    """Tables 5 and 6: IG and Rob on more networks."""

    def paper(place: Cell) -> str:
        return _pair(TABLE_5_6.get((paper_data, place.attack, place.model, place.defense)))

    cases: Cases = {}
    for place in found.select(defense="dgp"):
        cases |= hidden(found, place, place._replace(defense="none"), case(found, place))
    protects = judge(f"DGP protects every network under Rob and IG{FAR}", cases, "every", HIDDEN, unit="")
    return privacy_lines(found, paper), [protects, *knowing_claims(found)]


table5, table6 = partial(models, "cifar10"), partial(models, "cifar100")


def gallery(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Figs. 5 to 9: the pictures are on the page; here their scores, and whether DGP's are the least like the truth."""
    cases: Cases = {}
    for place in found.select(defense="dgp"):
        for other in found.places:
            if other._replace(defense=place.defense) == place and other != place:
                cases |= hidden(found, place, other, f"{case(found, place)}, {other.defense}")
    told = [labels_claim(found)] if any(place.attack == "ggl" for place in found.places) else []
    best = judge("DGP protects better than every other defense", cases, "every", unit="")
    return privacy_lines(found, lambda place: ""), [best, *told, *knowing_claims(found)]


def labels_claim(found: Seen) -> Finding:
    """Section 4.1's second reason: pruning the largest entries should hide the label."""
    right: Cases = {
        case(found, place): combine(lambda share: 0.5 - share, found.of(place, "label_accuracy"))
        for place in found.select(defense="dgp")
    }
    return judge("DGP hides the label: less than half of the labels are found", right, "every")


def shares(defense: str) -> tuple[float, float] | None:
    """k1 and k2 of a DGP that is written with its settings."""
    from secateur.config import defense_of_updates

    part = defense_of_updates(defense).acting_on("upload")
    return part.make().shares if part is not None and part.name == "dgp" else None


def _rising(found: Seen, attack: str, order: Callable[[tuple[float, float]], float]) -> Cases:
    """How much more each setting of DGP hides than the one before it."""
    own = [(order(k), place) for place in found.select(attack=attack, defense="dgp") if (k := shares(place.defense))]
    cases: Cases = {}
    for (low, one), (high, two) in pairwise(sorted(own, key=lambda pair: pair[0])):
        cases |= hidden(found, two, one, f"{low:.3g} to {high:.3g}")
    return cases


def _pair(numbers: tuple[float, float] | None) -> str:
    return "" if numbers is None else "LPIPS {}, SSIM {}".format(*numbers)
