"""Tables of priprune: attacks on base prunings (Figs. 3, A1, A2 and A3), then defenses.

Those are Table 2, Table A1, Figs. 6, 8, 9, A4 and A5. Three more are not in the paper: `alpha`, about settings that the
paper does not state, `join_rounds`, about clients whose batch repeats, and `defenses`, with all on one axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from secateur.attacks.inversion.adaptive import MAGNITUDES
from secateur.evaluation.attack_strength import list_modes
from secateur.metrics.estimates import combine, correlation, mean, mean_correlation
from secateur.metrics.membership import Estimate
from secateur.report.summary import group_by
from secateur.studies import read_data
from secateur.studies.priprune.results import (
    ACCURACY,
    AMI,
    CHANCE,
    GI,
    LOSS,
    NMI,
    PSNR,
    SGI,
    WITHHELD,
    Course,
    Place,
    PripruneFederation,
    PripruneResults,
    attackers,
    lines,
    paired_difference,
)
from secateur.studies.table import Cases, Finding, TableLine, Tabulated, find_printed, judge, verdict

NETWORKS = {"femnist": "conv-2", "cifar10": "vgg-11"}  # of the paper, by data set
LAMBDAS = {"accuracy": 5.0, "privacy": 15.0, "sharing": 2e-5}  # and their defaults
BOTH, SQUARES = "sgi:adaptive=support:follows=true", "sgi:magnitudes=true"
OPEN = {"alpha": ("alpha_0", 0.5), "step": ("its step", 0.01), "temperature": ("the temperature", 5.0)}  # defaults


def fig3(results: PripruneResults) -> Tabulated:
    """Return Fig. 3: GI against SGI by base pruning and rate, with dense and with masked broadcast.

    With a masked broadcast the two are the same attack but for FedDST. So the claim is judged with a dense one.
    """
    cases: Cases = {
        f"{federation.base} {federation.rate:g}": paired_difference(
            *(results.course(federation, NMI, attack) for attack in (SGI, GI))
        )
        for federation in results.select(broadcast="dense")
    }
    findings = results.judge("stronger", sgi=cases)
    return _mark_lines(results), [*findings, *_judge_falls(results, SGI), *_judge_agreement(results, SGI)]


def figa1(results: PripruneResults) -> Tabulated:
    """Return Fig. A1: the classic attack on pruned models, by pruning rate."""
    cases: Cases = {}
    for federation in results.cells:
        if federation.rate > 0:
            above = {seed: _above_chance(results, federation, seed) for seed in results.over(federation, NMI, GI)}
            cases[f"{federation.base} {federation.rate:g}"] = combine(lambda value: -value, above)
    return lines(results), [*results.judge("figa1", fails=cases), *_judge_falls(results, GI)]


def figa2(results: PripruneResults) -> Tabulated:
    """Return Fig. A2: NMI and PSNR by pruning rate, and their agreement."""
    falls = [*_judge_falls(results, GI), *_judge_falls(results, GI, PSNR, "PSNR")]
    return lines(results), [*falls, *_judge_agreement(results, GI)]


def figa3(results: PripruneResults) -> Tabulated:
    """Return Fig. A3: scores of the pictures by pruning rate and base pruning; the page shows the pictures."""
    return lines(results), [*_judge_falls(results, SGI), *_judge_falls(results, SGI, "ssim", "SSIM")]


def _judge_agreement(results: PripruneResults, attack: str) -> list[Finding]:
    """Judge that NMI and PSNR are correlated over the federations of a seed; Student's interval is over seeds."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for federation in results.cells:
        nmi, psnr = (results.over(federation, metric, attack) for metric in (NMI, PSNR))
        for seed in nmi.keys() & psnr.keys():
            by_seed.setdefault(seed, []).append((nmi[seed].value, psnr[seed].value))
    known = [r for pairs in by_seed.values() if (r := correlation(pairs)) is not None]
    if len(by_seed) == 1:
        (pairs,) = by_seed.values()
        return results.judge(
            "agreement", agree={f"r over {len(pairs)} federations of one seed": next(iter(known), None)}
        )
    return results.judge("agreement", agree={"r within a seed": mean_correlation([r.value for r in known])})


