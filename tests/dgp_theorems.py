"""What dgp says of gamma_1, Theorem 1 for distances and Corollary 1: statements of the paper that no study uses."""

from __future__ import annotations

import math
from typing import NamedTuple

from secateur.defenses.selection import counts, mask_largest
from secateur.interfaces import Params
from secateur.theory.convergence import Constants, lemma_1
from secateur.theory.gradient_distance import Degraded


class Gamma(NamedTuple):
    """The least gamma_1 for which Assumption 1 holds at one update."""

    whole: float  # of all tensors together, as Lemma 1 and Theorem 1 need it
    largest: float  # over the tensors: DGP prunes each by itself
    tensors: dict[str, float]


class TopBounds(NamedTuple):
    """Bounds on the norm of the largest `share` of a tensor's entries, by number, as parts of ||X||_2."""

    lost_at_most: float  # Eq. 21: ||X - top(X)|| <= sqrt(1 - l) ||X||
    kept_at_least: float  # Eq. 22 as printed: ||top(X)|| >= (1 - sqrt(1 - l)) ||X||
    kept_tight: float  # sqrt(l), by Pythagoras: Eq. 22 loses it by the triangle inequality


def gamma_1(accumulated: Params, sent: Params) -> Gamma:
    """Return ||X - C(X)||^2 / ||X||^2 of X = gradient + residual (dgp Assumption 1).

    X includes the residual because Eq. 9 is applied to it. Without error feedback X is the gradient, and `whole` is the
    relative distance squared. A tensor of zeros lost nothing and counts as 0.
    """
    before = {name: float(value.double().square().sum()) for name, value in accumulated.items()}
    lost = {name: float((value - sent[name]).double().square().sum()) for name, value in accumulated.items()}
    shares = {name: lost[name] / before[name] if before[name] else 0.0 for name in before}
    whole = sum(lost.values()) / sum(before.values()) if sum(before.values()) else 0.0
    return Gamma(whole, max(shares.values(), default=0.0), shares)


def share_of_top_sent(gradient: Params, sent: Params, k1: float) -> float:
    """Return the share of a gradient's own largest k1 entries, tensor by tensor, that are sent nonetheless.

    DGP promises 0. With error feedback it ranks gradient + residual. Where starved entries fill the top for good, this
    round's largest ones are below them and are sent.

    Example:
        >>> share_of_top_sent({"w": torch.tensor([5.0, 9.0, 1.0, 2.0])}, {"w": torch.tensor([5.0, 0.0, 0.0, 0.0])}, 0.5)
        0.5
    """
    top_and_sent = total = 0
    for name, value in gradient.items():
        first, _ = counts(value.numel(), k1, 0)
        top = mask_largest(value.abs().flatten(), first)
        top_and_sent += int((top & (sent[name].flatten() != 0)).sum())
        total += first
    return top_and_sent / total if total else 0.0


def lower_bound(size: int, k1: float, k2: float) -> float:
    """Return the least gamma_1 of DGP on a tensor of `size` entries: dropped from the top / (those + the kept).

    Every entry dropped from the top is at least as large as every kept one. Equality holds where all of these are equal
    and the smallest k2 are zeros. There is no such upper bound below 1: a tensor with no more than ceil(k1 n) entries
    other than zero is lost whole. So Assumption 1 is a fact about gradients, never about DGP.

    Example:
        >>> lower_bound(1000, 0.05, 0.75)
        0.2
    """
    top, kept = counts(size, k1, k2)
    return top / (top + kept) if top else 0.0


def printed_lower_bound(k1: float, k2: float) -> float:
    """Return (1 - sqrt(1 - k1 k2))^2 < gamma_1 (dgp Assumption 1 and Appendix B, with the product of k1 and k2).

    The bound is true and useless: at k1 = .05, k2 = .75 it is 0.0004, where `lower_bound` is .2.

    Example:
        >>> f"{printed_lower_bound(0.05, 0.75):.2g}"
        '0.00036'
    """
    return (1 - math.sqrt(1 - k1 * k2)) ** 2


def top_bounds(share: float) -> TopBounds:
    """Return Eqs. 21 and 22 of dgp for the largest `share` of the entries, and the tight form of Eq. 22.

    Example:
        >>> top_bounds(0.64)
        TopBounds(lost_at_most=0.6, kept_at_least=0.4, kept_tight=0.8)
    """
    lost = math.sqrt(1 - share)
    return TopBounds(lost, 1 - lost, math.sqrt(share))


def theorem_1_euclidean(epsilon: float, gamma: float, gradient_norm: float) -> Degraded:
    """Bound ||g* - grad W|| by eps + sqrt(gamma_1) ||grad W|| (dgp Theorem 1, Eq. 6).

    The premise is ||g* - DGP(grad W)|| <= eps.

    The triangle inequality gives an upper bound of the attacker's error. The paper reads it as a protection, but it is
    none: with g* = grad W the error is 0. The other side of the triangle, sqrt(gamma_1) ||grad W|| - eps, is a lower
    bound. It binds attackers who fit the sent update closely. Those who know of the pruning (support, reapply) do not.

    Example:
        >>> theorem_1_euclidean(1.0, 0.25, 10.0)
        Degraded(printed=6.0, low=4.0, high=6.0)
    """
    missing = math.sqrt(gamma) * gradient_norm
    return Degraded(epsilon + missing, max(0.0, missing - epsilon), epsilon + missing)


def cosine_on_support(epsilon: float, gamma: float) -> float:
    """Return 1 - (1 - eps) sqrt(1 - gamma_1), the exact cosine distance to grad W of a g* that is 0 where DGP pruned.

    Step (d) of Theorem 1's proof loses this: ||DGP(grad W)|| / ||grad W|| is sqrt(1 - gamma_1), which is more than
    1 - sqrt(gamma_1).

    Example:
        >>> round(cosine_on_support(0.0, 0.36), 12), theorem_1_cosine(0.0, 0.36).printed
        (0.2, 0.6)
    """
    return 1 - (1 - epsilon) * math.sqrt(1 - gamma)


def corollary_1_rate(problem: Constants, rounds: int) -> float:
    """Return the learning rate sqrt((l0 - l*) / (K T (G^2 + sigma^2))) of the proof of dgp Corollary 1.

    The corollary is printed without the root. Then the first term of Theorem 2 is 4 K (G^2 + sigma^2) at every T, and
    nothing converges.
    """
    return math.sqrt(problem.gap / (problem.smoothness * rounds * (problem.gradient_square + problem.variance)))


def corollary_1(problem: Constants, rounds: int) -> tuple[float, float]:
    """Return the two terms of dgp Corollary 1: the leading one, and the one that is printed as O(1/T).

    They are 6 sqrt(K (l0 - l*) (sigma^2 + G^2) / T) and 4 K (l0 - l*) Lemma 1 / (T (G^2 + sigma^2)).
    """
    noise = problem.gradient_square + problem.variance
    hidden = 4 * problem.smoothness * problem.gap * lemma_1(problem.gamma, problem.gradient_square) / (rounds * noise)
    return 6 * math.sqrt(problem.smoothness * problem.gap * noise / rounds), hidden


def count_rounds(problem: Constants) -> float:
    """Return the number of rounds T from which Corollary 1 is below the trivial G^2; infinite at gamma_1 = 1."""
    leading, hidden = corollary_1(problem, 1)
    if math.isinf(hidden):
        return math.inf
    root = (leading + math.sqrt(leading**2 + 4 * hidden * problem.gradient_square)) / (2 * problem.gradient_square)
    return root**2
