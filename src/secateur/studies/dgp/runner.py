"""The runner of dgp studies: all steps write into one run folder, then their rows become a table.

Every step saves its results as stages of the run, so that a restarted study resumes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur.catalogue import Method
from secateur.config import Invert, read
from secateur.errors import WrongInput, unknown
from secateur.evaluation.setup import device_of
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.studies.claims import Finding
from secateur.studies.dgp.attack_step import ADAPTIVE
from secateur.studies.dgp.privacy_tables import left_out_lines
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.scale import DgpScale, DgpSetting, Step, load_all, scale_of, stand_in
from secateur.studies.dgp.training_step import TrainingStep
from secateur.studies.table import StudyTable, TableLine

Tabulate = Callable[[DgpResults], tuple[list[TableLine], list[Finding]]]


@dataclass(frozen=True)
class UpdateStudy:
    """The study of one figure or table: steps that measure, and a function that makes the table of their rows."""

    tabulate: Tabulate
    steps: tuple[Step, ...]
    intervals: str = ""  # describes the table's intervals; empty: they are over examples or seeds

    def conduct(
        self, entry: Method, scale: str, options: Mapping[str, Any], overrides: list[str] | None, out: Path
    ) -> StudyTable:
        """Run all steps for every seed into the folder `out`, and return the table."""
        steps, others = chosen(self.steps, overrides or [])
        size = scale_of(scale, others)
        steps = merged(steps, size, options)
        asked = read(Invert, None, {name: options.get(name) for name in ("seeds", "device")})
        device, datasets = device_of(asked), load_all(steps, size, options)
        torch.set_num_threads(size.threads)
        replaced = {name: str(options[name]) for name in ("data", "model", "images") if options.get(name) is not None}
        config = {"study": entry.name, "scale": scale} | asdict(size) | replaced | {"seeds": asked.seeds}
        config |= {} if steps == self.steps else {"steps": [repr(step) for step in steps]}
        try:
            with open_run(out, "study", config, device=str(device), seeds=asked.seeds) as run:
                for seed in asked.seeds:
                    setting = DgpSetting(run, size, options, datasets, seed)
                    for step in steps:
                        step(setting)
                rows = run.rows
        finally:
            with suppress(WrongInput):  # there may be no rows yet
                _write_page(out)
        shutil.rmtree(out / "unfinished", ignore_errors=True)
        lines, findings = self.tabulate(DgpResults(rows))
        lines += left_out_lines(DgpResults(rows))
        return StudyTable(
            entry.summary, _facts(entry.name, scale, size, rows, asked.seeds), lines, findings, self.intervals
        )


def merged(steps: Sequence[Step], scale: DgpScale, options: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the steps without duplicates: steps whose stand-in network and data set are equal are one step."""
    kept: dict[str, Step] = {}
    for step in steps:
        model, data = stand_in(step.model, scale, options), options.get("data") or scale.data[step.data]
        kept.setdefault(repr(replace(step, model=model, data=data)), step)  # type: ignore[type-var]
    return tuple(kept.values())


def chosen(steps: Sequence[Step], overrides: Sequence[str]) -> tuple[tuple[Step, ...], list[str]]:
    """Select a part of a study, to run on a separate machine; return its steps and the remaining overrides.

    `steps=ig,training` selects the attacks of these names and the trainings; `defenses=none,dgp` selects defenses in
    every step. `adaptive=support,mask` selects these attackers besides the plain one, `adaptive=none` the plain one
    alone.
    """
    keys = ("steps", "defenses", "adaptive")
    texts = {key: text for key in keys for text in overrides if text.partition("=")[0] == key}
    asked = {key: [part.strip() for part in text.partition("=")[2].split(",")] for key, text in texts.items()}
    left = [step for step in steps if "steps" not in asked or _name(step) in asked["steps"]]
    if "defenses" in asked:
        left = [step for candidate in left if (step := _under(candidate, asked["defenses"])) is not None]
    if "adaptive" in asked:
        left = [_by(candidate, asked["adaptive"]) for candidate in left]
    if not left:
        names = ", ".join(dict.fromkeys(map(_name, steps)))
        defenses = ", ".join(dict.fromkeys(name for step in steps for name in getattr(step, "defenses", ())))
        raise WrongInput("set", f"leaves nothing of this study; its steps are {names}, its defenses {defenses}")
    return tuple(left), [text for text in overrides if text not in texts.values()]


def _name(step: Step) -> str:
    return getattr(step, "attack", "training" if isinstance(step, TrainingStep) else type(step).__name__.lower())


def _under(step: Any, defenses: Sequence[str]) -> Step | None:
    """Return a step with the selected defenses, or None without any; a step without defenses is unchanged."""
    if not hasattr(step, "defenses"):
        return step  # type: ignore[no-any-return]
    selected = tuple(name for name in step.defenses if name in defenses)
    return replace(step, defenses=selected) if selected else None


def _by(step: Any, adaptive: Sequence[str]) -> Step:
    """Return a step with the selected adaptive attackers."""
    if unknown_names := [name for name in adaptive if name not in (*ADAPTIVE, "none")]:
        raise unknown("adaptive", unknown_names[0], (*ADAPTIVE, "none"))
    selected = tuple(name for name in getattr(step, "adaptive", ()) if name in adaptive)
    changed: Step = replace(step, adaptive=selected) if hasattr(step, "adaptive") else step
    return changed


def _write_page(out: Path) -> None:
    from secateur.report.page import write_page

    write_page([out])


def _facts(name: str, scale: str, size: DgpScale, rows: Sequence[Row], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the settings that the numbers hold for; they show where a run is smaller than the paper's."""
    inverted = any("target" in row.extra for row in rows)
    trained = any(row.metric == "test_accuracy" for row in rows)
    facts: dict[str, Any] = {"study": name, "scale": scale}
    facts |= {"data": list(dict.fromkeys(row.dataset for row in rows))}
    facts |= {"model": list(dict.fromkeys(row.model for row in rows))}
    facts |= {} if size.examples is None else {"examples": size.examples}
    facts |= {"targets": size.targets, "iterations": size.iterations} if inverted else {}
    facts |= {"users": size.users, "epochs": size.epochs or "as in the paper"} if trained else {}
    facts |= {"augmentation": "crop and flip" if size.augment else "none"} if trained else {}
    return facts | {"seeds": list(seeds)}
