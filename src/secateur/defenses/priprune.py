"""PriPrune: a client learns which weights to withhold, together with the weights (priprune Algorithm 3).

The paper leaves some points open. These are our readings; each is a field or a test:
- The mask that mixes withheld and received weights is the last round's, as in the text. Algorithm 3 takes a fresh
  sample, which would set weights to 0 that nobody saved.
- The weights descend the plain loss of all weights, withheld ones included, since these are kept for local training.
  The sampled mask acts in L_acc of the mask's own step, which is the loss of the weights to be sent, w * m. Algorithm 3
  scales the step of the weights by lambda_acc, which diverges at its rate of .25. Here that factor is divided out.
- Eq. 17 is illegible in print. L_pri = - sum_l,j (N_l / N) (|g_lj| / sum_j |g_lj|) log alpha_lj is the reading that
  gives every layer its share (`normalise` "layer"). "global" omits N_l / N and divides by the sum over all layers.
- A turn is one local epoch. A mask is sampled and alpha learns once per turn, at the last batch and by the gradient of
  the whole turn (`learns` "turn"). "step" does so at every batch. With the paper's one local step both are the same.
- alpha = sigmoid(a). The paper does not state its start, its Adam step and the temperature. The defaults are AdaShare's
  (Sun et al. 2020), where an epoch is again a turn. The temperature never falls below `coolest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor
from torch.func import grad, grad_and_value
from torch.nn.functional import logsigmoid

from secateur.catalogue import method
from secateur.defenses import AGAINST_WITHHOLDING
from secateur.defenses.withholding import SAVED, WITHHELD, divide, empty_state, reload, whole_mask
from secateur.errors import WrongInput, check_number, check_numbers
from secateur.gpu import BETA_1, BETA_2, EPSILON
from secateur.gpu.triton_loader import load_kernels
from secateur.interfaces import Batch, ClientResult, LossOf, Mask, Params
from secateur.pruning.masks import check_name

MUCH = 0.5  # highest average alpha at rest without a warning
CONV_2 = 6_601_504  # weights of the paper's network on FEMNIST
LOGITS, FIRST, SECOND = "logits.", "first.", "second."  # prefixes of a state's names: a, and Adam's moments of a
STEPS, TURNS = "steps", "turns"

FUSED = True  # True: kernels are used where possible

Normalise = Literal["layer", "global"]
Learns = Literal["turn", "step"]

# lambda (acc, pri, sha) by data and base pruning, from the paper's Appendix
PRESETS = {
    ("femnist", "prunefl"): (5.0, 15.0, 2e-5),
    ("femnist", "synflow"): (10.0, 1.0, 2e-6),
    ("femnist", "snip"): (10.0, 1.0, 2e-6),
    ("femnist", "feddst"): (10.0, 8.0, 2e-5),
    ("cifar10", "prunefl"): (5.0, 10.0, 2e-5),
    ("cifar10", "synflow"): (5.0, 1.0, 2e-6),
    ("cifar10", "snip"): (10.0, 1.0, 2e-6),
    ("cifar10", "feddst"): (10.0, 10.0, 2e-5),
}


@method(
    "defense",
    "priprune",
    "priprune",
    acts_on="client",
    adaptive=("support+follows", "fill"),
    strongest=AGAINST_WITHHOLDING,
)
@dataclass(frozen=True)
class PriPrune:
    """Learns by Gumbel-softmax masks which weights to withhold, jointly with the weights (PriPrune; Algorithm 3).

    Acts on: a federation's client, on top of any base pruning. Every Conv and Linear weight has an alpha, the
    probability of not being sent; biases are always sent. The default lambdas are those for PruneFL on FEMNIST.

    With L_pri and L_sha alone, an alpha rests at privacy / sharing times its weight in Eq. 17, which is 1 / N on
    average. The paper's lambdas suit millions of weights. A smaller network needs a larger `sharing`, or it withholds
    everything.

    Equation: `L = accuracy CE + privacy L_pri + sharing L_sha; withheld ~ Gumbel-softmax(alpha), alpha learnt`.
    """

    accuracy: float = 5.0  # lambda_acc
    privacy: float = 15.0  # lambda_pri
    sharing: float = 2e-5  # lambda_sha
    alpha: float = 0.5  # at the start
    step: float = 0.01  # of Adam, on a
    temperature: float = 5.0  # of a client's first turn
    cooling: float = 0.965  # a turn
    coolest: float = 0.1
    normalise: Normalise = "layer"
    learns: Learns = "turn"

    def __post_init__(self) -> None:
        check_name("normalise", self.normalise, get_args(Normalise))
        check_name("learns", self.learns, get_args(Learns))
        check_number("alpha", self.alpha, "(0, 1)")
        check_numbers(self, "[0, inf)", "accuracy", "privacy", "sharing", "step")
        check_numbers(self, "(0, inf)", "coolest", "temperature")
        check_number("cooling", self.cooling, "(0, 1]")
        if self.coolest > self.temperature:
            raise WrongInput("temperature", f"{self.temperature} is below coolest={self.coolest}; use a higher one")

    def init(self, params: Params) -> Params:
        """Return a client's state before its first round."""
        state, names = empty_state(params), [name for name, value in params.items() if value.ndim > 1]
        first = next(iter(params.values()))
        start = math.log(self.alpha / (1 - self.alpha))
        state |= {LOGITS + name: torch.full_like(params[name], start) for name in names}
        state |= {part + name: torch.zeros_like(params[name]) for part in (FIRST, SECOND) for name in names}
        return state | {STEPS: first.new_zeros(()), TURNS: first.new_zeros(())}

    def caution(self, weights: int) -> str | None:
        """Return a warning if these lambdas would withhold much of `weights` weights, else None."""
        rests = self.privacy / (self.sharing * weights) if self.sharing and weights else math.inf
        if self.privacy == 0 or rests <= MUCH:
            return None
        like = PriPrune.privacy / (PriPrune.sharing * CONV_2)  # of the paper's lambdas, on the paper's network
        advised = self.privacy / (like * max(1, weights))
        much = f"its lambdas are for millions of weights, and would withhold much of {weights}"
        return f"{much}; try sharing={advised:.1g}"

    def noise(self, params: Params, steps: int, rng: Generator) -> Params:
        """Return G(0) - G(1) of every weight, samples first: a difference of Gumbel draws is one logistic draw."""
        samples = steps if self.learns == "step" else 1
        return {
            name: torch.rand((samples, *value.shape), generator=rng, device=rng.device).logit_(1e-7).to(value)
            for name, value in params.items()
            if value.ndim > 1
        }

    def turn(
        self,
        loss: LossOf,
        received: Params,
        mask: Mask,
        state: Params,
        batches: Batch,
        noise: Params,
        learning_rate: float,
    ) -> ClientResult:
        """Run Algorithm 3 on batches (steps, B, ...); the function is pure and runs unchanged under vmap."""
        keep, passes = whole_mask(received, mask), passes_for(received, state)
        weights = passes.reload(received, state, keep)
        temperature = (self.temperature * self.cooling ** state[TURNS]).clamp_min(self.coolest)
        summed: Params = {}
        losses, stepwise, final = [], self.learns == "step", len(batches.labels) - 1
        for number in range(final + 1):
            examples = batches.inputs[number], batches.labels[number]
            last, value = grad_and_value(loss)(weights, *examples)
            summed = {name: summed[name] + slope if summed else slope for name, slope in last.items()}
            losses.append(value.detach())
            chance = {name: noise[name][number if stepwise else 0] for name in keep}
            lesson = Lesson(loss, weights, last if stepwise else summed, keep, examples, chance, temperature)
            if number < final:
                state = state | passes.learn(self, state, lesson) if stepwise else state
                weights = passes.descend(weights, last, keep, learning_rate)
        values, withheld, updated = passes.end(self, state, lesson, last, learning_rate)
        state = state | updated | {TURNS: state[TURNS] + 1}
        return ClientResult(values, withheld, state, summed, last, torch.stack(losses).mean(0))

    def objective(
        self,
        logits: Params,
        loss: LossOf,
        weights: Params,
        gradient: Params,
        keep: Mask,
        examples: tuple[Tensor, Tensor],
        noise: Params,
        temperature: Tensor,
        hard: bool = True,
    ) -> Tensor:
        """Return L_local of Eq. 16 as a function of a; `hard` is Eq. 18's straight-through sample, else the soft one.

        L_pri weighs alpha by `gradient`; the gradient of base-pruned weights counts as 0.
        """
        draws = {name: sample_withheld(a, noise[name], temperature, hard) for name, a in logits.items()}
        shared = {name: weights[name] * (1 - draw) for name, draw in draws.items()}
        importance = self.importance({name: torch.where(keep[name], gradient[name], 0) for name in keep})
        privacy = torch.stack([-(importance[name] * logsigmoid(a)).sum() for name, a in logits.items()]).sum()
        sharing = torch.stack([torch.where(keep[name], a.sigmoid(), 0).sum() for name, a in logits.items()]).sum()
        return self.accuracy * loss(weights | shared, *examples) + self.privacy * privacy + self.sharing * sharing

    def importance(self, gradient: Params) -> Params:
        """Return the factor of - log alpha in Eq. 17; it sums to 1 over the network."""
        sizes = {name: value.abs() for name, value in gradient.items()}
        sums = {name: value.sum() for name, value in sizes.items()}
        factors = self.factors(sums, {name: value.numel() for name, value in sizes.items()})
        return {name: value * factors[name] for name, value in sizes.items()}

    def factors(self, sums: Params, numbers: dict[str, int]) -> Params:
        """Return the multiplier of |g| in `importance`, from each layer's sum of |g| and its number of weights."""
        total, overall = sum(numbers.values()), torch.stack(list(sums.values())).sum()
        if self.normalise == "global":
            return {name: 1 / _avoid_zero(overall) for name in sums}
        return {name: numbers[name] / total / _avoid_zero(value) for name, value in sums.items()}

    def step_adam(self, state: Params, slopes: Params) -> Params:
        """Return the state after one step of Adam on a."""
        steps = state[STEPS] + 1
        updated = {STEPS: steps}
        for name, slope in slopes.items():
            first = torch.lerp(state[FIRST + name], slope, 1 - BETA_1)
            second = torch.addcmul(BETA_2 * state[SECOND + name], slope, slope, value=1 - BETA_2)
            length = (second / (1 - BETA_2**steps)).sqrt() + EPSILON
            logits = torch.addcdiv(state[LOGITS + name], first * (self.step / (1 - BETA_1**steps)), length, value=-1)
            updated |= {FIRST + name: first, SECOND + name: second, LOGITS + name: logits}
        return updated


