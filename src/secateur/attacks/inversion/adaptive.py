"""Adaptive attackers: they know that an update was compressed or perturbed, and change the matching accordingly.

support: compare only non-zero entries of the update. layer: leave a defended layer out. reapply: compress the trial's
gradient as the client did. mask: estimate the kept entries of an update whose pruned entries hold noise, and compare
only these. loss: take the gradient of a trial by the client's own loss, where that is not the cross-entropy. fill: fill
entries that are missing from others that must be equal to them, as a tampered model allows (rob alone).

More parts of a mode use what the server saw besides one update. follows: leave out entries that the client did not send
the last time. With error feedback, or where a client keeps a withheld weight, such an entry holds changes of earlier
rounds too; an entry that was sent the last time holds this round's gradient alone. accumulates: join the client's last
rounds, on the assumption that all of them are of the same examples. magnitudes: compare also withheld entries, by the
size that the client's squared gradients show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from secateur.errors import WrongInput, unknown
from secateur.functional import Noisy, classifier
from secateur.interfaces import Knowledge, Mask, Params, ServerView, Weights
from secateur.seeding import derive

Adaptive = Literal["none", "support", "layer", "reapply", "mask", "loss"]
AdaptiveServer = Literal[Adaptive, "fill"]  # modes of an active server
Compression = Callable[[Params], Params]
PLAIN = "none"  # the mode of an attacker who does not know of the defense
FOLLOWS = "follows"  # the part of a mode: the attacker remembers which entries the client sent last
ACCUMULATES = "accumulates"  # the part of a mode: the attacker joins a client's last rounds
FILL: Final = "fill"  # the mode of an attack whose tampered model makes entries of the update equal
MAGNITUDES = "magnitudes"  # the part of a mode: the attacker reads the squared gradients of withheld weights
SETTINGS = {FOLLOWS: "follows=true", ACCUMULATES: "rounds=3", MAGNITUDES: "magnitudes=true"}  # others: adaptive=PART
SAME = 0.05  # relative difference up to which a square and an update show the same gradient


def mode_of(adaptive: str, follows: bool = False, rounds: int = 1, magnitudes: bool = False) -> str:
    """Return the mode of an attacker from its settings.

    Example:
        >>> mode_of("support", True), mode_of("none", True), mode_of("none"), mode_of("support", False, 4)
        ('support+follows', 'follows', 'none', 'support+accumulates')
    """
    parts = {adaptive: adaptive != PLAIN, FOLLOWS: follows, ACCUMULATES: rounds > 1, MAGNITUDES: magnitudes}
    return "+".join(part for part, holds in parts.items() if holds) or PLAIN


def mode_of_attack(attack: object) -> str:
    """Return the mode of a mounted attack."""
    defaults: dict[str, Any] = {"adaptive": PLAIN, "follows": False, "rounds": 1, "magnitudes": False}
    return mode_of(**{name: getattr(attack, name, default) for name, default in defaults.items()})


def settings_of_mode(mode: str) -> str:
    """Return the settings that give an attack a mode.

    Example:
        >>> settings_of_mode("support+follows"), settings_of_mode("layer")
        ('adaptive=support:follows=true', 'adaptive=layer')
    """
    return ":".join(SETTINGS.get(part, f"adaptive={part}") for part in mode.split("+"))


def read_magnitudes(view: ServerView, observed: Params, knowledge: Knowledge) -> tuple[Params, Mask]:
    """Return the gradient by the sizes that its squares show, and the mask of the entries without a known sign.

    An entry has a sign if it was sent and its change has the size that the square shows. A weight that was withheld
    before carries changes of earlier rounds, so its change has another size. Others get a sign by `sign_rows`.
    """
    if view.squares is None:
        advice = "use base pruning prunefl with squares=all, and no view: sum"
        raise WrongInput("attack", f"magnitudes=true reads squared gradients, and clients send none; {advice}")
    gradient, unsigned = {}, {}
    for name, value in observed.items():
        size = view.squares[name].to(value).sqrt()
        sent = (view.update.values[name] != 0) & ((value.abs() - size).abs() <= SAME * size)
        gradient[name], unsigned[name] = torch.where(sent, size.copysign(value), size), ~sent & (size > 0)
    for layer in list_nonnegative(view.sent, knowledge):
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        if weight in gradient:
            known = [torch.where(unsigned[name], 0, gradient[name]) for name in (weight, bias) if name in gradient]
            signs = sign_rows(torch.cat([part.view(len(part), -1) for part in known], 1))
            gradient[weight] = gradient[weight] * torch.where(unsigned[weight] & (signs < 0), -1, 1)
            unsigned[weight] = unsigned[weight] & (signs == 0)
    return gradient, unsigned


def sign_rows(values: Tensor) -> Tensor:
    """Return (rows, 1) the sign that all non-zero values of a row share, or 0.

    The gradient of a Linear layer's row is a sum over examples of the loss's slope times the inputs. If inputs are not
    negative and the slopes have one sign, as for one example, all entries of the row have it, the bias included.

    Example:
        >>> sign_rows(torch.tensor([[2.0, 0.0, 1.0], [-1.0, 0.0, -3.0], [1.0, -1.0, 0.0]])).flatten()
        tensor([ 1., -1.,  0.])
    """
    has_plus, has_minus = (values > 0).any(1, keepdim=True), (values < 0).any(1, keepdim=True)
    return has_plus.to(values) - has_minus.to(values)


def list_nonnegative(sent: Params, knowledge: Knowledge) -> list[str]:
    """Return the Linear layers whose inputs are never negative on noise, as behind ReLU or a sigmoid."""
    net, lowest = copy.deepcopy(knowledge.net).eval(), dict[str, float]()
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear):

            def note(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                lowest[name] = float(inputs[0].min())

            layer.register_forward_pre_hook(note)
    like = next(iter(sent.values()))
    noise = torch.randn(8, *knowledge.input_shape, generator=derive(0, "noise")).to(like)
    with torch.no_grad():
        functional_call(net, dict(sent), (noise,))
    return [name for name, value in lowest.items() if value >= 0]


def support(observed: Params) -> Mask:
    """Return the mask of the non-zero entries of the update (Top-k, DGP, Outpost)."""
    return {name: value != 0 for name, value in observed.items()}


def mask_unpruned(view: ServerView) -> Mask | None:
    """Return the mask of the non-zero received weights (SGI: PriPrune, Algorithm 2).

    Return None for a gradient, whose zeros do not show which weights were pruned.
    """
    return support(view.update.values) if isinstance(view.update, Weights) else None


def mask_again(view: ServerView, observed: Params) -> Mask:
    """Return the estimated mask of the kept entries: non-zero weights, or the larger cluster of gradient magnitudes.

    Noise in the pruned entries of a gradient forms a second cluster of small magnitudes. Otsu's threshold on log|g|
    separates the two clusters in each tensor.
    """
    return mask_unpruned(view) or {name: mask_larger_heap(value) for name, value in observed.items()}


def join_masks(mask: Mask, other: Mask | None) -> Mask:
    """Return the entries of both masks; None is the mask of all entries."""
    return mask if other is None else {name: value & other[name] for name, value in mask.items()}


def mask_larger_heap(values: Tensor) -> Tensor:
    """Return the mask of entries whose log|v| is above Otsu's threshold; exact zeros are never selected."""
    size = values.abs()
    nonzero = size > 0
    if int(nonzero.sum()) < 2:
        return nonzero
    return nonzero & (size > otsu(size[nonzero].log()).exp())


