"""Attacks on updates on the page: tables, gallery, sheets of pictures, and the curves of the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from secateur.catalogue import split
from secateur.report import summary, table
from secateur.report.plotting import Panel, Part, View, draw_curve, draw_panel, number_axis, style_line
from secateur.report.summary import Key, Labels, SummaryCell, SummaryLine, differ, group_by, name_setting
from secateur.report.table import BESIDE, RECOVERY, Column, ReportTable, format_measure
from secateur.runs.rows import Row

# labels that become columns of the table if its lines differ in them
VARYING = (
    *("run", "model", "dataset", "stage", "batch_size", "base_pruning", "submodels", "defense"),
    *("against", "round", "client", "rate"),
)
FACTS = {
    "Network": "model",
    "Model is": "stage",
    "Data": "dataset",
    "The client sends": "update",
    "Examples an update": "batch_size",
    "Defenses": "defense",
    "Attacks": "attack",
    "Labels": "labels",
    "Seeds": "seed",
}
TRAINED = "weights given"  # the stage of a model that is not the untrained one
OPEN = 12  # cards that are open at first
MOST = 100  # cards on the page; the others are in the run's folder
ACROSS = 9  # truths in a sheet: one batch of the rob attack
CARD = ("run", "model", "dataset", "stage", "batch_size", "seed", "target", "item")  # labels of a truth
CURVES = 40  # in a plot at most


@dataclass(frozen=True)
class Picture:
    """One picture with the lines of text under it."""

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


@dataclass(frozen=True)
class Sheet:
    """One attack's reconstructions of the same truths in several lines, as in dgp Fig. 3."""

    title: str
    lines: list[tuple[str, list[str | None]]]  # pictures in base64; None: not attacked


def is_inversion(row: Row) -> bool:
    """Return True if a row is of an attack on updates."""
    return "target" in row.extra


def summarise_attacks(rows: Iterable[Row]) -> list[SummaryLine]:
    """Return one line an attack, over all its targets and seeds, in the order of measurement."""
    whole = (row for row in rows if is_inversion(row) and row.extra["target"] is None)
    return [line for line in summary.summarise(whole) if line.labels["attack"] is not None]


def name_attack(labels: Labels) -> str:
    """Return the name of an attack, with the defense that it met.

    Example:
        >>> name_attack({"attack": "ig", "defense": "dgp"}), name_attack({"attack": "ig", "defense": "none"})
        ('ig on dgp', 'ig')
        >>> name_attack({"attack": "ig", "defense": "ats", "against": "raw"})
        'ig on ats (against raw)'
    """
    defense = name_defense(labels)
    return str(labels["attack"]) if defense in ("None", "none") else f"{labels['attack']} on {defense}"


def name_defense(labels: Labels) -> str:
    """Return a base pruning or channel rule and a defense, and the compared pictures where there are several."""
    against, defense = labels.get("against"), str(labels.get("defense"))
    base = labels.get("base_pruning", labels.get("submodels", "none"))
    name = defense if base == "none" else base if defense == "none" else f"{base}, {defense}"
    return name + ("" if against is None else f" (against {against})")


def name_update(figure: Labels) -> str:
    """Return the name of an update; in a federation its round and client."""
    if figure.get("round") is None:
        return f"target {figure['target']}"
    sender = "the sum of all clients" if figure.get("client") is None else f"client {figure['client']}"
    return f"round {figure['round']}, {sender}"


def name_comparison(figure: Labels) -> str:
    """Return the setting that compared updates share: network, data, batches, given weights and known labels.

    Example:
        >>> labels = {"model": "m", "dataset": "d", "batch_size": 4, "stage": "weights given", "labels": "oracle"}
        >>> name_comparison(labels)
        'm on d, batches of 4, weights given, labels known'
        >>> name_comparison({"model": "m", "dataset": "d", "stage": "after 300 rounds"})
        'm on d, after 300 rounds'
    """
    size = figure.get("batch_size", 1)
    parts = [name_setting(figure), *([f"batches of {size}"] if size > 1 else [])]
    stage = str(figure.get("stage"))
    parts += [stage] if stage == TRAINED or stage.startswith("after ") else []
    return ", ".join([*parts, *(["labels known"] if figure.get("labels") == "oracle" else [])])


