"""Privacy tables of dgp: Tables 1, 2, 5 and 6, Fig. 3, and the galleries of Figs. 5 to 9.

Each line has the plain attacker, and beside it the best of the attackers that know of the defense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp.paper_numbers import COLUMNS, TABLE_1, TABLE_2, TABLE_5_6
from secateur.studies.dgp.results import AttackKey, DgpResults, base
from secateur.studies.table import Cells, TableLine

MEASURES = ("lpips", "cw_ssim")
EXTREMES = (("lpips", "min"), ("cw_ssim", "max"))  # of Rob's pictures
OPEN = 0.5  # a CW-SSIM above this: the picture is recognised
HIDDEN = 0.1  # a distance from the baseline's LPIPS and CW-SSIM: the picture is not recognised
SAME = 0.02  # of LPIPS or CW-SSIM: an eye sees no smaller difference
FAR = f": LPIPS and CW-SSIM at least {HIDDEN:g} away from the baseline's"
RECOVERED, LEFT_OUT = "What attackers recover", "Left out"
PLAIN_ONLY = "stands only against the plain attacker"
Paper = Callable[[AttackKey], str]
Cases = dict[str, Estimate | None]


def table1(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return the privacy rows of Table 1 (and Fig. 3), with the claims of Section 6.2."""
    return privacy_lines(results, by_column), [*claims(results), *knowing_claims(results)]


def table2(results: DgpResults) -> list[TableLine]:
    """Return the privacy rows of Table 2."""

    def paper(cell: AttackKey) -> str:
        k = shares(cell.defense)
        return of_network(_pair(TABLE_2.get((*k, cell.attack)) if k else None), cell.model)

    return privacy_lines(results, paper)


def table2_claims(results: DgpResults) -> list[Finding]:
    """Judge that Rob depends on k1 + k2, and IG on p = k1 / k2."""
    by_total, by_ratio = _rising(results, "rob", sum), _rising(results, "ig", lambda k: k[0] / k[1])
    return [
        judge("a larger k1 + k2 protects better against Rob, at every step", by_total, "every", unit=""),
        judge("a larger p = k1 / k2 protects better against IG, at every step", by_ratio, "every", unit=""),
    ]


