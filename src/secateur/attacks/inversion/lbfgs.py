"""L-BFGS for N independent trials at once; each trial equals torch.optim.LBFGS without a line search.

The two-loop recursion is written as two unit triangular systems in the products of the stored steps s and gradient
changes y. It is then a few batched products for all trials instead of a Python loop over the history, and never
synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.attacks.inversion.problem import Evaluated, Variables
from secateur.gpu.precision import tf32
from secateur.interfaces import Params


@dataclass(frozen=True)
class LBFGS:
    """Optimiser of stacked trials.

    A step is up to `max_iter` moves of every trial. A trial that meets a tolerance stops until the next step.
    """

    iterations: int  # a trial whose clock has reached this number does not move
    learning_rate: float = 1.0
    max_iter: int = 20
    history: int = 100
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9

    def begin(self, variables: Variables) -> Params:
        """Return the initial state tensors; a history slot with `ro` 0 is empty."""
        flat = flatten(variables, list(variables))
        trials, size = flat.shape
        templates = {"direction": flat, "before": flat, "before.loss": flat[:, 0], "length": flat[:, 0]}
        state = {f"lbfgs.{name}": torch.zeros_like(value) for name, value in templates.items()}
        for name, shape in {"y": (size,), "s": (size,), "products": (self.history,), "ro": ()}.items():
            state[f"lbfgs.{name}"] = flat.new_zeros(trials, self.history, *shape)
        state["lbfgs.scale"] = flat.new_ones(trials)
        state["lbfgs.moves"] = torch.zeros(trials, dtype=torch.int64, device=flat.device)
        state["lbfgs.stored"] = torch.zeros_like(state["lbfgs.moves"])
        return state

    @tf32(False)  # curvature is a difference of gradients, below the ten-bit precision of TF32
    def __call__(self, state: Params, names: Sequence[str], evaluate: Callable[[], Evaluated]) -> Tensor:
        """Step the variables `names` and return the matching loss (N,) from before the step."""
        evaluated = evaluate()
        matching, loss, gradient = evaluated.matching, evaluated.total, flatten(evaluated.gradient, names)
        active = (state["clock"] < self.iterations) & ~self._flat(gradient)
        for move in range(1, self.max_iter + 1):
            active = self._move(state, names, active, loss, gradient)
            if move == self.max_iter:
                break
            evaluated = evaluate()
            loss = torch.where(active, evaluated.total, loss)
            gradient = torch.where(active[:, None], flatten(evaluated.gradient, names), gradient)
            step = (state["lbfgs.direction"] * state["lbfgs.length"][:, None]).abs().amax(1)
            still = (step <= self.tolerance_change) | (
                (loss - state["lbfgs.before.loss"]).abs() < self.tolerance_change
            )
            active = active & ~self._flat(gradient) & ~still
        return matching

    def _flat(self, gradient: Tensor) -> Tensor:
        return gradient.abs().amax(1) <= self.tolerance_grad

    def _move(self, state: Params, names: Sequence[str], active: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        """Move the active trials and return the mask of those whose direction descends."""
        remember(state, active, gradient)
        state["lbfgs.moves"].add_(active)
        first = (1 / gradient.abs().sum(1)).clamp_max(1) * self.learning_rate
        length = torch.where(state["lbfgs.moves"] == 1, first, self.learning_rate)
        new = {"direction": two_loop(state, gradient), "before": gradient, "before.loss": loss, "length": length}
        for name, value in new.items():
            kept = state[f"lbfgs.{name}"]
            kept.copy_(torch.where(active.view(-1, *[1] * (kept.ndim - 1)), value, kept))
        active = active & ~((gradient * state["lbfgs.direction"]).sum(1) > -self.tolerance_change)
        step = torch.where(active[:, None], state["lbfgs.length"][:, None] * state["lbfgs.direction"], 0)
        begin = 0
        for name in names:
            size = state[name][0].numel()
            state[name].add_(step[:, begin : begin + size].view_as(state[name]))
            begin += size
        return active


def flatten(variables: Variables, names: Sequence[str]) -> Tensor:
    """Return all variables of a trial as one row, (N, D)."""
    return torch.cat([variables[name].flatten(1) for name in names], 1)


def remember(state: Params, active: Tensor, gradient: Tensor) -> None:
    """Store the last step s and gradient change y of each active trial whose curvature y.s is above 1e-10."""
    y = gradient - state["lbfgs.before"]
    s = state["lbfgs.direction"] * state["lbfgs.length"][:, None]
    curvature = (y * s).sum(1)
    new = active & (state["lbfgs.moves"] > 0) & (curvature > 1e-10)
    trials, slots = state["lbfgs.ro"].shape
    rows, slot = torch.arange(trials, device=y.device), state["lbfgs.stored"] % slots

    def write_slot(name: str, value: Tensor) -> None:
        kept = state[f"lbfgs.{name}"]
        kept[rows, slot] = torch.where(new.view(-1, *[1] * (value.ndim - 1)), value, kept[rows, slot])

    write_slot("y", y)
    write_slot("s", s)
    write_slot("ro", 1 / curvature)
    products = state["lbfgs.products"]  # s_i . y_j
    write_slot("products", (state["lbfgs.y"] @ s[:, :, None])[:, :, 0])
    column = (state["lbfgs.s"] @ y[:, :, None])[:, :, 0]
    products[rows, :, slot] = torch.where(new[:, None], column, products[rows, :, slot])
    state["lbfgs.scale"].copy_(torch.where(new, curvature / (y * y).sum(1), state["lbfgs.scale"]))
    state["lbfgs.stored"].add_(new)


def two_loop(state: Params, gradient: Tensor) -> Tensor:
    """Return the direction - H g (Nocedal and Wright, Algorithm 7.4).

    With slots from the oldest to the newest and P = (s_i . y_j): alpha_i = ro_i (s_i . q - sum over newer j of
    P_ij alpha_j) and beta_i = ro_i (y_i . r + sum over older j of P_ji (alpha_j - beta_j)).
    """
    y, s, ro = state["lbfgs.y"], state["lbfgs.s"], state["lbfgs.ro"]
    slots = ro.shape[1]
    order = (state["lbfgs.stored"][:, None] + torch.arange(slots, device=ro.device)) % slots  # oldest first
    back = order.argsort(1)
    products = state["lbfgs.products"]
    products = products.gather(1, order[:, :, None].expand_as(products)).gather(2, order[:, None].expand_as(products))
    ro = ro.gather(1, order)
    upper = ro[:, :, None] * products.triu(1)  # the unit diagonal is implicit
    lower = ro[:, :, None] * products.mT.tril(-1)
    q = -gradient
    right = ro * (s @ q[:, :, None])[:, :, 0].gather(1, order)
    alpha = torch.linalg.solve_triangular(upper, right[:, :, None], upper=True, unitriangular=True)
    q = q - (y.mT @ alpha.gather(1, back[:, :, None]))[:, :, 0]
    r = q * state["lbfgs.scale"][:, None]
    right = ro * (y @ r[:, :, None])[:, :, 0].gather(1, order)
    right = right[:, :, None] + lower @ alpha
    beta = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    direction: Tensor = r + (s.mT @ (alpha - beta).gather(1, back[:, :, None]))[:, :, 0]
    return direction
