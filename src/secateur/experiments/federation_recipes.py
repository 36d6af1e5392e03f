"""The search of `secateur recommend --federation`: which terms of a federation show least, at the least cost.

A recipe is a base pruning, or a rule of sub-models with the widths of its clients, and a defense of the clients. One
width is the advice of pilots, for each client. The rows are halved: on one half federations are chosen, on the other
half, with a fresh seed, the chosen one is attacked by all attackers. Accuracy and bytes are compared with the plain
federation, which prunes and withholds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from secateur.attacks.inversion.adaptive import settings_of_mode
from secateur.catalogue import Choice, Defense
from secateur.config import Federate, RecommendFederation, dump, inversion
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import list_modes
from secateur.evaluation.selection import AUC, BYTES, DROP, PSNR, Assessment
from secateur.experiments.federate import FederateExperiment, check_federate
from secateur.experiments.recipe_search import FIRST, NOTHING, SHADOWED, Confirmation, HalfRun, describe_amount
from secateur.experiments.update_recipes import HalvedBench, drop_rows, halve_rows, measure_pictures, name_defense
from secateur.federated.build import load_data, network_of, rates_of, shares_of
from secateur.interfaces import Params
from secateur.metrics.estimates import average, difference
from secateur.metrics.membership import Estimate, share_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row

RUNGS = ("a part of the rounds", "all rounds", "every attacker known")
SHORTER = 4  # the first rung's part of the rounds
CHEAP = "yeom"  # the attack of the first rungs
NONE = "none"


@dataclass(frozen=True)
class FederationRecipe:
    """The terms of a federation: its pruning or the sizes of its clients' models, and their defense."""

    method: Choice  # a base pruning, or a rule of sub-models
    defense: Defense
    rates: tuple[float, ...] = ()  # of every client's channels; empty: no sub-models
    widths: str = ""  # of the smaller clients, in words

    @property
    def title(self) -> str:
        """The recipe in words."""
        pruning = "no base pruning" if str(self.method) == NONE else f"base pruning {self.method}"
        terms = f"{self.method} with clients of {self.widths}" if self.rates else pruning
        return f"{terms}, {name_defense(self.defense)}"

    @property
    def is_plain(self) -> bool:
        """True if it prunes and withholds nothing."""
        return not self.rates and str(self.method) == NONE and str(self.defense) == NONE

    @property
    def settings(self) -> dict[str, str | float]:
        """The settings that a search varies."""
        return {"pruning or rule": str(self.method), "widths": self.widths or "1", "defense": str(self.defense)}

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of its rows."""
        return {"pruner": str(self.method), "defense": str(self.defense), "extra": {"title": self.title}}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its run file."""
        if self.rates:
            return {"submodels": [str(self.method)], "client_rates": list(self.rates), "defense": [str(self.defense)]}
        return {"base_pruning": [str(self.method)], "defense": [str(self.defense)]}


@dataclass(frozen=True)
class FederationSpace:
    """The terms to search: pruning or rule with widths, and defenses."""

    terms: Sequence[tuple[Choice, tuple[float, ...], str]]
    defenses: Sequence[Defense]
    allows: Callable[[FederationRecipe], bool]

    @property
    def sizes(self) -> dict[str, tuple[int, bool]]:
        """The settings: the terms, and the defense."""
        return {"terms": (len(self.terms), False), "defense": (len(self.defenses), False)}

    def build(self, choices: Mapping[str, int]) -> FederationRecipe | None:
        """Return the recipe of these positions; None if the defense does not act under these terms."""
        method, rates, widths = self.terms[choices["terms"]]
        recipe = FederationRecipe(method, self.defenses[choices["defense"]], rates, widths)
        return recipe if self.allows(recipe) else None

    def locate(self, recipe: FederationRecipe) -> dict[str, int] | None:
        """Return None: the search begins with no recipe."""
        return None


