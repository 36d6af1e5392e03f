"""The optimisation loop of gradient matching: the trials of all targets move together, and diverged ones restart.

Everything that changes is in `state`, a dictionary of tensors on which a step works in place. A saved and loaded state
continues bit for bit. Chance has no state: a start derives from the target's seed, the restart and the attempt, and
noise from the seed and the step. A step asks nothing of the host, so a CUDA graph can hold it.

Every trial has a clock of its own: a restarted trial has all its iterations before it, a finished one stands still.
Step rules are Adam with the sign option and Langevin noise (`AdamRule`) and L-BFGS (`LBFGS`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Generator, Tensor

from secateur.attacks.inversion.problem import Evaluate, Evaluated, NaturalBasis, Variables, consensus, expand_as
from secateur.gpu.graphs import capture_step
from secateur.gpu.precision import tf32
from secateur.interfaces import Params
from secateur.seeding import derive

Schedule = Literal["steps", "warmup-cosine", "constant"]

SHOW_SECONDS = 0.5  # between two reports of progress
CHUNK = 25  # steps between two looks at the losses, which make the host wait for the device
SAVE_SECONDS = 2.0  # between two calls of Watch.save
POINTS = 200  # of a curve
EXPLODED = 1e4  # times the loss that a trial began with
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam
WARM_UP = 50  # iterations


@dataclass
class SharedBar:
    """A bar of the iterations of all targets together, where some targets go before others."""

    advance: Callable[[int], None]
    targets: int
    _done: int = 0  # iterations of all targets

    def move(self, targets: int, iterations: int) -> None:
        """Count the iterations that so many targets have made."""
        shown = self._done // self.targets
        self._done += targets * iterations
        self.advance(self._done // self.targets - shown)


class StepRule(Protocol):
    """A rule that moves all trials by one step."""

    def begin(self, variables: Variables) -> Params:
        """Return the tensors that the rule keeps between steps, N first."""
        ...

    def __call__(self, state: Params, names: Sequence[str], evaluate: Callable[[], Evaluated]) -> Tensor:
        """Move the trials in place, and return the matching loss (N,) from before the move."""
        ...


@dataclass(frozen=True, eq=False)
class Trials:
    """Restarts x targets on one axis, the restarts of a target side by side."""

    evaluate: Sequence[Evaluate]  # one a round; their objectives are added
    fixed: Sequence[Params]  # constant tensors, one a round
    labels: Tensor | None  # (N, B); None: optimised
    seeds: Sequence[int]  # one a target
    restarts: int
    shape: tuple[int, ...]  # (B, C, H, W)
    classes: int
    like: Tensor  # its device and type
    iterations: int
    rule: StepRule
    box: tuple[Tensor, Tensor] | None
    noise: bool  # True if the rule or the smoothing takes noise
    group: bool  # True if the consensus of the restarts is wanted
    registers: bool  # True if restarts are aligned before their consensus
    retries: int
    basis: NaturalBasis | None  # of the starts
    smoothing: Tensor | None  # (iterations + 1, C, 1, 1), deviation of the noise on the inputs at each iteration

    @property
    def names(self) -> list[str]:
        """The names of the optimised variables."""
        return ["inputs"] if self.labels is not None else ["inputs", "labels"]

    @property
    def size(self) -> int:
        """The number of trials N."""
        return len(self.seeds) * self.restarts

    @property
    def every(self) -> int:
        """Iterations between two points of the curve."""
        return max(1, self.iterations // POINTS)

    def start(self, trial: int, attempt: int) -> Variables:
        """Return the start of one trial from N(0, 1): pictures, or their coordinates, and the logits of labels."""
        rng = derive(self.seeds[trial // self.restarts], "start", trial % self.restarts, attempt)
        inputs = torch.randn(self.shape, generator=rng)
        labels = torch.randn(self.shape[0], self.classes, generator=rng)
        variables = {"inputs": inputs.to(self.like), "labels": labels.to(self.like)}
        if self.basis is not None:
            variables["inputs"] = self.basis.grey + self.basis.move(variables["inputs"])
        return {name: variables[name] for name in self.names}

    def begin(self) -> Params:
        """Return the state before the first step."""
        starts = [self.start(trial, 0) for trial in range(self.size)]
        variables = {name: torch.stack([start[name] for start in starts]) for name in self.names}
        points = (self.iterations + self.every - 1) // self.every
        zeros = torch.zeros(self.size, dtype=torch.int64, device=self.like.device)
        state = {**variables, **self.rule.begin(variables), "clock": zeros, "attempt": zeros.clone()}
        state["step"] = zeros.new_zeros(())
        state["matching"] = self.like.new_full((self.size,), torch.inf)
        state["curve"] = self.like.new_full((points, self.size), torch.nan)
        if self.noise:
            state["noise"] = torch.zeros_like(variables["inputs"])
        return state

    def rows(self, state: Params, targets: Tensor) -> Params:
        """Return the state of neighbouring targets as views: changes to them change the whole."""
        rows = slice(int(targets[0]) * self.restarts, (int(targets[-1]) + 1) * self.restarts)
        views = {name: value[rows] for name, value in state.items() if value.ndim and name != "curve"}
        return {**views, "curve": state["curve"][:, rows], "step": state["step"].clone()}

    def look(self, state: Params) -> Evaluated:
        """Return the objective at the trials' present variables, summed over the rounds.

        With smoothing it is taken at noisy inputs. So it is a draw of the objective's mean over such inputs. The mean
        has slopes where ReLU and max-pooling leave the objective flat, or let it jump.
        """
        variables = {name: state[name] for name in self.names}
        if self.smoothing is not None:
            variables["inputs"] = state["inputs"] + self.smoothing[state["clock"]][:, None] * state["noise"]
            if self.box is not None:
                clamp_to_box(variables["inputs"], self.box)
        common = {"consensus": consensus(state["inputs"], self.restarts, self.registers)} if self.group else {}
        rounds = [
            evaluate(variables, self.labels, {**fixed, **common})
            for evaluate, fixed in zip(self.evaluate, self.fixed, strict=True)
        ]
        if len(rounds) == 1:
            return rounds[0]
        gradient = {name: sum_of([part.gradient[name] for part in rounds]) for name in self.names}
        return Evaluated(sum_of([r.total for r in rounds]), sum_of([r.matching for r in rounds]), gradient)

    def step(self, state: Params) -> None:
        """Move all trials by one step, in place and without a message to the host."""
        clock, running = state["clock"], state["clock"] < self.iterations
        matching = self.rule(state, self.names, lambda: self.look(state))
        if self.box is not None:
            clamp_to_box(state["inputs"], self.box)
        state["matching"].copy_(torch.where(running, matching, state["matching"]))
        rows = torch.arange(self.size, device=clock.device)
        point = (clock // self.every).clamp_max(state["curve"].shape[0] - 1)
        now = running & (clock % self.every == 0)
        state["curve"][point, rows] = torch.where(now, matching, state["curve"][point, rows])
        clock.add_(running)

    def draw(self, state: Params, step: int) -> None:
        """Draw the noise of one step, from the target's seed and the step alone."""
        rng = Generator(self.like.device)
        noise = state["noise"].view(-1, self.restarts, *self.shape)
        for target, seed in enumerate(self.seeds):
            noise[target].normal_(generator=rng.manual_seed((seed + step) % 2**63))

    def begin_again(self, state: Params) -> None:
        """Restart every trial whose loss is not finite or has exploded; stop it after its last retry."""
        matching, first = state["matching"], state["curve"][0]
        broken = ~matching.isfinite() | (matching > EXPLODED * first)
        rows = broken.nonzero().flatten()
        for trial, attempt in zip(rows.tolist(), state["attempt"][rows].tolist(), strict=True):
            if attempt == self.retries:
                state["clock"][trial] = self.iterations
                continue
            start = {name: value[None] for name, value in self.start(trial, attempt + 1).items()}
            for name, value in {**start, **self.rule.begin(start)}.items():
                state[name][trial] = value[0]
            state["clock"][trial], state["attempt"][trial] = 0, attempt + 1
            state["matching"][trial], state["curve"][:, trial] = torch.inf, torch.nan

    def run(self, state: Params, advance: Callable[[int], None], save: Callable[[], None]) -> None:
        """Continue from `state` until every trial is done, and leave the matching losses of the final variables."""
        step, saved = capture_step(lambda: self.step(state), state), time.monotonic()
        while remaining := self.iterations - int(state["clock"].min()):
            done, count = int(state["step"]), min(CHUNK, remaining)
            shown, looked = 0, time.monotonic()
            for number in range(done, done + count):
                if self.noise:
                    self.draw(state, number)
                step()
                if time.monotonic() - looked >= SHOW_SECONDS:  # a step of L-BFGS may take seconds
                    advance(number + 1 - done - shown)
                    shown, looked = number + 1 - done, time.monotonic()
            state["step"].fill_(done + count)
            if count == remaining:
                state["matching"].copy_(self.look(state).matching)
            self.begin_again(state)
            advance(count - shown)
            if time.monotonic() - saved >= SAVE_SECONDS:
                save()
                saved = time.monotonic()


