"""Collaborative SGD: N users send gradients every step."""

from __future__ import annotations

from secateur.federated.collaborative.training import CollaborativeResult, train_collaboratively

__all__ = ["CollaborativeResult", "train_collaboratively"]
