"""The gaps between members and non-members in confidence, sensitivity and accuracy, overall and by class.

Sensitivity is the change of an answer under a small change of its input. Histograms show the gaps (samia_ppb, Figs. 1
and 4).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput
from secateur.gpu.precision import full_precision
from secateur.inference import probabilities, true_probability
from secateur.interfaces import Batch, BlackBox
from secateur.metrics.estimates import difference
from secateur.metrics.membership import Estimate, Z, share
from secateur.seeding import spawn

ROWS = 4096  # queried at once: the moved copies of a CIFAR would not fit beside it
BINS = 25  # of a histogram


class Gap(NamedTuple):
    """Members minus non-members."""

    overall: Estimate
    classes: dict[int, Estimate]  # those with two members and two non-members at least


def portrait(
    box: BlackBox, members: Batch, nonmembers: Batch, classes: int, rng: Generator
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Return the gaps, and as figures the histograms of confidence and sensitivity and the means of every class."""
    labels = [members.labels, nonmembers.labels]
    inside, outside = (behaviour(box, side, rng) for side in (members, nonmembers))
    overall = {name: gap.overall for name, gap in gaps_between([inside, outside], labels).items()}
    figures = [histogram(name, inside[name], outside[name]) for name in inside if name != "accuracy"]
    for name in inside:
        figures.append(by_class(name, (inside[name], labels[0]), (outside[name], labels[1]), classes))
    return overall, figures


def gaps(box: BlackBox, members: Batch, nonmembers: Batch, rng: Generator) -> dict[str, Gap]:
    """Return the confidence gap (samia_ppb, Eq. 3), the sensitivity gap (Eq. 4), its size, and the generalisation gap.

    Each is train minus test, of the true class. The sensitivity gap can have either sign.
    """
    sides = (members, nonmembers)
    return gaps_between([behaviour(box, side, rng) for side in sides], [side.labels for side in sides])


def behaviour(box: BlackBox, batch: Batch, rng: Generator) -> dict[str, Tensor]:
    """Return (N,) confidence and sensitivity of the true class, and True if the prediction is right.

    Whole numbers, such as tokens, have no sensitivity: they cannot be moved by a little. A metered box is not asked.
    """
    answers = probabilities(box, batch.inputs)
    values = {"confidence": true_probability(answers, batch.labels)}
    if batch.inputs.is_floating_point() and not box.metered:
        moved = sensitivity(box, batch.inputs, rng, answers=answers)
        values["sensitivity"] = true_probability(moved, batch.labels)
    return values | {"accuracy": answers.argmax(1) == batch.labels}


@torch.no_grad()
def sensitivity(
    box: BlackBox,
    inputs: Tensor,
    rng: Generator,
    directions: int = 10,
    epsilon: float = 1e-3,
    shared: bool = False,
    answers: Tensor | None = None,
) -> Tensor:
    """Return (N, K) the mean over n Gaussian directions d of |f(x + eps d) - f(x)| / eps (samia_ppb, Eq. 2).

    Every example has directions of its own, whose chance averages out over a set. `shared` takes the same directions
    for all examples, so that an example's value depends neither on the other examples nor on their order. The
    directions are the same numbers in float32 and in float64. `answers` are f(x), where they are known already.
    """
    if not inputs.is_floating_point():
        raise WrongInput("attack", f"moves inputs by a little, which {inputs.dtype} cannot be; use one that only asks")
    device = inputs.device
    noise = spawn(rng, device)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, device=device).to(inputs.dtype)

    common = draw(directions, *inputs.shape[1:]) if shared else None
    with full_precision(), torch.autocast(device.type, enabled=False):
        answers = probabilities(box, inputs) if answers is None else answers
        moved = torch.zeros_like(answers)
        for part, answer, total in zip(*(torch.split(x, ROWS) for x in (inputs, answers, moved)), strict=True):
            for i in range(directions):
                step = draw(*part.shape) if common is None else common[i]
                total += (probabilities(box, part + epsilon * step) - answer).abs()
    return moved / (directions * epsilon)