def _mark_lines(results: PripruneResults) -> list[TableLine]:
    """Return the lines, with a mark where GI and SGI are the same attack."""
    owners = [federation for federation in results.cells for _ in attackers(results, federation)]
    table = []
    for federation, line in zip(owners, lines(results), strict=True):
        gi, sgi = (results.course(federation, NMI, attack) for attack in (GI, SGI))
        table.append(replace(line, mark="GI and SGI are the same here") if gi and gi == sgi else line)
    return table


def _judge_falls(results: PripruneResults, attack: str, metric: str = NMI, name: str = "NMI") -> list[Finding]:
    """Judge that a measure falls from each pruning rate to the next higher one, all else being equal."""
    cases: Cases = {}
    for group in group_by(results.cells, lambda federation: federation._replace(rate=0.0)).values():
        for low, high in pairwise(sorted(group, key=lambda federation: federation.rate)):
            case = f"{low.base}, {low.broadcast}, {low.rate:g} to {high.rate:g}"
            cases[case] = results.less(low, high, metric, attack)
    return results.judge("falls", {"measure": name}, falls=cases)


def _above_chance(results: PripruneResults, federation: PripruneFederation, seed: int) -> Estimate:
    """Return NMI minus its chance level, for one seed."""
    courses = (results.course(federation, metric, GI) for metric in (NMI, CHANCE))
    of_seed = ({key: value for key, value in course.items() if key[0] == seed} for course in courses)
    difference = paired_difference(*of_seed)
    assert difference is not None
    return difference


def table2(results: PripruneResults) -> Tabulated:
    """Return Table 2: NMI of base prunings with and without PriPrune."""
    findings = results.judge("table2")
    for data, base in (("femnist", "prunefl"), ("cifar10", "feddst")):
        share = find_printed("priprune", "saved", data, base)
        for federation in results.select(defense="priprune", base=base):
            if results.stands.get((federation.model, federation.data)) == data:
                saved = results.saving(results.other(federation, defense="none"), federation)
                claim = _read_claim("saved.half", share=f"{100 * share:g}", base=base, data=data)
                findings.append(judge(claim, {federation.data: saved}, "every", share / 2, key="saved.half"))
    return lines(results, lambda federation: _format_printed(results, federation)), [
        *findings,
        *_judge_informed(results),
    ]


def fig9(results: PripruneResults) -> Tabulated:
    """Return Fig. 9: Table 2 with the accuracies, on the trade-off plane of the page."""
    table, findings = table2(results)
    return table, [*results.judge("fig9"), *findings]


def tablea1(results: PripruneResults) -> Tabulated:
    """Return Table A1: NMI by the three lambdas."""
    by_lambdas: dict[tuple[float, ...], PripruneFederation] = {
        tuple(_setting(federation, name, usual) for name, usual in LAMBDAS.items()): federation
        for federation in results.select(defense="priprune")
    }
    cases: Cases = {}
    for (accuracy, privacy, sharing), federation in by_lambdas.items():
        higher = [key for key in by_lambdas if key[0] == accuracy and key[1] > privacy and key[2] == sharing]
        if higher:
            after = min(higher)
            case = f"{accuracy:g}, {sharing:g}: {privacy:g} to {after[1]:g}"
            cases[case] = results.less(federation, by_lambdas[after])
    paper = {by_lambdas[key]: value for key, value in _table_a1(by_lambdas).items()}
    findings = results.judge("tablea1", lower=cases)
    return lines(results, lambda federation: paper.get(federation, "")), findings


def fig6(results: PripruneResults) -> Tabulated:
    """Return Fig. 6: three ways to choose the withheld entries, each as real pruning and as pseudo-pruning."""
    return lines(results), [*results.judge("fig6"), *_judge_informed(results)]


