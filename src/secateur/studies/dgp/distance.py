"""Fig. 1 of dgp: distance of an update from the gradient, quality of IG's reconstruction, Proposition 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import sub

import torch

from secateur.attacks.inversion.updates import gradient_update
from secateur.evaluation.reconstruction import share_by_target
from secateur.experiments.invert import ClientExposure, chance_of
from secateur.interfaces import Batch
from secateur.metrics.estimates import combine, correlation, mean, mean_of
from secateur.metrics.membership import Estimate, share_of
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp.attack_step import Attacked
from secateur.studies.dgp.results import DgpResults, base
from secateur.studies.dgp.scale import CIFAR10, DgpSetting
from secateur.studies.table import Cells, TableLine
from secateur.theory.gradient_distance import cosine_distance, epsilon, relative_distance, theorem_1_cosine
from secateur.theory.reconstruction_bound import reconstruction_bound

QUALITY = {"psnr": -1, "mse": 1, "lpips": 1, "cw_ssim": -1}  # expected sign of the correlation with the distance
DELTA = 0.2  # of Definition 1: the paper gives no value, and 20 trials cannot bound a delta below .17
RARE = 0.05  # of the reconstructions: a bound violated at most this often counts as holding
TITLES = {"error": "error", "bound": "at least by Eq. 2", "bound_by_sent": "at least by what was sent"}
FORMS = {"violated": "Eq. 2", "violated_by_sent": "with what was sent in the place of the reconstruction's gradient"}
Values = dict[str, float]


@dataclass(frozen=True)
class Distanced:
    """A step that runs IG on updates near to and far from the gradient, with Proposition 1 at each reconstruction."""

    defenses: tuple[str, ...]
    model: str = "resnet18"
    data: str = CIFAR10

    def __call__(self, setting: DgpSetting) -> None:
        """Attack, then compare the sent update and the reconstruction with the truth."""
        attacked = Attacked("ig", self.defenses, self.model, self.data, adaptive=())
        attacked(setting)
        model = setting.model(self)
        if model is None:
            return
        for defense in self.defenses:
            exposure = attacked.exposure(setting, model, defense)
            for group in exposure.groups():
                depends = exposure.depends(exposure.config.attacks[0], group)
                by_target = setting.run.stage("distance", depends, partial(_compare, exposure, group)).data["targets"]
                for number, values in zip(group, by_target, strict=True):
                    labels = setting.labels(model, exposure.context.data, defense, "theory", number=number)
                    setting.run.add(Row(**labels, metric=name, value=value) for name, value in values.items())


def _compare(exposure: ClientExposure, group: range) -> Result:
    """Return, per target, the distance of the sent update and Proposition 1 at IG's reconstruction."""
    attack, client, by_target = exposure.config.attacks[0], exposure.client, []
    for number, reconstruction in zip(group, exposure.reconstruct_group(attack, client, group)[0], strict=True):
        truth, rng = exposure.targets[number], chance_of(exposure.seed, attack)[0]
        assert isinstance(truth, Batch)
        both = (replace(client, guard=None), client)
        views = [variant.seen(attack.make(), [truth], rng, number)[1][0][0] for variant in both]
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


def fig1(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 1: quality by relative distance, and how often Proposition 1 is violated."""
    targets = _targets(results)
    lines = []
    for defense in dict.fromkeys(key[0] for key in targets):
        measures = [values for key, values in targets.items() if key[0] == defense]
        cell = next(cell for cell in results.places if cell.defense == defense)
        cells: Cells = {"relative distance": _mean(measures, "relative_distance")}
        cells |= {name: mean(results.of(cell, name)) for name in QUALITY}
        cells |= {title: _mean(measures, name) for name, title in TITLES.items()}
        cells |= {f"{title} broken": _broken(measures, name) for name, title in FORMS.items()}
        cells |= {"epsilon": _epsilon(measures, "reached"), "Theorem 1 prints": _theorem_1(measures)}
        lines.append(TableLine({"defense": defense}, cells))
    every = _by_target(targets)
    return lines, [
        judge("a greater distance goes with a worse reconstruction (correlation)", _follow(every), "every", unit=""),
        *(_holds(every, name, title) for name, title in FORMS.items()),
        judge(
            f"DGP weakens IG in the sense of Definition 1: a larger epsilon than without it, delta {DELTA:g}",
            {line.labels["defense"]: _larger(line, lines) for line in lines if base(line.labels["defense"]) == "dgp"},
            "every",
            unit="",
        ),
    ]


def _targets(results: DgpResults) -> dict[tuple[str, int, int], Values]:
    """Return all measures of every target, by defense, seed and number."""
    targets: dict[tuple[str, int, int], Values] = {}
    for row in results.rows:
        if row.value is None:
            continue
        if row.extra.get("study") == "theory":
            targets.setdefault((row.defense or "none", row.seed, row.extra["number"]), {})[row.metric] = row.value
        elif row.extra.get("target") is not None and row.metric in QUALITY:
            key = (row.defense or "none", row.seed, row.extra["target"])
            targets.setdefault(key, {})[row.metric] = row.value
    return {key: values for key, values in targets.items() if "relative_distance" in values}


def _by_target(targets: Mapping[tuple[str, int, int], Values]) -> list[list[Values]]:
    """Group the measures by target: results of several defenses on one picture are not independent."""
    groups: dict[tuple[int, int], list[Values]] = {}
    for (_, seed, number), values in targets.items():
        groups.setdefault((seed, number), []).append(values)
    return list(groups.values())


def _follow(targets: Sequence[Sequence[Values]]) -> dict[str, Estimate | None]:
    """Return each measure's correlation with the distance, with signs such that positive is expected.

    The correlation is taken over one target's defenses, then averaged over targets. So every target counts once,
    however many defenses it was attacked under.
    """
    cases: dict[str, Estimate | None] = {}
    for name, sign in QUALITY.items():
        known = ([x for x in target if math.isfinite(x.get(name, math.nan))] for target in targets)
        rs = (correlation([(x["relative_distance"], sign * x[name]) for x in target]) for target in known if target)
        values = [r.value for r in rs if r is not None]
        cases[name] = mean_of(values) if values else None
    return cases


def _holds(targets: Sequence[Sequence[Values]], name: str, title: str) -> Finding:
    """Judge that a form of the bound is rarely violated, over all defenses; the interval is over targets."""
    groups = [known for target in targets if (known := [bool(x[name]) for x in target if name in x])]
    hits = torch.tensor([hit for target in groups for hit in target])
    broken = share_by_target(hits, [len(target) for target in groups]) if groups else None
    room = None if broken is None else Estimate(RARE - broken.value, RARE - broken.high, RARE - broken.low)
    claim = f"Proposition 1 holds, {title}: broken at most {100 * RARE:g} % of the time"
    return judge(claim, {"rarer than that by": room}, "every")


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


def _broken(targets: Sequence[Values], name: str) -> Estimate | None:
    known = [values[name] for values in targets if name in values]
    return share_of(sum(known) / len(known), len(known)) if known else None


def _mean(targets: Sequence[Values], name: str) -> Estimate | None:
    known = [values[name] for values in targets if name in values]
    return mean_of(known) if known else None
