"""Result rows of a federation, and its progress line: round, accuracy, bytes, leakage so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from secateur.catalogue import Choice, Defense
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.membership import MembershipObserver
from secateur.federated.attacks.observer import Observer
from secateur.federated.checkpoint import FederationLog
from secateur.federated.federation import Round
from secateur.federated.spec import FederationSpec
from secateur.federated.traffic import Measure
from secateur.progress import Advance
from secateur.runs.rows import Row


def labels_of(
    model: str, data: str, seed: int, base: Choice, defense: Defense, terms: FederationSpec
) -> dict[str, Any]:
    """Return the labels of every row of a federation; `row_of` adds round and client."""
    extra: dict[str, Any] = {"base_pruning": str(base), "averaging": terms.averaging, "broadcast": terms.broadcast}
    extra |= {"method": terms.method, "clients": len(terms.shares), "local_batch": terms.local.batch_size}
    extra |= {"view": terms.view, "fixed_batches": terms.fixed_batches, "settings": settings_of(base, *defense.parts)}
    if terms.base.wants_squares:
        extra["squares"] = "shared" if terms.base.spares_withheld else "all"
    pruned = {"pruner": str(base), "sparsity": terms.base.rate}
    return {"model": model, "dataset": data, "seed": seed, "defense": str(defense), **pruned, "extra": extra}


def settings_of(*choices: Choice) -> str:
    """Return every hyper-parameter in force, defaults included; papers leave some unstated, such as alpha's start.

    Example:
        >>> settings_of(Choice("base-pruning", "snip"), Choice("defense", "noise", (("sigma", 0.1),)))
        'snip: rate=0.3; noise: sigma=0.1'
    """
    settings = []
    for choice in choices:
        values = choice.method.defaults | dict(choice.arguments)
        if choice.name != "none" and values:
            settings.append(f"{choice.name}: {', '.join(f'{name}={value}' for name, value in values.items())}")
    return "; ".join(settings)


def row_of(labels: dict[str, Any], measure: Measure, timing: bool = False) -> Row:
    """Return a measure as a row."""
    fields = labels | {"extra": labels["extra"] | {"round": measure.round, "client": measure.client}}
    return Row(**fields, metric=measure.metric, value=measure.value, note=measure.note, timing=timing)


def teller(
    labels: dict[str, Any], story: FederationLog, observers: Sequence[Observer], advance: Advance
) -> Callable[[Round], None]:
    """Return a function that adds a round's measures to the log `story`, and advances the progress line."""
    shown, name = 0, f"{labels['extra']['base_pruning']}, {labels['defense']}, seed {labels['seed']}"

    def tell(done: Round) -> None:
        nonlocal shown
        story.rows += [row_of(labels, measure) for measure in done.measures]
        advance(done.number - shown, f"{name}: {_description(done, observers)}" if done.measures else None)
        shown = done.number

    return tell


def _description(done: Round, observers: Sequence[Observer]) -> str:
    values = {m.metric: m.value for m in done.measures if m.client is None}
    parts = [f"round {done.number}"]
    parts += [f"accuracy {values['test_accuracy']:.3f}"] if "test_accuracy" in values else []
    parts.append(f"{values['bytes_up'] / 1e6:.1f} MB up, {values['bytes_down'] / 1e6:.1f} MB down")
    attackers = [o for o in observers if isinstance(o, InversionObserver | MembershipObserver) and o.leak is not None]
    parts += [f"best {'PSNR' if isinstance(o, InversionObserver) else 'AUC'} {o.leak:.2f}" for o in attackers]
    return ", ".join(parts)
