"""Solver of `layerwise`: the input of a convolution with ReLU and max-pooling from its outputs and its gradient.

Which position of a cell pooling took is not known. Given these positions all equations are linear in the input. So
estimates of both alternate, as in variational expectation maximisation: a Gaussian of the input, and the probabilities
of the positions. The input is x = mean + root w, where w is standard normal before any equation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from secateur.attacks.inversion.layerwise_network import PooledLayer

SAMPLES = 32  # of the Gaussian, by which its deviations are estimated
LOOSE = 0.1  # variance of a position that exceeds its output, relative to the outputs' mean square
FAR = 6  # deviations from an interval at which its probability is taken at most
VAGUE = 10.0  # times its variance before: an equation of more error is left out
UNLIKELY = 0.2  # a position that is less probable than this must not exceed the cell's output


class Prior(NamedTuple):
    """Gaussian of a layer's inputs before the update is seen."""

    mean: Tensor  # (n,)
    root: Tensor  # (n, n); the covariance is root root^T


class LayerEvidence(NamedTuple):
    """Values that the update shows of one layer."""

    outputs: Tensor  # (O L,) after pooling
    errors: Tensor  # (O L,) variances of the outputs
    slopes: Tensor  # (O L,) dL/d output
    low: Tensor  # (O, C h w), the lowest gradient of the weight
    high: Tensor  # (O, C h w)


class Gaussian(NamedTuple):
    """Mean (n,) and samples of deviations from it (n, SAMPLES), in coordinates w."""

    mean: Tensor
    deviations: Tensor


class SolvedLayer(NamedTuple):
    """Input of one layer."""

    inputs: Tensor  # (n,)
    errors: Tensor  # (n,) variances of the inputs
    routing: Tensor  # (O L, k), probability that pooling took each position of a cell
    residual: Tensor  # squared error of the gradient outside its bounds, relative to the gradient


class PreparedLayer(NamedTuple):
    """Tensors of a layer and its prior that all targets share."""

    layer: PooledLayer
    prior: Prior
    rows: Tensor  # (O L, k, n), slope of each position of each cell by w
    base: Tensor  # (O L, k), value of each position at w = 0
    positive: bool  # True if the inputs are outputs of ReLU


class Equations(NamedTuple):
    """Linear equations `rows w = values` with independent errors."""

    rows: Tensor  # (m, n)
    values: Tensor  # (m,)
    variances: Tensor  # (m,)


def prepare(layer: PooledLayer, prior: Prior, positive: bool) -> PreparedLayer:
    """Return the tensors of a layer that depend on no update."""
    base = layer.in_cells(prior.mean[None])[0]
    convolved = layer.convolve(prior.root.T.reshape(-1, *layer.shape)).flatten(2)  # (n, O, P)
    rows = convolved[:, :, layer.cells].flatten(1, 2).permute(1, 2, 0).contiguous()
    return PreparedLayer(layer, prior, rows, base, positive)


