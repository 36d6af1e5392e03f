"""Several federations step by step as one: their clients are lanes of one stack (seeds, rules, large clients).

Each comes to what it would come to alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from secateur.errors import WrongInput
from secateur.federated.federation import Round
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.interfaces import Params


class Rounds(NamedTuple):
    """A finished round of all."""

    number: int
    each: list[Round]


class Together:
    """Federations of equal rounds that share one crowd (`beside`): followed, put down and taken up as one."""

    def __init__(self, federations: Sequence[SubmodelFederation]) -> None:
        self.federations, first = list(federations), federations[0]
        if any(one.crowd is not first.crowd or one.terms.local != first.terms.local for one in federations):
            raise WrongInput("federations", "share neither crowd nor local training; make the others beside the first")
        if len({one.terms.rounds for one in federations}) > 1:
            raise WrongInput("rounds", "differ between federations that run together; give equal ones")
        self.terms = first.terms

    @property
    def number(self) -> int:
        """Rounds that are done."""
        return self.federations[0].number

    def rounds(self) -> Iterator[Rounds]:
        """From where they stand to the last one."""
        while self.number < self.terms.rounds:
            number = self.number + 1
            jobs = [one.begin(number) for one in self.federations]
            made = iter(self.federations[0].crowd([job for own in jobs for job in own]))
            each = [
                one.finish(number, [next(made) for _ in own]) for one, own in zip(self.federations, jobs, strict=True)
            ]
            yield Rounds(number, each)

    def observed(self, number: int) -> bool:
        """Whether somebody looks at a round's updates."""
        return any(one.observed(number) for one in self.federations)

    puts_off = False  # attacks are made at once

    def model(self) -> Params:
        """The servers' models, each under its number."""
        return {f"{i}.{n}": value for i, one in enumerate(self.federations) for n, value in one.model().items()}

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Everything that the next round depends on, for `load`."""
        states = [one.state() for one in self.federations]
        tensors = {f"{i}.{name}": value for i, (own, _) in enumerate(states) for name, value in own.items()}
        return tensors, {"each": [data for _, data in states]}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        for i, (one, own) in enumerate(zip(self.federations, data["each"], strict=True)):
            start = f"{i}."
            one.load({n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}, own)
