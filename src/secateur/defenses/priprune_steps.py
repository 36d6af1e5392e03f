"""Passes of PriPrune's turn over all weights: by torch operations, or on a GPU by fused kernels, one pass each.

On a GPU a turn is bound by memory traffic: torch operations take some 65 passes over the weights of all clients.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad

from secateur.defenses.withholding import SAVED, WITHHELD, reloaded, saved, sent
from secateur.gpu.adam import BETA_1, BETA_2
from secateur.gpu.triton_loader import load_kernels
from secateur.interfaces import LossOf, Mask, Params

if TYPE_CHECKING:
    from secateur.defenses.priprune import PriPrune

LOGITS, FIRST, SECOND = "logits.", "first.", "second."  # prefixes of a state's names: a, and Adam's moments of a
STEPS, TURNS = "steps", "turns"

FUSED = True  # True: kernels are used where possible


class Lesson(NamedTuple):
    """The inputs of a step of alpha besides the state: the arguments of `objective`."""

    loss: LossOf
    weights: Params
    gradient: Params
    keep: Mask
    examples: tuple[Tensor, Tensor]
    noise: Params
    temperature: Tensor


class Passes(Protocol):
    """Protocol of the passes of a turn."""

    def reloaded(self, received: Params, state: Params, keep: Mask) -> Params:
        """Return the weights at the start of the turn."""
        ...

    def learnt(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """Return the state's changes by one step of alpha down `objective`."""
        ...

    def descended(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """Return the weights after one step of SGD; base-pruned weights stay 0."""
        ...

    def ended(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """Run a turn's last step, of alpha and of the weights.

        Return the values to send, the mask of withheld weights, and the state's changes.
        """
        ...


class Plain:
    """Passes by torch operations: on any device, in any precision."""

    def reloaded(self, received: Params, state: Params, keep: Mask) -> Params:
        """Return the weights at the start of the turn, by `withholding.reloaded`."""
        return reloaded(received, state, keep)

    def learnt(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """Return the state's changes, with slopes by autograd."""
        slopes = grad(rule.objective)({name: state[LOGITS + name] for name in lesson.keep}, *lesson)
        return rule.stepped(state, slopes)

    def descended(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """Return the weights after one step of SGD; base-pruned weights stay 0."""
        steps = {name: torch.where(keep[name], value, 0) if name in keep else value for name, value in grads.items()}
        return {name: torch.sub(value, steps[name], alpha=rate) for name, value in weights.items()}

    def ended(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """Run the step of alpha, then the step of the weights."""
        keep, changes = lesson.keep, self.learnt(rule, state, lesson)
        weights = self.descended(lesson.weights, last, keep, rate)
        withheld = {name: (changes[LOGITS + name] > 0) & where for name, where in keep.items()}  # alpha > 1 - alpha
        return sent(weights, withheld, keep), withheld, changes | saved(weights, withheld)


class Fused:
    """Passes by kernels: on a GPU, in float32. The kernels contain the slope of `objective` in a."""

    def __init__(self, operators: Any) -> None:
        self.operators = operators

    def reloaded(self, received: Params, state: Params, keep: Mask) -> Params:
        """Return the weights at the start of the turn, in one pass."""
        names = {name: (state[SAVED + name], state[WITHHELD + name], where) for name, where in keep.items()}
        return received | {name: self._call("reload", received[name], *arguments) for name, arguments in names.items()}

    def learnt(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """Return the state's changes, in three passes besides the network of L_acc."""
        changes = {STEPS: state[STEPS] + 1}
        for name, arguments in self._arguments(rule, state, lesson).items():
            changes |= _named(name, *self._call("learn", *arguments, rule.sharing))
        return changes

    def descended(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """Return the weights after one step of SGD, in one pass."""
        return {
            name: self._call("descend", value, grads[name], keep[name], rate)
            if name in keep
            else torch.sub(value, grads[name], alpha=rate)
            for name, value in weights.items()
        }

    def ended(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """Run the last step in three passes, besides the network of L_acc."""
        changes, withheld = {STEPS: state[STEPS] + 1}, {}
        values = self.descended({n: v for n, v in lesson.weights.items() if n not in lesson.keep}, last, {}, rate)
        for name, arguments in self._arguments(rule, state, lesson).items():
            results = self._call("end", *arguments, last[name], rule.sharing, rate)
            *learnt, values[name], withheld[name], to_save = results
            changes |= _named(name, *learnt) | {WITHHELD + name: withheld[name], SAVED + name: to_save}
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


def passes_for(received: Params, state: Params) -> Passes:
    """Return the fastest passes that are correct for these tensors."""
    tensors = [*received.values(), *(value for value in state.values() if value.is_floating_point())]
    fits = FUSED and all(value.is_cuda and value.dtype == torch.float32 for value in tensors)
    fits = fits and load_kernels("secateur.gpu.priprune_ops", _probe, "priprune") is not None
    return Fused(torch.ops.secateur) if fits else Plain()


def _probe(fused: ModuleType) -> None:
    zero = torch.zeros(1, 1, device="cuda")
    fused.reload(zero, zero, zero.bool(), zero.bool())


def _named(name: str, *parts: Tensor) -> Params:
    return {part + name: value for part, value in zip((LOGITS, FIRST, SECOND), parts, strict=True)}
