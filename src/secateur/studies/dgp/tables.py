"""Results of dgp by attacker and training, and tables of reconstructions and of training accuracy.

Those are Tables 1, 2, 5, 6 and 7, Figs. 2 to 4, and the galleries of Figs. 5 to 9. Each line of reconstructions has the
paper's plain attacker. Beside it stands the best of the others: who knows of the defense, or searches better
(`ig-smooth`). Its own outcome picks the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from secateur.attacks.inversion.adaptive import PLAIN
from secateur.catalogue import name_of
from secateur.config import defense_of_updates
from secateur.evaluation.attack_strength import read_mode
from secateur.metrics.estimates import Measure, combine, mean_of, pick_highest
from secateur.metrics.membership import Estimate
from secateur.report.heatmap import SMOOTH
from secateur.report.summary import group_by
from secateur.runs.rows import Row
from secateur.studies.dgp.steps import NAMES, weak_modes
from secateur.studies.results import Results
from secateur.studies.table import Cases, Cells, Finding, TableLine, Tabulated, curve, find_printed, negate

MEASURES = {"lpips": "LPIPS", "cw_ssim": "CW-SSIM"}  # of hiding, from the same pictures
PAIRED = tuple(MEASURES)
ACCURACY = "test_accuracy"
Picture = tuple[int, int, int]  # seed, target, item
PAPERS_NAMES = {name: paper for paper, name in NAMES.items()} | {SMOOTH: "ig"}  # it takes the place of IG
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


class AttackKey(NamedTuple):
    """An attacker on the updates of one client."""

    attack: str  # the paper's name
    defense: str
    adaptive: str  # how the attacker differs from the paper's: a mode, ig-smooth, both (ig-smooth, support), or none
    model: str
    data: str
    batch_size: int
    labels: str
    against: str  # used or raw: the pictures that reconstructions are compared with; empty: they are the same
    stage: str  # the training stage of the attacked model

    @property
    def client(self) -> AttackKey:
        """The attacked client: the fields that all its attackers share."""
        return self._replace(adaptive=PLAIN)

    @property
    def smooth(self) -> bool:
        """True if ig-smooth takes the place of the paper's IG."""
        return self.adaptive.startswith(SMOOTH)

    @property
    def smoothed(self) -> AttackKey:
        """The same attacker with ig-smooth in the place of IG."""
        return self._replace(adaptive=SMOOTH if self.adaptive == PLAIN else f"{SMOOTH}, {self.adaptive}")

    @property
    def informed(self) -> bool:
        """True if the attacker knows of the defense."""
        return self.adaptive not in (PLAIN, SMOOTH)


class TrainingKey(NamedTuple):
    """A collaborative training, or another measurement that is no attack, such as the cost of an update."""

    defense: str
    model: str
    data: str

    @property
    def text(self) -> str:
        """The defense with its settings and error feedback."""
        return self.defense


@dataclass(frozen=True)
class TrainingResults(Results[TrainingKey]):
    """The rows of one kind (training, cost, ...) without an attack; of trainings those of the last epoch."""

    paper: ClassVar[str] = "dgp"
    kind: str = "training"

    def key_of(self, row: Row) -> TrainingKey | None:
        """Return the training of a row about its last epoch; None for other rows."""
        extra = row.extra
        if extra.get("study") != self.kind or row.value is None or extra.get("epoch") != extra.get("epochs"):
            return None
        return TrainingKey(row.defense or "none", row.model, row.dataset)

    def name_defense(self, defense: str) -> str:
        """Return a defense without settings and error feedback."""
        return base(defense)

    def title(self, key: TrainingKey) -> str:
        """Return the network of a training, and its data if the study has several."""
        return f"{key.model}, {key.data}" if len({other.data for other in self.keys}) > 1 else key.model


