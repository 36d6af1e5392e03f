"""Captured updates: a file, or tensors of a user, as an update that fits a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from secateur.errors import WrongInput
from secateur.interfaces import Gradient, Params, Weights
from secateur.models.create import misfit, read_tensors, shorten_list
from secateur.tree import list_trained

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of an update
KINDS: dict[str, type[Gradient] | type[Weights]] = {"gradient": Gradient, "weights": Weights}


def read_update(path: Path, net: nn.Module, weights: bool) -> Gradient | Weights:
    """Read the update of a file, in the precision of the model's parameters; refuse one that does not fit the model.

    The file's metadata may hold `kind`: gradient or weights. Otherwise `weights` is True for weights.
    """
    values, metadata = read_tensors("update", path)
    stated_kind = metadata.get("kind")
    kind = stated_kind or ("weights" if weights else "gradient")
    if kind not in KINDS:
        raise WrongInput("update", f"{path} says that its kind is {kind!r}; allowed: {', '.join(KINDS)}")
    buffers = [name for name, _ in net.named_buffers()]
    held = {name: value for name, value in values.items() if kind == "gradient" or name not in buffers}
    tensors = fit_update(held, net, str(path))
    if kind == "gradient" and not any(bool(value.any()) for value in tensors.values()):
        raise WrongInput("update", f"{path} is zero everywhere, so it reveals nothing; use another")
    if stated_kind is None and kind == "gradient" and _is_near_model(tensors, net):
        advice = "use --local-steps and --learning-rate, or write kind=gradient into the file's metadata"
        raise WrongInput("update", f"{path} looks like weights, for it is nearly the model that was sent; {advice}")
    if kind == "gradient":
        return Gradient(tensors)
    like = next(iter(net.parameters()))
    return Weights(tensors, {name: values[name].to(like.device) for name in buffers if name in values} or None)


def _is_near_model(values: Params, net: nn.Module) -> bool:
    """Return True if the update differs from the model by less than half its norm: weights do, gradients do not."""
    parameters = dict(net.named_parameters())
    gap = sum(float((value - parameters[name].detach()).double().square().sum()) for name, value in values.items())
    return gap < sum(float(value.double().square().sum()) for value in values.values()) / 4


def fit_update(values: Params, net: nn.Module, name: str) -> Params:
    """Return an update's tensors in the order, precision and device of the model's parameters; refuse a misfit.

    Tensors of frozen parameters are dropped, as these were not trained.
    """
    every = dict(net.named_parameters())
    wanted = {key: every[key] for key in list_trained(net)}
    values = {key: value for key, value in values.items() if key in wanted or key not in every}
    if wrong := misfit(wanted, values):
        raise WrongInput("update", f"{name} does not fit the model; {wrong}")
    if strange := [f"{key} ({value.dtype})" for key, value in values.items() if value.dtype not in FLOATS]:
        raise WrongInput("update", f"{name} holds other numbers in {shorten_list(strange)}; save it as float32")
    broken = [key for key, value in values.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise WrongInput(
            "update", f"{name} holds NaN or infinity in {shorten_list(broken)}; every number must be finite"
        )
    return {key: values[key].to(value) for key, value in wanted.items()}
