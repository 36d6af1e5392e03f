"""What attacks on updates recovered: the lines of their table, and the sentences above it.

The gallery of attacks on updates: every truth beside what the attacks made of it.

How the losses of attacks on updates fell.
"""

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
from secateur.report.summary import Cell, Key, Line, lines
from secateur.report.verdict import Badge
from secateur.runs.rows import Row

# columns of the table where its lines differ in them
PLACES = ("run", "model", "dataset", "stage", "batch_size", "base_pruning", "defense", "against", "round", "client")
TRAINED = "weights given"  # the stage of a model that is no longer the untrained one
Labels = Mapping[str, Any]

OPEN = 12  # cards that are seen at once
MOST = 100  # cards: the others are in the run's folder
CARD = ("run", "model", "dataset", "stage", "batch_size", "seed", "target", "item")  # what tells one truth from another

CURVES = 40  # in a plot


def is_inversion(row: Row) -> bool:
    """Whether a row is of an attack on updates."""
    return "target" in row.extra


def attacked(rows: Iterable[Row]) -> list[Line]:
    """One line per attack, over all its targets, in the order they were measured; seeds are gathered."""
    whole = (row for row in rows if is_inversion(row) and row.extra["target"] is None)
    return [line for line in lines(whole) if line.labels["attack"] is not None]


def name(labels: Labels) -> str:
    """An attack, with the defense it met.

    Example:
        >>> name({"attack": "ig", "defense": "dgp"}), name({"attack": "ig", "defense": "none"})
        ('ig on dgp', 'ig')
        >>> name({"attack": "ig", "defense": "ats", "against": "raw"})
        'ig on ats (against raw)'
    """
    met = defended(labels)
    return str(labels["attack"]) if met in ("None", "none") else f"{labels['attack']} on {met}"


def defended(labels: Labels) -> str:
    """A base pruning and a defense, with the pictures that reconstructions are compared with where these differ."""
    against, base, defense = labels.get("against"), labels.get("base_pruning", "none"), str(labels.get("defense"))
    met = defense if base == "none" else base if defense == "none" else f"{base}, {defense}"
    return met + ("" if against is None else f" (against {against})")


def place(figure: Labels) -> str:
    """Which update it is: of a federation its round and client."""
    if figure.get("round") is None:
        return f"target {figure['target']}"
    who = "the sum of all clients" if figure.get("client") is None else f"client {figure['client']}"
    return f"round {figure['round']}, {who}"


def where(figure: Labels) -> str:
    """What the updates of one comparison share: network, data, batches, whether weights were given and labels told.

    Example:
        >>> where({"model": "m", "dataset": "d", "batch_size": 4, "stage": "weights given", "labels": "oracle"})
        'm on d, batches of 4, weights given, labels told'
    """
    size = figure.get("batch_size", 1)
    told = [setting(figure), *([f"batches of {size}"] if size > 1 else [])]
    told += [TRAINED] if figure.get("stage") == TRAINED else []
    return ", ".join([*told, *(["labels told"] if figure.get("labels") == "oracle" else [])])


def threat(line: Line) -> str:
    """Who the attacker is and what it knows."""
    return f"{str(line.labels['threat']).removesuffix('.')}. Told here: {line.labels['knows']}."


def badge(found: Sequence[Line]) -> Badge:
    """Whether even one picture is recognisable, or more are nearest to their own truths than chance allows.

    An attack that failed on targets has shown nothing of them: its silence is no good news.
    """
    judged = [line for line in found if "recognisable" in line.cells]
    if found and all(map(_failed, found)):
        return Badge("Nothing was measured", "doubtful")
    if not judged:
        return Badge("Look at the pictures", "doubtful")
    if any(map(_leaks, judged)):
        return Badge("Training pictures come back", "bad")
    if any(line.value("failed") for line in judged):
        return Badge("No picture was recognised where attacks did not fail", "doubtful")
    return Badge("No picture was recognised", "good")


