"""A network as a function of its tensors and of its chance: nothing inside draws, nothing of the given net changes.

Dropout is the chance inside a network, and so is the normal noise of modules that are `Noisy`. A dry forward asks which
noise a batch needs, the caller draws it from a generator of its own, and the forward takes it in the same order. So one
lane and many stacked lanes see equal noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Size, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from secateur import tree
from secateur.errors import WrongInput
from secateur.interfaces import Params

WHOLE_CHANNELS = {F.dropout: False, F.dropout1d: True, F.dropout2d: True, F.dropout3d: True}


class Ask(NamedTuple):
    """What one dropout, or one noisy module, of a forward needs."""

    shape: Size
    rate: float | None  # of a dropout; None: standard normal noise
    dtype: torch.dtype

    def draw(self, rng: Generator) -> Tensor:
        """Zero with probability `rate`, else 1 / (1 - rate), or normal noise, on the generator's device."""
        if self.rate is None:
            return torch.randn(self.shape, generator=rng, device=rng.device, dtype=self.dtype)
        keep = torch.rand(self.shape, generator=rng, device=rng.device) >= self.rate
        return keep.to(self.dtype).mul_(1 / (1 - self.rate) if self.rate < 1 else 0)


class Noisy(nn.Module):
    """A module that takes normal noise from outside: its buffer `noise` (rows, size), which is never saved.

    Zeros, as it is made, stand for no noise; who runs the network gives more, in place of the buffer.
    """

    noise: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(1, size), persistent=False)


def noise_asks(net: nn.Module, rows: int) -> dict[str, Ask]:
    """The buffers of the noisy modules of a network, each with what a batch of so many rows needs there."""
    modules = {name: module for name, module in net.named_modules() if isinstance(module, Noisy)}
    return {
        f"{name}.noise".lstrip("."): Ask(Size([rows, module.noise.shape[-1]]), None, module.noise.dtype)
        for name, module in modules.items()
    }


def noise_of(net: nn.Module, rows: int, rng: Generator) -> Params:
    """Noise for a batch, to be laid over the network's tensors; empty where nothing in it is noisy."""
    own = dict(net.named_buffers())
    return {name: ask.draw(rng).to(own[name].device) for name, ask in noise_asks(net, rows).items()}


class _Dropouts(TorchFunctionMode):
    """Answers every dropout of a forward with `answer(inputs, ask)`."""

    def __init__(self, answer: Callable[[Tensor, Ask], Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in WHOLE_CHANNELS:
            return func(*args, **kwargs)
        inputs, rate = args[0], float(kwargs["p"])
        if not kwargs["training"] or rate == 0:
            return inputs
        shape = inputs.shape
        if WHOLE_CHANNELS[func]:
            shape = Size([*shape[:2], *(1 for _ in shape[2:])])
        return self.answer(inputs, Ask(shape, rate, inputs.dtype))


@contextmanager
def _own_draws_forbidden(device: torch.device) -> Iterator[None]:
    """Refuse a network that draws other than by dropout, and leave the global generators as they were."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
        yield
        after = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
    if not all(map(torch.equal, before, after)):
        message = "draws random numbers in its forward other than by nn.Dropout or torch.nn.functional.dropout"
        raise WrongInput("model", f"{message} (attention dropout counts; set it to 0), so a run could not be repeated")


class Functional:
    """`net`'s structure as a function `(tensors, inputs, noise) -> outputs`; BatchNorm updates the given tensors."""

    def __init__(self, net: nn.Module, *, training: bool, device: torch.device | str) -> None:
        self.structure = copy.deepcopy(net).to(device).train(training)
        self.noisy = list(noise_asks(net, 0))

    def __call__(self, tensors: Params, inputs: Tensor, noise: Sequence[Tensor] = ()) -> Tensor:
        """The outputs; `noise` holds one tensor for each of `asks`, or is empty."""
        given = iter(noise)
        if noise:
            tensors = tensors | {name: next(given) for name in self.noisy}
        with _Dropouts(lambda x, _: x * next(given)) if noise else nullcontext():
            outputs: Tensor = functional_call(self.structure, tensors, (inputs,))
        return outputs

    @torch.no_grad()
    def asks(self, tensors: Params, inputs: Tensor) -> list[Ask]:
        """Which noise a batch of this shape needs: of noisy modules, then of dropouts in the order of the forward."""
        asked: list[Ask] = list(noise_asks(self.structure, len(inputs)).values())

        def note(x: Tensor, ask: Ask) -> Tensor:
            asked.append(ask)
            return x

        with _own_draws_forbidden(inputs.device), _Dropouts(note):
            functional_call(self.structure, tree.clone(tensors), (inputs,))
        return asked


def split(net: nn.Module, state: Params) -> tuple[Params, Params]:
    """The tensors of a state that are trained, and all others that the network has: buffers, frozen parameters."""
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, tensor in net.state_dict().items():
        if name not in state or state[name].shape != tensor.shape:
            found = f"has shape {tuple(state[name].shape)}" if name in state else "is missing"
            raise WrongInput("weights", f"{name} {found}; the model needs shape {tuple(tensor.shape)}")
    trained = {name for name, value in net.named_parameters() if value.requires_grad}
    tensors = {name: state.get(name, value).detach() for name, value in own.items()}
    return {n: t for n, t in tensors.items() if n in trained}, {n: t for n, t in tensors.items() if n not in trained}


def joined(net: nn.Module, tensors: Params) -> Params:
    """A state_dict of contiguous copies: every name that the net saves; names of one tensor get equal copies."""
    first = {id(value): name for name, value in reversed([*net.named_parameters(), *net.named_buffers()])}
    saved = net.state_dict(keep_vars=True)
    plain = torch.contiguous_format
    return {name: tensors[first[id(value)]].detach().clone(memory_format=plain) for name, value in saved.items()}


def classifier(net: nn.Module, classes: int) -> str:
    """The name of the last nn.Linear in the module order that gives `classes` numbers."""
    found: list[str] = [
        name for name, m in net.named_modules() if isinstance(m, nn.Linear) and m.out_features == classes
    ]
    if not found:
        message = f"has no nn.Linear with {classes} outputs, so labels cannot be read from its gradient"
        raise WrongInput("model", f"{message}; optimise them with the picture (labels: joint) or give them")
    return found[-1]


def evaluated(copied: nn.Module, batchnorm: Literal["eval", "batch"]) -> nn.Module:
    """The module itself, changed so that it draws nothing and keeps no running statistics."""
    copied.eval()
    if batchnorm == "batch":
        for module in copied.modules():
            if isinstance(module, _BatchNorm):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
    return copied
