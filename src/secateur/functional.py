"""Networks as pure functions of their tensors and their noise: no random draws inside, and no change to the module.

The noise is that of dropout and the normal noise of `Noisy` modules. A dry forward pass lists the noise that a batch
needs. The caller draws this noise from a generator, and the real forward pass consumes the noise in the same order.
One lane and many stacked lanes therefore use equal noise.
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
    """Noise that one dropout, or one noisy module, of a forward pass needs."""

    shape: Size
    rate: float | None  # dropout probability; None: standard normal noise
    dtype: torch.dtype

    def draw(self, rng: Generator) -> Tensor:
        """Draw dropout factors or normal noise on the generator's device.

        A dropout factor is 0 with probability `rate`, else 1 / (1 - rate).
        """
        if self.rate is None:
            return torch.randn(self.shape, generator=rng, device=rng.device, dtype=self.dtype)
        keep = torch.rand(self.shape, generator=rng, device=rng.device) >= self.rate
        return keep.to(self.dtype).mul_(1 / (1 - self.rate) if self.rate < 1 else 0)


class Noisy(nn.Module):
    """Module that reads normal noise from its buffer `noise` (rows, size), which is never saved.

    The initial zeros mean no noise. The caller of the network replaces the buffer to add noise.
    """

    noise: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(1, size), persistent=False)


def noise_asks(net: nn.Module, rows: int) -> dict[str, Ask]:
    """Return the noise that a batch of `rows` rows needs, by name of the noisy module's buffer."""
    modules = {name: module for name, module in net.named_modules() if isinstance(module, Noisy)}
    return {
        f"{name}.noise".lstrip("."): Ask(Size([rows, module.noise.shape[-1]]), None, module.noise.dtype)
        for name, module in modules.items()
    }


def noise_of(net: nn.Module, rows: int, rng: Generator) -> Params:
    """Draw the noise of a batch, by buffer name; empty if the network has no noisy module.

    The caller replaces the network's buffers with these tensors.
    """
    buffers = dict(net.named_buffers())
    return {name: ask.draw(rng).to(buffers[name].device) for name, ask in noise_asks(net, rows).items()}


class _Dropouts(TorchFunctionMode):
    """Torch function mode that replaces every dropout of a forward pass by `answer(inputs, ask)`."""

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
def _other_draws_forbidden(device: torch.device) -> Iterator[None]:
    """Raise WrongInput if a network draws other than by dropout; restore the global generators."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
        yield
        after = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
    if not all(map(torch.equal, before, after)):
        message = "draws random numbers in its forward other than by nn.Dropout or torch.nn.functional.dropout"
        raise WrongInput("model", f"{message} (attention dropout counts; set it to 0), so a run could not be repeated")


class Functional:
    """Function `(tensors, inputs, noise) -> outputs` with the structure of `net`; BatchNorm updates `tensors`."""

    def __init__(self, net: nn.Module, *, training: bool, device: torch.device | str) -> None:
        self.structure = copy.deepcopy(net).to(device).train(training)
        self.noisy = list(noise_asks(net, 0))

    def __call__(self, tensors: Params, inputs: Tensor, noise: Sequence[Tensor] = ()) -> Tensor:
        """Return the outputs; `noise` holds one tensor per entry of `asks`, or is empty."""
        draws = iter(noise)
        if noise:
            tensors = tensors | {name: next(draws) for name in self.noisy}
        with _Dropouts(lambda x, _: x * next(draws)) if noise else nullcontext():
            outputs: Tensor = functional_call(self.structure, tensors, (inputs,))
        return outputs

    @torch.no_grad()
    def asks(self, tensors: Params, inputs: Tensor) -> list[Ask]:
        """List the noise that a batch of this shape needs: of noisy modules, then of dropouts in forward order."""
        asked: list[Ask] = list(noise_asks(self.structure, len(inputs)).values())

        def note(x: Tensor, ask: Ask) -> Tensor:
            asked.append(ask)
            return x

        with _other_draws_forbidden(inputs.device), _Dropouts(note):
            functional_call(self.structure, tree.clone(tensors), (inputs,))
        return asked


def split(net: nn.Module, state: Params) -> tuple[Params, Params]:
    """Split a state into the trained tensors and all others: buffers and frozen parameters."""
    current = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, tensor in net.state_dict().items():
        if name not in state or state[name].shape != tensor.shape:
            problem = f"has shape {tuple(state[name].shape)}" if name in state else "is missing"
            raise WrongInput("weights", f"{name} {problem}; the model needs shape {tuple(tensor.shape)}")
    trained = {name for name, value in net.named_parameters() if value.requires_grad}
    tensors = {name: state.get(name, value).detach() for name, value in current.items()}
    return {n: t for n, t in tensors.items() if n in trained}, {n: t for n, t in tensors.items() if n not in trained}


def join_state(net: nn.Module, tensors: Params) -> Params:
    """Return a state_dict of contiguous copies; names that share one tensor get equal copies."""
    first = {id(value): name for name, value in reversed([*net.named_parameters(), *net.named_buffers()])}
    saved = net.state_dict(keep_vars=True)
    plain = torch.contiguous_format
    return {name: tensors[first[id(value)]].detach().clone(memory_format=plain) for name, value in saved.items()}


def classifier(net: nn.Module, classes: int) -> str:
    """Return the name of the last nn.Linear, in module order, with `classes` outputs."""
    matches: list[str] = [
        name for name, m in net.named_modules() if isinstance(m, nn.Linear) and m.out_features == classes
    ]
    if not matches:
        message = f"has no nn.Linear with {classes} outputs, so labels cannot be read from its gradient"
        raise WrongInput("model", f"{message}; optimise them with the picture (labels: joint) or give them")
    return matches[-1]


def make_static(copied: nn.Module, batchnorm: Literal["eval", "batch"]) -> nn.Module:
    """Change the module in place so that it draws nothing and updates no running statistics; return it.

    If `batchnorm` is "batch", BatchNorm normalises by the statistics of the batch.
    """
    copied.eval()
    if batchnorm == "batch":
        for module in copied.modules():
            if isinstance(module, _BatchNorm):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
    return copied
