"""Shared parts of the models: their decorator, the check of an input's shape, and sizes from the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from secateur.catalogue import T, method
from secateur.errors import WrongInput


def model(name: str, paper: str) -> Callable[[T], T]:
    """Return `@method("model", ...)` with the input shape, classes and parameter count that a list shows."""

    def register(make: T) -> T:
        arguments = inspect.signature(make).parameters
        shape = {key: arguments[key].default for key in ("input_shape", "classes")}
        return method("model", name, paper, parameters=lambda: size(make), **shape)(make)

    return register


def size(make: Callable[[], nn.Module]) -> int:
    """Return the number of a model's parameters, counted on the meta device without allocation."""
    with torch.device("meta"):
        return sum(value.numel() for value in make().parameters())


def channels(name: str, input_shape: tuple[int, ...], smallest: int = 1) -> int:
    """Return the channels of an image shape; refuse other shapes, and sides under `smallest` pixels."""
    if len(input_shape) != 3 or input_shape[0] < 1 or min(input_shape[1:]) < smallest:
        allowed = f"images as (channels, height, width) with sides of at least {smallest}"
        raise WrongInput("model", f"{name} takes {allowed}, and the data has the shape {tuple(input_shape)}")
    return input_shape[0]


def flat_size(features: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the number of outputs of `features` for one example, computed on the meta device.

    Example:
        >>> flat_size(nn.Conv2d(3, 8, 3), (3, 32, 32))
        7200
    """
    state = {name: value.detach().to("meta") for name, value in features.state_dict().items()}
    # Two rows, because BatchNorm refuses a single value a channel while it trains.
    output: torch.Tensor = functional_call(features, state, torch.empty(2, *input_shape, device="meta"))
    return output[0].numel()
