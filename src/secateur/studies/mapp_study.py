"""What a study of mapp_fl is, and how it is run: its federations into one run's folder, then a table beside the paper.

Started again it goes on where it was. Every table ends with what the scoring batches and more updates do to Yeom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from secateur.bench import device_of
from secateur.catalogue import Method
from secateur.config import Federate, read
from secateur.config.choices import choice
from secateur.errors import WrongInput
from secateur.paging import page_afterwards
from secateur.runs import open_run
from secateur.studies.mapp_compared import Tabulated
from secateur.studies.mapp_found import Seen
from secateur.studies.mapp_run import Hall
from secateur.studies.mapp_setting import Case, Scale, loaded, scale_of, settled
from secateur.studies.mapp_sizes import asked
from secateur.studies.scales import plain
from secateur.studies.tables import Table

ONE = "Intervals (95 %) are over the examples asked about and who is known, of one repeat; another may differ by more."
MANY = "Values are means over repeats, with Student's 95 % intervals over them."


@dataclass(frozen=True)
class MappStudy:
    """What one figure or table needs: federations at a scale, and how their rows become the table."""

    cases: Callable[[Scale], Sequence[Case]]
    tabulate: Callable[[Seen, Scale], Tabulated]
    attacks: tuple[str, ...] = ("yeom",)

    def conduct(
        self, entry: Method, scale: str, given: Mapping[str, Any], overrides: list[str] | None, out: Path
    ) -> Table:
        """Run all federations for every seed into `out`, and make the table."""
        size = scale_of(scale, overrides)
        if given.get("model") is not None:
            raise WrongInput("model", "studies of mapp_fl have networks of their own widths; leave it out")
        cases = self.cases(size)
        repeats = size.draws if cases[0].fresh else size.repeats
        wanted = {"seeds": given.get("seeds") or repeats, "device": given.get("device")}
        settings = read(Federate, None, {name: value for name, value in wanted.items() if value is not None})
        device, data = device_of(settings), loaded(size, given)
        size = settled(size, data)
        torch.set_num_threads(size.threads)
        facts: dict[str, Any] = {"study": entry.name, "scale": scale, "data": data.name, "rounds": size.rounds}
        facts |= {} if size.examples is None else {"examples": size.examples}
        kept = plain(facts | asdict(size) | {"attacks": self.attacks, "seeds": settings.seeds})
        with page_afterwards(out), open_run(out, "study", kept, device=str(device), seeds=settings.seeds) as run:
            Hall(run, size, data, device, [choice("attack", name) for name in self.attacks]).hold(cases, settings.seeds)
        found = Seen(run.rows)
        lines, findings = self.tabulate(found, size)
        facts |= {"augmentation": "crop and flip" if size.augment else "none"}
        facts |= {"attacks": list(self.attacks), "seeds": settings.seeds}
        return Table(entry.summary, facts, [*lines, *asked(found)], findings, ONE if len(settings.seeds) == 1 else MANY)
