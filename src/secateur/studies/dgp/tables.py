"""Tables of dgp: reconstructions (Tables 1, 2, 5 and 6, Fig. 3, galleries of Figs. 5 to 9), and training accuracy.

Each line of reconstructions has the plain attacker, and beside it the best of the attackers that know of the defense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from secateur.config import defense_of_updates
from secateur.metrics.estimates import combine
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Cases, Finding, judge_claims
from secateur.studies.dgp.results import ACCURACY, AttackKey, DgpResults, TrainingKey, base
from secateur.studies.table import Cells, TableLine, Tabulated, find_printed, sparkline

MEASURES = ("lpips", "cw_ssim")
EXTREMES = ("lpips_min", "cw_ssim_max")  # of Rob's pictures
PRINTED = {"lpips": "LPIPS", "cw_ssim": "SSIM", "lpips_min": "least LPIPS", "cw_ssim_max": "most SSIM"}
SAME = 0.02  # of LPIPS or CW-SSIM: an eye sees no smaller difference
SAME_SHARE = ("top-k", "outpost")  # send as many entries as DGP
RECOVERED, LEFT_OUT, TRAINED = "What attackers recover", "Left out", "Accuracy of collaborative training"
PLAIN_ONLY = "stands only against the plain attacker"
FEEDBACK = "+error-feedback"
TRAFFIC = {"ratio": "bytes / dense", "paper_ratio": "as the paper counts", "gamma_1": "gamma_1"}
TRAFFIC |= {"residual_mean": "residual"}


def fig3(results: DgpResults) -> Tabulated:
    """Return Fig. 3, and the reconstructions of Table 1, with the claims of Section 6.2."""
    return privacy_lines(results, _table1), [*judge_plain(results), *judge_adaptive(results)]


def table1(results: DgpResults) -> Tabulated:
    """Return Table 1: the quality of the reconstructions, and the final accuracy."""
    lines, findings = fig3(results)
    similar = ("ats", "soteria", "precode", "outpost", "top-k", "dgp")
    cost = {name: _gain(results, name, "none") for name in similar}
    noise = {"noise": _gain(results, "none", "noise")}
    findings += judge_claims("dgp", "table1", similar=cost, noise=noise)
    return lines + accuracy_lines(results, _table1_accuracy), findings


def table2(results: DgpResults) -> Tabulated:
    """Return Table 2: DGP by k1 and k2, reconstructions and accuracy."""

    def paper(client: AttackKey) -> str:
        return of_network(_pair(find_printed("dgp", "table_2", client.attack, *shares(client.defense))), client.model)

    def paper_accuracy(training: TrainingKey) -> str:
        return _percent(find_printed("dgp", "table_2_accuracy", *shares(training.defense)), training)

    trainings = results.trainings()
    by_shares = {shares(training.defense): training for training in trainings.keys}
    usual, strongest = by_shares.get((0.05, 0.75)), ((0.06, 0.9), (0.2, 0.6))
    cost = {f"{k[0]:g}, {k[1]:g}": trainings.less(usual, by_shares.get(k), ACCURACY) for k in strongest}
    lines = privacy_lines(results, paper) + accuracy_lines(results, paper_accuracy)
    total, ratio = _steps_up(results, "rob", sum), _steps_up(results, "ig", lambda k: k[0] / k[1])
    return lines, judge_claims("dgp", "table2", total=total, ratio=ratio, cost=cost)


def _networks(data: str, results: DgpResults) -> Tabulated:
    """Return Table 5 or 6: IG and Rob on more networks."""

    def paper(client: AttackKey) -> str:
        return _pair(find_printed("dgp", "table_5_6", data, client.attack, client.defense, client.model))

    cases: Cases = {}
    for client in results.select(defense="dgp"):
        cases |= hide(results, client, client._replace(defense="none"), case(results, client))
    return privacy_lines(results, paper), [*judge_claims("dgp", "table5", hidden=cases), *judge_adaptive(results)]


table5, table6 = partial(_networks, "cifar10"), partial(_networks, "cifar100")


def table7(results: DgpResults) -> Tabulated:
    """Return Table 7: Top-k at 95 % against DGP at 80 %, on CIFAR-100."""
    known = results.trainings()
    cases = {x.model: known.less(x, known.other(x, defense="top-k"), ACCURACY) for x in known.select(defense="dgp")}
    lines = accuracy_lines(
        results, lambda x: _percent(find_printed("dgp", "table_7", base(x.defense), x.model), x, x.model)
    )
    return lines, judge_claims("dgp", "table7", better=cases)


def fig2(results: DgpResults) -> Tabulated:
    """Return Fig. 2: Top-k against DGP, the quality of IG's reconstructions and the accuracy over the epochs."""
    lines, _ = fig3(results)
    by_defense = {base(client.defense): client for client in results.clients}
    apart = hide(results, by_defense.get("dgp"), by_defense.get("top-k"), "ig")
    gap = {"accuracy": _gain(results, "dgp", "top-k")}
    lines += accuracy_lines(results, _table1_accuracy)
    return lines, judge_claims("dgp", "fig2", hidden=apart, accuracy=gap)


