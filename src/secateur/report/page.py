"""Report page of one run or several: a self-contained HTML file."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.config import read_limits
from secateur.errors import WrongInput
from secateur.evaluation.limits import Check, check, policy_of
from secateur.evaluation.selection import is_search
from secateur.evaluation.submodel_advice import caution, from_rows
from secateur.report import (
    audit,
    audit_plots,
    defenses,
    federation,
    federation_plots,
    inversion,
    matrix,
    recommend,
    submodels,
    submodels_plots,
    theory,
)
from secateur.report.headline import MEANINGS, build_headline
from secateur.report.heatmap import is_cell
from secateur.report.inversion import MOST, OPEN
from secateur.report.plotting import View, draw_views
from secateur.report.summary import APART, Labels, group_by, group_by_setting, join_distinct, name_setting, summarise
from secateur.report.table import name_measure
from secateur.report.update_verdict import UpdateVerdict, judge_federations, judge_updates
from secateur.report.verdict import write_verdict
from secateur.runs.archive import SUFFIX, is_archive, read_archive
from secateur.runs.artifacts import SCHEMA, write
from secateur.runs.folder import check_plain, load_config, load_figures, load_marker, load_rows, read_lines
from secateur.runs.rows import Row

if TYPE_CHECKING:
    import jinja2

MOST_VERDICTS = 30  # that the page shows; more are counted
MOST_RUNS = 50  # whose configuration the page shows


@dataclass(frozen=True)
class Source:
    """One run of the page."""

    name: str
    rows: Sequence[Row]
    figures: Sequence[Labels]
    config: str
    environment: Mapping[str, Any]

    @property
    def unfinished(self) -> bool:
        """True if the run, or a run of the archive, was interrupted."""
        return self.environment.get("finished", "") is None or "unfinished" in self.environment


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of the runs in these folders and archives.

    `out` defaults to report.html in a single folder, and to NAME.html here for a single archive NAME.
    """
    if out is None:
        if len(folders) != 1:
            raise WrongInput("out", "the page of several runs needs a file; use --out FILE.html")
        alone = folders[0]
        out = Path(alone.name.removesuffix(SUFFIX) + ".html") if is_archive(alone) else alone / "report.html"
    if out.is_dir():
        raise WrongInput("out", f"{out} is a folder; use a file such as report.html")
    with _collector_paused():
        content, has_pictures = _render_folders(folders)
    write(out, content, private=has_pictures)
    return out


def _render_folders(folders: Sequence[Path]) -> tuple[bytes, bool]:
    """Return the page of the runs in these folders, and True if it shows pictures."""
    sources = load_sources(folders)
    if not any(source.rows or source.figures for source in sources):
        raise WrongInput("run", f"{', '.join(map(str, folders))}: there are no results yet; finish the run first")
    has_pictures = any(figure.get("png") for source in sources for figure in source.figures)
    return render(sources, check_limits(sources)).encode(), has_pictures


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: rows are many and none is garbage, and it would take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_sources(folders: Sequence[Path]) -> list[Source]:
    """Load the runs in these folders, each under a different name; of a sweep its runs."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    sources = []
    for folder, name in zip(folders, names, strict=True):
        if is_archive(folder):
            archive = read_archive(folder)
            sources.append(Source(name, archive.rows, archive.figures, "", archive.provenance))
            continue
        check_plain(folder, "run")
        if (folder / "pieces.jsonl").exists():
            prefix = "" if len(folders) == 1 else f"{name}: "
            sources += [replace(source, name=prefix + source.name) for source in _load_sweep(folder)]
        else:
            sources.append(_load_source(folder, name))
    return sources


def _load_sweep(folder: Path) -> list[Source]:
    """Load the runs of a sweep, the seeds of each together; missing pieces come last."""
    pieces = read_lines(folder / "pieces.jsonl", _read_piece)
    runs = group_by((piece for piece in pieces if piece["state"] == "done"), lambda piece: piece["run"])
    sources = [
        _join_seeds([_load_source(folder / "pieces" / piece["name"], run) for piece in same])
        for run, same in runs.items()
    ]
    for piece in pieces:
        if piece["state"] != "done":
            reason = json.dumps({"missing": piece["said"] or piece["state"]})
            sources.append(Source(f"{piece['name']} (missing)", [], [], reason, {}))
    return sources


def _read_piece(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of pieces.jsonl; refuse a name that leads out of the sweep's folder."""
    piece = {name: line[name] for name in ("name", "run", "state", "said")}
    if not all(isinstance(piece[name], str) for name in ("name", "run", "state")):
        raise ValueError("a name must be text")
    if piece["name"] in ("", ".", "..") or Path(piece["name"]).name != piece["name"]:
        raise ValueError("a piece lies in the sweep's own folder")
    return piece


