"""The same training pictures by pruning rate and defense: what an attack made of them in every federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from secateur.catalogue import split
from secateur.report import federation
from secateur.report.defended import ACROSS, Sheet
from secateur.report.federation_names import name, titles
from secateur.report.inversion_gallery import Picture
from secateur.report.summary import Key

TRUTH = ("seed", "round", "client", "item")  # what tells one truth from another in all federations of a study
ORDER = ("base_pruning", "sparsity", "broadcast", "defense")
Labels = Mapping[str, Any]


def is_federated(figure: Labels) -> bool:
    """Whether a figure is of a federation's round."""
    return figure["kind"] == "picture" and "base_pruning" in figure and "round" in figure


def sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """One sheet an attack that met several federations, a line each, in the order of their base pruning and rate.

    The columns are the pictures that the attack came nearest to in any of them.
    """
    figures = [figure for figure in figures if is_federated(figure) and figure["png"]]
    called = titles(figures)
    truths: dict[str, dict[Key, Picture]] = {}
    groups: dict[tuple[str, str], dict[tuple[Any, ...], dict[Key, tuple[float, Picture]]]] = {}
    for figure in figures:
        place, key = federation.place(figure), tuple((each, figure.get(each)) for each in TRUTH)
        if figure["attack"] is None:
            truths.setdefault(place, {})[key] = Picture("truth", figure["png"], [])
            continue
        title = name(figure)
        line = (*(figure.get(each) or 0 for each in ORDER), title)
        near = float(figure["scores"].get("psnr") or 0.0)
        lines = groups.setdefault((place, _attack(str(figure["attack"]))), {})
        lines.setdefault(line, {})[key] = near, Picture(title, figure["png"], [])
    made = []
    for (place, attack), lines in groups.items():
        if len(lines) > 1:
            chosen = _nearest(lines.values())
            above = ("truth", [truths.get(place, {}).get(key) for key in chosen])
            below = [
                (called[line[-1]], [_picture(lines[line], key) for key in chosen]) for line in sorted(lines, key=str)
            ]
            made.append(Sheet(f"{attack}: {place}", [above, *below]))
    return made


def _nearest(lines: Iterable[Mapping[Key, tuple[float, Picture]]]) -> list[Key]:
    best: dict[Key, float] = {}
    for found in lines:
        for key, (near, _) in found.items():
            best[key] = max(near, best.get(key, near))
    return sorted(best, key=lambda key: -best[key])[:ACROSS]


def _picture(found: Mapping[Key, tuple[float, Picture]], key: Key) -> Picture | None:
    return found[key][1] if key in found else None


def _attack(text: str) -> str:
    first, *settings = split(text)
    return ", ".join([first, *(each.replace("adaptive=", "knowing: ") for each in settings if "adaptive" in each)])
