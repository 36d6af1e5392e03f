"""Triton kernels of PriPrune's client update: each kernel is one pass over a weight tensor of all clients.

Tensors are (lanes, size); a lane is a client. A tensor that all lanes share is (1, size), and its flag, APART or OWN,
is 0. Masks are int8. priprune_ops.py launches the kernels.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _locate(size, lanes, BLOCK: tl.constexpr):
    """Return a program's lane, the lane's offset, the program's entries and their bounds mask.

    Programs of the same entries in different lanes are adjacent.
    """
    program = tl.program_id(0)
    lane = program % lanes
    entry = program // lanes * BLOCK + tl.arange(0, BLOCK)
    return lane, lane.to(tl.int64) * size, entry, entry < size


@triton.jit
def _get(values, start, entry, inside):
    return tl.load(values + start + entry, mask=inside, other=0)


@triton.jit
def reload(
    received, saved, withheld, keep, out, size, lanes, APART: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the received weights, with those last withheld restored from `saved`; 0 where the base pruned."""
    _, start, entry, inside = _locate(size, lanes, BLOCK)
    hidden = _get(withheld, start, entry, inside) != 0
    value = tl.where(hidden, _get(saved, start, entry, inside), _get(received, start * APART, entry, inside))
    kept = _get(keep, start * OWN, entry, inside) != 0
    tl.store(out + start + entry, tl.where(kept, value, 0.0), mask=inside)


@triton.jit
def draw(weight, logits, noise, out, size, lanes, BLOCK: tl.constexpr):
    """Store the weights times 1 - v for the hard sample v of Eq. 18; a NaN in a gives NaN."""
    _, start, entry, inside = _locate(size, lanes, BLOCK)
    odds = _get(logits, start, entry, inside) + _get(noise, start, entry, inside)
    share = tl.where(odds > 0, 0.0, tl.where(odds == odds, 1.0, odds))
    tl.store(out + start + entry, _get(weight, start, entry, inside) * share, mask=inside)


@triton.jit
def magnitude(
    gradient, keep, out, size, lanes, OWN: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum |g| of the kept entries over a stretch of entries, into (stretches, lanes)."""
    program = tl.program_id(0)
    start = (program % lanes).to(tl.int64) * size
    total = tl.zeros((BLOCK,), dtype=gradient.dtype.element_ty)
    for step in range(0, STRETCH, BLOCK):
        entry = program // lanes * STRETCH + step + tl.arange(0, BLOCK)
        inside = entry < size
        kept = _get(keep, start * OWN, entry, inside) != 0
        total += tl.abs(tl.where(kept, _get(gradient, start, entry, inside), 0.0))
    tl.store(out + program, tl.sum(total, 0))


@triton.jit
def _slope(a, noise, weight, pull, steep, kept, tau, privacy, sharing):
    """Return the slope of `objective` in a: L_acc by the soft sample's s (1 - s) / tau, L_pri and L_sha by alpha.

    All exponentials are of -|x|, so that nothing overflows and no digit is lost. `pull` is the slope of L_acc in
    w (1 - v).
    """
    s = tl.exp(-tl.abs((a + noise) / tau))
    accuracy = weight * pull * (s / ((1 + s) * (1 + s))) / tau
    q = tl.exp(-tl.abs(a))
    low, high = q / (1 + q), 1 / (1 + q)
    rest = tl.where(a > 0, low, high)  # 1 - alpha
    return tl.where(kept, sharing * low * high - privacy * steep * rest, 0.0) - accuracy


@triton.jit
def learn(
    logits, first, second, noise, weight, pull, gradient, keep, numbers, last,
    new_logits, new_first, new_second, values, withheld, saved,
    size, lanes, sharing, rate, OWN: tl.constexpr, LAST: tl.constexpr,
    BETA_1: tl.constexpr, BETA_2: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make one step of Adam on a; `numbers` (lanes, 4): tau, L_pri's factor of |g|, Adam's rate, its second bias.

    LAST also makes the step of the weights, and stores the sent values, the withheld mask and the saved values.
    """
    lane, start, entry, inside = _locate(size, lanes, BLOCK)
    number = numbers + 4 * lane
    kept = _get(keep, start * OWN, entry, inside) != 0
    a, w = _get(logits, start, entry, inside), _get(weight, start, entry, inside)
    draws, force = _get(noise, start, entry, inside), _get(pull, start, entry, inside)
    steep = tl.abs(_get(gradient, start, entry, inside))
    slope = _slope(a, draws, w, force, steep, kept, tl.load(number), tl.load(number + 1), sharing)
    mean, square = _get(first, start, entry, inside), _get(second, start, entry, inside)
    mean += (slope - mean) * (1 - BETA_1)
    square = BETA_2 * square + (1 - BETA_2) * slope * slope
    a -= mean * tl.load(number + 2) / (tl.sqrt(square / tl.load(number + 3)) + EPSILON)
    tl.store(new_logits + start + entry, a, mask=inside)
    tl.store(new_first + start + entry, mean, mask=inside)
    tl.store(new_second + start + entry, square, mask=inside)
    if LAST:
        w -= rate * _get(last, start, entry, inside)
        hold = kept & (a > 0)  # alpha > 1 - alpha
        tl.store(values + start + entry, tl.where(hold, 0.0, tl.where(kept, w, 0.0)), mask=inside)
        tl.store(withheld + start + entry, hold.to(tl.int8), mask=inside)
        tl.store(saved + start + entry, tl.where(hold, w, 0.0), mask=inside)


@triton.jit
def descend(weight, gradient, keep, out, size, lanes, rate, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """Make one step of SGD on the kept entries."""
    _, start, entry, inside = _locate(size, lanes, BLOCK)
    kept = _get(keep, start * OWN, entry, inside) != 0
    slope = tl.where(kept, _get(gradient, start, entry, inside), 0.0)
    tl.store(out + start + entry, _get(weight, start, entry, inside) - rate * slope, mask=inside)