@dataclass(frozen=True)
class FederationBench(HalvedBench):
    """The bench of federations."""

    search: RecommendFederation
    rungs: Sequence[str] = RUNGS
    plain: dict[tuple[str, int], list[Row]] = field(default_factory=dict)  # of plain federations, by data and rounds

    @property
    def objectives(self) -> Sequence[str]:
        """The measures to minimise: the leak is that of membership, unless only inversions attack."""
        return (DROP, AUC if self.search.membership else PSNR, BYTES)

    def open_space(self) -> FederationSpace:
        """Return the terms to search; pilots advise widths for each rule."""
        search, terms = self.search, [(base, (), "") for base in dict.fromkeys(self.search.base_pruning)]
        listed: list[tuple[Choice, tuple[float, ...], str]] = list(terms)
        for rule in dict.fromkeys(search.submodels):
            for width in sorted(set(search.client_widths)):
                config = search.to_federate(submodels=[str(rule)], client_widths=[width], large_clients=self._large)
                listed.append((rule, tuple(build_rates(config, self.halves[0])), f"{width:g} of the channels"))
            if search.advise:
                listed.append((rule, self._advise(rule), "the channels that pilots advise"))
        return FederationSpace(listed, list(dict.fromkeys(search.defense)), self._is_allowed)

    def audit_seconds(self, fresh: int, finalists: int = 1) -> float:
        """Return about the seconds of all rounds under every attacker known."""
        return 2.0 * (finalists + fresh) * self.clock.mean("federate")

    def assess(self, number: int, recipe: FederationRecipe, rung: int) -> Assessment:
        """Run a federation on the half to choose on, as far as a rung goes, and attack it."""
        measures, _, _, _ = self._measure(recipe, rung, self.halves[0], self.search.seed)
        return Assessment(number, recipe.title, rung, measures)

    def confirm(self, recipe: FederationRecipe) -> Confirmation:
        """Run a federation of the other half with a fresh seed, and attack it in every way."""
        measures, run, config, model = self._measure(recipe, SHADOWED, self.halves[1], self.fresh_seed)
        whole = self.search.to_federate(**recipe.fields, **self._attack(recipe, SHADOWED))

        def build() -> nn.Module:
            net = network_of(config, self.halves[1], self.fresh_seed)
            net.load_state_dict(model, strict=False)
            return net.eval()

        rows = [*run.rows, *drop_rows(run.rows, "test_accuracy", measures[DROP], "against the plain federation")]
        return Confirmation(rows, run.figures, measures, "federate", whole, dump(whole), build)

    def _measure(
        self, recipe: FederationRecipe, rung: int, data: Dataset, seed: int
    ) -> tuple[dict[str, Estimate], HalfRun, Federate, Params]:
        """Return the measures of a federation, the view with its rows, its run file and its final model."""
        rounds = self.search.rounds if rung > FIRST else max(1, self.search.rounds // SHORTER)
        fields = {"seeds": [seed], "rounds": rounds, "evaluate_every": min(rounds, self.search.evaluate_every)}
        fields |= {"images": self.search.images and rung == SHADOWED}
        if (data.key, rounds) not in self.plain:
            config = self.search.to_federate(**fields, base_pruning=[NONE], defense=[NONE])
            self.plain[data.key, rounds] = self._run(config, HalfRun(self.run, self.clock), data)[0]
        before = self.plain[data.key, rounds]
        run = HalfRun(self.run, self.clock)
        config = self.search.to_federate(**fields, **recipe.fields, **self._attack(recipe, rung))
        after, model = self._run(config, run, data)
        tested = len(data.inputs) - data.train_size
        accuracies = [share_of(_find_last(rows, "test_accuracy"), tested) for rows in (before, after)]
        share = _find_last(after, "bytes_up") / _find_last(before, "bytes_up")
        drop = NOTHING if recipe.is_plain else difference(accuracies[0], accuracies[1])  # equal runs do not differ
        measures = {DROP: drop} | measure_attacks(after)
        return measures | {BYTES: Estimate(share, share, share)}, run, config, model

    def _run(self, config: Federate, run: HalfRun, data: Dataset) -> tuple[list[Row], Params]:
        """Run one federation; return its rows and its final model."""
        check_federate(config, data, self.device)
        method = config.submodels[0] if config.submodels else config.base_pruning[0]
        model = FederateExperiment(config, run, data, self.device).measure(config.seeds, method, config.defense[0])
        return run.rows, model

    def _attack(self, recipe: FederationRecipe, rung: int) -> dict[str, Any]:
        """Return the attackers of a rung: one cheap one at first; in the end all, in every mode."""
        search = self.search
        members = list(search.membership) if rung == SHADOWED else list(search.membership)[:1]
        if rung != SHADOWED and CHEAP in search.membership:
            members = [CHEAP]
        inversions = [str(attack) for attack in search.attack] if rung == SHADOWED or not members else []
        modes = list_modes(str(recipe.defense), str(recipe.method), inversions) + (["reapply"] if recipe.rates else [])
        if recipe.rates and search.local_steps != 1:
            inversions = []  # an epoch of a sub-model cannot be inverted
        adapted = [_adapt(attack, mode) for mode in modes for attack in inversions if rung == SHADOWED]
        inversions += [attack for attack in adapted if attack is not None and attack not in inversions]
        fields: dict[str, Any] = {"iterations": search.iterations} if search.iterations and inversions else {}
        if recipe.rates:
            return fields | {"attack": [*members, *inversions]}
        return fields | {"membership": members, "attack": inversions, "attack_clients": "all"}

    @property
    def _large(self) -> int:
        """The number of clients with the whole model."""
        return min(self.search.large_clients, self.search.clients or self.search.large_clients)

    def _is_allowed(self, recipe: FederationRecipe) -> bool:
        """Return True if a federation takes these terms; the plain one is what others are compared with."""
        try:
            config = self.search.to_federate(**recipe.fields, **self._attack(recipe, SHADOWED))
            check_federate(config, self.halves[0], self.device)
        except WrongInput:
            return False
        return True

    def _advise(self, rule: Choice) -> tuple[float, ...]:
        """Return the share of channels that pilots advise for every client; the smallest where they cannot decide."""
        widths, rounds = sorted(set(self.search.client_widths)), max(1, self.search.rounds // SHORTER)
        fields: dict[str, Any] = {"submodels": [str(rule)], "client_widths": widths, "advise": True}
        fields |= {"attack": [CHEAP], "pilot_rounds": rounds, "pilot_draws": 1, "large_clients": self._large}
        config, run = self.search.to_federate(**fields), HalfRun(self.run, self.clock)
        check_federate(config, self.halves[0], self.device)
        FederateExperiment(config, run, self.halves[0], self.device).measure(config.seeds, rule, config.defense[0])
        advised = {row.extra["client"]: row.value for row in run.rows if row.metric == "recommended_rate"}
        return tuple(float(advised[client] or widths[0]) for client in sorted(advised))


def build_rates(config: Federate, data: Dataset) -> list[float]:
    """Return every client's share of channels by the widths of a run file."""
    return rates_of(shares_of(config, data, config.seeds[0]), config.large_clients, config.client_widths)


def _adapt(attack: str, mode: str) -> str | None:
    """Return an attack in a mode; None if it has no such mode."""
    try:
        return str(inversion(f"{attack}:{settings_of_mode(mode)}"))
    except WrongInput:
        return None


def _find_last(rows: Sequence[Row], metric: str) -> float:
    """Return a measure of the whole federation in its last round."""
    values = [row.value for row in rows if row.metric == metric and row.extra.get("client") is None]
    if not values or values[-1] is None:
        raise WrongInput("rounds", f"no {metric} was measured; use more rounds")
    return values[-1]


def measure_attacks(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return the leakage: AUC as the mean over clients by attack, and pictures over all updates of a round."""
    measures: dict[str, Estimate] = {}
    members = [
        row for row in rows if row.metric == AUC and row.value is not None and row.extra.get("client") is not None
    ]
    members = [row for row in members if row.extra.get("batches") in (None, "mixed")]
    for attack in dict.fromkeys(row.attack for row in members):
        same = [row for row in members if row.attack == attack]
        mean = average([_estimate(row) for row in same])._replace(note=attack)
        if AUC not in measures or mean.value > measures[AUC].value:
            measures[AUC] = mean
    return measures | measure_pictures(rows)


def _estimate(row: Row) -> Estimate:
    assert row.value is not None
    low, high = (row.value if end is None else end for end in (row.low, row.high))
    return Estimate(row.value, low, high)


def prepare_federation(
    config: RecommendFederation,
) -> tuple[RecommendFederation, dict[str, Any], torch.device, Callable[[Run], FederationBench], list[str]]:
    """Return a search of federations: its fields, the values it depends on, the device, its bench and its plan."""
    plain = config.to_federate(base_pruning=[NONE], defense=[NONE])
    data, device = load_data(plain)
    halves = halve_rows(data, config.seed)
    check_federate(plain, halves[0], device)
    prunings = ", ".join(map(str, [*config.base_pruning, *config.submodels]))
    attacks = ", ".join([*config.membership, *map(str, config.attack)])
    lines = [
        f"{config.model} on {config.data}, seed {config.seed}, {config.rounds} rounds",
        f"  search {describe_amount(config)}, on half of the rows ({prunings}; {', '.join(map(str, config.defense))})",
        *(["  run pilots that advise a width for each client"] if config.advise and config.submodels else []),
        f"  attack up to {config.finalists} of them with {attacks} in every mode",
        "  run and attack the best one on the other half, with a fresh seed",
    ]

    def open_bench(run: Run) -> FederationBench:
        return FederationBench(run, config, halves, device)

    return config, dump(config), device, open_bench, lines
