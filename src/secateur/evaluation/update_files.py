"""An update captured elsewhere: a .safetensors file of parameter names and tensors."""

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
    """The update in a file, in the precision of the model's parameters; refuses what does not fit the model.

    The file's metadata may say `kind`: gradient or weights; else `weights` says which it is.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get("kind")
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError) as error:
        raise WrongInput("update", f"{path} cannot be read as a .safetensors file: {error}") from error
    kind = said or ("weights" if weights else "gradient")
    if kind not in KINDS:
        raise WrongInput("update", f"{path} says that its kind is {kind!r}; allowed: {', '.join(KINDS)}")
    buffers = {name for name, _ in net.named_buffers()}
    held = {name: value for name, value in values.items() if kind == "gradient" or name not in buffers}
    found = fitting(held, net, str(path))
    if kind == "gradient" and not any(bool(value.any()) for value in found.values()):
        raise WrongInput("update", f"{path} is zero everywhere, so there is nothing to see in it; give another")
    if said is None and kind == "gradient" and _near_the_model(found, net):
        how = "give --local-steps and --learning-rate, or write kind=gradient into the file's metadata"
        raise WrongInput("update", f"{path} looks like weights, for it is nearly the model that was sent; {how}")
    return KINDS[kind](found)


def _near_the_model(values: Params, net: nn.Module) -> bool:
    """Whether an update differs from the model by less than half of itself, as weights do and no gradient does."""
    own = dict(net.named_parameters())
    gap = sum(float((value - own[name].detach()).double().square().sum()) for name, value in values.items())
    return gap < sum(float(value.double().square().sum()) for value in values.values()) / 4


def fitting(values: Params, net: nn.Module, name: str) -> Params:
    """The tensors of an update in the order, precision and place of the model's parameters; refused where unfit.

    What it holds of frozen parameters is left out: they were not trained.
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
