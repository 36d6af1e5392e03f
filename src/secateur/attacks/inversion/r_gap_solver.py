"""R-GAP's linear system: the input of a convolution from its output and the gradient of its weights.

The weight rows are W x = z, the gradient rows sum_p k_p x_(p + offset) = gradient. Padding is zero and not among the
unknowns, which replaces R-GAP's padding rows. The system of a 3 x 32 x 32 picture has 3072 unknowns. The gradient rows
are the same for every channel, so the Gram matrix is I (x) G^T G + W^T W. W^T W is the same for every picture.

Both kinds of rows are scaled to the same norm, since gradients are often thousands of times smaller. CNN6's worst layer
then has a condition number of 50 instead of 2500. A Cholesky factor with two rounds of refinement on the rows is then
as exact as an orthogonal factorisation. It is ten times faster, and the same on a GPU. If rank is missing, the
eigenvectors give the shortest solution.

An attacker may leave out rows whose right-hand side was dropped from the update (`Read`). The gradient rows then differ
between channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv2d, fold, unfold
from torch.nn.grad import conv2d_input

from secateur.attacks.inversion.r_gap_network import LinearMap

NOTHING = 1e-11  # share of the largest eigenvalue; singular values below its root, 3e-6, count as missing rank
LANCZOS = 20  # steps at each end of the spectrum
ROUNDS = 20  # largest number of refinements; a well-conditioned layer takes three


Apply = Callable[[Tensor], Tensor]


class Read(NamedTuple):
    """Masks of the rows that are used as equations; None: all rows."""

    z: Tensor | None = None  # (O, H', W') bool: weight rows
    gradient: Tensor | None = None  # (O, C h w) bool


EVERY = Read()


class Solved(NamedTuple):
    """Least-squares solution with its residual, rank and condition number."""

    x: Tensor  # (C, H, W)
    residual: float  # |A x - b| / |b|
    rank: int
    condition: float  # largest over smallest singular value of the numerical rank


@dataclass(frozen=True, eq=False)
class System:
    """Linear system A x = b of one layer; the gradient rows are multiplied by `weigh`."""

    layer: LinearMap
    k: Tensor  # (O, H', W'): dL/dz
    weigh: float = 1.0
    read: Read = EVERY

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return A x: the weight rows (O, H', W') and the gradient rows (O, C h w)."""
        layer = self.layer
        z = conv2d(x[None], layer.weight, None, layer.stride, layer.padding, layer.dilation)[0]
        gradient = self.weigh * (self.k.flatten(1) @ self._patches(x[None])[0].T)
        return select_read(z, self.read.z), select_read(gradient, self.read.gradient)

    def back(self, z: Tensor, gradient: Tensor) -> Tensor:
        """Return A^T times both kinds of rows, (C, H, W)."""
        z, gradient = select_read(z, self.read.z), select_read(gradient, self.read.gradient)
        patches = self.weigh * (gradient.T @ self.k.flatten(1))
        layer = self.layer
        size, window = layer.shape[1:], layer.weight.shape[2:]
        folded = fold(patches[None], size, window, layer.dilation, layer.padding, layer.stride)[0]
        return back(layer, z[None])[0] + folded

    def gradient_gram(self) -> Tensor:
        """Return G^T G by channel, (C, H W, H W); if all rows are read, it is the same for all channels."""
        (channels, *sides), rows = self.layer.shape, self.read.gradient
        pixels = sides[0] * sides[1]
        single = torch.eye(pixels, dtype=self.k.dtype, device=self.k.device).view(pixels, 1, *sides)
        g = self._patches(single) @ self.k.flatten(1).T  # (H W, h w, O)
        if rows is None:
            flat = g.flatten(1)
            return (flat @ flat.T).expand(channels, -1, -1)
        masks = rows.view(len(self.k), channels, -1).permute(1, 2, 0)  # (C, h w, O)
        read = ((g * mask).flatten(1) for mask in masks)
        return torch.stack([part @ part.T for part in read])

    def _patches(self, x: Tensor) -> Tensor:
        layer = self.layer
        return unfold(x, layer.weight.shape[2:], layer.dilation, layer.padding, layer.stride)


def select_read(values: Tensor, read: Tensor | None) -> Tensor:
    """Return the values of the rows that are read, and 0 elsewhere."""
    return values if read is None else torch.where(read, values, 0)


def back(layer: LinearMap, z: Tensor) -> Tensor:
    """Return W^T z of a batch, (N, C, H, W)."""
    shape, geometry = (len(z), *layer.shape), (layer.stride, layer.padding, layer.dilation)
    x: Tensor = conv2d_input(shape, layer.weight, z, *geometry)  # type: ignore[no-untyped-call]
    return x


