"""SGI: Sparse Gradient Inversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from secateur.attacks.inversion.gi import GIPriPrune
from secateur.catalogue import method


@method(
    "inversion",
    "sgi",
    "priprune",
    threat="an honest-but-curious server that receives pruned weights and knows the network, the batch size and the "
    "client's learning rate and number of local steps",
    active=False,
    demo={"iterations": 150, "learning_rate": 0.1},
)
@dataclass(frozen=True)
class SGI(GIPriPrune):
    """SGI (PriPrune, 2024, Algorithm 2): reads the pruning mask from the weights and matches (w - w_i) * mask.

    Cosine and TV as IG, rate .01, 10 000 iterations, labels optimised with the picture. The trial's gradient is whole,
    as the algorithm has it; adaptive=mask masks it too and recovers far more. A gradient shows no pruned weights; it is
    matched as it is.

    follows=true leaves out, inside a federation, what was 0 in the client's last update: the server was there, and a
    weight that was withheld and kept at home comes back with all that was saved up in it.
    """

    target: Literal["update", "unpruned"] = "unpruned"
    follows: bool = False