def fig4(results: DgpResults) -> Tabulated:
    """Return Fig. 4: accuracy with and without error feedback, on several networks and data sets."""
    known = results.trainings()
    several = len({x.data for x in known.keys}) > 1
    near, gain, aligned = Cases(), Cases(), Cases()
    for x in known.keys:
        if x.defense == "dgp" + FEEDBACK:
            name, bare = f"{x.model}, {x.data}" if several else x.model, known.other(x, defense="none")
            near[name] = known.less(x, bare, ACCURACY)
            gain[name] = known.less(x, x._replace(defense="dgp"), ACCURACY)
            aligned[name] = known.less(known.other(x, defense="adgp"), bare, ACCURACY)
    return accuracy_lines(results), judge_claims("dgp", "fig4", near=near, gain=gain, aligned=aligned)


def gallery(results: DgpResults) -> Tabulated:
    """Return the scores of the pictures of Figs. 5 to 9, which the page shows; judge if DGP hides most."""
    cases: Cases = {}
    for client in results.select(defense="dgp"):
        for other in results.clients:
            if other._replace(defense=client.defense) == client and other != client:
                cases |= hide(results, client, other, f"{case(results, client)}, {other.defense}")
    findings = judge_claims("dgp", "gallery", best=cases)
    if any(client.attack == "ggl" for client in results.clients):  # the second reason of Section 4.1
        right = {
            case(results, client): combine(lambda share: 0.5 - share, results.of(client, "label_accuracy"))
            for client in results.select(defense="dgp")
        }
        findings += judge_claims("dgp", "gallery", labels=right)
    return privacy_lines(results), [*findings, *judge_adaptive(results)]


def privacy_lines(results: DgpResults, paper: Callable[[AttackKey], str] = lambda client: "") -> list[TableLine]:
    """Return a line for each client: scores of the plain attacker, and of the best one that knows of the defense."""
    lines = []
    for client in results.clients:
        title = f"{client.defense} ({client.against} pictures)" if client.against else client.defense
        labels = {"attack": client.attack, "defense": title} | select_labels(results, client)
        adaptive = results.best_adaptive(client)
        names = (*MEASURES, *(EXTREMES if client.attack == "rob" else ()), "label_accuracy")
        cells: Cells = {name: results.mean(client, name) for name in names}
        cells["adaptive"] = adaptive.adaptive if adaptive else ""
        if adaptive is not None:
            cells |= {f"adaptive {name}": results.mean(adaptive, name) for name in MEASURES}
        lost = hide(results, client, adaptive, "").values()
        mark = PLAIN_ONLY if any(case is not None and case.low > SAME for case in lost) else ""
        lines.append(TableLine(labels, cells, paper(client), mark, RECOVERED))
    return lines


def accuracy_lines(results: DgpResults, paper: Callable[[TrainingKey], str] = lambda training: "") -> list[TableLine]:
    """Return one line per training: final accuracy, accuracy over the epochs, traffic and residual."""
    lines, trainings = [], results.trainings()
    for training in trainings.keys:
        varied = [name for name in ("model", "data") if len({getattr(other, name) for other in trainings.keys}) > 1]
        labels = {"defense": training.defense} | {name: getattr(training, name) for name in varied}
        cells: Cells = {ACCURACY: trainings.mean(training, ACCURACY), "over_epochs": _curve(results, training)}
        cells |= {title: trainings.mean(training, name) for name, title in TRAFFIC.items()}
        lines.append(TableLine(labels, cells, paper(training), part=TRAINED))
    return lines


def left_out_lines(results: DgpResults) -> list[TableLine]:
    """Return a line for each setting that could not be measured."""
    lines = []
    for row in results.left_out:
        labels = {"defense": row.defense or "none", "model": row.model, "reason": row.note or ""}
        lines.append(TableLine(labels, {}, part=LEFT_OUT))
    return lines


