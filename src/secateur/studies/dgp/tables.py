"""Tables of dgp: reconstructions and training accuracy.

Those are Tables 1, 2, 5, 6 and 7, Figs. 2 to 4, and the galleries of Figs. 5 to 9. Each line of reconstructions has the
paper's plain attacker, and beside it the best of the others. Its own outcome picks the best.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from secateur.config import defense_of_updates
from secateur.evaluation.attack_strength import SMOOTH
from secateur.metrics.estimates import combine
from secateur.studies.dgp.results import PAIRED, AttackKey, DgpResults, TrainingKey, base
from secateur.studies.dgp.steps import weak_modes
from secateur.studies.table import Cases, Cells, Finding, TableLine, Tabulated, curve, find_printed

ACCURACY = "test_accuracy"
EXTREMES = ("lpips_min", "cw_ssim_max")  # of Rob's pictures
PRINTED = {"lpips": "LPIPS", "cw_ssim": "SSIM", "lpips_min": "least LPIPS", "cw_ssim_max": "most SSIM"}
SAME = 0.02  # of LPIPS or CW-SSIM: an eye sees no smaller difference
RECOVERED, LEFT_OUT, TRAINED = "What attackers recover", "Left out", "Accuracy of collaborative training"
PLAIN_ONLY = "who knows of the defense sees more"
SMOOTH_MORE = f"{SMOOTH} sees more"
UNMET = "met the plain attacker only"
FEEDBACK = "+error-feedback"
RESIDUAL = "residual_ratio"  # the norm of a trained residual by that of the gradient
TRAFFIC = {"ratio": "bytes / dense", "paper_ratio": "as the paper counts", "gamma_1": "gamma_1"}
TRAFFIC |= {"residual_mean": "residual"}


def fig3(results: DgpResults) -> Tabulated:
    """Return Fig. 3, and the reconstructions of Table 1, with the claims of Section 6.2."""
    open_to_rob = {"ats": "used", "soteria": "", "precode": "", "noise": ""}
    ssim = {
        client.defense: results.mean(client, "cw_ssim")
        for client in results.select(attack="rob", labels="inferred", stage="untrained")
        if open_to_rob.get(base(client.defense)) == client.against
    }
    return privacy_lines(results, _table1), [*results.judge("recovery", open=ssim), *judge_attackers(results)]


def table1(results: DgpResults) -> Tabulated:
    """Return Table 1: the quality of the reconstructions, and the final accuracy."""
    lines, findings = fig3(results)
    return lines + accuracy_lines(results, _table1_accuracy), [*findings, *results.judge("table1")]


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
    informed = _steps_up(results, "rob", sum, informed=True)
    findings = results.judge("table2", total=total, ratio=ratio, cost=cost, informed=informed)
    return lines, [*findings, *judge_smooth(results)]


def compare_networks(data: str, results: DgpResults) -> Tabulated:
    """Return Table 5 or 6: IG and Rob on more networks."""

    def paper(client: AttackKey) -> str:
        return _pair(find_printed("dgp", "table_5_6", data, client.attack, client.defense, client.model))

    return privacy_lines(results, paper), [*results.judge("table5"), *judge_attackers(results)]


table5, table6 = partial(compare_networks, "cifar10"), partial(compare_networks, "cifar100")


def table7(results: DgpResults) -> Tabulated:
    """Return Table 7: Top-k at 95 % against DGP at 80 %, on CIFAR-100."""

    def paper(training: TrainingKey) -> str:
        number = find_printed("dgp", "table_7", base(training.defense), training.model)
        return _percent(number, training, training.model)

    return accuracy_lines(results, paper), results.judge("table7")


def fig2(results: DgpResults) -> Tabulated:
    """Return Fig. 2: Top-k against DGP, the quality of IG's reconstructions and the accuracy over the epochs."""
    lines = privacy_lines(results, _table1) + accuracy_lines(results, _table1_accuracy)
    return lines, [*results.judge("fig2"), *judge_smooth(results)]


def fig4(results: DgpResults) -> Tabulated:
    """Return Fig. 4: accuracy with and without error feedback, on several networks and data sets."""
    return accuracy_lines(results), results.judge("fig4")


def gallery(results: DgpResults) -> Tabulated:
    """Return the scores of the pictures of Figs. 5 to 9, which the page shows; judge if DGP hides most."""
    cases: Cases = {}
    for client in results.select(defense="dgp"):
        for other in results.clients:
            if other._replace(defense=client.defense) == client and other != client:
                cases |= results.contrast(client, other, case=f"{results.title(client)}, {other.defense}")
    findings = results.judge("gallery", best=cases)
    if any(client.attack == "ggl" for client in results.clients):  # the second reason of Section 4.1
        right = {
            results.title(client): combine(
                lambda share: 0.5 - share, results.of(results.pick_attacker(client, "label_accuracy"), "label_accuracy")
            )
            for client in results.select(defense="dgp")
        }
        findings += results.judge("labels", right=right)
    return privacy_lines(results), [*findings, *judge_attackers(results)]