def verdict(found: Sequence[Line]) -> list[str]:
    """What the attacks recovered, in sentences."""
    known = [line for line in found if line.value("psnr") is not None]
    if not known:
        unseen = ["There is no truth to compare with: look at the pictures."] if found else []
        return [*unseen, *failures(found)]
    failed = failures(known)
    known = [line for line in known if not _failed(line)]
    if not known:
        return failed
    best = max(known, key=lambda line: (line.value("recognisable") or 0, line.value("psnr_max") or 0))
    told = {
        metric: _told(best, metric) for metric in ("recognisable", "psnr_median", "psnr_min", "psnr_max", "psnr_grey")
    }
    recovered = f"recovers most: {told['recognisable']} of its pictures are recognisable"
    if not best.value("recognisable"):
        recovered = "comes nearest: no picture is recognisable"
    sentences = [
        f"{name(best.labels)} {recovered}. Their PSNR is {told['psnr_median']} in the median, from {told['psnr_min']} "
        f"to {told['psnr_max']}; a grey picture has {told['psnr_grey']}."
    ]
    sentences += _nearest(known)
    guessed = [line for line in known if line.value("label_accuracy") is not None]
    if guessed:
        most = max(guessed, key=lambda line: line.value("label_accuracy") or 0)
        sentences.append(f"{name(most.labels)} finds {_told(most, 'label_accuracy')} of the labels.")
    sentences += plain_only(known) + failed
    if all(line.labels.get("stage") == "untrained" for line in found):
        sentences.append("The model was untrained, where updates reveal most.")
    return sentences


def _nearest(found: Iterable[Line]) -> list[str]:
    """What the badge goes by where no picture is recognisable, and yet more are nearest to their own than by chance."""
    hidden = [line for line in found if not line.value("recognisable") and _above_chance(line)]
    if not hidden:
        return []
    most = max(hidden, key=lambda line: line.value("identified") or 0)
    share, chance = _told(most, "identified"), _told(most, "identified_chance")
    return [f"{name(most.labels)} brings {share} of its pictures nearest to their own truth of all; chance: {chance}."]


def failures(found: Iterable[Line]) -> list[str]:
    """A sentence for each attack that failed on targets, of which nothing is known then."""
    sentences = []
    for line in found:
        if share := line.value("failed"):
            which = "every target" if _failed(line) else f"{share:.0%} of its targets"
            why = "it gave nothing, or all its trials diverged"
            sentences.append(f"{name(line.labels)} failed on {which} ({why}): nothing was measured there.")
    return sentences


