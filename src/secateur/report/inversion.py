"""Attacks on updates on the page: the table and its verdict, the gallery of pictures, and the curves of the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from secateur.catalogue import split
from secateur.report.audit import View, setting
from secateur.report.audit_plots import DASHES
from secateur.report.measures import PICTURE, shown
from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short
from secateur.report.summary import Key, SummaryCell, SummaryLine, lines
from secateur.report.verdict import Badge
from secateur.runs.rows import Row

# labels that become columns of the table if its lines differ in them
PLACES = ("run", "model", "dataset", "stage", "batch_size", "base_pruning", "defense", "against", "round", "client")
TRAINED = "weights given"  # the stage of a model that is not the untrained one
OPEN = 12  # cards that are open at first
MOST = 100  # cards on the page; the others are in the run's folder
CARD = ("run", "model", "dataset", "stage", "batch_size", "seed", "target", "item")  # labels of a truth
CURVES = 40  # in a plot at most
Labels = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """One picture of the gallery with the lines of text under it."""

    title: str
    png: str | None  # base64
    lines: list[str]


@dataclass
class Card:
    """One truth and every attack's reconstruction of it."""

    title: str
    truth: Picture | None = None
    guesses: list[Picture] = field(default_factory=list)
    leak: float = -math.inf  # the highest PSNR that an attack reached


def is_inversion(row: Row) -> bool:
    """Return True if a row is of an attack on updates."""
    return "target" in row.extra


def attacked(rows: Iterable[Row]) -> list[SummaryLine]:
    """Return one line an attack, over all its targets and seeds, in the order of measurement."""
    whole = (row for row in rows if is_inversion(row) and row.extra["target"] is None)
    return [line for line in lines(whole) if line.labels["attack"] is not None]


def name(labels: Labels) -> str:
    """Return the name of an attack, with the defense that it met.

    Example:
        >>> name({"attack": "ig", "defense": "dgp"}), name({"attack": "ig", "defense": "none"})
        ('ig on dgp', 'ig')
        >>> name({"attack": "ig", "defense": "ats", "against": "raw"})
        'ig on ats (against raw)'
    """
    met = defended(labels)
    return str(labels["attack"]) if met in ("None", "none") else f"{labels['attack']} on {met}"


def defended(labels: Labels) -> str:
    """Return a base pruning and a defense, and the pictures of the comparison where several are compared."""
    against, base, defense = labels.get("against"), labels.get("base_pruning", "none"), str(labels.get("defense"))
    met = defense if base == "none" else base if defense == "none" else f"{base}, {defense}"
    return met + ("" if against is None else f" (against {against})")


def place(figure: Labels) -> str:
    """Return the name of an update; in a federation its round and client."""
    if figure.get("round") is None:
        return f"target {figure['target']}"
    who = "the sum of all clients" if figure.get("client") is None else f"client {figure['client']}"
    return f"round {figure['round']}, {who}"


def where(figure: Labels) -> str:
    """Return the setting that compared updates share: network, data, batches, given weights and known labels.

    Example:
        >>> where({"model": "m", "dataset": "d", "batch_size": 4, "stage": "weights given", "labels": "oracle"})
        'm on d, batches of 4, weights given, labels told'
    """
    size = figure.get("batch_size", 1)
    parts = [setting(figure), *([f"batches of {size}"] if size > 1 else [])]
    parts += [TRAINED] if figure.get("stage") == TRAINED else []
    return ", ".join([*parts, *(["labels told"] if figure.get("labels") == "oracle" else [])])


def threat(line: SummaryLine) -> str:
    """Return the attacker's threat model and knowledge."""
    return f"{str(line.labels['threat']).removesuffix('.')}. Told here: {line.labels['knows']}."


def facts(labelled: Iterable[Labels]) -> dict[str, str]:
    """Return the facts of the attacked updates, from the labels of rows and figures."""
    labelled = list(labelled)

    def told(name: str) -> str:
        return ", ".join(dict.fromkeys(str(x[name]) for x in labelled if x.get(name) is not None))

    targets = {(x.get("run"), x["seed"], x["target"]) for x in labelled if x.get("target") is not None}
    names = {"Network": "model", "Model is": "stage", "Data": "dataset", "The client sends": "update"}
    names |= {"Examples an update": "batch_size", "Defenses": "defense", "Attacks": "attack", "Labels": "labels"}
    names |= {"Seeds": "seed"}
    return {title: told(name) for title, name in names.items()} | {"Updates attacked": str(len(targets))}


