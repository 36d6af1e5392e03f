"""Engines that evaluate the objective of many trials, and the choice between them.

The choice depends on the device, the network, the number of trials and the limits of the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from secateur.attacks.inversion.engines.autograd import evaluate_singly, evaluate_stacked
from secateur.attacks.inversion.engines.layerwise import UNTRACED, explain_unsupported, layerwise
from secateur.attacks.inversion.problem import Evaluate, Objective, Problem
from secateur.errors import WrongInput, unknown

ENGINES = ("plain", "stacked", "layerwise")
# Number of parameters below which vmap is faster on a CPU: 1.4 times on ResNet18-w16, but half the speed on ResNet18.
SMALL = 1_000_000
# Number of parameters below which vmap is faster on a GPU than the layer-wise batch with MANY trials: CNN6, LeNet.
TINY = 200_000
MANY = 64
CHUNK = 32  # trials of one vmap call on a CPU: more are no faster and need more memory


class EngineChoice(NamedTuple):
    """Name of the chosen engine and the reason for the choice."""

    name: str
    reason: str


def engine_for(problem: Problem, objective: Objective, device: torch.device | str, name: str = "auto") -> Evaluate:
    """Return the engine called `name`, set up for this problem; "auto" takes the result of `choose`."""
    chunk = CHUNK if torch.device(device).type == "cpu" else None
    engines: dict[str, Callable[[], Evaluate]] = {
        "plain": lambda: evaluate_singly(problem, objective),
        "stacked": lambda: evaluate_stacked(problem, objective, chunk),
        "layerwise": lambda: layerwise(problem, objective, chunk),
    }
    return engines[choose(problem, device, name).name]()


def choose(problem: Problem, device: torch.device | str, name: str = "auto") -> EngineChoice:
    """Return the engine that is probably the fastest, or the requested one; raise WrongInput if it cannot be used."""
    if name not in ("auto", *ENGINES):
        raise unknown("engine", name, ("auto", *ENGINES))
    if name == "plain":
        return EngineChoice(name, "asked for")
    reason = explain_unsupported(problem)
    if name != "auto":
        if name == "layerwise" and reason:
            raise WrongInput("engine", f"layerwise cannot be used: {reason}; allowed: auto, plain, stacked")
        return EngineChoice(name, "asked for")
    size = sum(value.numel() for value in problem.net.parameters())
    if reason and UNTRACED in reason:
        return EngineChoice("plain", reason)
    if torch.device(device).type == "cpu":
        return _choose_on_cpu(problem.trials, size, reason)
    if reason:
        return EngineChoice("stacked", f"layerwise cannot be used: {reason}")
    if size < TINY and problem.trials > MANY:
        return EngineChoice("stacked", f"{problem.trials} trials of a small network")
    return EngineChoice("layerwise", "shared weights")


def _choose_on_cpu(trials: int, size: int, reason: str | None) -> EngineChoice:
    if trials == 1 and (reason or size < SMALL):
        return EngineChoice("plain", "one trial")
    if reason is None:
        return EngineChoice("layerwise", "shared weights")
    if size < SMALL:
        return EngineChoice("stacked", f"layerwise cannot be used: {reason}")
    return EngineChoice("plain", f"a large network on a CPU, and layerwise cannot be used: {reason}")
