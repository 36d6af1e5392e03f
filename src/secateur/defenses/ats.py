"""ATS: the client transforms its pictures, so that what comes back is not what they were."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.catalogue import method
from secateur.defenses.ats_operations import OPERATIONS
from secateur.errors import WrongInput
from secateur.interfaces import Transform

Policy = tuple[int, ...]  # numbers of operations, applied one after the other
CHOSEN = "3-1-7/43-18-18"  # by the authors' own search, for ResNet20 on CIFAR-100
SEARCH = "search"
CONVNET = "21-13-3/7-4-15"  # for their ConvNet on CIFAR-100


@method("defense", "ats", "dgp", acts_on="inputs", adaptive=())
@dataclass(frozen=True)
class AutomaticTransformationSearch:
    """Trains on transformed pictures, by a policy drawn anew for each of them (ATS, Gao et al. 2021).

    Acts on: the inputs. A policy is up to three of 50 fixed operations (defenses/ats_operations.py), written
    `3-1-7`; several are parted by `/`, and each picture gets one of them, as likely as any other. Whether an operation
    such as a shift goes one way or the other is drawn too. The default is what the authors' search chose for ResNet20
    on CIFAR-100; with `ats:policies=search` secateur invert finds policies for its own network first: of `candidates`
    random ones those whose accuracy score is at least `threshold`, and of these the two that show least. A
    reconstruction is compared with the picture that was used (ATS-R) and with the raw one (ATS-T).
    """

    policies: str | int = CHOSEN  # a number alone is a policy of one operation; search: found before the run
    candidates: int = 1600  # of the search
    threshold: float | None = None  # of the search, the authors' is -85; None: what half of the candidates reach

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise WrongInput("candidates", f"{self.candidates} is not allowed; give a whole number from 1")
        if self.policies != SEARCH:
            read_policies(str(self.policies))

    def transform(self, mean: Tensor, std: Tensor) -> Transform:
        """The transform of inputs (pixels - mean) / std, with (C, 1, 1) mean and std."""
        if self.policies == SEARCH:
            how = "give the policies that it finds, or use secateur invert, which searches before it attacks"
            raise WrongInput("defense ats", f"policies=search is not possible here; {how}")
        return Transformation(read_policies(str(self.policies)), mean, std)


@dataclass(frozen=True, eq=False)
class Transformation:
    """Gives every picture of a batch one of some policies."""

    policies: tuple[Policy, ...]
    mean: Tensor
    std: Tensor

    def __call__(self, inputs: Tensor, rng: Generator) -> Tensor:
        """The transformed pictures; nothing is read back from the device."""
        mean, std, count = self.mean.to(inputs), self.std.to(inputs), len(inputs)
        levels = ((inputs * std + mean) * 255).round().clamp(0, 255).long()
        longest = max(map(len, self.policies))
        signs = torch.randint(2, (max(longest, 1), count), generator=rng, device=rng.device).to(inputs.device) * 2 - 1
        which = torch.randint(len(self.policies), (count,), generator=rng, device=rng.device).to(inputs.device)
        made = levels
        for number, policy in enumerate(self.policies):
            made = torch.where((which == number)[:, None, None, None], applied(policy, levels, signs), made)
        return (made.to(inputs) / 255 - mean) / std


def applied(policy: Policy, levels: Tensor, signs: Tensor) -> Tensor:
    """Levels (N, C, H, W) after a policy's operations; `signs` (operations, N) say which way each goes."""
    for number, sign in zip(policy, signs, strict=False):
        levels = OPERATIONS[number](levels, sign)
    return levels


def read_policies(text: str) -> tuple[Policy, ...]:
    """Policies from text.

    Example:
        >>> read_policies("3-1-7/43-18-18")
        ((3, 1, 7), (43, 18, 18))
    """
    try:
        found = tuple(tuple(int(number) for number in policy.split("-")) for policy in text.split("/"))
    except ValueError:
        raise WrongInput("policies", f"{text!r} is not readable; write for example {CHOSEN}") from None
    highest = len(OPERATIONS) - 1
    if wrong := [number for policy in found for number in policy if number > highest]:
        raise WrongInput("policies", f"operation {wrong[0]} is not allowed; there are those from 0 to {highest}")
    return found


def write_policies(policies: tuple[Policy, ...]) -> str:
    """The text that `read_policies` reads."""
    return "/".join("-".join(map(str, policy)) for policy in policies)
