"""Measures of the matrix: runs of the existing experiments on the common ground, and the cells that they fill.

A measure fills the cells of one row for one seed. Its experiments are stages of the run, so a killed matrix resumes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from secateur.catalogue import find, name_of
from secateur.config import Federate, defense_of_updates
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import name_missing_clients
from secateur.experiments.audit import parts_of
from secateur.experiments.audit_evaluation import AuditEvaluation, make_together
from secateur.experiments.context import SeedContext, check_audit, fit_pruners
from secateur.experiments.federate import FederateExperiment, check_federate
from secateur.experiments.invert import ClientExposure, check_invert, refusal_of
from secateur.experiments.pipeline import VICTIM, ModelFactory
from secateur.experiments.threat_models import Matchup, list_matchups
from secateur.federated.build import shares_of
from secateur.federated.collaborative.training import CollaborativeResult
from secateur.interfaces import Params
from secateur.metrics.estimates import average, mean_of
from secateur.metrics.membership import Estimate, share_of
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.studies.dgp.extensions import write_tensors
from secateur.studies.dgp.steps import train as collaborate
from secateur.studies.matrix.ground import MatrixSetting
from secateur.studies.matrix.references import ImitatingFactory, ProtectedContext

log = logging.getLogger(__name__)
FINAL = ("final-rmia", "final-lira")
EQUAL = 60.0  # dB
SCORES = ("recognisable", "ssim", "psnr_grey")
COSTS = ("accuracy", "bytes", "seconds")
UNDEFENDED = "no reference model imitates the defense"
IMITATING = "reference models under the defense"
Measure = Callable[[MatrixSetting], None]


def cells(*columns: str) -> Callable[[Measure], Measure]:
    """Return a decorator for a measure of these columns: cells that cannot be measured get the reason."""

    def decorate(function: Measure) -> Measure:
        @wraps(function)
        def measure(setting: MatrixSetting) -> None:
            wanted = setting.refuse_senseless(columns)
            try:
                if wanted:
                    function(setting)
            except WrongInput as error:
                setting.refuse_by_tool(wanted, error)
            except RuntimeError as error:  # of one cell: the others are worth having
                log.exception("%s, seed %d: no cells of %s", setting.step.row, setting.seed, ", ".join(wanted))
                setting.refuse(wanted, f"failed: {str(error).partition(chr(10))[0]}", by="a fault")

        return measure

    return decorate


@cells("inversion", "strongest")
def measure_inversion(setting: MatrixSetting) -> None:
    """Invert all clients' updates of one round: plainly, and by all who know of the defense."""
    rows, unmet = attack_updates(setting, setting.list_inversions())
    plain = {name: text for name, text in unmet.items() if name != "unmet"}
    for attack, psnr, scores in _pool(rows):
        if attack == setting.list_attacks(setting.matching)[0]:
            setting.add("inversion", psnr, attack, **scores, **plain)
        setting.add("strongest", psnr, attack, **scores, **unmet)


@cells("active")
def measure_active(setting: MatrixSetting) -> None:
    """Let an active server tamper with the model of one round, plainly and with the modes that its attack has."""
    attack = f"rob:bins={setting.scale.bins}"
    rows, unmet = attack_updates(setting, setting.list_attacks(attack, find("inversion", "rob").info["adapts"]))
    for name, psnr, scores in _pool(rows):
        setting.add("active", psnr, name, **scores, **unmet)