def otsu(values: Tensor) -> Tensor:
    """Return the threshold that maximises the variance between the two classes of values (Otsu 1979).

    The threshold is the midpoint of two neighbours in the sorted values. If all values are equal, it is below them.
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
    """Return the update without the parameters of one layer.

    A layer may be a module with several layers inside, such as PRECODE's bottleneck.
    """
    left = {name: value for name, value in observed.items() if layer_of(name) != layer and not _is_inside(name, layer)}
    if len(left) == len(observed):
        raise unknown("layer", layer, sorted({layer_of(name) for name in observed}))
    return left


def find_defended_layer(observed: Params, net: nn.Module, classes: int) -> str:
    """Return the name of the layer that the defense changed most: a noisy module, else the layer with the most zeros.

    The gradients of PRECODE's bottleneck and of the classifier behind it are products of the bottleneck's noise;
    Scheliga et al. 2023 leave them out. The architecture shows which module is noisy. Without a noisy module the result
    is the layer whose update has the largest share of zeros, or the classifier if no entry is zero.
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


def _is_inside(name: str, layer: str) -> bool:
    return bool(layer) and name.startswith(f"{layer}.")


def layer_of(name: str) -> str:
    """Return the layer of a parameter: the parameter's name without its last part."""
    return name.rpartition(".")[0]


def compression_of(observed: Params, knowledge: Knowledge) -> tuple[Compression, str]:
    """Return the client's compression if it is known, else one estimated from the update, and a note for the result."""
    if knowledge.compression is not None:
        return knowledge.compression, "adaptive: the client's own compression is applied to the trial's gradient"
    return estimate_compression(
        observed
    ), "adaptive: a compression estimated from the update is applied to the trial's gradient"


def estimate_compression(observed: Params) -> Compression:
    """Return a compression that keeps, in each tensor, as many entries as the update has non-zero ones.

    The update shows how many entries survived (k of n), and their smallest and largest magnitude. The n - k dropped
    entries are split between the top and the bottom ranks of the trial's magnitudes. The split is proportional to the
    numbers of trial entries above the largest and below the smallest surviving magnitude.
    """
    survivors = {name: (int((v != 0).sum()), *_range(v)) for name, v in observed.items()}

    def compress(gradient: Params) -> Params:
        kept = {}
        for name, value in gradient.items():
            count, low, high = survivors[name]
            kept[name] = torch.where(between_ranks(value.abs(), count, low, high), value, 0)
        return kept

    return compress


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    size = values.abs()
    return torch.where(size > 0, size, torch.inf).amin(), size.amax()


def between_ranks(size: Tensor, count: int, low: Tensor, high: Tensor) -> Tensor:
    """Return the mask of the `count` entries that remain after ranks are dropped from the bottom and the top.

    Ties are broken by position.
    """
    flat = size.detach().flatten()
    dropped = flat.numel() - count
    below, above = (flat < low).sum(), (flat > high).sum()
    top = torch.round(dropped * above / (below + above).clamp_min(1)).long()
    rank = flat.argsort(stable=True).argsort()
    bottom = dropped - top
    return ((rank >= bottom) & (rank < flat.numel() - top)).view_as(size)