def weight_gram(layer: LinearMap, read: Tensor | None = None) -> Tensor:
    """Return W^T W, (unknowns, unknowns), of the weight rows that are read; without `read` it fits every picture."""
    size = layer.shape[0] * layer.shape[1] * layer.shape[2]
    single = torch.eye(size, dtype=layer.weight.dtype, device=layer.weight.device).view(size, *layer.shape)
    if layer.shape[1:] == (1, 1):
        weight = select_read(layer.weight.flatten(1), None if read is None else read.flatten(1))
        return weight.T @ weight
    z = conv2d(single, layer.weight, None, layer.stride, layer.padding, layer.dilation)
    return back(layer, select_read(z, read)).flatten(1)


def solve(layer: LinearMap, k: Tensor, z: Tensor, gradient: Tensor, gram: Tensor, read: Read = EVERY) -> Solved:
    """Return the least-squares input of the layer; among equally good solutions the shortest.

    `z` (O, H', W') and `gradient` (O, C h w) are the right-hand sides, `gram` is the layer's `weight_gram`.
    """
    gradient_gram = System(layer, k, read=read).gradient_gram()
    ratio = float(gram.diagonal().sum() / gradient_gram.diagonal(dim1=1, dim2=2).sum())
    squared = ratio if math.isfinite(ratio) and ratio > 0 else 1.0
    system = System(layer, k, math.sqrt(squared), read)
    channels, pixels = gradient_gram.shape[:2]
    full = gram.clone().view(channels, pixels, channels, pixels)
    full.diagonal(dim1=0, dim2=2).add_(squared * gradient_gram.permute(1, 2, 0))
    divide, rank, condition = _inverse(full.view(gram.shape))
    aim = select_read(z, read.z), system.weigh * select_read(gradient, read.gradient)
    x, residual = _refine(system, aim, divide)
    return Solved(x, residual, rank, condition)


def _inverse(gram: Tensor) -> tuple[Apply, int, float]:
    """Return the function that applies the inverse of a Gram matrix A^T A, its rank, and the condition number of A."""
    largest = _largest_eigenvalue(lambda v: gram @ v, gram)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not int(failed):
        smallest = 1 / max(_largest_eigenvalue(lambda v: _solve_cholesky(v, factor), gram), 1e-300)
        if smallest > NOTHING * largest:
            return lambda v: _solve_cholesky(v, factor), len(gram), math.sqrt(largest / smallest)
    values, vectors = torch.linalg.eigh(gram)
    counts = values > max(NOTHING * float(values[-1]), 1e-300)
    values, vectors = values[counts], vectors[:, counts]
    condition = math.sqrt(float(values[-1] / values[0])) if len(values) else 1.0
    return lambda v: vectors @ ((vectors.T @ v) / values), len(values), condition


def _largest_eigenvalue(apply: Apply, like: Tensor) -> float:
    """Return the largest eigenvalue of a positive matrix by re-orthogonalised Lanczos from a fixed start vector."""
    start = torch.randn(len(like), generator=Generator().manual_seed(0), dtype=like.dtype).to(like.device)
    basis = [start / start.norm()]
    images = []
    for _ in range(min(LANCZOS, len(like))):
        images.append(apply(basis[-1]))
        rest = images[-1]
        for _ in range(2):  # one pass loses digits
            stacked = torch.stack(basis)
            rest = rest - stacked.T @ (stacked @ rest)
        if not float(rest.norm()) > 1e-12 * float(images[-1].norm()):
            break
        basis.append(rest / rest.norm())
    small = torch.stack(basis[: len(images)]) @ torch.stack(images).T
    return float(torch.linalg.eigvalsh((small + small.T) / 2)[-1])


def _refine(system: System, aim: tuple[Tensor, Tensor], divide: Apply) -> tuple[Tensor, float]:
    """Solve, then solve for the remaining residual while every correction is at most half the one before."""
    x = torch.zeros(system.layer.shape, dtype=aim[0].dtype, device=aim[0].device)
    left, before = aim, math.inf
    for _ in range(ROUNDS):
        change = divide(system.back(*left).flatten()).view(x.shape)
        size = float(change.norm())
        if not size < before / 2:
            break
        x, before = x + change, size
        reached = system.rows(x)
        left = (aim[0] - reached[0], aim[1] - reached[1])
    return x, _norm(*left) / max(_norm(*aim), 1e-300)


def _solve_cholesky(v: Tensor, factor: Tensor) -> Tensor:
    """Return (L L^T)^-1 v; `cholesky_solve` copies the factor first and takes ten times as long."""
    lower = torch.linalg.solve_triangular(factor, v[:, None], upper=False)
    both: Tensor = torch.linalg.solve_triangular(factor.mT, lower, upper=True)
    return both[:, 0]


def _norm(z: Tensor, gradient: Tensor) -> float:
    return float((z.square().sum() + gradient.square().sum()).sqrt())
