"""Data of the page's plots as plain lists: ROC curves, histograms and means by class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.metrics.membership import RocCurve

POINTS = 200  # points of a curve: enough for a screen
BINS = 25


def roc_figure(curve: RocCurve) -> dict[str, Any]:
    """Return a ROC curve of about 200 points: half evenly spaced, half logarithmically, to keep all low FPRs."""
    last = curve.fpr.numel() - 1
    even = torch.linspace(0, last, POINTS // 2)
    steep = torch.logspace(0, float(torch.tensor(max(last, 1.0)).log10()), POINTS // 2) - 1
    corners = torch.tensor([0, last])
    keep = sorted(set(torch.cat([even, steep, corners]).long().clamp(0, last).tolist()))
    return {"kind": "roc", "fpr": curve.fpr[keep].tolist(), "tpr": curve.tpr[keep].tolist()}


def histogram(quantity: str, members: Tensor, nonmembers: Tensor) -> dict[str, Any]:
    """Return the shares of members and non-members in equal bins (samia_ppb, Fig. 1); confidence is in [0, 1]."""
    both = torch.cat([members, nonmembers]).double().cpu()
    top = 1.0 if quantity == "confidence" else max(float(both.quantile(0.99)), 1e-12)
    edges = torch.linspace(0, top, BINS + 1, dtype=torch.float64)
    sides = {"members": members, "nonmembers": nonmembers}
    shares = {name: _shares(side.double().cpu().clamp(0, top), edges) for name, side in sides.items()}
    means = {f"{name[:-1]}_mean": float(side.double().mean()) for name, side in sides.items()}
    return {"kind": "histogram", "quantity": quantity, "edges": edges.tolist(), **shares, **means}


def by_class(
    quantity: str, members: tuple[Tensor, Tensor], nonmembers: tuple[Tensor, Tensor], classes: int
) -> dict[str, Any]:
    """Return the means of a quantity over members and non-members of every class (Fig. 4); None for an empty class."""
    means = [[_mean(values[labels == label]) for label in range(classes)] for values, labels in (members, nonmembers)]
    return {"kind": "classes", "quantity": quantity, "members": means[0], "nonmembers": means[1]}


def _shares(values: Tensor, edges: Tensor) -> list[float]:
    counts: Tensor = torch.histogram(values, edges).hist
    return (counts / max(values.numel(), 1)).tolist()


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if values.numel() else None
