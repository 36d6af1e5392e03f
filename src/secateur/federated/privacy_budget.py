"""What local differential privacy costs a client: the epsilon of all updates that it took part in.

It is that of adding or removing one of the client's examples, towards a server that sees every update. Every update
counts in full: a client goes through its rows in passes, or takes the same ones again, so that no sampling amplifies.
An example that is more than once in a batch, where a client has fewer rows than that, moves the sum as often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from secateur.defenses.dp import DifferentialPrivacy
from secateur.defenses.dp_accounting import Guarantee
from secateur.defenses.private_client import LOOKS, PrivateTurn
from secateur.defenses.uploads import inner_of
from secateur.federated.spec import Terms
from secateur.federated.traffic import Measure


def spent(terms: Terms, turns: Sequence[int], number: int, last: bool) -> list[Measure]:
    """The epsilon of the worst client so far, and in the last round of each; nothing where none is promised."""
    private, looks = _promise(terms)
    if private is None:
        return []
    found = {
        client: _guarantee(private, looks * updates, -(-terms.local.batch_size // len(rows)))
        for client, (updates, rows) in enumerate(zip(turns, terms.shares, strict=True))
        if updates
    }
    if not found:
        return []
    worst = max(found.values())
    note = f"of the client that spent most: {worst}, the noise its own (local)"
    note += f"; {looks} looks a turn: which weights are withheld is covered" if looks > 1 else ""
    note += "; a mask that was made of a client's examples (snip, grasp) is not covered" if terms.base.rate else ""
    told = [Measure("epsilon", worst.epsilon, number, note=note)]
    each = [Measure("epsilon", one.epsilon, number, client, str(one)) for client, one in found.items()]
    return told + (each if last else [])


def _promise(terms: Terms) -> tuple[DifferentialPrivacy | None, int]:
    """What a client promises, and how often it looks at a batch in a turn."""
    if isinstance(terms.own, PrivateTurn):
        return terms.own.private, LOOKS
    private = None if terms.upload is None else inner_of(terms.upload)
    return (private, 1) if isinstance(private, DifferentialPrivacy) else (None, 0)


def check_spending(terms: Terms) -> None:
    """Let an accountant refuse, before any work, what it cannot count."""
    spent(terms, [terms.rounds] * len(terms.shares), terms.rounds, False)


@lru_cache
def _guarantee(private: DifferentialPrivacy, updates: int, copies: int) -> Guarantee:
    return replace(private, noise_multiplier=private.noise_multiplier / copies).guarantee(updates)
