"""Models by name: their decorator, creation, saved weights, and checks that a model fits its data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.utils import _pair

from secateur.catalogue import T, find, method, methods, users_own
from secateur.errors import NotFinite, WrongInput, require
from secateur.models.formats import PICKLES, clean_state, is_brought, read_state
from secateur.models.outputs import adapt_outputs
from secateur.models.sparsity import fold_masks

TIMM = "timm:"  # before the name of a network of the package timm


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
        raise WrongInput("model", f"{name} needs {allowed}; the data has the shape {tuple(input_shape)}")
    return input_shape[0]


def flat_size(features: Iterable[nn.Module], input_shape: tuple[int, ...]) -> int:
    """Return the number of outputs for one image of layers in sequence, from their convolutions and pools alone.

    A forward pass on the meta device would load parts of torch's compiler, half a second or more.

    Example:
        >>> flat_size([nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)], (3, 32, 32))
        1800
    """
    width, *sides = input_shape
    for layer in features:
        if isinstance(layer, nn.Conv2d):
            width = layer.out_channels
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            kernels, strides, paddings = (_pair(size) for size in (layer.kernel_size, layer.stride, layer.padding))
            sides = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(sides, kernels, strides, paddings, strict=True)]
    return width * prod(sides)


def create(name: str, input_shape: tuple[int, ...], classes: int, rng: Generator, **arguments: Any) -> nn.Module:
    """Create a model of the catalogue, of `timm:NAME` or by the user's own `module:function`, from `rng` alone.

    The user's function gets `input_shape` and `classes` if it has parameters of these names.
    """
    net = make_model(name, input_shape, classes, rng, **arguments)
    if not isinstance(net, nn.Module):
        wanted = "it must return a torch.nn.Module, or be audited as it is with --pruner none"
        raise WrongInput("model", f"{name} returned {type(net).__name__}; {wanted}")
    net = fold_masks(net)
    return net if name in methods("model") else adapt(net, example_rows(net, input_shape), classes)


def make_model(name: str, input_shape: tuple[int, ...], classes: int, rng: Generator, **arguments: Any) -> Any:
    """Return whatever the maker of a model returns; its draws come from `rng` alone."""
    if is_brought(name):
        how = "audit it without a pruner, or name its structure as module:function and its weights by --weights"
        raise WrongInput("model", f"{name} can only be asked; {how}")
    shape = {"input_shape": tuple(input_shape), "classes": classes}
    make: Callable[..., Any] = _maker(name)
    parameters = inspect.signature(make).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        shape = {key: value for key, value in shape.items() if key in parameters}
    arguments = shape | arguments
    seed = int(torch.randint(2**31, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
        torch.default_generator.manual_seed(seed)
        try:
            return make(**arguments)
        except WrongInput:
            raise
        except Exception as error:
            listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise WrongInput("model", f"{name}({listed}) raised {type(error).__name__}: {error}") from error


def adapt(net: nn.Module, rows: Tensor, classes: int) -> nn.Module:
    """Return the user's network, with a hook where it returns something else than a table of classes.

    A network that fails on these rows stays as it is: `check` explains the failure.
    """
    with suppress(Exception):
        return adapt_outputs(net, _try(net, rows, track=True), classes)
    return net


def is_users_own(name: str) -> bool:
    """Return True if a model is a user's own `module:function`.

    Example:
        >>> is_users_own("my_models:net"), is_users_own("resnet18"), is_users_own("timm:resnet18")
        (True, False, False)
    """
    return ":" in name and not name.startswith(TIMM)


def _maker(name: str) -> Callable[..., Any]:
    if not name.startswith(TIMM):
        return users_own("model", name) if ":" in name else find("model", name)
    require("timm", "timm")
    import timm

    def make(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        inputs = channels(name, input_shape)
        net: nn.Module = timm.create_model(
            name.removeprefix(TIMM), pretrained=False, num_classes=classes, in_chans=inputs
        )
        return net

    return make


def check_untrained(name: str, input_shape: tuple[int, ...], classes: int) -> None:
    """Refuse a user's function that returns trained weights: its parameters are equal for two seeds.

    An audit would train these weights further, on a random split, and so would the attacker's models begin.
    """
    if is_users_own(name) and is_trained(name, input_shape, classes):
        problem = f"{name} returns equal weights for two seeds: they are trained already, or have a seed of their own"
        advice = "return new weights and pass trained ones by --weights, or audit them as they are by --pruner none"
        raise WrongInput("model", f"{problem}; {advice}")


def is_trained(name: str, input_shape: tuple[int, ...], classes: int) -> bool:
    """Return True if a user's function returns the same model for two seeds, or one that cannot be trained."""
    models = [make_model(name, input_shape, classes, Generator().manual_seed(seed)) for seed in (0, 1)]
    if not all(isinstance(one, nn.Module) for one in models) or isinstance(models[0], torch.jit.ScriptModule):
        return True
    weights = [[value for value in one.parameters() if value.ndim > 1] for one in models]
    return all(map(torch.equal, *weights))


