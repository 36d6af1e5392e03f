"""What the rows of an attack inside a federation say of it: who was attacked, what was sent, what the attacker knew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from secateur.catalogue import Choice
from secateur.federated.memory import Past
from secateur.federated.observing import Seen
from secateur.interfaces import Knowledge, Weights


def is_active(attack: Choice) -> bool:
    """Whether an attack changes the model that is sent."""
    return bool(attack.method.info.get("active"))


def told_of(attack: Choice, seen: Seen, past: Sequence[Past], known: Knowledge, remembers: bool) -> dict[str, Any]:
    """The extras of one attacked update; of an attacker that `remembers` also how many rounds it used."""
    extra = {"batch_size": known.batch_size, "stage": f"round {seen.round}", "update": sends(known, seen)}
    extra |= {"labels": "inferred" if known.labels is None else "oracle"}
    extra |= {"threat": attack.method.info["threat"], "active": is_active(attack)}
    same = all(_same(seen.rows, each.rows, known.local_steps == 1) for each in past)
    if remembers:
        extra |= {"history": len(past) + 1, "same_rows": same}
    return extra | {"knows": ", ".join(_known(seen, past, known, same))}


def _known(seen: Seen, past: Sequence[Past], known: Knowledge, same: bool) -> list[str]:
    size = known.batch_size
    told = ["one example an update" if size == 1 else f"{size} examples an update", "how pixels become inputs"]
    told += ["the steps and learning rate"]
    told += ["the labels"] if known.labels is not None else []
    told += ["a generator of such pictures"] if known.generator is not None else []
    told += ["the client's compression"] if known.compression is not None else []
    belief = f"that a client's last {len(past) + 1} rounds are of the same rows"
    told += [belief if same else f"{belief} (wrongly)"] if past else []
    return told + ([f"that it is the sum of {len(seen.clients)} clients"] if seen.client is None else [])


def sends(known: Knowledge, seen: Seen) -> str:
    """An update in words."""
    weights = f"weights after {known.local_steps} local step{'s' if known.local_steps > 1 else ''}"
    whole = weights if isinstance(seen.view.update, Weights) else "gradient"
    return whole if seen.client is not None else f"the average of {len(seen.clients)} clients' {whole}"


def who(seen: Sequence[Seen]) -> str:
    """Whom one call of an attack is on, in words."""
    if seen[0].client is None:
        return f"the sum of {len(seen[0].clients)} clients"
    return f"client {seen[0].client}" if len(seen) == 1 else f"{len(seen)} clients"


def _same(rows: Tensor, others: Tensor, one_step: bool) -> bool:
    """Whether two rounds held the same examples: of one step in any order, of several in the same."""
    if one_step:
        rows, others = rows.sort().values, others.sort().values
    return rows.shape == others.shape and bool((rows == others).all())