def fig8(results: PripruneResults) -> Tabulated:
    """Return Fig. 8: fixed defense rates and PriPrune on PruneFL, over the rounds."""
    bare, learnt = results.one(defense="none"), results.one(defense="priprune")
    fixed = sorted(results.select(defense="pseudo-largest"), key=_rate)
    unreached = {f"{_rate(federation):g}": results.less(bare, federation, ACCURACY) for federation in fixed}
    most = {"NMI": results.less(fixed[-1] if fixed else None, learnt)}
    rates = [f"{100 * _rate(federation):g} %" for federation in fixed]
    return lines(results), [
        *results.judge("fig8", costly=_steps_up(results, fixed, ACCURACY), unreached=unreached),
        *_judge_rounds(results, bare, learnt),
        *results.judge(
            "fig8_rates",
            {"rate": rates[-1] if rates else "none"},
            comparable=most,
            hides=_steps_up(results, fixed, NMI),
        ),
        _judge_balance(results, learnt, fixed, "balance.rates", " and ".join(rates)),
        _judge_adaptation(results, learnt),
        *_judge_informed(results),
    ]


def figa4(results: PripruneResults) -> Tabulated:
    """Return Fig. A4: mixes of largest and random at one rate."""
    federations = sorted(results.select(defense="mix"), key=lambda federation: _setting(federation, "largest", 0.5))
    if not federations:
        return lines(results), []
    first, last = federations[0], federations[-1]
    accurate: Cases = {_share(federation): results.less(first, federation, ACCURACY) for federation in federations[1:]}
    private: Cases = {_share(federation): results.less(federation, last) for federation in federations[:-1]}
    hard: Cases = {_share(federation): results.less(last, federation, LOSS) for federation in federations[:-1]}
    return lines(results), results.judge("figa4", accurate=accurate, private=private, hard=hard)


def figa5(results: PripruneResults) -> Tabulated:
    """Return Fig. A5: largest at rising rates."""
    federations = [*results.select(defense="none"), *sorted(results.select(defense="largest"), key=_rate)]
    falls = {name: _steps_up(results, federations, metric) for name, metric in (("private", NMI), ("costly", ACCURACY))}
    hard = {f"{_rate(low):g} to {_rate(high):g}": results.less(high, low, LOSS) for low, high in pairwise(federations)}
    return lines(results), results.judge("figa5", hard=hard, **falls)


def alpha(results: PripruneResults) -> Tabulated:
    """Return the effect of alpha's start, its step and the temperature: the paper states none of them."""
    federations = list(results.select(defense="priprune"))
    rates = {federation: mean(results.last(federation, WITHHELD)) for federation in federations}
    findings: list[Finding] = []
    for name, (title, usual) in OPEN.items():
        by_value = {_setting(x, name, usual): rate for x, rate in rates.items() if _no_other_set(x, name)}
        values = [rate.value for rate in by_value.values() if rate is not None]
        spread = max(values, default=0.0) - min(values, default=0.0)
        case = Estimate(spread, spread, spread) if len(values) > 1 else None  # one value has no spread
        tried = f"{title} ({', '.join(f'{value:g}' for value in sorted(by_value))})"
        findings += results.judge("moves", {"setting": tried}, moves={"rate": case})
    bare = results.one(defense="none")
    cases: Cases = {federation.defense: results.less(bare, federation) for federation in federations}
    started = ", ".join(map(str, sorted({_setting(federation, "alpha", 0.5) for federation in federations})))
    return lines(results), [*findings, *results.judge("alpha", {"started": started}, private=cases)]


def squares(results: PripruneResults) -> Tabulated:
    """Return PruneFL with and without squared gradients of withheld weights, and what reading them adds."""
    cases: Cases = {}
    for federation in results.select(base="prunefl"):
        if MAGNITUDES in list_modes(federation.defense, federation.base):
            courses = [results.course(federation, NMI, name) for name in (BOTH, SQUARES)]
            cases[federation.defense] = paired_difference(courses[1], courses[0])
    return lines(results), results.judge("squares", reads=cases)