def _curve(results: DgpResults, training: TrainingKey) -> str:
    """Return the first seed's accuracy over the epochs as one line of text, scaled to its maximum."""
    rows = [
        row
        for row in results.rows
        if row.metric == ACCURACY
        and row.extra.get("study") == "training"
        and TrainingKey(row.defense or "none", row.model, row.dataset) == training
    ]
    values = [row.value or 0.0 for row in rows if row.seed == rows[0].seed]
    return sparkline(values[:: max(1, len(values) // 20)])


def select_labels(results: DgpResults, client: AttackKey) -> dict[str, str]:
    """Return the labels in which the clients of a study differ, beside attack and defense."""
    names = ("model", "data", "batch_size", "labels", "stage")
    return {name: str(getattr(client, name)) for name in names if len({getattr(x, name) for x in results.clients}) > 1}


def case(results: DgpResults, client: AttackKey) -> str:
    """Return the client's name among the cases of a claim."""
    settings = [client.defense] if ":" in client.defense else []
    return ", ".join([client.attack, *select_labels(results, client).values(), *settings])


def hide(results: DgpResults, one: AttackKey | None, other: AttackKey | None, name: str) -> Cases:
    """Return how much less is seen of one client than of another: LPIPS is higher, CW-SSIM lower."""
    lpips, cw_ssim = results.less(one, other, "lpips"), results.less(other, one, "cw_ssim")
    return {f"{name}, LPIPS": lpips, f"{name}, CW-SSIM": cw_ssim}


def _table1(client: AttackKey) -> str:
    """Return Table 1's numbers for the client, with the paper's network if another stands for it."""
    column = " ".join(filter(None, (base(client.defense), client.against)))
    values = {text: find_printed("dgp", "table_1", client.attack, name, column) for name, text in PRINTED.items()}
    numbers = ", ".join(f"{text} {value:.3g}" for text, value in values.items() if value is not None)
    return of_network(numbers, client.model, "cnn6" if client.attack == "r-gap" else "resnet18")


def _table1_accuracy(training: TrainingKey) -> str:
    return _percent(find_printed("dgp", "table_1_accuracy", base(training.defense)), training)


def of_network(numbers: str, model: str, paper: str = "resnet18") -> str:
    """Return numbers of the paper, with its network if that is another one."""
    return numbers if model == paper or not numbers else f"{numbers} ({paper})"


def _pair(numbers: list[float] | None) -> str:
    return "" if numbers is None else "LPIPS {}, SSIM {}".format(*numbers)


def _percent(value: float | None, training: TrainingKey, network: str = "resnet18") -> str:
    """Format an accuracy of the paper, with the paper's network if ours is another one."""
    return "" if value is None else of_network(f"{100 * value:.2f}%", training.model, network)


def shares(defense: str) -> tuple[float, float]:
    """Return k1 and k2 of a DGP by its text with settings; zeros for another defense."""
    part = defense_of_updates(defense).find_part("upload")
    return part.make().shares if part is not None and part.name == "dgp" else (0.0, 0.0)


def _gain(results: DgpResults, one: str, other: str) -> Estimate | None:
    """Return the accuracy of training under one defense less that under another, both without their settings."""
    trainings = results.trainings()
    return trainings.less(trainings.one(defense=one), trainings.one(defense=other), ACCURACY)


def judge_plain(results: DgpResults) -> list[Finding]:
    """Judge the claims of Section 6.2 about plain attackers."""
    every, shut, pruned = ("r-gap", "ig", "gi", "rob"), ("soteria", "noise", "top-k", "outpost", "dgp"), SAME_SHARE
    open_to_rob = [("ats", "used"), ("soteria", ""), ("precode", ""), ("noise", "")]
    ssim = {
        defense: results.mean(client, "cw_ssim")
        for defense, against in open_to_rob
        if (client := _client(results, "rob", defense, against))
    }
    return judge_claims(
        "dgp",
        "recovery",
        dgp=_compare(results, [(attack, "dgp", "none") for attack in every]),
        open=ssim,
        rob=_compare(results, [("rob", defense, "none") for defense in pruned]),
        passive=_compare(results, [(attack, "dgp", defense) for attack in ("ig", "gi") for defense in pruned]),
        r_gap=_compare(results, [("r-gap", defense, "none") for defense in shut]),
    )


def _compare(results: DgpResults, pairs: Iterable[tuple[str, str, str]]) -> Cases:
    """Return how much more one defense hides than the other; `pairs` are (attack, one, other)."""
    cases: Cases = {}
    for attack, one, other in pairs:
        first, second = (_client(results, attack, defense) for defense in (one, other))
        cases |= hide(results, first, second, f"{attack}, {one}, {other}")
    return cases


def _client(results: DgpResults, attack: str, defense: str, against: str = "") -> AttackKey | None:
    """Return the client of the untrained model whose labels are inferred, if it was attacked."""
    return results.one(attack=attack, defense=defense, against=against, labels="inferred", stage="untrained")


def _steps_up(results: DgpResults, attack: str, order: Callable[[tuple[float, float]], float]) -> Cases:
    """Return how much more each setting of DGP hides than the one before it."""
    ranks = [(order(shares(client.defense)), client) for client in results.select(attack=attack, defense="dgp")]
    cases: Cases = {}
    for (low, one), (high, two) in pairwise(sorted(ranks, key=lambda pair: pair[0])):
        cases |= hide(results, two, one, f"{low:.3g} to {high:.3g}")
    return cases


def judge_adaptive(results: DgpResults) -> list[Finding]:
    """Judge if each defense hides as much from an attacker that knows of it; the paper does not ask this."""
    findings = []
    for defense in ("soteria", "precode", "top-k", "outpost", "dgp", "adgp"):
        cases: Cases = {}
        for client in results.select(defense=defense):
            cases |= hide(results, results.best_adaptive(client), client, case(results, client))
        if any(case is not None for case in cases.values()):
            findings += judge_claims("dgp", "recovery", {"defense": defense}, adaptive=cases)
    return findings
