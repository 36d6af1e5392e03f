"""A federation in rows, and on the display: round, accuracy, bytes, leakage so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from secateur.catalogue import Choice, Defense
from secateur.federated.attacks.inversion import Attacker
from secateur.federated.attacks.membership import Asker
from secateur.federated.attacks.observer import Observer
from secateur.federated.checkpoint import Story
from secateur.federated.federation import Round
from secateur.federated.spec import Terms
from secateur.federated.traffic import Measure
from secateur.progress import Advance
from secateur.runs.rows import Row


def labels_of(model: str, data: str, seed: int, base: Choice, defense: Defense, terms: Terms) -> dict[str, Any]:
    """What every row of a federation carries; round and client come with each."""
    extra: dict[str, Any] = {"base_pruning": str(base), "averaging": terms.averaging, "broadcast": terms.broadcast}
    extra |= {"method": terms.method, "clients": len(terms.shares), "local_batch": terms.local.batch_size}
    extra |= {"view": terms.view, "fixed_batches": terms.fixed_batches, "settings": settings_of(base, *defense.parts)}
    if terms.base.wants_squares:
        extra["squares"] = "shared" if terms.base.spares_withheld else "all"
    pruned = {"pruner": str(base), "sparsity": terms.base.rate}
    return {"model": model, "dataset": data, "seed": seed, "defense": str(defense), **pruned, "extra": extra}


def settings_of(*choices: Choice) -> str:
    """Every hyper-parameter in force, also those that nobody gave: papers leave some unstated, such as alpha's start.

    Example:
        >>> settings_of(Choice("base-pruning", "snip"), Choice("defense", "noise", (("sigma", 0.1),)))
        'snip: rate=0.3; noise: sigma=0.1'
    """
    told = []
    for each in choices:
        values = each.method.defaults | dict(each.arguments)
        if each.name != "none" and values:
            told.append(f"{each.name}: {', '.join(f'{name}={value}' for name, value in values.items())}")
    return "; ".join(told)


def row_of(labels: dict[str, Any], measure: Measure, timing: bool = False) -> Row:
    """A measure as a row."""
    own = labels | {"extra": labels["extra"] | {"round": measure.round, "client": measure.client}}
    return Row(**own, metric=measure.metric, value=measure.value, note=measure.note, timing=timing)


def teller(
    labels: dict[str, Any], story: Story, observers: Sequence[Observer], advance: Advance
) -> Callable[[Round], None]:
    """Adds a round's measures to the story, and moves the display on."""
    shown, name = 0, f"{labels['extra']['base_pruning']}, {labels['defense']}, seed {labels['seed']}"

    def tell(done: Round) -> None:
        nonlocal shown
        story.rows += [row_of(labels, measure) for measure in done.measures]
        advance(done.number - shown, f"{name}: {_said(done, observers)}" if done.measures else None)
        shown = done.number

    return tell


def _said(done: Round, observers: Sequence[Observer]) -> str:
    found = {each.metric: each.value for each in done.measures if each.client is None}
    parts = [f"round {done.number}"]
    parts += [f"accuracy {found['test_accuracy']:.3f}"] if "test_accuracy" in found else []
    parts.append(f"{found['bytes_up'] / 1e6:.1f} MB up, {found['bytes_down'] / 1e6:.1f} MB down")
    leaks = [each for each in observers if isinstance(each, Attacker | Asker) and each.leak is not None]
    parts += [f"best {'PSNR' if isinstance(each, Attacker) else 'AUC'} {each.leak:.2f}" for each in leaks]
    return ", ".join(parts)
