"""The figures and tables of "Membership Inference Attacks and Defenses in Neural Network Pruning" (samia_ppb).

Each study is an audit and a table; studies that differ only in data set or network share their table. Data sets and
networks in the summaries are the paper's. `--data` and `--model` select the paper's other panels. `--set` changes
fields of the audit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from secateur.catalogue import methods
from secateur.config import Audit, read
from secateur.errors import WrongInput
from secateur.report.summary import group_by
from secateur.runs.archive import Archive
from secateur.runs.rows import Row
from secateur.studies.results import AuditResults
from secateur.studies.study import Request, Scale, Study, StudyPlan, register, scale_of

FOUR = ("l1-unstructured", "l1-structured", "l2-structured", "slimming")  # pruners
NETWORKS = ("nn", "top3-nn", "nn-cls", "samia")  # attacks that are trained
ARGUMENTS = {"ppb": ("strength", "ppb"), "adv": ("alpha", "adv"), "dp-sgd": ("noise_multiplier", "dp")}


@dataclass(frozen=True)
class AuditStep:
    """The audit of a study, at any scale."""

    model: str = "resnet18-pool"  # the paper's, of its scale
    pruner: tuple[str, ...] = FOUR
    sparsity: float | None = None  # None: all of the scale's
    attack: tuple[str, ...] = ("conf", "samia")
    defense: tuple[str, ...] = ("basic",)  # a bare ppb, adv or dp-sgd stands for all of the scale's arguments
    adaptive: bool = False
    protocol: str = "known"
    shadows: int | None = None  # None: the scale's
    in_out: bool = False  # True: the scale's in-out models, for online LiRA and RMIA

    def settings(self, scale: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the audit at a scale, on the user's data and model or else the scale's."""
        size = scale_of("samia", scale)
        data = options.get("data") or size.data
        table = _is_table(data)
        size = size if table else size.change(**size.images)
        model = options.get("model") or ("mlp" if table else size.network or self.model)
        values: dict[str, Any] = {
            "data": data,
            "model": model,
            # The paper's MLP has one pruner: the others need convolutions and BatchNorm.
            "pruner": ["l1-unstructured"] if model == "mlp" else [name for name in self.pruner if name in size.pruners],
            "sparsity": list(size.sparsity) if self.sparsity is None else [self.sparsity],
            "attack": [name + size.schedule if name in NETWORKS else name for name in self.attack],
            "defense": [text for name in self.defense for text in _list_settings(name, size)],
            "adaptive": self.adaptive,
            "protocol": self.protocol,
            "shadows": self.shadows or size.shadows,
            "in_out": size.in_out if self.in_out else 0,
        }
        values |= {name: getattr(size, name) for name in ("experiments", "seeds", "examples", "threads")}
        if size.epochs is not None:
            values |= {"train": {"epochs": size.epochs[0]}, "finetune": {"epochs": size.epochs[1]}}
        return values


def _is_table(data: str) -> bool:
    """Return True if a data set is known to have rows of numbers, not images."""
    known = methods("dataset")
    return data in known and len(known[data].info["input_shape"]) == 1


def _list_settings(defense: str, scale: Scale) -> list[str]:
    """Return a defense with each of the scale's arguments."""
    if defense not in ARGUMENTS:
        return [defense]
    argument, field = ARGUMENTS[defense]
    return [f"{defense}:{argument}={value:g}" for value in getattr(scale, field)]


def plan(study: Study, request: Request) -> StudyPlan:
    """Return the plan of a study's audit."""
    from secateur.experiments.audit import run_audit
    from secateur.runs.folder import load_figures

    for text in request.overrides:
        if text.partition("=")[0] in ("protocol", "adaptive"):
            raise WrongInput("set", f"{text!r} would make this another study; {request.study} has its own protocol")
    options = {name: value for name, value in request.options.items() if value is not None}
    changes = {name: value for name, value in options.items() if name != "images"}  # an audit has no pictures
    config = read(
        Audit, None, study.read_steps(AuditStep)[0].settings(request.scale, options) | changes, list(request.overrides)
    )
    facts: dict[str, Any] = {"data": config.data, "model": config.model, "shadows": config.shadows}
    facts |= {} if config.examples is None else {"examples": config.examples}
    facts |= {"in_out": config.in_out} if config.in_out else {}
    facts |= {"seeds": config.seeds, "attacks": [str(attack) for attack in config.attack]}
    return StudyPlan(
        run=lambda: run_audit(config, request.out),
        tabulate=lambda rows: study.tabulate(AuditResults(rows, load_figures(request.out))),
        facts=lambda rows: facts,
    )


def gather(study: Study, archive: Archive) -> dict[str, AuditResults]:
    """Return the results of archived audits by network and data set, under all attackers of the study's knowledge."""
    step = study.read_steps(AuditStep)[0]

    def belongs(row: Row) -> bool:
        return row.attack is None or len(step.defense) == 1 or row.adaptive in (None, step.adaptive)

    victims = group_by(filter(belongs, archive.rows), lambda row: (row.model, row.dataset))
    return {
        f"{model} on {data}": AuditResults(
            rows,
            [figure for figure in archive.figures if (figure.get("model"), figure.get("dataset")) == (model, data)],
        )
        for (model, data), rows in victims.items()
    }


register("samia_ppb", "samia", plan, gather)
