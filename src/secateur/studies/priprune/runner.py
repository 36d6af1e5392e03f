"""The runner of priprune studies: all federations write into one run folder, then their rows become a table.

A restarted study resumes. Studies in the same folder share their common federations, which are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from secateur.catalogue import Choice, Method, name_of
from secateur.config import Federate, dump, read
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.experiments.federate import FederateExperiment, check_federate
from secateur.report import page_afterwards
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row
from secateur.studies.claims import Finding
from secateur.studies.priprune.results import PripruneResults
from secateur.studies.priprune.scale import PripruneScale, scale_of
from secateur.studies.priprune.settings import Federations, PripruneSetting, Ready
from secateur.studies.study import plain
from secateur.studies.table import StudyTable, TableLine

Tabulate = Callable[[PripruneResults], tuple[list[TableLine], list[Finding]]]
Steps = Callable[[PripruneScale], Sequence[Federations]]
Also = Callable[[PripruneScale, Run, Federate, Dataset, torch.device, int, Choice], None]
PARTS = ("bases", "defenses", "broadcast")  # parts of a study that `--set` can select from
INTERVALS = {
    True: "Leakage is the mean over the attacked rounds, in brackets Student's 95 % interval over these; "
    "accuracies have Wilson's. Another seed may differ by more.",
    False: "Values are means over seeds, with Student's 95 % intervals over them.",
}


@dataclass(frozen=True)
class FederatedStudy:
    """The study of one figure or table: federations at a scale, and a function that makes the table of their rows."""

    tabulate: Tabulate
    steps: Steps
    also: Also | None = None  # a further measurement of every federation

    def conduct(
        self, entry: Method, scale: str, options: Mapping[str, Any], overrides: list[str] | None, out: Path
    ) -> StudyTable:
        """Run all federations for every seed into the folder `out`, and return the table."""
        given_parts = [text for text in overrides or [] if _key(text) in PARTS]
        size = scale_of(scale, [text for text in overrides or [] if text not in given_parts])
        only = {_key(text): text.partition("=")[2] for text in given_parts}
        asked = read(Federate, None, {name: options.get(name) for name in ("seeds", "device")})
        steps, device = chosen(self.steps(size), only), device_of(asked)
        setting = PripruneSetting(size, options, asked.seeds, tuple(step.data for step in steps))
        torch.set_num_threads(size.threads)
        ready = [federations for step in steps for federations in setting.configs(step)]
        if not ready:
            raise WrongInput("data", f"nothing of {entry.name} is run on this data set; give another")
        for federations in ready:
            check_federate(federations.config, federations.data, device)
        replaced = {name: str(options[name]) for name in ("data", "model", "images") if options.get(name) is not None}
        settings = {"study": entry.name, "scale": scale} | asdict(size) | replaced | {"seeds": asked.seeds}
        settings |= {"only": only} if only else {}
        with (
            page_afterwards(out),
            open_run(out, "study", plain(settings), device=str(device), seeds=asked.seeds) as run,
        ):
            _run(run, ready, device, asked.seeds, None if self.also is None else partial(self.also, size))
        tested = {
            federations.data.name: len(federations.data.inputs) - federations.data.train_size for federations in ready
        }
        stands = {(federations.config.model, federations.data.name): federations.paper for federations in ready}
        lines, findings = self.tabulate(PripruneResults(run.rows, tested, stands))
        facts = {"study": entry.name, "scale": scale} | _facts(size, run.rows, ready) | {"seeds": asked.seeds}
        return StudyTable(entry.summary, facts, lines, findings, INTERVALS[len(asked.seeds) == 1])


def chosen(steps: Sequence[Federations], asked: Mapping[str, str]) -> list[Federations]:
    """Select a part of a study, to run on a separate machine, by `bases=prunefl,snip` or `defenses=none,priprune`.

    A name selects all its settings; the study's full text (pseudo-largest:rate=0.3) selects one. `broadcast=dense`
    selects the federations with a dense broadcast.
    """
    left = []
    for step in steps:
        selected: dict[str, Any] = {part: _among(_texts(step, part), wanted) for part, wanted in asked.items()}
        if all(selected.values()):
            selected |= {"broadcast": step.broadcast} if "broadcast" in selected else {}
            left.append(replace(step, **selected))
    if not left:
        known = {part: dict.fromkeys(text for step in steps for text in _texts(step, part)) for part in PARTS}
        choices = ", its ".join(f"{part} are {', '.join(texts)}" for part, texts in known.items())
        raise WrongInput("set", f"leaves nothing of this study; its {choices}")
    return left


def _texts(step: Federations, part: str) -> tuple[str, ...]:
    """Return all values of a part in a step."""
    values = getattr(step, part)
    return (values,) if isinstance(values, str) else values


def _key(text: str) -> str:
    return text.partition("=")[0]


def _among(texts: Sequence[str], wanted: str) -> tuple[str, ...]:
    names = [name.strip() for name in wanted.split(",")]
    return tuple(text for text in texts if text in names or name_of(text) in names)


def _run(
    run: Run,
    ready: Sequence[Ready],
    device: torch.device,
    seeds: Sequence[int],
    also: Callable[..., None] | None,
) -> None:
    done = set()  # steps may share a federation, which is run once
    for seed in seeds:
        for config, data, _ in ready:
            for base in config.base_pruning:
                for defense in config.defense:
                    alone = config.model_copy(update={"base_pruning": [base], "defense": [defense], "seeds": [seed]})
                    if (key := str(dump(alone))) not in done:
                        done.add(key)
                        FederateExperiment(config, run, data, device).measure([seed], base, defense)
                        if also is not None:
                            also(run, config, data, device, seed, base)


def _facts(size: PripruneScale, rows: Sequence[Row], ready: Sequence[Ready]) -> dict[str, Any]:
    """Return the settings that the numbers hold for: stand-ins for data and networks, and the reduced sizes."""

    def unique(values: Iterable[Any]) -> list[Any]:
        return list(dict.fromkeys(values))

    configs = [federations.config for federations in ready]
    facts: dict[str, Any] = {
        "data": unique(federations.data.name for federations in ready),
        "model": unique(c.model for c in configs),
    }
    facts |= {} if size.examples is None else {"examples": size.examples}
    clients = unique(str(row.extra["clients"]) for row in rows if "clients" in row.extra)
    facts |= {"clients": f"{size.per_round} of {' or '.join(clients)} a round"}
    facts |= {
        "batch": unique(c.batch_size for c in configs),
        "loss": configs[0].loss,
        "averaging": configs[0].averaging,
    }
    facts |= {"rounds": unique(c.rounds for c in configs), "attacked every": unique(c.attack_every for c in configs)}
    facts |= {"victims": unique(c.attack_clients for c in configs)}
    return facts | {"iterations": size.iterations, "attack rate": size.attack_rate}
