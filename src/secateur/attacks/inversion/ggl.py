"""GGL: the search goes through a generator, so whatever is found looks like a picture of the right kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from secateur.attacks.inversion.generator import LATENT
from secateur.attacks.inversion.generator_search import (
    Evolution,
    Latents,
    Losses,
    Pictures,
    candidate_losses,
    check_generator,
    divergence,
    pictures_by,
    through_generator,
)
from secateur.attacks.inversion.gradient_matching import Aim, GradientMatching, problems
from secateur.attacks.inversion.objective import Distance
from secateur.attacks.inversion.optimisation import Trials, sum_of
from secateur.catalogue import method, users_own
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView

THREAT = (
    "an honest-but-curious server that knows the network, the batch size and how BatchNorm normalised, and has "
    "public pictures of the same kind (none of them a target) to train a generator on"
)
DEMO = {"iterations": 50, "population": 16}


@method("inversion", "ggl", "dgp", threat=THREAT, active=False, needs="generator", demo=DEMO)
@dataclass(frozen=True)
class GGL(GradientMatching):
    """GGL (Li et al. 2022) in DGP (AAAI 2024, Fig. 5): min_z ||g(G(z, y)) - g*||^2 + .1 KL(z), labels by iDLG's rule.

    By CMA-ES from N(0, I), 500 rounds of 50 candidates, of which the best ever seen is taken; or by the gradient, Adam
    at .1 from z ~ N(0, I). KL(z) = (m^2 + s^2 - 1 - ln s^2) / 2, of N(m, s^2) to N(0, 1), with the mean m and the
    variance s^2 of z's 128 entries. Trials are judged by the whole objective.
    """

    iterations: int = 500
    distance: Distance = "euclidean"
    search: Literal["cma", "gradient"] = "cma"
    population: int = 50  # of cma
    sigma: float = 1.0  # cma's first step size
    kl: float = 0.1
    generator: str | None = None  # the attacker's own (z, y) -> pictures, module:function; None: Knowledge.generator

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse what cannot be matched, labels that are not had beforehand, and a generator that does not fit."""
        if self.labels == "joint" and knowledge.labels is None:
            raise WrongInput("labels", "ggl's generator needs them first; take idlg, bias, gi, counts or oracle")
        for name in ("group", "noise"):
            if getattr(self, name):
                raise WrongInput(name, "ggl does not move pictures themselves; allowed: 0")
        if self.population < 4:
            raise WrongInput("population", f"{self.population} is not allowed; give a whole number from 4")
        if not 0 < self.sigma < math.inf or not 0 <= self.kl < math.inf:
            raise WrongInput("sigma", f"{self.sigma} and kl {self.kl} are not allowed; give sigma above 0, kl from 0")
        super().check(knowledge, view)
        like = next(iter(view.update.values.values()))
        check_generator(self.pictures(knowledge, like), knowledge.input_shape, like, self.search == "gradient")

    def trials(self, aims: Sequence[Aim], seeds: Sequence[int], knowledge: Knowledge) -> Latents:
        """The stacked trials; what they move are latents (B, 128)."""
        like = next(iter(aims[0].observed[0].values()))
        pictures = self.pictures(knowledge, like)
        engine = self.engine if self.search == "gradient" else "plain"  # which prepares nothing
        trials = GradientMatching.trials(replace(self, engine=engine), aims, seeds, knowledge)
        given = {field.name: getattr(trials, field.name) for field in fields(trials)}
        given |= {"shape": (knowledge.batch_size, LATENT), "box": None, "pictures": pictures}
        if self.search == "cma":
            losses = self.losses(aims, knowledge, pictures)
            return Evolution(**given, losses=losses, population=self.population, sigma=self.sigma)
        weights = [self.kl, *[0.0] * (len(trials.evaluate) - 1)]  # once, however many rounds are matched
        pairs = zip(trials.evaluate, weights, strict=True)
        given["evaluate"] = [through_generator(evaluate, pictures, kl) for evaluate, kl in pairs]
        return Latents(**given)

    def losses(self, aims: Sequence[Aim], knowledge: Knowledge, pictures: Pictures) -> Losses:
        """The whole objective of candidate latents (N, population, B, 128)."""
        known = [aim.labels for aim in aims if aim.labels is not None]
        labels = torch.stack(known).repeat_interleave(self.restarts, 0)
        rounds = [
            candidate_losses(problem, self.objective, labels, fixed)
            for problem, fixed in problems(aims, knowledge, self.restarts)
        ]

        @torch.no_grad()
        def losses(latents: Tensor) -> Tensor:
            made = pictures(latents, labels[:, None].expand(latents.shape[:-1]))
            return sum_of([one(made) for one in rounds]) + self.kl * divergence(latents)

        return losses

    def best(self, trials: Trials, state: Params, aim: Aim, place: int) -> Reconstruction:
        """The picture of the best latent."""
        assert isinstance(trials, Latents)
        found = super().best(trials, state, aim, place)
        latents, labels = found.batch
        return replace(found, batch=Batch(trials.pictures(latents, labels), labels))

    def pictures(self, knowledge: Knowledge, like: Tensor) -> Pictures:
        """The attacker's generator, on the device of the update."""
        given = knowledge.generator if self.generator is None else users_own("generator", self.generator)
        if given is None:
            ways = "let `secateur invert` train it, or give your own: generator=... or ggl:generator=module:function"
            raise WrongInput("generator", f"ggl needs one; {ways}")
        return pictures_by(given, like)
