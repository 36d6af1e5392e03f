"""Result rows of a federation, and its progress line: round, accuracy, bytes, leakage so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from secateur.catalogue import Choice, Defense
from secateur.federated.attacks.observer import Observer
from secateur.federated.checkpoint import FederationLog
from secateur.federated.spec import FederationSpec, RoundsSpec, SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.traffic import Measure, Round
from secateur.progress import Advance
from secateur.runs.rows import Row


class RecordedFederation(NamedTuple):
    """One federation of a run, and the log that takes its rows."""

    federation: Any  # a Federation, a SubmodelFederation, or one that replaces it
    labels: dict[str, Any]  # of its rows
    log: FederationLog
    observers: Sequence[Observer] = ()


def labels_of(
    model: str, data: str, seed: int, method: Choice, defense: Defense, terms: FederationSpec | SubmodelSpec
) -> dict[str, Any]:
    """Return the labels of every row of a federation; `method` is the base pruning or the channel rule."""
    labels: dict[str, Any] = {"model": model, "dataset": data, "seed": seed, "defense": str(defense)}
    if isinstance(terms, SubmodelSpec):
        return labels | {"extra": _submodel_extra(method, terms)}
    extra: dict[str, Any] = {"base_pruning": str(method), "averaging": terms.averaging, "broadcast": terms.broadcast}
    extra |= {"method": terms.method, "clients": len(terms.shares), "local_batch": terms.local.batch_size}
    extra |= {"view": terms.view, "fixed_batches": terms.fixed_batches, "settings": settings_of(method, *defense.parts)}
    if terms.base.wants_squares:
        extra["squares"] = "shared" if terms.base.spares_withheld else "all"
    return labels | {"pruner": str(method), "sparsity": terms.base.rate, "extra": extra}


def _submodel_extra(rule: Choice, terms: SubmodelSpec) -> dict[str, Any]:
    extra = {"submodels": str(rule), "large_clients": sum(rate == 1 for rate in terms.used_rates)}
    extra |= {name: getattr(terms, name) for name in ("uncovered", "batchnorm", "averaging", "own_labels")}
    extra |= {"clients": len(terms.shares), "rounds": terms.rounds}
    return extra | ({} if terms.local.augment is None else {"augment": True})


def settings_of(*choices: Choice) -> str:
    """Return every hyper-parameter in force, defaults included; papers leave some unstated, such as alpha's start.

    Example:
        >>> settings_of(Choice("base-pruning", "snip"), Choice("defense", "noise", (("sigma", 0.1),)))
        'snip: rate=0.3; noise: sigma=0.1'
        >>> settings_of(Choice("defense", "dgp"))
        'dgp: k1=0.05, k2=0.75, total=None, p=None, release=None'
    """
    settings = []
    for choice in choices:
        values = choice.method.defaults | dict(choice.arguments)
        values |= getattr(choice.make(), "in_force", {})
        if choice.name != "none" and values:
            settings.append(f"{choice.name}: {', '.join(f'{name}={value}' for name, value in values.items())}")
    return "; ".join(settings)


def row_of(labels: dict[str, Any], measure: Measure, terms: RoundsSpec | None = None, *, timing: bool = False) -> Row:
    """Return a measure as a row; with `terms` of sub-models a client's row has its width and its number of rows."""
    client = measure.client
    extra: dict[str, Any] = {"round": measure.round, "client": client}
    if client is not None and isinstance(terms, SubmodelSpec):
        extra |= {"rate": terms.used_rates[client], "client_rows": len(terms.shares[client])}
    fields = labels | {"extra": labels["extra"] | extra}
    return Row(**fields, metric=measure.metric, value=measure.value, note=measure.note, timing=timing)


def record_rounds(recorded: Sequence[RecordedFederation], advance: Advance, title: str) -> Callable[[Round], None]:
    """Return a function to call after each round of the federations, which run together.

    It adds the measures to the logs, attacks sub-models after the last round, and advances the progress line.
    """
    shown = 0

    def record(done: Round) -> None:
        nonlocal shown
        parts = done.parts or [done]
        for (federation, labels, log, observers), part in zip(recorded, parts, strict=True):
            log.rows += [row_of(labels, measure, federation.terms) for measure in part.measures]
            for observer in observers if done.number == federation.terms.rounds else ():
                if isinstance(observer, ExposureObserver):
                    observer.attack(federation)
        text = f"{title}: {_description(parts[0], recorded[0].observers)}" if parts[0].measures else None
        advance(done.number - shown, text)
        shown = done.number

    return record


def _description(done: Round, observers: Sequence[Observer]) -> str:
    values = {m.metric: m.value for m in done.measures if m.client is None}
    parts = [f"round {done.number}"]
    parts += [f"accuracy {values['test_accuracy']:.3f}"] if "test_accuracy" in values else []
    if "bytes_up" in values:
        parts.append(f"{values['bytes_up'] / 1e6:.1f} MB up, {values['bytes_down'] / 1e6:.1f} MB down")
    parts += [f"best {observer.leak_name} {observer.leak:.2f}" for observer in observers if observer.leak is not None]
    return ", ".join(parts)
