"""GGL: search in the latent space of a generator, so that every reconstruction is a picture of the right kind."""

from __future__ import annotations

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
from secateur.attacks.inversion.gradient_matching import GradientMatching, MatchingTarget, problems
from secateur.attacks.inversion.optimisation import Trials, sum_of
from secateur.attacks.inversion.problem import Distance
from secateur.catalogue import method, users_own
from secateur.errors import WrongInput, check_number, check_whole
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView

THREAT = (
    "an honest-but-curious server that knows the network, the batch size and how BatchNorm normalised, and has "
    "public pictures of the same kind (none of them a target) to train a generator on"
)
DEMO = {"iterations": 30, "population": 16}


@method("inversion", "ggl", "dgp", threat=THREAT, active=False, needs="generator", demo=DEMO)
@dataclass(frozen=True)
class GGL(GradientMatching):
    """GGL (Li et al. 2022) in DGP (AAAI 2024, Fig. 5): pictures of a generator, with labels by iDLG's rule.

    The search is CMA-ES from N(0, I) with 500 rounds of 50 candidates, and returns the best candidate of all rounds.
    With search=gradient it is Adam at .1 from z ~ N(0, I). KL(z) = (m^2 + s^2 - 1 - ln s^2) / 2 is the divergence of
    N(m, s^2) from N(0, 1). Here m and s^2 are the mean and the variance of z's 128 entries. The best trial is the one
    with the lowest full objective.

    Equation: `x = G(z, y); min over z of |g(G(z, y)) - g*|^2 + kl KL(z)`.
    """

    iterations: int = 500
    distance: Distance = "euclidean"
    search: Literal["cma", "gradient"] = "cma"
    population: int = 50  # of search=cma
    sigma: float = 1.0  # initial step size of search=cma
    kl: float = 0.1
    generator: str | None = None  # module:function of the attacker's (z, y) -> pictures; None: Knowledge.generator

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse updates that cannot be matched, labels not known in advance, and generators of a wrong shape."""
        if self.labels == "joint" and knowledge.labels is None:
            raise WrongInput("labels", "ggl's generator needs them first; use idlg, bias, gi, counts or oracle")
        for name in ("group", "natural", "noise", "smoothing"):
            if getattr(self, name):
                raise WrongInput(name, "ggl does not move pictures themselves; allowed: 0")
        check_whole("population", self.population, 4)
        check_number("sigma", self.sigma, "(0, inf)")
        check_number("kl", self.kl, "[0, inf)")
        super().check(knowledge, view)
        like = next(iter(view.update.values.values()))
        check_generator(self.pictures(knowledge, like), knowledge.input_shape, like, self.search == "gradient")

    def trials(self, aims: Sequence[MatchingTarget], seeds: Sequence[int], knowledge: Knowledge) -> Latents:
        """Return the stacked trials; their variables are latents (B, 128)."""
        like = next(iter(aims[0].observed[0].values()))
        pictures = self.pictures(knowledge, like)
        # CMA-ES does not use the engine; the plain one needs no preparation.
        engine = self.engine if self.search == "gradient" else "plain"
        trials = GradientMatching.trials(replace(self, engine=engine), aims, seeds, knowledge)
        arguments = {field.name: getattr(trials, field.name) for field in fields(trials)}
        arguments |= {"shape": (knowledge.batch_size, LATENT), "box": None, "pictures": pictures}
        if self.search == "cma":
            losses = self.losses(aims, knowledge, pictures)
            return Evolution(**arguments, losses=losses, population=self.population, sigma=self.sigma)
        # The KL term counts once, for any number of matched rounds.
        weights = [self.kl, *[0.0] * (len(trials.evaluate) - 1)]
        pairs = zip(trials.evaluate, weights, strict=True)
        arguments["evaluate"] = [through_generator(evaluate, pictures, kl) for evaluate, kl in pairs]
        return Latents(**arguments)

    def losses(self, aims: Sequence[MatchingTarget], knowledge: Knowledge, pictures: Pictures) -> Losses:
        """Return the function that evaluates the full objective of candidate latents (N, population, B, 128)."""
        known = [aim.labels for aim in aims if aim.labels is not None]
        labels = torch.stack(known).repeat_interleave(self.restarts, 0)
        rounds = [
            candidate_losses(problem, self.objective, labels, fixed)
            for problem, fixed in problems(aims, knowledge, self.restarts)
        ]

        @torch.no_grad()
        def losses(latents: Tensor) -> Tensor:
            candidates = pictures(latents, labels[:, None].expand(latents.shape[:-1]))
            return sum_of([round_loss(candidates) for round_loss in rounds]) + self.kl * divergence(latents)

        return losses

    def select_best(self, trials: Trials, state: Params, aim: MatchingTarget, position: int) -> Reconstruction:
        """Return the picture of the best latent."""
        assert isinstance(trials, Latents)
        reconstruction = super().select_best(trials, state, aim, position)
        latents, labels = reconstruction.batch
        return replace(reconstruction, batch=Batch(trials.pictures(latents, labels), labels))

    def pictures(self, knowledge: Knowledge, like: Tensor) -> Pictures:
        """Return the attacker's generator, on the device of the update."""
        generator = knowledge.generator if self.generator is None else users_own("generator", self.generator)
        if generator is None:
            choices = "let `secateur invert` train it, or use your own: generator=... or ggl:generator=module:function"
            raise WrongInput("generator", f"ggl needs one; {choices}")
        return pictures_by(generator, like)
