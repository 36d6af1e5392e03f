"""Mutual information between a pruned update and a client's data: priprune's Theorem 4.1, printed and corrected.

All values are in bits, the most favourable reading of the printed forms, whose first two terms are bits. Neither form
is by itself a bound of the mutual information; the docstring of `single_round` explains both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.errors import WrongInput, check_number, check_whole
from secateur.inference import per_example_gradients
from secateur.interfaces import Batch, Loss, Mask, Params

MEMORY = {"cpu": 2**29, "cuda": 2**33}  # bytes of the gradients of one block of examples
GAUSSIAN = math.log2(2 * math.pi * math.e)  # twice the entropy of a standard normal variable


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Non-zero eigenvalues of the covariance of per-example gradients."""

    eigenvalues: Tensor  # (d*,) float64, ascending
    examples: int

    @property
    def rank(self) -> int:
        """Rank d*, at most the number of examples minus one."""
        return len(self.eigenvalues)

    @property
    def log2_determinant(self) -> float:
        """Base-2 logarithm of the pseudo-determinant, the product of the non-zero eigenvalues."""
        return float(self.eigenvalues.log2().sum())


@dataclass(frozen=True)
class LeakageBound:
    """Terms of one form of Theorem 4.1, in bits."""

    constant: float
    mask: float  # term of the pruning rate p
    batch: float  # term of the batch size B
    covariance: float
    dimension: float  # term of d*

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return float(sum(getattr(self, term.name) for term in fields(self)))

    @property
    def gradient(self) -> float:
        """Part of the gradient: batch, covariance and dimension."""
        return self.batch + self.covariance + self.dimension

    def times(self, rounds: int) -> LeakageBound:
        """Return the bound with every term multiplied by `rounds`."""
        return LeakageBound(*(rounds * getattr(self, term.name) for term in fields(self)))


@dataclass(frozen=True)
class Forms:
    """Statement of the paper in the printed and the corrected form."""

    printed: LeakageBound
    corrected: LeakageBound


def single_round(spectrum: Spectrum, batch_size: int, rate: float, weights: int) -> Forms:
    """Return the leakage of one round by priprune Theorem 4.1 (Eq. 6), for pruning rate p and d = `weights` weights.

    `printed`: 1 - (p - 1) / (2 ln 2) + 2 log(1/B) + 2 log |det Sigma^(-1/2)| + d* log(2 pi e). It bounds nothing and
    serves only for comparison with the paper. Whitening is g = Sigma^(1/2) z, so the determinant has the wrong sign:
    larger gradients count as less leakage. The mean of B vectors in d* dimensions shrinks the volume by B^(d*/2), not
    by B. A sum of B has the covariance B I, not I. The mask counts as less than two bits, but has one bit for each
    weight. The tests contain updates that leak more than this form allows, even where it is negative.

    `corrected`: d H_b(p) + 1/2 log2 pdet Sigma + (d*/2) log2(2 pi e / B). It bounds the entropy of the mask plus the
    differential entropy of the mean gradient on the d* dimensions that the examples span. A Gaussian has the largest.
    It is the number of bits that specify mask and gradient to within a cell of volume one. Every halving of the cell
    adds d* bits. The value depends on the scale of the loss and may be negative. It is an upper bound of the leakage
    only for a fixed resolution, and compares settings at one resolution. d* and Sigma are those of the examples passed:
    more examples have a higher d*.

    Example:
        >>> found = single_round(Spectrum(torch.tensor([4.0, 16.0]), 3), batch_size=4, rate=0.5, weights=10)
        >>> found.printed.covariance, found.corrected.covariance, found.printed.batch, found.corrected.batch
        (-6.0, 3.0, -4.0, -2.0)
    """
    check_number("rate", rate, "[0, 1]")
    return _forms(spectrum, batch_size, (1 - rate) / (2 * math.log(2)), weights * binary_entropy(rate))


