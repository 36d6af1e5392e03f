"""Creation of models by name, loading of saved weights, and a check that a model is a classifier."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import find, users_own
from secateur.errors import WrongInput


def create(name: str, input_shape: tuple[int, ...], classes: int, rng: Generator, **arguments: Any) -> nn.Module:
    """Create a model of the catalogue, or by the user's own `module:function`, initialised from `rng` alone.

    The user's function gets `input_shape` and `classes` if it has parameters of these names.
    """
    shape = {"input_shape": tuple(input_shape), "classes": classes}
    make: Callable[..., Any] = users_own("model", name) if ":" in name else find("model", name)
    shape = {key: value for key, value in shape.items() if _accepts(make, key)}
    seed = int(torch.randint(2**31, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
        torch.default_generator.manual_seed(seed)
        net = _call(name, make, **shape, **arguments)
    if not isinstance(net, nn.Module):
        raise WrongInput("model", f"{name} returned {type(net).__name__}; it must return a torch.nn.Module")
    return net


def _accepts(make: Callable[..., Any], key: str) -> bool:
    parameters = inspect.signature(make).parameters
    return key in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _call(name: str, make: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return make(**arguments)
    except WrongInput:
        raise
    except Exception as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise WrongInput("model", f"{name}({listed}) raised {type(error).__name__}: {error}") from error


def check(net: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
    """Refuse a model without (2, classes) finite outputs for two random rows; the model stays unchanged."""
    first = next((value for value in net.parameters() if value.is_floating_point()), torch.empty(0))
    rows = torch.randn(2, *input_shape, generator=Generator().manual_seed(0)).to(first)
    modes = [(module, module.training) for module in net.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = net.eval()(rows)
    except Exception as error:
        wanted = f"it must take inputs of the shape {tuple(input_shape)}"
        raise WrongInput("model", f"{wanted}, and raised {type(error).__name__}: {error}") from error
    finally:
        for module, training in modes:
            module.training = training
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != (2, classes):
        raise WrongInput("model", f"it must return (rows, classes) = {(2, classes)} logits, and returned {got}")
    if not bool(torch.isfinite(output).all()):
        raise WrongInput("model", "it must return finite numbers, and returned NaN or infinity")


def load_weights(net: nn.Module, path: str | Path) -> nn.Module:
    """Fill a model with the tensors of a .safetensors file and return it; refuse files that do not fit exactly."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(path).suffix != ".safetensors":
        raise WrongInput("weights", f"{path} is not allowed; give a .safetensors file (no pickle is ever read)")
    try:
        saved = load_file(path)
    except (SafetensorError, OSError) as error:
        raise WrongInput("weights", f"{path} cannot be read as a .safetensors file: {error}") from error
    if wrong := misfit(net.state_dict(), saved):
        raise WrongInput("weights", f"{path} does not fit the model; {wrong}")
    net.load_state_dict(saved)
    return net


def misfit(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Describe the tensors that are missing, unexpected or of another shape; empty if all fit."""
    shapes = [
        f"{name} {tuple(tensors[name].shape)} for {tuple(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    wrong = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": [name for name in tensors if name not in wanted],
        "of another shape": shapes,
    }
    return "; ".join(f"{what}: {few(names)}" for what, names in wrong.items() if names)


def few(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
