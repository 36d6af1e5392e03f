"""The figures and tables of "Membership Inference Attacks and Defenses in Neural Network Pruning" (samia_ppb).

Each study is an audit and a table; studies that differ only in data set or network share their table. Data sets and
networks in the summaries are the paper's. `--data` and `--model` select the paper's other panels. `--set` changes
fields of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from secateur.catalogue import methods
from secateur.errors import WrongInput
from secateur.studies.results import AuditResults
from secateur.studies.samia.attacks import (
    compare_attacks,
    gaps,
    risk_by_accuracy,
    risk_by_sparsity,
    vary_pruning,
    vary_sparsity,
)
from secateur.studies.samia.behaviour import by_class, by_class_defended, histograms, histograms_defended, utility
from secateur.studies.samia.defenses import face_adaptive, face_plain
from secateur.studies.study import Request, StudyPlan, read_scales, register, scale_of
from secateur.studies.table import Tabulated

FOUR = ("l1-unstructured", "l1-structured", "l2-structured", "slimming")  # pruners
ONE = ("l1-unstructured",)  # pruner of the paper's MLP
NETWORKS = ("nn", "top3-nn", "nn-cls", "samia")  # attacks that are trained
MAIN = ("conf", "mentr", "top1-conf", "nn-cls", "blindmi", "samia")
DEFENSES = ("basic", "ppb", "adv", "dp-sgd")
PPB = ("basic", "ppb:strength=4")
DENSE = "densenet121"


@dataclass(frozen=True)
class AuditScale:
    """The size of a study; the defaults are the paper's setting."""

    data: str = "cifar10"
    network: str | None = None  # for images; None: the study's
    shadows: int = 5
    seeds: int = 1
    sparsity: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    ppb: tuple[float, ...] = (1, 2, 4, 8, 16)  # lambda
    adv: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)  # alpha
    dp: tuple[float, ...] = (0.01, 0.1, 1, 10, 100)  # sigma
    experiments: int = 20  # of an attacker that knows neither pruner nor sparsity
    epochs: tuple[int, int] | None = None  # of training and fine-tuning; None: the paper's
    schedule: str = ":early_stopping=false"  # of the attacks that are trained
    pruners: tuple[str, ...] = FOUR  # at most these
    examples: int | None = None  # at most so many of the data set's rows
    threads: int = 1
    images: dict[str, Any] = field(default_factory=dict)  # fields that differ if the data are images

    def defenses(self, name: str) -> list[str]:
        """Return a defense with each of its arguments."""
        arguments = {"ppb": ("strength", self.ppb), "adv": ("alpha", self.adv), "dp-sgd": ("noise_multiplier", self.dp)}
        if name not in arguments:
            return [name]
        argument, values = arguments[name]
        return [f"{name}:{argument}={value:g}" for value in values]


SCALES = read_scales(AuditScale, "samia")


