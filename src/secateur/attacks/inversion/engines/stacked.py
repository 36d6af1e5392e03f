"""Stacked engine: all trials at once by torch.func.vmap over the double backward pass.

It supports everything that the plain engine supports.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, vmap

from secateur import tree
from secateur.attacks.inversion.engines.plain import batch_of_step
from secateur.attacks.inversion.problem import (
    BatchNormInputs,
    Evaluate,
    Evaluated,
    Objective,
    Problem,
    Variables,
    compared,
)
from secateur.gpu.stacked_layers import Products
from secateur.interfaces import Mask, Params

Statistics = list[tuple[Tensor, Tensor]]


def stacked(problem: Problem, objective: Objective, chunk: int | None = None) -> Evaluate:
    """Return an evaluation that takes the trials together, or `chunk` of them at a time."""

    def evaluate_trial(
        leaves: Variables, labels: Tensor | None, fixed: Params, sent: Params, observed: Params, mask: Mask | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        chosen = leaves["labels"].softmax(-1) if labels is None else labels
        gradient, statistics = client_gradient(problem, sent, leaves["inputs"], chosen, objective.needs_statistics)
        result = compared(problem, gradient, observed, mask, objective.needs_gap)._replace(statistics=statistics)
        total, matching = objective(result, leaves, fixed)
        return total, (total, matching)

    sent = {name: value.detach() for name, value in problem.sent.items()}
    axis = 0 if problem.own_weights else None
    masks = None if problem.mask is None else 0

    def evaluate(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        axes = (0, None if labels is None else 0, 0, axis, 0, masks)
        evaluate_trials = vmap(grad_and_value(evaluate_trial, has_aux=True), axes, chunk_size=chunk)
        leaves = {name: value.detach() for name, value in variables.items()}
        with layers(problem):
            gradient, (_, (total, matching)) = evaluate_trials(
                leaves, labels, fixed, sent, problem.observed, problem.mask
            )
        return Evaluated(total, matching, gradient)

    return evaluate


def layers(problem: Problem) -> AbstractContextManager[object]:
    """Return the context that selects how layers are computed.

    If every trial has its own weights, a GPU uses dedicated kernels instead of grouped convolutions.
    """
    on_gpu = next(iter(problem.sent.values())).is_cuda
    return Products() if problem.own_weights and on_gpu else nullcontext()


def client_gradient(
    problem: Problem, sent: Params, inputs: Tensor, labels: Tensor, wanted: bool
) -> tuple[Params, Statistics]:
    """Return the update that the client would have sent, as `plain` does, and the statistics of its first step."""
    params = {name: sent[name] for name in tree.trained(problem.net)}
    others = {name: value for name, value in sent.items() if name not in params}

    def task(params: Params, rows: list[int], wanted: bool) -> tuple[Tensor, Statistics]:
        with BatchNormInputs(problem.net, wanted) as recorded:
            outputs = functional_call(problem.net, {**params, **others}, (_take(inputs, rows),))
        return problem.loss(outputs, _take(labels, rows)), recorded

    total: Params = {}
    statistics: Statistics = []
    for step in range(problem.steps):
        rows = batch_of_step(step, len(inputs), problem.step_batch).tolist()
        grads, recorded = grad(task, has_aux=True)(params, rows, wanted and step == 0)
        statistics += recorded
        total = {name: total[name] + value if total else value for name, value in grads.items()}
        params = {name: params[name] - problem.learning_rate * value for name, value in grads.items()}
    return total, statistics


def _take(batch: Tensor, rows: list[int]) -> Tensor:
    """Return the selected examples without an index tensor, whose copy to a GPU cannot be captured in a graph."""
    return batch if rows == list(range(len(batch))) else torch.stack([batch[row] for row in rows])
