"""The theory of dgp beside measurements: Fig. 1 with Proposition 1, and Lemma 1 with Theorem 2 on a real run.

Fig. 1 has the distance of an update from the gradient and the quality of IG's reconstruction. Lemma 1 and Theorem 2
assume plain SGD at one learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import sub
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.updates import gradient_update
from secateur.config import defense_of_updates
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.uploads import SendAll
from secateur.evaluation.reconstruction import share_by_target
from secateur.experiments.invert import ClientExposure, chance_of
from secateur.federated.collaborative.plan import Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeTraining, depends_of
from secateur.functional import Functional
from secateur.interfaces import Batch, Params
from secateur.metrics.estimates import combine, correlation, mean, mean_of
from secateur.metrics.membership import Estimate, share_of
from secateur.models.create import create
from secateur.progress import progress
from secateur.report.summary import group_by
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.dgp.results import DgpResults, attack_key, base
from secateur.studies.dgp.steps import DgpSetting
from secateur.studies.table import Cases, Cells, Finding, TableLine, Tabulated
from secateur.theory import convergence as theorems
from secateur.theory.gradient_distance import (
    cosine_distance,
    epsilon,
    reconstruction_bound,
    relative_distance,
    theorem_1_cosine,
)

QUALITY = {"psnr": -1, "mse": 1, "lpips": 1, "cw_ssim": -1}  # expected sign of the correlation with the distance
DELTA = 0.2  # of Definition 1: the paper gives no value, and 20 trials cannot bound a delta below .17
RARE = 0.05  # of the reconstructions: a bound violated at most this often counts as holding
TITLES = {"error": "error", "bound": "at least by Eq. 2", "bound_by_sent": "at least by what was sent"}
FORMS = {"violated": "Eq. 2", "violated_by_sent": "with what was sent in the place of the reconstruction's gradient"}
Values = dict[str, float]
EPOCHS = 10  # if the scale sets none; the theorems assume one learning rate, so the paper's schedule does not apply
BOUNDS = {"lemma_1": "Lemma 1", "theorem_2": "Theorem 2"}
PARTS = ("measured", "bound", "tight", "trivial")
ENDLESS = 1e9  # cap on bound / trivial bound, for infinite bounds


def measure_distances(setting: DgpSetting) -> None:
    """Compare the sent update and IG's reconstruction with the truth, for every target."""
    exposure = replace(setting, step=replace(setting.step, name="ig", adaptive=())).exposure
    for group in exposure.groups():
        depends = exposure.depends(exposure.config.attacks[0], group)
        by_target = setting.run.stage("distance", depends, partial(_compare, exposure, group)).data["targets"]
        for number, values in zip(group, by_target, strict=True):
            labels = setting.labels("theory", number=number)
            setting.run.add(Row(**labels, metric=name, value=value) for name, value in values.items())


def _compare(exposure: ClientExposure, group: range) -> Result:
    """Return, per target, the distance of the sent update and Proposition 1 at IG's reconstruction."""
    attack, client, by_target = exposure.config.attacks[0], exposure.client, []
    for number, reconstruction in zip(group, exposure.reconstruct_group(attack, client, group)[0], strict=True):
        truth, rng = exposure.targets[number], chance_of(exposure.seed, attack)[0]
        assert isinstance(truth, Batch)
        both = (replace(client, guard=None), client)
        views = [variant.show_targets(attack.make(), [truth], rng, number)[1][0][0] for variant in both]
        gradient, sent = (view.update.values for view in views)
        values = {"relative_distance": relative_distance(gradient, sent)}
        if reconstruction is not None and reconstruction.batch.inputs.shape == truth.inputs.shape:
            draw, guess = derive(exposure.seed, "bound", number), reconstruction.batch.inputs.to(truth.inputs)
            bound = reconstruction_bound(client.net, client.state, truth, guess, draw, sent)
            values |= {"error": bound.error, "bound": bound.bound, "bound_by_sent": bound.bound_by_sent or 0.0}
            of_guess = gradient_update(
                client.net, client.state, Batch(guess, truth.labels), client.knowledge.batchnorm
            ).values
            values |= {"fitted": cosine_distance(sent, of_guess), "reached": cosine_distance(gradient, of_guess)}
            values |= {"violated": float(bound.violated), "violated_by_sent": float(bool(bound.violated_by_sent))}
        by_target.append(values)
    return Result(data={"targets": by_target})


