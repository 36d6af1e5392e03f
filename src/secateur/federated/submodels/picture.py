"""Who trains which cells of a layer, for the page: the picture of a channel rule (mapp_fl Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secateur.federated.submodels.cutting import Asked, Structure
from secateur.federated.submodels.federation import SubmodelFederation

MOST = 2**16  # cells of a layer that is drawn: a page holds a number for each, several times


def picture(federation: SubmodelFederation, clients: Sequence[int], labels: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The outputs and inputs of a layer that these clients trained in the last round; nothing where none can be drawn.

    The layer is the first that is cut on both sides.
    """
    structure, terms = federation.structure, federation.terms
    name = _cut_on_both_sides(structure)
    if name is None or not clients:
        return []
    outputs, inputs = structure.shapes[f"{name}.weight"][:2]
    trained = []
    for client in clients:
        cut = structure.cut(terms.rule, Asked(client, len(terms.shares), terms.rounds), federation.rates[client])
        kept = {"outputs": cut.channels[name].tolist(), "inputs": cut.inputs(name, inputs).tolist()}
        trained.append({"client": client} | kept)
    own = {"kind": "cells", "layer": name, "outputs": outputs, "inputs": inputs, "trained": trained}
    flat = {key: value for key, value in labels.items() if key != "extra"} | labels["extra"]
    return [flat | own]


def _cut_on_both_sides(structure: Structure) -> str | None:
    always = sum(slot.size for slot in structure.slots)  # the flag of channels that everybody keeps
    for name, layer in structure.layers.items():
        small = len(layer.makes) * len(layer.reads) <= MOST
        if small and bool((layer.makes < always).any() and (layer.reads < always).any()):
            return name
    return None