def models(paper_data: str, results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Table 5 or 6: IG and Rob on more networks."""

    def paper(cell: AttackKey) -> str:
        return _pair(TABLE_5_6.get((paper_data, cell.attack, cell.model, cell.defense)))

    cases: Cases = {}
    for cell in results.select(defense="dgp"):
        cases |= hidden(results, cell, cell._replace(defense="none"), case(results, cell))
    protects = judge(f"DGP protects every network under Rob and IG{FAR}", cases, "every", HIDDEN, unit="")
    return privacy_lines(results, paper), [protects, *knowing_claims(results)]


table5, table6 = partial(models, "cifar10"), partial(models, "cifar100")


def gallery(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return the scores of the pictures of Figs. 5 to 9, which the page shows; judge if DGP hides most."""
    cases: Cases = {}
    for cell in results.select(defense="dgp"):
        for other in results.places:
            if other._replace(defense=cell.defense) == cell and other != cell:
                cases |= hidden(results, cell, other, f"{case(results, cell)}, {other.defense}")
    labels = [labels_claim(results)] if any(cell.attack == "ggl" for cell in results.places) else []
    best = judge("DGP protects better than every other defense", cases, "every", unit="")
    return privacy_lines(results, lambda cell: ""), [best, *labels, *knowing_claims(results)]


def privacy_lines(results: DgpResults, paper: Paper) -> list[TableLine]:
    """Return a line for each client: scores of the plain attacker, and of the best one that knows of the defense."""
    lines = []
    for cell in results.places:
        labels = {"attack": cell.attack, "defense": title(cell)} | differing(results, cell)
        knowing = results.knowing(cell)
        cells: Cells = {name: mean(results.of(cell, name)) for name in MEASURES}
        if cell.attack == "rob":
            cells |= {f"{name}_{end}": mean(results.of(cell, f"{name}_{end}")) for name, end in EXTREMES}
        cells["label_accuracy"] = mean(results.of(cell, "label_accuracy"))
        cells["adaptive"] = knowing.adaptive if knowing else ""
        if knowing is not None:
            cells |= {f"adaptive {name}": mean(results.of(knowing, name)) for name in MEASURES}
        lines.append(TableLine(labels, cells, paper(cell), _mark(results, cell, knowing), RECOVERED))
    return lines


def _mark(results: DgpResults, cell: AttackKey, knowing: AttackKey | None) -> str:
    """Return the mark of a client whose defense loses to an attacker that knows of it."""
    lost = hidden(results, cell, knowing, "").values()
    return PLAIN_ONLY if any(case is not None and case.low > SAME for case in lost) else ""


def left_out_lines(results: DgpResults) -> list[TableLine]:
    """Return a line for each setting that could not be measured."""
    lines = []
    for row in results.left_out:
        labels = {"defense": row.defense or "none", "model": row.model, "reason": row.note or ""}
        lines.append(TableLine(labels, {}, part=LEFT_OUT))
    return lines


def title(cell: AttackKey) -> str:
    """Return the client's defense, for ATS with the pictures that are compared."""
    return f"{cell.defense} ({cell.against} pictures)" if cell.against else cell.defense


def differing(results: DgpResults, cell: AttackKey) -> dict[str, str]:
    """Return the labels in which the clients of a study differ, beside attack and defense."""
    names = ("model", "data", "batch_size", "labels", "stage")
    return {name: str(getattr(cell, name)) for name in names if len({getattr(x, name) for x in results.places}) > 1}


def by_column(cell: AttackKey) -> str:
    """Return Table 1's numbers for the client, with the paper's network if another stands for it."""
    column = COLUMNS.get((base(cell.defense), cell.against), "")
    named = {"lpips": "LPIPS", "cw_ssim": "SSIM", "lpips_min": "least LPIPS", "cw_ssim_max": "most SSIM"}
    printed = [(text, TABLE_1.get((cell.attack, name, column))) for name, text in named.items()]
    numbers = ", ".join(f"{text} {value:.3g}" for text, value in printed if value is not None)
    return of_network(numbers, cell.model, "cnn6" if cell.attack == "r-gap" else "resnet18")


def of_network(numbers: str, model: str, paper: str = "resnet18") -> str:
    """Return numbers of the paper, with its network if that is another one."""
    return numbers if model == paper or not numbers else f"{numbers} ({paper})"


def _pair(numbers: tuple[float, float] | None) -> str:
    return "" if numbers is None else "LPIPS {}, SSIM {}".format(*numbers)


def shares(defense: str) -> tuple[float, float] | None:
    """Return k1 and k2 of a DGP by its text with settings; None for another defense."""
    from secateur.config import defense_of_updates

    part = defense_of_updates(defense).acting_on("upload")
    return part.make().shares if part is not None and part.name == "dgp" else None


def claims(results: DgpResults) -> list[Finding]:
    """Judge the claims of Section 6.2 about plain attackers."""
    every, passive, shut = ("r-gap", "ig", "gi", "rob"), ("ig", "gi"), ("soteria", "noise", "top-k", "outpost", "dgp")
    open_to_rob = [("ats", "used"), ("soteria", ""), ("precode", ""), ("noise", "")]
    seen = {d: mean(results.of(cell, "cw_ssim")) for d, a in open_to_rob if (cell := _client(results, "rob", d, a))}
    return [
        _hides("DGP protects under every attack", results, [(attack, "dgp", "none") for attack in every], HIDDEN),
        judge(f"ATS, Soteria, PRECODE and noise fail under Rob: CW-SSIM above {OPEN:g}", seen, "every", OPEN, ""),
        _hides("Top-k and Outpost withstand Rob", results, [("rob", d, "none") for d in ("top-k", "outpost")], HIDDEN),
        _hides(
            "Top-k and Outpost are vulnerable to IG and GI, where DGP protects better",
            results,
            [(attack, "dgp", d) for attack in passive for d in ("top-k", "outpost")],
        ),
        _hides("all defenses but ATS withstand R-GAP", results, [("r-gap", d, "none") for d in shut], HIDDEN),
    ]


def _hides(claim: str, results: DgpResults, pairs: Iterable[tuple[str, str, str]], bound: float = 0.0) -> Finding:
    """Judge if one defense hides more than the other, by at least `bound`; `pairs` are (attack, one, other)."""
    cases: Cases = {}
    for attack, one, other in pairs:
        first, second = (_client(results, attack, defense) for defense in (one, other))
        cases |= hidden(results, first, second, f"{attack}, {one}, {other}")
    return judge(claim + (FAR if bound else ""), cases, "every", bound, unit="")


def _client(results: DgpResults, attack: str, defense: str, against: str = "") -> AttackKey | None:
    """Return the client of the untrained model whose labels are inferred, if it was attacked."""
    cells = results.select(attack=attack, defense=defense, against=against, labels="inferred", stage="untrained")
    return next(cells, None)


def _rising(results: DgpResults, attack: str, order: Callable[[tuple[float, float]], float]) -> Cases:
    """Return how much more each setting of DGP hides than the one before it."""
    ranks = [(order(k), cell) for cell in results.select(attack=attack, defense="dgp") if (k := shares(cell.defense))]
    cases: Cases = {}
    for (low, one), (high, two) in pairwise(sorted(ranks, key=lambda pair: pair[0])):
        cases |= hidden(results, two, one, f"{low:.3g} to {high:.3g}")
    return cases


def labels_claim(results: DgpResults) -> Finding:
    """Judge the second reason of Section 4.1: pruning the largest entries hides the label."""
    right: Cases = {
        case(results, cell): combine(lambda share: 0.5 - share, results.of(cell, "label_accuracy"))
        for cell in results.select(defense="dgp")
    }
    return judge("DGP hides the label: less than half of the labels are found", right, "every")


def knowing_claims(results: DgpResults) -> list[Finding]:
    """Judge if each defense hides as much from an attacker that knows of it; the paper does not ask this."""
    findings = []
    for defense in ("soteria", "precode", "top-k", "outpost", "dgp", "adgp"):
        cases: Cases = {}
        for cell in results.select(defense=defense):
            cases |= hidden(results, results.knowing(cell), cell, case(results, cell))
        if any(case is not None for case in cases.values()):
            claim = f"{defense} hides as much from an attacker who knows of it, within {SAME:g} (not in the paper)"
            findings.append(judge(claim, cases, "every", -SAME, unit=""))
    return findings


def hidden(results: DgpResults, one: AttackKey | None, other: AttackKey | None, name: str) -> Cases:
    """Return how much less is seen of one client than of another: LPIPS is higher, CW-SSIM lower."""
    lpips, cw_ssim = results.less(one, other, "lpips"), results.less(other, one, "cw_ssim")
    return {f"{name}, LPIPS": lpips, f"{name}, CW-SSIM": cw_ssim}


def case(results: DgpResults, cell: AttackKey) -> str:
    """Return the client's name among the cases of a claim."""
    settings = [cell.defense] if ":" in cell.defense else []
    return ", ".join([cell.attack, *differing(results, cell).values(), *settings])