def privacy_lines(results: DgpResults, paper: Callable[[AttackKey], str] = lambda client: "") -> list[TableLine]:
    """Return a line for each client: scores of the paper's plain attacker, and of the best of the others."""
    lines = []
    for client in results.clients:
        title = f"{client.defense} ({client.against} pictures)" if client.against else client.defense
        labels = {"attack": client.attack, "defense": title} | results.list_varied(client)
        adaptive = results.best_adaptive(client)
        names = (*PAIRED, *(EXTREMES if client.attack == "rob" else ()), "label_accuracy")
        names += (RESIDUAL,) if any(results.of(other, RESIDUAL) for other in results.clients) else ()
        cells: Cells = {name: results.mean(client, name) for name in names}
        cells["adaptive"] = adaptive.adaptive if adaptive else ""
        if adaptive is not None:
            cells |= {f"adaptive {name}": results.mean(adaptive, name) for name in PAIRED}
        mark = _mark(results, client, adaptive)
        printed = paper(client) if client.stage == "untrained" else ""  # the paper has no other stage
        lines.append(TableLine(labels, cells, printed, mark, RECOVERED))
    return lines


def _mark(results: DgpResults, client: AttackKey, best: AttackKey | None) -> str:
    """Return the remark on a client; `best` is the best of its attackers beside the paper's plain one."""
    if results.best_informed(client) is None and weak_modes(client.attack, client.defense):
        return UNMET
    if best is None or not any(x is not None and x.low > SAME for x in results.differences(client, best)):
        return ""
    return PLAIN_ONLY if best.informed else SMOOTH_MORE


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
    rows = [row for row in results.rows if row.metric == "left_out"]
    labels = [{"defense": row.defense or "none", "model": row.model, "reason": row.note or ""} for row in rows]
    return [TableLine(texts, {}, part=LEFT_OUT) for texts in labels]


def _curve(results: DgpResults, training: TrainingKey) -> str:
    """Return the first seed's accuracy over the epochs as one line of text, scaled to its maximum."""
    trained = (row for row in results.rows if row.metric == ACCURACY and row.extra.get("study") == "training")
    rows = [row for row in trained if (row.defense or "none", row.model, row.dataset) == training]
    return curve([row.value or 0.0 for row in rows if row.seed == rows[0].seed])


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


def _steps_up(
    results: DgpResults, attack: str, order: Callable[[tuple[float, float]], float], informed: bool = False
) -> Cases:
    """Return how much more each setting of DGP hides than the one before it, from an attacker who may know of it."""
    clients = results.select(attack=attack, defense="dgp", stage="untrained")
    if informed or results.informed:  # a step leads over settings that met no attacker who knows of them
        clients = (client for client in clients if results.best_informed(client, smooth=not informed) is not None)
    ranks = sorted(((order(shares(client.defense)), client) for client in clients), key=lambda pair: pair[0])
    cases: Cases = {}
    for (low, one), (high, two) in pairwise(ranks):
        first, second = (results.best_informed(x, smooth=False) if informed else x for x in (one, two))
        cases |= results.contrast(second, first, case=f"{low:.3g} to {high:.3g}")
    return cases


def judge_attackers(results: DgpResults) -> list[Finding]:
    """Judge what the paper does not ask: what is hidden from attackers who know of a defense, or search better."""
    return [*judge_adaptive(results), *judge_smooth(results), *judge_strongest(results)]


def judge_adaptive(results: DgpResults) -> list[Finding]:
    """Judge if each defense hides as much from the paper's attacker once that one knows of it."""
    findings = []
    for defense in ("soteria", "precode", "top-k", "outpost", "dgp", "adgp"):
        cases: Cases = {}
        for client in results.select(defense=defense):
            best = results.best_informed(client, smooth=False)
            cases |= results.contrast(best, client, case=results.title(client))
        if any(case is not None for case in cases.values()):
            findings += results.judge("adaptive", {"defense": defense}, hides=cases)
    return findings


def judge_smooth(results: DgpResults) -> list[Finding]:
    """Judge if ig-smooth recovers more than IG, each by the best of the same modes; no claim without its rows."""
    cases: Cases = {}
    for client in results.select(against=["", "used"]):  # of ATS one case: both have the same reconstructions
        if results.met_smooth(client, "cw_ssim"):
            modes = results.list_attackers(client, smooth=False)
            one, other = results.pick_best(modes), results.pick_best(mode.smoothed for mode in modes)
            case = ", ".join([*results.list_varied(client).values(), client.defense])
            cases |= results.contrast(one, other, case=case)
    return results.judge("searches", finds=cases) if any(case is not None for case in cases.values()) else []


def judge_strongest(results: DgpResults) -> list[Finding]:
    """Judge if each defense hides anything from the strongest IG that it met; no claim where all are plain."""
    findings: list[Finding] = []
    if (strongest := results.under_strongest()) is None:
        return findings
    for defense in ("soteria", "precode", "noise", "top-k", "outpost", "dgp", "adgp"):
        cases: Cases = {}
        for client in strongest.select(attack="ig", defense=defense):
            undefended = client._replace(defense="none")
            cases |= strongest.contrast(client, undefended, case=results.title(client))
        if any(case is not None for case in cases.values()):
            findings += results.judge("strongest", {"defense": defense}, hides=cases)
    return findings
