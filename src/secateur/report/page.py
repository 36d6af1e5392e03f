"""Report page of one run or several: a self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from secateur.config import Limits
from secateur.errors import WrongInput
from secateur.evaluation.limits import check, policy_of
from secateur.evaluation.submodel_advice import caution, from_rows
from secateur.report import (
    audit,
    defenses,
    federation,
    federation_plots,
    inversion,
    measures,
    submodels,
    submodels_plots,
    theory,
)
from secateur.report.federation import name_and_settings
from secateur.report.measures import ATTACK, COST, MODEL
from secateur.report.sources import Source, sources_of
from secateur.report.summary import SummaryLine, attacks, by_setting, compression, lines, models, strongest
from secateur.report.verdict import badge, verdict
from secateur.runs.artifacts import SCHEMA, write
from secateur.runs.rows import Row


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of the runs in these folders; `out` defaults to report.html in a single folder."""
    if out is None:
        if len(folders) != 1:
            raise WrongInput("out", "say where the page of several runs goes: --out FILE.html")
        out = folders[0] / "report.html"
    if out.is_dir():
        raise WrongInput("out", f"{out} is a folder; give a file such as report.html")
    sources = sources_of(folders)
    if not any(source.rows or source.figures for source in sources):
        raise WrongInput("run", f"{', '.join(map(str, folders))}: there are no results yet; finish the run first")
    write(out, render(sources, broken(sources)).encode())
    return out


def broken(sources: Sequence[Source]) -> list[str] | None:
    """Return sentences about the limits of the runs' configurations that do not hold; None if no limit is set."""
    import yaml

    checks = []
    for source in sources:
        limits = Limits.model_validate((yaml.safe_load(source.config) or {}).get("limits") or {})
        checks += [(source.name, checked) for checked in check(source.rows, policy_of(limits))]
    if not checks:
        return None
    failed = [(name, checked.sentence) for name, checked in checks if not checked.passed]
    return [sentence if len(sources) == 1 else f"{name}: {sentence}" for name, sentence in failed]


def render(sources: Sequence[Source], broken: Sequence[str] | None = None) -> str:
    """Return the page's HTML; `broken` holds a sentence for each broken limit, None if no limit is set."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("secateur", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"shown": measures.shown, "measure": measures.title, "compression": compression}
    environment.filters |= {"named": name_and_settings, "megabytes": federation.megabytes}
    environment.filters["caution"] = caution
    rows, figures = _together(sources)
    others = (inversion.is_inversion, federation.is_federated, lambda row: {"study", "submodels"} & row.extra.keys())
    audited = [row for row in rows if not any(of(row) for of in others)]
    on_models = [figure for figure in figures if figure["kind"] not in ("picture", "loss", "cells")]
    table, recovered, exposed = lines(audited), _recovered(rows, figures), submodels.parties(rows)
    federations = federation.table(rows)
    views = {
        "tradeoff": audit.tradeoffs(table),
        "roc": audit.rocs(table, on_models),
        "histograms": audit.histograms(on_models),
        "classes": audit.class_means(on_models),
        "losses": inversion.losses(figures),
        "distances": theory.by_distance(rows),
        "balance": defenses.balance(rows),
        "epochs": defenses.over_epochs(rows),
        "rounds": federation.over_rounds(rows),
        "planes": federation_plots.planes(rows),
        "rates": federation_plots.by_rate(rows),
        "traffic": federation_plots.traffic(rows),
        "theory": theory.beside_measured(rows),
        "submodel_planes": submodels_plots.planes(exposed),
        "submodel_cells": submodels_plots.cells(figures),
        "submodel_rounds": submodels_plots.over_rounds(rows),
    }
    return environment.get_template("page.html.j2").render(
        schema=SCHEMA,
        badge=badge(table, broken),
        broken=broken or [],
        verdicts=[(audit.setting(group[0].labels), verdict(group)) for group in by_setting(table)],
        facts=_facts(audited),
        federations=federations,
        federations_apart=federation.apart(federations),
        federations_alike=federation.common(federations),
        federations_settings=federation.settings(rows),
        mishaps=federation.mishaps(rows),
        submodel_federations=submodels.federations(exposed) + submodels.not_attacked(rows),
        submodel_parties=exposed,
        submodel_views=submodels.asked(rows),
        submodel_advice=from_rows(rows),
        pruned_sheets=federation_plots.sheets(figures),
        studied=defenses.tables(rows),
        **_tables(table, recovered["updates"]),
        **recovered,
        views=views,
        figures={name: [asdict(view) for view in choices] for name, choices in views.items()},
        plotly=_plotly() if any(views.values()) else "",
        sources=sources,
        unfinished=[source.name for source in sources if source.environment.get("finished", "") is None],
        seeds=len({row.seed for row in rows}),
    )


def _recovered(rows: Sequence[Row], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the template's values about attacks on updates."""
    attack_lines = inversion.attacked(rows)
    records = [row.to_json() for row in rows if inversion.is_inversion(row)]
    records += [dict(figure) for figure in figures if figure["kind"] in ("picture", "loss")]
    cards = inversion.gallery(figures)
    return {
        "inverted": bool(records),
        "updates": attack_lines,
        "update_badge": inversion.badge(attack_lines),
        "update_verdict": inversion.verdict(attack_lines),
        "update_facts": inversion.facts(records) if records else defenses.facts(defenses.studied(rows)),
        "sheets": defenses.sheets(figure for figure in figures if not federation_plots.is_federated(figure)),
        "update_places": [x for x in inversion.PLACES if len({line.labels.get(x) for line in attack_lines}) > 1],
        "update_measures": [name for name in measures.RECOVERY if any(name in line.cells for line in attack_lines)],
        "beside_measures": [name for name in measures.BESIDE if any(name in line.cells for line in attack_lines)],
        "threats": list(dict.fromkeys((line.labels["attack"], inversion.threat(line)) for line in attack_lines)),
        "open_cards": inversion.OPEN,
        "cards": cards[: inversion.MOST],
        "more_cards": max(0, len(cards) - inversion.MOST),
        "pictured": any(card.truth is not None and card.truth.png for card in cards),
        "any_picture": any(x.png for card in cards for x in (card.truth, *card.guesses) if x),
    }