def plain_only(found: Iterable[Line]) -> list[str]:
    """A sentence for each defense under which a plain attacker finds no picture, and one who knows of it does."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        if line.labels.get("defense") not in (None, "none"):
            groups.setdefault((setting(line.labels), defended(line.labels)), []).append(line)
    sentences = []
    for (_, met), group in groups.items():
        plain = [line for line in group if not line.labels["adaptive"]]
        knowing = [str(line.labels["attack"]) for line in group if line.labels["adaptive"] and _leaks(line)]
        if plain and knowing and not any(map(_leaks, plain)):
            told = f"{', '.join(knowing)} {'brings' if len(knowing) == 1 else 'bring'} pictures back"
            sentences.append(f"{met} stands only against the plain attacker: {told}.")
    return sentences


def facts(labelled: Iterable[Labels]) -> dict[str, str]:
    """What was attacked, from the labels of rows and figures."""
    labelled = list(labelled)

    def told(name: str) -> str:
        return ", ".join(dict.fromkeys(str(x[name]) for x in labelled if x.get(name) is not None))

    targets = {(x.get("run"), x["seed"], x["target"]) for x in labelled if x.get("target") is not None}
    names = {"Network": "model", "Model is": "stage", "Data": "dataset", "The client sends": "update"}
    names |= {"Examples an update": "batch_size", "Defenses": "defense", "Attacks": "attack", "Labels": "labels"}
    names |= {"Seeds": "seed"}
    return {title: told(name) for title, name in names.items()} | {"Updates attacked": str(len(targets))}


def _failed(line: Line) -> bool:
    """Whether the attack failed on every target."""
    return (line.value("failed") or 0) >= 1


def _leaks(line: Line) -> bool:
    return bool(line.value("recognisable")) or _above_chance(line)


def _above_chance(line: Line) -> bool:
    """More often nearest to its own truth than by chance, by the low end of the interval."""
    if (cell := line.cells.get("identified")) is None:
        return False
    return (cell.low if cell.low is not None else cell.value or 0.0) > (line.value("identified_chance") or 0.0)


def _told(line: Line, metric: str) -> str:
    return shown(line.cells.get(metric), metric, interval=False)


@dataclass(frozen=True)
class Picture:
    """One picture of the gallery with what stands under it."""

    title: str
    png: str | None  # base64
    lines: list[str]


@dataclass
class Card:
    """One truth and what every attack made of it."""

    title: str
    truth: Picture | None = None
    guesses: list[Picture] = field(default_factory=list)
    leak: float = -math.inf  # the highest PSNR that an attack reached


def gallery(figures: Iterable[Labels]) -> list[Card]:
    """One card a truth, the one that an attack came nearest to first."""
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


def _guess(figure: Labels) -> Picture:
    scores = figure["scores"]
    told = [f"{PICTURE[name]} {shown(Cell(float(x), None, None), name)}" for name, x in scores.items() if x is not None]
    if not figure["found"]:
        told = ["nothing found", *told]
    if figure.get("unfinished"):
        told = ["unfinished", *told]
    attack, *set_ = split(str(figure["attack"]))
    told = [*set_, *(["labels told"] if figure["labels"] == "oracle" else []), *told]
    believed = [] if figure["label"] is None else [f"label {figure['label']}"]
    return Picture(name({**figure, "attack": attack}), figure["png"], told + believed)


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


def losses(figures: Iterable[Labels]) -> list[View]:
    """One view for each attack: how its own loss fell, a curve a target."""
    groups: dict[Key, list[Labels]] = {}
    for figure in figures:
        if figure["kind"] == "loss":
            groups.setdefault((("where", where(figure)), ("attack", name(figure))), []).append(figure)
    several = len({key[0] for key in groups}) > 1
    views = []
    for (shared, attack), found in groups.items():
        label = f"{shared[1]}: {attack[1]}" if several else str(attack[1])
        views.append(View(label, [_curves(label, found)]))
    return views


def _curves(title: str, found: Sequence[Labels]) -> Panel:
    drawn = found[:CURVES]
    traces: list[Part] = []
    ends: list[float] = []
    for number, figure in enumerate(drawn):
        points = [(step, float(loss)) for step, loss in figure["curve"] if loss is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        ends += values[-1:]
        name = place(figure) + (f", seed {figure['seed']}" if figure["seed"] else "")
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 1.5}
        more = {"x": list(steps), "y": short(values), "name": name, "line": style}
        traces.append(
            {"type": "scatter", "mode": "lines", "hovertemplate": f"{name}: %{{y:.3g}}<extra></extra>"} | more
        )
    every = [float(y) for trace in traces for y in trace["y"]]
    left = f" (the first {CURVES} of {len(found)} targets)" if len(found) > CURVES else ""
    reach = f"it ends between {min(ends):.3g} and {max(ends):.3g}" if ends else "no finite loss"
    return panel(
        f"{title}{left}",
        f"The attack's own loss by iteration, {title}: {reach}.",
        traces,
        340,
        {"title": "iteration", "zeroline": False, "nticks": 8},
        {"title": "the attack's loss", "zeroline": False, "nticks": 6} | _scale(every),
        showlegend=False,
    )


def _scale(values: Sequence[float]) -> Part:
    """A logarithmic axis where it can be one: labelled at powers of ten, or at 1, 2 and 5 where there are few of these.

    Example:
        >>> [_scale(ends).get("dtick") for ends in ([1e-12, 1.0], [1e-4, 1.0], [0.002, 0.03], [0.7, 1.1])]
        [2, 1, 'D2', None]
    """
    if min(values, default=0.0) <= 0:
        return {}
    decades = math.log10(max(values) / min(values))
    ticks = {"dtick": math.ceil(decades / 6)} if decades >= 2 else {"dtick": "D2"} if decades >= 0.7 else {}
    return {"type": "log", "exponentformat": "power"} | ticks
