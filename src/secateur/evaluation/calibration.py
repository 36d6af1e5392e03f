"""Choice of an attack's weight of total variation by an attacker that has pictures of its own.

The best weight depends on the pictures: too small a weight hides photographs from an attack. The attacker makes updates
of its own examples through the same network and defense. It attacks them with a few weights, and keeps the one of the
least reconstruction error. The truths of the targets are never used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from secateur.catalogue import Choice
from secateur.config import inversion
from secateur.evaluation.client import AttackedClient
from secateur.evaluation.reconstruction import compare
from secateur.interfaces import Batch
from secateur.metrics.image import mse
from secateur.progress import progress
from secateur.runs.artifacts import Result
from secateur.runs.unfinished import NullWatcher
from secateur.seeding import derive, draw_seed

WEIGHTS = (1e-4, 1e-3, 1e-2, 1e-1)  # the range of the published settings
UPDATES = 2  # of the attacker's own, at most
SHARE = 2  # a calibration costs at most one part in so many of the attack itself
Stage = Callable[[Mapping[str, object], Callable[[], Result]], Result]  # (what the result depends on, computation)


@dataclass(frozen=True)
class Effort:
    """Size of a calibration: the attacker's own updates, and the iterations on them with each weight."""

    updates: int
    iterations: int
    share: float  # of the iterations of the attack itself

    def __str__(self) -> str:
        many = f"{self.updates} update{'s' if self.updates > 1 else ''} of the attacker's own"
        return f"{self.iterations} iterations on {many} with each, {100 * self.share:.0f} % of the attack's own cost"


@dataclass(frozen=True)
class Calibration:
    """Weight of total variation that an attacker chose, with the errors that it chose by."""

    attack: Choice  # with the weight
    errors: Mapping[float, float]  # mean squared error of the attacker's own pictures, by weight
    effort: Effort
    seconds: float

    @property
    def weight(self) -> float:
        """The chosen weight."""
        return float(self.attack.make().tv)

    @property
    def note(self) -> str:
        """The choice in words."""
        errors = ", ".join(f"{weight:g} ({error:.3g})" for weight, error in self.errors.items())
        chosen = f"total variation {self.weight:g}, chosen by the squared error on pictures of the attacker's own"
        return f"{chosen}: {errors}; {self.effort}"


def is_open(attack: Choice) -> bool:
    """Return True if the attack's weight of total variation is to be chosen: its source states none, nor does the user.

    Example:
        >>> from secateur.config import inversion
        >>> [is_open(inversion(text)) for text in ("ig", "ig:iterations=9", "ig:tv=0.01", "ig-ats", "dlg")]
        [True, True, False, False, False]
    """
    return bool(attack.method.info.get("calibrated")) and "tv" not in dict(attack.arguments)


def list_weights(attack: Choice) -> list[Choice]:
    """Return the attack with each weight, for an attacker without pictures of its own: all are shown."""
    return [inversion(attack, tv=weight) for weight in WEIGHTS]


def effort_of(attack: Choice, targets: int) -> Effort:
    """Return the size of the calibration of an attack on so many targets: at most half of the attack's iterations.

    Example:
        >>> from secateur.config import inversion
        >>> effort_of(inversion("ig"), 20), effort_of(inversion("ig"), 1).iterations
        (Effort(updates=2, iterations=1250, share=0.2), 312)
    """
    attacker = attack.make()
    updates, whole = min(UPDATES, targets), targets * attacker.restarts * attacker.iterations
    iterations = max(1, min(attacker.iterations // SHARE, whole // (SHARE * len(WEIGHTS) * updates)))
    return Effort(updates, iterations, iterations * len(WEIGHTS) * updates / whole)


def calibrate(
    attack: Choice, client: AttackedClient, examples: Sequence[Batch], effort: Effort, stage: Stage
) -> Calibration:
    """Attack updates of the attacker's own examples with every weight, and return the attack with the best one.

    Args:
        attack: the attack, whose weight is open.
        client: the attacked client; the attacker imitates it, with noise of its own.
        examples: batches that no target is made of, one an update.
        effort: how many of the examples are used, and for how many iterations.
        stage: computes the result of one weight, or reads it from a run's folder.
    """
    seed = draw_seed(derive(client.seed, "calibrate", attack.name))
    examples = examples[: effort.updates]
    guard = client.guard
    if guard is not None:
        guard = guard.imitate(seed, lambda number: examples[(number + 1) % len(examples)])
    imitated = replace(client, seed=seed, guard=guard)
    errors, seconds = {}, 0.0
    for weight in WEIGHTS:
        trial = inversion(attack, tv=weight, iterations=effort.iterations, restarts=1)
        title = f"{attack}: try total variation {weight:g} on {effort.updates} own updates"
        result = stage({"trial": str(trial)}, partial(_try, trial, title, imitated, examples))
        errors[weight], seconds = float(result.data["error"]), seconds + float(result.data["seconds"])
    best = min(WEIGHTS, key=lambda weight: errors[weight])
    return Calibration(inversion(attack, tv=best), errors, effort, seconds)


def _try(trial: Choice, title: str, client: AttackedClient, examples: Sequence[Batch]) -> Result:
    """Return the mean squared error of the pictures that one weight reconstructs."""
    attacker, begun = trial.make(), time.monotonic()
    starts = [derive(client.seed, "reconstruct")] * len(examples)
    knowledge, views = client.show_targets(attacker, examples, derive(client.seed, "tamper"))
    with progress(title, attacker.iterations, rate=True, unit="iterations") as advance:
        guesses = dict(attacker.reconstruct(views, knowledge, starts, NullWatcher(advance)))
    errors = []
    for number, example in enumerate(examples):
        used = client.transform_target(example, number)
        assert isinstance(used, Batch)
        pair = compare(used, guesses.get(number), knowledge)
        assert pair.truth is not None
        errors.append(float(mse(pair.truth, pair.guess).mean()))
    return Result({}, {"error": sum(errors) / len(errors), "seconds": time.monotonic() - begun})
