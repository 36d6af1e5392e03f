"""Sparsity of a model that was pruned elsewhere: masks of torch.nn.utils.prune, exact zeros and removed channels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import prune

LEAST = 0.01  # share of zeros from which a model counts as pruned: a dense one has next to none


def copy_module(net: nn.Module) -> nn.Module:
    """Return a deep copy, also of a module that holds tensors with a history.

    Older reparametrisations (torch.nn.utils.prune, weight_norm) hold one; plain deepcopy refuses it.
    """
    memo: dict[int, Any] = {}
    for module in net.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(net, memo)


def fold_masks(net: nn.Module) -> nn.Module:
    """Return the module, or where torch.nn.utils.prune masks it a copy with plain weights, zeros included."""
    if not prune.is_pruned(net):
        return net
    folded = copy_module(net)
    for module in folded.modules():
        hooks = module._forward_pre_hooks.values()
        for hook in [hook for hook in hooks if isinstance(hook, prune.BasePruningMethod)]:
            prune.remove(module, hook._tensor_name)  # type: ignore[no-untyped-call]
    return folded


def fold_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a saved state whose `name_orig` and `name_mask`, as torch.nn.utils.prune saves them, are one `name`.

    Example:
        >>> import torch
        >>> fold_tensors({"weight_orig": torch.tensor([2.0, 3.0]), "weight_mask": torch.tensor([1.0, 0.0])})
        {'weight': tensor([2., 0.])}
    """
    folded = {}
    for name, value in state.items():
        stem = name.removesuffix("_orig")
        if stem != name and f"{stem}_mask" in state:
            folded[stem] = value * state[f"{stem}_mask"]
        elif not (name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in state):
            folded[name] = value
    return folded


def layer_sparsity(net: nn.Module, before: nn.Module | None = None) -> dict[str, float]:
    """Return the share of each layer's weights that are gone: exact zeros, and weights that only `before` has.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> _ = layer.weight.data.copy_(Tensor([[0, 1], [0, 1]]))
        >>> layer_sparsity(nn.Sequential(layer))
        {'0': 0.5}
    """
    kept, whole = _count_kept(net), _count_kept(net if before is None else before)
    return {name: 1 - left / max(size, whole.get(name, (0, 0))[1]) for name, (left, size) in kept.items()}


def overall_sparsity(net: nn.Module, before: nn.Module | None = None) -> float:
    """Return the share of all layers' weights that are gone; 0 below one in a hundred, which is no pruning."""
    kept, whole = _count_kept(net), _count_kept(net if before is None else before)
    sizes = [max(size, whole.get(name, (0, 0))[1]) for name, (_, size) in kept.items()]
    share = 1 - sum(left for left, _ in kept.values()) / sum(sizes) if sizes else 0.0
    return round(share, 4) if share >= LEAST else 0.0


def _count_kept(net: nn.Module) -> dict[str, tuple[int, int]]:
    """Return by layer the number of its weights that are not zero, and of all.

    Quantised weights are left out: their zeros are small weights that were rounded, not pruned ones.
    """
    layers = {name: m.weight for name, m in net.named_modules() if isinstance(m, (_ConvNd, nn.Linear))}
    weights = {name: weight for name, weight in layers.items() if type(weight) in (Tensor, nn.Parameter)}
    return {name: (int(weight.count_nonzero()), weight.numel()) for name, weight in weights.items()}