@dataclass(frozen=True)
class LayerSolver:
    """Alternation between the input's Gaussian and the probabilities of the positions."""

    iterations: int = 30
    precision: float = 1e-3  # error of the outputs and of the gradient, relative to their root mean square
    share: float = 0.1  # of the gradient's log-likelihood in the probabilities: its entries' errors go together
    hardening: float = 0.02  # last factor of the variances that come from unknown positions
    constant: float = 0.4  # share of the iterations before these variances fall
    damping: float = 0.5  # share of the probabilities that is kept

    def solve(self, prepared: PreparedLayer, evidence: LayerEvidence, rng: Generator) -> SolvedLayer:
        """Return the input that fits the outputs and the gradient of a layer."""
        like = prepared.rows
        cells, places, size = like.shape
        routing = like.new_full((cells, places), 1 / places)
        state = Gaussian(like.new_zeros(size), torch.randn(size, SAMPLES, generator=rng, dtype=like.dtype))
        for iteration in range(self.iterations):
            passed = max(0.0, (iteration / self.iterations - self.constant) / (1 - self.constant))
            factor = self.hardening**passed
            gradient = self._equate_gradient(prepared, evidence, routing, state, factor)
            equations = [
                gradient,
                self._equate_outputs(prepared, evidence, routing, state, factor),
                self._bound_outputs(prepared, evidence, routing, state, factor),
                self._bound_inputs(prepared, state),
            ]
            rows, values, variances = (torch.cat(part) for part in zip(*map(informative, equations), strict=True))
            state = condition(rows, values, variances, rng)
            if places > 1:
                now = self._weigh(prepared, evidence, routing, state, gradient)
                routing = self.damping * routing + (1 - self.damping) * now
        inputs = prepared.prior.mean + prepared.prior.root @ state.mean
        shown = weight_gradient(prepared.layer, inputs, evidence, routing)
        nearest = torch.minimum(torch.maximum(shown, evidence.low), evidence.high)
        residual = (shown - nearest).square().sum() / nearest.square().sum().clamp_min(1e-300)
        errors = (prepared.prior.root @ state.deviations).square().mean(1)
        return SolvedLayer(inputs, errors, routing, residual)

    def _equate_gradient(
        self, prepared: PreparedLayer, evidence: LayerEvidence, routing: Tensor, state: Gaussian, factor: float
    ) -> Equations:
        """Return the equations of the weight's gradient, which are linear in the input for a given routing."""
        layer, prior = prepared.layer, prepared.prior
        kernel = gradient_rows(layer, evidence, routing)  # (O h w, H W), equal for all channels of the input
        channels, pixels = layer.shape[0], kernel.shape[1]
        rows = kernel @ prior.root.view(channels, pixels, -1)  # (C, O h w, n)
        outputs = layer.weight.shape[0]
        rows = rows.view(channels, outputs, -1, rows.shape[-1]).transpose(0, 1).flatten(0, 2)
        base = (prior.mean.view(channels, pixels) @ kernel.T).view(channels, outputs, -1).transpose(0, 1).flatten()
        low, high = evidence.low.flatten(), evidence.high.flatten()
        shown = torch.where(low.isfinite(), low, torch.where(high.isfinite(), high, 0))
        floor = self.precision**2 * shown.square().mean()
        noise = factor * spread_of_gradient(prepared, evidence, routing, state).flatten() + floor
        return bound_loosely(rows, base, state, noise, low, high)

    def _equate_outputs(
        self, prepared: PreparedLayer, evidence: LayerEvidence, routing: Tensor, state: Gaussian, factor: float
    ) -> Equations:
        """Return the equations of outputs above 0: the mean of the cell's positions is the output."""
        on = evidence.outputs > 0
        rows, base = prepared.rows, prepared.base
        draws = (rows.flatten(0, 1) @ (state.mean[:, None] + state.deviations)).view(*routing.shape, -1)
        draws = draws + base[..., None]
        mean = (routing[..., None] * draws).sum(1, keepdim=True)
        spread = (routing[..., None] * (draws - mean).square()).sum(1).mean(1)
        values = evidence.outputs - (routing * base).sum(1)
        mixed = torch.einsum("ck,ckn->cn", routing[on], rows[on])
        errors = factor * spread + evidence.errors + self._floor(evidence)
        return Equations(mixed, values[on], errors[on])

    def _bound_outputs(
        self, prepared: PreparedLayer, evidence: LayerEvidence, routing: Tensor, state: Gaussian, factor: float
    ) -> Equations:
        """Return equations that move positions back to the cell's output which exceed it now."""
        values = prepared.rows @ state.mean + prepared.base
        limit = evidence.outputs[:, None].expand_as(values)
        above = (values > limit) & ((limit <= 0) | (routing < UNLIKELY))
        error = LOOSE * factor * evidence.outputs.square().mean()
        return Equations(prepared.rows[above], (limit - prepared.base)[above], error.expand(int(above.sum())))

    def _bound_inputs(self, prepared: PreparedLayer, state: Gaussian) -> Equations:
        """Return the equations of inputs that ReLU made: they are at least 0."""
        root, mean = prepared.prior.root, prepared.prior.mean
        if not prepared.positive:
            return Equations(root[:0], mean[:0], mean[:0])
        noise = self.precision**2 * root.square().sum(1).mean().expand(len(root))
        return bound(root, mean, state, noise, torch.zeros_like(mean), torch.full_like(mean, math.inf))

    def _floor(self, evidence: LayerEvidence) -> Tensor:
        """Return the variance of the outputs' error beside unknown positions."""
        return self.precision**2 * evidence.outputs.square().mean()

    def _weigh(
        self, prepared: PreparedLayer, evidence: LayerEvidence, routing: Tensor, state: Gaussian, gradient: Equations
    ) -> Tensor:
        """Return (O L, k) the probability of each position, from the outputs and the gradient."""
        flat = prepared.rows.flatten(0, 1)
        values = (flat @ state.mean).view_as(routing) + prepared.base
        deviation = (flat @ state.deviations).square().mean().sqrt()
        inputs = prepared.prior.mean + prepared.prior.root @ state.mean
        shown = weight_gradient(prepared.layer, inputs, evidence, routing)
        gap = (gradient.values - gradient.rows @ state.mean).view_as(shown)
        weights = (1 / gradient.variances).view_as(shown)
        likely = likelihood_of_outputs(values, evidence.outputs, deviation)
        likely = likely + self.share * likelihood_of_gradient(prepared.layer, inputs, evidence, routing, gap, weights)
        return likely.softmax(1)


