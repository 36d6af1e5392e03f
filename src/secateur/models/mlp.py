"""The two-layer network for tables."""

from __future__ import annotations

from math import prod

from torch import nn

from secateur.models.parts import model


@model("mlp", "samia_ppb")
def mlp(input_shape: tuple[int, ...] = (446,), classes: int = 30, dropout: float = 0.1) -> nn.Module:
    """The 256-128 network with dropout for tables of SAMIA (USENIX Security 2022, Section 5.1.2); flattens images."""
    hidden = [nn.Flatten(), nn.Linear(prod(input_shape), 256), nn.ReLU(), nn.Dropout(dropout)]
    hidden += [nn.Linear(256, 128), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*hidden, nn.Linear(128, classes))