def _tables(table: Sequence[SummaryLine], updates: Sequence[SummaryLine]) -> dict[str, Any]:
    """Return the lines of the three tables, their columns, and the notes of all cells by number."""
    attacked, model_lines = attacks(table), models(table)
    metrics = list(dict.fromkeys(name for line in model_lines for name in line.cells))
    noted = [line.cells.get(name) for line in updates for name in measures.RECOVERY | measures.BESIDE]
    noted += [cell for line in [*attacked, *model_lines] for cell in line.cells.values()]
    notes = dict.fromkeys(cell.note for cell in noted if cell and cell.note)
    known = {"run", "model", "dataset", "pruner", "sparsity", "defense", "original", "attack", "adaptive"}
    varying = [name for name in ("run", "model", "dataset") if len({line.labels.get(name) for line in table}) > 1]
    return {
        "attacks": attacked,
        "models": model_lines,
        "places": varying,
        "extras": list(dict.fromkeys(name for line in attacked for name in line.labels if name not in known)),
        "attack_measures": ["test_accuracy", *(name for name in ATTACK if any(name in x.cells for x in attacked))],
        "model_measures": measures.ordered((name for name in metrics if name not in COST), MODEL),
        "cost_measures": [name for name in COST if name in metrics],
        "strongest": [line.labels for line in strongest(table)],
        "notes": {note: number for number, note in enumerate(notes, start=1)},
    }


def _facts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the facts of the audit, in the order of the work."""

    def listed(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(f"{x:g}" if isinstance(x, float) else str(x) for x in values))

    pruned = [row for row in rows if row.pruner not in (None, "none")]
    attacked = [row for row in rows if row.attack is not None]
    facts = {
        "Network": listed(row.model for row in rows),
        "Data": listed(row.dataset for row in rows),
        "Pruners": listed(row.pruner for row in pruned),
        "Sparsities": listed(sorted({row.sparsity for row in pruned if row.sparsity is not None})),
        "Defenses": listed(row.defense for row in pruned),
        "Attacks": listed(row.attack for row in attacked),
        "Attacker": listed("knows the defense" if row.adaptive else "does not know the defense" for row in attacked),
        "Seeds": listed(sorted({row.seed for row in rows})),
    }
    return {name: text for name, text in facts.items() if text}


def _together(sources: Sequence[Source]) -> tuple[list[Row], list[Mapping[str, Any]]]:
    """Return all rows and figures; with several runs each carries the name of its run, to keep them apart."""
    if len(sources) == 1:
        return list(sources[0].rows), list(sources[0].figures)
    rows = [replace(row, extra=row.extra | {"run": source.name}) for source in sources for row in source.rows]
    return rows, [{**figure, "run": source.name} for source in sources for figure in source.figures]


def _plotly() -> str:
    """Return the source of the plotting library, so that the page needs no network."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
