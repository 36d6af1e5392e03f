"""What attacks on updates recovered: the lines of their table, and the sentences above it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.report.measures import shown
from secateur.report.sections import setting
from secateur.report.summary import Line, lines
from secateur.report.verdict import Badge
from secateur.rows import Row

# columns of the table where its lines differ in them
PLACES = ("run", "model", "dataset", "stage", "batch_size", "base_pruning", "defense", "against", "round", "client")
TRAINED = "weights given"  # the stage of a model that is no longer the untrained one
Labels = Mapping[str, Any]


def is_inversion(row: Row) -> bool:
    """Whether a row is of an attack on updates."""
    return "target" in row.extra


def attacked(rows: Iterable[Row]) -> list[Line]:
    """One line per attack, over all its targets, in the order they were measured; seeds are gathered."""
    whole = (row for row in rows if is_inversion(row) and row.extra["target"] is None)
    return [line for line in lines(whole) if line.labels["attack"] is not None]


def name(labels: Labels) -> str:
    """An attack, with the defense it met.

    Example:
        >>> name({"attack": "ig", "defense": "dgp"}), name({"attack": "ig", "defense": "none"})
        ('ig on dgp', 'ig')
        >>> name({"attack": "ig", "defense": "ats", "against": "raw"})
        'ig on ats (against raw)'
    """
    met = defended(labels)
    return str(labels["attack"]) if met in ("None", "none") else f"{labels['attack']} on {met}"


def defended(labels: Labels) -> str:
    """A base pruning and a defense, with the pictures that reconstructions are compared with where these differ."""
    against, base, defense = labels.get("against"), labels.get("base_pruning", "none"), str(labels.get("defense"))
    met = defense if base == "none" else base if defense == "none" else f"{base}, {defense}"
    return met + ("" if against is None else f" (against {against})")


def place(figure: Labels) -> str:
    """Which update it is: of a federation its round and client."""
    if figure.get("round") is None:
        return f"target {figure['target']}"
    who = "the sum of all clients" if figure.get("client") is None else f"client {figure['client']}"
    return f"round {figure['round']}, {who}"


def where(figure: Labels) -> str:
    """What the updates of one comparison share: network, data, batches, whether weights were given and labels told.

    Example:
        >>> where({"model": "m", "dataset": "d", "batch_size": 4, "stage": "weights given", "labels": "oracle"})
        'm on d, batches of 4, weights given, labels told'
    """
    size = figure.get("batch_size", 1)
    told = [setting(figure), *([f"batches of {size}"] if size > 1 else [])]
    told += [TRAINED] if figure.get("stage") == TRAINED else []
    return ", ".join([*told, *(["labels told"] if figure.get("labels") == "oracle" else [])])


def threat(line: Line) -> str:
    """Who the attacker is and what it knows."""
    return f"{str(line.labels['threat']).removesuffix('.')}. Told here: {line.labels['knows']}."


def badge(found: Sequence[Line]) -> Badge:
    """Whether even one picture is recognisable, or more are nearest to their own truths than chance allows.

    An attack that failed on targets has shown nothing of them: its silence is no good news.
    """
    judged = [line for line in found if "recognisable" in line.cells]
    if found and all(map(_failed, found)):
        return Badge("Nothing was measured", "doubtful")
    if not judged:
        return Badge("Look at the pictures", "doubtful")
    if any(map(_leaks, judged)):
        return Badge("Training pictures come back", "bad")
    if any(line.value("failed") for line in judged):
        return Badge("No picture was recognised where attacks did not fail", "doubtful")
    return Badge("No picture was recognised", "good")


def verdict(found: Sequence[Line]) -> list[str]:
    """What the attacks recovered, in sentences."""
    known = [line for line in found if line.value("psnr") is not None]
    if not known:
        unseen = ["There is no truth to compare with: look at the pictures."] if found else []
        return [*unseen, *failures(found)]
    failed = failures(known)
    known = [line for line in known if not _failed(line)]
    if not known:
        return failed
    best = max(known, key=lambda line: (line.value("recognisable") or 0, line.value("psnr_max") or 0))
    told = {
        metric: _told(best, metric) for metric in ("recognisable", "psnr_median", "psnr_min", "psnr_max", "psnr_grey")
    }
    recovered = f"recovers most: {told['recognisable']} of its pictures are recognisable"
    if not best.value("recognisable"):
        recovered = "comes nearest: no picture is recognisable"
    sentences = [
        f"{name(best.labels)} {recovered}. Their PSNR is {told['psnr_median']} in the median, from {told['psnr_min']} "
        f"to {told['psnr_max']}; a grey picture has {told['psnr_grey']}."
    ]
    sentences += _nearest(known)
    guessed = [line for line in known if line.value("label_accuracy") is not None]
    if guessed:
        most = max(guessed, key=lambda line: line.value("label_accuracy") or 0)
        sentences.append(f"{name(most.labels)} finds {_told(most, 'label_accuracy')} of the labels.")
    sentences += plain_only(known) + failed
    if all(line.labels.get("stage") == "untrained" for line in found):
        sentences.append("The model was untrained, where updates reveal most.")
    return sentences


def _nearest(found: Iterable[Line]) -> list[str]:
    """What the badge goes by where no picture is recognisable, and yet more are nearest to their own than by chance."""
    hidden = [line for line in found if not line.value("recognisable") and _above_chance(line)]
    if not hidden:
        return []
    most = max(hidden, key=lambda line: line.value("identified") or 0)
    share, chance = _told(most, "identified"), _told(most, "identified_chance")
    return [f"{name(most.labels)} brings {share} of its pictures nearest to their own truth of all; chance: {chance}."]


def failures(found: Iterable[Line]) -> list[str]:
    """A sentence for each attack that failed on targets, of which nothing is known then."""
    sentences = []
    for line in found:
        if share := line.value("failed"):
            which = "every target" if _failed(line) else f"{share:.0%} of its targets"
            why = "it gave nothing, or all its trials diverged"
            sentences.append(f"{name(line.labels)} failed on {which} ({why}): nothing was measured there.")
    return sentences


def plain_only(found: Iterable[Line]) -> list[str]:
    """A sentence for each defense under which a plain attacker finds no picture, and one who knows of it does."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        if line.labels.get("defense") not in (None, "none"):
            groups.setdefault((setting(line.labels), defended(line.labels)), []).append(line)
    sentences = []
    for (_, met), group in groups.items():
        plain = [line for line in group if not line.labels["adaptive"]]
        knowing = [str(line.labels["attack"]) for line in group if line.labels["adaptive"] and _leaks(line)]
        if plain and knowing and not any(map(_leaks, plain)):
            told = f"{', '.join(knowing)} {'brings' if len(knowing) == 1 else 'bring'} pictures back"
            sentences.append(f"{met} stands only against the plain attacker: {told}.")
    return sentences


