"""The privacy budget of a client under local differential privacy: the epsilon of all its updates.

The epsilon is for adding or removing one of the client's examples, against a server that sees every update. Every
update counts in full. A client takes its rows in passes, or the same rows again, so there is no amplification by
sampling. If a client has fewer rows than a batch, an example can be in a batch several times. Then the example counts
that many times in the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from secateur.defenses.dp import LOOKS, DifferentialPrivacy, PrivateTurn
from secateur.defenses.dp_common import Guarantee
from secateur.defenses.uploads import inner_of
from secateur.federated.spec import FederationSpec
from secateur.federated.traffic import Measure


def spent(terms: FederationSpec, turns: Sequence[int], number: int, last: bool) -> list[Measure]:
    """Return the epsilon of the worst client so far, and in the last round of every client; empty without dp."""
    private, looks = _promise(terms)
    if private is None:
        return []
    guarantees = {
        client: _guarantee(private, looks * updates, -(-terms.local.batch_size // len(rows)))
        for client, (updates, rows) in enumerate(zip(turns, terms.shares, strict=True))
        if updates
    }
    if not guarantees:
        return []
    worst = max(guarantees.values())
    note = f"of the client that spent most: {worst}, the noise its own (local)"
    note += f"; {looks} looks a turn: which weights are withheld is covered" if looks > 1 else ""
    note += "; a mask that was made of a client's examples (snip, grasp) is not covered" if terms.base.rate else ""
    worst_measure = [Measure("epsilon", worst.epsilon, number, note=note)]
    client_measures = [
        Measure("epsilon", guarantee.epsilon, number, client, str(guarantee))
        for client, guarantee in guarantees.items()
    ]
    return worst_measure + (client_measures if last else [])


def _promise(terms: FederationSpec) -> tuple[DifferentialPrivacy | None, int]:
    """Return the differential privacy of a client, if any, and its number of looks at a batch per turn."""
    if isinstance(terms.own, PrivateTurn):
        return terms.own.private, LOOKS
    private = None if terms.upload is None else inner_of(terms.upload)
    return (private, 1) if isinstance(private, DifferentialPrivacy) else (None, 0)


def check_spending(terms: FederationSpec) -> None:
    """Raise WrongInput, before any work, for a budget that the accountant cannot compute."""
    spent(terms, [terms.rounds] * len(terms.shares), terms.rounds, False)


@lru_cache
def _guarantee(private: DifferentialPrivacy, updates: int, copies: int) -> Guarantee:
    return replace(private, noise_multiplier=private.noise_multiplier / copies).guarantee(updates)
