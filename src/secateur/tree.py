"""Operations on Params and Mask: dictionaries of tensors by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.interfaces import Mask, Params


def params_of(net: nn.Module) -> Params:
    """Return copies of a module's parameters."""
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def list_trained(net: nn.Module) -> list[str]:
    """Return the names of the trained parameters, which are also those sent; frozen ones have requires_grad=False."""
    return [name for name, value in net.named_parameters() if value.requires_grad]


def state_of(net: nn.Module) -> Params:
    """Return copies of a module's parameters and of its saved buffers."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def clone(tree: Mapping[str, Tensor]) -> Params:
    """Return a copy that shares no memory."""
    return {name: value.detach().clone() for name, value in tree.items()}


def to(tree: Mapping[str, Tensor], device: torch.device | str) -> Params:
    """Return the tensors on a device."""
    return {name: value.to(device) for name, value in tree.items()}


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Params:
    """Stack many trees into one with a leading axis."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def are_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return True if two trees of the same names hold equal tensors."""
    return a is b or all(a[name] is b[name] or torch.equal(a[name], b[name]) for name in a)


def mask_tree(tree: Mapping[str, Tensor], mask: Mask) -> Params:
    """Return the tree with dropped entries set to exactly zero; tensors without a mask are unchanged."""
    return {name: torch.where(mask[name], value, 0) if name in mask else value for name, value in tree.items()}


def apply_mask(net: nn.Module, mask: Mask) -> nn.Module:
    """Set the entries that the mask drops to zero, in place; return the module."""
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name in mask:
                value.masked_fill_(~mask[name].to(value.device), 0)
    return net


def share_kept(mask: Mask) -> float:
    """Return the fraction of entries that a mask keeps, over the tensors it names."""
    total = sum(value.numel() for value in mask.values())
    return sum(int(value.sum()) for value in mask.values()) / total if total else 1.0


def count(tree: Mapping[str, Tensor]) -> int:
    """Return the number of entries of a tree."""
    return sum(value.numel() for value in tree.values())


def nest(parts: Mapping[Any, Mapping[str, Tensor]]) -> Params:
    """Return the tensors of all parts as one tree, each by `part.name`."""
    return {f"{key}.{name}": value for key, tree in parts.items() for name, value in tree.items()}


def part(tree: Mapping[str, Tensor], key: object) -> Params:
    """Return one part of a nested tree."""
    prefix = f"{key}."
    return {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}


def parts(tree: Mapping[str, Tensor]) -> dict[str, Params]:
    """Return all parts of a nested tree by their keys, which hold no dot."""
    split: dict[str, Params] = {}
    for path, value in tree.items():
        key, name = path.split(".", 1)
        split.setdefault(key, {})[name] = value
    return split