def fig1(results: DgpResults) -> Tabulated:
    """Return Fig. 1: quality by relative distance, and how often Proposition 1 is violated."""
    targets = _targets(results)
    lines = []
    for defense in dict.fromkeys(key[0] for key in targets):
        measures = [values for key, values in targets.items() if key[0] == defense]
        cell = next(cell for cell in results.clients if cell.defense == defense)
        cells: Cells = {"relative distance": _mean(measures, "relative_distance")}
        cells |= {name: results.mean(cell, name) for name in QUALITY}
        cells |= {title: _mean(measures, name) for name, title in TITLES.items()}
        cells |= {f"{title} broken": _mean(measures, name, share=True) for name, title in FORMS.items()}
        cells |= {"epsilon": _epsilon(measures, "reached"), "Theorem 1 prints": _theorem_1(measures)}
        lines.append(TableLine({"defense": defense}, cells))
    every = _by_target(targets)
    pruned = [] if results.informed else [line for line in lines if base(line.labels["defense"]) == "dgp"]
    larger = {line.labels["defense"]: _larger(line, lines) for line in pruned}  # of the plain attacker alone
    return lines, [
        *results.judge("fig1", correlation=_correlations(every)),
        *(finding for name, form in FORMS.items() for finding in _judge_form(results, every, name, form)),
        *results.judge("epsilon", larger=larger),
    ]


def _targets(results: DgpResults) -> dict[tuple[str, int, int], Values]:
    """Return all measures of every target, by defense, seed and number; ig-smooth has none of these distances."""
    targets: dict[tuple[str, int, int], Values] = {}
    for row in results.rows:
        theory = row.extra.get("study") == "theory"
        number = row.extra.get("number" if theory else "target")
        seen = row.metric in QUALITY and not attack_key(row).smooth
        if row.value is not None and number is not None and (theory or seen):
            targets.setdefault((row.defense or "none", row.seed, number), {})[row.metric] = row.value
    return {key: values for key, values in targets.items() if "relative_distance" in values}


def _by_target(targets: Mapping[tuple[str, int, int], Values]) -> list[list[Values]]:
    """Group the measures by target: results of several defenses on one picture are not independent."""
    return [[targets[key] for key in keys] for keys in group_by(targets, lambda key: key[1:]).values()]


def _correlations(targets: Sequence[Sequence[Values]]) -> Cases:
    """Return each measure's correlation with the distance, with signs such that positive is expected.

    The correlation is taken over one target's defenses, then averaged over targets. So every target counts once,
    however many defenses it was attacked under.
    """
    cases: Cases = {}
    for name, sign in QUALITY.items():
        known = ([x for x in target if math.isfinite(x.get(name, math.nan))] for target in targets)
        rs = (correlation([(x["relative_distance"], sign * x[name]) for x in target]) for target in known if target)
        values = [r.value for r in rs if r is not None]
        cases[name] = mean_of(values) if values else None
    return cases


def _judge_form(results: DgpResults, targets: Sequence[Sequence[Values]], name: str, form: str) -> list[Finding]:
    """Judge that a form of the bound is rarely violated, over all defenses; the interval is over targets."""
    groups = [known for target in targets if (known := [bool(x[name]) for x in target if name in x])]
    hits = torch.tensor([hit for target in groups for hit in target])
    broken = share_by_target(hits, [len(target) for target in groups]) if groups else None
    room = None if broken is None else Estimate(RARE - broken.value, RARE - broken.high, RARE - broken.low)
    return results.judge("proposition_1", {"form": form}, holds={"rarer than that by": room})


def _epsilon(targets: Sequence[Values], name: str) -> Estimate | None:
    """Return epsilon of Definition 1: the cosine distance that the attack reaches, but for a share delta of trials."""
    known = [values[name] for values in targets if math.isfinite(values.get(name, math.nan))]
    return epsilon(torch.tensor(known), DELTA) if known else None


def _theorem_1(targets: Sequence[Values]) -> str:
    """Return the value that Theorem 1 prints for the fit to the sent update; "" if the upload does not only drop.

    The value is an upper bound at best.
    """
    fitted, gamma = _epsilon(targets, "fitted"), max((x["relative_distance"] ** 2 for x in targets), default=0.0)
    return f"{theorem_1_cosine(fitted.value, gamma).printed:.3f}" if fitted is not None and gamma <= 1 else ""


def _larger(line: TableLine, lines: Sequence[TableLine]) -> Estimate | None:
    """Return a defense's epsilon minus the epsilon without a defense."""
    bare = next((other.cells["epsilon"] for other in lines if other.labels["defense"] == "none"), None)
    ours = line.cells["epsilon"]
    return combine(sub, {0: ours}, {0: bare}) if isinstance(ours, Estimate) and isinstance(bare, Estimate) else None


def _mean(targets: Sequence[Values], name: str, share: bool = False) -> Estimate | None:
    """Return the mean of a measure over targets; of a share of targets with Wilson's interval."""
    known = [values[name] for values in targets if name in values]
    if not known:
        return None
    return share_of(sum(known) / len(known), len(known)) if share else mean_of(known)


