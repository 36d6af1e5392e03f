"""Audit of models that can only be asked: as they were brought, or before and after a compression made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice
from secateur.config import Audit, dump
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import name_missing_members
from secateur.evaluation.limits import claim_rows
from secateur.evaluation.membership import cache_answers, write_records
from secateur.evaluation.setup import check_groups, choose_scaling
from secateur.evaluation.validity import Validity, member_accuracy, outputs, validity_rows
from secateur.experiments.context import check_possible, shortage
from secateur.experiments.exposure import RANKING, MembershipExposure, fit_attack
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.metrics.epsilon import LEVEL
from secateur.metrics.estimates import paired_drop
from secateur.metrics.membership import auc_change
from secateur.models.create import check_labels, create, explain_failure, is_trained, is_users_own, make_model
from secateur.models.formats import is_brought, is_script, key_of_model
from secateur.models.sparsity import layer_sparsity, overall_sparsity
from secateur.models.wrap import Wrapped, check_repeatable, wrap
from secateur.runs.artifacts import Result
from secateur.runs.folder import MemoryRun, Run, open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

ROWS = 256  # by whose answers a model is checked, and logits are told from probabilities
NO_SHADOWS = "needs shadow models; from Python secateur.audit(model, ..., shadows=[...]) takes some"


# The command -------------------------------------------------------------------------------------------------------
def can_only_be_asked(config: Audit) -> bool:
    """Return True if a run's model is a file, a folder, an address or trained, or is compared with the model before."""
    return is_brought(config.model) or config.before is not None or is_returned(config)


def is_returned(config: Audit) -> bool:
    """Return True if the user's function returns a trained model, and neither weights, a pruner nor a recipe is set."""
    stays = "pruner" in config.model_fields_set and not config.pruner and "train" not in config.model_fields_set
    if not stays or config.weights is not None or not is_users_own(config.model):
        return False
    data = load(config.data, config.data_folder, config.download, config.form)
    return is_trained(config.model, data.input_shape, data.classes)


def run_black_box(config: Audit, out: Path) -> list[Row]:
    """Audit a model that can only be asked, as it is, into the folder `out`."""
    from secateur.report.page import write_page

    config = check_black_box(config)
    data, seed = _read_data(config), config.seeds[0]
    with open_run(out, "audit", dump(config), seeds=[seed], data=data.key) as run:
        box = _open_box(config, config.model, data, out)
        data, scaling = _fit_data(config, data, box)
        before = None if config.before is None else _open_box(config, config.before, data, out)
        for field, one in (("model", box), ("before", before)):
            _check_box(field, one, data)
        rows = torch.arange(len(data.inputs))
        members, nonmembers = data.batch.take(rows[: data.train_size]), data.batch.take(rows[data.train_size :])
        able = [attack for attack in config.attack if shortage(attack, 0) is None]
        work = BoxAudit(run, seed, members, nonmembers, able, (), rows, data.key, data.groups)
        nets = [one.net if isinstance(one, Wrapped) else None for one in (box, before)]
        labels: dict[str, Any] = {"model": name_model(config), "dataset": data.name, "pruner": "given"}
        labels |= {"sparsity": sparsity_of(*nets), "defense": "given", "adaptive": False}
        labels |= {"seed": seed, "extra": {}}
        key = _key(config, config.model)
        key = key or f"{config.model} {fingerprint(box.predict(data.inputs))}"  # no file: known by its answers
        exposure = work.measure(box, labels, name_model(config), key)
        run.add([*sparsity_rows(labels, *nets), *validity_rows(labels, [scaling])])
        run.add([] if config.claim is None else claim_rows(labels, config.claim))
        missing = [attack for attack in config.attack if attack not in able]
        run.add(Row(**labels, attack=str(one), metric="auc", value=None, note=NO_SHADOWS) for one in missing)
        records = [exposure.record]
        if before is not None:
            key_before, unpruned = _key(config, str(config.before)), {"pruner": "none", "sparsity": 0.0}
            original = work.measure(before, labels | unpruned | {"defense": "none"}, "the original", key_before)
            work.compare(original, exposure, labels, models=[key_before, key])
            records.insert(0, original.record)
        run.write_parts("records.csv", write_records(records))
        finished = run.rows
    write_page([out])
    return finished


def plan_black_box(config: Audit) -> list[str]:
    """Describe the audit in lines; the model and the data are read for that."""
    config = check_black_box(config)
    names = ", ".join(map(str, config.attack))
    data, _, scaling = open_trained(config)
    if config.before is not None:
        _check_box("before", _open_box(config, config.before, data, None), data)
    others = len(data.inputs) - data.train_size
    asked = f"ask {name_model(config)} about {data.train_size} members and {others} non-members of {data.name}"
    compared = [] if config.before is None else [f"compare it with {config.before}, over the same rows"]
    return [asked, *compared, scaling.sentence, f"attack with {names}"]


