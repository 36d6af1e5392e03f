"""Tables of dgp by setting of DGP, by network and by batch: Tables 2, 5 and 6, and the galleries of Figs. 5 to 9."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from secateur.studies.claims import Finding, judge
from secateur.studies.dgp_found import Cell, Seen
from secateur.studies.dgp_numbers import TABLE_2, TABLE_5_6
from secateur.studies.dgp_privacy import FAR, HIDDEN, Cases, case, hidden, knowing_claims, of_network, privacy_lines
from secateur.studies.measured import combine
from secateur.studies.tables import Line


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
