"""Attackers who know that an update was compressed or disturbed, and match accordingly.

support: compare only where the update is not zero. layer: leave a defended layer out. reapply: compress the trial's
gradient as the client did. mask: guess which entries were kept where noise filled the holes, and compare only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from secateur.errors import unknown
from secateur.functional import Noisy, classifier
from secateur.interfaces import Knowledge, Mask, Params, ServerView, Weights

Adaptive = Literal["none", "support", "layer", "reapply", "mask"]
Compression = Callable[[Params], Params]


def support(observed: Params) -> Mask:
    """Where the update is not zero (Top-k, DGP, Outpost)."""
    return {name: value != 0 for name, value in observed.items()}


def unpruned(view: ServerView) -> Mask | None:
    """SGI (PriPrune, Algorithm 2): where the received weights are not zero; None of a gradient, which cannot tell."""
    return support(view.update.values) if isinstance(view.update, Weights) else None


def mask_again(view: ServerView, observed: Params) -> Mask:
    """The entries that were kept: of weights those that are not zero; of a gradient the larger of two heaps.

    Noise that fills the holes of a pruned gradient is a heap of small magnitudes of its own; Otsu's threshold on
    log|g| parts the two, tensor by tensor.
    """
    return unpruned(view) or {name: larger_heap(value) for name, value in observed.items()}


def larger_heap(values: Tensor) -> Tensor:
    """Where log|v| lies above Otsu's threshold; exact zeros are in neither heap and are dropped."""
    size = values.abs()
    there = size > 0
    if int(there.sum()) < 2:
        return there
    return there & (size > otsu(size[there].log()).exp())


def otsu(values: Tensor) -> Tensor:
    """The threshold that parts values into two heaps with the largest variance between them (Otsu 1979).

    It lies half-way between two neighbours of the sorted values; of values that are all equal, below them.
    """
    sorted_values = values.flatten().sort().values
    if bool(sorted_values[0] == sorted_values[-1]):
        return sorted_values[0] - 1
    count = sorted_values.numel()
    below = torch.arange(1, count, device=values.device, dtype=values.dtype)
    sums = sorted_values.cumsum(0)
    low, high = sums[:-1] / below, (sums[-1] - sums[:-1]) / (count - below)
    between = below * (count - below) * (high - low).square()
    best = between.argmax()
    return (sorted_values[best] + sorted_values[best + 1]) / 2


def without_layer(observed: Params, layer: str) -> Params:
    """The update less one layer's parameters; a layer may be a module of several, such as PRECODE's bottleneck."""
    left = {name: value for name, value in observed.items() if layer_of(name) != layer and not _within(name, layer)}
    if len(left) == len(observed):
        raise unknown("layer", layer, sorted({layer_of(name) for name in observed}))
    return left


def defended_layer(observed: Params, net: nn.Module, classes: int) -> str:
    """What draws noise together with the layer behind it, as all see who know the network; else the emptiest layer.

    The gradients of PRECODE's bottleneck and of the classifier behind it are products of its noise (Scheliga et al.
    2023 leave them out). The emptiest layer is the one whose update has the largest share of zeros; where nothing is
    zero, the classifier.
    """
    noisy: list[str] = [name for name, module in net.named_modules() if isinstance(module, Noisy)]
    if noisy:
        return noisy[0].rpartition(".")[0] or noisy[0]
    zeros: dict[str, list[Tensor]] = {}
    for name, value in observed.items():
        zeros.setdefault(layer_of(name), []).append((value == 0).flatten())
    shares = {layer: float(torch.cat(parts).double().mean()) for layer, parts in zeros.items()}
    emptiest = max(shares, key=shares.__getitem__)
    return emptiest if shares[emptiest] > 0 else classifier(net, classes)


def _within(name: str, layer: str) -> bool:
    return bool(layer) and name.startswith(f"{layer}.")


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its name less the last part."""
    return name.rpartition(".")[0]


def compression_of(observed: Params, knowledge: Knowledge) -> tuple[Compression, str]:
    """The client's own compression where it is known, else one that is estimated from what survived."""
    if knowledge.compression is not None:
        return knowledge.compression, "adaptive: the client's own compression is applied to the trial's gradient"
    return estimated(observed), "adaptive: a compression estimated from the update is applied to the trial's gradient"


def estimated(observed: Params) -> Compression:
    """Keep of each tensor as many entries as survived, those between two ranks of its own magnitudes.

    The update shows how many entries survived (k of n) and the smallest and the largest magnitude that did. The n - k
    that were dropped are shared between top and bottom as the trial's own entries lie above the largest and below the
    smallest.
    """
    seen = {name: (int((v != 0).sum()), *_range(v)) for name, v in observed.items()}

    def compress(gradient: Params) -> Params:
        kept = {}
        for name, value in gradient.items():
            count, low, high = seen[name]
            kept[name] = torch.where(between_ranks(value.abs(), count, low, high), value, 0)
        return kept

    return compress


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    size = values.abs()
    return torch.where(size > 0, size, torch.inf).amin(), size.amax()


def between_ranks(size: Tensor, count: int, low: Tensor, high: Tensor) -> Tensor:
    """Which `count` entries stay when the others are dropped from the bottom and the top, ties by position."""
    flat = size.detach().flatten()
    dropped = flat.numel() - count
    below, above = (flat < low).sum(), (flat > high).sum()
    top = torch.round(dropped * above / (below + above).clamp_min(1)).long()
    rank = flat.argsort(stable=True).argsort()
    bottom = dropped - top
    return ((rank >= bottom) & (rank < flat.numel() - top)).view_as(size)