def sample_withheld(logits: Tensor, noise: Tensor, temperature: Tensor, hard: bool = True) -> Tensor:
    """Return v(0) of Eq. 18 with pi = [alpha, 1 - alpha]: 1 means withheld; the gradient is the soft sample's.

    The softmax over the two values (log pi + G) / tau is the sigmoid of (a + G(0) - G(1)) / tau.
    """
    odds = logits + noise
    soft = (odds / temperature).sigmoid()
    return (odds > 0).to(soft) + (soft - soft.detach()) if hard else soft


def _avoid_zero(total: Tensor) -> Tensor:
    return total.clamp_min(torch.finfo(total.dtype).tiny)


# Passes over all weights: by torch operations, or on a GPU by fused kernels -----------------------------------------
class Lesson(NamedTuple):
    """The inputs of a step of alpha besides the state: the arguments of `objective`."""

    loss: LossOf
    weights: Params
    gradient: Params
    keep: Mask
    examples: tuple[Tensor, Tensor]
    noise: Params
    temperature: Tensor


class Plain:
    """Passes of a turn over all weights by torch operations: on any device, in any precision."""

    def reload(self, received: Params, state: Params, keep: Mask) -> Params:
        """Return the weights at the start of the turn."""
        return reload(received, state, keep)

    def learn(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """Return the state's changes by one step of alpha down `objective`."""
        slopes = grad(rule.objective)({name: state[LOGITS + name] for name in lesson.keep}, *lesson)
        return rule.step_adam(state, slopes)

    def descend(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """Return the weights after one step of SGD; base-pruned weights stay 0."""
        steps = {name: torch.where(keep[name], value, 0) if name in keep else value for name, value in grads.items()}
        return {name: torch.sub(value, steps[name], alpha=rate) for name, value in weights.items()}

    def end(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """Run a turn's last step, of alpha, then of the weights.

        Return the values to send, the mask of withheld weights, and the state's changes.
        """
        keep, changes = lesson.keep, self.learn(rule, state, lesson)
        weights = self.descend(lesson.weights, last, keep, rate)
        withheld = {name: (changes[LOGITS + name] > 0) & where for name, where in keep.items()}  # alpha > 1 - alpha
        values, kept = divide(weights, withheld, keeps=True)
        return values, withheld, changes | kept


class Fused(Plain):
    """Passes by kernels, one each: on a GPU, in float32. The kernels contain the slope of `objective` in a.

    On a GPU a turn is bound by memory traffic: torch operations take some 65 passes over the weights of all clients.
    """

    def __init__(self, operators: Any) -> None:
        self.operators = operators

    def reload(self, received: Params, state: Params, keep: Mask) -> Params:
        """Return the weights at the start of the turn, in one pass."""
        names = {name: (state[SAVED + name], state[WITHHELD + name], where) for name, where in keep.items()}
        return received | {name: self._call("reload", received[name], *arguments) for name, arguments in names.items()}

    def learn(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """Return the state's changes, in three passes besides the network of L_acc."""
        changes = {STEPS: state[STEPS] + 1}
        for name, arguments in self._arguments(rule, state, lesson).items():
            changes |= _name_parts(name, *self._call("learn", *arguments, rule.sharing))
        return changes

    def descend(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """Return the weights after one step of SGD, in one pass."""
        return {
            name: self._call("descend", value, grads[name], keep[name], rate)
            if name in keep
            else torch.sub(value, grads[name], alpha=rate)
            for name, value in weights.items()
        }

    def end(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """Run the last step in three passes, besides the network of L_acc."""
        changes, withheld = {STEPS: state[STEPS] + 1}, {}
        values = self.descend({n: v for n, v in lesson.weights.items() if n not in lesson.keep}, last, {}, rate)
        for name, arguments in self._arguments(rule, state, lesson).items():
            results = self._call("end", *arguments, last[name], rule.sharing, rate)
            *learnt, values[name], withheld[name], to_save = results
            changes |= _name_parts(name, *learnt) | {WITHHELD + name: withheld[name], SAVED + name: to_save}
        return {name: values[name] for name in lesson.weights}, withheld, changes

    def _arguments(self, rule: PriPrune, state: Params, lesson: Lesson) -> dict[str, tuple[Tensor, ...]]:
        """Return the kernels' arguments for a step of alpha, by weight tensor."""
        loss, weights, gradient, keep, examples, noise, temperature = lesson
        shared = {name: self._call("draw", weights[name], state[LOGITS + name], noise[name]) for name in keep}
        pulls = grad(lambda shared: rule.accuracy * loss(weights | shared, *examples))(shared)
        sums = {name: self._call("magnitude", gradient[name], where) for name, where in keep.items()}
        factors = rule.factors(sums, {name: where.numel() for name, where in keep.items()})
        steps = state[STEPS] + 1
        adam = rule.step / (1 - BETA_1**steps), 1 - BETA_2**steps
        return {
            name: (
                *(state[part + name] for part in (LOGITS, FIRST, SECOND)),
                *(noise[name], weights[name], pulls[name], gradient[name], where),
                torch.stack([temperature, rule.privacy * factors[name], *adam]),
            )
            for name, where in keep.items()
        }

    def _call(self, name: str, *arguments: Tensor | float) -> Any:
        """Call an operator on the tensors of one client, or under vmap of many clients."""
        operator = getattr(self.operators, f"priprune_{name}")
        results = operator(*(value[None] if isinstance(value, Tensor) else value for value in arguments))
        return results[0] if isinstance(results, Tensor) else [value[0] for value in results]


def passes_for(received: Params, state: Params) -> Plain:
    """Return the fastest passes that are correct for these tensors."""
    tensors = [*received.values(), *(value for value in state.values() if value.is_floating_point())]
    fits = FUSED and all(value.is_cuda and value.dtype == torch.float32 for value in tensors)
    fits = fits and load_kernels("secateur.gpu.priprune_ops", _probe, "priprune") is not None
    return Fused(torch.ops.secateur) if fits else Plain()


def _probe(fused: ModuleType) -> None:
    zero = torch.zeros(1, 1, device="cuda")
    fused.reload(zero, zero, zero.bool(), zero.bool())


def _name_parts(name: str, *parts: Tensor) -> Params:
    return {part + name: value for part, value in zip((LOGITS, FIRST, SECOND), parts, strict=True)}
