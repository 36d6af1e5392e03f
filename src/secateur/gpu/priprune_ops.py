"""The passes of PriPrune's turn as operators whose rule for vmap makes lanes of the clients: one launch for all.

Written in Triton, which torch's CUDA builds bring along: import this file only where there is a tensor on a GPU.
Every tensor is (lanes, ...), or (1, ...) where all lanes share it; one that is alone has one lane.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from secateur.gpu import priprune_kernels as kernels
from secateur.gpu.adam import BETA_1, BETA_2, EPSILON

BLOCK, STRETCH = 1024, 16_384  # entries of a program, and of one that adds them up


def reload(received: Tensor, saved: Tensor, withheld: Tensor, keep: Tensor) -> Tensor:
    """The weights at which a turn begins."""
    saved, withheld = _by_lane(saved, withheld, beside=(received, keep))
    out, (received, keep) = torch.empty_like(saved), (received.contiguous(), keep.contiguous())
    given = received, saved, withheld.view(torch.int8), keep.view(torch.int8), out
    _launch(kernels.reload, out, *given, APART=_own(received), OWN=_own(keep))
    return out


def draw(weight: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
    """The weights times 1 - v for the hard sample v of Eq. 18."""
    given = _by_lane(weight, logits, noise)
    out = torch.empty_like(given[0])
    _launch(kernels.draw, out, *given, out)
    return out


def magnitude(gradient: Tensor, keep: Tensor) -> Tensor:
    """(lanes,) the sum of |g| of what is kept."""
    (gradient,), keep = _by_lane(gradient, beside=(keep,)), keep.contiguous()
    lanes, size = len(gradient), gradient[0].numel()
    out = gradient.new_empty(-(-size // STRETCH), lanes)
    if out.numel():
        how = {"OWN": _own(keep), "STRETCH": STRETCH, "BLOCK": BLOCK}
        with torch.cuda.device_of(gradient):
            kernels.magnitude[(out.numel(),)](gradient, keep.view(torch.int8), out, size, lanes, **how)
    return out.sum(0)


def descend(weight: Tensor, gradient: Tensor, keep: Tensor, rate: float) -> Tensor:
    """One step of SGD of what is kept."""
    (weight, gradient), keep = _by_lane(weight, gradient, beside=(keep,)), keep.contiguous()
    out = torch.empty_like(weight)
    _launch(kernels.descend, out, weight, gradient, keep.view(torch.int8), out, scalars=(rate,), OWN=_own(keep))
    return out


def learn(
    logits: Tensor,
    first: Tensor,
    second: Tensor,
    noise: Tensor,
    weight: Tensor,
    pull: Tensor,
    gradient: Tensor,
    keep: Tensor,
    numbers: Tensor,
    sharing: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam on a: a and its two moments. `numbers` (lanes, 4) as the kernel says."""
    parts = logits, first, second, noise, weight, pull, gradient, numbers
    *given, numbers = _by_lane(*parts, beside=(keep,))
    made = tuple(torch.empty_like(given[0]) for _ in range(3))
    nothing = given[0]
    _learn(given, keep, numbers, nothing, made, (nothing,) * 3, (sharing, 0.0), LAST=False)
    return made  # type: ignore[return-value]


def end(
    logits: Tensor,
    first: Tensor,
    second: Tensor,
    noise: Tensor,
    weight: Tensor,
    pull: Tensor,
    gradient: Tensor,
    keep: Tensor,
    numbers: Tensor,
    last: Tensor,
    sharing: float,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, the weights' own step, and of them what is sent, what is withheld, and what is saved."""
    parts = logits, first, second, noise, weight, pull, gradient, numbers, last
    *given, numbers, last = _by_lane(*parts, beside=(keep,))
    made, like = tuple(torch.empty_like(given[0]) for _ in range(3)), given[4]
    left = torch.empty_like(like), torch.empty_like(like, dtype=torch.bool), torch.empty_like(like)
    values, withheld, saved = left
    into = values, withheld.view(torch.int8), saved
    _learn(given, keep, numbers, last, made, into, (sharing, rate), LAST=True)
    return *made, *left  # type: ignore[return-value]


def _learn(
    given: list[Tensor],
    keep: Tensor,
    numbers: Tensor,
    last: Tensor,
    made: tuple[Tensor, ...],
    left: tuple[Tensor, ...],
    scalars: tuple[float, float],
    LAST: bool,
) -> None:
    keep, adam = keep.contiguous(), {"BETA_1": BETA_1, "BETA_2": BETA_2, "EPSILON": EPSILON}
    tensors = *given, keep.view(torch.int8), numbers, last, *made, *left
    _launch(kernels.learn, made[0], *tensors, scalars=scalars, OWN=_own(keep), LAST=LAST, **adam)


def _by_lane(*tensors: Tensor, beside: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """As they lie in memory, lane after lane; those beside them may be shared."""
    lanes = max(map(len, tensors + beside))
    return [tensor.expand(lanes, *tensor.shape[1:]).contiguous() for tensor in tensors]


def _own(tensor: Tensor) -> int:
    return int(len(tensor) > 1)


def _launch(kernel: Any, out: Tensor, *tensors: Tensor, scalars: tuple[float, ...] = (), **how: float) -> None:
    if out.numel():
        lanes, size = len(out), out[0].numel()
        with torch.cuda.device_of(out):
            kernel[(lanes * -(-size // BLOCK),)](*tensors, size, lanes, *scalars, BLOCK=BLOCK, **how)


def _stacked(name: str) -> Callable[..., tuple[Any, Any]]:
    """Under vmap the many are more lanes of one call."""

    def outside(value: Any, dim: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[None] if dim is None else value.movedim(dim, 0)  # (many or 1, lanes or 1, ...)

    def rule(info: Any, dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        many = [outside(value, dim) for value, dim in zip(given, dims, strict=True)]
        lanes = max(value.shape[1] for value in many if isinstance(value, Tensor))
        if lanes > 1:  # of another vmap
            sizes = info.batch_size, lanes
            many = [value.expand(*sizes, *value.shape[2:]) if isinstance(value, Tensor) else value for value in many]
        rows = (value.flatten(0, 1) if isinstance(value, Tensor) else value for value in many)
        found = getattr(torch.ops.secateur, name)(*rows)
        if isinstance(found, Tensor):
            return found.unflatten(0, (info.batch_size, lanes)), 0
        return tuple(value.unflatten(0, (info.batch_size, lanes)) for value in found), (0,) * len(found)

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
    torch.library.register_vmap(f"secateur::{_name}", _stacked(_name), lib=_library)
