"""Plain engine: one trial after another with a double backward pass. It is the reference for the other engines."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from secateur import tree
from secateur.attacks.inversion.problem import (
    BatchNormInputs,
    Evaluate,
    Evaluated,
    Objective,
    Problem,
    Variables,
    compared,
)
from secateur.interfaces import Params


def plain(problem: Problem, objective: Objective) -> Evaluate:
    """Return an evaluation that takes the trials one by one."""

    def evaluate(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        evaluations = []
        for i in range(problem.trials):
            leaves = {name: value[i].detach().requires_grad_() for name, value in variables.items()}
            chosen = leaves["labels"].softmax(-1) if labels is None else labels[i]
            statistics: list[tuple[Tensor, Tensor]] = []
            gradient = _gradient(problem, i, leaves["inputs"], chosen, objective.needs_statistics, statistics)
            aim = {name: value[i] for name, value in problem.observed.items()}
            mask = None if problem.mask is None else {name: value[i] for name, value in problem.mask.items()}
            result = compared(problem, gradient, aim, mask, objective.needs_gap)._replace(statistics=statistics)
            total, matching = objective(result, leaves, {name: value[i] for name, value in fixed.items()})
            grads = torch.autograd.grad(total, list(leaves.values()))
            evaluations.append((total.detach(), matching.detach(), dict(zip(leaves, grads, strict=True))))
        totals, matchings, gradients = zip(*evaluations, strict=True)
        return Evaluated(torch.stack(totals), torch.stack(matchings), tree.stack(gradients))

    return evaluate


def _gradient(
    problem: Problem,
    trial: int,
    inputs: Tensor,
    labels: Tensor,
    wanted: bool,
    statistics: list[tuple[Tensor, Tensor]],
) -> Params:
    """Return the update that the client would have sent for the trial, and append BatchNorm statistics.

    The update is the gradient, or the sum of the gradients of the local steps.
    """
    sent = {name: value[trial] for name, value in problem.sent.items()} if problem.own_weights else problem.sent
    names = tree.trained(problem.net)
    params = {name: sent[name].detach().requires_grad_() for name in names}
    others = {name: value for name, value in sent.items() if name not in params}
    total: Params = {}
    for step in range(problem.steps):
        rows = batch_of_step(step, len(inputs), problem.step_batch).to(inputs.device)
        with BatchNormInputs(problem.net, wanted and step == 0) as recorded:
            outputs = functional_call(problem.net, {**params, **others}, (inputs[rows],))
        statistics += recorded
        loss = problem.loss(outputs, labels[rows])
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True, materialize_grads=True)
        total = {name: total[name] + grad if total else grad for name, grad in zip(names, grads, strict=True)}
        params = {name: params[name] - problem.learning_rate * grad for name, grad in zip(names, grads, strict=True)}
    return total


def batch_of_step(step: int, size: int, step_batch: int | None) -> Tensor:
    """Return the indices of the examples of a local step: all, or the next ones in order, cyclically."""
    if step_batch is None:
        return torch.arange(size)
    return torch.arange(step * step_batch, (step + 1) * step_batch) % size
