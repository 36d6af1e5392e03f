"""Several federations that train as one: their clients are lanes of one stack (seeds, rules, large clients).

Each federation has the same result as alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from secateur.errors import WrongInput
from secateur.federated.federation import Round
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.interfaces import Params


class FinishedRounds(NamedTuple):
    """A finished round of all federations."""

    number: int
    each: list[Round]


class StackedFederations:
    """Federations with equal numbers of rounds and one trainer (`beside`), run, saved and resumed as one."""

    def __init__(self, federations: Sequence[SubmodelFederation]) -> None:
        self.federations, first = list(federations), federations[0]
        if any(fed.crowd is not first.crowd or fed.terms.local != first.terms.local for fed in federations):
            raise WrongInput("federations", "share neither crowd nor local training; make the others beside the first")
        if len({fed.terms.rounds for fed in federations}) > 1:
            raise WrongInput("rounds", "differ between federations that run together; give equal ones")
        self.terms = first.terms

    @property
    def number(self) -> int:
        """The number of finished rounds."""
        return self.federations[0].number

    def rounds(self) -> Iterator[FinishedRounds]:
        """Yield the remaining rounds."""
        while self.number < self.terms.rounds:
            number = self.number + 1
            jobs = [fed.begin(number) for fed in self.federations]
            trained = iter(self.federations[0].crowd([job for fed_jobs in jobs for job in fed_jobs]))
            finished = [
                fed.finish(number, [next(trained) for _ in fed_jobs])
                for fed, fed_jobs in zip(self.federations, jobs, strict=True)
            ]
            yield FinishedRounds(number, finished)

    def observed(self, number: int) -> bool:
        """Return True if an observer looks at a round's updates."""
        return any(fed.observed(number) for fed in self.federations)

    puts_off = False  # attacks run immediately

    def model(self) -> Params:
        """Return the servers' models; names start with the federation's index."""
        return {f"{i}.{n}": value for i, fed in enumerate(self.federations) for n, value in fed.model().items()}

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next round depends on, for `load`."""
        states = [fed.state() for fed in self.federations]
        tensors = {f"{i}.{name}": value for i, (parts, _) in enumerate(states) for name, value in parts.items()}
        return tensors, {"each": [data for _, data in states]}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`."""
        for i, (fed, values) in enumerate(zip(self.federations, data["each"], strict=True)):
            start = f"{i}."
            fed.load({n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}, values)