def clamp_to_box(inputs: Tensor, box: tuple[Tensor, Tensor]) -> None:
    """Project to valid pictures, in place."""
    inputs.copy_(torch.minimum(torch.maximum(inputs, box[0]), box[1]))


def sum_of(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors."""
    return torch.stack(list(values)).sum(0)


@dataclass(frozen=True, eq=False)
class AdamRule:
    """Adam on N trials; with `sign` Adam gets the sign of the gradient (IG), with a basis it moves coordinates."""

    rates: Tensor  # (iterations + 1,), on the trials' device and of their type
    sign: bool = False
    noise: float = 0.0  # of the pixels, times the rate
    basis: NaturalBasis | None = None  # of the pictures

    def begin(self, variables: Variables) -> Params:
        """Return zeros for the first and second moments."""
        kept = {f"{moment}.{name}": value for moment in ("first", "second") for name, value in variables.items()}
        return {name: torch.zeros_like(value) for name, value in kept.items()}

    def __call__(self, state: Params, names: Sequence[str], evaluate: Callable[[], Evaluated]) -> Tensor:
        """Move the variables `names` by one step, and return the matching loss (N,) from before the step."""
        evaluated = evaluate()
        rate, count = self.rates[state["clock"]], state["clock"] + 1
        for name in names:
            value, first, second = (state[key] for key in (name, f"first.{name}", f"second.{name}"))
            gradient = evaluated.gradient[name]
            basis = self.basis if name == "inputs" else None
            gradient = gradient if basis is None else basis.pull(gradient)
            gradient = gradient.sign() if self.sign else gradient
            first.lerp_(gradient, 1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            slow, fast = (expand_as(1 - beta ** count.to(value.dtype), value) for beta in BETAS)
            step = expand_as(rate, value) * (first / slow) / ((second / fast).sqrt() + EPS)
            value.sub_(step if basis is None else basis.move(step))
        if self.noise:
            state["inputs"].addcmul_(expand_as(rate * self.noise, state["inputs"]), state["noise"])
        return evaluated.matching


def learning_rates(schedule: Schedule, iterations: int, base: float) -> Tensor:
    """Return (iterations + 1,) the learning rate of every iteration, and 0 for finished trials.

    steps: x0.1 at 3/8, 5/8 and 7/8 (IG). warmup-cosine: 50 rising steps, then half a cosine to 0 (GI).
    """
    done = torch.arange(iterations, dtype=torch.float64)
    if schedule == "steps":
        passed = sum((done >= int(iterations * part / 8)).double() for part in (3, 5, 7))
        rates = base * 0.1 ** torch.as_tensor(passed)
    elif schedule == "warmup-cosine":
        warm = min(WARM_UP, iterations // 2)
        fall = (1 + torch.cos(math.pi * (done - warm) / max(1, iterations - warm))) / 2
        rates = base * torch.where(done < warm, (done + 1) / max(1, warm), fall)
    else:
        rates = torch.full_like(done, base)
    return torch.cat([rates, rates.new_zeros(1)])


def smoothing_deviations(iterations: int, deviation: Tensor) -> Tensor:
    """Return (iterations + 1, C, 1, 1) the noise of every iteration: it falls to 0 at 4/5 of them, and stays there.

    Example:
        >>> smoothing_deviations(5, torch.ones(1, 1, 1)).flatten()
        tensor([1.0000, 0.7500, 0.5000, 0.2500, 0.0000, 0.0000])
    """
    passed = torch.arange(iterations + 1).to(deviation) / max(1, iterations)
    return (1 - passed / 0.8).clamp_min(0).view(-1, 1, 1, 1) * deviation


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS of N independent trials at once; each trial equals torch.optim.LBFGS without a line search.

    A step is up to `max_iter` moves of every trial. A trial that meets a tolerance stops until the next step. The
    two-loop recursion is written as two unit triangular systems in the products of the stored steps s and gradient
    changes y. So it is a few batched products for all trials, and never synchronises with the host.
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
        active = (state["clock"] < self.iterations) & ~self._flatten(gradient)
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
            active = active & ~self._flatten(gradient) & ~still
        return matching

    def _flatten(self, gradient: Tensor) -> Tensor:
        return gradient.abs().amax(1) <= self.tolerance_grad

    def _move(self, state: Params, names: Sequence[str], active: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        """Move the active trials and return the mask of those whose direction descends."""
        store_change(state, active, gradient)
        state["lbfgs.moves"].add_(active)
        first = (1 / gradient.abs().sum(1)).clamp_max(1) * self.learning_rate
        length = torch.where(state["lbfgs.moves"] == 1, first, self.learning_rate)
        new = {"direction": two_loop(state, gradient), "before": gradient, "before.loss": loss, "length": length}
        for name, value in new.items():
            kept = state[f"lbfgs.{name}"]
            kept.copy_(torch.where(expand_as(active, kept), value, kept))
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


def store_change(state: Params, active: Tensor, gradient: Tensor) -> None:
    """Store the last step s and gradient change y of each active trial whose curvature y.s is above 1e-10."""
    y = gradient - state["lbfgs.before"]
    s = state["lbfgs.direction"] * state["lbfgs.length"][:, None]
    curvature = (y * s).sum(1)
    new = active & (state["lbfgs.moves"] > 0) & (curvature > 1e-10)
    trials, slots = state["lbfgs.ro"].shape
    rows, slot = torch.arange(trials, device=y.device), state["lbfgs.stored"] % slots

    def write_slot(name: str, value: Tensor) -> None:
        kept = state[f"lbfgs.{name}"]
        kept[rows, slot] = torch.where(expand_as(new, value), value, kept[rows, slot])

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