def badge(results: Sequence[SummaryLine]) -> Badge:
    """Judge whether a picture is recognisable, or more are nearest to their own truths than chance allows.

    An attack that failed on targets measured nothing there, which is no sign of safety.
    """
    scored = [line for line in results if "recognisable" in line.cells]
    if results and all(map(_failed, results)):
        return Badge("Nothing was measured", "doubtful")
    if not scored:
        return Badge("Look at the pictures", "doubtful")
    if any(map(_leaks, scored)):
        return Badge("Training pictures come back", "bad")
    if any(line.value("failed") for line in scored):
        return Badge("No picture was recognised where attacks did not fail", "doubtful")
    return Badge("No picture was recognised", "good")


def verdict(results: Sequence[SummaryLine]) -> list[str]:
    """Return in sentences what the attacks recovered."""
    known = [line for line in results if line.value("psnr") is not None]
    if not known:
        unseen = ["There is no truth to compare with: look at the pictures."] if results else []
        return [*unseen, *failures(results)]
    failed = failures(known)
    known = [line for line in known if not _failed(line)]
    if not known:
        return failed
    best = max(known, key=lambda line: (line.value("recognisable") or 0, line.value("psnr_max") or 0))
    values = {
        metric: _value(best, metric) for metric in ("recognisable", "psnr_median", "psnr_min", "psnr_max", "psnr_grey")
    }
    recovered = f"recovers most: {values['recognisable']} of its pictures are recognisable"
    if not best.value("recognisable"):
        recovered = "comes nearest: no picture is recognisable"
    sentences = [
        f"{name(best.labels)} {recovered}. Their PSNR is {values['psnr_median']} in the median, "
        f"from {values['psnr_min']} to {values['psnr_max']}; a grey picture has {values['psnr_grey']}."
    ]
    sentences += _nearest(known)
    guessed = [line for line in known if line.value("label_accuracy") is not None]
    if guessed:
        most = max(guessed, key=lambda line: line.value("label_accuracy") or 0)
        sentences.append(f"{name(most.labels)} finds {_value(most, 'label_accuracy')} of the labels.")
    sentences += plain_only(known) + failed
    if all(line.labels.get("stage") == "untrained" for line in results):
        sentences.append("The model was untrained, where updates reveal most.")
    return sentences


def _nearest(results: Iterable[SummaryLine]) -> list[str]:
    """Return a sentence if no picture is recognisable, but more than chance are nearest to their own truths."""
    hidden = [line for line in results if not line.value("recognisable") and _above_chance(line)]
    if not hidden:
        return []
    most = max(hidden, key=lambda line: line.value("identified") or 0)
    share, chance = _value(most, "identified"), _value(most, "identified_chance")
    return [f"{name(most.labels)} brings {share} of its pictures nearest to their own truth of all; chance: {chance}."]


def failures(results: Iterable[SummaryLine]) -> list[str]:
    """Return a sentence for each attack that failed on targets, where nothing was measured."""
    sentences = []
    for line in results:
        if share := line.value("failed"):
            which = "every target" if _failed(line) else f"{share:.0%} of its targets"
            why = "it gave nothing, or all its trials diverged"
            sentences.append(f"{name(line.labels)} failed on {which} ({why}): nothing was measured there.")
    return sentences


def plain_only(results: Iterable[SummaryLine]) -> list[str]:
    """Return a sentence for each defense that stands against the plain attacker and not against an adaptive one."""
    groups: dict[tuple[str, str], list[SummaryLine]] = {}
    for line in results:
        if line.labels.get("defense") not in (None, "none"):
            groups.setdefault((setting(line.labels), defended(line.labels)), []).append(line)
    sentences = []
    for (_, met), group in groups.items():
        plain = [line for line in group if not line.labels["adaptive"]]
        knowing = [str(line.labels["attack"]) for line in group if line.labels["adaptive"] and _leaks(line)]
        if plain and knowing and not any(map(_leaks, plain)):
            outcome = f"{', '.join(knowing)} {'brings' if len(knowing) == 1 else 'bring'} pictures back"
            sentences.append(f"{met} stands only against the plain attacker: {outcome}.")
    return sentences


def _failed(line: SummaryLine) -> bool:
    """Return True if the attack failed on every target."""
    return (line.value("failed") or 0) >= 1


def _leaks(line: SummaryLine) -> bool:
    """Return True if a picture is recognisable, or more than chance are nearest to their own truths."""
    return bool(line.value("recognisable")) or _above_chance(line)


def _above_chance(line: SummaryLine) -> bool:
    """Return True if the low end of the share that is nearest to its own truth is above chance."""
    if (cell := line.cells.get("identified")) is None:
        return False
    return (cell.low if cell.low is not None else cell.value or 0.0) > (line.value("identified_chance") or 0.0)


def _value(line: SummaryLine, metric: str) -> str:
    return shown(line.cells.get(metric), metric, interval=False)


