"""The gallery of attacks on updates: every truth beside what the attacks made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from secateur.catalogue import split
from secateur.report.inversion import Labels, name, place
from secateur.report.measures import PICTURE, shown
from secateur.report.sections import setting
from secateur.report.summary import Cell, Key

OPEN = 12  # cards that are seen at once
MOST = 100  # cards: the others are in the run's folder
CARD = ("run", "model", "dataset", "stage", "batch_size", "seed", "target", "item")  # what tells one truth from another


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