def open_trained(config: Audit) -> tuple[Dataset, BlackBox, Validity]:
    """Return the data as a trained model takes them, the model, and a sentence on the scaling; try one batch."""
    data = _read_data(config)
    box = _open_box(config, config.model, data, None)
    data, scaling = _fit_data(config, data, box)
    _check_box("model", box, data)
    return data, box, scaling


def check_black_box(config: Audit) -> Audit:
    """Return the configuration with attacks that need no shadow models; refuse settings that need training."""
    recipes = [name for name in ("train", "finetune") if name in config.model_fields_set]
    for name in [*recipes, *config.list_changed("shadows", "in_out", "population", "defense")]:
        raise WrongInput(name, f"needs training, and this model can only be asked; leave {name} out")
    if "pruner" in config.model_fields_set and config.pruner:
        raise WrongInput("pruner", "needs training, and this model can only be asked; use none")
    if is_brought(config.model) and config.weights is not None:
        raise WrongInput("weights", f"{config.model} has its own; leave them out")
    if not is_brought(config.model) and config.weights is None and not is_returned(config):
        raise WrongInput("before", "needs the model after as a file: --weights, or --model net.onnx and the like")
    if config.protocol != "known":
        raise WrongInput("protocol", f"{config.protocol} needs shadow models; use known")
    config = config.with_default_attacks(*RANKING, "blindmi").model_copy(update={"pruner": []})
    check_possible(config.attack, NO_SHADOWS)
    return config


def name_model(config: Audit) -> str:
    """Return the model's name in rows: that of its file, without folders."""
    address = config.model.startswith("http")
    return config.model if address or not is_brought(config.model) else Path(config.model).name


def _read_data(config: Audit) -> Dataset:
    """Return the data; refuse data without members or without non-members."""
    torch.set_num_threads(config.threads)
    data = load(config.data, config.data_folder, config.download, config.form)
    check_groups(config, data)
    if config.examples is not None:
        data = data.limit_rows(config.examples, derive(0, "examples"))
    if len(data.inputs) - data.train_size < 2:
        problem = f"{data.name} has {len(data.inputs) - data.train_size} rows after its {data.train_size} members"
        raise WrongInput(
            "data",
            f"{problem}; an audit needs non-members too: set train_size to the number of members, which come first",
        )
    return data


def _open_box(config: Audit, source: str, data: Dataset, out: Path | None) -> BlackBox:
    """Return a model as a black box that caches its answers."""
    is_before = source != config.model
    weights = Path(source) if is_before else config.weights
    if source == config.model and config.weights is None and not is_brought(source):
        box = wrap(make_model(source, data.input_shape, data.classes, derive(0, "check")), classes=data.classes)
    elif _holds_weights(source) if is_before else not is_brought(source):
        net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
        box = wrap(net, weights=weights, classes=data.classes)
    else:
        box = wrap(source, classes=data.classes, cache=None if out is None else out / "answers")
    return replace(box, predict=cache_answers(box.predict).predict)


def _fit_data(config: Audit, data: Dataset, box: BlackBox) -> tuple[Dataset, Validity]:
    """Return the data as the model takes them, and a sentence on their scaling.

    Whole numbers become floats if the model refuses them. Members' accuracy decides a scaling that is not said.
    """
    if not data.inputs.is_floating_point() and not _answers(box, data.inputs[:ROWS]):
        data = replace(data, inputs=data.inputs.float())
    with explain_failure("model", data.inputs[:ROWS]):
        box.predict(data.inputs[:ROWS])
    if config.form.says_scaling or data.described:
        return data, Validity("scaling", True, f"the model gets {data.scaling}")
    return choose_scaling(data, box.predict)


def _answers(box: BlackBox, rows: Tensor) -> bool:
    """Return True if a model answers these rows."""
    try:
        box.predict(rows)
    except Exception:  # a user's model may raise anything
        return False
    return True


def _check_box(field: str, box: BlackBox | None, data: Dataset) -> None:
    """Refuse a model that does not fit the data, or answers differently when asked again."""
    if box is not None:
        rows = data.inputs[: min(ROWS, data.train_size)]
        with explain_failure(field, rows):
            answers = check_repeatable(field, box, rows)
        check_labels("data", data.labels, answers.shape[1])


def _holds_weights(source: str) -> bool:
    """Return True if a file holds the weights of the run's own structure."""
    path = Path(source)
    return path.suffix == ".safetensors" or (path.suffix in (".pt", ".pth") and path.is_file() and not is_script(path))


