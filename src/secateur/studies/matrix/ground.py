"""The common ground of the matrix: its data, its federations, its attackers, and the rows of its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur import tree
from secateur.attacks.inversion.adaptive import settings_of_mode
from secateur.catalogue import name_of
from secateur.config import Audit, Federate, Invert, choice, read
from secateur.config import defense as read_defense
from secateur.data.dataset import Dataset
from secateur.defenses.priprune import PRESETS
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import SMOOTH, list_modes
from secateur.metrics.membership import Estimate
from secateur.models.create import create
from secateur.report.heatmap import CELL, REFUSED
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies import read_data
from secateur.studies.dgp.steps import DgpSetting, Step
from secateur.studies.priprune.federations import WEIGHTS
from secateur.studies.study import Scale

MEASURED = ("inversion", "training", "compression", "active")
RULE = "labels=idlg"  # labels are told, so the rule that reads them costs nothing


@dataclass(frozen=True)
class MatrixStep:
    """A row of the matrix on one network: a defense, and where it is put in place."""

    network: str
    group: str  # the point at which the defense acts
    row: str = ""  # the row's name; empty: the defense's
    defense: str = "none"
    base_pruning: str = "none"
    submodels: str = ""  # the rule of a federation over sub-models
    pruner: str = ""  # the compressor of the undefended federation's final model
    outside: bool = False  # inverted in a first round outside a federation, although one would take the defense
    measures: tuple[str, ...] = MEASURED

    @property
    def title(self) -> str:
        """The row's name."""
        return self.row or self.submodels or self.defense


def draw_ground(data: Dataset, members: int, seed: int) -> Dataset:
    """Return the data of one seed: so many members as train part, and as many non-members as test part."""
    if len(data.inputs) < 2 * members:
        raise WrongInput("members", f"{members} and as many non-members are more than {data.name} has; use fewer")
    rows = torch.randperm(len(data.inputs), generator=derive(seed, "matrix"))[: 2 * members]
    return replace(data, inputs=data.inputs[rows], labels=data.labels[rows], train_size=members, writers=None)


