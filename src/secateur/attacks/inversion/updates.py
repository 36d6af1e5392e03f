"""Client updates and the gradients that a server derives from them: gradients, local steps, batch statistics.

The tensors of the sent model are never changed: gradients are computed on copies, and BatchNorm does not update its
running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.attacks.inversion.problem import BatchNormInputs, structure
from secateur.errors import WrongInput
from secateur.gpu.precision import full_precision
from secateur.interfaces import PLAIN_SGD, Batch, Gradient, Knowledge, Loss, Params, ServerView, Weights
from secateur.training.optimisers import (
    ONE_GRADIENT,
    LocalSteps,
    bound_gradient,
    list_batches,
    read_steps,
    undo_first_step,
    write_optimiser,
)

BatchNormMode = Literal["eval", "batch"]
RUNNING = ("running_mean", "running_var")


def gradient_update(
    net: nn.Module, state: Params, batch: Batch, batchnorm: BatchNormMode = "eval", loss: Loss = cross_entropy
) -> Gradient:
    """Return the gradient of the mean loss at `state`; BatchNorm uses running (eval) or batch statistics."""
    _refuse_empty(batch)
    fixed, params = _tensors(net, state, batchnorm)
    return Gradient(_gradient(fixed, params, state, batch, loss))


def weights_update(
    net: nn.Module,
    state: Params,
    batch: Batch,
    batchnorm: BatchNormMode = "eval",
    steps: int = 1,
    learning_rate: float = 0.1,
    step_batch: int | None = None,
    loss: Loss = cross_entropy,
    turn: LocalSteps | None = None,
) -> Weights:
    """Return the parameters after `steps` of plain gradient descent from `state`, or after the steps of `turn`.

    A step takes the next `step_batch` examples in order, cyclically, or all of them. BatchNorm's running statistics
    stay those of the sent model.
    """
    _refuse_empty(batch)
    fixed, params = _tensors(net, state, batchnorm)
    if turn is None:
        turn = LocalSteps(list_batches(batch.size, step_batch, steps), (learning_rate,) * steps)

    def differentiate(params: Params, rows: Sequence[int], _: int) -> Params:
        return _gradient(fixed, params, state, batch.take(torch.tensor(rows, device=batch.labels.device)), loss)

    _, trained = turn.unroll(params, differentiate)
    return Weights({name: value.detach().clone() for name, value in trained.items()})


class ObservedChange(NamedTuple):
    """The change of the weights in a client's turn, as an attacker compares it with that of a trial."""

    values: Params
    turn: LocalSteps  # the steps by which a trial makes such a change
    bounds: tuple[Params, Params] | None = None  # the lowest and highest gradient, if the change only shows these


def read_change(view: ServerView, knowledge: Knowledge, bounded: bool = True) -> ObservedChange:
    """Return the change to match, and the local steps that a trial takes to it.

    A gradient is matched as it is, weights by (sent - received) / the first learning rate. For plain gradient descent
    that is the sum of the gradients. One step of SGD shows the gradient. One of Adam shows bounds of it, if the change
    was sent as it is (`bounded`). Frozen parameters of an update are left out.
    """
    _check_fits(knowledge.net, view)
    names = tree.list_trained(knowledge.net)
    received = {name: view.update.values[name] for name in names}
    if isinstance(view.update, Gradient):
        return ObservedChange(received, ONE_GRADIENT)
    turn = read_steps(knowledge)
    rule, rate = turn.optimiser, turn.rates[0]
    change = {name: (view.sent[name] - value) / rate for name, value in received.items()}
    if len(turn.batches) > 1 or (rule.is_adaptive and not bounded):
        return ObservedChange(change, turn)
    bounds = bound_gradient(rule, rate, view.sent, received) if rule.is_adaptive else None
    values = change if rule.is_adaptive else undo_first_step(rule, change, view.sent)
    return ObservedChange(values, replace(turn, optimiser=PLAIN_SGD), bounds)


def read_gradient(view: ServerView, knowledge: Knowledge, attack: str = "the attack") -> Params:
    """Return the gradient of an update for an attack by formulas; refuse an update that shows no gradient.

    The update of several steps of gradient descent is taken as one of the sum of their gradients.
    """
    change = read_change(view, knowledge)
    if not change.turn.optimiser.is_plain or change.bounds is not None:
        shows = f"reads gradients, and steps of {write_optimiser(knowledge.optimiser)} do not show them"
        raise WrongInput("attack", f"{attack} {shows}; use an attack that takes the steps too, such as ig")
    return change.values


def statistics_of(net: nn.Module, state: Params, batch: Batch, batchnorm: BatchNormMode = "eval") -> Params:
    """Return `NAME.mean` and `NAME.var` of every BatchNorm's input over the batch, which GI's strong attacker knows."""
    _refuse_empty(batch)
    fixed, params = _tensors(net, state, batchnorm)
    norms = BatchNormInputs(fixed)
    with full_precision(), torch.no_grad(), norms:
        functional_call(fixed, {**params, **_copy_fixed(fixed, state)}, (batch.inputs,))
    return {
        f"{name}.{statistic}": value
        for name, pair in zip(norms.names, norms.statistics, strict=True)
        for statistic, value in zip(("mean", "var"), pair, strict=True)
    }