def bound(rows: Tensor, base: Tensor, state: Gaussian, noise: Tensor, low: Tensor, high: Tensor) -> Equations:
    """Return equations that stand for low <= f + error <= high with f = rows w + base: Newton's step at the mean."""
    mean = rows @ state.mean + base
    values, variances = truncate(mean, noise.sqrt(), low, high)
    return Equations(rows, values - base, variances)


def bound_loosely(rows: Tensor, base: Tensor, state: Gaussian, noise: Tensor, low: Tensor, high: Tensor) -> Equations:
    """Return the equations of `bound`, with the variance of f added to the noise where the interval is wide."""
    variance, width = (rows @ state.deviations).square().mean(1), ((high - low) / 2).square()
    wide = torch.where(width.isfinite(), width / (width + variance).clamp_min(1e-300), 1)
    return bound(rows, base, state, noise + variance * wide, low, high)


def truncate(mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return m + Z' / h and 1 / h, for the probability Z of [low, high] under N(m, s^2).

    Z' is the slope of log Z by m, and -h its curvature.
    """
    near = torch.minimum(torch.maximum(mean, low - FAR * deviation), high + FAR * deviation)
    below, above = (low - near) / deviation, (high - near) / deviation
    narrow = above - below < 1e-3
    probability = (torch.special.ndtr(above) - torch.special.ndtr(below)).clamp_min(1e-300)
    density = [torch.exp(-0.5 * t.square()) / math.sqrt(2 * math.pi) for t in (below, above)]
    edge = [t.nan_to_num(0, 0, 0) * part for t, part in zip((below, above), density, strict=True)]
    slope = torch.where(narrow, (below + above) / 2, (density[0] - density[1]) / probability)
    curvature = slope.square() + (edge[1] - edge[0]) / probability
    curvature = torch.where(narrow, 1, curvature.clamp(1e-9, 1))
    return near + deviation * slope / curvature, deviation.square() / curvature


def informative(equations: Equations) -> Equations:
    """Return the equations whose variance is not far above that of their values before any equation."""
    used = equations.variances < VAGUE * equations.rows.square().sum(1)
    return Equations(*(part[used] for part in equations))


def condition(rows: Tensor, values: Tensor, variances: Tensor, rng: Generator) -> Gaussian:
    """Return the Gaussian of w, standard normal before, after the equations `rows w = values`.

    With A the rows and R the variances the precision is I + A^T R^-1 A. Fewer equations than unknowns are solved by
    A A^T + R instead (Rasmussen and Williams 2006, Eqs. 2.8 and 2.11).
    """
    count, size = rows.shape
    noise = torch.randn(size, SAMPLES, generator=rng, dtype=rows.dtype)
    if count >= size:
        scaled = rows / variances.sqrt()[:, None]
        precision = scaled.T @ scaled
        precision.diagonal().add_(1)
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve((rows.T @ (values / variances))[:, None], factor)[:, 0]
        return Gaussian(mean, torch.linalg.solve_triangular(factor.T, noise, upper=True))
    gram = rows @ rows.T
    gram.diagonal().add_(variances)
    factor = torch.linalg.cholesky(gram)
    error = torch.randn(count, SAMPLES, generator=rng, dtype=rows.dtype) * variances.sqrt()[:, None]
    right = torch.cat([values[:, None], -(rows @ noise + error)], 1)
    solved = rows.T @ torch.cholesky_solve(right, factor)
    return Gaussian(solved[:, 0], noise + solved[:, 1:])


def likelihood_of_outputs(values: Tensor, outputs: Tensor, deviation: Tensor) -> Tensor:
    """Return (M, k) log N(output; value_r, s) + sum over other positions of log P(value < output)."""
    gap = (outputs[:, None] - values) / deviation
    below = (0.5 * (1 + torch.erf(gap / math.sqrt(2)))).clamp_min(1e-12).log()
    return -0.5 * gap.square() + below.sum(1, keepdim=True) - below


def likelihood_of_gradient(
    layer: PooledLayer, inputs: Tensor, evidence: LayerEvidence, routing: Tensor, gap: Tensor, weights: Tensor
) -> Tensor:
    """Return (O L, k) the log-likelihood of the gradient if one cell took a position, and others are as in `routing`.

    `gap` (O, C h w) is the observed gradient less that of the routing, and `weights` are its inverse variances. With
    e = gap + s mean the value is - |e - s patch|^2 / 2 without the part that all positions share.
    """
    patches = patches_of(layer, inputs[None])[0]  # (L, k, C h w)
    channels = layer.weight.shape[0]
    slopes = mask_slopes(evidence).view(channels, -1)
    mean = torch.einsum("olk,lkp->olp", routing.view(channels, *patches.shape[:2]), patches)
    rest = gap[:, None] + slopes[..., None] * mean  # (O, L, C h w)
    cross = torch.einsum("olp,lkp->olk", rest * weights[:, None], patches)
    squares = torch.einsum("op,lkp->olk", weights, patches.square())
    likely = slopes[..., None] * cross - 0.5 * slopes.square()[..., None] * squares
    return likely.flatten(0, 1)


def spread_of_gradient(prepared: PreparedLayer, evidence: LayerEvidence, routing: Tensor, state: Gaussian) -> Tensor:
    """Return (O, C h w) the variance of the gradient by unknown positions: sum of s^2 Var(patch)."""
    layer, prior = prepared.layer, prepared.prior
    draws = prior.mean + (prior.root @ (state.mean[:, None] + state.deviations)).T
    channels = layer.weight.shape[0]
    squares = mask_slopes(evidence).square().view(channels, -1)
    shares = routing.view(channels, squares.shape[1], -1)
    total = torch.zeros_like(evidence.low)
    for patches in patches_of(layer, draws):
        mean = torch.einsum("olk,lkp->olp", shares, patches)
        second = torch.einsum("ol,olk,lkp->op", squares, shares, patches.square())
        total += (second - torch.einsum("ol,olp->op", squares, mean.square())).clamp_min(0)
    return total / len(draws)


def gradient_rows(layer: PooledLayer, evidence: LayerEvidence, routing: Tensor) -> Tensor:
    """Return (O h w, H W): the slope of each entry of the gradient by each pixel of its input channel."""
    flow = spread_slopes(layer, evidence, routing)  # (O, P)
    patches, pixels = layer.patches, math.prod(layer.shape[1:])
    rows = flow.new_zeros(len(flow), len(patches), pixels + 1)
    rows.scatter_add_(2, patches.expand(len(flow), -1, -1), flow[:, None].expand(-1, len(patches), -1))
    return rows[..., :pixels].flatten(0, 1)


def weight_gradient(layer: PooledLayer, inputs: Tensor, evidence: LayerEvidence, routing: Tensor) -> Tensor:
    """Return (O, C h w) the gradient of the weight for an input (n,) and a routing."""
    channels, outputs = layer.shape[0], layer.weight.shape[0]
    shown = inputs.view(channels, -1) @ gradient_rows(layer, evidence, routing).T
    return shown.view(channels, outputs, -1).transpose(0, 1).flatten(1)


def spread_slopes(layer: PooledLayer, evidence: LayerEvidence, routing: Tensor) -> Tensor:
    """Return (O, P) dL/d of the convolution's outputs: the slope of each cell at its positions."""
    shares = mask_slopes(evidence)[:, None] * routing
    flow = shares.new_zeros(layer.weight.shape[0], layer.patches.shape[1])
    flow[:, layer.cells] = shares.view(len(flow), *layer.cells.shape)
    return flow


def input_slopes(layer: PooledLayer, evidence: LayerEvidence, routing: Tensor) -> Tensor:
    """Return (n,) dL/d input."""
    flow = spread_slopes(layer, evidence, routing)
    columns = layer.weight.flatten(2).permute(1, 2, 0) @ flow  # (C, h w, P)
    pixels = math.prod(layer.shape[1:])
    total = flow.new_zeros(layer.shape[0], pixels + 1)
    index = layer.patches.flatten().expand(layer.shape[0], -1)
    return total.scatter_add_(1, index, columns.flatten(1))[:, :pixels].flatten()


def mask_slopes(evidence: LayerEvidence) -> Tensor:
    """Return the slopes of outputs that ReLU lets through, 0 elsewhere."""
    return torch.where(evidence.outputs > 0, evidence.slopes, 0)


def patches_of(layer: PooledLayer, inputs: Tensor) -> Tensor:
    """Return the patches of inputs (N, n) by cell and position, (N, L, k, C h w)."""
    pixels = inputs.view(len(inputs), layer.shape[0], -1)
    padded = torch.cat([pixels, pixels.new_zeros(*pixels.shape[:2], 1)], 2)
    patches = padded[:, :, layer.patches].flatten(1, 2)  # (N, C h w, P)
    return patches[:, :, layer.cells].permute(0, 2, 3, 1)


def moments(samples: Tensor) -> Prior:
    """Return the Gaussian with the moments of samples (N, n), with a little more variance."""
    mean = samples.mean(0)
    covariance = torch.cov(samples.T)
    covariance.diagonal().add_(1e-3 * covariance.diagonal().mean() + 1e-12)
    return Prior(mean, torch.linalg.cholesky(covariance))


def best(solutions: Sequence[SolvedLayer]) -> SolvedLayer:
    """Return the solution of the smallest residual."""
    return min(solutions, key=lambda one: float(one.residual))
