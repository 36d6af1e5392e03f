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
    demo={"iterations": 90, "learning_rate": 0.1},
)
@dataclass(frozen=True)
class SGI(GIPriPrune):
    """SGI (PriPrune, 2024, Algorithm 2): reads the pruning mask from the weights and matches (w - w_i) * mask.

    The objective is cosine and TV as in IG, with rate .01 and 10 000 iterations; labels are optimised with the picture.
    The trial's gradient is not masked, as in the algorithm; adaptive=mask masks it too and recovers far more. A
    gradient update shows no pruned weights and is matched unmasked.

    follows=true leaves out, inside a federation, weights that were 0 in the client's last update. A client keeps the
    changes of a withheld weight, so its next upload also contains the changes of earlier rounds.

    magnitudes=true reads the squared gradients that PruneFL's clients also send. It compares the size of every entry,
    and the sign of those that were sent.

    Equation: `min over x, y of 1 - cos(g(x, y), (w - w_i) * mask) + a_TV TV(x); mask = [w_i != 0]`.
    """

    target: Literal["update", "unpruned"] = "unpruned"
    magnitudes: bool = False