def gaps_between(sides: list[dict[str, Tensor]], labels: list[Tensor]) -> dict[str, Gap]:
    """Return the gaps of `gaps` from the behaviour of both sides, members first."""
    if min(part.numel() for part in labels) < 2:
        raise WrongInput("data", "a gap needs at least two members and two non-members")
    by_name = {name: _gap([side[name] for side in sides], labels) for name in sides[0]}
    measured = {"confidence_gap": by_name["confidence"]}
    if (sensitive := by_name.get("sensitivity")) is not None:
        size = Gap(absolute(sensitive.overall), {label: absolute(gap) for label, gap in sensitive.classes.items()})
        measured |= {"sensitivity_gap": sensitive, "sensitivity_gap_size": size}
    return measured | {"generalisation_gap": by_name["accuracy"]}


def _gap(values: list[Tensor], labels: list[Tensor]) -> Gap:
    """Return the gap of one value, members first; bool values are hits."""
    compare = difference_of_shares if values[0].dtype == torch.bool else difference_of_means
    classes = {}
    for label in torch.unique(torch.cat(labels)).tolist():
        of_class = [value[y == label] for value, y in zip(values, labels, strict=True)]
        if min(part.numel() for part in of_class) >= 2:
            classes[int(label)] = compare(*of_class)
    return Gap(compare(*values), classes)


def difference_of_means(members: Tensor, nonmembers: Tensor) -> Estimate:
    """Return the difference of two means with its normal 95 % interval.

    Example:
        >>> round(difference_of_means(torch.tensor([0.9, 0.7]), torch.tensor([0.5, 0.5])).value, 3)
        0.3
    """
    value = float(members.double().mean() - nonmembers.double().mean())
    spread = Z * sum(float(side.double().var()) / side.numel() for side in (members, nonmembers)) ** 0.5
    return Estimate(value, value - spread, value + spread)


def difference_of_shares(members: Tensor, nonmembers: Tensor) -> Estimate:
    """Return the difference of two shares of hits with Newcombe's 95 % interval, never empty at 0 or 1."""
    return difference(share(members), share(nonmembers))


def absolute(gap: Estimate) -> Estimate:
    """Return the size of a gap whose sign means nothing."""
    ends = abs(gap.low), abs(gap.high)
    return Estimate(abs(gap.value), 0.0 if gap.low <= 0 <= gap.high else min(ends), max(ends), gap.note)


def histogram(quantity: str, members: Tensor, nonmembers: Tensor) -> dict[str, Any]:
    """Return the shares of members and non-members in equal bins (samia_ppb, Fig. 1); confidence is in [0, 1]."""
    both = torch.cat([members, nonmembers]).double().cpu()
    top = 1.0 if quantity == "confidence" else max(float(both.quantile(0.99)), 1e-12)
    edges = torch.linspace(0, top, BINS + 1, dtype=torch.float64)
    sides = {"members": members, "nonmembers": nonmembers}
    shares = {name: _shares(side.double().cpu().clamp(0, top), edges) for name, side in sides.items()}
    means = {f"{name[:-1]}_mean": float(side.double().mean()) for name, side in sides.items()}
    return {"kind": "histogram", "quantity": quantity, "edges": edges.tolist(), **shares, **means}


def by_class(
    quantity: str, members: tuple[Tensor, Tensor], nonmembers: tuple[Tensor, Tensor], classes: int
) -> dict[str, Any]:
    """Return the means of a quantity over members and non-members of every class (Fig. 4); None for an empty class."""
    means = [[_mean(values[labels == label]) for label in range(classes)] for values, labels in (members, nonmembers)]
    return {"kind": "classes", "quantity": quantity, "members": means[0], "nonmembers": means[1]}


def _shares(values: Tensor, edges: Tensor) -> list[float]:
    counts: Tensor = torch.histogram(values, edges).hist
    return (counts / max(values.numel(), 1)).tolist()


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if values.numel() else None
