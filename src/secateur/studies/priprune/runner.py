"""What a study of priprune is, and how it is run: its federations into one run's folder, then a table beside the paper.

Started again it goes on where it was. Federations that two studies share are run once where they share a folder.
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
from secateur.experiments.federate import check_federate, measure
from secateur.report import page_afterwards
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row
from secateur.studies.claims import Finding
from secateur.studies.priprune.results import Seen
from secateur.studies.priprune.scale import Scale, scale_of
from secateur.studies.priprune.settings import Federations, Ready, Setting
from secateur.studies.study import plain
from secateur.studies.table import Line, Table

Tabulate = Callable[[Seen], tuple[list[Line], list[Finding]]]
Steps = Callable[[Scale], Sequence[Federations]]
Also = Callable[[Scale, Run, Federate, Dataset, torch.device, int, Choice], None]
PARTS = ("bases", "defenses", "broadcast")  # of a study that `--set` can choose from
INTERVALS = {
    True: "Leakage is the mean over the attacked rounds, in brackets Student's 95 % interval over these; "
    "accuracies have Wilson's. Another seed may differ by more.",
    False: "Values are means over seeds, with Student's 95 % intervals over them.",
}


@dataclass(frozen=True)
class FederatedStudy:
    """What one figure or table needs: federations at a scale, and how their rows become the table."""

    tabulate: Tabulate
    steps: Steps
    also: Also | None = None  # what else is measured of every federation

    def conduct(
        self, entry: Method, scale: str, given: Mapping[str, Any], overrides: list[str] | None, out: Path
    ) -> Table:
        """Run all federations for every seed into `out`, and make the table."""
        given_parts = [text for text in overrides or [] if _key(text) in PARTS]
        size = scale_of(scale, [text for text in overrides or [] if text not in given_parts])
        only = {_key(text): text.partition("=")[2] for text in given_parts}
        asked = read(Federate, None, {name: given.get(name) for name in ("seeds", "device")})
        steps, device = chosen(self.steps(size), only), device_of(asked)
        setting = Setting(size, given, asked.seeds, tuple(step.data for step in steps))
        torch.set_num_threads(size.threads)
        ready = [each for step in steps for each in setting.configs(step)]
        if not ready:
            raise WrongInput("data", f"nothing of {entry.name} is run on this data set; give another")
        for each in ready:
            check_federate(each.config, each.data, device)
        told = {name: str(given[name]) for name in ("data", "model", "images") if given.get(name) is not None}
        kept = {"study": entry.name, "scale": scale} | asdict(size) | told | {"seeds": asked.seeds}
        kept |= {"only": only} if only else {}
        with page_afterwards(out), open_run(out, "study", plain(kept), device=str(device), seeds=asked.seeds) as run:
            _run(run, ready, device, asked.seeds, None if self.also is None else partial(self.also, size))
        tested = {each.data.name: len(each.data.inputs) - each.data.train_size for each in ready}
        stands = {(each.config.model, each.data.name): each.paper for each in ready}
        lines, findings = self.tabulate(Seen(run.rows, tested, stands))
        facts = {"study": entry.name, "scale": scale} | _facts(size, run.rows, ready) | {"seeds": asked.seeds}
        return Table(entry.summary, facts, lines, findings, INTERVALS[len(asked.seeds) == 1])


def chosen(steps: Sequence[Federations], asked: Mapping[str, str]) -> list[Federations]:
    """A part of a study, for a machine of its own: `bases=prunefl,snip` and `defenses=none,priprune` leave these.

    Each is a name, which stands for all its settings, or a text as the study has it (pseudo-largest:rate=0.3);
    `broadcast=dense` leaves the federations with one.
    """
    left = []
    for step in steps:
        own: dict[str, Any] = {part: _among(_texts(step, part), wanted) for part, wanted in asked.items()}
        if all(own.values()):
            own |= {"broadcast": step.broadcast} if "broadcast" in own else {}
            left.append(replace(step, **own))
    if not left:
        known = {part: dict.fromkeys(text for step in steps for text in _texts(step, part)) for part in PARTS}
        told = ", its ".join(f"{part} are {', '.join(texts)}" for part, texts in known.items())
        raise WrongInput("set", f"leaves nothing of this study; its {told}")
    return left


def _texts(step: Federations, part: str) -> tuple[str, ...]:
    """What there is of a part in a step."""
    found = getattr(step, part)
    return (found,) if isinstance(found, str) else found


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
    done = set()  # a federation that two steps share is run once
    for seed in seeds:
        for config, data, _ in ready:
            for base in config.base_pruning:
                for defense in config.defense:
                    alone = config.model_copy(update={"base_pruning": [base], "defense": [defense], "seeds": [seed]})
                    if (key := str(dump(alone))) not in done:
                        done.add(key)
                        measure(config, run, data, device, seed, base, defense)
                        if also is not None:
                            also(run, config, data, device, seed, base)


def _facts(size: Scale, rows: Sequence[Row], ready: Sequence[Ready]) -> dict[str, Any]:
    """What the numbers hold for: what stands for the paper's data and networks, and how much less was done."""

    def told(values: Iterable[Any]) -> list[Any]:
        return list(dict.fromkeys(values))

    configs = [each.config for each in ready]
    facts: dict[str, Any] = {"data": told(each.data.name for each in ready), "model": told(c.model for c in configs)}
    facts |= {} if size.examples is None else {"examples": size.examples}
    clients = told(str(row.extra["clients"]) for row in rows if "clients" in row.extra)
    facts |= {"clients": f"{size.per_round} of {' or '.join(clients)} a round"}
    facts |= {"batch": told(c.batch_size for c in configs), "loss": configs[0].loss, "averaging": configs[0].averaging}
    facts |= {"rounds": told(c.rounds for c in configs), "attacked every": told(c.attack_every for c in configs)}
    facts |= {"victims": told(c.attack_clients for c in configs)}
    return facts | {"iterations": size.iterations, "attack rate": size.attack_rate}
