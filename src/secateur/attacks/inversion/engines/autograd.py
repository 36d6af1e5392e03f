"""Engines by a double backward pass: `evaluate_singly` takes one trial after another, `evaluate_stacked` all by vmap.

The plain engine is the reference for the other engines. The stacked one supports everything that it supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, vmap

from secateur import tree
from secateur.attacks.inversion.problem import (
    BatchNormInputs,
    Evaluate,
    Evaluated,
    Objective,
    Problem,
    Variables,
    compare,
)
from secateur.gpu.stacked_layers import Products
from secateur.interfaces import Mask, Params

Statistics = list[tuple[Tensor, Tensor]]


def evaluate_singly(problem: Problem, objective: Objective) -> Evaluate:
    """Return an evaluation that takes the trials one by one."""

    def evaluate(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        evaluations = []
        for i in range(problem.trials):
            leaves = {name: value[i].detach().requires_grad_() for name, value in variables.items()}
            chosen = leaves["labels"].softmax(-1) if labels is None else labels[i]
            statistics: Statistics = []
            gradient = _gradient(problem, i, leaves["inputs"], chosen, objective.needs_statistics, statistics)
            aim = {name: value[i] for name, value in problem.observed.items()}
            mask, *parts = (part and {name: value[i] for name, value in part.items()} for part in _parts(problem))
            result = compare(problem, gradient, aim, mask, objective.needs_gap, *parts)
            result = result._replace(statistics=statistics)
            total, matching = objective(result, leaves, {name: value[i] for name, value in fixed.items()})
            grads = torch.autograd.grad(total, list(leaves.values()))
            evaluations.append((total.detach(), matching.detach(), dict(zip(leaves, grads, strict=True))))
        totals, matchings, gradients = zip(*evaluations, strict=True)
        return Evaluated(torch.stack(totals), torch.stack(matchings), tree.stack(gradients))

    return evaluate


def _parts(problem: Problem) -> tuple[Mask | None, Mask | None, Params | None, Params | None]:
    """Return the masks of the observed update, and its bounds."""
    return problem.mask, problem.unsigned, *(problem.bounds or (None, None))


def _gradient(
    problem: Problem,
    trial: int,
    inputs: Tensor,
    labels: Tensor,
    wanted: bool,
    statistics: Statistics,
) -> Params:
    """Return the update that the client would have sent for the trial, and append BatchNorm statistics.

    The update is the gradient, or the sum of the gradients of the local steps.
    """
    sent = {name: value[trial] for name, value in problem.sent.items()} if problem.own_weights else problem.sent
    names = tree.list_trained(problem.net)
    params = {name: sent[name].detach().requires_grad_() for name in names}
    others = {name: value for name, value in sent.items() if name not in params}

    def differentiate(params: Params, rows: Sequence[int], step: int) -> Params:
        with BatchNormInputs(problem.net, wanted and step == 0) as recorded:
            outputs = functional_call(problem.net, {**params, **others}, (_take(inputs, rows),))
        statistics.extend(recorded)
        loss = problem.loss(outputs, _take(labels, rows))
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True, materialize_grads=True)
        return dict(zip(names, grads, strict=True))

    return problem.turn.unroll(params, differentiate)[0]


def evaluate_stacked(problem: Problem, objective: Objective, chunk: int | None = None) -> Evaluate:
    """Return an evaluation that takes the trials together, or `chunk` of them at a time."""

    def evaluate_trial(
        leaves: Variables,
        labels: Tensor | None,
        fixed: Params,
        sent: Params,
        observed: Params,
        mask: Mask | None,
        unsigned: Mask | None,
        low: Params | None,
        high: Params | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        chosen = leaves["labels"].softmax(-1) if labels is None else labels
        gradient, statistics = client_gradient(problem, sent, leaves["inputs"], chosen, objective.needs_statistics)
        result = compare(problem, gradient, observed, mask, objective.needs_gap, unsigned, low, high)
        result = result._replace(statistics=statistics)
        total, matching = objective(result, leaves, fixed)
        return total, (total, matching)

    sent = {name: value.detach() for name, value in problem.sent.items()}
    axis = 0 if problem.own_weights else None
    parts = [None if part is None else 0 for part in _parts(problem)]

    def evaluate(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        axes = (0, None if labels is None else 0, 0, axis, 0, *parts)
        evaluate_trials = vmap(grad_and_value(evaluate_trial, has_aux=True), axes, chunk_size=chunk)
        leaves = {name: value.detach() for name, value in variables.items()}
        with layers(problem):
            gradient, (_, (total, matching)) = evaluate_trials(
                leaves, labels, fixed, sent, problem.observed, *_parts(problem)
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
    """Return the update that the client would have sent, and the statistics of its first step."""
    params = {name: sent[name] for name in tree.list_trained(problem.net)}
    others = {name: value for name, value in sent.items() if name not in params}

    def task(params: Params, rows: Sequence[int], wanted: bool) -> tuple[Tensor, Statistics]:
        with BatchNormInputs(problem.net, wanted) as recorded:
            outputs = functional_call(problem.net, {**params, **others}, (_take(inputs, rows),))
        return problem.loss(outputs, _take(labels, rows)), recorded

    statistics: Statistics = []

    def differentiate(params: Params, rows: Sequence[int], step: int) -> Params:
        grads, recorded = grad(task, has_aux=True)(params, rows, wanted and step == 0)
        statistics.extend(recorded)
        return dict(grads)

    return problem.turn.unroll(params, differentiate)[0], statistics


def _take(batch: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the selected examples, or all if there is no row.

    There is no index tensor, as its copy to a GPU cannot be captured in a graph.
    """
    return batch if not rows or list(rows) == list(range(len(batch))) else torch.stack([batch[row] for row in rows])
