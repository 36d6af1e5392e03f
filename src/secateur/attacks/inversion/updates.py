"""What a client sends and what a server makes of it: gradients, weights after local steps, batch statistics.

The sent model's tensors are never changed: gradients are taken of copies, and BatchNorm keeps no running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.attacks.inversion.engines.plain import batch_of_step
from secateur.attacks.inversion.problem import BatchNormInputs, structure
from secateur.errors import WrongInput
from secateur.gpu.precision import full_precision
from secateur.interfaces import Batch, Gradient, Knowledge, Loss, Params, ServerView, Weights

BatchNormMode = Literal["eval", "batch"]


def gradient_update(
    net: nn.Module, state: Params, batch: Batch, batchnorm: BatchNormMode = "eval", loss: Loss = cross_entropy
) -> Gradient:
    """The gradient of the batch's mean loss at `state`, BatchNorm by running (eval) or by the batch's statistics."""
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
) -> Weights:
    """The parameters after `steps` of plain gradient descent from `state`.

    A step takes the next `step_batch` examples in order and again from the start, or all of them; BatchNorm's running
    statistics stay those of the sent model.
    """
    _refuse_empty(batch)
    fixed, params = _tensors(net, state, batchnorm)
    for step in range(steps):
        rows = batch_of_step(step, batch.size, step_batch).to(batch.labels.device)
        gradient = _gradient(fixed, params, state, batch.take(rows), loss)
        params = {name: value - learning_rate * gradient[name] for name, value in params.items()}
    return Weights({name: value.detach().clone() for name, value in params.items()})


def observed_gradient(view: ServerView, knowledge: Knowledge) -> Params:
    """What is matched: a gradient as it is; of weights (sent - received) / learning rate, the sum over local steps.

    What an update holds of frozen parameters says nothing and is left out.
    """
    _check_fits(knowledge.net, view)
    if isinstance(view.update, Gradient):
        return {name: view.update.values[name] for name in tree.trained(knowledge.net)}
    rate = knowledge.learning_rate
    if not rate:
        raise WrongInput("learning_rate", "is needed to turn weights into gradients; give the client's own, above 0")
    return {name: (view.sent[name] - view.update.values[name]) / rate for name in tree.trained(knowledge.net)}


def statistics_of(net: nn.Module, state: Params, batch: Batch, batchnorm: BatchNormMode = "eval") -> Params:
    """Mean and variance of every BatchNorm's input over the batch, `NAME.mean` and `NAME.var`: GI's strong attacker."""
    _refuse_empty(batch)
    fixed, params = _tensors(net, state, batchnorm)
    names: list[str] = []
    with full_precision(), torch.no_grad(), BatchNormInputs(fixed, True) as noted, _Order(fixed, names):
        functional_call(fixed, {**params, **_others(fixed, state)}, (batch.inputs,))
    return {
        f"{name}.{what}": value
        for name, pair in zip(names, noted, strict=True)
        for what, value in zip(("mean", "var"), pair, strict=True)
    }


def batchnorm_order(net: nn.Module, state: Params, input_shape: tuple[int, ...]) -> list[str]:
    """The names of the BatchNorms as the forward meets them, which is the order of `Compared.statistics`."""
    fixed, params = _tensors(net, state, "eval")
    names: list[str] = []
    two = next(iter(params.values())).new_zeros(2, *input_shape)
    with torch.no_grad(), _Order(fixed, names):
        functional_call(fixed, {**params, **_others(fixed, state)}, (two,))
    return names


class _Order:
    """Notes the names of the BatchNorms in the order in which they are called, while it is entered."""

    def __init__(self, net: nn.Module, names: list[str]) -> None:
        self.modules = {name: module for name, module in net.named_modules() if isinstance(module, _BatchNorm)}
        self.names = names

    def __enter__(self) -> None:
        self._hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: self.names.append(name))
            for name, module in self.modules.items()
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _tensors(net: nn.Module, state: Params, batchnorm: BatchNormMode) -> tuple[nn.Module, Params]:
    """The structure that the client runs, and the parameters that it trains; frozen ones stay as they were sent."""
    fixed = structure(net, batchnorm)
    names = tree.trained(fixed)
    if not names and any(True for _ in fixed.parameters()):
        frozen = "all its parameters are frozen (requires_grad=False), so a client has nothing to send"
        raise WrongInput("model", f"{frozen}; leave requires_grad on for those that it trains")
    return fixed, {name: state[name].detach() for name in names}


def _others(fixed: nn.Module, state: Params) -> Params:
    """Frozen parameters and copies of buffers, so that no forward can write to the sent ones.

    Buffers that are not saved come from the structure.
    """
    frozen = {name: state[name].detach() for name, value in fixed.named_parameters() if not value.requires_grad}
    return frozen | {name: state.get(name, own).detach().clone() for name, own in fixed.named_buffers()}


def _gradient(fixed: nn.Module, params: Params, state: Params, batch: Batch, loss: Loss) -> Params:
    """In real float32 on a GPU too: with TF32 the closed form of R-GAP loses 85 dB."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    with full_precision():
        outputs = functional_call(fixed, {**leaves, **_others(fixed, state)}, (batch.inputs,))
        if not outputs.requires_grad:
            raise WrongInput("model", "its answers do not depend on its parameters, so there is no gradient to send")
        # zeros for a parameter that the forward does not use
        grads = torch.autograd.grad(loss(outputs, batch.labels), list(leaves.values()), materialize_grads=True)
    return {name: grad.detach() for name, grad in zip(leaves, grads, strict=True)}


def _refuse_empty(batch: Batch) -> None:
    if batch.size == 0:
        raise WrongInput("batch", "is empty; an update is made of at least one example")


def _check_fits(net: nn.Module, view: ServerView) -> None:
    """Refuse an update, or a sent model, whose names or shapes are not the network's, or that is not finite."""
    wanted = {name: tuple(value.shape) for name, value in net.named_parameters()}
    sent = {name: wanted[name] for name in tree.trained(net)}
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
            found = f"has shape {tuple(values[name].shape)}" if name in values else "is missing"
            raise WrongInput(field, f"{name} {found}; the model needs shape {shape}")
