"""The measurements of an audit: `AuditEvaluation` measures all victims and attackers of one seed.

`MembershipExposure` (exposure.py) measures one victim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.catalogue import Choice
from secateur.config import Audit, PrivacyClaim, Prune, dump
from secateur.data.partition import in_out_pool
from secateur.defenses.dp_common import Guarantee
from secateur.evaluation.attack_strength import name_missing_members
from secateur.evaluation.limits import UNTESTED, claim_rows
from secateur.evaluation.membership import ModelRecords, cache_answers
from secateur.evaluation.validity import Accuracy, Validity, member_accuracy, outputs, resemblance, validity_rows
from secateur.experiments.black_box import ROWS, sparsity_of, sparsity_rows
from secateur.experiments.context import population_of, shortage
from secateur.experiments.exposure import MembershipExposure, fit_attack, measure_canaries, name_attacker
from secateur.experiments.pipeline import (
    VICTIM,
    ModelFactory,
    ModelJob,
    build_predictor,
    guarantees,
    make,
    mask_of,
    model_rows,
    module_of,
    state_of,
)
from secateur.experiments.prune import save, save_program
from secateur.experiments.threat_models import Compression, Matchup, grid, guess
from secateur.inference import bind_state
from secateur.interfaces import Batch, BlackBox, Candidates, Converter, InOut, MembershipAttack, Predict, Shadow
from secateur.metrics.epsilon import LEVEL
from secateur.metrics.estimates import paired_drop
from secateur.metrics.membership import auc_change
from secateur.models.outputs import recognise_outputs
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive

NO_SHADOWS = "needs shadow models; give a `train:` recipe, so that the attacker's models can be trained"


def make_together(evaluations: Sequence[AuditEvaluation], matchups: Sequence[Matchup]) -> None:
    """Make all seeds' models of one match-up at once; the run's folder keeps them for later use."""
    jobs: dict[Compression, list[ModelJob]] = {}
    for evaluation, matchup in zip(evaluations, matchups, strict=True):
        others = [role for role in evaluation.factory.parts if role != VICTIM]
        for compression, roles in ((matchup.victim, [VICTIM]), (matchup.attacker, others)):
            if compression is not None:
                jobs.setdefault(compression, []).extend(evaluation.factory.jobs(compression, roles))
    for compression, compression_jobs in jobs.items():
        make(compression_jobs, compression)


class AuditEvaluation:
    """The victims and attackers of one seed. An attack is fitted once to each attacker's models."""

    def __init__(self, config: Audit, factory: ModelFactory, scaling: Validity | None = None) -> None:
        self.config, self.factory, self.context = config, factory, factory.context
        self.scaling = scaling  # of the inputs, as a row of each model
        self._fitted, self._selected = cache(self._fit), cache(self._select)
        self._exposure = lru_cache(maxsize=1)(self._expose)  # of the last victim, with its answers
        self._shadows = lru_cache(maxsize=1)(self._build_shadows)  # of the last attacker
        self._measured: set[Compression] = set()
        self._records: dict[Compression, ModelRecords] = {}

    @property
    def records(self) -> list[ModelRecords]:
        """The scores of all candidates, of each victim."""
        return list(self._records.values())

    def release(self) -> None:
        """Release the data that attacks saw: the data of several seeds would fill the memory."""
        self._shadows.cache_clear()
        self._exposure.cache_clear()
        vars(self).pop("candidates", None)

    @cached_property
    def candidates(self) -> Candidates:
        """The members, then the non-members: the order of an in-out pool."""
        part = self.factory.parts[VICTIM]
        both = self.context.rows(torch.cat([part.train, part.test]))
        return Candidates(both, ids=torch.arange(both.size) if self.config.in_out else None)

    def measure_model(self, victim: Compression) -> None:
        """Measure utility, cost, gaps and guarantees of one victim, once."""
        if victim in self._measured:
            return
        self._measured.add(victim)
        model, context, exposure = self._model(victim), self.factory.context_for(victim), self._exposure(victim)
        labels = self._labels(victim.labels)
        sides = {"train_accuracy": exposure.members, "test_accuracy": exposure.nonmembers}
        context.run.add(model_rows(context, victim, labels, model, sides))
        exposure.check_validity(labels, context.data.classes, context.data.key)
        context.run.add(validity_rows(labels, [self.scaling] if self.scaling else []))
        if context.data.population:
            context.run.add([Row(**labels, metric="population", value=float(context.data.population))])
        if self.config.weights is not None and victim.pruner is None:
            accuracy = self._accuracy(VICTIM, victim, model).train
            context.run.add(validity_rows(labels, [member_accuracy(accuracy, context.data.classes)]))
            exposure.check_order(labels)
            context.run.add(sparsity_rows(labels, module_of(context, victim, model), self._structure))
        if victim.pruner is not None:
            self._measure_drop(victim, labels)
        else:
            answers = bind_state(context.net, state_of(model), context.device)(exposure.members.inputs[:ROWS])
            context.run.add(validity_rows(labels, outputs(recognise_outputs(answers))))
        for proved in self._guarantees(victim):
            note = str(proved) if proved.whole else f"{proved}; {UNTESTED}"
            context.run.add([Row(**labels, metric="epsilon", value=proved.epsilon, note=note)])
        if (claim := self._claim(victim)) is not None:
            context.run.add(claim_rows(labels, claim))
        exposure.measure_gaps(labels, context.data.classes, model.key)

    def export_models(self, folder: Path) -> None:
        """Write every audited model as a file that `secateur.load_pruned` reads; a quantised one as a .pt2 program."""
        for victim in self._measured:
            context, model = self.factory.context_for(victim), self._model(victim)
            fields = {name: value for name, value in dump(self.config).items() if name in Prune.model_fields}
            fields |= {"sparsity": victim.sparsity, "defense": str(victim.defense), "seed": context.seed}
            pruner = victim.pruner or victim.term  # slimming trains its originals too
            fields["pruner"] = "l1-unstructured" if pruner is None else str(pruner)
            net = module_of(context, victim, model).cpu()
            name = re.sub(r"[^\w.]+", "-", f"{victim.title} seed {context.seed}").strip("-")
            if victim.pruner is not None and victim.pruner.find_part(Converter) is not None:
                save_program(folder / f"{name}.pt2", net, context.data.input_shape)
                continue
            mask = {} if victim.pruner is None else mask_of(model)
            save(folder / f"{name}.safetensors", net, mask, Prune.model_validate(fields), context.data)

    def measure_shadows(self, matchup: Matchup) -> None:
        """Check that the attacker's models resemble the victim, by their accuracy on their own rows and on others."""
        roles = self.factory.shadows() or self.factory.shadows("in-out")
        if not roles or matchup.attacker is None or self.config.protocol != "known":
            return  # elsewhere the attacker guesses the compression, and may guess wrong
        attacker, context = matchup.attacker, self.context
        models = self.factory.models(attacker, roles) | {VICTIM: self._model(matchup.victim)}

        def compute() -> Result:
            accuracies = {
                role: self._accuracy(role, attacker, model) for role, model in models.items() if role != VICTIM
            }
            victim = self._accuracy(VICTIM, matchup.victim, models[VICTIM])
            rows = [len(self.factory.parts[role].train) for role in accuracies]
            return Result(data={"check": list(resemblance(victim, list(accuracies.values()), rows))})

        keys = {role: model.key for role, model in models.items()}
        done = context.run.stage("shadows", {"models": keys, "seed": context.seed}, compute).data
        context.run.add(validity_rows(self._labels(matchup.labels), [Validity(*done["check"])]))

    def _accuracy(self, role: str, compression: Compression, model: Result) -> Accuracy:
        part, answer = self.factory.parts[role], self._build_predictor(compression, model)
        shares = []
        for rows in (part.train, part.test):
            batch = self.context.rows(rows)
            shares.append(float((answer(batch.inputs).argmax(1) == batch.labels).double().mean()))
        return Accuracy(*shares)

    def _measure_drop(self, victim: Compression, labels: dict[str, Any]) -> None:
        """Measure the loss of accuracy against the original, paired over the same rows."""
        context, models = self.context, [self._model(victim), self._model(victim.original)]

        def compute() -> Result:
            nonmembers, hits = self._exposure(victim).nonmembers, []
            for compression, model in zip((victim, victim.original), models, strict=True):
                answer = self._build_predictor(compression, model)
                hits.append(answer(nonmembers.inputs).argmax(1) == nonmembers.labels)
            return Result(data=paired_drop(hits[1], hits[0])._asdict())

        depends = {"model": models[0].key, "original": models[1].key, "seed": context.seed}
        done = context.run.stage("accuracy_drop", depends, compute).data
        context.run.add([Row(**labels, metric="accuracy_drop", **done)])

    def measure_canaries(self) -> None:
        """Audit each private training from scratch in one run, by canaries."""
        private = [defense for defense in self.config.defense if defense.find_part("training") is not None]
        for compression in dict.fromkeys(Compression(defense=defense) for defense in private):
            (job,) = self.factory.jobs(compression, [VICTIM])
            self.context.run.add(measure_canaries(job, self.config.canaries))

    def measure_attack(self, matchup: Matchup, attack: Choice) -> None:
        """Measure how well one attack tells the victim's members from non-members."""
        labels = self._labels(matchup.labels) | {"attack": str(attack)}
        if shortage(attack, len(self.factory.shadows()), len(self.factory.shadows("in-out"))) is not None:
            self.context.run.add([Row(**labels, metric="auc", value=None, note=NO_SHADOWS)])
            return
        attacker = matchup.attacker or self._selected(attack)
        if matchup.attacker is None:
            recipe = {"attacker_pruner": attacker.labels["pruner"], "attacker_sparsity": attacker.sparsity}
            labels["extra"] = labels["extra"] | recipe
        keys = {role: model.key for role, model in self._attackers_models(attacker, attack).items()}
        fit, key = partial(self._fitted, attacker, attack), self._model(matchup.victim).key
        exposure = self._exposure(matchup.victim)
        exposure.measure_attack(labels, fit, self._name_unmet(matchup), victim=key, models=keys)
        if matchup.victim.pruner is not None and attacker == guess(self.config, matchup.victim):
            self._measure_change(matchup.victim.original, exposure, labels, victim=key, models=keys)

    def _name_unmet(self, matchup: Matchup) -> str:
        """Return the strongest attacker known on a victim, if this run does not have it."""
        shadows, in_out = (len(self.factory.shadows(kind)) for kind in ("shadow", "in-out"))
        able = [str(attack) for attack in self.config.attack if shortage(attack, shadows, in_out) is None]
        knows = matchup.victim in (matchup.attacker, guess(self.config, matchup.victim))
        return name_missing_members(str(matchup.victim.defense), able, adaptive=knows, in_out=in_out)

    def _measure_change(
        self, original: Compression, exposure: MembershipExposure, labels: dict[str, Any], **depends: Any
    ) -> None:
        """Measure how pruning changed an attack's AUC, paired over the same rows."""
        attack, run = name_attacker(labels), self.context.run
        before = next(
            (r.scores[attack] for r in self.records if r.model == self._title(original) and attack in r.scores), None
        )
        if before is None:
            return

        def compute() -> Result:
            return Result(data=auc_change(before, exposure.record.scores[attack], exposure.is_member)._asdict())

        done = run.stage("auc_change", depends | {"attack": attack, "original": self._model(original).key}, compute)
        run.add([Row(**labels, metric="auc_change", **done.data)])

    def _select(self, attack: Choice) -> Compression:
        """Return the recipe by which the attack does best on a held-out shadow that is pruned by every recipe."""
        *fit_roles, held_out = self.factory.shadows()
        recipes = list(dict.fromkeys(guess(self.config, model) for model in grid(self.config)))
        scores = [self._score_recipe(recipe, recipes, attack, fit_roles, held_out) for recipe in recipes]
        return recipes[int(torch.tensor(scores).argmax())]

    def _score_recipe(
        self, recipe: Compression, others: Sequence[Compression], attack: Choice, roles: Sequence[str], held_out: str
    ) -> float:
        """Return the mean balanced accuracy on the held-out shadow, over all recipes that may have pruned it."""
        fitted = fit_attack(attack, self._build_shadows(recipe, tuple(roles)), self.context.seed)
        scores = []
        for other in others:
            (target,) = self._build_shadows(other, (held_out,))
            sides = (target.members, target.nonmembers)
            inside, outside = (fitted.score(target.box, Candidates(side)).members for side in sides)
            assert inside is not None and outside is not None  # this protocol has shadows to learn thresholds from
            scores.append((inside.double().mean() + (~outside).double().mean()) / 2)
        return float(torch.stack(scores).mean())

    def _fit(self, attacker: Compression, attack: Choice) -> MembershipAttack:
        models = self._attackers_models(attacker, attack)
        known: list[Shadow] | InOut
        if any(role.startswith("in-out") for role in models):
            boxes = [self._black_box(attacker, model) for model in models.values()]
            known = self._build_in_out(boxes, list(models))
        else:
            known = self._shadows(attacker, tuple(models))
        return fit_attack(attack, known, self.context.seed)

    def _build_in_out(self, boxes: list[BlackBox], roles: Sequence[str]) -> InOut:
        """Return the in-out models over the candidates, and over rows of the attacker's population if it has some."""
        parts, batch, data = self.factory.parts, self.candidates.batch, self.context.data
        pool = in_out_pool(parts[VICTIM], population_of(data), derive(self.context.seed, "population"))
        joined = torch.arange(batch.size, len(pool))
        if len(joined):
            batch = self.context.rows(pool)
        inside = torch.stack([torch.isin(pool, parts[role].train) for role in roles])
        return InOut(boxes, batch, inside, joined if len(joined) else None)

    def _attackers_models(self, attacker: Compression, attack: Choice) -> dict[str, Result]:
        """Return in-out models for the attacks that can use them if there are some, else disjoint shadows."""
        needs = attack.method.info["shadows"]
        online = self.config.in_out and (needs == "in-out or disjoint" or not self.factory.shadows())
        roles = [] if needs == "none" else self.factory.shadows("in-out" if online else "shadow")
        return self.factory.models(attacker, roles)

    def _build_shadows(self, compression: Compression, roles: tuple[str, ...]) -> list[Shadow]:
        shadows = []
        for role, model in self.factory.models(compression, roles).items():
            part, rows = self.factory.parts[role], self.context.rows
            shadows.append(Shadow(self._black_box(compression, model), rows(part.train), rows(part.test)))
        return shadows

    def _model(self, victim: Compression) -> Result:
        return self.factory.models(victim, [VICTIM])[VICTIM]

    def _guarantees(self, victim: Compression) -> list[Guarantee]:
        (job,) = self.factory.jobs(victim, [VICTIM])  # its rows, also where only some of them are asked about
        return guarantees(job.context, victim, job.part.train.numel())

    def _claim(self, victim: Compression) -> PrivacyClaim | None:
        """Return the claim that attacks on a victim may refute: of its defense, or of the maker of given weights."""
        if self.config.claim is not None and victim.pruner is None:
            return self.config.claim
        whole = next((proved for proved in self._guarantees(victim) if proved.whole), None)
        proves = whole is not None and math.isfinite(whole.epsilon)
        return PrivacyClaim(epsilon=whole.epsilon, delta=whole.delta) if whole is not None and proves else None

    def _expose(self, victim: Compression) -> MembershipExposure:
        """Return the exposure of a victim; its members and non-members are views, as second copies would be large."""
        both, size = self.candidates.batch, self.factory.parts[VICTIM].train.numel()
        members, nonmembers = Batch(*(part[:size] for part in both)), Batch(*(part[size:] for part in both))
        run, seed = self.context.run, self.context.seed
        box, part = partial(self._black_box, victim, self._model(victim)), self.factory.parts[VICTIM]
        title, ids = self._title(victim), torch.cat([part.train, part.test])
        claim, level = self._claim(victim), LEVEL / len(self.config.attack)
        delta = 0.0 if claim is None else claim.delta
        sides, groups = (members, nonmembers, self.candidates), self.context.data.groups_of(ids)
        exposure = MembershipExposure(run, seed, *sides, box, title, ids, level, groups, delta)
        exposure.record = self._records.setdefault(victim, exposure.record)  # several attackers ask about one victim
        return exposure

    def _black_box(self, compression: Compression, model: Result) -> BlackBox:
        return cache_answers(self._build_predictor(compression, model))

    def _build_predictor(self, compression: Compression, model: Result) -> Predict:
        return build_predictor(self.factory.context_for(compression), compression, model)

    def _labels(self, labels: dict[str, Any]) -> dict[str, Any]:
        whole = {"model": self.config.model, "dataset": self.context.data.name, "seed": self.context.seed} | labels
        trained_elsewhere = self.config.weights is not None and labels["pruner"] == "none"
        return whole | {"defense": "none", "sparsity": self._given_sparsity} if trained_elsewhere else whole

    @cached_property
    def _structure(self) -> nn.Module:
        """The network as its function makes it: weights that were given may have fewer channels."""
        return self.context.build(derive(0, "check"))

    @cached_property
    def _given_sparsity(self) -> float:
        """The share of weights that are gone from the weights that were given."""
        original = Compression()
        return sparsity_of(module_of(self.context, original, self._model(original)), self._structure)

    def _title(self, victim: Compression) -> str:
        """Return a victim's name in the table of records."""
        sparse = self.config.weights is not None and victim.pruner is None and self._given_sparsity
        return f"pruned as given, {100 * sparse:.0f} % sparse" if sparse else victim.title