def defenses(results: PripruneResults) -> Tabulated:
    """Return every defense of an update on one axis, under its strongest attacker, and the sum of a round's updates."""
    results = results.under_strongest() or results
    bare, learnt = (results.one(defense=name, view="update") for name in ("none", "priprune"))
    alone = [federation for federation in results.select(view="update") if federation != learnt]
    others = [federation for federation in alone if federation != bare]
    cases: Cases = {federation.defense: results.less(federation, learnt) for federation in others}
    paid: Cases = {federation.defense: results.less(learnt, federation, ACCURACY) for federation in others}
    return lines(results), [
        *results.judge("defenses", private=cases, accurate=paid),
        _judge_balance(results, learnt, alone, "balance.all", "no defense and all others"),
        *_judge_sums(results, learnt),
    ]


def join_rounds(results: PripruneResults) -> Tabulated:
    """Return the leakage of clients whose batch repeats, alone and joined over their rounds.

    Updates of clients that the server had not met before are left out of the verdict: nothing was joined there.
    """
    cases: Cases = {}
    for federation in results.cells:
        for attack in results.attacks_on(federation):
            alone = re.sub(r":rounds=\d+", "", attack)
            if alone != attack:
                met = [row for row in results.rows_of(federation, NMI, attack) if row.extra.get("history", 1) > 1]
                several = {(row.seed, row.extra["round"], row.extra["client"]): row.value or 0.0 for row in met}
                cases[federation.defense] = paired_difference(results.course(federation, NMI, alone), several)
    return lines(results), results.judge("joined", alone=cases)


def _format_printed(results: PripruneResults, federation: PripruneFederation) -> str:
    """Return the cell of Table 2, with the paper's network if that is another one."""
    data = results.stands.get((federation.model, federation.data), "")
    pair = find_printed(
        "priprune", "table_2", data, federation.base, "none" if federation.defense == "none" else "priprune"
    )
    if pair is None:
        return ""
    value, spread = pair
    other = "" if federation.model == NETWORKS[data] and federation.data == data else f" ({NETWORKS[data]} on {data})"
    return f"{value:g} ± {spread:g}{other}"


def _table_a1(by_lambdas: Iterable[tuple[float, ...]]) -> dict[tuple[float, ...], str]:
    """Return the paper's cells; lambda_sha is matched by its order, since it is larger for a smaller network."""
    keys, names = list(by_lambdas), (2e-4, 2e-5, 2e-6)
    ranks = sorted({key[2] for key in keys}, reverse=True)
    chosen = names if len(ranks) == len(names) else (names[0], names[-1])[: len(ranks)]
    sharing = dict(zip(ranks, chosen, strict=False))
    cells = {key: find_printed("priprune", "table_a1", key[0], key[1], sharing.get(key[2], 0.0)) for key in keys}
    return {key: f"{value:.3f}" for key, value in cells.items() if value is not None}


def _setting(federation: PripruneFederation, name: str, usual: float) -> float:
    """Return a hyper-parameter from the text of the defense; `usual` if it is not there."""
    pairs = dict(pair.split("=") for pair in federation.defense.split(":")[1:])
    return float(pairs.get(name, usual))


def _read_claim(key: str, **words: str) -> str:
    """Return the words of a claim that code judges."""
    table, _, name = key.partition(".")
    return str(read_data("priprune", "claims")[table][name]["claim"]).format(**words)


def _judge_rounds(results: PripruneResults, bare: Place, learnt: Place) -> list[Finding]:
    """Judge that the defended update leaks less in every attacked round, each by an interval over seeds."""
    before, after = results.leakages(bare, learnt)
    cases: Cases = {
        f"round {number}": paired_difference({key: before[key] for key in keys}, after)
        for number, keys in group_by(before, lambda key: key[1]).items()
    }
    return results.judge("rounds", lower=cases)


def _judge_informed(results: PripruneResults) -> list[Finding]:
    """Judge what defenses hide from the strongest attacker, which the outcome picks; without several there is none."""
    findings = []
    for name in dict.fromkeys(results.label(key, "defense") for key in results.keys):
        cases: Cases = {}
        for key in results.select(defense=name) if name != "none" and len(results.attacks) > 1 else ():
            bare = results.other(key, defense="none")
            cases[f"{key.base}, {key.defense}"] = paired_difference(*results.strongest(bare, key, AMI))
        findings += results.judge("informed", {"defense": name}, hides=cases) if cases else []
    return findings


