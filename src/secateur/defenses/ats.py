"""ATS: the client transforms its pictures, so that a reconstruction differs from the raw pictures."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from secateur.catalogue import method
from secateur.defenses.ats_operations import OPERATIONS
from secateur.errors import WrongInput, check_whole
from secateur.functional import Functional, split
from secateur.inference import per_example_gradients
from secateur.interfaces import Batch, Loss, Params, Transform
from secateur.progress import progress
from secateur.seeding import draw_seed

Policy = tuple[int, ...]  # indices into OPERATIONS, applied in this order
CHOSEN = "3-1-7/43-18-18"  # result of the authors' search for ResNet20 on CIFAR-100
SEARCH = "search"
CONVNET = "21-13-3/7-4-15"  # the same for their ConvNet on CIFAR-100
OPERATIONS_PER_POLICY = 3  # operations per policy
STEPS = 20  # from noise to the picture, so 21 blends
LEAST = 1e-5  # k, added to the eigenvalues


@method(
    "defense",
    "ats",
    "dgp",
    acts_on="inputs",
    adaptive=(),
    strongest="the plain attack: it finds the transformed picture, and no mode undoes a transform that is drawn anew",
)
@dataclass(frozen=True)
class AutomaticTransformationSearch:
    """Trains on transformed pictures, by a policy drawn anew for each of them (ATS, Gao et al. 2021).

    Acts on: the inputs. A policy is up to three of 50 fixed operations (defenses/ats_operations.py), written `3-1-7`.
    Several policies are separated by `/`, and each picture gets one of them with equal probability. The direction of an
    operation such as a shift is random too. The default is the result of the authors' search for ResNet20 on CIFAR-100.

    With `ats:policies=search`, secateur invert first searches policies for its own network. It draws `candidates`
    random policies and keeps those with an accuracy score of at least `threshold`. The two most private of these are
    used. A reconstruction is compared with the transformed picture (ATS-R) and with the raw one (ATS-T).
    """

    policies: str | int = CHOSEN  # a single number is a policy of one operation; search: determined before the run
    candidates: int = 1600  # random policies that the search draws
    threshold: float | None = None  # of the search, the authors' is -85; None: the median of the candidates

    def __post_init__(self) -> None:
        check_whole("candidates", self.candidates)
        if self.policies != SEARCH:
            read_policies(str(self.policies))

    def transform(self, mean: Tensor, std: Tensor) -> Transform:
        """Return the transform of inputs (pixels - mean) / std; mean and std are (C, 1, 1)."""
        if self.policies == SEARCH:
            how = "use secateur invert, which searches before it attacks, or set the policies that it reports"
            raise WrongInput("defense ats", f"policies=search is not possible here; {how}")
        return Transformation(read_policies(str(self.policies)), mean, std)


@dataclass(frozen=True, eq=False)
class Transformation:
    """Transform that applies one of several policies to every picture of a batch."""

    policies: tuple[Policy, ...]
    mean: Tensor
    std: Tensor

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """Return the transformed pictures; no value is read back from the device."""
        mean, std, count = self.mean.to(inputs), self.std.to(inputs), len(inputs)
        levels = ((inputs * std + mean) * 255).round().clamp(0, 255).long()
        longest = max(map(len, self.policies))
        signs = torch.randint(2, (max(longest, 1), count), generator=rng, device=rng.device).to(inputs.device) * 2 - 1
        choices = torch.randint(len(self.policies), (count,), generator=rng, device=rng.device).to(inputs.device)
        transformed = levels
        for number, policy in enumerate(self.policies):
            chosen = (choices == number)[:, None, None, None]
            transformed = torch.where(chosen, apply_policy(policy, levels, signs), transformed)
        return (transformed.to(inputs) / 255 - mean) / std


def apply_policy(policy: Policy, levels: Tensor, signs: Tensor) -> Tensor:
    """Return the levels (N, C, H, W) after a policy's operations; `signs` (operations, N) are their directions."""
    for number, sign in zip(policy, signs, strict=False):
        levels = OPERATIONS[number](levels, sign)
    return levels


def read_policies(text: str) -> tuple[Policy, ...]:
    """Parse policies from text.

    Example:
        >>> read_policies("3-1-7/43-18-18")
        ((3, 1, 7), (43, 18, 18))
    """
    try:
        policies = tuple(tuple(int(number) for number in policy.split("-")) for policy in text.split("/"))
    except ValueError:
        raise WrongInput("policies", f"{text!r} is not readable; use for example {CHOSEN}") from None
    highest = len(OPERATIONS) - 1
    if wrong := [number for policy in policies for number in policy if number > highest]:
        raise WrongInput("policies", f"operation {wrong[0]} is not allowed; must be in [0, {highest}]")
    return policies


def write_policies(policies: tuple[Policy, ...]) -> str:
    """Return the text that `read_policies` parses."""
    return "/".join("-".join(map(str, policy)) for policy in policies)


# The search: random triples of operations, scored without a training or an attack ---------------------------------
class ScoredPolicy(NamedTuple):
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
) -> list[ScoredPolicy]:
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
        raise WrongInput("threshold", f"{reach}; must be at most {-batch.size}")
    chosen = torch.randint(len(OPERATIONS), (candidates, OPERATIONS_PER_POLICY), generator=rng)
    noise = torch.rand(batch.inputs.shape, generator=rng, dtype=batch.inputs.dtype).to(batch.inputs.device)
    noise = (noise - mean.to(noise)) / std.to(noise)
    seed = draw_seed(rng)

    def transform_batch(policy: Policy) -> Tensor:
        return Transformation((policy,), mean, std)(batch.inputs, Generator().manual_seed(seed))

    policies: list[Policy] = [tuple(operations) for operations in chosen.tolist()]
    accuracies = [accuracy_score(net, untrained, transform_batch(policy)) for policy in policies]
    least = median(accuracies) if threshold is None else threshold
    selected = []
    with progress("policies judged", candidates) as advance:
        for policy, accuracy in zip(policies, accuracies, strict=True):
            if accuracy >= least:
                privacy = privacy_scores(net, trained, Batch(transform_batch(policy), batch.labels), noise)
                selected.append(ScoredPolicy(policy, float(privacy.mean()), accuracy))
            advance(1)
    return sorted(selected, key=lambda scored: (scored.privacy, scored.policy))


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