@dataclass(frozen=True, eq=False)
class MatrixSetting:
    """A row of the matrix for one seed, with the run that its cells go to."""

    run: Run
    scale: Scale
    options: Mapping[str, Any]  # the user's device, data_folder and images, if set
    device: torch.device
    seed: int
    step: MatrixStep
    data: Dataset
    models: dict[str, Path]  # files of final models that this process has, by name

    @property
    def common(self) -> dict[str, Any]:
        """The fields that the run files of all cells share."""
        fields = {name: self.options.get(name) for name in ("device", "data_folder")}
        fields |= {"data": self.data.name, "model": self.step.network, "seeds": [self.seed]}
        return fields | {"threads": self.scale.threads}

    @property
    def defense(self) -> str:
        """The defense; a bare priprune has the paper's lambdas, with `sharing` for this number of weights."""
        if name_of(self.step.defense) != "priprune" or ":" in self.step.defense:
            return self.step.defense
        net = create(self.step.network, self.data.input_shape, self.data.classes, derive(0, "check"))
        accuracy, privacy, sharing = PRESETS["cifar10", "prunefl"]
        sharing *= max(1, round(WEIGHTS["cifar10"] / tree.count(tree.params_of(net))))
        return f"priprune:accuracy={accuracy:g}:privacy={privacy:g}:sharing={sharing:g}"

    @property
    def undefended(self) -> MatrixSetting:
        """The undefended federation on the same ground."""
        return replace(self, step=MatrixStep(self.step.network, "no defense", "none"))

    @property
    def is_defended(self) -> bool:
        """True if the federation itself has a defense, or prunes."""
        step = self.step
        return not step.pruner and (step.defense, step.base_pruning, step.submodels) != ("none", "none", "")

    def federate(self, **more: Any) -> Federate:
        """Return the run file of a federation on the ground."""
        scale, step = self.scale, self.step
        fields: dict[str, Any] = {"clients": scale.clients, "partition": "iid", "batch_size": scale.batch_size}
        fields |= {"defense": self.defense, "images": self.options.get("images")}
        if step.submodels:
            epochs = self.count_epochs(scale.rounds)
            fields |= {"submodels": step.submodels, "rounds": epochs, "evaluate_every": epochs}
        else:
            fields |= {"base_pruning": step.base_pruning, "local_steps": 1, "learning_rate": scale.learning_rate}
            fields |= {"per_round": scale.clients}
        return read(Federate, None, self.common | fields | more)

    def collaborate(self) -> DgpSetting:
        """Return collaborative SGD on the ground, for a defense that no federation takes."""
        fields = {"users": self.scale.clients, "epochs": self.count_epochs(self.scale.rounds), "augment": False}
        fields |= {"learning_rate": self.scale.learning_rate, "untrained": self.scale.untrained}
        fields |= {"targets": 1, "threads": self.scale.threads, "generator_steps": 1, "generator_width": 1}
        step = Step("training", (self.defense,), self.step.network)
        return DgpSetting(
            self.run, Scale(**fields), self.options, self.seed, step, self.data, self.step.network, self.defense
        )

    def count_epochs(self, rounds: int) -> int:
        """Return the passes over the members that so many rounds make."""
        taken: int = rounds * self.scale.clients * self.scale.batch_size
        return max(1, round(taken / self.data.train_size))

    def invert(self, attacks: Sequence[str]) -> Invert:
        """Return the run file of inversions outside a federation, of as many updates as there are clients."""
        fields = {"targets": self.scale.clients, "batch_size": self.scale.batch_size, "labels": "oracle"}
        fields |= {"batchnorm": "batch", "defense": [self.defense], "attack": list(attacks)}
        return read(Invert, None, self.common | fields | {"images": self.options.get("images")})

    def audit(self, weights: Path) -> Audit:
        """Return the run file of an audit of a final model; reference models are trained as the federation is."""
        scale, step = self.scale, self.step
        sgd = {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0, "patience": None}
        sgd |= {"batch_size": scale.clients * scale.batch_size, "learning_rate": scale.learning_rate}
        adam = {"optimiser": "adam", "batch_size": 128, "learning_rate": 1e-3, "weight_decay": 5e-4, "patience": 5}
        fields: dict[str, Any] = {"weights": weights, "train": sgd | {"epochs": self.count_epochs(scale.rounds)}}
        fields |= {"finetune": adam | {"epochs": scale.finetune_epochs}, "attack": ["rmia", "lira"], "shadows": 0}
        fields |= {"in_out": scale.in_out, "adaptive": True, "deterministic": False}
        fields |= {"pruner": step.pruner or "none", "sparsity": scale.sparsity}
        fields |= {"defense": self.defense} if step.pruner else {}
        return read(Audit, None, self.common | fields)

    def list_attacks(self, attack: str, adapts: Sequence[str] | None = None) -> list[str]:
        """Return the plain attack, then one for each mode that the defense is known to be weak against.

        `adapts` are the modes that the attack has; None: all.
        """
        modes = list_modes(self.step.defense, "", [attack]) + (
            ["reapply"] if self.step.submodels else []
        )  # their step of Adam
        modes = [mode for mode in modes if adapts is None or mode in adapts]
        return list(map(_spell, [attack, *(f"{attack}:{settings_of_mode(mode)}" for mode in modes)]))

    @property
    def matching(self) -> str:
        """The plain inversion."""
        scale = self.scale
        settings = f"iterations={scale.iterations}:learning_rate=0.1:tv={scale.total_variation:g}"
        return f"sgi:{settings}:{RULE}"

    def list_inversions(self) -> list[str]:
        """Return all passive inversions: those of the scale, plain and by who knows of the defense.

        `ig-smooth` unrolls the step of Adam of a sub-model's client by itself.
        """
        texts = {"sgi": self.matching, SMOOTH: f"{SMOOTH}:iterations={self.scale.iterations}:{RULE}"}
        attacks: list[str] = []
        for name in self.scale.inversions:
            alone = self.step.submodels and name == SMOOTH
            attacks += [_spell(texts[name])] if alone else self.list_attacks(texts[name])
        return attacks

    def add(self, column: str, measured: Estimate, attack: str | None = None, **extra: Any) -> None:
        """Add the measurement of a cell for this seed."""
        low, high = (end if abs(end) != float("inf") else None for end in (measured.low, measured.high))
        labels = self._labels(column, attack) | {"note": measured.note, "timing": column == "seconds"}
        labels["extra"] |= extra
        self.run.add([Row(**labels, metric=CELL, value=measured.value, low=low, high=high)])

    def refuse(self, columns: Sequence[str], reason: str, by: str = "the matrix") -> None:
        """Add the reason why cells have no measurement."""
        for column in columns:
            labels = self._labels(column, None)
            labels["extra"] |= {"by": by}
            self.run.add([Row(**labels, metric=REFUSED, value=None, note=reason)])

    def refuse_by_tool(self, columns: Sequence[str], error: WrongInput) -> None:
        """Add the tool's own sentence, in which files are named from the run's folder on."""
        self.refuse(columns, str(error).replace(f"{self.run.folder}/", ""), by="secateur")

    def refuse_senseless(self, columns: Sequence[str]) -> list[str]:
        """Refuse the columns that have no meaning for this row; return the others."""
        known = read_data("matrix", "refusals")
        reasons = known.get(self.step.row, {}) | known.get(self.step.group, {})
        for column in columns:
            if column in reasons:
                self.refuse([column], reasons[column])
        return [column for column in columns if column not in reasons]

    def _labels(self, column: str, attack: str | None) -> dict[str, Any]:
        step = self.step
        extra = {"study": "matrix", "row": step.row, "acts_on": step.group, "column": column}
        extra |= {"base_pruning": step.base_pruning}
        named = str(read_defense(self.defense))  # as figures name it
        labels = {"model": step.network, "dataset": self.data.name, "defense": named, "seed": self.seed}
        return labels | {"attack": attack, "extra": extra}


def _spell(attack: str) -> str:
    """Return an attack as rows name it; one that the tool refuses as it is written."""
    with suppress(WrongInput):
        return str(choice("inversion", attack))
    return attack
