"""Captured updates: .safetensors files of parameter names and tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from secateur.errors import WrongInput
from secateur.interfaces import Gradient, Params, Weights
from secateur.models.create import few, misfit
from secateur.tree import trained

KINDS: dict[str, type[Gradient] | type[Weights]] = {"gradient": Gradient, "weights": Weights}


def read_update(path: Path, net: nn.Module, weights: bool) -> Gradient | Weights:
    """Read the update of a file, in the precision of the model's parameters; refuse one that does not fit the model.

    The file's metadata may hold `kind`: gradient or weights. Otherwise `weights` is True for weights.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            stated_kind = (file.metadata() or {}).get("kind")
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError) as error:
        raise WrongInput("update", f"{path} cannot be read as a .safetensors file: {error}") from error
    kind = stated_kind or ("weights" if weights else "gradient")
    if kind not in KINDS:
        raise WrongInput("update", f"{path} says that its kind is {kind!r}; allowed: {', '.join(KINDS)}")
    buffers = {name for name, _ in net.named_buffers()}
    held = {name: value for name, value in values.items() if kind == "gradient" or name not in buffers}
    tensors = fitting(held, net, str(path))
    if kind == "gradient" and not any(bool(value.any()) for value in tensors.values()):
        raise WrongInput("update", f"{path} is zero everywhere, so there is nothing to see in it; give another")
    if stated_kind is None and kind == "gradient" and _near_the_model(tensors, net):
        advice = "give --local-steps and --learning-rate, or write kind=gradient into the file's metadata"
        raise WrongInput("update", f"{path} looks like weights, for it is nearly the model that was sent; {advice}")
    return KINDS[kind](tensors)


def _near_the_model(values: Params, net: nn.Module) -> bool:
    """Return True if the update differs from the model by less than half its norm: weights do, gradients do not."""
    parameters = dict(net.named_parameters())
    gap = sum(float((value - parameters[name].detach()).double().square().sum()) for name, value in values.items())
    return gap < sum(float(value.double().square().sum()) for value in values.values()) / 4


def fitting(values: Params, net: nn.Module, name: str) -> Params:
    """Return an update's tensors in the order, precision and device of the model's parameters; refuse a misfit.

    Tensors of frozen parameters are dropped, as these were not trained.
    """
    every = dict(net.named_parameters())
    wanted = {key: every[key] for key in trained(net)}
    values = {key: value for key, value in values.items() if key in wanted or key not in every}
    if wrong := misfit(wanted, values):
        raise WrongInput("update", f"{name} does not fit the model; {wrong}")
    broken = [key for key, value in values.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise WrongInput("update", f"{name} holds NaN or infinity in {few(broken)}; every number must be finite")
    return {key: values[key].to(value) for key, value in wanted.items()}