@dataclass(frozen=True)
class DgpResults(Results[AttackKey]):
    """The rows of one study: those of all targets of an attacker by attacker, and those of trainings."""

    paper: ClassVar[str] = "dgp"
    informed: bool = False  # True: comparisons are of the strongest attackers

    def under_strongest(self) -> DgpResults | None:
        """Return the same results, every client under its strongest attacker; None if all are the paper's plain one."""
        return replace(self, informed=True) if any(key.adaptive != PLAIN for key in self.cells) else None

    def key_of(self, row: Row) -> AttackKey | None:
        """Return the attacker of a row about all its targets; None for other rows."""
        overall = "target" in row.extra and row.extra["target"] is None
        return attack_key(row) if overall and row.attack and row.value is not None else None

    def attack_of(self, row: Row) -> None:
        """Return None: the attack is in the key."""

    def name_defense(self, defense: str) -> str:
        """Return a defense without settings and error feedback."""
        return base(defense)

    def title(self, key: AttackKey) -> str:
        """Return the attack on a client, with the labels in which the clients of the study differ."""
        settings = [key.defense] if ":" in key.defense else []
        return ", ".join([key.attack, *self.list_varied(key).values(), *settings])

    def list_varied(self, key: AttackKey) -> dict[str, str]:
        """Return the labels in which the clients of the study differ, beside attack and defense."""
        names = ("model", "data", "batch_size", "labels", "stage")
        return {name: str(getattr(key, name)) for name in names if len({getattr(x, name) for x in self.clients}) > 1}

    def contrast(self, one: AttackKey | None, other: AttackKey | None, metric: str = "hidden", case: str = "") -> Cases:
        """Return how much less is seen of one client than of another, as one case.

        LPIPS and CW-SSIM judge the same pictures, so they are no two cases. The lower difference counts: a claim holds
        where it holds by both measures, and fails where it fails by one.
        """
        known = [difference for difference in self.differences(one, other) if difference is not None]
        if not known:
            return {case: None}
        value, low, high = (min(ends) for ends in zip(*((x.value, x.low, x.high) for x in known), strict=True))
        return {case: Estimate(value, low, high)}

    def differences(self, one: AttackKey | None, other: AttackKey | None) -> list[Estimate | None]:
        """Return how much less is seen of one client than of another: how far LPIPS is higher, and CW-SSIM lower."""
        return [self.less(one, other, "lpips"), self.less(other, one, "cw_ssim")]

    def judge(
        self, table: str, words: Mapping[str, str] | None = None, /, **cases: Mapping[str, Estimate | None]
    ) -> list[Finding]:
        """Judge all claims of a table; they name the measures of hiding that were measured."""
        return super().judge(table, {"measures": self.measures} | dict(words or {}), **cases)

    @cached_property
    def measures(self) -> str:
        """The measures of hiding that claims are judged by, and those that were not measured."""
        metrics = {metric for cell in self.cells.values() for metric, _ in cell}
        known = [name for metric, name in MEASURES.items() if metric in metrics] or [*MEASURES.values()]
        missing = [name for name in MEASURES.values() if name not in known]
        return " and ".join(known) + (f" ({' and '.join(missing)} not measured)" if missing else "")

    def compare(self, claim: Mapping[str, Any], words: Mapping[str, str]) -> Cases:
        """Return the cases of a claim, which may be `of` trainings or costs instead of attackers."""
        return self.trainings(claim["of"]).compare(claim, words) if "of" in claim else super().compare(claim, words)

    @cached_property
    def clients(self) -> list[AttackKey]:
        """All clients that were attacked plainly, by the paper's attacker or by ig-smooth."""
        return list(dict.fromkeys(key.client for key in self.cells if not key.informed))

    def select(self, **labels: Any) -> Iterator[AttackKey]:
        """Yield the clients with these labels that met the paper's plain attacker."""
        return super().select(**labels | {"adaptive": PLAIN})

    def trainings(self, kind: str = "training") -> TrainingResults:
        """Return the rows of one kind (training, cost, ...) without an attack."""
        return TrainingResults(self.rows, kind)

    def list_attackers(self, client: AttackKey, smooth: bool = True) -> list[AttackKey]:
        """Return all attackers of a client; `smooth=False` leaves out ig-smooth."""
        return [key for key in self.cells if key.client == client.client and (smooth or not key.smooth)]

    def pick_best(self, attackers: Iterable[AttackKey]) -> AttackKey | None:
        """Return the attacker with the highest CW-SSIM; None without any.

        Its own outcome picks it: a real attacker cannot know which of several ways sees most.
        """
        return pick_highest({key: self._score_recovery(key, "cw_ssim") for key in attackers})

    def best_adaptive(self, client: AttackKey) -> AttackKey | None:
        """Return the best attacker that is not the paper's plain one: who knows of the defense, or ig-smooth."""
        return self.pick_best(key for key in self.list_attackers(client) if key.adaptive != PLAIN)

    def best_informed(self, client: AttackKey, smooth: bool = True) -> AttackKey | None:
        """Return the best attacker who knows of the defense; `smooth=False` leaves out ig-smooth."""
        return self.pick_best(key for key in self.list_attackers(client, smooth) if key.informed)

    def pick_attacker(self, client: AttackKey, metric: str, smooth: bool = True) -> AttackKey | None:
        """Return the attacker whose result on a client counts: the plain one, or the strongest by this metric.

        None if the strongest is asked for, and of the attackers that the defense is known to be weak against it met
        none. `smooth=False` leaves out ig-smooth.
        """
        if not self.informed:
            return client
        attackers = self.list_attackers(client, smooth)
        if not any(key.informed for key in attackers) and weak_modes(client.attack, client.defense):
            return None
        return pick_highest({key: self._score_recovery(key, metric) for key in attackers}) or client

    def met_smooth(self, client: AttackKey, metric: str) -> bool:
        """Return True if a client met ig-smooth in every mode, and on every seed, of the paper's attacker."""
        papers = self.list_attackers(client, smooth=False)
        return bool(papers) and all(self.of(x, metric).keys() <= self.of(x.smoothed, metric).keys() for x in papers)

    def _score_recovery(self, key: AttackKey, metric: str) -> Measure:
        """Return a metric by seed, turned so that more is recovered where it is higher."""
        scores = self.of(key, metric)
        return {seed: negate(score) for seed, score in scores.items()} if metric.startswith("lpips") else scores

    @cached_property
    def _pictures(self) -> dict[tuple[AttackKey, str], dict[Picture, float]]:
        """Scores of every reconstructed picture, by attacker and metric, for paired comparisons."""
        scores: dict[tuple[AttackKey, str], dict[Picture, float]] = {}
        for row in self.rows:
            if row.metric in PAIRED and row.extra.get("item") is not None and row.value is not None:
                picture = (row.seed, row.extra["target"], row.extra["item"])
                scores.setdefault((attack_key(row), row.metric), {})[picture] = row.value
        return scores

    def less(self, one: AttackKey | None, other: AttackKey | None, metric: str, attack: Any = None) -> Estimate | None:
        """Return the measure of one attacker minus that of another.

        With one seed the attackers are compared target by target, with several seed by seed. A target counts once, by
        the mean over its pictures: pictures of one update are not independent. Of the strongest attackers ig-smooth
        counts if both clients met it. Else one would seem to hide from it.
        """
        if one is None or other is None:
            return None
        smooth = self.met_smooth(one, metric) and self.met_smooth(other, metric)
        one, other = (self.pick_attacker(key, metric, smooth) for key in (one, other))
        if one is None or other is None:
            return None
        first, second = (self._pictures.get((key, metric), {}) for key in (one, other))
        shared = [key for key in first if key in second and math.isfinite(first[key] - second[key])]
        targets = group_by(shared, lambda key: key[1])
        if len(targets) > 1 and len({seed for seed, _, _ in shared}) == 1:
            return mean_of([fmean(first[key] - second[key] for key in keys) for keys in targets.values()])
        return super().less(one, other, metric)


def attack_key(row: Row) -> AttackKey:
    """Return the attacker and client of a row."""
    extra, attack = row.extra, row.attack or ""
    name = name_of(attack)
    key = AttackKey(
        PAPERS_NAMES.get(name, name),
        row.defense or "none",
        read_mode(attack) if attack else PLAIN,
        row.model,
        row.dataset,
        extra.get("batch_size", 1),
        extra.get("labels", "inferred"),
        extra.get("against") or "",
        extra.get("stage", "untrained"),
    )
    return key.smoothed if name == SMOOTH else key


def base(defense: str) -> str:
    """Return the name of a defense without its settings and error feedback.

    Example:
        >>> base("dgp:k1=0.05:k2=0.75+error-feedback")
        'dgp'
    """
    return name_of(defense.partition("+")[0])


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
    """Judge what the paper does not ask: how much more its attackers see who know of a defense, or search better."""
    return [*judge_adaptive(results), *judge_smooth(results)]


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