def single_round_prunefl(spectrum: Spectrum, batch_size: int, weights: int) -> Forms:
    """Return the leakage of one round of PruneFL, whose rate changes (priprune Eq. 25): the maximum over p.

    `printed` has 1 / (2 ln 2) instead of (1 - p) / (2 ln 2) in Eq. 6. `corrected` has one bit for every weight,
    H_b(1/2).
    """
    return _forms(spectrum, batch_size, 1 / (2 * math.log(2)), float(weights))


def over_rounds(forms: Forms, rounds: int) -> Forms:
    """Return the leakage of T rounds by priprune Corollary 4.2 (Eq. 15): T times one round.

    The chain rule gives a sum over rounds, each with its own covariance; it is T times one round if the covariance is
    constant. Rounds are taken as independent, and a mask that never changes is counted in every round.
    """
    check_whole("rounds", rounds)
    return Forms(forms.printed.times(rounds), forms.corrected.times(rounds))


def binary_entropy(rate: float) -> float:
    """Return the binary entropy H_b(p) in bits.

    Example:
        >>> binary_entropy(0.5), binary_entropy(0.0)
        (1.0, 0.0)
    """
    return -sum(share * math.log2(share) for share in (rate, 1 - rate) if share > 0) + 0.0


def spectrum_of(gradients: Tensor) -> Spectrum:
    """Return the eigenvalues of the covariance of gradients (n, d), by the (n, n) matrix of their inner products."""
    rows = gradients.double()
    return _spectrum(rows @ rows.T)


def gradient_spectrum(
    net: nn.Module,
    state: Params,
    batch: Batch,
    mask: Mask | None = None,
    loss: Loss = cross_entropy,
    memory: int | None = None,
) -> Spectrum:
    """Return the spectrum of a network's per-example gradients, in float64; BatchNorm is in eval mode.

    Entries that `mask` prunes are zero. Two blocks of examples, of at most `memory` bytes each (None: by device), are
    in memory at once. The gradients of earlier blocks are recomputed for each later one.
    """
    double = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
    inputs = batch.inputs.double()
    memory = MEMORY.get(inputs.device.type, MEMORY["cpu"]) if memory is None else memory
    size = max(1, memory // (8 * sum(value.numel() for value in net.parameters())))

    def gradients(rows: slice) -> Params:
        block = Batch(inputs[rows], batch.labels[rows])
        return tree.mask_tree(per_example_gradients(net, double, block, loss), mask or {})

    products = inputs.new_zeros(batch.size, batch.size)
    for rows in _blocks(batch.size, size):
        mine = gradients(rows)
        for others in _blocks(rows.stop, size):
            theirs = mine if others == rows else gradients(others)
            block = sum(mine[name].flatten(1) @ theirs[name].flatten(1).T for name in mine)
            products[rows, others] = block
            products[others, rows] = block.T  # type: ignore[union-attr]
    return _spectrum(products)


def _forms(spectrum: Spectrum, batch_size: int, printed_mask: float, mask: float) -> Forms:
    check_whole("batch_size", batch_size)
    log_b, log_det, rank = math.log2(batch_size), spectrum.log2_determinant, spectrum.rank
    return Forms(
        LeakageBound(1.0, printed_mask, -2 * log_b, -log_det, rank * GAUSSIAN),
        LeakageBound(0.0, mask, -rank / 2 * log_b, log_det / 2, rank / 2 * GAUSSIAN),
    )


def _spectrum(products: Tensor) -> Spectrum:
    """Return the spectrum from the inner products of n gradients.

    The inner products of the centred gradients, divided by n - 1, have the eigenvalues of the covariance. An eigenvalue
    counts as zero up to n eps times the mean squared norm of a gradient, the size of rounding errors.
    """
    n = len(products)
    if n < 2:
        raise WrongInput("gradients", f"of {n} example have no covariance; use at least 2")
    if not bool(products.isfinite().all()):
        raise WrongInput("gradients", "are not finite; use a model that has not diverged")
    centred = products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()
    eigenvalues = torch.linalg.eigvalsh((centred + centred.T) / (2 * (n - 1)))
    least = n * torch.finfo(torch.float64).eps * products.diagonal().mean()
    return Spectrum(eigenvalues[eigenvalues > least], n)


def _blocks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
