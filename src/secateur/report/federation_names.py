"""What a person calls a federation on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from secateur.catalogue import split

Labels = Mapping[str, Any]


def name(labels: Labels) -> str:
    """A base pruning, and the defense on top.

    Example:
        >>> name({"base_pruning": "snip", "defense": "none"}), name({"base_pruning": "none", "defense": "priprune"})
        ('snip', 'no pruning, priprune')
    """
    base = "no pruning" if labels["base_pruning"] == "none" else str(labels["base_pruning"])
    base += ", broadcast dense" if labels.get("broadcast") == "dense" else ""
    base += ", only the sum seen" if labels.get("view") == "sum" else ""
    return base if labels["defense"] == "none" else f"{base}, {labels['defense']}"


def titles(found: Iterable[Labels]) -> dict[str, str]:
    """Every federation's name, shorter where its methods' settings tell it from none of the others."""
    every = {name(labels): labels for labels in found}
    bases = brief(str(labels["base_pruning"]) for labels in every.values())
    called = {}
    for full, labels in every.items():
        own = [str(x["defense"]) for x in every.values() if x["base_pruning"] == labels["base_pruning"]]
        short = {"base_pruning": bases[str(labels["base_pruning"])], "defense": brief(own)[str(labels["defense"])]}
        called[full] = name({**labels, **short})
    return called


def brief(methods: Iterable[str]) -> dict[str, str]:
    """Methods as they are written, without the settings that all of one name share; several joined stay as they are.

    Example:
        >>> brief(["snip:rate=0.3", "largest:of=kept:rate=0.1", "largest:of=kept:rate=0.2"])["largest:of=kept:rate=0.1"]
        'largest:rate=0.1'
    """
    every = list(dict.fromkeys(methods))
    shared: dict[str, set[str]] = {}
    for text in every:
        first, *settings = _parts(text)
        shared[first] = shared.get(first, set(settings)) & set(settings)
    found = {}
    for text in every:
        first, *settings = _parts(text)
        found[text] = ":".join([first, *(each for each in settings if each not in shared[first])])
    return found


def name_and_settings(method: str) -> tuple[str, str]:
    """A method, or several joined, as a narrow table has it: the name, and below what was set.

    Example:
        >>> name_and_settings("priprune:accuracy=10.0:privacy=1.0+dp:clip=1.0"), name_and_settings("none")
        (('priprune+dp', 'accuracy=10.0, privacy=1.0, clip=1.0'), ('none', ''))
    """
    parts = [split(part) for part in method.split("+")]
    return "+".join(first for first, *_ in parts), ", ".join(each for _, *settings in parts for each in settings)


def _parts(text: str) -> list[str]:
    return [text] if "+" in text else split(text)
