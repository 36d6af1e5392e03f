"""The search for ATS's policies: random triples of operations, selected by a privacy and an accuracy score.

Gao et al. 2021. Neither score needs a training or an attack, so many policies can be scored.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from secateur.defenses.ats import Policy, Transformation
from secateur.defenses.ats_operations import OPERATIONS
from secateur.errors import WrongInput
from secateur.functional import Functional, split
from secateur.inference import per_example_gradients
from secateur.interfaces import Batch, Loss, Params
from secateur.progress import progress

OF_A_POLICY = 3  # operations per policy
STEPS = 20  # from noise to the picture, so 21 blends
LEAST = 1e-5  # k, added to the eigenvalues


class Judged(NamedTuple):
    """A policy and its scores."""

    policy: Policy
    privacy: float  # lower reveals less
    accuracy: float  # higher learns better; at most minus the number of examples


def search(
    net: nn.Module,
    trained: Params,
    untrained: Params,
    batch: Batch,
    mean: Tensor,
    std: Tensor,
    rng: Generator,
    candidates: int = 1600,
    threshold: float | None = -85.0,
) -> list[Judged]:
    """Return the policies of three operations with an accuracy score of at least `threshold`, most private first.

    A threshold of None is the median of the candidates, because the scale of the score depends on the network and the
    data.

    The privacy score is of a partly trained model, the accuracy score of an untrained one. Both use one batch of inputs
    (pixels - mean) / std, which every policy transforms with the same draws. No accuracy score is above minus the
    number of examples. The authors' threshold is for about 63 examples, one of each class that occurs among 100. Pass
    the result to the defense as `AutomaticTransformationSearch(write_policies(...))`.
    """
    if threshold is not None and threshold > -batch.size:
        reach = f"{threshold} cannot be reached with {batch.size} examples"
        raise WrongInput("threshold", f"{reach}; give at most {-batch.size}, or fewer examples")
    chosen = torch.randint(len(OPERATIONS), (candidates, OF_A_POLICY), generator=rng)
    noise = torch.rand(batch.inputs.shape, generator=rng, dtype=batch.inputs.dtype).to(batch.inputs.device)
    noise = (noise - mean.to(noise)) / std.to(noise)
    seed = int(torch.randint(2**62, (), generator=rng))

    def transformed(policy: Policy) -> Tensor:
        return Transformation((policy,), mean, std)(batch.inputs, Generator().manual_seed(seed))

    policies: list[Policy] = [tuple(operations) for operations in chosen.tolist()]
    accuracies = [accuracy_score(net, untrained, transformed(policy)) for policy in policies]
    least = median(accuracies) if threshold is None else threshold
    selected = []
    with progress("policies judged", candidates) as advance:
        for policy, accuracy in zip(policies, accuracies, strict=True):
            if accuracy >= least:
                privacy = privacy_scores(net, trained, Batch(transformed(policy), batch.labels), noise)
                selected.append(Judged(policy, float(privacy.mean()), accuracy))
            advance(1)
    return sorted(selected, key=lambda judged: (judged.privacy, judged.policy))


def privacy_scores(net: nn.Module, state: Params, batch: Batch, noise: Tensor, loss: Loss = cross_entropy) -> Tensor:
    """Return (N,) scores of how early a blend of noise and picture has the picture's gradient; low is private.

    Blend i of 0 to 20 is (1 - i/20) noise + i/20 picture. s_i is the cosine of its gradient and the picture's, averaged
    over the parameter tensors. The score is the area under s over i/20, by the trapezoid rule.
    """
    scores = []
    share = torch.linspace(0, 1, STEPS + 1, dtype=noise.dtype, device=noise.device).view(-1, *[1] * (noise.ndim - 1))
    for picture, label, start in zip(batch.inputs, batch.labels, noise, strict=True):
        blends = Batch(start + share * (picture - start), label.expand(STEPS + 1))
        grads = per_example_gradients(net, state, blends, loss)
        cosines = [cosine_similarity(value.flatten(1), value[-1:].flatten(1)) for value in grads.values()]
        scores.append(torch.trapezoid(torch.stack(cosines).mean(0), dx=1 / STEPS))
    return torch.stack(scores)


def accuracy_score(net: nn.Module, state: Params, inputs: Tensor) -> float:
    """Return an estimate of how well a network will learn from the examples, without training (Mellor et al. 2020).

    The score is high if the network treats different examples differently. J has one row per example: the gradient of
    the sum of its logits with respect to its pixels. v are the eigenvalues of the correlation matrix of the rows. The
    score is - sum ln(v + k) + 1 / (v + k), k = 1e-5.
    """
    function = Functional(net, training=False, device=inputs.device)
    params, others = split(net, {name: value.to(inputs.device) for name, value in state.items()})
    leaf = inputs.detach().clone().requires_grad_()
    (slopes,) = torch.autograd.grad(function(params | others, leaf).sum(), leaf)
    return eigenvalue_score(torch.corrcoef(slopes.flatten(1).double()))


def eigenvalue_score(correlations: Tensor) -> float:
    """Return the score of a correlation matrix; a correlation with an example of zero gradient counts as 0."""
    values = torch.linalg.eigvalsh(correlations.nan_to_num(0, 0, 0)).clamp_min(0) + LEAST
    return -float((values.log() + 1 / values).sum())
