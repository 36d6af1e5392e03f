"""Correctness: the gap attack, for which a label is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Generator

from secateur.catalogue import method
from secateur.interfaces import BlackBox, Candidates, Guesses, InOut, Shadow


@method("attack", "correctness", "samia_ppb", sees="labels", shadows="none")
@dataclass(frozen=True)
class Correctness:
    """Member where the model's label is right: as accurate as the generalisation gap is wide (Yeom et al. 2018)."""

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """There is nothing to learn."""
        return self

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """One where argmax f(x) = y, zero elsewhere."""
        right = box.predict(candidates.batch.inputs).argmax(1) == candidates.batch.labels
        return Guesses(right.double(), right)