@dataclass(frozen=True)
class AuditStudy:
    """A figure or table of the paper: the settings of an audit, and the function from its rows to the table."""

    tabulate: Callable[[AuditResults], Tabulated]
    model: str = "resnet18-pool"  # the paper's, of its scale
    pruner: tuple[str, ...] = FOUR
    sparsity: float | None = None  # None: all of the scale's
    attack: tuple[str, ...] = ("conf", "samia")
    defense: tuple[str, ...] = ("basic",)  # a bare ppb, adv or dp-sgd stands for all of the scale's arguments
    adaptive: bool = False
    protocol: str = "known"
    shadows: int | None = None  # None: the scale's

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of the study's audit."""
        from secateur.config import Audit, read
        from secateur.experiments.audit import run_audit
        from secateur.runs.folder import load_figures

        for text in request.overrides:
            if text.partition("=")[0] in ("protocol", "adaptive"):
                raise WrongInput("set", f"{text!r} would make this another study; {request.study} has its own protocol")
        options = {name: value for name, value in request.options.items() if value is not None}
        changes = {name: value for name, value in options.items() if name != "images"}  # an audit has no pictures
        config = read(Audit, None, self.settings(request.scale, options) | changes, list(request.overrides))
        facts: dict[str, Any] = {"data": config.data, "model": config.model, "shadows": config.shadows}
        facts |= {} if config.examples is None else {"examples": config.examples}
        facts |= {"seeds": config.seeds, "attacks": [str(attack) for attack in config.attack]}
        return StudyPlan(
            run=lambda: run_audit(config, request.out),
            tabulate=lambda rows: self.tabulate(AuditResults(rows, load_figures(request.out))),
            facts=lambda rows: facts,
        )

    def settings(self, scale: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the audit at a scale, on the user's data and model or else the scale's."""
        size = scale_of(SCALES, scale)
        data = options.get("data") or size.data
        table = _is_table(data)
        size = size if table else replace(size, **size.images)
        model = options.get("model") or ("mlp" if table else size.network or self.model)
        values: dict[str, Any] = {
            "data": data,
            "model": model,
            # The paper's MLP has one pruner: the others need convolutions and BatchNorm.
            "pruner": list(ONE if model == "mlp" else (name for name in self.pruner if name in size.pruners)),
            "sparsity": list(size.sparsity) if self.sparsity is None else [self.sparsity],
            "attack": [name + size.schedule if name in NETWORKS else name for name in self.attack],
            "defense": [text for name in self.defense for text in size.defenses(name)],
            "adaptive": self.adaptive,
            "protocol": self.protocol,
            "shadows": self.shadows or size.shadows,
        }
        values |= {name: getattr(size, name) for name in ("experiments", "seeds", "examples", "threads")}
        if size.epochs is not None:
            values |= {"train": {"epochs": size.epochs[0]}, "finetune": {"epochs": size.epochs[1]}}
        return values


def _is_table(data: str) -> bool:
    """Return True if a data set is known to have rows of numbers, not images."""
    known = methods("dataset")
    return data in known and len(known[data].info["input_shape"]) == 1


STUDIES = {
    "samia-fig1": AuditStudy(histograms, DENSE, ONE, 0.7, ("conf",), shadows=1),
    "samia-fig4": AuditStudy(by_class, DENSE, ONE, 0.7, ("conf",), shadows=1),
    "samia-fig6": AuditStudy(utility, attack=("conf",), shadows=1),
    "samia-fig7": AuditStudy(risk_by_accuracy),
    "samia-fig8": AuditStudy(risk_by_sparsity),
    "samia-fig9": AuditStudy(gaps),
    "samia-fig10": AuditStudy(compare_attacks, attack=MAIN),
    "samia-fig11": AuditStudy(compare_attacks, DENSE, ONE, attack=MAIN),
    "samia-fig12": AuditStudy(vary_sparsity, attack=("samia",), protocol="unknown-sparsity"),
    "samia-fig13": AuditStudy(vary_sparsity, DENSE, ONE, attack=("samia",), protocol="unknown-sparsity"),
    "samia-fig14": AuditStudy(histograms_defended, DENSE, ONE, 0.7, ("conf",), PPB, shadows=1),
    "samia-fig15": AuditStudy(by_class_defended, DENSE, ONE, 0.7, ("conf",), PPB, shadows=1),
    "samia-fig16": AuditStudy(face_plain, sparsity=0.6, defense=DEFENSES),
    "samia-fig17": AuditStudy(face_plain, DENSE, ONE, 0.6, defense=DEFENSES),
    "samia-fig18": AuditStudy(face_adaptive, sparsity=0.6, defense=DEFENSES, adaptive=True),
    "samia-fig19": AuditStudy(face_adaptive, DENSE, ONE, 0.6, defense=DEFENSES, adaptive=True),
    "samia-table1": AuditStudy(vary_pruning, attack=("samia",), protocol="unknown"),
}
register("samia_ppb", "samia", STUDIES)