def _join_seeds(sources: Sequence[Source]) -> Source:
    """Return runs that differ in their seeds alone as one."""
    rows = [row for source in sources for row in source.rows]
    figures = [figure for source in sources for figure in source.figures]
    seeds = [seed for source in sources for seed in source.environment.get("seeds", [])]
    return replace(sources[0], rows=rows, figures=figures, environment={**sources[0].environment, "seeds": seeds})


def _load_source(folder: Path, name: str) -> Source:
    """Load the run in a folder."""
    return Source(name, load_rows(folder), load_figures(folder), load_config(folder), load_marker(folder))


def check_limits(sources: Sequence[Source]) -> list[Check] | None:
    """Hold the runs against the limits of their configurations; None if no limit is set."""
    checks = []
    for source in sources:
        limits = read_limits(source.config)
        several = f"{source.name}: " if len(sources) > 1 else ""
        checks += [replace(item, subject=several + item.subject) for item in check(source.rows, policy_of(limits))]
    return checks or None


def render(sources: Sequence[Source], limits: Sequence[Check] | None = None) -> str:
    """Return the page's HTML; `limits` are the checks of the runs' limits, None if no limit is set."""
    if any(is_cell(row) for source in sources for row in source.rows):
        return _render_matrix(sources)
    rows, figures = _join_sources(sources)
    parts = [_build_audit, _build_federations, _build_submodels, _build_updates, _build_defenses, recommend.build_page]
    built = [build(rows, figures) for build in parts]
    values = {name: value for part in built for name, value in part.items() if name not in ("tables", "views")}
    tables = {name: table for part in built for name, table in part["tables"].items()}
    views = {name: draw_views(choices, _keep) for part in built for name, choices in part["views"].items()}
    notes = dict.fromkeys(note for table in tables.values() for note in table.notes)
    return _load_template("page.html.j2").render(
        schema=SCHEMA,
        headline=build_headline(values.pop("audited"), limits),
        limited=limits is not None,
        meanings={name_measure(name): text for name, text in MEANINGS.items()},
        tables=tables,
        notes={note: number for number, note in enumerate(notes, start=1)},
        views=views,
        figures={name: [view.content for view in choices] for name, choices in views.items()},
        plotly=_read_plotly() if any(views.values()) else "",
        sources=sources,
        most_verdicts=MOST_VERDICTS,
        most_runs=MOST_RUNS,
        most_models=audit.MOST_MODELS,
        unfinished=[source.name for source in sources if source.unfinished],
        seeds=len({row.seed for row in rows}),
        **values,
    )


@cache
def _load_template(name: str) -> jinja2.Template:
    """Return a page's template, which takes a tenth of a second to compile."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("secateur", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)


def _render_matrix(sources: Sequence[Source]) -> str:
    """Return the page of a matrix, whose cells may come from several runs of its parts."""
    rows = [row for source in sources for row in source.rows]
    figures = [figure for source in sources for figure in source.figures]
    return _load_template("matrix.html.j2").render(
        schema=SCHEMA,
        sources=sources[:MOST_RUNS],
        unfinished=any(source.unfinished for source in sources),
        **matrix.build_page(rows, figures),
    )


def _keep(view: View) -> View:
    return view


def _build_audit(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the template's values about audited models."""
    labels = {"study", "submodels"}
    others = (inversion.is_inversion, federation.is_federated, is_search, lambda row: labels & row.extra.keys())
    audited = [row for row in rows if not any(is_other(row) for is_other in others)]
    lines = summarise(row for row in audited if row.metric not in APART)
    return {
        "audited": audited,
        "audited_name": audit.name_audited(audited),
        "exposed": audit.list_exposed(lines, figures),
        "layers": audit.list_layers(audited),
        "exposed_groups": audit.list_groups(lines, figures),
        "facts": audit.list_facts(audited),
        "verdicts": [(name_setting(group[0].labels), write_verdict(group)) for group in group_by_setting(lines)],
        "tables": audit.build_tables(lines),
        "views": {
            "tradeoff": audit_plots.draw_tradeoffs(lines),
            "roc": audit_plots.draw_rocs(lines, figures),
            "histograms": audit_plots.draw_histograms(figures),
            "classes": audit_plots.draw_class_means(figures),
        },
    }


