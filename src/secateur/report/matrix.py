"""Page of the matrix: heat maps, whose cells lead to their rows and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.catalogue import split
from secateur.report.heatmap import AUC, BY_KEY, COLUMNS, GROUND, PSNR, SCALE, SHOWN, MatrixRow, build_heatmaps, is_cell
from secateur.report.matrix_sentences import write_sentences
from secateur.report.summary import Labels
from secateur.runs.rows import Row

INKS = (*["#1c2321"] * 4, "#ffffff", "#ffffff")  # of the text on each colour
PICTURES = 4  # truths of a row
WORDS = {  # of the common ground
    "Data": "{data}, {members} members and as many non-members, drawn anew for each seed",
    "Clients": "{clients}, equal shares at random, all in every round, one local step of {batch_size} pictures",
    "Training": "{rounds} rounds at rate {learning_rate}; sub-models take as many passes over the members by Adam",
    "Final model": "{in_out} reference models; pruned at {sparsity}, {finetune_epochs} epochs of fine-tuning",
    "Updates": "membership by the last {history} rounds of each client: {membership}",
    "Updates of sub-models": "the same by {submodel_membership}, with {shadow_federations} shadow federations",
    "Inversion": "plain by sgi, which is IG that reads the mask of pruned weights; an opened row names the strongest. "
    "All clients in round {attacked_round}, {iterations} iterations, weight of total variation {total_variation}, "
    "labels known; mid-grey scores about 12 dB",
    "Attacks of inversion": "{inversions}, each plain and in the modes that work against the defense",
    "Active server": "rob with {bins} bins, in the same round; more than 60 dB count as 60",
}


@dataclass(frozen=True)
class PictureStrip:
    """Pictures of a row: the truths, or one attack's reconstructions of them."""

    title: str
    pngs: list[str | None]


def build_strips(row: MatrixRow, figures: Sequence[Labels]) -> list[PictureStrip]:
    """Return the truths of a row's first seed, and the reconstructions of each column that has pictures."""
    shown: dict[str | None, str] = {}
    for key in SHOWN:
        if key in row.cells and row.cells[key].measure:
            shown.setdefault(row.cells[key].attack, key)
    if not shown:
        return []
    first = next(iter(row.cells.values())).rows[0]
    seed = min(seed for key in shown.values() for seed in row.measure(key))
    wanted = (row.network, first.defense, first.extra.get("base_pruning"), seed)
    drawn = [figure for figure in figures if figure.get("png") and _key(figure) == wanted]
    truths = {_place(figure): figure["png"] for figure in drawn if figure["attack"] is None}
    strips = [PictureStrip("truth", list(truths.values())[:PICTURES])] if truths else []
    for attack, key in shown.items():
        pngs = {_place(figure): figure["png"] for figure in drawn if figure["attack"] == attack}
        if pngs:
            chosen = list(truths or pngs)[:PICTURES]
            strips.append(PictureStrip(f"{BY_KEY[key].title}: {name_mode(attack)}", [pngs.get(at) for at in chosen]))
    return strips


def _place(figure: Labels) -> tuple[Any, Any]:
    return figure["target"], figure["item"]


def _key(figure: Labels) -> tuple[Any, ...]:
    return figure["model"], figure.get("defense"), figure.get("base_pruning") or "none", figure["seed"]


def name_mode(attack: str | None) -> str:
    """Return an attack's name with the settings by which it knows of the defense.

    Example:
        >>> name_mode("sgi:iterations=400:adaptive=support:follows=true"), name_mode("rob:bins=128")
        ('sgi, adaptive=support, follows=true', 'rob')
    """
    name, *settings = split(attack or "")
    known = ("adaptive", "follows", "rounds", "magnitudes")
    return ", ".join([name, *(text for text in settings if text.partition("=")[0].startswith(known))])


def list_ground(rows: Iterable[Row]) -> dict[str, str]:
    """Return the common ground in words; a setting in which runs differ has all its values."""
    values: dict[str, list[str]] = {}
    for row in rows:
        ground = row.extra.get("ground") if row.metric == GROUND else None
        for name, value in ground.items() if isinstance(ground, dict) else ():
            text = ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"
            values.setdefault(name, []).append(text)
    known = {name: " or ".join(dict.fromkeys(texts)) for name, texts in values.items()}
    return {title: text.format_map(known) for title, text in WORDS.items() if _has(text, known)}


def _has(text: str, values: Mapping[str, Any]) -> bool:
    return all(name in values for name in re.findall(r"{(\w+)}", text))


def build_page(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the values of the template."""
    maps = build_heatmaps(rows)
    strips = {row.id: build_strips(row, figures) for heatmap in maps for row in heatmap.rows}
    seeds = sorted({seed for heatmap in maps for seed in heatmap.seeds})
    return {
        "columns": COLUMNS,
        "maps": maps,
        "sentences": {heatmap.network: write_sentences(heatmap) for heatmap in maps},
        "strips": strips,
        "seeds": seeds,
        "ground": list_ground(rows),
        "data": ", ".join(dict.fromkeys(row.dataset for row in rows if is_cell(row))),
        "colours": list(zip(SCALE, INKS, strict=True)),
        "scales": {unit: list_bounds(ends) for unit, ends in (("AUC", AUC), ("dB", PSNR))},
        "shows_pictures": any(strips.values()),
    }


def list_bounds(ends: tuple[float, float]) -> list[str]:
    """Return the lower bound of each colour.

    Example:
        >>> list_bounds((12.0, 30.0))
        ['12', '15', '18', '21', '24', '27']
    """
    low, high = ends
    return [f"{low + number * (high - low) / len(SCALE):.3g}" for number in range(len(SCALE))]
