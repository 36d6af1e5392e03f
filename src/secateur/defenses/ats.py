"""ATS: the client transforms its pictures, so that a reconstruction differs from the raw pictures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.catalogue import method
from secateur.defenses.ats_operations import OPERATIONS
from secateur.errors import WrongInput
from secateur.interfaces import Transform

Policy = tuple[int, ...]  # indices into OPERATIONS, applied in this order
CHOSEN = "3-1-7/43-18-18"  # result of the authors' search for ResNet20 on CIFAR-100
SEARCH = "search"
CONVNET = "21-13-3/7-4-15"  # the same for their ConvNet on CIFAR-100


@method("defense", "ats", "dgp", acts_on="inputs", adaptive=())
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
        if self.candidates < 1:
            raise WrongInput("candidates", f"{self.candidates} is not allowed; give a whole number from 1")
        if self.policies != SEARCH:
            read_policies(str(self.policies))

    def transform(self, mean: Tensor, std: Tensor) -> Transform:
        """Return the transform of inputs (pixels - mean) / std; mean and std are (C, 1, 1)."""
        if self.policies == SEARCH:
            how = "give the policies that it finds, or use secateur invert, which searches before it attacks"
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
            transformed = torch.where(chosen, applied(policy, levels, signs), transformed)
        return (transformed.to(inputs) / 255 - mean) / std


def applied(policy: Policy, levels: Tensor, signs: Tensor) -> Tensor:
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
        raise WrongInput("policies", f"{text!r} is not readable; write for example {CHOSEN}") from None
    highest = len(OPERATIONS) - 1
    if wrong := [number for policy in policies for number in policy if number > highest]:
        raise WrongInput("policies", f"operation {wrong[0]} is not allowed; there are those from 0 to {highest}")
    return policies


def write_policies(policies: tuple[Policy, ...]) -> str:
    """Return the text that `read_policies` parses."""
    return "/".join("-".join(map(str, policy)) for policy in policies)