def describe_attacker(line: SummaryLine) -> str:
    """Return the attacker's threat model and knowledge."""
    return f"{str(line.labels['threat']).removesuffix('.')}. Known here: {line.labels['knows']}."


def list_facts(labelled: Iterable[Labels]) -> dict[str, str]:
    """Return the facts of the attacked updates, from the labels of rows and figures."""
    labelled = list(labelled)
    targets = {(x.get("run"), x["seed"], x["target"]) for x in labelled if x.get("target") is not None}
    facts = {title: summary.join_distinct(x.get(name) for x in labelled) for title, name in FACTS.items()}
    return facts | {"Updates attacked": str(len(targets))}


def build_tables(lines: Sequence[SummaryLine]) -> dict[str, ReportTable]:
    """Return the table of the reconstructed pictures, and the table of the other measures of the same attacks."""
    if not lines:
        return {}
    labels = [line.labels for line in lines]
    names = [table.label_column(name, name.replace("_", " ")) for name in VARYING if differ(labels, name)]
    names += [table.label_column("attack"), table.label_column("labels")]
    recovered, beside = (
        [table.measure_column(name) for name in metrics if any(name in line.cells for line in lines)]
        for metrics in (RECOVERY, BESIDE)
    )
    weight = Column("total variation", lambda line: _format_weight(line.labels["total_variation"]), number=True)
    caption = "More measures of attacks on updates"
    return {
        "recovered": table.build_table("Attacks on updates", lines, names + recovered, id="recovered", wide=True),
        "beside": table.build_table(caption, lines, [*names, *beside, weight], id="beside", wide=True),
    }


def _format_weight(weight: float | None) -> str:
    return "-" if weight is None else f"{weight:g}"


def build_gallery(figures: Iterable[Labels]) -> list[Card]:
    """Return one card a truth, ordered by the highest PSNR that an attack reached."""
    cards: dict[Key, Card] = {}
    pictures = [figure for figure in figures if figure["kind"] == "picture"]
    several = len({(name_setting(figure), figure["batch_size"]) for figure in pictures}) > 1
    staged = differ(pictures, "stage")
    for figure in pictures:
        card = cards.setdefault(_build_key(figure, CARD), Card(_name_card(figure, several, staged)))
        if figure["attack"] is None:
            card.truth = Picture("truth", figure["png"], [f"label {figure['label']}"])
            continue
        card.guesses.append(_build_guess(figure))
        card.leak = max(card.leak, read_psnr(figure))
    return sorted(cards.values(), key=lambda card: -card.leak)


def read_psnr(figure: Labels) -> float:
    """Return the PSNR of a reconstruction; minus infinity if there is none."""
    psnr = figure["scores"].get("psnr")
    return -math.inf if psnr is None else float(psnr)


def _build_key(figure: Labels, names: Sequence[str]) -> Key:
    return tuple((name, figure.get(name)) for name in names)


def _name_card(figure: Labels, several: bool, staged: bool) -> str:
    size, stage, update = figure["batch_size"], str(figure.get("stage")), name_update(figure)
    parts = [name_setting(figure)] if several or figure.get("run") else []
    parts += [f"batches of {size}"] if several else []
    parts += [stage] if staged and stage not in update.split(", ") else []
    parts += [update]
    parts += [f"picture {figure['item']}"] if size > 1 else []
    parts += [f"seed {figure['seed']}"] if figure["seed"] else []
    return ", ".join(parts)


def _build_guess(figure: Labels) -> Picture:
    """Return a reconstruction: under it the attack's settings, remarks, scores and the label that was inferred."""
    attack, *texts = split(str(figure["attack"]))
    texts += ["labels known"] if figure["labels"] == "oracle" else []
    texts += ["unfinished"] if figure.get("unfinished") else []
    texts += [] if figure["found"] else ["nothing returned"]
    scores = {name: SummaryCell(float(x), None, None) for name, x in figure["scores"].items() if x is not None}
    texts += [f"{table.name_measure(name)} {format_measure(cell, name)}" for name, cell in scores.items()]
    texts += [] if figure["label"] is None else [f"label {figure['label']}"]
    return Picture(name_attack({**figure, "attack": attack}), figure["png"], texts)


