"""Collaborative SGD: N users send gradients every step."""

from __future__ import annotations

from secateur.federated.collaborative.training import Collaborated, train_collaboratively

__all__ = ["Collaborated", "train_collaboratively"]
