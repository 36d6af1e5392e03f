"""Triton kernels of PriPrune's turn: each is one pass over a weight tensor of all clients.

Tensors are (lanes, size), a lane a client. What all lanes share is (1, size), and its flag, APART or OWN, is then 0.
Masks are int8. priprune_ops.py launches them.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(size, lanes, BLOCK: tl.constexpr):
    """A program's lane, where that begins, its entries and which exist; the lanes of an entry run side by side."""
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
    """The weights withheld last in their place among those received; 0 where the base pruned."""
    _, start, entry, inside = _place(size, lanes, BLOCK)
    was = _get(withheld, start, entry, inside) != 0
    value = tl.where(was, _get(saved, start, entry, inside), _get(received, start * APART, entry, inside))
    kept = _get(keep, start * OWN, entry, inside) != 0
    tl.store(out + start + entry, tl.where(kept, value, 0.0), mask=inside)


@triton.jit
def draw(weight, logits, noise, out, size, lanes, BLOCK: tl.constexpr):
    """The weights times 1 - v for the hard sample v of Eq. 18; an a that is not a number leaves none."""
    _, start, entry, inside = _place(size, lanes, BLOCK)
    odds = _get(logits, start, entry, inside) + _get(noise, start, entry, inside)
    share = tl.where(odds > 0, 0.0, tl.where(odds == odds, 1.0, odds))
    tl.store(out + start + entry, _get(weight, start, entry, inside) * share, mask=inside)


@triton.jit
def magnitude(
    gradient, keep, out, size, lanes, OWN: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of |g| of what is kept over a stretch of entries, into (stretches, lanes)."""
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
    """Of `objective` in a: in L_acc the soft sample's s (1 - s) / tau, in L_pri and L_sha those of alpha.

    All are taken of -|x|, where nothing overflows and no digit is lost. `pull` is the slope of L_acc in w (1 - v).
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
    """One step of Adam on a; `numbers` (lanes, 4): tau, L_pri's factor of |g|, Adam's rate and its second bias.

    LAST: the weights' step too, and what of them is sent, withheld and saved.
    """
    lane, start, entry, inside = _place(size, lanes, BLOCK)
    number = numbers + 4 * lane
    kept = _get(keep, start * OWN, entry, inside) != 0
    a, w = _get(logits, start, entry, inside), _get(weight, start, entry, inside)
    chance, force = _get(noise, start, entry, inside), _get(pull, start, entry, inside)
    steep = tl.abs(_get(gradient, start, entry, inside))
    slope = _slope(a, chance, w, force, steep, kept, tl.load(number), tl.load(number + 1), sharing)
    mean, square = _get(first, start, entry, inside), _get(second, start, entry, inside)
    mean += (slope - mean) * (1 - BETA_1)
    square = BETA_2 * square + (1 - BETA_2) * slope * slope
    a -= mean * tl.load(number + 2) / (tl.sqrt(square / tl.load(number + 3)) + EPSILON)
    tl.store(new_logits + start + entry, a, mask=inside)
    tl.store(new_first + start + entry, mean, mask=inside)
    tl.store(new_second + start + entry, square, mask=inside)
    if LAST:
        w -= rate * _get(last, start, entry, inside)
        held = kept & (a > 0)  # alpha > 1 - alpha
        tl.store(values + start + entry, tl.where(held, 0.0, tl.where(kept, w, 0.0)), mask=inside)
        tl.store(withheld + start + entry, held.to(tl.int8), mask=inside)
        tl.store(saved + start + entry, tl.where(held, w, 0.0), mask=inside)


@triton.jit
def descend(weight, gradient, keep, out, size, lanes, rate, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """One step of SGD of what is kept."""
    _, start, entry, inside = _place(size, lanes, BLOCK)
    kept = _get(keep, start * OWN, entry, inside) != 0
    slope = tl.where(kept, _get(gradient, start, entry, inside), 0.0)
    tl.store(out + start + entry, _get(weight, start, entry, inside) - rate * slope, mask=inside)