def build_sheets(
    figures: Iterable[Labels],
    name_group: Callable[[Labels], str],
    name_sheet_attack: Callable[[str], str],
    name_line: Callable[[Labels], str],
    truth: Sequence[str],
    nearest_first: bool = False,
) -> list[Sheet]:
    """Return one sheet for each attack that has several lines of pictures.

    Args:
        figures: figures of which those with pictures are shown; lines keep their order.
        name_group: the network and data of a figure; figures of different groups share no sheet.
        name_sheet_attack: the name of an attack on a sheet.
        name_line: the line of a figure, such as its defense.
        truth: labels that tell one truth, a column, from another.
        nearest_first: True if the columns are the truths that the attack came nearest to, else the first truths.
    """
    drawn = [figure for figure in figures if figure["kind"] == "picture" and figure["png"]]
    truths = group_by((figure for figure in drawn if figure["attack"] is None), name_group)
    guesses = (figure for figure in drawn if figure["attack"] is not None)
    sheets = []
    for (attack, group), same in group_by(
        guesses, lambda figure: (name_sheet_attack(str(figure["attack"])), name_group(figure))
    ).items():
        lines = group_by(same, name_line)
        if len(lines) > 1:
            named = ({"truth": truths[group]} if group in truths else {}) | lines
            first = sorted(same, key=read_psnr, reverse=True) if nearest_first else next(iter(named.values()))
            columns = list(dict.fromkeys(_build_key(figure, truth) for figure in first))[:ACROSS]
            pngs = {name: {_build_key(x, truth): x["png"] for x in pictures} for name, pictures in named.items()}
            shown = [(name, [by_truth.get(key) for key in columns]) for name, by_truth in pngs.items()]
            sheets.append(Sheet(f"{attack}: {group}", shown))
    return sheets


def draw_losses(figures: Iterable[Labels]) -> list[View]:
    """Return one view for each attack: its loss by iteration, a curve a target."""
    losses = (figure for figure in figures if figure["kind"] == "loss")
    groups = group_by(losses, lambda figure: (name_comparison(figure), name_attack(figure)))
    several = len({comparison for comparison, _ in groups}) > 1
    views = []
    for (comparison, attack), group in groups.items():
        label = f"{comparison}: {attack}" if several else attack
        views.append(View(label, [_draw_loss_panel(label, group)]))
    return views


def _draw_loss_panel(title: str, figures: Sequence[Labels]) -> Panel:
    traces: list[Part] = []
    for number, figure in enumerate(figures[:CURVES]):
        points = {step: float(loss) for step, loss in figure["curve"] if loss is not None}
        name = name_update(figure) + (f", seed {figure['seed']}" if figure["seed"] else "")
        traces.append(draw_curve(name, points, style_line(number, width=1.5)))
    curves = [[y for y in trace["y"] if y is not None] for trace in traces]
    ends = [values[-1] for values in curves if values]
    left = f" (the first {CURVES} of {len(figures)} targets)" if len(figures) > CURVES else ""
    reach = f"it ends between {min(ends):.3g} and {max(ends):.3g}" if ends else "no finite loss"
    alt = f"The attack's loss by iteration, {title}: {reach}."
    x_axis = number_axis("iteration")
    y_axis = number_axis("the attack's loss", 6) | _scale_axis([y for values in curves for y in values])
    return draw_panel(f"{title}{left}", alt, traces, 340, x_axis, y_axis, showlegend=False)


def _scale_axis(values: Sequence[float]) -> Part:
    """Return a logarithmic axis if the values allow one: labels at powers of ten, or at 1, 2 and 5 over few decades.

    Example:
        >>> [_scale_axis(ends).get("dtick") for ends in ([1e-12, 1.0], [1e-4, 1.0], [0.002, 0.03], [0.7, 1.1])]
        [2, 1, 'D2', None]
    """
    if min(values, default=0.0) <= 0:
        return {}
    decades = math.log10(max(values) / min(values))
    ticks = {"dtick": math.ceil(decades / 6)} if decades >= 2 else {"dtick": "D2"} if decades >= 0.7 else {}
    return {"type": "log", "exponentformat": "power"} | ticks
