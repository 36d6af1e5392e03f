"""What a person calls a federation on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from secateur.catalogue import split

Labels = Mapping[str, Any]
Setting = tuple[int, str]  # of which of several joined methods, and the setting


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
    """Methods as they are written, without the settings that all of one name share.

    Example:
        >>> brief(["snip:rate=0.3", "largest:of=kept:rate=0.1", "largest:of=kept:rate=0.2"])["largest:of=kept:rate=0.1"]
        'largest:rate=0.1'
    """
    every = {text: _parts(text) for text in methods}
    shared: dict[str, set[Setting]] = {}
    for names, settings in every.values():
        joined = "+".join(names)
        shared[joined] = shared.get(joined, set(settings)) & set(settings)
    found = {}
    for text, (names, settings) in every.items():
        own = [each for each in settings if each not in shared["+".join(names)]]
        parts = [[name, *(setting for at, setting in own if at == number)] for number, name in enumerate(names)]
        found[text] = "+".join(map(":".join, parts))
    return found


def name_and_settings(method: str) -> tuple[str, str]:
    """A method, or several joined, as a narrow table has it: the name, and below what was set.

    Example:
        >>> name_and_settings("priprune:accuracy=10.0:privacy=1.0+dp:clip=1.0"), name_and_settings("none")
        (('priprune+dp', 'accuracy=10.0, privacy=1.0, clip=1.0'), ('none', ''))
    """
    names, settings = _parts(method)
    return "+".join(names), ", ".join(setting for _, setting in settings)


def _parts(method: str) -> tuple[list[str], list[Setting]]:
    """The names that are joined, and what is set of each."""
    parts = [split(part) for part in method.split("+")]
    return [first for first, *_ in parts], [(at, each) for at, (_, *own) in enumerate(parts) for each in own]