def _key(config: Audit, source: str) -> str:
    """Return the hash of a model's file, which keys its stages; weights count with the name of their structure.

    It is empty for a model that a function returns, which has no file.
    """
    if source == config.model and not is_brought(source):
        return "" if config.weights is None else f"{source} {key_of_model(str(config.weights))}"
    if source == config.model:
        return key_of_model(source)
    structure = f"{config.model} " if _holds_weights(source) else ""
    return structure + key_of_model(source)


# The measurements --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class BoxAudit:
    """The audit of one model or of two, on one set of members and non-members, into a run."""

    run: Run | MemoryRun
    seed: int
    members: Batch
    nonmembers: Batch
    attacks: Sequence[Choice]
    shadows: Sequence[Shadow] = ()
    ids: Tensor | None = None  # (N,) names of the candidates: the members, then the non-members
    data_key: str = ""
    groups: Sequence[str] | None = None  # (N,) the user's own column

    def measure(
        self, box: BlackBox, labels: dict[str, Any], title: str, key: str = "", trained: bool = True
    ) -> MembershipExposure:
        """Measure the model itself and every attack on it; return what the attacks found.

        Args:
            box: the model.
            labels: the labels of its rows.
            title: its name in tables of records.
            key: the hash of the model's file, which keys the stages.
            trained: True if the model is as the user trained it, so that it must know its members.
        """
        both = Batch(*(torch.cat(parts) for parts in zip(self.members, self.nonmembers, strict=True)))
        level = LEVEL / max(1, len(self.attacks))
        sides = (self.members, self.nonmembers, Candidates(both))
        exposure = MembershipExposure(self.run, self.seed, *sides, lambda: box, title, self.ids, level, self.groups)
        exposure.measure_accuracy(labels)
        if trained:
            exposure.check_order(labels)
        if not box.labels_only:
            answers = box.predict(self.members.inputs)
            classes, hits = answers.shape[1], answers.argmax(1) == self.members.labels
            exposure.check_validity(labels, classes, self.data_key)
            kinds = box.kinds if isinstance(box, Wrapped) else []
            self.run.add(validity_rows(labels, [check for kind in kinds for check in outputs(kind)]))
            if trained:
                accuracy = float(hits.double().mean())
                self.run.add(validity_rows(labels, [member_accuracy(accuracy, classes)]))
            exposure.measure_gaps(labels, classes, key)
        names = [str(attack) for attack in self.attacks]
        unmet = name_missing_members(labels["defense"], names, adaptive=True, flags=False)
        for attack in self.attacks:
            fit = partial(fit_attack, attack, self.shadows, self.seed)
            exposure.measure_attack(labels | {"attack": str(attack)}, fit, unmet, model=key, data=self.data_key)
        return exposure

    def compare(
        self, before: MembershipExposure, after: MembershipExposure, labels: dict[str, Any], **depends: Any
    ) -> None:
        """Measure how accuracy and every attack's AUC changed, paired over the same rows; `labels` are those after."""

        def lose() -> Result:
            hits = [
                side.box.predict(self.nonmembers.inputs).argmax(1) == self.nonmembers.labels for side in (before, after)
            ]
            return Result(data=paired_drop(*hits)._asdict())

        done = self.run.stage("accuracy_drop", depends | {"data": self.data_key, "seed": self.seed}, lose).data
        self.run.add([Row(**labels, metric="accuracy_drop", **done)])
        for attack in (name for name in after.record.scores if name in before.record.scores):
            scores = before.record.scores[attack], after.record.scores[attack]
            change = auc_change(*scores, after.is_member)
            self.run.add([Row(**labels, attack=attack, metric="auc_change", **change._asdict())])


def needs_no_shadows(attack: Choice) -> bool:
    """Return True if an attack's ranking is the same with and without shadow models."""
    return attack.method.info["shadows"] in ("none", "for a threshold")


def sparsity_of(net: nn.Module | None, before: nn.Module | None = None) -> float:
    """Return the share of weights that are gone from a network; 0 where there is no network."""
    return 0.0 if net is None else overall_sparsity(net, before)


def sparsity_rows(labels: dict[str, Any], net: nn.Module | None, before: nn.Module | None = None) -> list[Row]:
    """Return the share of weights that are gone from each layer, of a network that was pruned elsewhere."""
    if net is None or not overall_sparsity(net, before):
        return []
    shares = layer_sparsity(net, before).items()
    return [
        Row(**(labels | {"extra": labels["extra"] | {"layer": name}}), metric="layer_sparsity", value=share)
        for name, share in shares
    ]