def facts(labelled: Iterable[Labels]) -> dict[str, str]:
    """What was attacked, from the labels of rows and figures."""
    labelled = list(labelled)

    def told(name: str) -> str:
        return ", ".join(dict.fromkeys(str(x[name]) for x in labelled if x.get(name) is not None))

    targets = {(x.get("run"), x["seed"], x["target"]) for x in labelled if x.get("target") is not None}
    names = {"Network": "model", "Model is": "stage", "Data": "dataset", "The client sends": "update"}
    names |= {"Examples an update": "batch_size", "Defenses": "defense", "Attacks": "attack", "Labels": "labels"}
    names |= {"Seeds": "seed"}
    return {title: told(name) for title, name in names.items()} | {"Updates attacked": str(len(targets))}


def _failed(line: Line) -> bool:
    """Whether the attack failed on every target."""
    return (line.value("failed") or 0) >= 1


def _leaks(line: Line) -> bool:
    return bool(line.value("recognisable")) or _above_chance(line)


def _above_chance(line: Line) -> bool:
    """More often nearest to its own truth than by chance, by the low end of the interval."""
    if (cell := line.cells.get("identified")) is None:
        return False
    return (cell.low if cell.low is not None else cell.value or 0.0) > (line.value("identified_chance") or 0.0)


def _told(line: Line, metric: str) -> str:
    return shown(line.cells.get(metric), metric, interval=False)
