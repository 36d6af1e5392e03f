"""Operators of PriPrune's client update; under vmap the clients are lanes, with one launch for all of them.

The kernels need Triton, which comes with torch's CUDA builds: import this file only if a tensor is on a GPU. Every
tensor is (lanes, ...), or (1, ...) if all lanes share the tensor. A single client is one lane.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from secateur.gpu import BETA_1, BETA_2, EPSILON
from secateur.gpu import priprune_kernels as kernels

BLOCK, STRETCH = 1024, 16_384  # entries per program, and per program that sums


def reload(received: Tensor, saved: Tensor, withheld: Tensor, keep: Tensor) -> Tensor:
    """Return the weights at which a client's update starts."""
    saved, withheld = _to_lanes(saved, withheld, beside=(received, keep))
    out, (received, keep) = torch.empty_like(saved), (received.contiguous(), keep.contiguous())
    tensors = received, saved, withheld.view(torch.int8), keep.view(torch.int8), out
    _launch(kernels.reload, out, *tensors, APART=_varies(received), OWN=_varies(keep))
    return out


def draw(weight: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
    """Return the weights times 1 - v for the hard sample v of Eq. 18."""
    tensors = _to_lanes(weight, logits, noise)
    out = torch.empty_like(tensors[0])
    _launch(kernels.draw, out, *tensors, out)
    return out


def magnitude(gradient: Tensor, keep: Tensor) -> Tensor:
    """Return the sum of |g| over the kept entries, (lanes,)."""
    (gradient,), keep = _to_lanes(gradient, beside=(keep,)), keep.contiguous()
    lanes, size = len(gradient), gradient[0].numel()
    out = gradient.new_empty(-(-size // STRETCH), lanes)
    if out.numel():
        options = {"OWN": _varies(keep), "STRETCH": STRETCH, "BLOCK": BLOCK}
        with torch.cuda.device_of(gradient):
            kernels.magnitude[(out.numel(),)](gradient, keep.view(torch.int8), out, size, lanes, **options)
    return out.sum(0)


def descend(weight: Tensor, gradient: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Make one step of SGD on the kept entries; return the weights."""
    (weight, gradient), keep = _to_lanes(weight, gradient, beside=(keep,)), keep.contiguous()
    out = torch.empty_like(weight)
    _launch(kernels.descend, out, weight, gradient, keep.view(torch.int8), out, scalars=(rate,), OWN=_varies(keep))
    return out


def learn(*arguments: Any) -> tuple[Tensor, ...]:
    """Make one step of Adam on a; return a and its two moments.

    The arguments are the tensors of `_LEARN` and `sharing`. See the kernel for `numbers` (lanes, 4).
    """
    *parts, keep, numbers, sharing = arguments
    *inputs, numbers = _to_lanes(*parts, numbers, beside=(keep,))
    unused = inputs[0]
    return _learn(inputs, keep, numbers, unused, (unused,) * 3, (sharing, 0.0), LAST=False)


def end(*arguments: Any) -> tuple[Tensor, ...]:
    """Make the last step of `learn`, and the step of the weights.

    Return a, its two moments, the sent values, the withheld mask and the saved values. The arguments are the tensors of
    `_LEARN`, the last gradient, `sharing` and the learning rate.
    """
    *parts, keep, numbers, last, sharing, rate = arguments
    *inputs, numbers, last = _to_lanes(*parts, numbers, last, beside=(keep,))
    weight = inputs[4]
    values, withheld, saved = (torch.empty_like(weight, dtype=dtype) for dtype in (None, torch.bool, None))
    into = values, withheld.view(torch.int8), saved
    outputs = _learn(inputs, keep, numbers, last, into, (sharing, rate), LAST=True)
    return *outputs, values, withheld, saved


def _learn(
    inputs: list[Tensor],
    keep: Tensor,
    numbers: Tensor,
    last: Tensor,
    sent: tuple[Tensor, ...],
    scalars: tuple[float, float],
    LAST: bool,
) -> tuple[Tensor, ...]:
    """Launch the kernel; return a and its two moments."""
    outputs = tuple(torch.empty_like(inputs[0]) for _ in range(3))
    keep, adam = keep.contiguous(), {"BETA_1": BETA_1, "BETA_2": BETA_2, "EPSILON": EPSILON}
    tensors = *inputs, keep.view(torch.int8), numbers, last, *outputs, *sent
    _launch(kernels.learn, outputs[0], *tensors, scalars=scalars, OWN=_varies(keep), LAST=LAST, **adam)
    return outputs


def _to_lanes(*tensors: Tensor, beside: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Return the tensors contiguous, with one row per lane; tensors in `beside` may be shared and are not expanded."""
    lanes = max(map(len, tensors + beside))
    return [tensor.expand(lanes, *tensor.shape[1:]).contiguous() for tensor in tensors]


def _varies(tensor: Tensor) -> int:
    return int(len(tensor) > 1)


def _launch(kernel: Any, out: Tensor, *tensors: Tensor, scalars: tuple[float, ...] = (), **options: float) -> None:
    if out.numel():
        lanes, size = len(out), out[0].numel()
        with torch.cuda.device_of(out):
            kernel[(lanes * -(-size // BLOCK),)](*tensors, size, lanes, *scalars, BLOCK=BLOCK, **options)


def _vmap_rule(name: str) -> Callable[..., tuple[Any, Any]]:
    """Return the vmap rule of an operator: the mapped axis becomes more lanes of one call."""

    def outside(value: Any, dim: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[None] if dim is None else value.movedim(dim, 0)  # (many or 1, lanes or 1, ...)

    def rule(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        many = [outside(value, dim) for value, dim in zip(arguments, dims, strict=True)]
        lanes = max(value.shape[1] for value in many if isinstance(value, Tensor))
        if lanes > 1:  # lanes of an outer vmap
            sizes = info.batch_size, lanes
            many = [value.expand(*sizes, *value.shape[2:]) if isinstance(value, Tensor) else value for value in many]
        rows = (value.flatten(0, 1) if isinstance(value, Tensor) else value for value in many)
        result = getattr(torch.ops.secateur, name)(*rows)
        if isinstance(result, Tensor):
            return result.unflatten(0, (info.batch_size, lanes)), 0
        return tuple(value.unflatten(0, (info.batch_size, lanes)) for value in result), (0,) * len(result)

    return rule


_LEARN = "Tensor logits, Tensor first, Tensor second, Tensor noise, Tensor weight, Tensor pull, Tensor gradient"
_LEARN += ", Tensor keep, Tensor numbers"
_library = torch.library.Library("secateur", "FRAGMENT")
for _function, _schema in (
    (reload, "(Tensor received, Tensor saved, Tensor withheld, Tensor keep) -> Tensor"),
    (draw, "(Tensor weight, Tensor logits, Tensor noise) -> Tensor"),
    (magnitude, "(Tensor gradient, Tensor keep) -> Tensor"),
    (descend, "(Tensor weight, Tensor gradient, Tensor keep, float rate) -> Tensor"),
    (learn, f"({_LEARN}, float sharing) -> (Tensor, Tensor, Tensor)"),
    (end, f"({_LEARN}, Tensor last, float sharing, float rate) -> ({', '.join(['Tensor'] * 6)})"),
):
    _name = f"priprune_{_function.__name__}"
    _library.define(_name + _schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_vmap(f"secateur::{_name}", _vmap_rule(_name), lib=_library)