def check(net: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
    """Refuse a model without (2, classes) finite outputs for two random rows; the model stays unchanged."""
    rows = example_rows(net, input_shape)
    with explain_failure("model", rows):
        output = _try(net, rows)
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != (2, classes):
        raise WrongInput("model", f"it must return (rows, classes) = {(2, classes)} logits, and returned {got}")
    if not bool(torch.isfinite(output).all()):
        raise WrongInput("model", "it must return finite numbers, and returned NaN or infinity")


def accepts(net: nn.Module, rows: Tensor) -> bool:
    """Return True if a model answers these rows; an embedding refuses floats, other layers whole numbers."""
    try:
        _try(net, rows)
    except Exception:  # a user's model may raise anything
        return False
    return True


def example_rows(net: nn.Module, input_shape: Iterable[int]) -> Tensor:
    """Return two random rows that the model accepts; zeros of whole numbers for a model that begins with tokens."""
    first = next((value for value in net.parameters() if value.is_floating_point()), torch.empty(0))
    rows = torch.randn(2, *input_shape, generator=Generator().manual_seed(0)).to(first)
    tokens = torch.zeros_like(rows, dtype=torch.int64)
    return tokens if not accepts(net, rows) and accepts(net, tokens) else rows


def _try(net: nn.Module, rows: Tensor, track: bool = False) -> Any:
    """Return a model's answer in eval mode, in the precision of its weights; the model stays unchanged.

    With `track` the answer has the history of its computation.
    """
    first = next((value for value in net.parameters() if value.is_floating_point()), torch.empty(0))
    modes = [(module, module.training) for module in net.modules()]
    try:
        with torch.set_grad_enabled(track), torch.random.fork_rng(devices=[]):
            return net.eval()(rows.to(first) if rows.is_floating_point() else rows.to(first.device))
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def explain_failure(field: str, rows: Tensor) -> Iterator[None]:
    """Turn whatever a user's model raises on these rows into one WrongInput."""
    try:
        yield
    except NotFinite as error:
        raise WrongInput(field, error.message) from error
    except WrongInput as error:
        raise WrongInput(field, error.message) if error.field == "model" else error from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        wanted = f"must accept inputs of the shape {tuple(rows.shape[1:])}"
        hint = "" if rows.is_floating_point() else f", and of the type {rows.dtype}"
        last = rows.ndim == 4 and rows.shape[1] > rows.shape[3]
        layout = "; pictures must be (N, channels, height, width)" if last or rows.ndim in (2, 3) else ""
        layout = layout if rows.is_floating_point() else ""
        raise WrongInput(field, f"{wanted}{hint}; it raised {reason}{layout}") from error


def check_labels(field: str, labels: Tensor, classes: int) -> None:
    """Refuse labels that are no class of a model."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        advice = f"; labels must start at 0: use labels - {low}" if low > 0 and high - low < classes else ""
        allowed = f"allowed by the model's outputs: 0 to {classes - 1}"
        raise WrongInput(field, f"labels from {low} to {high}; {allowed}{advice}")


def load_weights(net: nn.Module, path: str | Path) -> nn.Module:
    """Fill a model with the tensors of a file and return it; refuse files that do not fit exactly.

    The file is .safetensors, or a state dict as .pt or .pth. Layers shrink where `secateur prune --remove` wrote it.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (".pt", ".pth", *PICKLES):
        saved = read_state(Path(path))
    elif suffix == ".safetensors":
        saved = clean_state(read_tensors("weights", path)[0])
        net = shrink(net, path)
    else:
        raise WrongInput("weights", f"{path} is not allowed; use a .safetensors file, or a state dict as .pt or .pth")
    if wrong := misfit(net.state_dict(), saved):
        raise WrongInput("weights", f"{path} does not fit the model; {wrong}")
    net.load_state_dict(saved)
    return net


def shrink(net: nn.Module, path: str | Path) -> nn.Module:
    """Return the model with the layers of a file of `secateur prune` that lost channels; for other files unchanged."""
    from safetensors import safe_open

    if Path(path).suffix.lower() != ".safetensors":
        return net
    with explain_tensors("weights", path), safe_open(path, framework="pt") as file:
        recipe = json.loads((file.metadata() or {}).get("secateur", "{}"))
        config = recipe.get("config", {}) if isinstance(recipe, dict) else None
        if not isinstance(config, dict):
            raise ValueError("its metadata are not those of secateur prune")
        if not config.get("remove") and not str(config.get("pruner", "")).startswith("torch-pruning"):
            return net
        return resize(net, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118


def resize(net: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Resize the network's layers in place to the shapes of saved tensors; kept entries are the first ones."""
    for prefix, module in net.named_modules():
        depthwise = isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels
        for kind in ("_parameters", "_buffers"):
            for name, value in getattr(module, kind).items():
                shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                if value is not None and shape is not None and tuple(value.shape) != shape:
                    kept = value.detach()[tuple(map(slice, shape))].clone()
                    getattr(module, kind)[name] = nn.Parameter(kept) if kind == "_parameters" else kept
        if isinstance(module, nn.Conv2d):
            module.groups = module.weight.shape[0] if depthwise else module.groups
            module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        elif isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d) and module.affine:
            module.num_features = module.weight.shape[0]
    return net


@contextmanager
def explain_tensors(field: str, path: str | Path) -> Iterator[None]:
    """Turn an unreadable .safetensors file into one WrongInput."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise WrongInput(field, f"{path} cannot be read as a .safetensors file: {error}") from error


def read_tensors(field: str, path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a .safetensors file by name, and its metadata."""
    from safetensors import safe_open

    with explain_tensors(field, path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


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
        "complex": [
            name for name in wanted if name in tensors and tensors[name].is_complex() > wanted[name].is_complex()
        ],
    }
    return "; ".join(f"{what}: {shorten_list(names)}" for what, names in wrong.items() if names)


def shorten_list(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
