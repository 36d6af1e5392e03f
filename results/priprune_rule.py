"""PriPrune by the readings of Algorithm 3 that are not fields of the project's own, for results/priprune_readings.py.

A reading is written as the fields that differ, joined by colons: step=.001, alpha=.9:averaging=coverage. `usual` has
none, `none` is no defense, and accuracy=0 leaves the mask out of L_acc. Beside PriPrune's own fields:

    averaging=coverage   the server averages over those who sent an entry
    mixes=true           the mask acts in L_acc by mixing saved and received weights (line 6)
    letter=true          the weights, too, begin where this round's sample mixes the two
    descent=sgd          alpha itself steps down its gradient, as line 10 prints it
    drawn=true           alpha_0 is drawn from 0 to 1 for every weight and client
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Generator, Tensor

from secateur.catalogue import split
from secateur.defenses.priprune import LOGITS, STEPS, PriPrune, sample_withheld
from secateur.defenses.withholding import SAVED, WITHHELD
from secateur.errors import unknown
from secateur.interfaces import Batch, ClientResult, LossOf, Mask, Params
from secateur.studies.priprune.federations import WEIGHTS

SMALL = 13_764  # weights of the network that is measured
EDGE = 1e-4  # how near alpha comes to 0 and 1 where it is drawn or stepped itself


@dataclass(frozen=True)
class Reading(PriPrune):
    """PriPrune with a lambda_sha for the small network; its turn is PriPrune's until a field says otherwise."""

    sharing: float = PriPrune.sharing * WEIGHTS["femnist"] / SMALL
    averaging: str = "weighted"
    mixes: bool = False
    letter: bool = False
    descent: str = "adam"
    drawn: bool = False
    between: tuple[Params, Params] | None = None  # in a turn that mixes: the state, and what was received

    def begun(self, params: Params, rng: Generator) -> Params:
        """A client's state before its first round."""
        state = self.init(params)
        logits = {name: value for name, value in state.items() if self.drawn and name.startswith(LOGITS)}
        return state | {name: torch.rand(value.shape, generator=rng).logit(EDGE) for name, value in logits.items()}

    def turn(
        self, loss: LossOf, received: Params, mask: Mask, state: Params, batches: Batch, noise: Params, rate: float
    ) -> ClientResult:
        """Algorithm 3 on one batch (1, B, ...)."""
        if self.letter:
            state = state | {WITHHELD + name: state[LOGITS + name] + drawn[0] > 0 for name, drawn in noise.items()}
        rule = replace(self, between=(state, received)) if self.mixes else self
        return PriPrune.turn(rule, loss, received, mask, state, batches, noise, rate)

    def objective(self, logits: Params, *lesson: Any) -> Tensor:
        """L_local; where the reading mixes, L_acc takes saved weights where the sample withholds, else received."""
        if self.between is None:
            return super().objective(logits, *lesson)
        loss, weights, _, _, examples, noise, temperature = lesson
        state, received = self.between
        draws = {name: sample_withheld(a, noise[name], temperature) for name, a in logits.items()}
        mixed = {name: state[SAVED + name] * draw + received[name] * (1 - draw) for name, draw in draws.items()}
        rest = PriPrune.objective(replace(self, accuracy=0), logits, *lesson)
        return self.accuracy * loss(weights | mixed, *examples) + rest

    def step_adam(self, state: Params, slopes: Params) -> Params:
        """One step of a by Adam, or of alpha = sigmoid(a) by plain descent."""
        if self.descent == "adam":
            return super().step_adam(state, slopes)
        alphas = {name: state[LOGITS + name].sigmoid() for name in slopes}
        moved = {name: alpha - self.step * slopes[name] / (alpha * (1 - alpha)) for name, alpha in alphas.items()}
        return {STEPS: state[STEPS] + 1} | {LOGITS + name: alpha.logit(EDGE) for name, alpha in moved.items()}


def reading(text: str) -> Reading | None:
    """As a command has it; None for no defense."""
    if text == "none":
        return None
    usual = {field.name: field.default for field in fields(Reading) if field.default is not None}
    given = {} if text == "usual" else dict(part.partition("=")[::2] for part in split(text))
    for name in given:
        if name not in usual:
            raise unknown("reading", name, [*usual, "usual", "none"])
    return Reading(**{name: _value(value, usual[name]) for name, value in given.items()})


def _value(text: str, usual: Any) -> Any:
    if isinstance(usual, bool):
        return text == "true"
    return text if isinstance(usual, str) else float(text)