def _build_federations(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the template's values about federations."""
    lines = federation.summarise_federations(rows)
    return {
        "federations": lines,
        "federations_shared": federation.describe_shared(lines),
        "federations_settings": federation.list_settings(rows),
        "federation_verdicts": _sort_verdicts(judge_federations(rows)),
        "mishaps": federation.list_mishaps(rows),
        "federations_observed": federation.list_observed(rows),
        "federation_sheets": federation_plots.build_federation_sheets(figures),
        "membership": any("auc" in line.cells for line in lines),
        "tables": federation.build_tables(lines),
        "views": {
            "rounds": federation.draw_rounds(rows),
            "planes": federation_plots.draw_planes(lines),
            "rates": federation_plots.draw_rates(rows),
            "traffic": federation_plots.draw_traffic(lines),
            "theory": theory.draw_theory(rows),
        },
    }


def _sort_verdicts(verdicts: list[UpdateVerdict]) -> list[UpdateVerdict]:
    """Return verdicts in their order, or with the worst first where the page cannot show all."""
    if len(verdicts) <= MOST_VERDICTS:
        return verdicts
    return sorted(verdicts, key=lambda verdict: ("bad", "doubtful", "good").index(verdict.badge.colour))


def _build_submodels(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the template's values about federations over sub-models."""
    federated = [row for row in rows if submodels.is_submodel(row)]
    networks, data = (join_distinct(getattr(row, name) for row in federated) for name in ("model", "dataset"))
    return {
        "submodels_subject": f"{networks} on {data}",
        "submodels_unmet": submodels.describe_unmet_clients(rows),
        "submodel_advice": [
            (row, caution(row) or "", submodels.build_advice_table(advice)) for row, advice in from_rows(rows)
        ],
        "tables": submodels.build_tables(rows),
        "views": {
            "submodel_planes": submodels_plots.draw_planes(rows),
            "submodel_cells": submodels_plots.draw_cells(figures),
            "submodel_rounds": submodels_plots.draw_rounds(rows),
        },
    }


def _build_updates(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the template's values about attacks on updates."""
    lines = inversion.summarise_attacks(rows)
    records = [row.to_json() for row in rows if inversion.is_inversion(row)]
    records += [dict(figure) for figure in figures if figure["kind"] in ("picture", "loss")]
    cards = inversion.build_gallery(figures)
    return {
        "inverted": bool(records),
        "update_verdicts": _sort_verdicts(judge_updates(rows)),
        "update_facts": inversion.list_facts(records) if records else defenses.list_facts(rows),
        "attackers": list(dict.fromkeys((line.labels["attack"], inversion.describe_attacker(line)) for line in lines)),
        "open_cards": cards[:OPEN],
        "closed_cards": cards[OPEN:MOST],
        "more_cards": max(0, len(cards) - MOST),
        "shows_truths": any(card.truth is not None and card.truth.png for card in cards),
        "shows_pictures": any(x.png for card in cards for x in (card.truth, *card.guesses) if x),
        "tables": inversion.build_tables(lines),
        "views": {"losses": inversion.draw_losses(figures)},
    }


def _build_defenses(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the template's values about defenses of updates."""
    others = [figure for figure in figures if not federation_plots.is_federation_picture(figure)]
    studied = defenses.build_tables(rows)
    return {
        "defense_sheets": defenses.build_defense_sheets(others),
        "studied": studied,
        "tables": {},
        "views": {
            "distances": theory.draw_distances(rows),
            "balance": defenses.draw_balance(rows),
            "epochs": defenses.draw_epochs(rows),
        },
    }


def _join_sources(sources: Sequence[Source]) -> tuple[list[Row], list[Labels]]:
    """Return all rows and figures; with several runs each carries the name of its run, to keep them apart."""
    if len(sources) == 1:
        return list(sources[0].rows), list(sources[0].figures)
    rows = [replace(row, extra=row.extra | {"run": source.name}) for source in sources for row in source.rows]
    return rows, [{**figure, "run": source.name} for source in sources for figure in source.figures]


@cache
def _read_plotly() -> str:
    """Return the source of the plotting library, so that the page needs no network."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