def read_statistics(view: ServerView, knowledge: Knowledge) -> Params | None:
    """Return `NAME.mean` and `NAME.var` of every BatchNorm's input in a client's only step; None if not shown.

    A step makes running statistics r' = (1 - m) r + m b of the batch's b, with the unbiased variance. So b is known.
    """
    buffers = view.update.buffers if isinstance(view.update, Weights) else None
    if not buffers or knowledge.batchnorm != "batch" or len(read_steps(knowledge).batches) > 1:
        return None
    fixed, params = _tensors(knowledge.net, view.sent, "batch")
    sizes, norms = dict[str, int](), {name: m for name, m in fixed.named_modules() if isinstance(m, _BatchNorm)}
    for name, module in norms.items():

        def count(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
            sizes[name] = inputs[0].numel() // inputs[0].shape[1]

        module.register_forward_pre_hook(count)
    probe = next(iter(params.values())).new_zeros(max(2, knowledge.batch_size), *knowledge.input_shape)
    with torch.no_grad():
        functional_call(fixed, {**params, **_copy_fixed(fixed, view.sent)}, (probe,))
    statistics: Params = {}
    for name, module in norms.items():
        names = [f"{name}.{key}" for key in RUNNING]
        if sizes.get(name, 0) < 2 or not all(key in buffers and key in view.sent for key in names):
            continue
        share = module.momentum or 1 / float(buffers[f"{name}.num_batches_tracked"])
        mean, variance = ((buffers[key] - (1 - share) * view.sent[key]) / share for key in names)
        statistics[f"{name}.mean"] = mean
        statistics[f"{name}.var"] = (variance * (sizes[name] - 1) / sizes[name]).clamp_min(0)
    return statistics or None


def batchnorm_order(net: nn.Module, state: Params, input_shape: tuple[int, ...]) -> list[str]:
    """Return the names of the BatchNorms in the order of their calls, which is the order of `Compared.statistics`."""
    fixed, params = _tensors(net, state, "eval")
    probe, norms = next(iter(params.values())).new_zeros(2, *input_shape), BatchNormInputs(fixed)
    with torch.no_grad(), norms:
        functional_call(fixed, {**params, **_copy_fixed(fixed, state)}, (probe,))
    return norms.names


def _tensors(net: nn.Module, state: Params, batchnorm: BatchNormMode) -> tuple[nn.Module, Params]:
    """Return the network that the client runs and the parameters that it trains; frozen ones stay as sent."""
    fixed = structure(net, batchnorm)
    names = tree.list_trained(fixed)
    if not names and any(True for _ in fixed.parameters()):
        frozen = "all its parameters are frozen (requires_grad=False), so a client has nothing to send"
        raise WrongInput("model", f"{frozen}; leave requires_grad on for those that it trains")
    return fixed, {name: state[name].detach() for name in names}


def _copy_fixed(fixed: nn.Module, state: Params) -> Params:
    """Return frozen parameters and copies of buffers, so that no forward pass can write to the sent ones.

    Non-persistent buffers come from the network.
    """
    frozen = {name: state[name].detach() for name, value in fixed.named_parameters() if not value.requires_grad}
    return frozen | {name: state.get(name, buffer).detach().clone() for name, buffer in fixed.named_buffers()}


def _gradient(fixed: nn.Module, params: Params, state: Params, batch: Batch, loss: Loss) -> Params:
    """Return the gradient in full float32 on a GPU too: with TF32 the closed form of R-GAP loses 85 dB."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    with full_precision():
        outputs = functional_call(fixed, {**leaves, **_copy_fixed(fixed, state)}, (batch.inputs,))
        if not outputs.requires_grad:
            raise WrongInput("model", "its answers do not depend on its parameters, so there is no gradient to send")
        # materialised as zeros for a parameter that the forward pass does not use
        grads = torch.autograd.grad(loss(outputs, batch.labels), list(leaves.values()), materialize_grads=True)
    return {name: grad.detach() for name, grad in zip(leaves, grads, strict=True)}


def _refuse_empty(batch: Batch) -> None:
    if batch.size == 0:
        raise WrongInput("batch", "is empty; an update is made of at least one example")


def _check_fits(net: nn.Module, view: ServerView) -> None:
    """Refuse an update, or a sent model, whose names or shapes are not the network's, or that is not finite."""
    wanted = {name: tuple(value.shape) for name, value in net.named_parameters()}
    sent = {name: wanted[name] for name in tree.list_trained(net)}
    for field, names, values in (("sent", wanted, view.sent), ("update", sent, view.update.values)):
        _check_names(field, names, values)
    extra = [name for name in view.update.values if name not in wanted]
    if extra:
        raise WrongInput("update", f"holds {extra[0]}, which is no parameter of the model; it has {', '.join(wanted)}")
    broken = [name for name, value in view.update.values.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise WrongInput("update", f"{broken[0]} holds NaN or infinity; nothing can be recovered from that")


def _check_names(field: str, wanted: Mapping[str, tuple[int, ...]], values: Mapping[str, Tensor]) -> None:
    for name, shape in wanted.items():
        if name not in values or tuple(values[name].shape) != shape:
            problem = f"has shape {tuple(values[name].shape)}" if name in values else "is missing"
            raise WrongInput(field, f"{name} {problem}; the model needs shape {shape}")
