"""Tables of priprune about base prunings with and without PriPrune: Table 2, Fig. 9 and Table A1."""

from __future__ import annotations

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.priprune_defended import LITTLE, SGI, setting
from secateur.studies.priprune_found import NMI, Federation, Seen
from secateur.studies.priprune_lines import lines
from secateur.studies.priprune_numbers import SAVED, TABLE_2, TABLE_A1
from secateur.studies.tables import Line

Cases = dict[str, Estimate | None]
NETWORKS = {"femnist": "conv-2", "cifar10": "vgg-11"}  # the paper's


def table2(found: Seen) -> tuple[list[Line], list[Finding]]:
    """NMI of base prunings with and without PriPrune."""
    private: Cases = {
        f"{each.base}, {each.model} on {each.data}": found.less(found.with_defense(each, "none"), each, NMI, SGI)
        for each in found.select(defense="priprune")
    }
    findings = [judge("PriPrune reduces NMI on every base pruning", private, "every", unit="")]
    for (data, base), share in SAVED.items():
        for each in found.select(defense="priprune", base=base):
            if found.stands.get((each.model, each.data)) == data:
                saved = found.saved(found.with_defense(each, "none"), each)
                claim = f"PriPrune takes {100 * share:g} % of NMI away from {base}, {data}: at least half of that"
                findings.append(judge(claim, {each.data: saved}, "every", share / 2))
    return lines(found, lambda each: _printed(found, each)), findings


def fig9(found: Seen) -> tuple[list[Line], list[Finding]]:
    """The same with the accuracies, on the trade-off plane of the page."""
    made, findings = table2(found)
    kept: Cases = {
        f"{each.base}, {each.model} on {each.data}": found.gain(each, found.with_defense(each, "none"))
        for each in found.select(defense="priprune")
    }
    claim = f"PriPrune preserves accuracy (at most {100 * LITTLE:g} points less)"
    return made, [judge(claim, kept, "every", -LITTLE), *findings]


def tablea1(found: Seen) -> tuple[list[Line], list[Finding]]:
    """NMI by the three lambdas."""

    def lambdas(each: Federation) -> tuple[float, float, float]:
        return setting(each, "accuracy", 5), setting(each, "privacy", 15), setting(each, "sharing", 2e-5)

    own = {lambdas(each): each for each in found.select(defense="priprune")}
    cases: Cases = {}
    for (accuracy, privacy, sharing), each in own.items():
        higher = [key for key in own if key[0] == accuracy and key[1] > privacy and key[2] == sharing]
        if higher:
            after = min(higher)
            case = f"{accuracy:g}, {sharing:g}: {privacy:g} to {after[1]:g}"
            cases[case] = found.less(each, own[after], NMI, SGI)
    printed = {own[key]: value for key, value in _nearest(own).items()}
    claim = "a higher lambda_pri lowers NMI, in most steps"
    return lines(found, lambda each: printed.get(each, "")), [judge(claim, cases, unit="")]


def _nearest(own: dict[tuple[float, float, float], Federation]) -> dict[tuple[float, float, float], str]:
    """The paper's cells; lambda_sha is matched by its order, since it is larger for a smaller network."""
    ranks = sorted({key[2] for key in own}, reverse=True)
    names = sorted({key[2] for key in TABLE_A1}, reverse=True)
    chosen = names if len(ranks) == len(names) else [names[0], names[-1]][: len(ranks)]
    sharing = dict(zip(ranks, chosen, strict=False))
    cells = {key: TABLE_A1.get((int(key[0]), int(key[1]), sharing.get(key[2], 0.0))) for key in own}
    return {key: f"{value:.3f}" for key, value in cells.items() if value is not None}


def _printed(found: Seen, each: Federation) -> str:
    """Table 2's cell, with its network where that is another one."""
    data = found.stands.get((each.model, each.data), "")
    pair = TABLE_2.get((data, each.base))
    if pair is None:
        return ""
    value, spread = pair[each.defense != "none"]
    other = "" if each.model == NETWORKS[data] and each.data == data else f" ({NETWORKS[data]} on {data})"
    return f"{value:g} ± {spread:g}{other}"
