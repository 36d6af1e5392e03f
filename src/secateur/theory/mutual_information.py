"""How much a pruned update can tell of a client's data by priprune's Theorem 4.1, as it is printed and corrected.

All in bits: of the printed forms this is the kindest reading, as their first two terms are bits. Read `single_round`
first. Neither form is a bound of the mutual information as it stands; their docstrings say what each is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.errors import WrongInput
from secateur.inference import per_example_gradients
from secateur.interfaces import Batch, Loss, Mask, Params

MEMORY = {"cpu": 2**29, "cuda": 2**33}  # bytes for the gradients of one block of examples
GAUSSIAN = math.log2(2 * math.pi * math.e)  # twice the entropy of a standard normal number


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The covariance of per-example gradients by its non-zero eigenvalues."""

    eigenvalues: Tensor  # (d*,) float64, rising
    examples: int

    @property
    def rank(self) -> int:
        """d*, never more than the examples less one."""
        return len(self.eigenvalues)

    @property
    def log2_determinant(self) -> float:
        """The logarithm of the pseudo-determinant, the product of the non-zero eigenvalues."""
        return float(self.eigenvalues.log2().sum())


@dataclass(frozen=True)
class LeakageBound:
    """One form of Theorem 4.1, term by term, in bits."""

    constant: float
    mask: float  # what the pruning rate p adds
    batch: float  # what the batch size B adds
    covariance: float
    dimension: float  # what d* adds

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def gradient(self) -> float:
        """The part that the gradient has in it: batch, covariance and dimension."""
        return self.batch + self.covariance + self.dimension

    def times(self, rounds: int) -> LeakageBound:
        """Every term so many times."""
        return LeakageBound(*(rounds * getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Forms:
    """A statement of the paper in both forms."""

    printed: LeakageBound
    corrected: LeakageBound


def single_round(spectrum: Spectrum, batch_size: int, rate: float, weights: int) -> Forms:
    """What one round leaks by priprune Theorem 4.1 (Eq. 6), for a pruning rate p of so many prunable weights.

    `printed`: 1 - (p - 1) / (2 ln 2) + 2 log(1/B) + 2 log |det Sigma^(-1/2)| + d* log(2 pi e). It is no bound of
    anything, and serves to be compared with the paper. Whitening is g = Sigma^(1/2) z, so the determinant has the wrong
    sign: larger gradients count as less leakage. The mean of B vectors in d* dimensions shrinks the volume by B^(d*/2),
    not by B. A sum of B has the covariance B I, not I. One bit and a bit stand for a mask that has one for each weight.
    The tests have updates that tell more than it allows, even where it is negative.

    `corrected`: d H_b(p) + 1/2 log2 pdet Sigma + (d*/2) log2(2 pi e / B). It bounds the entropy of the mask and the
    differential entropy of the mean gradient on the d* dimensions that its examples span (a Gaussian has the most), so
    it is the number of bits that name mask and gradient to within a cell of volume one. At finer cells there are more
    bits, d* of them for every halving; it depends on the loss's scale, and may be negative. It is an upper bound of the
    leakage only next to a resolution; what it orders is how settings compare at one resolution. d* and Sigma are those
    of the examples that were given: more examples have a higher d*.

    Example:
        >>> found = single_round(Spectrum(torch.tensor([4.0, 16.0]), 3), batch_size=4, rate=0.5, weights=10)
        >>> found.printed.covariance, found.corrected.covariance, found.printed.batch, found.corrected.batch
        (-6.0, 3.0, -4.0, -2.0)
    """
    if not 0 <= rate <= 1:
        raise WrongInput("rate", f"{rate} is not allowed; give the share of weights that is removed, from 0 to 1")
    return _forms(spectrum, batch_size, (1 - rate) / (2 * math.log(2)), weights * binary_entropy(rate))


def single_round_prunefl(spectrum: Spectrum, batch_size: int, weights: int) -> Forms:
    """The same for PruneFL, whose rate changes as it adapts (priprune Eq. 25): each form at its highest over p.

    `printed` has 1 / (2 ln 2) where Eq. 6 has (1 - p) / (2 ln 2), `corrected` one bit for every weight, H_b(1/2).
    """
    return _forms(spectrum, batch_size, 1 / (2 * math.log(2)), float(weights))


def over_rounds(forms: Forms, rounds: int) -> Forms:
    """What T rounds leak by priprune Corollary 4.2 (Eq. 15): T times one round.

    By the chain rule a sum over rounds holds, each with its own covariance; T times one is that where it stays the
    same. It takes rounds for independent, and counts a mask that never changes in every one of them.
    """
    if rounds < 1:
        raise WrongInput("rounds", f"{rounds} is not allowed; give a whole number from 1")
    return Forms(forms.printed.times(rounds), forms.corrected.times(rounds))


def binary_entropy(rate: float) -> float:
    """H_b(p) in bits.

    Example:
        >>> binary_entropy(0.5), binary_entropy(0.0)
        (1.0, 0.0)
    """
    return -sum(share * math.log2(share) for share in (rate, 1 - rate) if share > 0) + 0.0


def spectrum_of(gradients: Tensor) -> Spectrum:
    """The eigenvalues of the covariance of (n, d) gradients, through the (n, n) matrix of their products."""
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
    """The same of a network's per-example gradients, in float64, zero where `mask` prunes; BatchNorm in eval mode.

    Two blocks of examples, of at most `memory` bytes each (None: what suits the device), are held at once; the
    gradients of earlier blocks are taken again for each later one.
    """
    double = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
    inputs = batch.inputs.double()
    memory = MEMORY.get(inputs.device.type, MEMORY["cpu"]) if memory is None else memory
    size = max(1, memory // (8 * sum(value.numel() for value in net.parameters())))

    def gradients(rows: slice) -> Params:
        some = Batch(inputs[rows], batch.labels[rows])
        return tree.masked(per_example_gradients(net, double, some, loss), mask or {})

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
    if batch_size < 1:
        raise WrongInput("batch_size", f"{batch_size} is not allowed; give a whole number from 1")
    log_b, log_det, rank = math.log2(batch_size), spectrum.log2_determinant, spectrum.rank
    return Forms(
        LeakageBound(1.0, printed_mask, -2 * log_b, -log_det, rank * GAUSSIAN),
        LeakageBound(0.0, mask, -rank / 2 * log_b, log_det / 2, rank / 2 * GAUSSIAN),
    )


def _spectrum(products: Tensor) -> Spectrum:
    """From the inner products of n gradients: those of the centred ones over n - 1 have the covariance's eigenvalues.

    An eigenvalue counts as zero up to n eps times the mean square of a gradient, what rounding makes of it.
    """
    n = len(products)
    if n < 2:
        raise WrongInput("gradients", f"of {n} example have no covariance; give at least 2")
    if not bool(products.isfinite().all()):
        raise WrongInput("gradients", "are not finite; give a model that has not diverged")
    centred = products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()
    eigenvalues = torch.linalg.eigvalsh((centred + centred.T) / (2 * (n - 1)))
    least = n * torch.finfo(torch.float64).eps * products.diagonal().mean()
    return Spectrum(eigenvalues[eigenvalues > least], n)


def _blocks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
