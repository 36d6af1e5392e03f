"""Masks from scores: the functions that all pruners share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from secateur.errors import WrongInput, check_number, unknown
from secateur.interfaces import Mask
from secateur.pruning.channels import CONVS

Scope = Literal["layer", "global"]
LAYERS = (*CONVS, nn.Linear)


def check_name(field: str, value: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not among the allowed ones."""
    if value not in allowed:
        raise unknown(field, value, allowed)


def weights_of(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that unstructured pruning selects from: every Conv's and Linear's, first and last included."""
    parameters = dict(net.named_parameters())  # a tensor that two layers share appears once
    names = [f"{name}.weight" if name else "weight" for name, m in net.named_modules() if isinstance(m, LAYERS)]
    weights = {name: parameters[name] for name in names if name in parameters}
    if not weights:
        raise WrongInput("model", "it has no Conv or Linear layer, so there is nothing to prune")
    return weights


def prune_lowest(scores: Mapping[str, Tensor], sparsity: float, scope: str) -> Mask:
    """Drop exactly int(sparsity * n) entries with the lowest scores; of equal ones the first in position.

    With scope "layer" n is counted per tensor, with "global" over all tensors. With "global", a tensor that would lose
    all entries keeps its best one; the next lowest entry elsewhere is dropped instead. A warning names such tensors.

    Example:
        >>> prune_lowest({"a": torch.tensor([3., 1.]), "b": torch.tensor([2., 4.])}, .5, "global")
        {'a': tensor([ True, False]), 'b': tensor([False,  True])}
    """
    mask, floored = select(scores, sparsity, scope)
    warn_of_floor(floored)
    return mask


def select(scores: Mapping[str, Tensor], sparsity: float, scope: str) -> tuple[Mask, list[str]]:
    """Return the mask of `prune_lowest` without its warning, and the names of tensors that it would have emptied."""
    check_number("sparsity", sparsity, "[0, 1)")
    check_name("scope", scope, get_args(Scope))
    for name, value in scores.items():
        if not value.isfinite().all():
            raise WrongInput("model", f"the pruning scores of {name} are not finite; check its weights and the data")
    if scope == "layer":
        return {name: _mask_lowest({name: value}, sparsity)[name] for name, value in scores.items()}, []
    mask = _mask_lowest(scores, sparsity)
    empty = [name for name, value in mask.items() if not value.any()]
    if not empty:
        return mask, []
    total = sum(value.numel() for value in scores.values())
    if int(sparsity * total) > total - len(scores):
        most = 1 - len(scores) / total
        raise WrongInput("sparsity", f"{sparsity} would empty a layer; with this model and scope at most {most:.6g}")
    return _mask_lowest({name: _protect_best(value) for name, value in scores.items()}, sparsity), empty


def warn_of_floor(names: Iterable[str]) -> None:
    """Warn about the layers that pruning would have emptied."""
    if names := sorted(set(names)):
        warnings.warn(f"pruning would have emptied {', '.join(names)}: the best of each was kept", stacklevel=3)


def _mask_lowest(scores: Mapping[str, Tensor], sparsity: float) -> Mask:
    flat = torch.cat([value.detach().flatten() for value in scores.values()])
    count = int(sparsity * flat.numel())
    keep = torch.ones_like(flat, dtype=torch.bool)
    if count:
        limit = flat.kthvalue(count).values  # many times faster than sorting millions of weights
        keep = flat >= limit
        ties = (flat == limit).nonzero().flatten()
        keep[ties[: count - int((~keep).sum())]] = False
    parts = torch.split_with_sizes(keep, [value.numel() for value in scores.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(scores.items(), parts, strict=True)}


def _protect_best(value: Tensor) -> Tensor:
    flat = value.detach().flatten().clone()
    best = (flat == flat.max()).nonzero()[-1]  # the last of equal entries, which is dropped last
    flat[best] = torch.inf
    return flat.view(value.shape)