def attack_updates(setting: MatrixSetting, attacks: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of attacks on updates, and the modes that could not be mounted with their reasons.

    A defense that no federation takes is attacked outside one, in a first round, and so is a step that says so.
    """
    number, start = setting.scale.attacked_round, len(setting.run.rows)
    fields: dict[str, Any] = {"rounds": number, "evaluate_every": number, "attack_at": [number]}
    fields |= {"attack_clients": "all", "labels": "oracle", "execution": "sequential"}  # too few rounds for a capture
    fields |= {"local_steps": 1} if setting.step.submodels else {}
    reasons: dict[str, str] = {}
    place = "as the rows that no federation takes" if setting.step.outside else ""
    try:
        check_federate(setting.federate(), setting.data, setting.device)
    except WrongInput as error:
        if setting.step.submodels or not _takes_updates(setting.defense):
            raise
        place = str(error)
    if place:
        _invert(setting, attacks, reasons)
        outside = {"outside": f"a first round outside a federation ({place})"}
        return setting.run.rows[start:], outside | _list_unmet(reasons)
    able = []
    for attack in attacks:
        try:
            check_federate(setting.federate(**fields, attack=[attack]), setting.data, setting.device)
            able.append(attack)
        except WrongInput as error:
            reasons[attack] = str(error)
    if attacks[0] in reasons:
        raise WrongInput(*reasons[attacks[0]].split(": ", 1))
    config = setting.federate(**fields, attack=able)
    _run_federation(setting, config)
    return setting.run.rows[start:], _list_unmet(reasons)


def _run_federation(setting: MatrixSetting, config: Federate, keeps_rows: bool = True) -> Params:
    """Run one federation, and return its final model."""
    experiment = FederateExperiment(config, setting.run, setting.data, setting.device)
    method, defense = config.submodels[0] if config.submodels else config.base_pruning[0], config.defense[0]
    if keeps_rows:
        return experiment.measure([setting.seed], method, defense)
    return experiment.train(setting.seed, method, defense)


def _takes_updates(defense: str) -> bool:
    """Return True if a defense acts on one update, outside a federation too."""
    try:
        defense_of_updates(defense)
    except WrongInput:
        return False
    return True


def _invert(setting: MatrixSetting, attacks: Sequence[str], reasons: dict[str, str]) -> None:
    """Attack first-round updates outside a federation; add the reasons of attacks that cannot be mounted."""
    config = setting.invert(attacks)
    check_invert(config, setting.data, setting.device)
    context = SeedContext(setting.run, config, setting.data, setting.device, setting.seed)
    exposure = ClientExposure(config, context, config.defense[0], f"pictures/{setting.step.network}")
    exposure.show_truths()
    for attack in config.attacks:
        error = refusal_of(attack, exposure.client, config, exposure.targets[0], setting.seed)
        if error is None:
            exposure.measure(attack)
        else:
            reasons[str(attack)] = str(error)


def _list_unmet(reasons: dict[str, str]) -> dict[str, str]:
    return {"unmet": "; ".join(f"{attack}: {reason}" for attack, reason in reasons.items())} if reasons else {}


def _pool(rows: Sequence[Row]) -> list[tuple[str, Estimate, dict[str, Any]]]:
    """Return each attack with its PSNR over all updates of the round, and its other scores.

    Clients of different widths have no row together; their mean has Student's interval over them. Of ATS the pictures
    that the client used are compared.
    """
    overall = [row for row in rows if row.extra.get("target", "") is None and row.extra.get("against") != "raw"]
    pooled = [row for row in overall if row.extra.get("client") is None] or overall
    results = []
    for attack in dict.fromkeys(row.attack for row in pooled if row.attack is not None):
        same = [row for row in pooled if row.attack == attack and row.value is not None]
        values = {name: [row for row in same if row.metric == name] for name in ("psnr", *SCORES)}
        if psnr := values.pop("psnr"):
            whole = _estimate(psnr[0]) if len(psnr) == 1 else _average(psnr)
            scores = {name: _average(known).value for name, known in values.items() if known}
            results.append((attack, _cap(whole), scores))
    return results


@cells(*FINAL, "updates", *COSTS)
def measure_training(setting: MatrixSetting) -> None:
    """Train the federation under the defense; attack its clients' last updates and its final model."""
    step = setting.step
    if step.pruner:
        return
    if slow := [name for name in map(name_of, step.defense.split("+")) if name in setting.scale.untrained]:
        raise WrongInput("defense", f"training under {slow[0]} takes too long for this scale; use --scale tiny")
    try:
        check_federate(setting.federate(), setting.data, setting.device)
    except WrongInput as error:
        if step.submodels or not _takes_updates(setting.defense):
            raise
        setting.refuse_by_tool(["updates"], error)
        measure_collaboration(setting, str(error))
        return
    weights, rows = train(setting)
    add_training(setting, rows)
    tested = [row for row in rows if row.metric == "test_accuracy" and row.extra["client"] is None]
    attack_trained(setting, weights, tested[-1].value, {})


def add_training(setting: MatrixSetting, rows: Sequence[Row]) -> None:
    """Fill the cells of membership on updates, bytes and seconds from the rows of a federation."""
    attacks = list(dict.fromkeys(row.attack for row in rows if row.metric == "auc"))
    federations = setting.scale.shadow_federations
    missing = name_missing_clients(filter(None, attacks), federations=federations) if setting.step.submodels else ""
    unmet = {"unmet": missing} if missing else {}
    for attack in attacks:
        same = [row for row in rows if (row.metric, row.attack) == ("auc", attack) and row.value is not None]
        asked = [row for row in same if row.extra["client"] is not None and row.extra.get("batches") in (None, "mixed")]
        if asked:
            shadows = {name: x for row in asked[:1] for name, x in row.extra.items() if name == "shadows"}
            setting.add(
                "updates", average(list(map(_estimate, asked))), attack, attacked=len(asked), **shadows, **unmet
            )
    sent = [row for row in rows if row.metric == "bytes_up" and row.extra["client"] is None][-1]
    turns = setting.scale.clients * sent.extra["round"]
    setting.add("bytes", _exact((sent.value or 0.0) / turns), unit="an update")
    seconds = next(row for row in rows if row.metric == "seconds" and "round" in row.extra)
    setting.add("seconds", _exact(seconds.value or 0.0), unit="the federation")


def measure_collaboration(setting: MatrixSetting, reason: str) -> None:
    """Train by collaborative SGD on the same shares, for a defense that no federation takes; attack the final model."""
    trained = _collaborate(setting)
    last, outside = trained.history[-1], {"outside": f"collaborative SGD outside a federation ({reason})"}
    setting.add("bytes", _exact(float(last["bytes_up"])), unit="an update", **outside)
    seconds = sum(float(epoch["seconds"]) for epoch in trained.history)
    setting.add("seconds", _exact(seconds), unit="the training", **outside)
    weights = _write_model(setting, trained.state)
    attack_trained(setting, weights, float(last["test_accuracy"]), outside)


def _collaborate(setting: MatrixSetting) -> CollaborativeResult:
    """Train by collaborative SGD on the shares of the undefended federation."""
    shares = shares_of(setting.undefended.federate(), setting.data, setting.seed)
    fields: dict[str, Any] = {"batch_size": setting.scale.batch_size, "momentum": 0.0, "weight_decay": 0.0}
    return collaborate(setting.collaborate(), "server", shares=shares, **fields)


def attack_trained(setting: MatrixSetting, weights: Path, accuracy: float | None, marks: dict[str, str]) -> None:
    """Attack a trained final model; one that an audit refuses has at least its accuracy."""
    try:
        measure_final(setting, weights, marks)
    except WrongInput as error:  # such as a model that lacks BatchNorm's statistics
        setting.refuse_by_tool(FINAL, error)
        if accuracy is not None:
            tested = share_of(accuracy, len(setting.data.inputs) - setting.data.train_size)
            setting.add("accuracy", tested)


@cells(*FINAL, *COSTS)
def measure_compression(setting: MatrixSetting) -> None:
    """Compress the undefended federation's final model under the defense, and attack it."""
    if setting.step.pruner:
        base = setting.undefended
        known = setting.models.get(_name(base))
        measure_final(setting, train(base)[0] if known is None else known, {})


def train_reference(setting: MatrixSetting) -> Params:
    """Train as the row's final model is trained, without attacks and rows; return the model."""
    rounds: dict[str, Any] = {"rounds": setting.scale.rounds, "evaluate_every": setting.scale.rounds}
    try:
        config = setting.federate(**({"attack": "none"} if setting.step.submodels else rounds))
        check_federate(config, setting.data, setting.device)
    except WrongInput:
        return _collaborate(setting).state
    return _run_federation(setting, config, keeps_rows=False)


def train(setting: MatrixSetting) -> tuple[Path, Sequence[Row]]:
    """Run the federation to its last round; return the file of its final model, and its rows."""
    scale, step, start = setting.scale, setting.step, len(setting.run.rows)
    if step.submodels:
        updates = min(scale.history, setting.count_epochs(scale.rounds))
        fields: dict[str, Any] = {"attack": list(scale.submodel_membership), "attack_history": updates}
        fields |= {"shadow_federations": scale.shadow_federations}
    else:
        fields = {"rounds": scale.rounds, "evaluate_every": scale.rounds, "membership": list(scale.membership)}
        fields |= {"attack_clients": "all", "attack_history": scale.history}
    config = setting.federate(**fields)
    check_federate(config, setting.data, setting.device)
    return _write_model(setting, _run_federation(setting, config)), setting.run.rows[start:]


def _write_model(setting: MatrixSetting, model: Params) -> Path:
    """Write a final model to a file that an audit reads."""
    path = write_tensors(setting.run.folder / "models" / f"{_name(setting)}.safetensors", model)
    setting.models[_name(setting)] = path
    return path


def _name(setting: MatrixSetting) -> str:
    """Return the name of a federation's model."""
    safe = "".join(letter if letter.isalnum() else "-" for letter in setting.step.row)
    return f"{setting.step.network}-{safe}-seed{setting.seed}"


def measure_final(setting: MatrixSetting, weights: Path, marks: dict[str, str]) -> None:
    """Attack a final model, after its compression if the row has one, and measure its accuracy.

    A defense of the federation is attacked twice: by reference models without it, and by those that imitate it.
    """
    config, start = setting.audit(weights), len(setting.run.rows)
    check_audit(config)
    config = fit_pruners(config, setting.data, chosen=True)
    context = ProtectedContext(setting.run, config, setting.data, setting.device, setting.seed, defense=setting.defense)
    parts = parts_of(config, setting.data, setting.seed)
    factory = ModelFactory(context, parts)
    matchup = list(list_matchups(config, setting.seed))[-1]
    begun = time.monotonic()
    model = factory.models(matchup.victim, [VICTIM])[VICTIM]
    took = time.monotonic() - begun
    evaluation = AuditEvaluation(config, factory)
    make_together([evaluation], [matchup])
    evaluation.measure_model(matchup.victim)
    rows = setting.run.rows[start:]
    setting.add("accuracy", _estimate(next(row for row in rows if row.metric == "test_accuracy")))
    if setting.step.pruner:
        size = next(row for name in ("compressed", "masked") for row in rows if row.metric == f"bytes_{name}")
        setting.add("bytes", _exact(size.value or 0.0), unit="the model")
        kept = setting.run.stage("seconds", {"model": model.key}, lambda: Result(data={"seconds": took}))
        setting.add("seconds", _exact(kept.data["seconds"]), unit="the fine-tuning")
    stronger = _attack_by_imitation(setting, evaluation, matchup, marks) if setting.is_defended else {}
    _attack_final(setting, evaluation, matchup, marks | stronger)


def _attack_by_imitation(
    setting: MatrixSetting, evaluation: AuditEvaluation, matchup: Matchup, marks: dict[str, str]
) -> dict[str, str]:
    """Attack with reference models under the row's defense; return the mark of the others if there are none."""
    if not setting.scale.imitates:
        return {"unmet": UNDEFENDED}
    factory = evaluation.factory
    imitating = ImitatingFactory(factory.context, factory.parts, setting, train_reference)
    try:
        informed = AuditEvaluation(evaluation.config, imitating)
        _attack_final(setting, informed, matchup, marks | {"references": IMITATING})
    except WrongInput as error:
        return {"unmet": f"{UNDEFENDED} ({error})"}
    return {}


def _attack_final(setting: MatrixSetting, evaluation: AuditEvaluation, matchup: Matchup, marks: dict[str, str]) -> None:
    """Attack a final model with one set of reference models."""
    for attack in evaluation.config.attack:
        start = len(setting.run.rows)
        evaluation.measure_attack(matchup, attack)
        rows = [row for row in setting.run.rows[start:] if row.attack == str(attack)]
        auc = next(row for row in rows if row.metric == "auc")
        rate = next((row.value for row in rows if row.metric == "tpr_at_fpr_0.01"), None)
        setting.add(f"final-{attack.name}", _estimate(auc), str(attack), tpr=rate, **marks)
    evaluation.release()


def _estimate(row: Row) -> Estimate:
    """Return the number of a row with its interval; an unknown end is infinite."""
    assert row.value is not None
    low, high = (-float("inf") if row.low is None else row.low, float("inf") if row.high is None else row.high)
    return Estimate(row.value, low, high, row.note)


def _average(rows: Sequence[Row]) -> Estimate:
    """Return the mean of rows of several clients."""
    return mean_of([row.value or 0.0 for row in rows])


def _cap(psnr: Estimate) -> Estimate:
    """Return a PSNR of at most EQUAL dB: no eye sees more, and an exact picture has infinitely many."""
    value, low, high, note = psnr
    return Estimate(min(value, EQUAL), min(low, EQUAL), min(high, EQUAL), note)


def _exact(value: float) -> Estimate:
    """Return a number that has no interval."""
    return Estimate(value, value, value)


MEASURES: dict[str, Measure] = {  # in the order in which they are run
    "inversion": measure_inversion,
    "training": measure_training,
    "compression": measure_compression,
    "active": measure_active,
}
