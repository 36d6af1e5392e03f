"""The figures and tables of "Membership Inference Attacks and Defenses in Neural Network Pruning" (samia_ppb).

Each study is an audit and a table; studies that differ only in data set or network share their table. Data sets and
networks in the summaries are the paper's. `--data` and `--model` select the paper's other panels. `--set` changes
fields of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from secateur.catalogue import method, methods
from secateur.errors import WrongInput
from secateur.studies.results import AuditResults
from secateur.studies.samia.attacks import compared, gaps, risk_by_accuracy, risk_by_sparsity, unknown, unknown_sparsity
from secateur.studies.samia.behaviour import by_class, by_class_defended, histograms, histograms_defended, utility
from secateur.studies.samia.defenses import adaptive, non_adaptive
from secateur.studies.study import Plan, Request, read_scales, scale_of
from secateur.studies.table import Tabulated

PAPER = "samia_ppb"
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
register = partial(method, "study", paper=PAPER, scales=tuple(SCALES))


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

    def plan(self, request: Request) -> Plan:
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
        return Plan(
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


@register("samia-fig1")
def fig1() -> AuditStudy:
    """Confidence and sensitivity of members and others before and after pruning (samia_ppb, Fig. 1)."""
    return AuditStudy(histograms, DENSE, ONE, 0.7, ("conf",), shadows=1)


@register("samia-fig4")
def fig4() -> AuditStudy:
    """Divergence of confidence and sensitivity by class before and after pruning (samia_ppb, Fig. 4)."""
    return AuditStudy(by_class, DENSE, ONE, 0.7, ("conf",), shadows=1)


@register("samia-fig6")
def fig6() -> AuditStudy:
    """Prediction accuracy by pruner and sparsity, beside the original's (samia_ppb, Fig. 6)."""
    return AuditStudy(utility, attack=("conf",), shadows=1)


@register("samia-fig7")
def fig7() -> AuditStudy:
    """Attack accuracy against prediction accuracy, pruned and original (samia_ppb, Fig. 7)."""
    return AuditStudy(risk_by_accuracy)


@register("samia-fig8")
def fig8() -> AuditStudy:
    """Attack accuracy against sparsity, pruned and original (samia_ppb, Fig. 8)."""
    return AuditStudy(risk_by_sparsity)


@register("samia-fig9")
def fig9() -> AuditStudy:
    """Confidence, sensitivity and generalisation gap against attack accuracy (samia_ppb, Fig. 9)."""
    return AuditStudy(gaps)


@register("samia-fig10")
def fig10() -> AuditStudy:
    """Attacks compared on four pruners, CIFAR10 and ResNet18 (samia_ppb, Fig. 10)."""
    return AuditStudy(compared, attack=MAIN)


@register("samia-fig11")
def fig11() -> AuditStudy:
    """Attacks compared on data sets, L1 unstructured, DenseNet121 or the MLP (samia_ppb, Fig. 11)."""
    return AuditStudy(compared, DENSE, ONE, attack=MAIN)


@register("samia-fig12")
def fig12() -> AuditStudy:
    """Attack accuracy when the sparsity is guessed, CIFAR10 and ResNet18 (samia_ppb, Fig. 12)."""
    return AuditStudy(unknown_sparsity, attack=("samia",), protocol="unknown-sparsity")


@register("samia-fig13")
def fig13() -> AuditStudy:
    """Attack accuracy when the sparsity is guessed, by data set, L1 unstructured (samia_ppb, Fig. 13)."""
    return AuditStudy(unknown_sparsity, DENSE, ONE, attack=("samia",), protocol="unknown-sparsity")


@register("samia-fig14")
def fig14() -> AuditStudy:
    """Confidence and sensitivity of members and others with PPB, beside Fig. 1 (samia_ppb, Fig. 14)."""
    return AuditStudy(histograms_defended, DENSE, ONE, 0.7, ("conf",), PPB, shadows=1)


@register("samia-fig15")
def fig15() -> AuditStudy:
    """Divergence of confidence and sensitivity by class with PPB, beside Fig. 4 (samia_ppb, Fig. 15)."""
    return AuditStudy(by_class_defended, DENSE, ONE, 0.7, ("conf",), PPB, shadows=1)


@register("samia-fig16")
def fig16() -> AuditStudy:
    """Defenses for four pruners, the attacker not knowing them, CIFAR10 and ResNet18 (samia_ppb, Fig. 16)."""
    return AuditStudy(non_adaptive, sparsity=0.6, defense=DEFENSES)


@register("samia-fig17")
def fig17() -> AuditStudy:
    """Defenses by data set, the attacker not knowing them, L1 unstructured (samia_ppb, Fig. 17)."""
    return AuditStudy(non_adaptive, DENSE, ONE, 0.6, defense=DEFENSES)


@register("samia-fig18")
def fig18() -> AuditStudy:
    """Defenses for four pruners against adaptive attacks, CIFAR10 and ResNet18 (samia_ppb, Fig. 18)."""
    return AuditStudy(adaptive, sparsity=0.6, defense=DEFENSES, adaptive=True)


@register("samia-fig19")
def fig19() -> AuditStudy:
    """Defenses by data set against adaptive attacks, L1 unstructured (samia_ppb, Fig. 19)."""
    return AuditStudy(adaptive, DENSE, ONE, 0.6, defense=DEFENSES, adaptive=True)


@register("samia-table1")
def table1() -> AuditStudy:
    """Attack accuracy lost when pruner and sparsity are unknown, in random experiments (samia_ppb, Table 1)."""
    return AuditStudy(unknown, attack=("samia",), protocol="unknown")