def gallery(figures: Iterable[Labels]) -> list[Card]:
    """Return one card a truth, ordered by the highest PSNR that an attack reached."""
    cards: dict[Key, Card] = {}
    pictures = [figure for figure in figures if figure["kind"] == "picture"]
    settings = {(setting(figure), figure["batch_size"]) for figure in pictures}
    stages = {figure.get("stage") for figure in pictures}
    for figure in pictures:
        key = tuple((name, figure.get(name)) for name in CARD)
        card = cards.setdefault(key, Card(_title(figure, len(settings) > 1, len(stages) > 1)))
        if figure["attack"] is None:
            card.truth = Picture("truth", figure["png"], [f"label {figure['label']}"])
            continue
        card.guesses.append(_guess(figure))
        card.leak = max(card.leak, float(figure["scores"].get("psnr") or -math.inf))
    return sorted(cards.values(), key=lambda card: -card.leak)


def _title(figure: Labels, several: bool, staged: bool) -> str:
    size = figure["batch_size"]
    parts = [setting(figure)] if several or figure.get("run") else []
    parts += [f"batches of {size}"] if several else []
    where = place(figure)
    parts += [str(figure.get("stage"))] if staged and str(figure.get("stage")) not in where.split(", ") else []
    parts += [where]
    parts += [f"picture {figure['item']}"] if size > 1 else []
    parts += [f"seed {figure['seed']}"] if figure["seed"] else []
    return ", ".join(parts)


def _guess(figure: Labels) -> Picture:
    scores = figure["scores"]
    texts = [
        f"{PICTURE[name]} {shown(SummaryCell(float(x), None, None), name)}"
        for name, x in scores.items()
        if x is not None
    ]
    if not figure["found"]:
        texts = ["nothing found", *texts]
    if figure.get("unfinished"):
        texts = ["unfinished", *texts]
    attack, *settings = split(str(figure["attack"]))
    texts = [*settings, *(["labels told"] if figure["labels"] == "oracle" else []), *texts]
    believed = [] if figure["label"] is None else [f"label {figure['label']}"]
    return Picture(name({**figure, "attack": attack}), figure["png"], texts + believed)


def losses(figures: Iterable[Labels]) -> list[View]:
    """Return one view for each attack: its own loss by iteration, a curve a target."""
    groups: dict[Key, list[Labels]] = {}
    for figure in figures:
        if figure["kind"] == "loss":
            groups.setdefault((("where", where(figure)), ("attack", name(figure))), []).append(figure)
    several = len({key[0] for key in groups}) > 1
    views = []
    for (shared, attack), group in groups.items():
        label = f"{shared[1]}: {attack[1]}" if several else str(attack[1])
        views.append(View(label, [_curves(label, group)]))
    return views


def _curves(title: str, figures: Sequence[Labels]) -> Panel:
    drawn = figures[:CURVES]
    traces: list[Part] = []
    ends: list[float] = []
    for number, figure in enumerate(drawn):
        points = [(step, float(loss)) for step, loss in figure["curve"] if loss is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        ends += values[-1:]
        name = place(figure) + (f", seed {figure['seed']}" if figure["seed"] else "")
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 1.5}
        data = {"x": list(steps), "y": short(values), "name": name, "line": style}
        traces.append(
            {"type": "scatter", "mode": "lines", "hovertemplate": f"{name}: %{{y:.3g}}<extra></extra>"} | data
        )
    values_drawn = [float(y) for trace in traces for y in trace["y"]]
    left = f" (the first {CURVES} of {len(figures)} targets)" if len(figures) > CURVES else ""
    reach = f"it ends between {min(ends):.3g} and {max(ends):.3g}" if ends else "no finite loss"
    return panel(
        f"{title}{left}",
        f"The attack's own loss by iteration, {title}: {reach}.",
        traces,
        340,
        {"title": "iteration", "zeroline": False, "nticks": 8},
        {"title": "the attack's loss", "zeroline": False, "nticks": 6} | _scale(values_drawn),
        showlegend=False,
    )


def _scale(values: Sequence[float]) -> Part:
    """Return a logarithmic axis if the values allow one: labels at powers of ten, or at 1, 2 and 5 over few decades.

    Example:
        >>> [_scale(ends).get("dtick") for ends in ([1e-12, 1.0], [1e-4, 1.0], [0.002, 0.03], [0.7, 1.1])]
        [2, 1, 'D2', None]
    """
    if min(values, default=0.0) <= 0:
        return {}
    decades = math.log10(max(values) / min(values))
    ticks = {"dtick": math.ceil(decades / 6)} if decades >= 2 else {"dtick": "D2"} if decades >= 0.7 else {}
    return {"type": "log", "exponentformat": "power"} | ticks
