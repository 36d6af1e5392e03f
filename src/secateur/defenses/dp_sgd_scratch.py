"""DP-SGD from the first step, so that its guarantee covers the original's training too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.catalogue import method
from secateur.defenses.dp_sgd import ALONE, OPACUS, DpSgd
from secateur.defenses.norms import grouped
from secateur.errors import WrongInput
from secateur.interfaces import Loss
from secateur.recipe import Fitted, Progress, Recipe, Task


@method("defense", "dp-sgd-scratch", "samia_ppb", acts_on="training", combines=False, reason=ALONE, requires=OPACUS)
@dataclass(frozen=True)
class DpSgdScratch(DpSgd):
    """Trains the original and fine-tunes it by DP-SGD, with GroupNorm for BatchNorm (beyond samia_ppb 6.3.1).

    Acts on: training and fine-tuning, both by `fit_many`, on the network that `structure` makes. The guarantee composes
    both phases. A mask made of the weights alone costs nothing more; one made of members' gradients (snip, grasp) is
    not covered.
    """

    def structure(self, net: nn.Module) -> nn.Module:
        """The network with GroupNorm in the place of BatchNorm; its other layers and weights are kept.

        Give it a new network: weights that were trained on the members would not be covered.
        """
        return grouped(net)

    def fit_many(
        self,
        net: nn.Module,
        tasks: Sequence[Task],
        recipe: Recipe,
        *,
        loss: Loss = cross_entropy,
        way: str = "auto",
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, Fitted]]:
        """As `training.fit_many`, for the original and for the pruned model alike."""
        if any(isinstance(module, _BatchNorm) for module in net.modules()):
            raise WrongInput("model", "has BatchNorm, which dp-sgd-scratch cannot train; use what structure(net) gives")
        return super().fit_many(net, tasks, recipe, loss=loss, way=way, progress=progress)

    @property
    def covers(self) -> str:
        """What the guarantee is about."""
        return "training and fine-tuning, with GroupNorm in place of BatchNorm"