def measure_bounds(setting: DgpSetting) -> None:
    """Train by plain SGD, and add the theorems' bounds beside the residual and the gradient that they bound.

    Defenses are none, or with error feedback. The gradient over the full train part is taken before every epoch. The
    network has no BatchNorm, whose statistics make the evaluated loss differ from the trained loss.
    """
    scale, data = setting.scale, setting.data
    net = create(setting.model, data.input_shape, data.classes, derive(setting.seed, "initialise", "shared"))
    schedule = Schedule(scale.epochs or EPOCHS, ((1, scale.learning_rate),))
    upload = upload_of(defense_of_updates(setting.defense)) or SendAll()
    plan = Plan(scale.users, upload, schedule, momentum=0.0, weight_decay=0.0)
    rng = derive(setting.seed, "collaborate", "bounds")
    training = CollaborativeTraining(net.to(setting.device), data, plan, rng, setting.device)
    measures = setting.run.stage("bounds", depends_of(training), partial(_train_and_bound, training)).data
    labels = setting.labels("bounds")
    setting.run.add(Row(**labels, metric=name, value=value) for name, value in measures.items())


def _train_and_bound(training: CollaborativeTraining) -> Result:
    """Train, and evaluate both theorems at the observed constants.

    The minimal loss l* is taken as 0, and the smoothness K is estimated from the models between epochs.
    """
    data = training.data
    examples = Batch(data.inputs[: data.train_size], data.labels[: data.train_size]).to(training.device)
    models, rows, steps = [training.model()], [], 0

    def count(number: int) -> None:
        nonlocal steps
        steps += number
        advance(number)

    with progress("plain SGD, for the theorems", None, rate=True) as advance:
        for epoch in training.epochs(count):
            rows.append(epoch.row)
            models.append(training.model())
    gradients = [theorems.full_gradient(training.net, model, examples) for model in models]
    met = theorems.constants(
        rows, theorems.estimate_smoothness(models, gradients), _loss(training, models[0], examples)
    )
    squares = [sum(float(value.double().square().sum()) for value in gradient.values()) for gradient in gradients[:-1]]
    rate = training.plan.schedule.rate(1)
    checked = {
        "lemma_1": theorems.check_lemma_1(rows, steps // len(rows))[-1],
        "theorem_2": theorems.check_theorem_2(squares, met, rate, steps),
    }
    values = {f"{name}_{part}": getattr(check, part) for name, check in checked.items() for part in PARTS}
    return Result({}, values | {"gamma_1_whole": met.gamma, "smoothness": met.smoothness, "steps": float(steps)})


def _loss(training: CollaborativeTraining, model: Params, batch: Batch) -> float:
    """Return the mean loss over the train part, in batches of 1024 examples."""
    forward, total = Functional(training.net, training=False, device=training.device), 0.0
    parts = zip(batch.inputs.split(1024), batch.labels.split(1024), strict=True)  # type: ignore[no-untyped-call]
    for inputs, labels in parts:
        logits: Tensor = forward({name: value.to(training.device) for name, value in model.items()}, inputs)
        total += float(cross_entropy(logits, labels, reduction="sum").detach())
    return total / batch.size


def convergence(results: DgpResults) -> Tabulated:
    """Return one line per theorem and training, and verdicts: the theorems hold, and their bounds are not vacuous."""
    lines: list[TableLine] = []
    holds: Cases = {}
    tighter: Cases = {}
    trainings = results.trainings("bounds")
    for training in trainings.keys:
        of = partial(trainings.of, training)
        for name, title in BOUNDS.items():
            means = (fmean(x.value for x in of(f"{name}_{part}").values()) for part in PARTS)
            check, case = theorems.Checked(*means), f"{title}, {training.defense}"
            if check.bound == 0:  # everything is sent, so there is no residual
                continue
            holds[case] = _sure(1 - check.measured / check.bound)
            tighter[case] = _sure(1 - min(check.bound / check.trivial, ENDLESS))
            cells: Cells = {"measured": f"{check.measured:.3g}", "says at most": f"{check.bound:.3g}"}
            cells |= {"as tight as its proof allows": f"{check.tight:.3g}", "without a theorem": f"{check.trivial:.3g}"}
            cells |= {"gamma 1, all tensors": mean(of("gamma_1_whole"))}
            cells |= {"K, at least": mean(of("smoothness"))}
            mark = "broken" if not check.holds else "says nothing" if check.vacuous else ""
            lines.append(TableLine({"theorem": title, "defense": training.defense}, cells, "", mark))
    return lines, results.judge("convergence", holds=holds, tighter=tighter)


def _sure(value: float) -> Estimate:
    """Return a number without sampling error: the bounds concern this one run."""
    return Estimate(value, value, value)
