"""PPB: pair-based posterior balancing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from secateur.catalogue import method
from secateur.defenses import AGAINST_TRAINING
from secateur.errors import check_number

STRONGEST = f"{AGAINST_TRAINING}; on updates adaptive=loss"


@method("defense", "ppb", "samia_ppb", acts_on="loss", adaptive=("loss",), strongest=STRONGEST)
@dataclass(frozen=True)
class PairBasedPosteriorBalancing:
    """Cross-entropy plus the divergence between the ranked posteriors of paired examples (samia_ppb Eq. 6).

    Equation: `L = mean CE + strength * mean over pairs of KL(R(p_2) || R(p_1)); R sorts a posterior`.

    Acts on: the loss of fine-tuning. Batches are shuffled, so an example of the first half and one of the second half
    are a random pair without replacement. In an odd batch the last example has no pair. Both terms are means here, so
    the divergence weighs twice as much as in Eq. 6 divided by the batch size B, which sums over B / 2 pairs.

    A client may train with it too (`secateur invert`): its update is then the gradient of this loss, which an attacker
    knows (adaptive=loss) or takes for that of the cross-entropy.
    """

    strength: float = 4.0  # lambda; the paper tries 1, 2, 4, 8, 16

    def __post_init__(self) -> None:
        check_number("strength", self.strength, "[0, inf)")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return mean cross-entropy + lambda * mean over pairs of KL(R(second) || R(first)), gradient through both."""
        half = logits.shape[0] // 2
        ranked = log_softmax(logits, 1).sort(1, descending=True).values  # (B, K) log R(f(x))
        first, second = ranked[:half], ranked[half : 2 * half]
        divergence = (second.exp() * (second - first)).sum() / max(half, 1)
        return cross_entropy(logits, labels) + self.strength * divergence