def _judge_balance(
    results: PripruneResults, learnt: Place, others: Iterable[PripruneFederation], key: str, names: str
) -> Finding:
    """Judge that no other is both as accurate and as private, by the intervals of both differences.

    A rival is behind if it is certainly worse in one of them, and as good if it is certainly no worse in both.
    """
    behind, as_good, rivals = 0, [], list(others) if learnt else []
    for rival in rivals:
        differences = results.less(learnt, rival, ACCURACY), results.less(rival, learnt)
        known = [case for case in differences if case is not None]
        behind += any(case.low > 0 for case in known)
        as_good += [rival.defense] if len(known) == 2 and all(case.high <= 0 for case in known) else []
    measured = f"{behind} of {len(rivals)} certainly worse in one"
    measured += f"; certainly as good in both: {', '.join(as_good)}" if as_good else ""
    outcome = verdict(behind, len(as_good), len(rivals), "every")
    return Finding(_read_claim(key, rivals=names), measured if rivals else "not measured here", outcome, key)


def _judge_adaptation(results: PripruneResults, learnt: Place) -> Finding:
    """Judge Fig. 8d: the rate changes over the rounds."""
    claim = "PriPrune's defense rate adapts: it changes over the rounds by more than 1 point"
    course = {} if learnt is None else results.course(learnt, WITHHELD)
    if not course:
        return judge(claim, {}, key="adapts")
    values = [value for _, value in sorted(course.items())]
    measured = f"from {100 * values[0]:.1f}% to {100 * values[-1]:.1f}%, between {100 * min(values):.1f}% and "
    case = Estimate(spread := max(values) - min(values), spread, spread)
    outcome = judge(claim, {"": case}, bound=0.01).verdict
    return Finding(claim, f"{measured}{100 * max(values):.1f}%", outcome, "adapts")


def _steps_up(results: PripruneResults, federations: Sequence[PripruneFederation], metric: str) -> Cases:
    """Return the metric of each federation less that of the next, which has the next higher rate."""
    return {
        f"{_rate(low):g} to {_rate(high):g}": results.less(low, high, metric) for low, high in pairwise(federations)
    }


def _rate(federation: PripruneFederation) -> float:
    """Return the defense rate; 0 without a defense."""
    return 0.0 if federation.defense == "none" else _setting(federation, "rate", 0.3)


def _share(federation: PripruneFederation) -> str:
    return f"{100 * _setting(federation, 'largest', 0.5) * _rate(federation):.0f} % largest"


def _no_other_set(federation: PripruneFederation, name: str) -> bool:
    """Return True if no other setting that the paper leaves open is set."""
    others = {"alpha", "step", "temperature", "normalise"} - {name}
    return not others & {pair.partition("=")[0] for pair in federation.defense.split(":")[1:]}


def _judge_sums(results: PripruneResults, learnt: Place) -> list[Finding]:
    """Judge how much secure aggregation hides, alone and with each defense, of all clients' pictures by round."""
    sums = list(results.select(view="sum"))
    less: Cases = {
        federation.defense: _in_rounds(results, federation._replace(view="update"), federation) for federation in sums
    }
    bare = results.one(defense="none", view="sum")
    enough = {"NMI": _in_rounds(results, learnt, bare)}
    return results.judge("sums", sums=less, enough=enough)


def _in_rounds(results: PripruneResults, one: Place, other: Place) -> Estimate | None:
    """Return one's NMI less the other's, both as means over the victims of a round."""
    return paired_difference(*map(by_round, results.leakages(one, other)))


def by_round(course: Course) -> Course:
    """Return the mean over the clients of each round."""
    rounds = group_by(course, lambda key: (key[0], key[1], -1))
    return {turn: sum(course[key] for key in keys) / len(keys) for turn, keys in rounds.items()}
