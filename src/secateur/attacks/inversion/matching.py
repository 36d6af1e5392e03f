"""Gradient matching: look for pictures whose gradient is the one that was sent. DLG, iDLG, IG, GI and SGI are it.

The presets (dlg.py, idlg.py, ig.py, gi.py, sgi.py) are this class with their sources' numbers as defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from secateur.attacks.inversion import labels as label_rules
from secateur.attacks.inversion.adaptive import Adaptive
from secateur.attacks.inversion.aims import Aim, aim_at, grouped, problems
from secateur.attacks.inversion.engines.choose import choose, engine_for
from secateur.attacks.inversion.engines.memory import halving
from secateur.attacks.inversion.lbfgs import LBFGS
from secateur.attacks.inversion.loop import StepRule, Trials
from secateur.attacks.inversion.objective import Distance, Matching
from secateur.attacks.inversion.steps import Adam, Schedule, learning_rates
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction, ServerView, Watch


@dataclass(frozen=True)
class GradientMatching:
    """Minimise scale * D(g, g*) + priors over the pictures of all targets and restarts at once."""

    iterations: int = 2500
    learning_rate: float = 0.1
    restarts: int = 1
    distance: Distance = "cosine"
    scale: float = 1.0  # a_G
    tv: float = 0.0  # a_TV
    tv_average: bool = False  # half the sum of mean|dx| and mean|dy| instead of their sum
    l2: float = 0.0  # a_l2
    batchnorm: float = 0.0  # a_BN
    first_batchnorm: float = 10.0
    group: float = 0.0  # a_group
    labels: label_rules.Rule = "idlg"
    optimizer: Literal["adam", "lbfgs"] = "adam"
    sign: bool = False
    schedule: Schedule = "constant"
    noise: float = 0.0  # of the pixels in a step, times the learning rate
    box: bool = True
    target: Literal["update", "unpruned"] = "update"  # unpruned: SGI's mask from the received weights
    adaptive: Adaptive = "none"
    layer: str | None = None  # that adaptive=layer leaves out; None: the one with the most zeros
    retries: int = 3  # new starts of a trial that diverged
    engine: str = "auto"

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse an update that does not fit, labels that cannot be had, a layer or an engine that is not there."""
        self._check_numbers()
        if knowledge.batch_size < 1:
            raise WrongInput("batch_size", f"{knowledge.batch_size} is not allowed; an update has at least one example")
        aim = aim_at(self, [view], knowledge, 0)
        for problem, _ in problems([aim], knowledge, 1):
            choose(problem, next(iter(aim.observed[0].values())).device, self.engine)

    def _check_numbers(self) -> None:
        for name in ("iterations", "restarts"):
            if getattr(self, name) < 1:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a whole number from 1")
        if not 0 < self.learning_rate < math.inf:
            raise WrongInput("learning_rate", f"{self.learning_rate} is not allowed; give a number above 0")
        for name in ("scale", "tv", "l2", "batchnorm", "first_batchnorm", "group", "noise", "retries"):
            if not 0 <= getattr(self, name) < math.inf:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a number from 0")

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """A passive attacker's: unchanged."""
        return net, state

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """All targets at once; one draw for each makes them what they would be one by one."""
        aims = [aim_at(self, views, knowledge, i) for i, views in enumerate(targets)]
        seeds = [int(torch.randint(2**62, (), generator=rng, device=rng.device)) for rng in chance]
        groups = grouped(aims)
        trials = [self.trials([aims[i] for i in group], [seeds[i] for i in group], knowledge) for group in groups]
        states = [one.begin() for one in trials]
        if (saved := watch.load()) is not None:
            for name, value in saved.items():
                number, _, key = name.partition("/")
                states[int(number)][key].copy_(value)

        def pictures() -> list[Reconstruction]:
            found: dict[int, Reconstruction] = {}
            for group, one, state in zip(groups, trials, states, strict=True):
                found |= {i: self.best(one, state, aims[i], place) for place, i in enumerate(group)}
            return [found[i] for i in range(len(aims))]

        def save() -> None:
            whole = {f"{i}/{name}": value.clone() for i, state in enumerate(states) for name, value in state.items()}
            watch.save(whole, pictures())

        for group, one, state in zip(groups, trials, states, strict=True):

            def run(places: Tensor, group: list[int] = group, one: Trials = one, state: Params = state) -> None:
                """All of them on what was made for them; a part, where memory ran out, on its rows of the state."""
                if len(places) == len(group):
                    return one.run(state, watch.advance, save)
                some = [group[place] for place in places.tolist()]
                part = self.trials([aims[i] for i in some], [seeds[i] for i in some], knowledge)
                part.run(one.rows(state, places), watch.advance, save)

            halving(run, torch.arange(len(group)))
            save()
            for place, i in enumerate(group):
                yield i, self.best(one, state, aims[i], place)

    @property
    def objective(self) -> Matching:
        """What is minimised."""
        tv = self.tv / 2 if self.tv_average else self.tv
        return Matching(self.distance, self.scale, tv, self.l2, self.batchnorm, self.first_batchnorm, self.group)

    def trials(self, aims: Sequence[Aim], seeds: Sequence[int], knowledge: Knowledge) -> Trials:
        """The stacked trials of targets that can be stacked."""
        rounds = problems(aims, knowledge, self.restarts)
        like = next(iter(aims[0].observed[0].values()))
        low, high = (limit.to(like) for limit in knowledge.box)
        labels = [aim.labels for aim in aims if aim.labels is not None]
        return Trials(
            evaluate=[engine_for(problem, self.objective, like.device, self.engine) for problem, _ in rounds],
            fixed=[fixed for _, fixed in rounds],
            labels=torch.stack(labels).repeat_interleave(self.restarts, 0) if labels else None,
            seeds=seeds,
            restarts=self.restarts,
            shape=(knowledge.batch_size, *knowledge.input_shape),
            classes=knowledge.classes,
            like=like,
            iterations=self.iterations,
            rule=self.rule(like),
            box=(low, high) if self.box else None,
            noise=self.noise > 0,
            group=self.group > 0,
            retries=self.retries,
        )

    def rule(self, like: Tensor) -> StepRule:
        """How the trials move."""
        if self.optimizer == "lbfgs":
            return LBFGS(self.iterations, self.learning_rate)
        return Adam(learning_rates(self.schedule, self.iterations, self.learning_rate).to(like), self.sign, self.noise)

    def best(self, trials: Trials, state: Params, aim: Aim, place: int) -> Reconstruction:
        """The restart of one target whose gradient matches best, priors left out."""
        rows = slice(place * self.restarts, (place + 1) * self.restarts)
        matching = state["matching"][rows].nan_to_num(torch.inf)
        trial = int(matching.argmin())
        row, loss = rows.start + trial, float(matching[trial])
        labels = state["labels"][row].argmax(-1) if aim.labels is None else aim.labels
        points = enumerate(state["curve"][:, row].tolist())
        curve = [(i * trials.every, value) for i, value in points if value == value]
        if int(state["clock"][row]) == self.iterations and loss < torch.inf:
            curve.append((self.iterations, loss))
        note = aim.note if loss < torch.inf or not bool(state["clock"][row]) else f"{aim.note}; every trial diverged"
        return Reconstruction(
            Batch(state["inputs"][row].nan_to_num().clone(), labels.clone()),
            loss,
            curve,
            trial,
            int(state["attempt"][rows].sum()),
            note,
        )
