"""What PriPrune's turn does to all weights: by operations of torch, or on a GPU by kernels, a pass each.

There a turn is bound by the memory that it passes over: operations take some 65 passes over the weights of all clients.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch.func import grad

from secateur.defenses.withholding import SAVED, WITHHELD, reloaded, saved, sent
from secateur.gpu.adam import BETA_1, BETA_2
from secateur.gpu.triton_loader import loaded
from secateur.interfaces import LossOf, Mask, Params

if TYPE_CHECKING:
    from secateur.defenses.priprune import PriPrune

LOGITS, FIRST, SECOND = "logits.", "first.", "second."  # of a state's names: a, and Adam's moments of it
STEPS, TURNS = "steps", "turns"

FUSED = True  # whether kernels are used where they can be


class Lesson(NamedTuple):
    """What a step of alpha depends on beside the state: the arguments of `objective`."""

    loss: LossOf
    weights: Params
    gradient: Params
    keep: Mask
    examples: tuple[Tensor, Tensor]
    noise: Params
    temperature: Tensor


class Passes(Protocol):
    """The passes of a turn."""

    def reloaded(self, received: Params, state: Params, keep: Mask) -> Params:
        """The weights at which it begins."""
        ...

    def learnt(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """What a state becomes by one step of alpha down `objective`."""
        ...

    def descended(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """One step of SGD; what the base pruned stays 0."""
        ...

    def ended(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """A turn's last step, of alpha and of the weights: what is sent, what is withheld, what a state becomes."""
        ...


class Plain:
    """By operations of torch: on any device, in any precision."""

    def reloaded(self, received: Params, state: Params, keep: Mask) -> Params:
        """As withholding.py does it."""
        return reloaded(received, state, keep)

    def learnt(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """By autograd."""
        slopes = grad(rule.objective)({name: state[LOGITS + name] for name in lesson.keep}, *lesson)
        return rule.stepped(state, slopes)

    def descended(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """One step of SGD; what the base pruned stays 0."""
        steps = {name: torch.where(keep[name], value, 0) if name in keep else value for name, value in grads.items()}
        return {name: torch.sub(value, steps[name], alpha=rate) for name, value in weights.items()}

    def ended(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """One after the other."""
        keep, found = lesson.keep, self.learnt(rule, state, lesson)
        weights = self.descended(lesson.weights, last, keep, rate)
        withheld = {name: (found[LOGITS + name] > 0) & where for name, where in keep.items()}  # alpha > 1 - alpha
        return sent(weights, withheld, keep), withheld, found | saved(weights, withheld)


class Fused:
    """By kernels: on a GPU, in float32. The slope of `objective` in a is written out in them."""

    def __init__(self, operators: Any) -> None:
        self.operators = operators

    def reloaded(self, received: Params, state: Params, keep: Mask) -> Params:
        """In one pass."""
        names = {name: (state[SAVED + name], state[WITHHELD + name], where) for name, where in keep.items()}
        return received | {name: self._call("reload", received[name], *given) for name, given in names.items()}

    def learnt(self, rule: PriPrune, state: Params, lesson: Lesson) -> Params:
        """In three passes, beside L_acc's network."""
        found = {STEPS: state[STEPS] + 1}
        for name, given in self._given(rule, state, lesson).items():
            found |= _named(name, *self._call("learn", *given, rule.sharing))
        return found

    def descended(self, weights: Params, grads: Params, keep: Mask, rate: float) -> Params:
        """In one pass."""
        return {
            name: self._call("descend", value, grads[name], keep[name], rate)
            if name in keep
            else torch.sub(value, grads[name], alpha=rate)
            for name, value in weights.items()
        }

    def ended(
        self, rule: PriPrune, state: Params, lesson: Lesson, last: Params, rate: float
    ) -> tuple[Params, Mask, Params]:
        """In three passes, beside L_acc's network."""
        found, withheld = {STEPS: state[STEPS] + 1}, {}
        values = self.descended({n: v for n, v in lesson.weights.items() if n not in lesson.keep}, last, {}, rate)
        for name, given in self._given(rule, state, lesson).items():
            *learnt, values[name], withheld[name], home = self._call("end", *given, last[name], rule.sharing, rate)
            found |= _named(name, *learnt) | {WITHHELD + name: withheld[name], SAVED + name: home}
        return {name: values[name] for name in lesson.weights}, withheld, found

    def _given(self, rule: PriPrune, state: Params, lesson: Lesson) -> dict[str, tuple[Tensor, ...]]:
        """What a step of alpha needs of every weight tensor, and its numbers."""
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

    def _call(self, name: str, *given: Tensor | float) -> Any:
        """Of tensors of one client, or under vmap of many."""
        operator = getattr(self.operators, f"priprune_{name}")
        found = operator(*(each[None] if isinstance(each, Tensor) else each for each in given))
        return found[0] if isinstance(found, Tensor) else [each[0] for each in found]


def passes_for(received: Params, state: Params) -> Passes:
    """The fastest that are right here."""
    tensors = [*received.values(), *(value for value in state.values() if value.is_floating_point())]
    fits = FUSED and all(value.is_cuda and value.dtype == torch.float32 for value in tensors)
    return Fused(torch.ops.secateur) if fits and _kernels() else Plain()


@cache
def _kernels() -> ModuleType | None:
    def probe(fused: ModuleType) -> None:
        with _DisableFuncTorch():
            zero = torch.zeros(1, 1, device="cuda")
            fused.reload(zero, zero, zero.bool(), zero.bool())

    return loaded("secateur.gpu.priprune_ops", probe, "priprune")


def _named(name: str, *parts: Tensor) -> Params:
    return {part + name: value for part, value in zip((LOGITS, FIRST, SECOND), parts, strict=True)}
